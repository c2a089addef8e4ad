"""Claims about tokens that a grammar allows: the same in a drafted block as one by one."""

from __future__ import annotations

import itertools
import json
import re

import pytest
import torch
from helpers import (
    TEXT,
    Letters,
    answered,
    input_for,
    noisy,
    qwen25,
    stubbed,
    truth,
)

import saccade
from saccade.core.tree import Tree, chain

pytestmark = pytest.mark.usefixtures("unchecked")

INPUTS = input_for("qwen2_5_vl")

LENGTH = INPUTS["input_ids"].shape[1]


DIGITS, LETTERS = "0123456789", "abcdefgh"


def continues(text: str) -> str:
    """The characters that may follow within a JSON object of short strings and numbers."""
    if not text:
        return "{"
    if text[-1] == "}" and text.count('"') % 2 == 0:
        return "\n"  # the end
    quotes, last = text.count('"'), text[-1]
    if quotes % 2:  # inside a string
        inside = text[text.rindex('"') + 1 :]
        return '"' if len(inside) >= 3 else LETTERS + ('"' if inside else "")
    key = text[max(text.rfind("{"), text.rfind(",")) :].count(":") == 0
    if last in "{,":
        return '"'
    if key:  # a key has just ended
        return ":"
    if last == ":":
        return '"' + DIGITS[1:]
    number = re.search(r"\d+$", text)
    return ",}" + (DIGITS if number and len(number[0]) < 3 else "")


def json_only(batch: int, ids: torch.Tensor) -> list[int]:
    """``continues`` as a function of ids, for ``prefix_allowed_tokens_fn``."""
    text = "".join(map(chr, ids[LENGTH:].tolist()))
    return [ord(letter) for letter in continues(text)]


def wild(round: int) -> Tree:
    """Drafts that break the grammar or keep it, as chance has it."""
    generator = torch.Generator().manual_seed(round)
    letters = '{}",:123abc\n'
    picks = torch.randint(len(letters), (5,), generator=generator).tolist()
    return chain([ord(letters[pick]) for pick in picks])


GRAMMAR = dict(prefix_allowed_tokens_fn=json_only, eos_token_id=ord("\n"), max_new_tokens=60)


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    "method", ["ar", *(f"sd/shape=chain-{size}" for size in (1, 2, 4, 8)), "sd-tree", "specvlm"]
)
def test_a_grammar_gives_generates_answer_at_every_block_size(method):
    """Claim: an automaton that reads the text so far (JSON) allows the same tokens in a block as
    one by one: the answer is generate's, and parses if it ended.

    Fails if the mask of one node is used at another, or the path is not part of what it reads.
    """
    with torch.no_grad():
        expected = qwen25().generate(**INPUTS, do_sample=False, **GRAMMAR)[0, LENGTH:].tolist()
    result = saccade.run(
        qwen25(), INPUTS, draft=noisy(qwen25, 0, 0.05), method=method, do_sample=False, **GRAMMAR
    )
    assert list(result.ids) == expected and result.fallback_reason is None
    assert len(set(expected)) > 5


def test_no_draft_gets_past_a_grammar():
    """Claim: wild drafts and sampled answers alike: every prefix is one the automaton allows, and
    what ended is JSON. Fails if one token of a block is judged without the mask.
    """
    ended = 0
    draft = noisy(qwen25, 0, 0.05)
    wilds = stubbed(lambda request, text, round: wild(round))
    for seed, method in itertools.product(range(5), (wilds, "sd", "sd-tree")):
        result = saccade.run(
            qwen25(), INPUTS, draft=draft, method=method, seed=seed,
            do_sample=True, temperature=2.0, **GRAMMAR,
        )  # fmt: skip
        text = "".join(map(chr, result.ids))
        for end, letter in enumerate(text):
            assert letter in continues(text[:end])
        if result.finish_reason == "stop":
            json.loads(text)
            ended += 1
    assert ended >= 5


def test_letters_are_ids():
    """Claim: the automaton's letters are ids of text here, so that it can allow them at all."""
    assert all(ord(letter) < TEXT for letter in '{}",:\n' + DIGITS + LETTERS)
    assert Letters().decode([ord("{")]) == "{"
    assert answered("qwen2_5_vl", "ar", count=1).ids == truth("qwen2_5_vl")[:1]
