"""Sparse-to-Dense (Zhang, Du et al., 2025) and its baselines: what each head keeps, recomputed from
full attention matrices, and the laws drafted over it, by the modules with a mask a head."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from by_hand import (
    Run,
    attention,
    everywhere,
    prefilled,
    queries,
    ranked,
    real,
    share_of,
    sparse_logits,
    text_rows,
    visual_rows,
)
from helpers import (
    IMAGE,
    VIDEO,
    backbone,
    drafter_of,
    frames_input,
    hf_greedy,
    left_padded,
    llama,
    no_seconds,
    onevision,
    qwen2,
    qwen25,
    text_input,
    video_input,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from lab.reference import Oracle
from saccade.core.errors import MethodError
from saccade.core.prompt import Prefill, Prompt, Turn
from saccade.core.result import Round
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.drafting import drafters
from saccade.drafting.drafters import SelfDrafter
from saccade.drafting.shapes.policies import Chain
from saccade.methods import choices, resolve
from saccade.model.session import Session

pytestmark = pytest.mark.usefixtures("unlimited_drafts")

TOTAL, GAMMA, SINKS = 1024, 9, 4
CASES = {
    "qwen2_vl": (qwen2, lambda: no_seconds(video_input(grid=(3, 8, 8)))),
    "qwen2_5_vl": (qwen25, lambda: video_input(1, grid=(2, 8, 10))),
    "llava_onevision": (onevision, lambda: frames_input(frames=9)),
}
FAMILIES = pytest.mark.parametrize("family", list(CASES))


def case(family: str, **more: Any) -> tuple[Any, Any]:
    make, inputs = CASES[family]
    return make(**more), inputs()


# -- what is kept ------------------------------------------------------------------------------


def kept_by_hand(model: Any, prompt: Prompt, count: int) -> list[list[list[int]]]:
    """Sec. 3.2: per layer and KV head, all text and the ``count`` most attended visual rows."""
    groups = model.get_decoder().config.num_key_value_heads
    asking, visual, text = queries(prompt), visual_rows(prompt), text_rows(prompt)
    layers = []
    for matrices in attention(model, prompt):
        weights = matrices.double().tolist()
        size = len(weights) // groups
        heads = []
        for group in range(groups):
            mass = []
            for key in visual:
                summed = 0.0
                for head in range(group * size, (group + 1) * size):
                    for query in asking:
                        summed += weights[head][query][key]
                mass.append(summed / len(asking))
            heads.append(sorted(text + [visual[i] for i in ranked(mass, count)]))
        layers.append(heads)
    return layers


@cache
def run_of(family: str) -> tuple[Run, list[list[list[int]]]]:
    """An answer by ``std``, and what its heads should have kept."""
    run = real("std", *case(family), count=32)
    return run, kept_by_hand(run.target, run.whole, len(visual_rows(run.whole)) // 8)


@FAMILIES
@pytest.mark.parametrize("keep", [None, 0.3])
def test_each_head_keeps_what_the_text_attends_to_in_it(family, keep):
    """Claim: per layer and KV head, the top K of the attention summed over the group and averaged
    over the text after the video, in positional order, text always.

    By a plain loop over the modules' own full attention matrices. Fails on a softmax over visual
    keys, on other queries, on heads mixed up, or on one selection for all.
    """
    model, inputs = case(family)
    prefill = prefilled(model, inputs)
    prompt = prefill.prompt
    seen = len(visual_rows(prompt))
    count = seen // 8 if keep is None else share_of(seen, keep)
    view = resolve("std" if keep is None else f"std/keep={keep}").view
    head_rows = view(prefill, prompt).reading.heads
    assert head_rows is not None
    expected = kept_by_hand(model, prompt, count)
    assert head_rows.tolist() == expected
    different = {tuple(rows) for layer in expected for rows in layer}
    assert len(different) == model.get_decoder().config.num_hidden_layers * 2, "heads must differ"


def test_control_other_readings_of_the_selection_keep_other_rows():
    """Control: the comparison has power against one selection for all heads, for all layers, over
    all text, and over the softmax restricted to visual keys.
    """
    model, inputs = case("qwen2_vl")
    prompt = prefilled(model, inputs).prompt
    visual, count = visual_rows(prompt), 16
    right = [[rows for rows in layer] for layer in kept_by_hand(model, prompt, count)]
    matrices = torch.stack(attention(model, prompt))  # [layer, head, query, key]
    pairs = matrices.view(2, 2, 2, *matrices.shape[2:])

    def top(mass: torch.Tensor) -> list[int]:
        return sorted(text_rows(prompt) + [visual[i] for i in ranked(mass.tolist())[:count]])

    after = pairs[..., queries(prompt), :]
    among = after[..., visual] / after[..., visual].sum(-1, keepdim=True)
    wrong = {
        "one for all heads": [[top(after[i][..., visual].mean((0, 1, 2)))] * 2 for i in range(2)],
        "one for all layers": [[top(after[:, g][..., visual].mean((0, 1, 2))) for g in range(2)]]
        * 2,
        "first head of a group": [
            [top(after[i, g, 0][..., visual].mean(0)) for g in range(2)] for i in range(2)
        ],
        "video asks too": [
            [top(pairs[i, g][..., visual].mean((0, 1))) for g in range(2)] for i in range(2)
        ],
        "softmax over the video": [
            [top(among[i, g].mean((0, 1))) for g in range(2)] for i in range(2)
        ],
    }
    for name, kept in wrong.items():
        assert kept != right, name


def stub(text: int, seen: int, after: int = 2) -> Prompt:
    """A prompt of ``text`` text rows around ``seen`` visual ones; nothing of it is ever read."""
    visual = torch.zeros(text + seen, dtype=torch.bool)
    visual[text - after : text - after + seen] = True
    length = text + seen
    return Prompt(
        full_ids=torch.zeros(length, dtype=torch.long),
        embeds=torch.zeros(length, 1),
        positions=torch.arange(length)[None],
        visual=visual,
        fixed=torch.zeros_like(visual),
        grid=torch.zeros(seen, 4, dtype=torch.long),
        places=torch.arange(length),
        next_position=length,
    )


@settings(max_examples=60)
@given(
    mass=st.lists(st.sampled_from([0.0, 0.25, 0.5]), min_size=24, max_size=24),
    keep=st.sampled_from([0.1, 0.25, 0.5, 1.0]),
)
def test_ties_go_to_the_lower_index(mass, keep):
    """Claim: equal mass keeps the earlier rows, in each head by itself. Fails if a sort is not
    stable, or if a tie in one head is settled by another.
    """
    prompt = stub(5, 8)
    heads = torch.tensor(mass).view(1, 3, 8)
    prefill = Prefill(prompt, None, torch.zeros(1), heads)
    head_rows = resolve(f"std/keep={keep}").view(prefill, prompt).reading.heads
    assert head_rows is not None
    for head in range(3):
        best = ranked(heads[0, head].tolist())[: share_of(8, keep)]
        expected = sorted(text_rows(prompt) + [visual_rows(prompt)[i] for i in best])
        assert head_rows[0, head].tolist() == expected


BUDGETS = [
    (100, 16000),
    (100, 7392),
    (100, 7400),
    (100, 925),
    (100, 924),
    (100, 400),
    (1000, 16000),
    (3, 5),
]


@pytest.mark.parametrize(("text", "seen"), BUDGETS)
@pytest.mark.parametrize("keep", [None, 0.05, 1.0])
def test_the_budget_is_1024_or_an_eighth_or_as_requested(text, seen, keep):
    """Claim: m_t + K = 1024 as in the paper, of a video that fits in it an eighth, never none; a
    keep given by hand wins. Text is never counted out. Fails if the text's share of 1024 is
    forgotten, or a video of 2,048 tokens keeps an eighth as it once did.
    """
    prompt = stub(text, seen)
    prefill = Prefill(prompt, None, torch.zeros(1), torch.rand(1, 1, seen))
    pruned = resolve("std" if keep is None else f"std/keep={keep}").view(prefill, prompt)
    assert pruned.reading.heads is not None
    rows = pruned.reading.heads[0, 0].tolist()
    assert set(text_rows(prompt)) <= set(rows) and rows == sorted(set(rows))
    if keep is not None:
        expected = share_of(seen, keep)
    elif seen > TOTAL - text:
        assert len(rows) == TOTAL
        expected = TOTAL - text
    else:
        expected = max(1, seen // 8)
    assert pruned.visual_tokens == len(rows) - text == expected


@pytest.mark.parametrize("method", ["std", "streaming"])
def test_keys_are_text_and_video_together(method):
    """Claim: ``keys=N`` keeps N of both together, a short video too, at most all; it is told back,
    and not beside a share. Fails if it were K alone."""
    recipe = resolve(f"{method}/keys=300")
    assert choices(recipe)["keys"] == "300"
    for text, seen, expected in ((100, 400, 300), (100, 150, 250)):
        prompt = stub(text, seen)
        pruned = recipe.view(Prefill(prompt, None, torch.zeros(1), torch.rand(1, 1, seen)), prompt)
        rows = len(pruned) if pruned.reading.heads is None else pruned.reading.heads.shape[-1]
        assert rows == expected
    for wrong in (f"{method}/keep=0.5/keys=300", f"{method}/keys=0", "sd/keys=300"):
        with pytest.raises(MethodError, match="keys"):
            resolve(wrong)


@pytest.mark.parametrize("method", ["std", "streaming"])
def test_a_text_that_fills_the_keys_is_refused(method):
    """Claim: where the text alone has the keys there are to be, the view says so and what would
    work. Fails where one visual key stays, our old silent answer. Text without video has all."""
    prompt = stub(1500, 800)
    prefill = Prefill(prompt, None, torch.zeros(1), torch.rand(1, 1, 800))
    with pytest.raises(MethodError, match=r"1500 tokens.* keys=2524, or keep=0\.1"):
        resolve(method).view(prefill, prompt)
    resolve(f"{method}/keys=2524").view(prefill, prompt)


# -- the laws it drafts by ---------------------------------------------------------------------


def furthest(run: Run, kept: Any, rounds: Sequence[tuple[Round, list[int]]]) -> float:
    """How far a self-draft's logits are from the modules' with a mask a head, over these rounds.

    Drafted tokens read the kept rows, and so does the last committed one, whose keys the target
    does not have yet; all text before it comes from the target, which read everything.
    """
    off = 0.0
    for round, text in rounds:
        assert round.q is not None
        drafted = round.q.tree.tokens
        waiting = [len(text) - 1] if text else []
        sparse = [*waiting, *range(len(text), len(text) + len(drafted))]
        logits = sparse_logits(run.target, run.whole, [*text, *drafted], kept, sparse)
        laws = logits[len(text) : len(text) + len(round.q.rows)]
        draft_logits = torch.stack(list(round.q.rows))
        banned = (IMAGE, VIDEO)
        assert bool(torch.isinf(draft_logits[:, banned]).all())
        real_ids = [i for i in range(draft_logits.shape[1]) if i not in banned]
        off = max(off, float((laws - draft_logits)[:, real_ids].abs().max()))
    return off


STARTS = 2  # enough to tell two selections apart


@pytest.mark.representatives(2)
@FAMILIES
def test_the_drafts_laws_are_the_targets_with_each_head_on_its_kept_keys(family):
    """Claim: the sparse model is the dense one, every head reading its own kept keys and the text.

    Naive: the Hugging Face modules, eager attention, one mask per layer and head. Fails if a head
    reads another head's rows, a row out of order, or a wrong position.
    """
    run, kept = run_of(family)
    assert all(round.tree.parents == tuple(range(-1, GAMMA - 1)) for round in run.rounds)
    rounds = list(run.texts())
    assert furthest(run, kept, rounds[:STARTS]) < 1e-4


@FAMILIES
def test_control_another_heads_selection_has_other_laws(family):
    """Control: with the selections of the heads exchanged, or of the layers, the laws are not the
    draft's; nor with everything kept.
    """
    run, kept = run_of(family)
    rounds = list(run.texts())[:STARTS]
    assert furthest(run, kept, rounds) < 1e-4
    for wrong in (
        [layer[::-1] for layer in kept],
        kept[::-1],
        everywhere(run.target, range(len(run.whole))),
    ):
        assert furthest(run, wrong, rounds) > 1e-2


@FAMILIES
def test_text_keys_come_from_the_targets_cache_round_after_round(family):
    """Claim: the verified text is the next round's context, with the keys of the dense model that
    verified it; only the last token, which it has not read yet, is the sparse model's own.

    Fails if keys that the draft made itself stay once the target's are there.
    """
    run, kept = run_of(family)
    rounds = list(run.texts())
    assert len(rounds) > 6
    assert furthest(run, kept, rounds[STARTS:12]) < 1e-4


# -- no second model ---------------------------------------------------------------------------


def pointers(module: Any) -> set[int]:
    return {parameter.data_ptr() for parameter in module.parameters()}


@pytest.mark.parametrize("method", ["std", "streaming", "layerskip", "specvlm-self"])
@pytest.mark.parametrize("fused", [True, False])
def test_no_second_copy_of_the_weights(method, fused):
    """Claim: the drafter's weights are the target's, byte for byte in the same storage.

    Fails if any is copied, in the modules or in the fused tensors of the fused decoder; the control
    is a copied model, which shares none.
    """
    target = backbone(qwen2(), fused)
    drafter = drafter_of(resolve(method), target, None, [Sampling()], 8)
    assert isinstance(drafter, SelfDrafter)
    model = drafter.session.backbone
    owned = pointers(target.model)
    assert pointers(model.text) and pointers(model.text) <= owned
    assert model.head_module.weight.data_ptr() in owned
    if fused:
        storages = {p.untyped_storage().data_ptr() for p in target.model.parameters()}
        assert model.fused is not None
        for layer in model.fused.layers:
            for matrix in layer.matrices:
                assert matrix.weight.untyped_storage().data_ptr() in storages
    assert not pointers(copy.deepcopy(model.text)) & owned


def test_the_draft_holds_only_the_keys_it_reads():
    """Claim: a self-draft's cache has one row per kept key, not a masked copy of the whole."""
    model, inputs = case("qwen2_vl")
    target = backbone(model)
    drafter = drafter_of(resolve("std"), target, None, [Sampling()], 8)
    prefill = prefilled(model, inputs)
    drafter.read_prompts([prefill])
    kept = len(text_rows(prefill.prompt)) + len(visual_rows(prefill.prompt)) // 8
    assert drafter.session.requests[0].cache.length == kept < len(prefill.prompt)


