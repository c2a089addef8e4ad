"""Claims about heads: what they draft, from which hidden states, and what never changes by it."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from engine.test_conversation import further, question
from engine.test_new_media import MAKERS, joined
from heads import (
    DFLASH,
    KINDS,
    STYLES,
    Reference,
    change_settings,
    head_of,
    head_over,
    tensors_of,
    write_head,
)
from helpers import (
    TEXT,
    VIDEO,
    WORDS,
    backbone_of_copy,
    few,
    hf_greedy,
    input_for,
    left_padded,
    llama,
    qwen25,
    qwen35,
    random_tree,
    text_input,
)
from typer.testing import CliRunner

import saccade
from lab.checkpoints import heads as random_heads
from lab.checkpoints import make
from saccade.cli.application import app
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.core.prompt import Turn
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain, path
from saccade.drafting.recipe import recorded_hidden_layers
from saccade.drafting.shapes import cost_measurement
from saccade.drafting.views.basic import UNIFORM
from saccade.engine.generate import Stream
from saccade.engine.request import Request
from saccade.engine.scheduler import Scheduler
from saccade.inputs import head_checkpoints, loading
from saccade.inputs.footprint import dflash_footprint, eagle3_footprint
from saccade.methods import resolve
from saccade.model import prefix_cache
from saccade.model.heads import layouts
from saccade.model.heads.block_session import BlockSession
from saccade.model.heads.head_session import HeadSession
from saccade.model.prefix_cache import PrefixCache
from saccade.model.session import Session, session_of

pytestmark = pytest.mark.usefixtures("unchecked")

TARGETS = {"qwen2_5_vl": qwen25, "qwen3_5": qwen35, "llama": llama}
METHODS = (
    "head",
    "sd-tree",
    "head/shape=best-6",
    "auto",
    "sage",
    "specvlm",
    "head/view=uniform/keep=0.3",
    "head/shape=chain-9",
)


def _pairs(kinds: Any = KINDS) -> list[Any]:
    """Every kind of head over every target; by default each kind over one of them."""
    names = [*TARGETS]
    return [
        pytest.param(kind, family, marks=() if names[place % 3] == family else pytest.mark.slow)
        for place, kind in enumerate(kinds)
        for family in names
    ]


def _together(kind: str, family: str, fused: bool | None = None, **view: Any) -> Any:
    """A target's session and its head's, over one prompt, with the reference."""
    head = head_of(TARGETS[family](0), kind, fused)
    (prompt,) = head.target.prompts(input_for(family))
    session = Session(head.target, [Sampling()])
    *_, prefill = session.prefill_in_chunks(0, prompt, hidden_layers=head.hidden_layers)
    kept = UNIFORM(prefill, prompt).select(torch.arange(0)) if view else prompt
    if view:
        kept = prompt.select(torch.arange(0, prompt.visual_tokens, 3))
    kind_of_session = BlockSession if head.drafts_blocks else HeadSession
    drafting = kind_of_session(head, [Sampling()], banned=[])
    drafting.read(0, prefill, kept)
    return session, drafting, Reference(head, kind, prompt, kept.places)


def _assert_equal_rows(drafting: HeadSession, reference: Reference, text: Any, tree: Tree) -> None:
    ours = torch.stack(list(drafting.score({0: tree})[0].rows))
    torch.testing.assert_close(ours, reference.rows(text, tree), atol=2e-3, rtol=2e-3)


def _play(session: Any, drafting: Any, reference: Any, seed: int, rounds: int) -> list[int]:
    """Rounds of random trees, of which random paths are accepted, compared in each."""
    rng = random.Random(seed)
    text = [rng.randrange(TEXT)]
    session.commit({0: list(text)})
    drafting.commit({0: list(text)})
    for _ in range(rounds):
        tree = random_tree(rng, rng.randrange(7), lambda: rng.randrange(TEXT))
        _assert_equal_rows(drafting, reference, text, tree)
        session.score({0: tree})
        taken = [tree.tokens[n] for n in path(tree, rng.randrange(-1, len(tree)))]
        new = [*taken, rng.randrange(TEXT)]
        session.commit({0: list(new)})
        drafting.commit({0: list(new)})
        text += new
    _assert_equal_rows(drafting, reference, text, chain([1, 2]))
    return text


@pytest.mark.representatives(2)
@pytest.mark.parametrize(("kind", "family"), _pairs())
def test_any_history_of_a_head_equals_the_reference(kind, family):
    """Claim: after any rounds a head's logits, at the end of the text and at every node of a tree,
    are those of a computation from the start that reads the target's true hidden states.

    Fails if the hidden state of a rejected row stays, a position is off by one, or a drafted row's
    key survives its round.
    """
    # With this seed an accepted path has gaps, so that hidden states have to move.
    _play(*_together(kind, family), seed=4, rounds=8)


@pytest.mark.parametrize("kind", ["mtp", "speculators"])
def test_the_fused_decoder_and_the_modules_write_the_same_hidden_states(kind):
    """Claim: the modules of a target feed a head as the fused decoder does."""
    _play(*_together(kind, "llama", fused=False), seed=5, rounds=3)


@pytest.mark.parametrize(("kind", "family"), [("mtp", "qwen2_5_vl"), ("angelslim", "qwen2_5_vl")])
def test_a_pruned_prompt_keeps_the_targets_positions(kind, family):
    """Claim: a head whose view leaves rows of a video out reads the others at the target's own
    positions, each with its own hidden state and the embedding of the token after it in the whole
    prompt. Fails if positions count the rows that are left."""
    session, drafting, reference = _together(kind, family, pruned=True)
    assert 0 < drafting.request(0).skipped_rows < len(reference.prompt)
    _play(session, drafting, reference, seed=4, rounds=3)


def test_control_other_positions_are_noticed():
    """Control: the comparison with the reference must fail where positions are moved by one."""
    session, drafting, reference = _together("mtp", "qwen2_5_vl")
    plain = type(drafting.request(0)).positions
    drafting.request(0).positions = lambda rows: plain(drafting.request(0), rows) + rows % 2
    with pytest.raises(AssertionError):
        _play(session, drafting, reference, seed=3, rounds=1)


@pytest.mark.representatives(3)
@pytest.mark.parametrize("cut_back", [0, 3, 30])
@pytest.mark.parametrize(("kind", "family"), _pairs(["mtp", "specforge"]))
def test_a_turn_cuts_a_head_back_to_the_text(kind, family, cut_back):
    """Claim: after a turn that drops none, some or all of the last answer, and with it the end of
    the prompt, a head's logits are those of the new text."""
    session, drafting, reference = _together(kind, family)
    text = _play(session, drafting, reference, seed=6, rounds=3)
    prompt_tokens = len(reference.prompt)
    cut_back = min(cut_back, len(text) + 3)
    session.score({0: Tree()})
    new = (7, 8, 9, 10)
    turn = {0: Turn(cut_back, new)}
    session.start_turn(turn, [Sampling()])
    session.score({0: Tree()})
    drafting.start_turn(turn, [Sampling()])
    whole = [*reference.prompt.full_ids.tolist(), *text]
    whole = [*whole[: len(whole) - cut_back], *new]
    if cut_back <= len(text):
        session.commit({0: [11]})
        drafting.commit({0: [11]})
        text = [*whole[prompt_tokens:], 11]
        _assert_equal_rows(drafting, reference, text, chain([5, 6]))
    else:  # The reference has the old prompt; the caches are compared with a fresh start.
        assert drafting.request(0).context == whole
        assert drafting.request(0).waiting_rows >= 1


