"""Claims about likeliest tokens that captured forwards compute: they are those of ordinary rows."""

from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch
from helpers import FAMILIES, input_for

from saccade.core.sampling import NO_TOKEN, BrokenLaw, Sampling, Scores
from saccade.core.tree import ROOT, chain
from saccade.drafting.shapes.auto import _law_and_alternatives
from saccade.drafting.shapes.policies import confidence
from saccade.model import likeliest
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import CudaGraphs, capture_new_sizes
from saccade.model.likeliest import LikeliestTokens, Vocabulary, VocabularyTable, top_tokens
from saccade.model.session import Session, score_together

FAMILY = "qwen2_5_vl"


@pytest.fixture(scope="module")
def model() -> Backbone:
    """A model whose forwards are captured as on a GPU."""
    made = Backbone(FAMILIES[FAMILY]())
    made.graphs[made.key_layer_count] = CudaGraphs(made)
    return made


def _session(model: Backbone, captured: bool, **options) -> Session:
    session = Session(model, [Sampling()], cuda_graphs=captured, **options)
    session.prefill(model.prompts(input_for(FAMILY)))
    return session


def _laws(scores: Scores) -> list[int]:
    law = scores.every_law()
    return [law(node) for node in range(ROOT, len(scores.tree))]


def test_laws_of_a_captured_step_are_those_of_an_ordinary_one(model):
    """Claim: with any vocabulary the tokens that a captured forward computes are the arg-max of an
    ordinary forward's clipped logits, one by one and all at once, and rows have -inf for what is
    forbidden. Fails if a token is chosen before the vocabulary is cut, or if another session's
    vocabulary counts."""
    favourites: set[int] = set()
    for _ in range(3):
        options = {"vocab": 180, "banned": sorted(favourites)}
        ordinary, captured = (_session(model, on, **options) for on in (False, True))
        for token in (5, 6, 7):
            trees = {0: chain([token, 9, 11])}
            expected, scores = (each.score(trees)[0] for each in (ordinary, captured))
            assert _laws(scores) == _laws(expected) == [scores.law(n) for n in range(ROOT, 3)]
            one = dict.fromkeys(range(ROOT, 3), 1)
            assert scores.tops(one) == expected.tops(one)
            for mine, theirs in zip(scores.rows, expected.rows, strict=True):
                assert torch.equal(mine.isneginf(), theirs.isneginf())
            capture_new_sizes()
            for session in (ordinary, captured):
                session.commit({0: [token]})
        assert all(scores._has_token(node) for node in range(ROOT, 3)), "nothing was captured"
        favourites |= {*_laws(scores)}


def test_sessions_that_share_a_forward_have_their_own_vocabularies(model):
    """Claim: two sessions in one captured forward choose among their own ids each. Fails if the
    first one's vocabulary counts for both."""
    free = _session(model, True)
    for token in (3, 4):
        free.score({0: chain([token])})
        free.commit({0: [token]})
        capture_new_sizes()
    favourite = free.score({0: chain([5])})[0].law(0)
    sessions = [_session(model, True), _session(model, True, banned=[favourite])]
    for token in (3, 4):
        trees = [(session, {0: chain([token])}) for session in sessions]
        score_together(trees)
        capture_new_sizes()
        for session in sessions:
            session.commit({0: [token]})
    first, second = score_together([(session, {0: chain([5])}) for session in sessions])
    assert first[0]._has_token(0) and second[0]._has_token(0)
    assert first[0].law(0) == favourite != second[0].law(0)


def test_more_vocabularies_than_rows_begin_the_table_again(monkeypatch):
    """Claim: a table that is full is filled anew with what a step needs, and refuses a step that
    needs more than it holds. Fails if a row is overwritten that the step itself needs."""
    monkeypatch.setattr(likeliest, "MAX_VOCABULARIES", 3)
    table = VocabularyTable(6, torch.device("cpu"))
    vocabularies = [Vocabulary(banned=(number,)) for number in range(4)]
    for first, second in ((0, 1), (1, 2), (3, 0)):
        numbers = table.row_numbers([vocabularies[first], vocabularies[second]])
        assert numbers is not None
        logits = table.forbid_(torch.zeros(4, 6), torch.tensor(numbers))
        hidden = [row.isneginf().nonzero().flatten().tolist() for row in logits]
        assert hidden == [[first], [first], [second], [second]]
    assert table.row_numbers(vocabularies) is None
    assert table.row_numbers([Vocabulary()]) == [0]