# -- the baselines of Table 1 ------------------------------------------------------------------


@FAMILIES
@pytest.mark.parametrize("keep", [None, 0.5, 1.0])
def test_streaming_keeps_sinks_and_a_window(family, keep):
    """Claim: the first four rows and the last ones, as many in all as Sparse-to-Dense keeps.

    Fails on a row too many, on a window that is not the end, or if kind of row mattered.
    """
    model, inputs = case(family)
    prefill = prefilled(model, inputs)
    prompt = prefill.prompt
    override = "" if keep is None else f"/keep={keep}"
    pruned_prompt = resolve("streaming" + override).view(prefill, prompt)
    heads = resolve("std" + override).view(prefill, prompt).reading.heads
    assert heads is not None
    size = heads.shape[-1]
    expected = [*range(SINKS), *range(len(prompt) - (size - SINKS), len(prompt))]
    assert pruned_prompt.places.tolist() == expected and len(pruned_prompt) == size
    assert torch.equal(pruned_prompt.positions, prompt.positions[:, expected])
    assert torch.equal(pruned_prompt.embeds, prompt.embeds[expected])


@FAMILIES
def test_streamings_laws_are_the_targets_over_sinks_and_window(family):
    """Claim: every head reads sinks, window and text, nothing else. Fails on any other row."""
    run = real("streaming/view=streaming-still", *case(family), count=12)
    rows = run.pruned.places.tolist()
    rounds = list(run.texts())
    assert furthest(run, everywhere(run.target, rows), rounds) < 1e-4
    shifted = [*range(SINKS), *(row - 1 for row in rows[SINKS:])]
    assert furthest(run, everywhere(run.target, shifted), rounds[:STARTS]) > 1e-2


