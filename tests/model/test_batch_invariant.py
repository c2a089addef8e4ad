"""Claims about ``exact``: in bf16 and fp16 a drafted answer has the bits of plain decoding."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from helpers import FAMILIES, VOCAB, WORDS, few, input_for, left_padded, llama, noisy, randomize
from helpers import text_input as words_input
from helpers import video_input as seen_input
from torch import Tensor

import saccade
from lab.hardware.flips import count_flips
from lab.training.agreement import unseen_clip
from saccade import inputs as models
from saccade.core.costs import Costs
from saccade.core.errors import MethodError, ModelError
from saccade.core.prompt import Inputs
from saccade.core.round_estimates import FadingMean
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, add, chain
from saccade.drafting.recipe import Recipe, as_chains
from saccade.drafting.shapes.auto import Auto
from saccade.drafting.shapes.fit import Fit, FitState
from saccade.drafting.shapes.policies import Chain
from saccade.methods import METHODS, resolve
from saccade.model import batch_invariant, cuda_graphs
from saccade.model.attention import Step
from saccade.model.backbone import Backbone
from saccade.model.batch_invariant import (
    BLOCK,
    ROWS,
    BatchInvariantSession,
    BatchInvariantStep,
    attend_in_order,
)
from saccade.model.cache import Cache, HeadShape
from saccade.model.segments import Segment
from saccade.model.session import Session

LOW = (torch.bfloat16, torch.float16)
SOME_METHODS = (
    "sd/shape=chain-7",
    "sd/shape=chain-31",
    "specvlm/shape=chain-5",
    "specvlm-self/shape=chain-4",
    "lookup",
    "specvlm/shape=fit",
    # auto, told that drafting costs next to nothing
    replace(resolve("auto/view=full"), shape=Auto(Costs((1, 16), (1.0, 1.0), 0.01))),
)
low = pytest.mark.parametrize("dtype", LOW, ids=str)
HEADS, KV, WIDTH = 4, 2, 24


@cache
def model_of(family: str, dtype: torch.dtype, fused: bool | None = None) -> Backbone:
    return Backbone(copy.deepcopy(FAMILIES[family](0)).to(dtype), fused=fused)


@cache
def draft_of(family: str, dtype: torch.dtype) -> Backbone:
    return Backbone(copy.deepcopy(noisy(FAMILIES[family], 0, 0.05)).to(dtype))


def prompt(family: str, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """A prompt that ends a little before a block of keys does."""
    if family == "llama":
        inputs: Any = words_input(seed, BLOCK - 19)
    elif family == "qwen2_5_vl":
        inputs = seen_input(seed, before=BLOCK - 50)
    else:
        inputs = input_for(family, seed)
    return cast(inputs, dtype)


def cast(inputs: Any, dtype: torch.dtype) -> Inputs:
    return {k: v.to(dtype) if k.startswith("pixel") else v for k, v in inputs.items()}


def answer_with_logits(
    target: Backbone, inputs: Inputs, method: str | Recipe, **settings: Any
) -> tuple[Any, Tensor]:
    """The result, and the target's logits that each token was judged by."""
    settings = {"max_new_tokens": 48, "do_sample": False, **WORDS, **settings}
    rounds = saccade.stream(target, inputs, method=method, **settings)
    logits = []
    for round in rounds:
        above = (ROOT, *round.verdict.path)
        logits += [round.p.logits(above[place]) for place in range(len(round.emitted))]
    (result,) = rounds.results
    assert result.fallback_reason is None
    return result, torch.stack(logits)