# -- answers -----------------------------------------------------------------------------------


@pytest.mark.representatives(4)
@pytest.mark.parametrize(("kind", "family"), _pairs())
@pytest.mark.parametrize("method", few(METHODS, 3))
def test_a_head_never_changes_an_answer(method, kind, family):
    """Claim: greedy answers are those of generate, with any head, view and shape, and no draft
    failed."""
    make_model, inputs = TARGETS[family], input_for(family)
    head = head_of(make_model(0), kind)
    result = saccade.run(
        head.target, inputs, draft=head, method=method, max_new_tokens=20, do_sample=False, **WORDS
    )
    assert list(result.ids) == hf_greedy(make_model(0), inputs, 20)
    assert result.fallback_reason is None
    if method != "auto":
        assert any(round.tokens for round in result.rounds)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("kind", "family"), _pairs(["mtp", "specforge"]))
def test_every_turn_with_a_head_answers_as_a_fresh_start(kind, family):
    """Claim: three turns' answers are those of generate on the whole text, where the template cuts
    the last answer back; and the head goes on drafting."""
    head, ids = head_of(TARGETS[family](0), kind), []
    with saccade.Conversation(
        head.target, draft=head, method="head", max_new_tokens=9, do_sample=False
    ) as conversation:
        for turn in range(3):
            inputs = further(input_for(family), ids)
            result = conversation.run(inputs)
            assert list(result.ids) == hf_greedy(TARGETS[family](0), inputs, 9)
            assert result.fallback_reason is None
            assert (result.reused_tokens > 0) == (turn > 0)
            ids = [*ids, *result.ids]
            ids = [*ids[: max(0, len(ids) - 3)], *question(turn)]


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("kind", "family"), [("mtp", "llama"), ("speculators", "llama")])
def test_requests_with_heads_come_and_go_as_if_alone(kind, family):
    """Claim: requests that join a server's scheduler while others decode share the head's forwards
    and get the answers that generate gives each alone; so does a batch."""
    head = head_of(TARGETS[family](0), kind)
    many = [text_input(seed, 4 + 5 * seed) for seed in range(4)]
    scheduler = Scheduler(head.target, resolve("head"), head)
    results: dict[int, Any] = {}
    for inputs in many:
        scheduler.join(Request.of(head.target, inputs, max_new_tokens=8))
        for event in scheduler.step():
            assert event.error is None
            if event.result is not None:
                results[event.number] = event.result
    while len(scheduler):
        for event in scheduler.step():
            assert event.error is None
            if event.result is not None:
                results[event.number] = event.result
    expected = [hf_greedy(TARGETS[family](0), inputs, 8) for inputs in many]
    assert [list(results[n].ids) for n in range(4)] == expected
    assert all(result.fallback_reason is None for result in results.values())
    out = saccade.generate(
        head.target, left_padded(many), draft=head, method="head", max_new_tokens=8, do_sample=False
    )
    assert [row[-8:].tolist() for row in out] == expected


