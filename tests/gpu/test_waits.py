"""Claims about what is sent to a GPU and waited for, over a pretended one: no more than needed."""

from __future__ import annotations

import pickle
from copy import deepcopy
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from helpers import FAMILIES, input_for, qwen35
from pretended import pretend_gpus

import saccade
from saccade.core.errors import OptionError
from saccade.core.sampling import BrokenLaw, Sampling, Scores
from saccade.core.tree import Tree, add, chain
from saccade.inputs.loading import load, load_pair
from saccade.model.attention import Step
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache, HeadShape
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.kernels.attention_mass import attention_mass
from saccade.model.prefix_cache import PrefixCache
from saccade.model.segments import Segment
from saccade.model.session import Session

LOGITS = torch.tensor([[1.0, 3.0, 2.5], [0.5, 0.0, 4.0], [9.0, 8.0, 7.0]])


def _scores(logits: torch.Tensor, device: str) -> Scores:
    rows = [row.to(device) for row in logits]
    return Scores(chain([0] * (len(rows) - 1)), rows, Sampling(), [], 0)


def test_a_step_waits_once():
    """Claim: a greedy law, the laws of all nodes, and the likeliest tokens of a level are each one
    wait for the GPU, and what they are on a CPU; NaN is refused as there. Fails if a value and its
    NaN are fetched one after the other, or each node by itself."""
    on_cpu = _scores(LOGITS, "cpu")
    with pretend_gpus() as record:
        scores, spoilt = _scores(LOGITS, "cuda"), LOGITS.clone()
        spoilt[1, 0] = float("nan")
        broken = _scores(spoilt, "cuda")
        record.clear()
        assert scores.law(0) == on_cpu.law(0) == 2
        assert record.counts["sync"] == 1
        record.clear()
        laws = scores.every_law()
        assert [laws(node) for node in (-1, 0, 1)] == [1, 2, 0]
        assert record.counts["sync"] == 1
        record.clear()
        assert scores.tops({-1: 2, 0: 1, 1: 3}) == {-1: [1, 2], 0: [2], 1: [0, 1, 2]}
        assert record.counts["sync"] == 1
        for law in (broken.law, broken.every_law()):
            with pytest.raises(BrokenLaw):
                law(0)
    assert on_cpu.tops({-1: 2, 0: 1, 1: 3}) == {-1: [1, 2], 0: [2], 1: [0, 1, 2]}


def test_a_greedy_draft_step_is_one_replay_and_one_small_copy():
    """Claim: a captured step of a greedy draft is sent its inputs without a wait, is one replay,
    and gives its token in one copy that the host waits for. Besides only its logits are copied.
    Fails if the arg-max, its check for NaN or the ids that a draft may not choose are kernels of
    their own."""
    with pretend_gpus() as record:
        model = Backbone(deepcopy(FAMILIES["qwen2_5_vl"](0)).to("cuda"))
        session = Session(model, [Sampling()], vocab=180, banned=[7, 8])
        session.prefill(model.prompts(input_for("qwen2_5_vl")))
        tree = Tree()
        for step in range(4):
            record.clear()
            tree = add(tree, step - 1, session.score({0: tree})[0].law(step - 1))
            counts = dict(record.counts)
            capture_new_sizes()
    # The two launches are the copy of the inputs and the copy of the logits.
    assert counts == {"upload": 1, "replay": 1, "download": 1, "sync": 1, "launch": 2}


def test_an_accepted_path_is_sent_once():
    """Claim: the rows that a cache keeps are sent to the GPU once, not once a layer, and nobody
    waits for it. Fails if each layer's copy sends them again."""
    with pretend_gpus() as record:
        cache = Cache([HeadShape(2, 4, 4)] * 6, 16, devices=[torch.device("cuda:0")] * 6)
        cache.advance(3)
        record.clear()
        cache.commit_path([0, 2, 5])
        assert (record.counts["upload"], record.counts["sync"]) == (1, 0) and cache.length == 6


