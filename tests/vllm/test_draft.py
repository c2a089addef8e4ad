"""Claims about the draft as vLLM's runner drives it, with a stand-in for the runner."""

from __future__ import annotations

import logging
import time
from collections import Counter
from types import SimpleNamespace

import psutil
import pytest
import torch
from helpers import FAMILIES, VIDEO, backbone, llama, noisy, prompt_of, qwen25, text_input, truth
from helpers import video_input as video
from runners import Runner, config, loaded

from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import Prefill
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree
from saccade.model.session import Session
from saccade.vllm import cpu_fixes, mm_features, request_drafts
from saccade.vllm.draft import Draft, are_alike


@pytest.fixture
def runner() -> Runner:
    return Runner()


def test_drafting_with_the_target_itself_accepts_everything(monkeypatch, runner):
    """Claim: over the whole video at the target's positions, the target's own copy is never
    refused, in a batch of two whose requests end at different times."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    answer = truth("qwen2_5_vl")
    runner.add("a", qwen25(), video(), answer)
    runner.add("b", qwen25(), video(), answer[:11])
    while runner.requests:
        runner.step(draft)
    assert runner.written == {"a": list(answer), "b": list(answer[:11])}
    assert runner.drafted == runner.accepted > 30


def test_other_positions_would_be_refused(monkeypatch, runner):
    """Control: with the answer's positions shifted, a copy of the target is refused."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.requests["a"].mrope_position_delta += 40
    while runner.requests:
        runner.step(draft)
    assert runner.accepted < runner.drafted


@pytest.mark.parametrize("view", ["scattered", "uniform", "frames", "none"])
def test_a_pruned_view_drafts_what_a_session_over_it_drafts(monkeypatch, runner, view):
    """Claim: drafts are the arg-max chain of the draft model over the view's rows and no others."""
    model = noisy(qwen25)
    draft = loaded(monkeypatch, model, runner, view=view)
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft)
    whole = prompt_of(model, video())  # the towers of both are equal
    prompt = draft._view(Prefill(whole, None, torch.empty(0)), whole)
    assert prompt.visual_tokens < whole.visual_tokens
    session = Session(backbone(model), [Sampling()], vocab=256, banned=[VIDEO])
    session.prefill([prompt])
    text = [truth("qwen2_5_vl")[0]]
    session.commit({0: text})
    expected = []
    for _ in range(5):
        token = int(session.score({0: Tree()})[0].rows[0].argmax())
        session.commit({0: [token]})
        expected.append(token)
    assert runner.flying["a"] == expected


def test_equal_rows_are_taken_from_the_engine(monkeypatch, runner):
    """Claim: the first request compares the towers' rows; from then on no tower runs."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    for name in ("a", "b"):
        runner.add(name, qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft)
    assert draft._rows_are_alike
    runner.add("c", qwen25(), video(), truth("qwen2_5_vl"))
    monkeypatch.setattr(
        type(draft._loaded.backbone), "prompts", lambda *_: pytest.fail("the tower ran")
    )
    runner.step(draft)
    assert draft._proposer is not None and "c" in draft._proposer.drafts


def test_other_rows_are_not(monkeypatch, runner):
    """Claim: where the engine's rows are another tower's, the draft looks for itself."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.encoder_cache["a"] = torch.randn_like(runner.encoder_cache["a"])
    while runner.requests:
        runner.step(draft)
    assert draft._rows_are_alike is False
    assert runner.drafted == runner.accepted
    assert not are_alike(torch.ones(2, 3), torch.ones(2, 4))


def prune(draft: Draft, runner: Runner, name: str, dropped: int) -> None:
    """Does to a request what vLLM does under ``--video-pruning-rate``: of its video the last
    ``dropped`` tokens go, the rows get their positions as further columns, and the text after the
    video moves up by what the runner computed anew."""
    model = draft._config.model_config
    model.multimodal_config = SimpleNamespace(is_multimodal_pruning_enabled=lambda: True)
    model.get_inputs_embeds_size = lambda: draft._loaded.backbone.config.hidden_size
    state = runner.requests[name]
    last = max(row for row, token in enumerate(state.prompt_token_ids) if token == VIDEO)
    stays = [row for row in range(len(state.prompt_token_ids)) if not last - dropped < row <= last]
    state.prompt_token_ids = [state.prompt_token_ids[row] for row in stays]
    state.num_prompt_tokens = len(stays)
    state.mrope_positions = state.mrope_positions[:, stays].clone()
    state.mrope_position_delta = int(state.mrope_positions.max()) + 1 - len(stays)
    rows = runner.encoder_cache[name][:-dropped]
    runner.encoder_cache[name] = torch.cat([rows, torch.zeros(len(rows), 4)], 1)


