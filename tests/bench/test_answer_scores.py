"""Claims about how right an answer is, against numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from saccade.bench import text_scores


def test_exact_compares_words() -> None:
    """Claim: an answer is exact where its words are those of one of the right answers.

    Fails if case or punctuation count, or if a part of an answer will do.
    """
    assert text_scores.exact_match("It is RED.", ["it is blue", "it is red"]) == 1.0
    assert text_scores.exact_match("It is red, I think", ["It is red."]) == 0.0
    assert text_scores.exact_match("red", ["reddish"]) == 0.0
    assert text_scores.exact_match("", ["red"]) == 0.0
    assert text_scores.exact_match("red", []) == 0.0
    assert text_scores.exact_match("猫。", ["猫"]) == 1.0
    assert text_scores.exact_match("猫", ["犬"]) == 0.0
    assert text_scores.exact_match("", ["?"]) == 0.0


@pytest.mark.parametrize(
    ("answer", "right"),
    [("B", True), ("(B)", True), ("The answer is B.", True), ("B. a red box", True)]
    + [("C", False), ("Blue", False), ("", False), ("C. Not B", False)]
    + [("A red box. The answer is B.", True), ("It must be B", True)]
    + [("b", True), ("(b)", True), ("b.", True), ("So the Answer is: (b)", True)]
    + [("The answer is b", True), ("ANSWER IS B", True), ("b red box", False)]
    + [("B, I think.", True), ("B\nOption A is wrong.", True), ("It is B because I saw it", True)]
    + [("I'd say B", True), ("A man, not B", True), ("A man is shown.", False)]
    + [("B because the ball in C is blue", True), ("B - not C", True), ("(C) not B", False)]
    + [
        ("B's box is C", False),
        ("X-ray, so B", True),
        ("T-shirt: it is B", True),
        ("The answer is X-ray, so (B)", True),
    ]
    + [("B, not the X-ray", True), ("It is B, no X-ray", True)],
)
def test_the_letter_is_the_one_given_as_the_answer(answer: str, right: bool) -> None:
    """Claim: a choice is right by the letter it begins with, or says the answer is, or ends on.

    Fails if a letter inside a word counts, or the article of a sentence.
    """
    assert text_scores.option_letter_match(answer, ["B"]) == float(right)
    assert text_scores.option_letter_match(answer, ["B. a red box"]) == float(right)


@pytest.mark.parametrize("answer", ["", "no idea", "The answer is a cat", "A cat. I see it."])
def test_an_answer_without_a_letter_is_wrong(answer: str) -> None:
    """Claim: an answer that names no option is wrong, whatever the right answers are.

    Fails if nothing equals an empty right answer, or if an article counts as option A.
    """
    assert text_scores.option_letter_match(answer, [""]) == 0.0
    assert text_scores.option_letter_match(answer, ["A", ""]) == 0.0


def test_rouge_by_hand() -> None:
    """Claim: ROUGE-L is the F (beta 1.2) of the longest common subsequence of words.

    Fails if precision and recall change places, or a substring is asked for.
    """
    # the cat . on the mat: 5 of 6 and 5 of 6
    same = text_scores.rouge_l("the cat sat on the mat", ["The cat is on the mat."])
    assert same == pytest.approx(5 / 6)
    # a red box: P = 3/3, R = 3/5; (1 + 1.44) P R / (R + 1.44 P) = 1.464 / 2.04
    assert text_scores.rouge_l("a red box", ["a big red box moves"]) == pytest.approx(1.464 / 2.04)
    # the other way about: P = 3/5, R = 1; 1.464 / (1 + 0.864)
    assert text_scores.rouge_l("a big red box moves", ["a red box"]) == pytest.approx(1.464 / 1.864)
    assert text_scores.rouge_l("one two three", ["four five"]) == 0.0


def test_meteor_by_hand() -> None:
    """Claim: METEOR is P R / (.9 P + .1 R), less half the cube of chunks over matches.

    Fails if alpha is turned around or chunks are miscounted.
    """
    # 3 of 3 in one chunk: 1 * (1 - .5 (1/3)^3)
    assert text_scores.meteor("the cat sat", ["the cat sat"]) == pytest.approx(1 - 0.5 / 27)
    # a | red box: P = 1, R = .6, F = .6 / .96; two chunks of three matches
    score = text_scores.meteor("a red box", ["a big red box moves"])
    assert score == pytest.approx(0.6 / 0.96 * (1 - 0.5 * 8 / 27))
    # the other way about: P = .6, R = 1, F = .6 / .64
    score = text_scores.meteor("a big red box moves", ["a red box"])
    assert score == pytest.approx(0.6 / 0.64 * (1 - 0.5 * 8 / 27))


def test_meteor_minds_the_order() -> None:
    """Claim: the same words in another order are worth less.

    Fails if the penalty is left out: both would be 1 but for it.
    """
    # sat -> 2, cat -> 1, the -> 0: three chunks of three matches, half is lost
    assert text_scores.meteor("sat cat the", ["the cat sat"]) == pytest.approx(0.5)
    assert text_scores.meteor("sat cat the", ["the cat sat"]) < text_scores.meteor(
        "the cat", ["the cat sat"]
    )


def test_meteor_matches_stems_after_words() -> None:
    """Claim: stems match what no equal word is left for.

    Fails without stems (one match of three), or if stems match before equal words do.
    """
    # the=the, box~boxes, moves~moved: one chunk
    score = text_scores.meteor("the box moves", ["the boxes moved"])
    assert score == pytest.approx(1 - 0.5 / 27)
    # equal words cross (box -> 1, boxes -> 0): two chunks of two, a half;
    # by stems first they would lie side by side: 1 - .5/8
    assert text_scores.meteor("box boxes", ["boxes box"]) == pytest.approx(0.5)
    assert text_scores.meteor("the box", ["the fox"]) < text_scores.meteor("the box", ["the boxes"])


@pytest.mark.parametrize("pair", ["squares square", "moved move", "boxes box", "circling circle"])
def test_forms_of_one_word_have_one_stem(pair: str) -> None:
    """Claim: the plural and the past of a word match it. Fails for words that end in "e"."""
    first, second = pair.split()
    assert text_scores.stem(first) == text_scores.stem(second) != text_scores.stem("red")


def test_each_word_matches_once() -> None:
    """Claim: a word of the right answer is used up by the word it matched.

    Fails if saying "red" four times makes four matches.
    """
    # 1 match: P = 1/4, R = 1/2, F = .125 / (.225 + .05); one chunk of one match
    score = text_scores.meteor("red red red red", ["red box"])
    assert score == pytest.approx(0.125 / 0.275 * 0.5)


@pytest.mark.parametrize("measure", [text_scores.rouge_l, text_scores.meteor])
def test_empty_and_best(measure: Callable[[str, Sequence[str]], float]) -> None:
    """Claim: nothing said is worth 0, and the best of several right answers counts.

    Fails if right answers are averaged, the first one decides, or an empty text divides by zero.
    """
    assert measure("", ["a red box"]) == measure("?!", ["a red box"]) == 0.0
    assert measure("a red box", [""]) == measure("a red box", []) == measure("", [""]) == 0.0
    near, far = "a red box moves", "nothing of the kind"
    alone = measure("a red box", [near])
    assert measure("a red box", [far, near]) == measure("a red box", [near, far]) == alone > 0
    assert measure("a red box", [far, near, "a red box"]) == measure("a red box", ["a red box"])


def test_identity() -> None:
    """Claim: ROUGE-L of a text with itself is 1, METEOR's short of it by its one chunk."""
    text = "One two three four five, six seven eight nine ten."
    assert text_scores.rouge_l(text, [text]) == pytest.approx(1.0)
    assert text_scores.meteor(text, [text]) == pytest.approx(1 - 0.5 / 1000)


def test_score_fits_the_task() -> None:
    """Claim: captions are judged by words, choices by letters, short answers exactly.

    Fails if a task is judged by another's measure, or where nothing is known to be right.
    """
    assert text_scores.score("choice", "B.", ["B"]) == {"accuracy": 1.0}
    assert text_scores.score("short", "B.", ["B, or C"]) == {"accuracy": 0.0}
    for task in ("caption", "open"):
        assert text_scores.score(task, "a box", ["a box"]) == {
            "rouge_l": pytest.approx(1.0),
            "meteor": pytest.approx(1 - 0.5 / 8),
        }
    assert text_scores.score("caption", "a box", []) == {}
    assert text_scores.score("text", "x = 1", ["x = 1"]) == {}  # code and sums: not by their words