def slid(rows: list[int], count: int, written: int, step: int) -> list[int]:
    """The prompt's rows in a window that has ``count`` of them at first, once ``written`` tokens
    have been written: sinks, and of the rest the last ones that there is room for."""
    over = count + written - len(rows)
    gone = len(rows) - count + (over if over >= step else 0)
    return [*rows[:SINKS], *rows[SINKS + gone :]]


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("family", "step"), [*zip(CASES, (1, 4, 1), strict=True)])
def test_streamings_window_slides_over_the_answer(family, step, monkeypatch):
    """Claim: what has been written takes the place of the window's oldest rows, ``step`` at a time,
    and never of the sinks: the laws are those of the modules over these rows. Fails where the
    window stands still, slides too far, or takes a sink."""
    monkeypatch.setattr(drafters, "SLIDE_TOKENS", step)
    run = real("streaming", *case(family), count=16)
    rows = run.pruned.places.tolist()
    window = rows
    for round, text in run.texts():
        window = slid(rows, len(window), len(text) - 1, step)
        kept = everywhere(run.target, window)
        assert furthest(run, kept, [(round, text)]) < 1e-4
    assert window[:SINKS] == rows[:SINKS] and len(window) < len(rows)
    assert furthest(run, everywhere(run.target, rows), [(round, text)]) > 1e-2