def test_under_vllms_own_pruning_the_text_is_read_at_its_positions(monkeypatch, runner, caplog):
    """Claim: where vLLM prunes videos itself, the draft reads the prompt's text at the positions
    that the runner computed after pruning, goes on after the last of them, says once that it sees
    no video, and never gives up. Fails if it counts positions by itself, takes those of the video's
    tokens, or reads pixels that no longer match the placeholders."""
    draft = loaded(monkeypatch, qwen25(), runner)
    for name in ("a", "b"):
        runner.add(name, qwen25(), video(), truth("qwen2_5_vl"))
        prune(draft, runner, name, dropped=3)
    states = dict(runner.requests)
    with caplog.at_level(logging.WARNING):
        runner.step(draft)
    for name, state in states.items():
        prompt = draft._read_prefill(name, state).prompt
        is_text = [token != VIDEO for token in state.prompt_token_ids]
        assert 0 < len(prompt) == sum(is_text) < len(is_text)
        assert torch.equal(prompt.positions, state.mrope_positions[:, is_text])
        assert prompt.next_position == int(state.mrope_positions.max()) + 1
        assert not torch.equal(prompt.positions[0], torch.arange(len(prompt)))
    while runner.requests:
        runner.step(draft)
    assert draft._proposer is not None and runner.drafted > 0
    assert runner.written == {name: list(truth("qwen2_5_vl")) for name in states}
    assert [each.getMessage() for each in caplog.records].count(caplog.messages[0]) == 1
    assert "--video-pruning-rate" in caplog.messages[0]


def test_pictures_beside_vllms_own_pruning_are_seen(monkeypatch, runner):
    """Claim: where vLLM prunes videos, a request of pictures alone is seen as ever: the columns of
    positions are cut off the engine's rows, which then equal the draft's. Control: rows that keep
    those columns are taken for another tower's."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    whole = list(runner.requests["a"].prompt_token_ids)
    kept = runner.encoder_cache["a"]
    prune(draft, runner, "a", dropped=1)
    state = runner.requests["a"]
    state.prompt_token_ids, state.num_prompt_tokens = whole, len(whole)
    positions = prompt_of(qwen25(), video())
    state.mrope_positions = positions.positions
    state.mrope_position_delta = positions.next_position - len(whole)
    state.mm_features[0].modality = "image"  # Its rows count as a picture's, which lose none.
    runner.encoder_cache["a"] = torch.cat([kept, torch.zeros(len(kept), 4)], 1)
    while runner.requests:
        runner.step(draft)
    assert draft._rows_are_alike
    assert runner.drafted == runner.accepted > 10
    assert not are_alike(kept, torch.cat([kept, torch.zeros(len(kept), 4)], 1))


def test_chunks_of_a_prompt_get_no_draft(monkeypatch, runner):
    """Claim: a row that wrote nothing gets an empty list, and its neighbours their drafts."""
    draft = loaded(monkeypatch, qwen25(), runner)
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.add("b", qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft, reading=["b"])
    assert runner.flying["a"] and not runner.flying["b"]


def test_requests_that_ended_or_wait_are_forgotten(monkeypatch, runner):
    """Claim: nothing is kept of a request that left the batch; one that comes back is read anew,
    with all it had written, and drafted for as before."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    answer = truth("qwen2_5_vl")
    runner.add("a", qwen25(), video(), answer)
    runner.add("b", qwen25(), video(), answer[:3])
    runner.step(draft)
    waiting = runner.requests.pop("a")
    runner.flying.pop("a")
    runner.step(draft)
    drafts = draft._proposer.drafts
    assert "a" not in drafts and "b" in drafts
    runner.requests = {"a": waiting}
    while runner.requests:
        runner.step(draft)
    assert runner.written["a"] == list(answer) and runner.drafted == runner.accepted
    runner.step(draft)
    assert "a" not in drafts and drafts.bytes == 0