# -- whole answers -----------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("fused", "dtype"),
    [
        (None, torch.bfloat16),
        (False, torch.float16),
        pytest.param(None, torch.float16, marks=pytest.mark.slow),
        pytest.param(False, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", few(["qwen2_5_vl", "llama", "llava_onevision"], 1))
def test_a_drafted_answer_has_the_bits_of_plain_decoding(family, fused, dtype):
    """Claim: the same ids as `ar`, and at every token bit-equal logits, whatever was drafted."""
    target, draft = model_of(family, dtype, fused), draft_of(family, dtype)
    inputs = prompt(family, dtype)
    plain, truth = answer_with_logits(target, inputs, "ar", exact=True)
    assert len(set(plain.ids)) > 8, "an answer that repeats itself proves little"
    for method in SOME_METHODS:
        result, logits = answer_with_logits(target, inputs, method, exact=True, draft=draft)
        assert result.ids == plain.ids, method
        assert torch.equal(logits, truth), method
        assert any(round.accepted for round in result.rounds), method


@pytest.mark.representatives(2)
@low
@pytest.mark.parametrize("family", ["qwen2_5_vl", "llama"])
def test_control_without_exact_bits_differ(family, dtype):
    """Control: an ordinary session's logits are not bit-equal where a token was drafted."""
    target, draft, inputs = model_of(family, dtype), draft_of(family, dtype), prompt(family, dtype)
    _, truth = answer_with_logits(target, inputs, "ar")
    _, logits = answer_with_logits(target, inputs, "sd/shape=chain-7", draft=draft)
    least = min(len(truth), len(logits))
    assert not torch.equal(logits[:least], truth[:least])


@pytest.mark.slow
@low
@pytest.mark.parametrize("number", range(2))
def test_the_trained_pair(pair, dtype, number):
    """Claim: so it is with trained weights, on clips they never saw."""
    target, draft = _loaded("shapes", dtype), _loaded("shapes-draft", dtype)
    _, clip, question = unseen_clip(number, 256)
    inputs = models.ask(target, question, clips=[clip])
    settings = {"exact": True, "draft": draft.backbone, "max_new_tokens": 32}
    plain, truth = answer_with_logits(target.backbone, inputs, "ar", **settings)
    for method in ("specvlm/shape=chain-5", "sd/shape=chain-7", "lookup"):
        result, logits = answer_with_logits(target.backbone, inputs, method, **settings)
        assert result.ids == plain.ids and torch.equal(logits, truth), method


@cache
def _loaded(name: str, dtype: torch.dtype) -> models.Loaded:
    return models.load(name, dtype=str(dtype).removeprefix("torch."))


@pytest.mark.extra
@pytest.mark.representatives(1)
@low
def test_in_parallel(dtype):
    """Claim: what is in flight while the target judges changes no bit either."""
    target, draft = model_of("qwen2_5_vl", dtype), draft_of("qwen2_5_vl", dtype)
    inputs = prompt("qwen2_5_vl", dtype)
    plain, truth = answer_with_logits(target, inputs, "ar", exact=True)
    for method in ("hippo", "pearl/shape=chain-3"):
        result, logits = answer_with_logits(target, inputs, method, exact=True, draft=draft)
        assert result.ids == plain.ids and torch.equal(logits, truth), method


@low
def test_a_request_in_a_batch_has_the_bits_it_has_alone(dtype):
    """Claim: requests share no forward of text, so a batch changes no bit."""
    target = model_of("qwen2_5_vl", dtype)
    draft = draft_of("qwen2_5_vl", dtype)
    one, two = prompt("qwen2_5_vl", dtype, 0), prompt("qwen2_5_vl", dtype, 1)
    settings: Any = {"max_new_tokens": 24, "do_sample": False, "exact": True}
    alone = [saccade.run(target, each, method="ar", **settings).ids for each in (one, two)]
    method = "sd/shape=chain-5"
    rounds = saccade.stream(target, left_padded([one, two]), draft=draft, method=method, **settings)
    assert sum(1 for _ in rounds) > 2
    assert [result.ids for result in rounds.results] == alone


@pytest.mark.representatives(1)
@low
def test_turns_of_a_conversation(dtype):
    """Claim: a second turn, whose question waits in front of the first draft, has plain decoding's
    bits; with exact asked for anew, the caches of a turn without it are not gone on from."""
    target, draft = model_of("llama", dtype), draft_of("llama", dtype)
    first = prompt("llama", dtype)
    answers = []
    for method in ("ar", "sd/shape=chain-7", "lookup"):
        with saccade.Conversation(target, draft=draft, method=method, exact=True) as talk:
            result = talk.run(first, max_new_tokens=9)
            ids = torch.cat([first["input_ids"][0], torch.tensor(result.ids), torch.arange(40)])
            second = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
            again = talk.run(second, max_new_tokens=30)
            assert again.reused_tokens > BLOCK - 19
            answers.append((result.ids, again.ids, _root(talk)))
            assert talk.run(second, exact=False, max_new_tokens=2).reused_tokens == 0
    assert all(each[:2] == answers[0][:2] for each in answers)
    assert all(torch.equal(each[2], answers[0][2]) for each in answers)


def _root(talk: saccade.Conversation) -> Tensor:
    assert talk._last_stream is not None and talk._last_stream.batch is not None
    session = talk._last_stream.batch.session
    return session.score({0: Tree()})[0].logits(ROOT)


def test_float32_has_equal_bits_too():
    """Claim: exact may be asked for in fp32, where it does the same."""
    target, inputs = model_of("llama", torch.float32), prompt("llama", torch.float32)
    plain, truth = answer_with_logits(target, inputs, "ar", exact=True)
    for method in SOME_METHODS[:3]:
        draft = draft_of("llama", torch.float32)
        result, logits = answer_with_logits(target, inputs, method, exact=True, draft=draft)
        assert result.ids == plain.ids and torch.equal(logits, truth)
    assert plain.ids == answer_with_logits(target, inputs, "ar")[0].ids


# -- any way through a text --------------------------------------------------------------------


class Unpadded(Session):
    """Sums in order, but as many rows as are asked for."""

    def _step(self, segments: list[Segment]) -> Step:
        (segment,) = segments
        return BatchInvariantStep(segment)


class Unordered(BatchInvariantSession):
    """The right number of rows, and the ordinary attention."""

    def _forward(self, *args: Any, **options: Any) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                batch_invariant, "BatchInvariantStep", lambda segment: self._step([segment])
            )
            return super()._forward(*args, **options)


def along(session: Session, text: list[int], chance: random.Random | None) -> Tensor:
    """Logits at every token of a text that is read one by one, or in drafts of any length that go
    wrong anywhere, scored as they grow."""
    logits: list[Tensor] = []
    while len(logits) < len(text):
        rest = text[len(logits) :]
        size = 0 if chance is None else chance.choice([0, 1, 2, 5, 7, 15, 16, 17, 40])
        right = rest[: min(size, len(rest) - 1)]
        wrong = [] if chance is None else [chance.randrange(VOCAB - 20) for _ in range(3)]
        draft = [*right, *wrong]
        if draft and chance is not None and chance.random() < 0.5:
            session.score({0: chain(draft[: chance.randrange(len(draft))])})
        scores = session.score({0: chain(draft)})[0]
        logits += [scores.logits(node) for node in range(ROOT, len(right))]
        session.commit({0: rest[: len(right) + 1]})
    return torch.stack(logits)


def _begun(kind: Callable[..., Session], dtype: torch.dtype) -> Session:
    target = model_of("llama", dtype)
    session = kind(target, [Sampling()])
    session.prefill(target.prompts(prompt("llama", dtype)))
    return session


TEXT = [random.Random(5).randrange(VOCAB - 20) for _ in range(2 * BLOCK + 30)]


@cache
def one_by_one(kind: Callable[..., Session], dtype: torch.dtype, length: int) -> Tensor:
    """Logits at the text's first tokens, a row at a time."""
    return along(_begun(kind, dtype), TEXT[:length], None)


@pytest.mark.representatives(1)
@low
@pytest.mark.parametrize("seed", few(range(4), 2))
def test_any_way_through_a_text_gives_the_same_bits(dtype, seed, unchecked):
    """Claim: over three blocks of keys, drafts of any length, refused anywhere and scored twice,
    leave the logits of every token as one row at a time gives them. Unwritten rows are NaN here."""
    logits = along(_begun(BatchInvariantSession, dtype), TEXT, random.Random(seed))
    assert torch.equal(logits, one_by_one(BatchInvariantSession, dtype, len(TEXT)))


@pytest.mark.representatives(1)
@low
@pytest.mark.parametrize("kind", [Session, Unpadded, Unordered])
def test_control_each_half_alone_is_not_enough(dtype, kind, unchecked):
    """Control: without the fixed number of rows, or without the order of keys, bits differ."""
    if kind is Unpadded and dtype is torch.float16:
        pytest.skip("products of fp16 happen to be the same for any number of rows on some CPUs")
    logits = along(_begun(kind, dtype), TEXT[:BLOCK], random.Random(0))
    assert not torch.equal(logits, one_by_one(kind, dtype, BLOCK))


@pytest.mark.representatives(1)
@low
@pytest.mark.parametrize("family", few(["qwen2_5_vl", "llama"], 1))
def test_captured_forwards_give_the_same_bits(family, dtype, monkeypatch):
    """Claim: captured forwards, whose number of blocks is that of their size, give the bits of
    ordinary ones: the same ids, and at each token equal logits. Fails if a block more, a row beyond
    the text or the place of a block in memory changes a sum."""
    inputs = prompt(family, dtype)
    settings: dict[str, Any] = {"exact": True, "draft": draft_of(family, dtype)}
    _, ordinary = answer_with_logits(model_of(family, dtype), inputs, SOME_METHODS[0], **settings)
    monkeypatch.setattr(cuda_graphs, "DEVICE_TYPES", ("cpu",))
    target = Backbone(copy.deepcopy(FAMILIES[family](0)).to(dtype))
    for _ in range(2):
        result, captured = answer_with_logits(target, inputs, SOME_METHODS[0], **settings)
        assert torch.equal(ordinary, captured)
    kinds = {kind for kind, _ in target.graphs[target.key_layer_count]._captured}
    assert kinds == {batch_invariant.BATCH_INVARIANT_ATTENTION} and result.timings.captures == 0


def test_a_tree_is_refused_by_the_session():
    """Claim: a branching tree raises rather than breaking the promise."""
    tree = add(add(Tree(), ROOT, 3), ROOT, 4)
    with pytest.raises(MethodError, match="shape=chain-N"):
        _begun(BatchInvariantSession, torch.bfloat16).score({0: tree})


# -- attention ---------------------------------------------------------------------------------


def _rows(length: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of ``length`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, length, WIDTH, generator=generator)
    k, v = torch.randn(2, KV, length, WIDTH, generator=generator)
    return q.to(dtype), k.to(dtype), v.to(dtype)


@pytest.mark.parametrize("at", [0, 1, BLOCK - ROWS, BLOCK - 3, BLOCK, 2 * BLOCK + 7])
def test_it_is_attention(at):
    """Claim: as softmax over the keys up to each row's own, in double, to 1e-6."""
    q, k, v = _rows(at + ROWS, at, torch.float32)
    output = attend_in_order(q[:, at:], k, v, torch.arange(at, at + ROWS), 0.3)
    scores = torch.einsum("hrd,hsd->hrs", q[:, at:].double(), k.double().repeat_interleave(2, 0))
    future = torch.arange(at + ROWS) > torch.arange(at, at + ROWS)[:, None]
    weights = (scores * 0.3).masked_fill(future, float("-inf")).softmax(-1)
    truth = weights @ v.double().repeat_interleave(2, 0)
    assert (output - truth).abs().max() < 1e-6


@low
def test_a_row_depends_on_its_past_alone(dtype):
    """Claim: wherever a forward began, and whatever follows, a row has the same bits; also where
    the cache behind it is larger and holds NaN."""
    length = 2 * BLOCK + 2 * ROWS
    q, k, v = _rows(length, 1, dtype)
    truth: dict[int, Tensor] = {}
    for start in range(BLOCK - 2 * ROWS, BLOCK + ROWS):
        cache = Cache([HeadShape(KV, WIDTH, WIDTH)] * 1, start + ROWS + start % 7, dtype=dtype)
        cache.write(0, 0, k[:, :start], v[:, :start])
        rows = slice(start, start + ROWS)
        step = BatchInvariantStep(Segment(cache, 0, ROWS, start))
        output = step(0, q[:, rows], k[:, rows], v[:, rows], 0.3)
        for row, bits in enumerate(output, start=start):
            assert bits.isfinite().all()
            assert torch.equal(truth.setdefault(row, bits), bits), (start, row)


# -- what is left to the machine ---------------------------------------------------------------


@low
def test_control_a_place_that_matters_is_found(dtype, monkeypatch):
    """Control: a last bit that depends on the place, or on the rows beside, is found and said."""
    target = Backbone(copy.deepcopy(llama(0)).to(dtype))
    before, forward = torch.get_rng_state(), target.forward
    assert batch_invariant.is_batch_invariant(target)
    assert torch.equal(torch.get_rng_state(), before), "it draws from noise of its own"

    def third(*args: Any) -> Tensor:
        hidden = forward(*args)
        hidden[3] *= 1 + 2 * torch.finfo(dtype).eps
        return hidden

    def beside(*args: Any) -> Tensor:
        hidden = forward(*args)
        return hidden / hidden.abs().max()

    for broken in (third, beside):
        monkeypatch.setattr(target, "forward", broken)
        assert not batch_invariant.is_batch_invariant(target)
        with pytest.raises(ModelError, match="cannot be promised on this machine"):
            batch_invariant.require_batch_invariance(target)
    with pytest.raises(ModelError, match="cannot be promised"):
        saccade.stream(target, words_input(), method="ar", exact=True)


def test_it_is_tried_once_for_each_model(monkeypatch):
    """Claim: the trial is remembered, by number of threads."""
    target = Backbone(copy.deepcopy(llama(1)))
    batch_invariant.require_batch_invariance(target)
    monkeypatch.setattr(batch_invariant, "is_batch_invariant", lambda model: False)
    batch_invariant.require_batch_invariance(target)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 97)
    with pytest.raises(ModelError, match="97 threads"):
        batch_invariant.require_batch_invariance(target)


def test_experts_are_refused():
    """Claim: where rows are sorted to experts, their number is not fixed: refused in a sentence."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
    )
    model = randomize(transformers.Qwen3MoeForCausalLM(config), 0)
    with pytest.raises(ModelError, match="mixture of experts"):
        saccade.stream(Backbone(model), words_input(), method="ar", exact=True)


# -- methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", ["sd-tree", "specvlm", "sage", "sage/shape=sage-live", "sd/shape=best-4"]
)
def test_trees_are_refused(method):
    """Claim: a method whose drafts branch is refused by name before any work, with what works."""
    target = model_of("llama", torch.bfloat16)
    with pytest.raises(MethodError, match=f"^{method}: .*shape=chain-N, fit or auto"):
        saccade.stream(target, words_input(), draft=target, method=method, exact=True)


def test_which_shapes_are_chains():
    """Claim: chains, one at a time, paths of best tokens alone, and a fit without its trees."""
    names = ("chain-5", "best-1", "paths-0,0.0,0.0.0", "best-2", "paths-0,1", "tree", "fit")
    shapes = [resolve(f"sd/shape={name}").shape for name in names]
    assert [shape.branches for shape in shapes] == [False] * 3 + [True] * 4
    assert not Fit(()).branches
    fitted = as_chains(resolve("specvlm/shape=fit"))
    assert fitted.shape == Fit(()) and fitted.name == "specvlm/shape=fit"
    assert as_chains(METHODS["ar"]).drafter is METHODS["ar"].drafter
    assert as_chains(resolve("sd/shape=chain-5")).shape == Chain(5)


def test_costs_are_those_of_padded_forwards():
    """Claim: shape fit reckons that 1 to 16 rows cost the same, and 17 as much as 32."""
    costs = Costs((1, 16, 32), (1.0, 4.0, 8.0), 0.1, row_multiple=ROWS)
    assert [costs.verify(rows) for rows in (1, 8, 16, 17, 32)] == [4.0, 4.0, 4.0, 8.0, 8.0]
    longer = Fit((), costs).choose(FitState(FadingMean(9.0, 10.0)))
    assert longer > Fit((), Costs(costs.rows, costs.target, costs.draft)).choose(
        FitState(FadingMean(9.0, 10.0))
    )


# -- flips -------------------------------------------------------------------------------------


@pytest.mark.extra
@pytest.mark.representatives(1)
@low
def test_flips_are_counted(dtype):
    """Claim: rows alone change logits without exact, and none with it."""
    target, inputs = model_of("llama", dtype), prompt("llama", dtype)
    ordinary = count_flips(target, inputs, tokens=48)
    assert ordinary.compared == 48 and 0 <= ordinary.flips <= ordinary.unlike
    assert ordinary.unlike > 0
    assert count_flips(target, inputs, tokens=48, exact=True).unlike == 0