@settings(max_examples=15, deadline=None)
@given(
    chunks=st.lists(st.integers(1, 7), min_size=1, max_size=12),
    step=st.integers(1, 9),
    dropped=st.integers(0, 6),
)
def test_what_a_sliding_window_keeps(chunks, step, dropped):
    """Claim: whatever is written in whatever pieces, over several requests and turns, a window
    holds the sinks, everything written (the target's own keys of it), and of the prompt the last
    rows; of all together its size and less than a step more, while the prompt has rows to give.
    Fails where a key is of another row, a request slides by another's text, or a turn forgets."""
    model, inputs = case("qwen2_vl")
    target = Session(backbone(model), [Sampling()] * 2, room=128)
    prefills = target.prefill(target.backbone.prompts(left_padded([inputs] * 2)))
    drafter = drafter_of(resolve("streaming/keep=0.2"), target.backbone, None, target.rules, 128)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafters, "SLIDE_TOKENS", step)
        drafter.read_prompts(prefills)
        size = drafter.session.requests[0].cache.length
        written = 0
        for at, count in enumerate(chunks):
            tokens = {0: [5 + at] * count}
            target.score({0: chain(tokens[0])})
            target.commit(tokens)
            drafter.commit(tokens)
            written += count
            own, source = drafter.session.requests[0].cache, prefills[0].cache
            length, whole = own.length, len(prefills[0].prompt)
            text = written - 1  # the last one waits
            window = length - SINKS - text
            rows = [*range(SINKS), *range(whole - window, whole), *range(whole, whole + text)]
            assert torch.equal(own.keys[1][:, :length], source.keys[1][:, rows])
            assert torch.equal(own.values[0][:, :length], source.values[0][:, rows])
            assert length >= size - dropped and (length < size + step or not window)
            if at == len(chunks) // 2:
                turn = {0: Turn(min(dropped, written), (7, 8))}
                for talking in (target, drafter):
                    talking.start_turn(turn, target.rules)
                target.score({0: Tree()})
                written += 2 - turn[0].drop
        assert drafter.session.requests[1].cache.length == size


