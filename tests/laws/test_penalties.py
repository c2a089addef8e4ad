"""Claims about penalties on generated tokens: the formula, and that drafting changes nothing."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import chi_square
from laws.test_sampler import ALPHA, V, counted, noise, normal, vectorised
from transformers import LogitsProcessor, LogitsProcessorList

import saccade
from saccade.core.errors import OptionError
from saccade.core.sampling import GeneratedTokenPenalties, Sampling, Scores, may_remember
from saccade.core.tree import Tree, add, path
from saccade.inputs import Pair, ask, load_pair

PROMPT, ANSWER = [1, 1, 2], [3, 3, 5]
RULE = GeneratedTokenPenalties(len(PROMPT), presence=0.75, frequency=1.25)


def _formula(logits: torch.Tensor, answer: list[int]) -> torch.Tensor:
    """OpenAI's formula, token by token."""
    lowered = logits.clone()
    for token, count in Counter(answer).items():
        lowered[token] -= count * RULE.frequency + RULE.presence
    return lowered


def _logits(rows: int = 1) -> torch.Tensor:
    return 0.7 * torch.randn(rows, V, generator=torch.Generator().manual_seed(5))


def test_the_formula_is_openais():
    """Claim: a token that was generated n times loses n * frequency + presence, and the prompt's
    tokens lose nothing. Fails if the prompt counts, or presence counts more than once."""
    ids = torch.tensor([[*PROMPT, *ANSWER]])
    (logits,) = RULE(ids, _logits())
    torch.testing.assert_close(logits, _formula(_logits()[0], ANSWER))
    assert logits[1] == _logits()[0, 1] and logits[3] < _logits()[0, 3]
    (unchanged,) = RULE(ids[:, :3], _logits())
    assert torch.equal(unchanged, _logits()[0])
    forbidden = _logits().index_fill(1, torch.tensor([3]), float("-inf"))
    assert RULE(ids, forbidden)[0, 3] == float("-inf")


def test_a_draft_of_fewer_tokens_is_penalised_for_those_it_has():
    """Claim: an answer may hold ids that a draft lacks. Fails if such an id raises or counts for
    another token."""
    (logits,) = RULE(torch.tensor([[*PROMPT, *ANSWER]]), _logits()[:, :4])
    torch.testing.assert_close(logits, _formula(_logits()[0], ANSWER)[:4])


def test_every_node_has_the_penalties_of_its_own_path():
    """Claim: in a tree the law after a node counts the text and the node's path, not its siblings.
    Fails if penalties are computed once for all nodes."""
    tree = add(add(add(Tree(), -1, 3), -1, 6), 0, 6)
    rows = list(_logits(4))
    scores = Scores(tree, rows, Sampling(True, (RULE,)), [*PROMPT, *ANSWER], len(ANSWER))
    for node in (-1, 0, 1, 2):
        below = [tree.tokens[each] for each in path(tree, node)]
        law = torch.softmax(_formula(rows[node + 1], [*ANSWER, *below]), -1)
        torch.testing.assert_close(scores.law(node), law)
    assert not torch.allclose(scores.logits(2) - rows[3], scores.logits(1) - rows[2])
    assert not may_remember(RULE) and Sampling(True, (RULE,)).for_drafts.processors == (RULE,)


@pytest.mark.parametrize("draft", ["drawn", "chosen"])
def test_verified_tokens_follow_the_penalised_law(draft):
    """Claim: of 300,000 tokens drafted under penalties and verified, what stands follows the
    target's penalised law. Control: it is not the law without penalties."""
    target, small = _logits(2)
    rules = Sampling(True, (RULE,))
    ids = [*PROMPT, *ANSWER]
    p, q = (torch.as_tensor(rules.law(logits, ids)) for logits in (target, small))
    tokens = vectorised(p, q, draft, noise(300_000, 7))
    assert chi_square(counted(tokens), normal(torch.softmax(_formula(target, ANSWER), -1))) > ALPHA
    assert chi_square(counted(tokens), normal(torch.softmax(target, -1))) < ALPHA


