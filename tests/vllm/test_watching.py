"""Claims about attention watched in another engine's layers, against our own recording."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import VIDEO, backbone, prompt_of, qwen25
from helpers import video_input as video

from saccade.core.sampling import Sampling
from saccade.model.attention import Step
from saccade.model.session import Session
from saccade.vllm.attention_watch import AttentionWatch


class Impl:
    num_heads, num_kv_heads, scale = 4, 2, 32**-0.5

    def forward(self, layer, query, key, value, cache, meta, output=None):
        return "attended"


def _layers(count: int) -> dict[str, SimpleNamespace]:
    kinds = ["encoder_only", *["decoder"] * count]
    return {str(i): SimpleNamespace(impl=Impl(), attn_type=k) for i, k in enumerate(kinds)}


def _recorded():
    """Our recording of a prompt, and every layer's rotated queries and keys."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    call = Step.__call__

    def noted(self, layer, q, k, v, scale):
        seen.append((q.transpose(0, 1).clone(), k.transpose(0, 1).clone()))
        return call(self, layer, q, k, v, scale)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Step, "__call__", noted)
        session = Session(backbone(qwen25(), False), [Sampling()])
        prefill = session.prefill([prompt_of(qwen25(), video())], record=True)[0]
    return prefill, seen


@pytest.mark.parametrize("cuts", [(31,), (10, 20, 31), (28, 31), (1, 30, 31)])
def test_what_is_watched_is_what_we_record(cuts):
    """Claim: mass and relevance of a prompt read in one piece or in chunks, beside a decoding
    request, are those of our own prefill up to rounding."""
    prefill, seen = _recorded()
    layers = _layers(len(seen))
    ids = video()["input_ids"][0].tolist()
    batch = SimpleNamespace(req_ids=["old", "new"], num_computed_tokens_cpu=np.zeros(2, int))
    decoding = SimpleNamespace(num_prompt_tokens=3, mm_features=[1], prompt_token_ids=[1, 2, VIDEO])
    reading = SimpleNamespace(num_prompt_tokens=31, mm_features=[1], prompt_token_ids=ids)
    runner = SimpleNamespace(input_batch=batch, requests={"old": decoding, "new": reading})
    watch = AttentionWatch(runner, layers, {VIDEO: "video"})
    start = 0
    for stop in cuts:
        batch.num_computed_tokens_cpu = np.array([3, start])
        meta = SimpleNamespace(query_start_loc=torch.tensor([0, 1, 1 + stop - start]))
        for layer, (q, k) in zip(list(layers.values())[1:], seen, strict=True):
            query, key = (torch.cat([t[:1], t[start:stop]]) for t in (q, k))
            assert layer.impl.forward(layer, query, key, key, None, meta, output=None) == "attended"
        start = stop
    attention = watch.take("new")
    assert attention is not None and watch.take("new") is None and watch.take("old") is None
    torch.testing.assert_close(attention[0], prefill.mass)
    torch.testing.assert_close(attention[1], prefill.relevance)


def test_a_prompt_without_text_after_its_media_is_not_watched():
    """Claim: where no text follows the media there is nothing that could be recorded, so there is
    no attention, and no key is stored. Fails if a view gets zeros to choose by."""
    _, seen = _recorded()
    layers = _layers(len(seen))
    ids = [1, VIDEO, VIDEO]
    reading = SimpleNamespace(num_prompt_tokens=3, mm_features=[1], prompt_token_ids=ids)
    batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=np.array([0]))
    watch = AttentionWatch(
        SimpleNamespace(input_batch=batch, requests={"a": reading}), layers, {VIDEO: "video"}
    )
    meta = SimpleNamespace(query_start_loc=torch.tensor([0, 3]))
    for layer, (q, k) in zip(list(layers.values())[1:], seen, strict=True):
        layer.impl.forward(layer, q[:3], k[:3], k[:3], None, meta)
    assert not watch._prompts and watch.take("a") is None


def test_keys_of_prompts_under_way_are_bounded():
    """Claim: of two prompts whose keys would together take more than is allowed the second passes
    by unseen; one that comes when the first has been read to its end is watched."""
    _, seen = _recorded()
    layers = _layers(len(seen))
    ids = video()["input_ids"][0].tolist()
    one = len(seen) * 31 * seen[0][1][0].numel() * 4  # bytes of a prompt's keys
    reading = SimpleNamespace(num_prompt_tokens=31, mm_features=[1], prompt_token_ids=ids)
    batch = SimpleNamespace(req_ids=["a", "b"])
    runner = SimpleNamespace(input_batch=batch, requests={"a": reading, "b": reading, "c": reading})
    watch = AttentionWatch(runner, layers, {VIDEO: "video"}, 1.5 * one)

    def step(starts: list[int], count: int) -> None:
        batch.num_computed_tokens_cpu = np.array(starts)
        meta = SimpleNamespace(query_start_loc=torch.arange(3) * count)
        for layer, (q, k) in zip(list(layers.values())[1:], seen, strict=True):
            rows = [t[starts[0] : starts[0] + count].repeat(2, 1, 1) for t in (q, k)]
            layer.impl.forward(layer, *rows, rows[1], None, meta)

    step([0, 0], 16)
    step([16, 16], 15)
    assert watch.take("b") is None
    batch.req_ids = ["c", "b"]
    step([0, 31], 31)
    assert watch.take("a") is not None and watch.take("c") is not None


def test_what_came_from_a_prefix_cache_is_not_guessed():
    """Claim: a prompt whose beginning was not read gives nothing; so does one not read to its end;
    requests that ended are forgotten, and a closed watch leaves the layers as they were."""
    _, seen = _recorded()
    layers = _layers(len(seen))
    ids = video()["input_ids"][0].tolist()
    reading = SimpleNamespace(num_prompt_tokens=31, mm_features=[1], prompt_token_ids=ids)
    batch = SimpleNamespace(req_ids=["a"], num_computed_tokens_cpu=np.array([16]))
    runner = SimpleNamespace(input_batch=batch, requests={"a": reading})
    watch = AttentionWatch(runner, layers, {VIDEO: "video"})
    for start, stop in ((16, 31), (0, 16)):
        batch.num_computed_tokens_cpu = np.array([start])
        meta = SimpleNamespace(query_start_loc=torch.tensor([0, stop - start]))
        for layer, (q, k) in zip(list(layers.values())[1:], seen, strict=True):
            layer.impl.forward(layer, q[start:stop], k[start:stop], k[start:stop], None, meta)
        if start:
            assert watch.take("a") is None
    assert watch._prompts
    runner.requests = {}
    watch.forget_ended()
    assert not watch._prompts
    watch.close()
    assert all("forward" not in vars(layer.impl) for layer in layers.values())
    assert "forward" not in vars(layers["0"].impl)


def test_what_fails_in_watching_costs_the_target_nothing(caplog):
    """Claim: an error while looking is told once, every layer attends as before, and nothing is
    looked at from then on."""
    layers = _layers(2)
    watch = AttentionWatch(
        SimpleNamespace(requests={}), layers, {VIDEO: "video"}
    )  # without a batch
    row, meta = torch.zeros(1, 4, 32), SimpleNamespace(query_start_loc=torch.tensor([0, 1]))
    for layer in list(layers.values())[1:]:
        assert layer.impl.forward(layer, row, row, row, None, meta, output=None) == "attended"
        assert "forward" not in vars(layer.impl)
    assert [entry.message.count("input_batch") for entry in caplog.records] == [1]
    assert watch.take("a") is None
    watch.close()