LONG = 20  # tokens: more than the window has rows of the prompt


@pytest.mark.representatives(2)
@pytest.mark.parametrize("how", ["alone", "batch", "conversation"])
def test_an_answer_over_a_sliding_window_is_generates(how, monkeypatch):
    """Claim: with a window that slides at every token, and runs out of prompt, the ids are
    generate()'s, of each in a batch and of a later turn. Fails where a slide moves a key that a
    later round reads as another's."""
    monkeypatch.setattr(drafters, "SLIDE_TOKENS", 1)
    model, inputs = case("qwen2_vl")
    options = {"method": "streaming/keep=0.1", "max_new_tokens": LONG, "do_sample": False}
    plain = hf_greedy(model, inputs, LONG)
    if how == "alone":
        result = saccade.run(backbone(model), inputs, **options)
        assert result.fallback_reason is None and list(result.ids) == plain
    elif how == "batch":
        out = saccade.generate(backbone(model), left_padded([inputs] * 2), **options)
        assert [row[-LONG:] for row in out.tolist()] == [plain] * 2
    else:
        more = torch.tensor([[*plain, 11, 12, 13]])
        filling = {"input_ids": more, "attention_mask": 0 * more + 1, "mm_token_type_ids": 0 * more}
        longer = inputs | {name: torch.cat([inputs[name], own], 1) for name, own in filling.items()}
        with saccade.Conversation(backbone(model), **options) as talk:
            assert list(talk.run(inputs).ids) == plain
            again = talk.run(longer)
        assert again.fallback_reason is None and again.reused_tokens
        assert list(again.ids) == hf_greedy(model, longer, LONG)


