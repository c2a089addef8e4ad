"""Scores of an answer's text: exact match of short answers, ROUGE-L and METEOR of captions.

Nothing has to be downloaded for them. METEOR (Banerjee and Lavie 2005) therefore aligns equal words
and equal stems here, but not synonyms, for which WordNet would be needed. That makes it a little
lower than the published METEOR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

ROUGE_BETA = 1.2  # Above 1, so recall counts more; the value of the COCO caption evaluation.
# METEOR is the weighted harmonic mean of precision and recall, less a penalty for words in another
# order. The penalty grows with the number of chunks, which are runs of matched words that are
# adjacent in both texts.
METEOR_RECALL_WEIGHT = 0.9
MAX_CHUNK_PENALTY = 0.5  # Where every matched word is a chunk by itself.
CHUNK_PENALTY_EXPONENT = 3.0
# What must follow a letter that may also be a word, such as "a": punctuation or the end of a line,
# as in "a)".
_END_OF_OPTION = r"(?:[).:,]|\s*$|\s*\n)"
# What must follow a capital that needs no punctuation after it. The capital must not begin a longer
# word, such as "B's" or "X-ray".
_END_OF_WORD = r"\b(?!['’]|-\w)"
ENGLISH_ENDINGS = ("ing", "edly", "ed", "es", "ly", "s")


def split_words(text: str) -> list[str]:
    """Returns the lower-case words and numbers of a text."""
    return re.findall(r"[^\W_]+", text.lower())


def exact_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the answer has the same words as one of the right answers, else 0.

    An answer without words is wrong.
    """
    words = split_words(answer)
    return float(bool(words) and any(words == split_words(each) for each in references))


def option_letter_match(answer: str, references: Sequence[str]) -> float:
    """Returns 1 if the answer chooses the letter of a right option, else 0.

    The letter is the one that the answer begins with ("B. A dog"), else the one after "answer is"
    ("the answer is B"), else the last capital that stands alone ("It must be B"). An answer without
    a letter is wrong.

    A letter may also be a word of the sentence, or a part of one ("X-ray"). So a small letter
    counts only at the beginning and after "answer is", and only if punctuation or the end of a line
    follows. "A" and "I" count at the beginning only if punctuation or the end of a line follows,
    and as the last capital only if no word follows.
    """
    letter = _option_letter(answer)
    return float(letter is not None and letter in {each.strip().upper()[:1] for each in references})


def _option_letter(answer: str) -> str | None:
    """Returns the capital of the option that an answer chooses; None where it chooses none."""
    # "A" and "I" are words too, so they are not among the capitals [B-HJ-Z].
    at_start = rf"\s*\(?(?:([B-HJ-Z]){_END_OF_WORD}|([A-Za-z]){_END_OF_OPTION})"
    after_answer_is = rf"(?i:\banswer is):?\s+\(?(?:([A-Z]){_END_OF_WORD}|([a-z]){_END_OF_OPTION})"
    match = re.match(at_start, answer) or re.search(after_answer_is, answer)
    if match:
        return next(filter(None, match.groups())).upper()
    lone_capital = rf"(?<!\w-)\b([B-HJ-Z]|[AI](?!['’]?\s*\w)){_END_OF_WORD}"
    capitals: list[str] = re.findall(lone_capital, answer)
    return capitals[-1] if capitals else None


def rouge_l(answer: str, references: Sequence[str]) -> float:
    """Returns ROUGE-L for the best of the right answers: the F measure of precision and recall, by
    the longest common subsequence of words."""
    return max((_rouge(split_words(answer), split_words(each)) for each in references), default=0.0)


def _rouge(answer_words: Sequence[str], right_words: Sequence[str]) -> float:
    common = _longest_common(answer_words, right_words)
    if not common:
        return 0.0
    precision = common / len(answer_words)
    recall = common / len(right_words)
    return (1 + ROUGE_BETA**2) * precision * recall / (recall + ROUGE_BETA**2 * precision)


