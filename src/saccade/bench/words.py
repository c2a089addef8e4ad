"""How right an answer is: exact match of short answers, ROUGE-L and METEOR of captions.

Small and offline on purpose: METEOR here aligns equal words and equal stems, without the synonyms
of WordNet (Banerjee and Lavie 2005), and is a little lower than with them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

BETA = 1.2  # of ROUGE-L's F, as in its caption evaluation
ALPHA, GAMMA, POWER = 0.9, 0.5, 3.0  # METEOR's weights
ENDINGS = ("ing", "edly", "ed", "es", "ly", "s")


def words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def exact(answer: str, right: Sequence[str]) -> float:
    """1 where the words are those of a right answer, else 0."""
    return float(any(words(answer) == words(each) for each in right))


def letter(answer: str, right: Sequence[str]) -> float:
    """1 where the option's letter is right: the one the answer begins with or says the answer is,
    else its last lone capital."""
    found = re.match(r"\s*\(?([A-Z])(?:[).:]|\s*$)", answer) or re.search(
        r"answer is:? \(?([A-Z])\b", answer
    )
    said = found[1] if found else next(iter(re.findall(r"\b([A-Z])\b", answer)[::-1]), "")
    return float(said in {each.strip().upper()[:1] for each in right})


def rouge_l(answer: str, right: Sequence[str]) -> float:
    """F of the longest common subsequence of words, with the best of the right answers."""
    return max((_rouge(words(answer), words(each)) for each in right), default=0.0)


def _rouge(own: Sequence[str], other: Sequence[str]) -> float:
    common = _longest_common(own, other)
    if not common:
        return 0.0
    precision, recall = common / len(own), common / len(other)
    return (1 + BETA**2) * precision * recall / (recall + BETA**2 * precision)


def _longest_common(own: Sequence[str], other: Sequence[str]) -> int:
    places = dict.fromkeys(other, 0)
    for place, word in enumerate(other):
        places[word] |= 1 << place
    row = -1  # of the table, a bit a column: 0 where it is one more than to the left (Hyyro 2004)
    for word in own:
        alike = row & places.get(word, 0)
        row = (row + alike) | (row - alike)
    return len(other) - (row & ((1 << len(other)) - 1)).bit_count()


def meteor(answer: str, right: Sequence[str]) -> float:
    """METEOR with exact and stem matches, with the best of the right answers."""
    return max((_meteor(words(answer), words(each)) for each in right), default=0.0)


def _meteor(own: Sequence[str], other: Sequence[str]) -> float:
    matched = _aligned(own, other)
    if not matched:
        return 0.0
    precision, recall = len(matched) / len(own), len(matched) / len(other)
    average = precision * recall / (ALPHA * precision + (1 - ALPHA) * recall)
    chunks = 1 + sum(
        (after[0] != before[0] + 1) or (after[1] != before[1] + 1)
        for before, after in zip(matched, matched[1:], strict=False)
    )
    return average * (1 - GAMMA * (chunks / len(matched)) ** POWER)


def _aligned(own: Sequence[str], other: Sequence[str]) -> list[tuple[int, int]]:
    """Pairs of places, each word used once, equal words before equal stems, near ones first."""
    taken: dict[int, int] = {}
    for key in (str, stem):
        free: dict[str, list[int]] = {}
        for place in set(range(len(other))).difference(taken.values()):
            free.setdefault(key(other[place]), []).append(place)
        for place, word in enumerate(own):
            alike = free.get(key(word)) if place not in taken else None
            if alike:
                taken[place] = min(alike, key=lambda each: (abs(each - place), each))
                alike.remove(taken[place])
    return sorted(taken.items())


def stem(word: str) -> str:
    """The word without its commonest English endings."""
    for ending in ENDINGS:
        if word.endswith(ending) and len(word) > len(ending) + 2:
            return word[: -len(ending)]
    return word


def score(task: str, answer: str, right: Sequence[str]) -> Mapping[str, float]:
    """The measures that fit a task; none where we do not judge.

    Remembered: every method of a run writes the same answer.
    """
    return _score(task, answer, tuple(right))


@lru_cache(maxsize=4096)
def _score(task: str, answer: str, right: tuple[str, ...]) -> Mapping[str, float]:
    if not right or task == "text":
        return {}
    if task == "choice":
        return {"accuracy": letter(answer, right)}
    if task == "short":
        return {"accuracy": exact(answer, right)}
    return {"rouge_l": rouge_l(answer, right), "meteor": meteor(answer, right)}
