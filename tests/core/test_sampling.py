"""Claims about laws, draws and the noise behind them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import TableSession, chi_square
from transformers.generation import logits_process as hf

from saccade.core.noise import ROLES, uniform
from saccade.core.sampling import BrokenLaw, Sampling, Scores, draw, prob
from saccade.core.tree import ROOT, Tree, chain

LOGITS = torch.tensor([1.0, 3.0, 3.0, -2.0, 0.5])


def test_greedy_is_the_first_of_the_likeliest():
    """Claim: a tie goes to the lowest id, as torch's arg-max has it. Fails on last-wins."""
    assert Sampling().law(LOGITS, []) == 1
    assert Sampling().law(LOGITS.flip(0), []) == 2


@pytest.mark.parametrize(
    "rules",
    [
        (),
        (hf.TemperatureLogitsWarper(0.7),),
        (hf.TemperatureLogitsWarper(0.7), hf.TopKLogitsWarper(3)),
        (hf.TopPLogitsWarper(0.8),),
        (hf.RepetitionPenaltyLogitsProcessor(1.7), hf.TopKLogitsWarper(4)),
    ],
)
def test_a_law_is_hugging_faces_processors_then_softmax(rules):
    """Claim: the law is softmax(rules(logits)) in rule order. Fails if a rule is lost or twice."""
    ids, scores = torch.tensor([[1, 4]]), LOGITS[None].clone()
    for rule in rules:
        scores = rule(ids, scores)
    law = Sampling(True, rules).law(LOGITS, [1, 4])
    assert torch.allclose(law, scores[0].softmax(-1))
    assert Sampling(False, rules).law(LOGITS, [1, 4]) == int(scores.argmax())
    assert torch.equal(LOGITS, torch.tensor([1.0, 3.0, 3.0, -2.0, 0.5])), "logits were written to"


def test_only_rules_that_read_ids_are_contextual():
    """Claim: warpers need no ids, penalties do. Fails if a penalty is taken for a warper."""
    assert not Sampling(True, (hf.TemperatureLogitsWarper(0.5), hf.TopPLogitsWarper(0.9))).reads_ids
    assert Sampling(True, (hf.RepetitionPenaltyLogitsProcessor(1.2),)).reads_ids
    assert Sampling(False, (lambda ids, scores: scores,)).reads_ids


def _scores(rules: Sampling) -> Scores:
    rows = [LOGITS, LOGITS.flip(0), LOGITS.roll(1)]
    return Scores(chain([4, 2, 0]), rows, rules, [3, 1], 6, request=2)