def test_a_stored_prefix_has_its_hidden_states(monkeypatch):
    """Claim: a prompt that begins with a stored one's rows reuses them, and the head drafts as
    without the store; a prompt that was stored without hidden states is not reused for a head."""
    monkeypatch.setattr(prefix_cache, "MIN_NEW_ROWS", 1)
    head = head_of(llama(0), "mtp")
    store = PrefixCache(1 << 28)
    target = head.target.with_prefix_cache(store)
    base = text_input(1, 40)
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    saccade.run(target, base, method="ar", **options)
    longer = further(base, [3, 4, 5])
    first = saccade.run(target, longer, draft=head, method="head", **options)
    assert first.reused_tokens == 0
    again = further(base, [3, 4, 9, 9])
    second = saccade.run(target, again, draft=head, method="head", **options)
    alone = saccade.run(head.target, again, draft=head, method="head", **options)
    assert second.reused_tokens >= 40 and second.ids == alone.ids
    assert [each.tokens for each in second.rounds] == [each.tokens for each in alone.rounds]


def test_exact_answers_take_heads_too():
    """Claim: exact answers are plain decoding's, bit for bit, with a head that drafts chains."""
    head, inputs = head_of(llama(0), "mtp"), text_input(2, 20)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "exact": True}
    plain = saccade.run(head.target, inputs, method="ar", **options)
    drafted = saccade.run(head.target, inputs, draft=head, method="head", **options)
    assert drafted.ids == plain.ids and drafted.fallback_reason is None