def test_attention_written_down_on_a_gpu_is_few_launches():
    """Claim: what 40 rows attend to over 4,000 keys takes a GPU a few launches a layer. Fails if
    rows are split by what a processor's caches hold."""
    with pretend_gpus() as record:
        keys = [torch.randn(2, 4000, 16, device="cuda") for _ in range(2)]
        rows = [torch.randn(4, 40, 16, device="cuda") for _ in range(2)]
        record.clear()
        attention_mass(keys, rows, torch.arange(3961, 4001), torch.arange(10, 900, device="cuda"))
        assert record.counts["launch"] <= 2 * 20


def test_pixels_are_digested_before_they_are_sent():
    """Claim: where what a vision tower gave is kept, pixels are never fetched back from the GPU to
    be told apart, and equal ones are not looked at twice. Fails if a digest is taken there."""
    with pretend_gpus() as record:
        cached = PrefixCache(2**28)
        model = Backbone(deepcopy(FAMILIES["qwen2_5_vl"](0)).to("cuda")).with_prefix_cache(cached)
        model.prompts(input_for("qwen2_5_vl"))
        first = {key for key, _ in model.prefix_cache.items() if isinstance(key, tuple)}
        record.clear()
        model.prompts(input_for("qwen2_5_vl"))
        digests = ("prefix_cache.py", "vision_cache.py")
        fetched = [line for line, _ in record.worst("download")]
        assert not any(file in line and "cpu" in line for line in fetched for file in digests)
        again = {key for key, _ in model.prefix_cache.items() if isinstance(key, tuple)}
        assert again == first and first


@pytest.mark.parametrize("has_cache", [False, True])
def test_pixels_are_uploaded_from_pinned_memory(has_cache):
    """Claim: what a processor gave is copied to a GPU from pinned memory, with and without a cache
    of prefixes, so that the host goes on. Fails if pixels are staged while the host waits."""
    with pretend_gpus() as record:
        model = Backbone(deepcopy(FAMILIES["qwen2_5_vl"](0)).to("cuda"))
        model = model.with_prefix_cache(PrefixCache(2**28) if has_cache else None)
        inputs = input_for("qwen2_5_vl")
        record.clear()
        model.prompts(inputs)
    uploads = [line for line, _ in record.worst("upload", 99) if "[.to]" in line]
    assert any("cache.py" in line for line in uploads)
    # Transformers makes some small tensors of numbers by itself.
    assert not any("[.to]" in line and "cache.py" in line for line in record.pageable)
    assert not any("_language_model_arguments [.to]" in line for line in record.pageable)


def test_weights_are_read_to_where_they_are_to_be():
    """Claim: a model that is loaded to a GPU is nowhere whole in main memory: its modules are made
    on the GPU. Fails if they are read on the CPU and moved afterwards."""
    with pretend_gpus(2), pytest.MonkeyPatch.context() as patch:
        moved: list[torch.device] = []
        to = torch.nn.Module.to

        def noted(self, *args, **kwargs):
            moved.extend(weight.device for weight in self.parameters())
            return to(self, *args, **kwargs)

        patch.setattr(torch.nn.Module, "to", noted)
        loaded = load("shapes-draft", device="cuda:1")
        assert {str(device) for device in moved} <= {"cuda:1"}
        assert {str(w.device) for w in loaded.backbone.model.parameters()} == {"cuda:1"}


@pytest.mark.extra
def test_a_draft_device_is_the_drafts():
    """Claim: `draft_device` says where the draft is and the target stays where it was to be. One
    sentence says so where there is no draft, or no such device. Fails if it is ignored."""
    with pretend_gpus(2):
        target, draft = load_pair("shapes", None, device="cuda:0", draft_device="cuda:1")
        places = [str(model.backbone.device) for model in (target, draft)]
        assert places == ["cuda:0", "cuda:1"]
        model = saccade.load(device="cuda:0", draft_device="cuda:1")
        assert str(model.pair.draft_backbone.device) == "cuda:1"
    with pytest.raises(OptionError, match="there is none"):
        load_pair("some/model", None, draft_device="cpu")
    with pytest.raises(OptionError, match="not available"):
        load_pair("shapes", None, draft_device="cuda:7")


