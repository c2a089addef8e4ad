"""Decides whether an answer is a whole description: no sentence breaks off or is out of order.

A sentence's form is what remains when colours, shapes, sizes, places, numbers, motions and times
are replaced by their kinds: "a red circle in the centre" becomes "a COLOUR SHAPE in the PLACE". A
description is whole if the forms of every two sentences in a row follow each other in some true
description too, and if some true description begins, and some ends, with the same form as it does.
The description may still be wrong about the video.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from saccade.world.descriptions import NUMBERS, VOICES, describe
from saccade.world.scenes import CELLS, COLORS, SHAPES, TEXTURES, scene

TRUE_SCENES = 6000  # Scenes whose true descriptions are the reference.
Step = tuple[str, str]
"""The forms of a sentence and of the next; "" for the beginning and the end of the text."""


def _any(words: Iterator[str] | tuple[str, ...]) -> str:
    return rf"\b(?:{'|'.join(sorted(words, key=len, reverse=True))})\b"


_ROW = "(?:top|middle|bottom)"
# (pattern, what replaces it), applied in this order: later patterns contain earlier replacements.
_FORMS = (
    (_any(CELLS), "PLACE"),
    (_any(COLORS), "COLOUR"),
    (_any(SHAPES), "SHAPE"),
    (_any(TEXTURES), "TEXTURE"),
    (_any(tuple(word for voice in VOICES for word in (voice.small, voice.large))), "SIZE"),
    (_any(NUMBERS[1:]) + r"( \w+?)s?\b", r"NUMBER\1"),
    (r"\bonly \w+\.", "only NUMBER."),
    (rf"\bno row is empty|the {_ROW}(?: row is| and {_ROW} rows are) empty", "ROWS"),
    (r"\b(?:left|right|up|down) to the PLACE|\bin a loop", "WAY"),
    (r"(a COLOUR SHAPE in the PLACE)(?:, \1)*(?: and \1)?", "THINGS"),
    (r"\bkeeps its place|keep their place", "STAY"),
    (r"\bgo(?:es)? to another place", "GO"),
    (r"\b(?:are|is)\b", "IS"),
)
_RULES = tuple((re.compile(pattern, re.IGNORECASE), form) for pattern, form in _FORMS)


def sentence_steps(text: str) -> Iterator[Step]:
    """Yields the steps of a text: the form of each sentence, with that of the next.

    The first step is from the text's beginning to its first sentence, and the last to its end.
    """
    for rule, form in _RULES:
        text = rule.sub(form, text)
    return pairwise(["", *re.split(r"(?<=\.) ", text), ""])


@cache
def _true_steps() -> frozenset[Step]:
    texts = (describe(scene(seed)) for seed in range(TRUE_SCENES))
    return frozenset(step for text in texts for step in sentence_steps(text))


def is_whole(text: str) -> bool:
    """Returns whether every step of the text occurs in true descriptions."""
    return _true_steps().issuperset(sentence_steps(text))