def test_pixels_that_are_gone_cost_a_draft_and_nothing_else(monkeypatch, runner):
    """Claim: a request whose pixels are not there any more is answered without drafts."""
    draft = loaded(monkeypatch, qwen25(), runner)
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.requests["a"].mm_features[0].data = None
    runner.step(draft)
    assert runner.flying == {"a": []} and draft._proposer is not None


def test_pixels_that_were_let_go_are_not_needed_beside_rows(monkeypatch, runner):
    """Claim: a medium that kept its grid alone is drafted for from the engine's rows where the
    towers are equal, and not at all where they are not known to be or the rows are gone."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    for name in ("a", "b", "c"):
        runner.add(name, qwen25(), video(), truth("qwen2_5_vl"))
    for name in ("b", "c"):
        carried = runner.requests[name].mm_features[0]
        carried.data = {k: v for k, v in carried.data.items() if not k.startswith("pixel")}
    del runner.encoder_cache["c"]
    runner.step(draft)
    assert [len(runner.flying[name]) for name in ("a", "b", "c")] == [5, 5, 0]
    draft._rows_are_alike = False
    runner.add("d", qwen25(), video(), truth("qwen2_5_vl"))
    runner.requests["d"].mm_features = runner.requests["b"].mm_features
    runner.step(draft)
    assert runner.flying["d"] == [] and draft._proposer is not None


def test_memory_is_bounded(monkeypatch, runner):
    """Claim: caches never take more than was allowed; those who do not fit go without a draft."""
    rows = backbone(qwen25()).token_bytes
    allowed = 700 * rows  # room for one request's 576 rows and its prompt, not for two
    draft = loaded(monkeypatch, qwen25(), runner, memory=allowed / 2**30)
    for name in ("a", "b"):
        runner.add(name, qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft)
    assert sorted(len(drafted) for drafted in runner.flying.values()) == [0, 5]
    assert 0 < draft._proposer.drafts.bytes <= allowed


def test_memory_is_bounded_while_answers_grow(monkeypatch, runner):
    """Claim: where two caches have to grow in the same round and there is room for one, the other
    request goes on without drafts, and no round ends above what was allowed."""
    # Caches begin with the prompt and 64 rows.
    monkeypatch.setattr(request_drafts, "_ANSWER_ROWS", 0)
    allowed = 290 * backbone(qwen25()).token_bytes  # 2 x 95 rows, and not 2 x 142
    draft = loaded(monkeypatch, qwen25(), runner, view="full", memory=allowed / 2**30)
    for name in ("a", "b"):
        runner.add(name, qwen25(), video(), [7] * 100)
    drafts, most, rounds = draft._proposer.drafts, 0, Counter()
    while runner.requests:
        runner.step(draft)
        most = max(most, drafts.bytes)
        rounds[sum(map(bool, runner.flying.values()))] += 1
    assert rounds[2] > 40 and rounds[1] > 20 and not rounds[0]
    assert allowed / 2 < most <= allowed


@pytest.mark.parametrize(("view", "times"), [("scattered", 1), ("attention", 2)])
def test_memory_for_caches_is_reserved_until_the_engine_has_counted(
    monkeypatch, runner, view, times
):
    """Claim: from loading to the first step the process holds, in pages it really has, the memory
    of the caches, and as much again where keys of the target are kept; then it is free for them."""
    before = _resident()
    draft = loaded(monkeypatch, qwen25(), runner, view=view, memory=0.125)
    deadline = time.monotonic() + 5  # A busy system counts pages late.
    while _resident() - before <= 0.95 * times * 2**27 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _resident() - before > 0.95 * times * 2**27
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft)
    assert _resident() - before < 0.5 * 2**27


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(psutil.Process().memory_info().rss)


def test_a_failure_is_reported_once_and_ends_drafting(monkeypatch, runner, caplog):
    """Claim: whatever drafting raises, rows of the right number come back, the reason is logged
    once, and what the draft held is freed."""
    draft = loaded(monkeypatch, qwen25(), runner)
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    runner.step(draft)
    monkeypatch.setattr(Session, "score", lambda *_: (_ for _ in ()).throw(RuntimeError("torn")))
    with caplog.at_level(logging.WARNING):
        while runner.requests:
            runner.step(draft)
    assert runner.written["a"] == list(truth("qwen2_5_vl"))
    assert [entry.message.count("torn") for entry in caplog.records] == [1]
    assert draft._proposer is None


def test_near_the_longest_context_nothing_is_drafted(monkeypatch, runner):
    """Claim: no draft reaches past the longest context vLLM was told."""
    draft = loaded(monkeypatch, qwen25(), runner)
    runner.add("a", qwen25(), video(), truth("qwen2_5_vl"))
    draft._config.model_config.max_model_len = runner.requests["a"].num_prompt_tokens + 5
    runner.step(draft)
    assert runner.flying == {"a": []}


def test_text_alone_is_drafted_for_too(monkeypatch, runner):
    """Claim: a request without media is drafted for, beside one with a video."""
    draft = loaded(monkeypatch, qwen25(), runner, view="full")
    inputs = text_input() | {"mm_token_type_ids": torch.zeros(1, 12, dtype=torch.int)}
    session = Session(backbone(qwen25()), [Sampling()])
    session.prefill(backbone(qwen25()).prompts(inputs))
    answer = []
    for _ in range(12):
        answer.append(int(session.score({0: Tree()})[0].rows[0].argmax()))
        session.commit({0: answer[-1:]})
    runner.add("text", qwen25(), inputs, answer)
    runner.add("video", qwen25(), video(), truth("qwen2_5_vl"))
    while runner.requests:
        runner.step(draft)
    assert runner.drafted == runner.accepted > 30


def test_a_draft_of_another_family_is_refused(monkeypatch, runner):
    """Claim: a draft that would need another processor's pixels is refused by name, while the
    engine starts; one without eyes is not."""
    with pytest.raises(ModelError, match="target's family, qwen2_5_vl"):
        loaded(monkeypatch, FAMILIES["qwen2_vl"](), runner)
    assert loaded(monkeypatch, llama(), runner)._proposer is not None


def test_options_are_refused_while_the_engine_starts(runner):
    """Claim: an option that means nothing ends in an error when the class is made."""
    with pytest.raises(OptionError, match="unknown option 'vieww'"):
        Draft(config(vieww="full"), runner)


def test_bytes_are_scaled_as_the_processor_would():
    """Claim: patches and pictures carried as bytes come out as (value x rescale - mean) / std, by
    channel; floats are left alone."""
    rule = SimpleNamespace(
        image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7], rescale_factor=1 / 255
    )
    pictures = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    mean, std = torch.tensor(rule.image_mean), torch.tensor(rule.image_std)
    real = (pictures.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(mm_features.normalize_pixels(pictures, rule), real)
    patches = pictures.reshape(2, -1)
    torch.testing.assert_close(mm_features.normalize_pixels(patches, rule), real.reshape(2, -1))
    assert mm_features.normalize_pixels(real, None) is real


def test_a_request_s_value_goes_to_each_of_its_drafted_tokens():
    """Claim: what mends vLLM's sampler on a CPU repeats a value once a drafted token, of any type,
    leaves requests without drafts out, and exchanges the value that stands for greedy."""
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    heat = cpu_fixes.expand_to_tokens(
        torch.tensor([0.5, 0.7, 0.0]), ends, 5, replace_from=0, replace_to=1
    )
    assert heat.tolist() == [0.5, 0.5, 1, 1, 1]
    ks = cpu_fixes.expand_to_tokens(torch.tensor([3, 5, 9], dtype=torch.int32), ends, 5)
    assert ks.tolist() == [3, 3, 9, 9, 9] and ks.dtype == torch.int32


def test_limits_meet_rows_or_nothing_happens():
    """Claim: a limit that cannot take a maximum of nothing is not asked where there is no row."""

    def limit(logits: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return logits.masked_fill(logits < logits.topk(int(k.max())).values[:, -1:], -torch.inf)

    with pytest.raises(RuntimeError):
        limit(torch.empty(0, 4), torch.empty(0, dtype=torch.int))
    mended = cpu_fixes.skip_empty(limit)
    assert mended(torch.empty(0, 4), torch.empty(0, dtype=torch.int)).shape == (0, 4)
    assert mended(torch.tensor([[1.0, 2.0]]), torch.tensor([1])).tolist() == [[-torch.inf, 2.0]]
