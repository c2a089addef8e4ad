"""TABED (Lee et al., 2025): every round of real runs, again by plain loops over Algorithm 1."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    noisy,
)
from tabed_by_hand import (
    CHECKS,
    EACH,
    FAMILIES,
    GAMMA,
    METHODS,
    STEPS,
    Rule,
    answer,
    check_prompts,
    distance,
    ensembled,
    failing,
    judged,
    proportional,
    sharpened,
    softmax,
    truth,
    weights_by_hand,
)
from torch import Tensor

from saccade.core.prompt import Prefill, Prompt
from saccade.core.protocols import State
from saccade.core.result import Round
from saccade.core.sampling import Scores
from saccade.drafting.ensemble import EnsembleDrafter, MixtureSession, Weighting
from saccade.drafting.setup import Setup
from saccade.drafting.views.basic import FULL, Several, TextView, replace_media
from saccade.methods import resolve
from saccade.methods.tabed import Equal, Grid, Inverse

pytestmark = pytest.mark.usefixtures("unlimited_drafts")

# -- every round of real runs ----------------------------------------------------------------------

RUNS = [
    *(("qwen2_5_vl", method) for method in METHODS),
    *(
        ("llava_onevision", method)
        for method in (
            "tabed/weights=kl",
            "tabed/weights=kl-1",
            "tabed/weights=tvd-4",
            "tabed/weights=matches",
            "tabed-mtcp",
            "tabed-mtcp/weights=inverse-4",
        )
    ),
]

ONCE = {  # each distance, each kind of window, each way from distances to weights
    *("tabed-mt", "tabed/weights=kl", "tabed/weights=kl-4", "tabed/weights=tvd-1", "tabed-mtcp"),
    *("tabed/weights=matches-16", "tabed/view=full+text+pooled", "tabed-mtcp/weights=softmax-4"),
    *("tabed-mtcp/weights=inverse-4", "tabed-mtcp/weights=inverse-tvd"),
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("family", "method"),
    [pytest.param(*run, marks=() if run[1] in ONCE else pytest.mark.slow) for run in RUNS],
)
def test_every_round_is_algorithm_1(family, method):
    """Claim: in every round the views' prompts and laws, the drafted block and its weights are the
    paper's: equal weights first, then line 3 over all past positions or the last h of them.

    Fails if one prompt row, one law, one drafted token or one weight of a run differs.
    """
    run = answer(family, method)
    for check in CHECKS.values():
        check(run, METHODS[method])
    assert list(run.result.ids) == truth(family)
    accepted = {block.accepted for block in run.blocks}
    assert len(run.blocks) > 6 and len(accepted) > 2
    varied = len(set(run.weights))
    assert varied == 1 if method == "tabed-mt" else varied > 2


def test_the_names_are_the_papers_methods():
    """Claim: ``tabed`` is MT* by KL over all positions, ``tabed-mtcp`` MTCP*, ``tabed-mt`` MT.

    Fails if a name stands for other views, another rule or another gamma.
    """
    names = {name: resolve(name) for name in ("tabed", "tabed-mt", "tabed-mtcp")}
    views = {name: recipe.view.name for name, recipe in names.items()}
    assert views["tabed"] == views["tabed-mt"] == "full+text"
    assert views["tabed-mtcp"] == "full+text+caption+pooled"
    for name, same in (("tabed", "tabed/weights=kl"), ("tabed-mtcp", "tabed-mtcp/weights=inverse")):
        assert names[name].drafter == resolve(same).drafter
        assert names[name].shape == resolve(same).shape


@pytest.mark.representatives(1)
@pytest.mark.parametrize("positions", ["accepted", "drafted", "own too"])
def test_control_other_positions_give_other_weights(positions):
    """Control: which positions count shows in the trajectories.

    Leaving out the refused token's, counting what hangs on it, or asking the views about the
    target's own token after a block that was accepted to its end: each fails on a real run.
    """
    for method in ("tabed/weights=kl", "tabed/weights=kl-4", "tabed-mtcp/weights=inverse-4"):
        run, rule = answer("qwen2_5_vl", method), METHODS[method]
        assert max(block.accepted for block in run.blocks[:-1]) == GAMMA
        wrong = weights_by_hand(replace(rule, positions=positions), run.blocks)
        off = torch.tensor(run.weights) - torch.tensor(wrong)
        assert off.abs().max() > 1e-2


# -- departures that must show ---------------------------------------------------------------------


class Certain(Grid):
    """All weight on the first view to begin with."""

    def weights(self, state: Any) -> tuple[float, ...]:
        return super().weights(state) if state.positions else (1.0, 0.0)


class Backward(Grid):
    """D(q || p)."""

    def fold(self, state: Any, p: Any, q: Any) -> Any:
        shares = [j / STEPS for j in range(STEPS + 1)]
        mixed = torch.stack([((1 - s) * q[0].exp() + s * q[1].exp()).log() for s in shares])
        terms = (mixed.exp() * (mixed - p)).nan_to_num(0.0)
        return state.add(terms.sum(-1).T[..., None], self.window)


class Tempered(Grid):
    """Distances between the laws that were sampled from."""

    def fold(self, state: Any, p: Any, q: Any) -> Any:
        temperature = SAMPLED["temperature"]
        p, q = (p / temperature).log_softmax(-1), (q / temperature).log_softmax(-1)
        return super().fold(state, p, q)


class Unended(EnsembleDrafter):
    """Learns from what was drafted, refused or not."""

    def fold(self, state: State, round: Round) -> State:
        everything = replace(round.verdict, path=tuple(range(len(round.tree))))
        return super().fold(state, replace(round, verdict=everything))


class Geometric(MixtureSession):
    """A weighted mean of logits."""

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        mixed = super()._mix(request, parts)
        weights = self.weights[request]
        rows = [
            sum(w * row.log_softmax(-1) for w, row in zip(weights, each, strict=True) if w)
            for each in zip(*(part.rows for part in parts), strict=True)
        ]
        return replace(mixed, rows=rows)


class OneForAll(MixtureSession):
    """The first view's rows in every view's place."""

    def _mix(self, request: int, parts: tuple[Scores, ...]) -> Scores:
        return super()._mix(request, (parts[0],) * len(parts))


class Averaged(EnsembleDrafter):
    """Mixes in another way."""

    mixture: type[MixtureSession] = Geometric

    def __init__(self, team: Setup, weighting: Weighting) -> None:
        super().__init__(team, weighting)
        self._mixture = self.mixture(self.session, len(self._views))


class Shared(Averaged):
    """Reads the first view alone."""

    mixture = OneForAll


@dataclass(frozen=True)
class Dropped(TextView):
    """T with nothing in the videos' place."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return replace_media(prompt, ((),))