@pytest.mark.parametrize("kind", ["specforge", "dflash of speculators"])
def test_a_drawn_token_carries_the_law_of_the_heads_own_vocabulary(kind):
    """Claim: when sampling, a drafted token's q is the softmax of the reference's logits over the
    target's ids, 0 for ids that the head does not know and for placeholders."""
    head = head_of(qwen25(0), kind)
    inputs = input_for("qwen2_5_vl")
    result = saccade.stream(
        head.target, inputs, draft=head, method="head", max_new_tokens=6, do_sample=True, seed=1
    )
    rounds = [round for round in result if len(round.tree)]
    known = torch.zeros(head.vocab, dtype=torch.bool)
    known[head.module.target_ids] = True
    (prompt,) = head.target.prompts(inputs)
    reference = Reference(head, kind, prompt)
    text: list[int] = [result.results[0].ids[0]]
    for round in rounds:
        laws = reference.rows(text, round.tree)
        laws[:, [VIDEO, VIDEO + 1]] = -torch.inf
        for node, q in enumerate(round.tree.q):
            assert q is not None and not q[~known].any() and not q[VIDEO]
            torch.testing.assert_close(q, laws[node].softmax(-1), atol=1e-4, rtol=1e-3)
        text += round.emitted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mtp", "dflash"])
def test_answers_with_a_head_follow_the_targets_law(kind):
    """Claim: over many seeds the second and third tokens have the law of plain sampling."""
    head, inputs = head_of(llama(0), kind), text_input(0)
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": True, "temperature": 0.5}
    counts = torch.zeros(2, head.vocab)
    for row, method in enumerate(("ar", "head")):
        for seed in range(600):
            ids = saccade.run(
                head.target, inputs, draft=head, method=method, seed=seed, **options
            ).ids
            counts[row, ids[1]] += 1
    often = counts.sum(0) >= 20
    difference = (counts[0] - counts[1])[often].pow(2) / counts.sum(0)[often]
    assert float(difference.sum()) < 2 * int(often.sum()) + 20


# -- where heads meet other parts ----------------------------------------------------------------

ANSWER: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}


@pytest.mark.parametrize(("kind", "family"), _pairs(["mtp", "specforge"]))
def test_a_prompt_that_was_read_ahead_can_be_drafted_for_by_a_head(kind, family):
    """Claim: where the media are read before the question is known, their hidden states are
    recorded too, so the head drafts. Fails if reading ahead forgets that the draft is a head."""
    head, inputs = head_of(TARGETS[family](0), kind), input_for(family)
    if not head.target.placeholders:
        pytest.skip("a prompt without media cannot be read ahead")
    with saccade.Conversation(head.target, draft=head, method="head", **ANSWER) as conversation:
        conversation.read_ahead(inputs)
        result = conversation.run(inputs)
    assert list(result.ids) == hf_greedy(TARGETS[family](0), inputs, 9)
    assert result.fallback_reason is None and result.reused_tokens > 0
    assert any(round.tokens for round in result.rounds)


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("kind", "family"), [("mtp", "qwen2_5_vl"), ("specforge", "qwen3_5")])
def test_a_head_goes_on_after_new_media(kind, family):
    """Claim: a turn that brings a video goes on with the head, without the warning that a draft
    reads all again, and drafts what a fresh head drafts over the whole conversation."""
    head, whole = head_of(TARGETS[family](0), kind), MAKERS[family](0)
    settings: dict[str, Any] = {"draft": head, "method": "head", **ANSWER}
    with saccade.Conversation(head.target, **settings) as conversation:
        for turn in (1, 2):
            result = conversation.run(whole)
            alone = saccade.run(head.target, whole, **settings)
            assert list(result.ids) == hf_greedy(TARGETS[family](0), whole, 9)
            assert result.fallback_reason is None and not result.warnings
            assert [each.tokens for each in result.rounds] == [each.tokens for each in alone.rounds]
            whole = joined(further(whole, result.ids), MAKERS[family](turn))