def test_tokens_outlive_the_memory_that_they_were_in():
    """Claim: tokens that were not read are copied before their memory is written to, also where
    they are sent elsewhere; NaN is no token. Fails if the next forward's tokens are read."""
    memory = top_tokens(torch.tensor([[1.0, 3.0], [float("nan"), 0.0], [5.0, 5.0]]))
    assert memory[:, 0].tolist() == [1, NO_TOKEN, 0]
    tokens, read = LikeliestTokens(memory), LikeliestTokens(memory)
    assert read.read(0).token == 1
    for each in (tokens, read):
        each.preserve()
    memory.zero_()
    for each in (tokens, read, pickle.loads(pickle.dumps(tokens))):
        assert [each.read(row).token for row in range(3)] == [1, NO_TOKEN, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_two_likeliest_tokens_are_those_of_the_softmax(dtype):
    """Claim: the tokens and probabilities are those that sorting a softmax in fp32 gives; a token
    that is forbidden has probability 0. Fails if the runner-up is the token again."""
    logits = (5 * torch.randn(4, 999, generator=torch.Generator().manual_seed(1))).to(dtype)
    logits[3, 1:] = float("-inf")
    expected = logits.float().softmax(-1).topk(2)
    for row, numbers in enumerate(top_tokens(logits).tolist()):
        assert numbers[2:] == pytest.approx(expected.values[row].tolist(), rel=1e-5, abs=1e-12)
        if row < 3 and logits[row].topk(3).values.unique().numel() == 3:
            assert numbers[:2] == expected.indices[row].tolist()
    assert numbers[0] == 0 and numbers[3] == 0


def test_a_step_that_follows_does_not_change_what_was_scored(model):
    """Claim: scores that nobody has read yet give the same tokens after further forwards of their
    size. Fails if they are read from memory that was written to since."""
    session = _session(model, True)
    for token in (3, 4):
        session.score({0: chain([token, 8])})
        session.commit({0: [token]})
        capture_new_sizes()
    first = session.score({0: chain([6, 8])})[0]
    expected = [int(row.argmax()) for row in first.rows]
    session.commit({0: [7]})
    second = session.score({0: chain([9, 10])})[0]
    assert _laws(second) == [int(row.argmax()) for row in second.rows] != expected
    assert _laws(first) == expected


def test_nan_in_a_captured_step_is_refused():
    """Claim: a row with NaN has no law, as in an ordinary forward, and rules other than the arg-max
    do not read the computed tokens."""
    rows = [torch.tensor([float("nan"), 0.0, 1.0]), torch.tensor([0.0, 1.0, 5.0])]
    tokens = LikeliestTokens(top_tokens(torch.stack(rows)))
    reads = [lambda: tokens.read(0), lambda: tokens.read(1)]
    scores = Scores(chain([1]), rows, Sampling(), [], 0, top_readers=reads)
    for law in (scores.law, scores.every_law()):
        with pytest.raises(BrokenLaw):
            law(ROOT)
        assert law(0) == 2
    grammar = Sampling(grammar=lambda ids: torch.tensor([True, True, False]))
    assert Scores(chain([1]), rows, grammar, [], 0, top_readers=reads).law(0) == 1


@pytest.mark.parametrize("runners", [0, 1])
def test_auto_sees_the_same_whoever_computed_it(runners):
    """Claim: what ``auto`` reads of a forward that computed the likeliest tokens is what it reads
    of the logits: token, confidence and alternative. Fails if the runner-up is another one."""
    rows = [*torch.randn(3, 50, generator=torch.Generator().manual_seed(2))]
    tokens = LikeliestTokens(top_tokens(torch.stack(rows)))
    reads = [partial(tokens.read, row) for row in range(3)]
    by_logits = Scores(chain([1, 2]), rows, Sampling(), [], 0)
    computed = Scores(chain([1, 2]), rows, Sampling(), [], 0, top_readers=reads)
    for node in (ROOT, 0, 1):
        token, odds, others = _law_and_alternatives(computed, node, runners)
        expected_token, expected_odds, expected_others = _law_and_alternatives(
            by_logits, node, runners
        )
        assert token == expected_token and odds == pytest.approx(expected_odds)
        assert [other for other, _ in others] == [other for other, _ in expected_others]
        assert confidence(computed, node, None) == pytest.approx(confidence(by_logits, node, None))