@dataclass(frozen=True)
class Repeated(TextView):
    """T with a newline for each visual token."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        return replace_media(
            prompt, (prefill.replacement_texts["newline"][0] * prompt.visual_tokens,)
        )


@dataclass(frozen=True)
class Standing(TextView):
    """T with what is left at the positions it had beside the video."""

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        text = super().__call__(prefill, prompt)
        where = prompt.positions[:, text.places]
        return replace(text, positions=where, next_position=prompt.next_position)


def beside(text: TextView) -> Several:
    return Several((FULL, text))


KL, KL4 = "tabed/weights=kl", "tabed/weights=kl-4"

SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 0, "seed": 3}

WRONG: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    "weights frozen at equal": (KL, {"weighting": Equal()}, {"weights"}),
    "window ignored": (KL4, {"weighting": Grid()}, {"weights"}),
    "D(q || p)": (KL, {"weighting": Backward()}, {"weights"}),
    "laws after temperature": (KL, {"weighting": Tempered(), **SAMPLED}, {"weights"}),
    "first block not equal": (KL, {"weighting": Certain()}, {"weights"}),
    "past the refusal": (KL, {"make": Unended}, {"weights"}),
    "logits averaged": (KL, {"make": Averaged}, {"blocks"}),
    "one view's row for both": (KL, {"make": Shared}, {"laws", "blocks", "weights"}),
    "no newline": (KL, {"view": beside(Dropped("text", "newline"))}, {"prompts", "laws"}),
    "a newline a token": (KL, {"view": beside(Repeated("text", "newline"))}, {"prompts", "laws"}),
    "positions kept": (KL, {"view": beside(Standing("text", "newline"))}, {"prompts", "laws"}),
}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("wrong", list(WRONG))
def test_control_a_departure_from_the_paper_is_refused(wrong):
    """Control: each check fails on a real run of what it is there to refuse, and the same run
    without the departure passes. A departure in the weights alone fails by the weights alone.
    """
    method, change, expected = WRONG[wrong]
    rules = {name: value for name, value in change.items() if name in SAMPLED}
    assert failing(answer("qwen2_5_vl", method, **rules), METHODS[method]) == set()
    failures = failing(answer("qwen2_5_vl", method, **change), METHODS[method])
    if expected in ({"weights"}, {"blocks"}):
        assert failures == expected
    assert expected <= failures


# -- sampling --------------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@EACH
@pytest.mark.parametrize(
    "rules",
    [
        {"temperature": 1.0, "top_k": 0},
        {"temperature": 0.6, "top_k": 12},
    ],
    ids=["plain", "ruled"],
)
def test_sampled_blocks_are_drawn_from_the_mixture(family, rules):
    """Claim: q in the tree is the mixture's law with the sampling rules applied to it, once; the
    token is its draw at the request's noise; weights come from the raw laws all the same.

    Fails if rules are applied to each view, or not at all, or if q is not what was drawn from.
    """
    rules = {"do_sample": True, "seed": 4, **rules}
    run = answer(family, KL, **rules)
    assert failing(run, METHODS[KL]) == set()
    assert len({block.weights for block in run.blocks}) > 1
    twice = 0.0
    for round, block in zip(run.rounds, run.blocks, strict=True):
        for row, q in enumerate(round.tree.q):
            each = [sharpened(torch.softmax(view[row], -1), rules) for view in block.q]
            before = sum(w * law for w, law in zip(block.weights, each, strict=True))
            assert q is not None and isinstance(before, Tensor)
            twice = max(twice, float((q - before).abs().max()))
    assert (twice > 1e-2) == (rules["temperature"] != 1), "rules on each view are another law"


# -- the fold --------------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize("rules", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", [KL, "tabed/weights=matches-4", "tabed-mtcp"])
def test_the_weights_replay_from_recorded_rounds_without_a_model(method, rules):
    """Claim: what an ensemble learns is a fold over rounds: replayed it gives every weight again,
    from the rounds and from plain numbers written out and read back.

    Fails if the drafter hides a state, if a fold changes a state in place, or keeps laws.
    """
    run = answer("qwen2_5_vl", method, **rules)
    drafter, weighting = run.drafter, resolve(method).drafter.weighting
    for _ in range(2):
        state, states = drafter.start(), []
        for round in run.rounds:
            states.append(state)
            state = drafter.fold(state, round)
        assert [weighting.weights(learnt) for _, learnt in states] == run.weights
    taped = []
    for block in run.recorded:
        rows = judged(METHODS[method], block)
        p = block.p[rows].double().log_softmax(-1)
        q = block.q[:, rows].double().log_softmax(-1)
        taped.append((p.tolist(), q.tolist()))
    learnt = weighting.start(len(run.views))
    for (p, q), weights in zip(json.loads(json.dumps(taped)), run.weights, strict=True):
        assert weighting.weights(learnt) == pytest.approx(weights, abs=1e-9)
        learnt = weighting.fold(
            learnt,
            torch.tensor(p, dtype=torch.double),
            torch.tensor(q, dtype=torch.double),
        )
        window = weighting.window
        assert len(learnt.recent) <= (window or 0), "sums are carried, never laws"
        assert learnt.total.shape[0] == (STEPS + 1 if isinstance(weighting, Grid) else 4)


def steady(views: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Laws at one position, [position vocab] and [view position vocab]: view i is i + 1 off."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(1, 40, generator=generator, dtype=torch.double)
    noise = torch.randn(views, 1, 40, generator=generator, dtype=torch.double)
    scale = 0.4 * (1 + torch.arange(views)[:, None, None])
    return p.log_softmax(-1), (p + scale * noise).log_softmax(-1)


@pytest.mark.parametrize(("literal", "law"), [(False, proportional), (True, softmax)])
def test_weights_drift_by_the_literal_softmax_alone(literal, law):
    """Claim: e sums up. In proportion to 1/e, as the published code weighs, the weights stay put,
    however long the answer; softmax(1/e) as printed goes to equal ones though the views stay as
    different as they were, unless a window is set.

    Position by position against the law of 1/(n d). Fails if e were a mean, or a window a whole.
    """
    p, q = steady(4)
    each = [distance("kl", p[0].exp().tolist(), view[0].exp().tolist())[0] for view in q]
    spreads: dict[int | None, list[float]] = {}
    for window in (None, 4):
        rule = Inverse("kl", window, as_printed=literal)
        state = rule.start(4)
        spreads[window] = []
        for position in range(1, 121):
            state = rule.fold(state, p, q)
            counted = position if window is None else min(position, window)
            expected = law([1 / (counted * d) for d in each])
            assert rule.weights(state) == pytest.approx(expected, abs=1e-6)
            spreads[window].append(max(expected) - min(expected))
    whole, recent = spreads[None], spreads[4]
    assert whole[0] > 0.5
    if literal:
        assert all(b <= a for a, b in pairwise(whole))
        assert whole[119] < 0.03 < 0.1 < recent[119] == recent[3] == whole[3]
    else:
        assert [*whole, *recent] == pytest.approx([whole[0]] * 240)


@pytest.mark.extra
def test_real_weights_drift_the_same_way():
    """Claim: the drift is what real runs show: by the literal softmax over the whole history the
    spread of the weights ends near nothing; over four positions, or in proportion to 1/e, it does
    not, on the very same answer.
    """

    def spread(method: str) -> list[float]:
        return [max(w) - min(w) for w in answer("llava_onevision", method, count=64).weights]

    drifting, *others = (
        spread(f"tabed-mtcp{rule}") for rule in ("/weights=softmax", "/weights=softmax-4", "")
    )
    late = slice(len(drifting) // 2, None)
    for other in others:
        assert max(drifting[late]) < min(0.05, max(other[late]) / 3)


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@EACH
@pytest.mark.parametrize("method", ["tabed", "tabed-mtcp/weights=inverse-4"])
def test_requests_of_a_batch_are_weighted_each_by_itself(family, method):
    """Claim: three requests at once are three alone: ids, prompts, and every block's weights.

    Fails if rows of views and requests are mixed up, or if one request learns from another.
    """
    model, inputs, noise = FAMILIES[family]
    target, draft = model(0), noisy(model, 0, noise)
    many = [inputs(seed) for seed in range(3)]
    together = ensembled(method, target, draft, many, count=20)
    for one, run in zip(many, together, strict=True):
        (alone,) = ensembled(method, target, draft, [one], count=20)
        assert run.result.ids == alone.result.ids
        check_prompts(run, METHODS.get(method, METHODS[KL]))
        for ours, theirs in zip(run.weights, alone.weights, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4 if "inverse" in method else 1e-6)
    trajectories = {tuple(run.weights) for run in together}
    assert len(trajectories) == 3, "requests that learn alike prove little"


# -- a target that drafts for itself ---------------------------------------------------------------


@EACH
def test_the_target_as_its_own_draft(family):
    """Claim: two full views of the target's own are never refused; beside text alone all weight
    goes to the full one, and then nothing is refused either.

    Fails if mixing changes a law, or if the weights follow anything but the laws.
    """
    model, inputs, _ = FAMILIES[family]
    (twins,) = ensembled("tabed/view=full+full", model(0), model(0), [inputs(0)], count=26)
    assert [block.accepted for block in twins.blocks[:-1]] == [GAMMA] * 4
    (run,) = ensembled("tabed", model(0), model(0), [inputs(0)], count=25)
    assert run.weights[0] == (0.5, 0.5) and len(run.weights) > 3
    assert set(run.weights[1:]) == {(1.0, 0.0)}
    assert {block.accepted for block in run.blocks[1:-1]} == {GAMMA}


# -- the trained pair ------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_trained_pair(pair: Path):
    """Claim: on the pair that comes with the package, with its own tokenizer, every round is
    Algorithm 1 as well. Fails where a trained model's sharp laws or its vocabulary matter.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    target, draft = (
        AutoModelForImageTextToText.from_pretrained(
            pair / name, dtype=torch.float32, local_files_only=True
        ).eval()
        for name in ("target", "draft")
    )
    processor = AutoProcessor.from_pretrained(pair / "target", local_files_only=True)
    content = [{"type": "video"}, {"type": "text", "text": "Describe the video."}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    noise = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 255, (4, 3, 112, 112), generator=noise, dtype=torch.uint8)
    inputs = dict(
        processor(text=[prompt], videos=[frames], do_sample_frames=False, return_tensors="pt")
    )
    for method in ("tabed", "tabed-mtcp/weights=inverse-4"):
        rule = Rule("grid") if method == "tabed" else Rule("inverse", "kl", 4)
        (run,) = ensembled(method, target, draft, [inputs], count=32, tokenizer=processor.tokenizer)
        assert failing(run, rule) == set()
        assert len(set(run.weights)) > 2