def _longest_common(answer_words: Sequence[str], right_words: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence, by bits (Hyyro 2004).

    The usual table has a row for each word of the answer and a column for each right word. A cell
    has the length for the words up to its own, which is 0 or 1 more than in the column before. An
    integer holds a row: bit j is 0 where the length grows in column j, else 1. A few operations
    compute a row from the one before, and the number of zeros in the last row is the length.
    """
    positions = dict.fromkeys(right_words, 0)  # For each word, the bits of its places.
    for position, word in enumerate(right_words):
        positions[word] |= 1 << position
    row = -1  # All bits are 1, since nothing is in common with an answer of no words.
    for word in answer_words:
        matches = row & positions.get(word, 0)
        row = (row + matches) | (row - matches)
    column_bits = (1 << len(right_words)) - 1  # A row has more bits than columns.
    return len(right_words) - (row & column_bits).bit_count()


def meteor(answer: str, references: Sequence[str]) -> float:
    """Returns METEOR with exact and stem matches, for the best of the right answers.

    It is below 1 even for equal texts, which count as one chunk: 0.98 for three words.
    """
    return max(
        (_meteor(split_words(answer), split_words(each)) for each in references), default=0.0
    )


def _meteor(answer_words: Sequence[str], right_words: Sequence[str]) -> float:
    matched = _align_words(answer_words, right_words)
    if not matched:
        return 0.0
    precision = len(matched) / len(answer_words)
    recall = len(matched) / len(right_words)
    weight = METEOR_RECALL_WEIGHT
    average = precision * recall / (weight * precision + (1 - weight) * recall)
    # A new chunk begins where two matched words do not follow each other directly in both texts.
    chunks = 1 + sum(
        after != (before[0] + 1, before[1] + 1)
        for before, after in zip(matched, matched[1:], strict=False)
    )
    penalty = MAX_CHUNK_PENALTY * (chunks / len(matched)) ** CHUNK_PENALTY_EXPONENT
    return average * (1 - penalty)


def _align_words(answer_words: Sequence[str], right_words: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the positions of matched words in both texts, in the order of the answer.

    A match is (position in the answer, position in the right answer). Equal words are matched
    first, and then words of equal stem among the rest. Each word is matched once, with the nearest
    candidate that is left.
    """
    partners: dict[int, int] = {}
    for key in (str, stem):  # A word itself, and then its stem.
        free: dict[str, list[int]] = {}
        for position in set(range(len(right_words))).difference(partners.values()):
            free.setdefault(key(right_words[position]), []).append(position)
        for position, word in enumerate(answer_words):
            candidates = free.get(key(word)) if position not in partners else None
            if candidates:
                partners[position] = min(candidates, key=lambda each: (abs(each - position), each))
                candidates.remove(partners[position])
    return sorted(partners.items())


def stem(word: str) -> str:
    """Returns the word without one of the commonest English endings and without a last "e".

    An ending stays if fewer than three letters would be left, as in "bed". A last "e" stays in a
    word of at most three letters, as in "use".
    """
    for ending in ENGLISH_ENDINGS:
        if word.endswith(ending) and len(word) > len(ending) + 2:
            word = word[: -len(ending)]
            break
    return word.removesuffix("e") if len(word) > 3 else word


def score(task: str, answer: str, references: Sequence[str]) -> Mapping[str, float]:
    """Returns the scores of an answer, by name, that fit a task.

    The task is "choice" (an option's letter), "short" (a few words), "text" (which is not scored)
    or anything else, which is scored as a caption. Without references there are no scores. The
    result is cached, because the methods of a run usually write the same answer.
    """
    return _score(task, answer, tuple(references))


@lru_cache(maxsize=4096)
def _score(task: str, answer: str, references: tuple[str, ...]) -> Mapping[str, float]:
    if not references or task == "text":
        return {}
    if task == "choice":
        return {"accuracy": option_letter_match(answer, references)}
    if task == "short":
        return {"accuracy": exact_match(answer, references)}
    return {"rouge_l": rouge_l(answer, references), "meteor": meteor(answer, references)}