@pytest.fixture(scope="module")
def models(pair: Path) -> Pair:
    return Pair(*load_pair("shapes", None))


COUNT = 24  # Tokens of an answer.
SETTINGS: dict[str, dict[str, Any]] = {
    "presence": dict(presence_penalty=1.5),
    "frequency": dict(frequency_penalty=0.8),
    "both, negative": dict(presence_penalty=-0.5, frequency_penalty=-1.0),
    "all": dict(presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.3,
                min_new_tokens=20),
}  # fmt: skip


def _run(models: Pair, method: str, **settings: Any) -> Any:
    return saccade.run(
        models.target.backbone,
        ask(models.target, "Describe the video."),
        draft=models.draft_backbone,
        method=method,
        **{"max_new_tokens": COUNT, "do_sample": False, "eos_token_id": [], **settings},
    )


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_drafted_is_plain_and_plain_is_transformers(models, name):
    """Claim: under penalties every method's greedy answer is plain decoding's, which is
    ``generate``'s with its own processors and the formula as another. Fails if a draft's path does
    not count, or a rule is applied in another order."""
    settings = SETTINGS[name]
    plain = _run(models, "ar", **settings)
    assert plain.ids != _run(models, "ar").ids
    for method in ("sd", "specvlm", "sage", "hippo", "lookup"):
        result = _run(models, method, **settings)
        assert result.ids == plain.ids, method
        assert result.fallback_reason is None
    inputs = ask(models.target, "Describe the video.")
    length = inputs["input_ids"].shape[1]

    class Formula(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            rule = {key: settings.get(f"{key}_penalty", 0.0) for key in ("presence", "frequency")}
            lowered = scores.clone()
            for token, count in Counter(input_ids[0, length:].tolist()).items():
                lowered[0, token] -= count * rule["frequency"] + rule["presence"]
            return lowered

    own = {key: settings[key] for key in ("repetition_penalty", "min_new_tokens")
           if key in settings}  # fmt: skip
    model = models.target.backbone.model
    expected = model.generate(
        **inputs, max_new_tokens=COUNT, do_sample=False,
        logits_processor=LogitsProcessorList([Formula()]),
        **({} if "min_new_tokens" in own else {"eos_token_id": None, "pad_token_id": 0}), **own,
    )  # fmt: skip
    if "min_new_tokens" in own:  # There the model's own end is forbidden, and not taken away.
        plain = _run(models, "ar", **{**settings, "eos_token_id": None})
    assert list(plain.ids) == expected[0, length:].tolist()


@pytest.mark.extra
def test_drawn_answers_are_repeated_less(models):
    """Claim: the seed names the answer under penalties too, and a large penalty makes tokens
    repeat less than none does. Fails if sampling leaves the rule out."""
    drawn = dict(do_sample=True, seed=3, temperature=0.7)
    strong = dict(frequency_penalty=2.0, presence_penalty=2.0)
    once, again = (_run(models, "specvlm", **drawn, **strong).ids for _ in range(2))
    assert once == again
    assert len(set(once)) > len(set(_run(models, "specvlm", **drawn).ids))


@pytest.mark.parametrize("value", ["x", float("nan"), True])
def test_a_penalty_that_is_no_number_is_refused(models, value):
    """Claim: it is refused by its name before any work."""
    with pytest.raises(OptionError, match="presence_penalty"):
        _run(models, "ar", presence_penalty=value)


def test_text_with_special_tokens_has_all_but_the_last(models):
    """Claim: ``skip_special_tokens=False`` writes special tokens, but not the end of the answer."""
    tokenizer = models.target.tokenizer
    shared: dict[str, Any] = dict(tokenizer=tokenizer, skip_special_tokens=False, max_new_tokens=80)
    ended = _run(models, "specvlm", **shared, eos_token_id=None)
    assert ended.finish_reason == "stop" and ended.text == tokenizer.decode(ended.ids[:-1])
    endless = _run(models, "specvlm", **shared)
    assert endless.finish_reason == "length" and endless.text == tokenizer.decode(endless.ids)
    assert "<|im_end|>" in endless.text