def test_penalties_see_prompt_text_and_path_at_every_node():
    """Claim: a rule at a node is given context + the path to it. Fails if any part is missing."""
    seen = []

    def spy(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    scores = _scores(Sampling(False, (spy,)))
    for node in (ROOT, 0, 1):
        scores.law(node)
    assert seen == [[3, 1], [3, 1, 4], [3, 1, 4, 2]]


def test_a_node_the_session_has_not_looked_at_has_no_law():
    """Claim: law is None beyond the rows. Fails if a neighbour's row is used instead."""
    scores = _scores(Sampling())
    assert scores.law(1) is not None and scores.law(2) is None


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("rules", [(), (hf.TopKLogitsWarper(2),)])
def test_every_law_is_the_law_at_each_node(sample, rules):
    """Claim: asked at once for all nodes, laws are those asked one by one, where two tokens are as
    likely too; none beyond the rows; and NaN at a node is nobody's affair who does not ask there.
    Likeliest tokens are looked up at once, of a vocabulary too large to copy one by one."""
    scores = _scores(Sampling(sample, rules))
    tie = torch.tensor([1.0, 3.0, 2.0, 3.0, 3.0])
    scores = replace(scores, rows=[*scores.rows[:2], tie])
    every = scores.every_law()
    for node in (ROOT, 0, 1):
        assert torch.equal(torch.as_tensor(every(node)), torch.as_tensor(scores.law(node)))
    assert every(2) is None and (every == scores.law) is (sample or bool(rules))
    long = replace(scores, rows=[tie.repeat(2**14)] * 3)
    assert long.every_law() == long.law and replace(scores, rows=[]).every_law()(ROOT) is None
    every = replace(scores, rows=[*scores.rows[:2], tie * float("nan")]).every_law()
    assert torch.equal(torch.as_tensor(every(0)), torch.as_tensor(scores.law(0)))
    with pytest.raises(BrokenLaw):
        every(1)


def test_top_is_likeliest_first_and_never_more_than_there_is():
    """Claim: top sorts by raw logits and copes with a small vocabulary."""
    scores = _scores(Sampling())
    assert scores.top(0, 2) == [2, 3] or scores.top(0, 2) == [3, 2]
    assert scores.top(ROOT, 9)[-1] == 3 and len(scores.top(ROOT, 9)) == 5


def test_a_greedy_draft_is_chosen_and_a_sampled_one_carries_its_law():
    """Claim: q is None exactly when nothing was drawn. Fails if a soft law goes with an arg-max."""
    token, q = _scores(Sampling()).draw(0)
    assert (token, q) == (2, None)
    sampled = _scores(Sampling(True, seed=5))
    token, q = sampled.draw(0)
    assert q is not None and torch.equal(q, sampled.law(0))
    assert token == draw(q, uniform(5, 2, "draft", 7, 0, began=6))
    later = replace(sampled, draft_start=3)  # a draft that began three tokens earlier
    assert later.draw(0)[0] == draw(q, uniform(5, 2, "draft", 7, 0, began=3))


def test_a_law_of_nan_is_refused_when_sampling_too():
    """Claim: NaN in one logit is no law, greedy or sampled. Fails if a token comes of it."""
    for sample in (False, True):
        with pytest.raises(BrokenLaw, match="NaN"):
            Sampling(sample).law(torch.tensor([0.0, float("nan"), 1.0]), ())


def test_draw_is_the_quantile_of_the_law():
    """Claim: u in [c_i, c_i+1) gives token i, never one of probability zero, for all u in [0, 1].

    Fails off by one at a border, or if zeros at either end can be drawn.
    """
    law = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    drawn = {u: draw(law, u) for u in (0.0, 0.2499, 0.25, 0.7499, 0.75, 0.999999, 1.0)}
    assert list(drawn.values()) == [1, 1, 3, 3, 4, 4, 4]
    assert draw(7, 0.3) == 7


def test_draws_follow_the_law():
    """Claim: keyed noise through draw gives the law: chi-square over 8,000 draws, alpha 1e-4.

    Power above 0.99 against a law 0.04 away in total variation.
    """
    law = torch.tensor([0.4, 0.1, 0.3, 0.2])
    drawn = [draw(law, uniform(3, 0, "own", i, 0)) for i in range(8000)]
    assert chi_square(torch.bincount(torch.tensor(drawn), minlength=4), law) > 1e-4
    other = torch.tensor([0.36, 0.14, 0.3, 0.2])
    assert chi_square(torch.bincount(torch.tensor(drawn), minlength=4), other) < 1e-4


def test_noise_depends_on_each_of_its_keys_and_on_nothing_else():
    """Claim: (seed, request, role, position, sibling) name a number, whenever it is asked for.

    Fails if a key is ignored (values collide) or if there is state (a second asking differs).
    """
    base = dict(seed=1, request=2, role="draft", position=3, sibling=4)
    others = [dict(base, **{key: 9}) for key in ("seed", "request", "position", "sibling")]
    others += [dict(base, role=role) for role in ROLES if role != "draft"]
    values = [uniform(**keys) for keys in (base, *others)]
    assert len(set(values)) == len(values)
    assert [uniform(**keys) for keys in (base, *others)[::-1]] == values[::-1]
    assert all(0 <= value < 1 for value in values)
    assert uniform(**dict(base, seed=-1)) != uniform(**base)


def test_noise_is_uniform_and_independent_between_neighbouring_keys():
    """Claim: pairs of neighbouring keys fill the unit square evenly (64 cells, 6,400 pairs).

    A correlation between the draft's draw and the accept decision would bend the law of answers.
    """
    for other in (
        lambda i: uniform(0, 0, "accept", i, 0),
        lambda i: uniform(0, 0, "draft", i + 1, 0),
        lambda i: uniform(0, 0, "draft", i, 1),
        lambda i: uniform(1, 0, "draft", i, 0),
    ):
        pairs = [(uniform(0, 0, "draft", i, 0), other(i)) for i in range(6400)]
        cells = torch.tensor([int(a * 8) * 8 + int(b * 8) for a, b in pairs])
        assert chi_square(torch.bincount(cells, minlength=64), torch.full((64,), 1 / 64)) > 1e-4


def test_verification_noise_is_keyed_by_absolute_position():
    """Claim: a token's noise is the same whatever round it falls into. Fails if rounds count."""
    table = {(): torch.zeros(3), **{(a,): torch.zeros(3) for a in range(3)}}
    session = TableSession(table, [Sampling(True, seed=4)])
    ahead = session.score({0: chain([1])})[0].noise("own", 1, 0)
    session.commit({0: [1]})
    assert session.score({0: Tree()})[0].noise("own", 0, 0) == ahead


def test_prob_is_zero_beyond_a_shorter_vocabulary():
    """Claim: prob reads points and vectors, and ids a law does not know have none."""
    assert (prob(3, 3), prob(3, 2)) == (1.0, 0.0)
    assert prob(torch.tensor([0.25, 0.75]), 1) == 0.75
    assert prob(torch.tensor([0.25, 0.75]), 2) == 0.0
