"""Whether an answer is a whole description: no sentence breaks off, and each may follow the last.

What a sentence says is left out: colours, shapes, sizes, places, numbers, motions, times. What is
left of it is its form. A description is whole when it begins, goes on and ends as true ones do. It
may still be wrong about the video.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

from saccade.world.descriptions import NUMBERS, VOICES, describe
from saccade.world.scenes import CELLS, COLORS, SHAPES, TEXTURES, scene

SCENES = 6000  # true descriptions whose forms are taken
Step = tuple[
    str, str
]  # the forms of a sentence and of the next; "" before the first, after the last


def _any(words: Iterator[str] | tuple[str, ...]) -> str:
    return rf"\b(?:{'|'.join(sorted(words, key=len, reverse=True))})\b"


_ROW = "(?:top|middle|bottom)"
_SAID = (
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
_RULES = tuple((re.compile(found, re.IGNORECASE), said) for found, said in _SAID)


def steps(text: str) -> Iterator[Step]:
    """The forms of a text's sentences, each with that of the next."""
    for rule, said in _RULES:
        text = rule.sub(said, text)
    return pairwise(["", *re.split(r"(?<=\.) ", text), ""])


@cache
def _true() -> frozenset[Step]:
    return frozenset(step for seed in range(SCENES) for step in steps(describe(scene(seed))))


def whole(text: str) -> bool:
    """Whether every step of the text occurs in true descriptions."""
    return _true().issuperset(steps(text))