@pytest.mark.parametrize("length", [14, 30, 49])
def test_a_turn_cuts_a_head_back_into_a_document(length):
    """Claim: a turn that cuts the text inside a document, of which a view has left rows out, goes
    on, and drafts over the rows of the document that stay. Fails if rows that are left out count
    after they were cut away."""
    head, text = head_of(llama(0), "mtp"), text_input(1, 60)
    settings: dict[str, Any] = {"draft": head, "method": "head/view=uniform/keep=0.3", **ANSWER}
    with saccade.Conversation(head.target, **settings) as conversation:
        conversation.run(text, context=(10, 50))
        for more in ([1, 2, 3], [4, 5, 6, 7]):
            short = further({name: each[:, :length] for name, each in text.items()}, more)
            result = conversation.run(short, context=(10, length))
            assert list(result.ids) == hf_greedy(llama(0), short, 9)
            assert result.fallback_reason is None and result.reused_tokens == length
            request = conversation._last_stream.batch.drafter._drafter.session.request(0)
            assert request.waiting_rows >= 0 and 0 < request.skipped_rows < length


@pytest.mark.parametrize("kind", ["mtp", "speculators"])
def test_transformers_may_call_with_a_head(kind):
    """Claim: a head is a draft for ``custom_generate`` too; it needs no pixels of its own."""
    head, inputs = head_of(qwen25(0), kind), input_for("qwen2_5_vl")
    call = saccade.generate.with_(draft=head, method="head")
    out = head.target.model.generate(**inputs, custom_generate=call, **ANSWER)
    assert out[0, -9:].tolist() == hf_greedy(qwen25(0), inputs, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_costs_of_a_head_are_estimated(kind):
    """Claim: where an answer is too short to measure costs for, those of a head are estimated, and
    its step is believed to read less than the target's and no less than its own matrices."""
    head = head_of(llama(0, layers=4), kind)
    costs = cost_measurement._estimate(head.target, head, 256)
    assert 0 < costs["steps"][1] < costs["target"][0]
    fc_bytes = head.module.fc.weight.numel() * head.dtype.itemsize
    assert fc_bytes < head.weight_bytes_per_step < head.target.weight_bytes_per_step


def test_a_grammar_that_a_head_cannot_spell_does_not_end_drafting():
    """Claim: where a grammar forbids every token of a head's own vocabulary, a sampled answer
    obeys it and its draft goes on. Control: the grammar forbids all that the head knows."""
    head, inputs = head_of(qwen25(0), "specforge"), input_for("qwen2_5_vl")
    allowed = torch.ones(head.vocab, dtype=torch.bool)
    allowed[head.module.target_ids] = False
    assert allowed.any() and len(head.module.target_ids) == 100
    for sample in (True, False):
        request = Request.of(
            head.target,
            inputs,
            grammar=lambda answer: allowed,
            max_new_tokens=6,
            do_sample=sample,
            seed=1,
        )
        (result,) = Stream(head.target, request, resolve("head"), draft=head).finish()
        assert result.fallback_reason is None and all(allowed[each] for each in result.ids)


def test_memory_of_hidden_states_is_counted():
    """Claim: a request whose draft is a head needs the bytes of its hidden states beside the keys,
    and one of plain decoding does not."""
    head = head_of(llama(0), "specforge")
    request = Request.of(head.target, text_input(), max_new_tokens=4)
    layers = recorded_hidden_layers(resolve("sd"), head)
    assert layers == head.hidden_layers == recorded_hidden_layers(resolve("head"), head)
    assert not recorded_hidden_layers(resolve("ar"), head)
    assert not recorded_hidden_layers(resolve("specvlm-self"), head)
    cache = head.target.new_cache(10)
    cache.hidden = head.target.hidden_states(layers, 10)
    with_hidden = head.target.token_bytes + head.target.hidden_state_bytes(layers)
    assert cache.bytes == 10 * with_hidden
    sentences = [str(request.too_long_error(head.target, each)) for each in ((), layers)]
    assert sentences[0] != sentences[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_over_a_changed_target_stays_the_same(kind):
    """Claim: after the target was changed once, every answer gets the same head over it, so a
    conversation goes on with its caches. Fails if each answer makes a head of its own."""
    head = head_over(backbone_of_copy(qwen25()), kind)
    assert head.current() is head
    head.target.text.layers[0].register_forward_hook(lambda module, inputs, output: output)
    changed = head.current()
    assert changed is not head and type(changed) is type(head)
    assert head.current() is changed and changed.current() is changed


def test_a_head_is_not_rounded():
    """Claim: rounding a head is refused in a sentence that says so."""
    head = head_of(llama(0), "mtp")
    with pytest.raises(ModelError, match="this draft is a head"):
        saccade.run(head.target, text_input(), draft=head, draft_quantize="int8", **ANSWER)


# -- loading -----------------------------------------------------------------------------------


@pytest.mark.representatives(1)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("family", "layout"), [("qwen3.5", "mtp"), ("qwen3.5-moe", "mtp"), ("glm4v-moe", "nextn")]
)
def test_a_checkpoint_with_a_head_drafts_with_it(family, layout, tmp_path):
    """Claim: ``saccade.load`` of a checkpoint that brings a head along drafts with it when nothing
    else is named, from exactly the tensors in the file, and answers as without it."""
    folder = make(family, tmp_path / family)
    target = loading.load(str(folder), device="cpu")
    assert loading.load_pair(str(folder), None, device="cpu")[1] is None
    stray = folder / "consolidated.safetensors"
    stray.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert loading.load_pair(str(folder), None, device="cpu")[1] is None
    stray.unlink()
    random_heads.add_own_head(folder, target.backbone, layout)
    model = saccade.load(str(folder), method="head", device="cpu")
    assert model.pair.draft is not None
    head = model.pair.draft.backbone
    own = random_heads.random_own_head(target.backbone, layout)
    fc = own[random_heads.OWN_NAMES[layout]["fc"]]
    assert torch.equal(head.module.fc.weight, fc)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    result = model.describe(None, "what?", **options)
    assert result.fallback_reason is None and any(each.tokens for each in result.rounds)
    plain = saccade.load(str(folder), method="ar", device="cpu").describe(None, "what?", **options)
    assert result.ids == plain.ids


def test_experts_of_a_head_are_stacked_as_its_layer_wants_them(tmp_path):
    """Claim: a head whose checkpoint names each expert's matrices is the one with them stacked."""
    folder = make("qwen3.5-moe", tmp_path / "moe")
    target = loading.load(str(folder), device="cpu").backbone
    stacked = random_heads.random_own_head(target, "mtp")
    apart = dict(stacked)
    base = "layers.0.mlp.experts."
    gate_up, down = apart.pop(base + "gate_up_proj"), apart.pop(base + "down_proj")
    for number, (both, one) in enumerate(zip(gate_up, down, strict=True)):
        gate, up = both.chunk(2)
        apart |= {
            f"{base}{number}.gate_proj.weight": gate,
            f"{base}{number}.up_proj.weight": up,
            f"{base}{number}.down_proj.weight": one,
        }
    heads = [
        head_checkpoints.make_mtp_head(target, head_checkpoints.layouts.MTP_LAYOUTS[0], each, "x")
        for each in (stacked, apart)
    ]
    states = [each.module.state_dict() for each in heads]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.representatives(2)
@pytest.mark.parametrize("kind", [*STYLES, *DFLASH])
def test_a_head_is_loaded_by_its_folder(kind, tmp_path):
    """Claim: ``draft=`` takes the folder of an EAGLE-3 or DFlash head in each published form, and
    the answer is the target's."""
    folder = make("llama", tmp_path / "target")
    target = loading.load(str(folder), device="cpu")
    draft = write_head(tmp_path / "head", target.backbone, kind)
    model = saccade.load(str(folder), str(draft), method="sd", device="cpu")
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}
    result = model.describe(None, "what?", **options)
    assert result.fallback_reason is None and any(each.tokens for each in result.rounds)
    plain = saccade.load(str(folder), method="ar", device="cpu").describe(None, "what?", **options)
    assert result.ids == plain.ids