def test_a_window_that_holds_all_of_the_prompt_stands_still(monkeypatch):
    """Claim: where nothing is left out, nothing is later: text without video, or ``keep=1``."""
    monkeypatch.setattr(drafters, "SLIDE_TOKENS", 1)
    everything = {"streaming": (llama(), text_input(2)), "streaming/keep=1.0": case("qwen2_vl")}
    for method, arguments in everything.items():
        run = real(method, *arguments, count=31)
        assert [len(round.verdict.accepted) for round in run.rounds[:-1]] == [GAMMA] * 2


@pytest.mark.representatives(2)
@FAMILIES
@pytest.mark.parametrize("layers", [2, 5])
def test_layerskips_laws_are_the_first_half_the_norm_and_the_head(family, layers):
    """Claim: layers 0 .. L/2 - 1, then norm and head, over the whole prompt, in every round.

    Naive: the modules with their last layers cut off, uncached. The law at the very start is the
    target's own, left over from its prefill. Fails on one layer more or less, or a norm forgotten.
    """
    model, inputs = case(family, layers=layers)
    run = real("layerskip", model, inputs, count=10)
    for depth in (layers // 2, layers // 2 + 1):
        short = copy.deepcopy(model)
        text = short.get_decoder()
        text.layers = text.layers[:depth]
        text.config.num_hidden_layers = depth
        halves, whole = (Oracle(m, [run.whole], [Sampling()]) for m in (short, model))
        off = 0.0
        for round, emitted in run.texts():
            assert round.q is not None
            laws = halves.logits(0, [*emitted, *round.q.tree.tokens])[len(emitted) :]
            if not emitted:
                laws[0] = whole.logits(0, [])[-1]
            laws = laws[: len(round.q.rows)]
            draft_logits = torch.stack(list(round.q.rows))
            ids = [i for i in range(draft_logits.shape[1]) if i not in (IMAGE, VIDEO)]
            off = max(off, float((laws - draft_logits)[:, ids].abs().max()))
        assert off < 1e-4 if depth == layers // 2 else off > 1e-2


# -- accepted lengths --------------------------------------------------------------------------


@pytest.mark.representatives(2)
@FAMILIES
@pytest.mark.parametrize(
    ("method", "deep"), [("std/keep=1.0", GAMMA), ("specvlm-self/keep=1.0", 5)]
)
def test_a_self_draft_that_keeps_everything_is_always_right(family, method, deep):
    """Claim: with nothing pruned draft and target are one model: drafts are accepted to their end.

    Fails if a copied key, a position or a mask is off anywhere: one refusal in any round.
    """
    model, inputs = case(family)
    run = real(method, model, inputs, count=32)
    for round in run.rounds[:-1]:
        assert len(round.verdict.accepted) == deep and round.verdict.kind == "bonus"
    assert len(run.rounds) == -(-31 // (deep + 1))
    pruned = real(method.split("/")[0], model, inputs, count=32)
    assert len(pruned.rounds) > len(run.rounds), "a pruned draft must be wrong now and then"


def test_without_video_there_is_nothing_to_prune():
    """Claim: on a text-only model every head keeps all text, so that every draft is accepted.

    Fails if a prompt without video breaks the view, or if text is ever dropped.
    """
    run = real("std", llama(), text_input(2), count=31)
    assert run.pruned.visual_tokens == 0
    assert [len(round.verdict.accepted) for round in run.rounds[:-1]] == [GAMMA] * 2


def test_gamma_is_nine_and_can_be_overridden():
    """Claim: nine drafted tokens a round, as in the paper; another number where asked for.

    Fails if the recipe's length is not the one drafted.
    """
    assert resolve("std").shape == Chain(GAMMA)
    recipe = replace(resolve("std/shape=chain-4"), name="mine")
    run = real(recipe, *case("qwen2_vl"), count=12)
    assert {len(round.tree) for round in run.rounds} == {4}