def test_a_model_is_fused_once():
    """Claim: a second decoder over modules that are fused already uses that memory; weights changed
    in place are changed in both. Fails if it is copied again."""
    model = deepcopy(FAMILIES["qwen2_5_vl"](0))
    one, other = Backbone(model), Backbone(model)
    assert one.fused and other.fused
    for a, b in zip(one.fused.layers, other.fused.layers, strict=True):
        assert a.qkv.weight.data_ptr() == b.qkv.weight.data_ptr()
        assert a.gate_up.weight.data_ptr() == b.gate_up.weight.data_ptr()


def test_a_model_that_is_sent_is_fused_where_it_is():
    """Claim: a model that another process gets by way of shared memory, as a draft's process does,
    is fused without a copy of its weights. Fails if the other process stacks them again."""
    model = deepcopy(FAMILIES["qwen2_5_vl"](0))
    Backbone(model)
    received = pickle.loads(ForkingPickler.dumps(model))
    places = [layer.self_attn.q_proj.weight.data_ptr() for layer in received.get_decoder().layers]
    fused = Backbone(received).fused
    assert fused is not None
    assert [layer.qkv.weight.data_ptr() for layer in fused.layers] == places


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_rows_need_no_mask_over_all_keys(dtype):
    """Claim: the mask of an ordinary forward of a few rows on a GPU is as wide as its own rows, for
    chains and for trees, and its attention is that of a CPU. Fails if it is as wide as the cache.
    """
    tree = torch.ones(5, 7, dtype=torch.bool).tril_(2)
    tree[3, 4] = False
    q, k, v = torch.randn(4, 5, 16), torch.randn(2, 405, 16), torch.randn(2, 405, 16)

    def attend(device: str, block: torch.Tensor | None) -> tuple[torch.Tensor, Step]:
        cache = Cache([HeadShape(2, 16, 16)] * 1, 500, dtype=dtype, devices=[torch.device(device)])
        cache.keys[0][:, :400], cache.values[0][:, :400] = (
            each[:, :400].to(device, dtype) for each in (k, v)
        )
        step = Step([Segment(cache, 0, 5, 400, block)], 2, dtype)
        new = (each.to(device, dtype) for each in (q, k[:, 400:], v[:, 400:]))
        return step(0, *new, 0.25).float().cpu(), step

    for block in (None, tree):
        truth, _ = attend("cpu", block)
        with pretend_gpus():
            output, step = attend("cuda:0", block)
            ((_, mask),) = step._kernels
            assert mask is not None and mask.shape[-1] == (5 if block is None else 7)
        assert torch.allclose(output, truth, atol=1e-5 if dtype == torch.float32 else 2e-2)


def test_a_hybrids_step_waits_for_nothing():
    """Claim: scoring and committing with layers that have a state never wait for the GPU, and an
    accepted path is sent to it once for all of these layers. Fails if the host reads what it sent
    before, as which rows are on which path."""
    with pretend_gpus() as record:
        model = Backbone(deepcopy(qwen35(0)).to("cuda"))
        session = Session(model, [Sampling()])
        session.prefill(model.prompts(input_for("qwen3_5")))
        session.score({0: chain([1])})
        session.commit({0: [1, 2]})
        record.clear()
        session.score({0: chain([3, 4])})
        assert record.counts["sync"] == record.counts["download"] == 0
        record.clear()
        session.commit({0: [3, 4, 5]})
        assert dict(record.counts).keys() <= {"upload", "launch"}
        assert record.counts["upload"] <= 1