def _sees(*layers: int) -> dict[str, Any]:
    """Entries of a DFlash head's config: it reads the outputs of these layers."""
    return {"dflash_config": {"target_layer_ids": list(layers), "mask_token_id": 3}}


@pytest.mark.representatives(6)
@pytest.mark.parametrize(
    ("kind", "settings", "sentence"),
    [
        ("specforge", {"target_model_type": "qwen3"}, r"a head for qwen3, .* is a llama"),
        ("specforge", {"target_hidden_size": 64}, r"hidden states of 64"),
        (
            "specforge",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 30]}},
            "deeper target",
        ),
        (
            "specforge",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}},
            "for another target",
        ),
        ("specforge", {"num_key_value_heads": 4}, r"another shape"),
        ("dflash", {"num_target_layers": 36}, r"a head for a model of 36 layers"),
        ("dflash", _sees(1, 30), "deeper target"),
        ("dflash", _sees(0), "for another target"),
        ("dflash", {"dflash_config": {"mask_token_id": 3}}, "no target_layer_ids"),
        (
            "dflash",
            {"dflash_config": {**_sees(0, 0)["dflash_config"], "mask_token_id": 10**6}},
            "embeddings",
        ),
        ("dflash", {"selector_rank": 256}, "a later kind of DFlash head, with selector_rank"),
        ("dflash", {"num_key_value_heads": 4}, "another shape"),
        ("dflash", {"sliding_window": None}, "has to name its sliding_window"),
        ("dflash", {"dflash_config": [1]}, "describes no head that can be built"),
        ("dflash", {"target_layer_ids": 5, "dflash_config": {}}, "describes no head that can"),
        ("dflash", {"block_size": 1}, "draft no token"),
        ("dflash", {"layer_types": ["full_attention"] * 9}, "9 layer_types for|no head that can"),
        ("specforge", {"num_attention_heads": "many"}, "describes no head that can be built"),
    ],
)
def test_a_head_that_cannot_be_used_gets_one_sentence(kind, settings, sentence, tmp_path):
    """Claim: a head whose config declares another target, whose tensors fit none such, or that is
    of a kind with parts that are not here, is refused by one sentence before any answer."""
    folder = make("llama", tmp_path / "target")
    target = loading.load(str(folder), device="cpu")
    draft = write_head(tmp_path / "head", target.backbone, kind)
    change_settings(draft, **settings)
    with pytest.raises(ModelError, match=sentence) as error:
        saccade.load(str(folder), str(draft), device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("architectures", [None, 5, "Qwen2ForCausalLM", [None], [], {"a": 1}])
def test_a_config_without_a_heads_architectures_is_no_head(architectures: Any) -> None:
    """Claim: whatever a config has in the place of a list of names, it describes no head, and
    nothing is raised. Fails if a malformed config ends in an error of Python."""
    assert head_checkpoints.find_kind({"architectures": architectures}) is None


@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (dflash_footprint, {"dflash_config": [1]}),
        (dflash_footprint, {"target_layer_ids": 5}),
        (dflash_footprint, {"hidden_size": None}),
        (eagle3_footprint, {"hidden_size": "wide"}),
        (eagle3_footprint, {"num_attention_heads": 0}),
    ],
)
def test_a_malformed_config_of_a_head_has_no_size(count: Any, settings: dict[str, Any]) -> None:
    """Claim: an entry of another type than it should have is a sentence, also where only the head's
    size is counted."""
    sizes = dict(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1)
    whole = {**sizes, "head_dim": 4, "target_layer_ids": [0], **settings}
    if settings.get("num_attention_heads") == 0:
        del whole["head_dim"]
    with pytest.raises(ModelError, match="describes no"):
        count(whole, llama(0).config)


@pytest.mark.parametrize("ids", [[0, 0, 0], [-1, 0], [0, 5]])
def test_a_map_of_ids_that_does_not_fit_gets_one_sentence(ids):
    """Claim: a ``d2t`` of another length than the head's ids, and one that leads below or beyond
    the target's ids, is refused. Fails if negative ids are taken, or torch's own error is shown."""
    parts = {"lm_head.weight": torch.zeros(2, 4), "d2t": torch.tensor(ids)}
    with pytest.raises(ModelError, match="a head .*ids"):
        layouts.add_id_map(parts, 5, "a head")
    right = {"lm_head.weight": torch.zeros(2, 4), "d2t": torch.tensor([1, 3])}
    layouts.add_id_map(right, 5, "a head")


def test_methods_say_what_they_lack():
    """Claim: a head without a head, a head beside its target, and a device for a head are refused
    in a sentence."""
    head, inputs = head_of(llama(0), "mtp"), text_input()
    with pytest.raises(ModelError, match="name an EAGLE-3 or DFlash head"):
        saccade.run(head.target, inputs, method="head", max_new_tokens=2)
    with pytest.raises(ModelError, match="the draft is a model"):
        saccade.run(head.target, inputs, draft=head.target, method="head", max_new_tokens=2)
    with pytest.raises(MethodError, match="process of its own"):
        saccade.run(head.target, inputs, draft=head, method="pearl", max_new_tokens=2)
    with pytest.raises(MethodError, match="choice among the rows"):
        resolve("head/view=text")


def test_costs_of_a_head_are_measured():
    """Claim: a head's step can be timed like a draft model's, at any context."""
    head = head_of(qwen25(0), "speculators")
    session = session_of(head, [Sampling()] * 2)
    for number in range(2):
        session.fill_for_timing(number, 30, 4)
    for _ in range(2):
        session.rewind_for_timing(30)
        scores = session.score(dict.fromkeys(range(2), Tree()))
        assert len(scores[1].rows) == 1
        assert session.requests[1].cache.length == 31


@pytest.mark.parametrize(
    ("kind", "name", "other", "refusal"),
    [
        ("specforge", "an EAGLE-3 head", {"target_model_type": "qwen3"}, "a head for qwen3"),
        ("dflash", "a DFlash head", {"num_target_layers": 36}, "a model of 36 layers"),
    ],
)
def test_doctor_knows_heads(kind, name, other, refusal, tmp_path):
    """Claim: ``saccade doctor`` counts a head by its config, as its matrices are, says of which
    kind it is, and refuses another target's, a device of its own and rounding."""
    folder = make("llama", tmp_path / "target")
    target = loading.load(str(folder), device="cpu").backbone
    draft = write_head(tmp_path / "head", target, kind)
    settings = head_checkpoints.read_settings(str(draft))
    found = head_checkpoints.find_kind(settings)
    assert found is not None
    counted = found.count_footprint(settings, target.model.config)
    matrices = [each for each in tensors_of(target, kind).values() if each.ndim == 2]
    assert counted.parameters == sum(each.numel() for each in matrices)
    words = ["doctor", "--target", str(folder), "--draft", str(draft), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert name in " ".join(json.loads(done.stdout)["notes"])
    for option, value in (("--draft-device", "cpu"), ("--draft-quantize", "int8")):
        refused = CliRunner().invoke(app, [*words, option, value])
        assert isinstance(refused.exception, OptionError) and option in str(refused.exception)
    change_settings(draft, **other)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1 and refusal in done.stdout
