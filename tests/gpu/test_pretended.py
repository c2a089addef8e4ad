"""Claims about the pretended device itself: it refuses and counts what a GPU would."""

from __future__ import annotations

import copy
import threading
import warnings

import pytest
import torch
from pretended import CaptureError, DeviceMix, pretend_gpus, unobserved
from torch import nn


def _on(value: list[float], device: int = 0) -> torch.Tensor:
    return torch.tensor(value, device=f"cuda:{device}")


def _capture(graph, work, **settings):
    with torch.cuda.graph(graph, **settings):
        return work()


def test_tensors_of_unlike_devices_do_not_meet():
    """Claim: an operation over tensors of a GPU and of the CPU, or of two GPUs, raises; single
    numbers of the CPU may take part. Fails if the tags are lost on the way through views."""
    with pretend_gpus(2):
        here, there, host = _on([1.0, 2.0]), _on([1.0, 2.0], 1), torch.tensor([1.0, 2.0])
        assert (here.device, there.device) == (torch.device("cuda:0"), torch.device("cuda:1"))
        assert host.device == torch.device("cpu")
        for stranger in (host, there):
            with pytest.raises(DeviceMix):
                here + stranger
            with pytest.raises(DeviceMix):
                torch.stack([here[:1], stranger[:1]])
            with pytest.raises(DeviceMix):
                here.index_copy_(0, torch.tensor([0, 1]), stranger)
            with pytest.raises(DeviceMix):
                nn.functional.rms_norm(here, (2,), stranger)
        assert (here + torch.tensor(1.0)).device == here.device
        assert (here.view(2, 1).t() * 2).is_cuda
        assert here.to(there).device == there.device
        with pytest.raises(TypeError, match="numpy"):
            here.numpy()


def test_waits_and_copies_are_counted_by_line():
    """Claim: what makes the host wait, and each copy between host and device, is counted once with
    the line that caused it; a kernel is a launch, a view is nothing. Fails if a kind is missed."""
    with pretend_gpus() as record:
        x = _on([3.0, 1.0, 2.0])
        assert record.counts == {"upload": 1}
        record.clear()
        y = x.sort().values[1:].view(1, 2)
        assert record.counts == {"launch": 1}
        record.clear()
        for wait in (
            lambda: y.sum().item(),
            lambda: bool((y > 0).all()),
            lambda: x.nonzero(),
            lambda: x[x > 1],
            lambda: x.repeat_interleave(torch.ones(3, dtype=torch.long, device="cuda")),
            lambda: torch.cuda.synchronize(),
            lambda: torch.cuda.current_stream().synchronize(),
        ):
            record.clear()
            wait()
            assert record.counts["sync"] == 1, record
            assert record.transfers == 0
            assert next(iter(record.lines["sync"])).startswith("test_pretended.py:")
        for download in (x.tolist, x.cpu, lambda: x.to("cpu"), lambda: torch.empty(3).copy_(x)):
            record.clear()
            download()
            assert (record.counts["download"], record.counts["sync"]) == (1, 1)
        record.clear()
        x.copy_(torch.zeros(3))
        x[torch.tensor([0, 1])] = x[1:].clone()
        x[[0, 1]]
        assert record.counts["upload"] == 3
        record.clear()
        with unobserved():
            assert x.sum().item() == 0
        assert not record.counts


def test_pinned_memory_is_what_was_pinned():
    """Claim: only memory that was pinned copies without a wait, and uploads from other memory are
    listed. Fails if `is_pinned` is a guess."""
    with pretend_gpus() as record:
        usual, pinned = torch.zeros(3), torch.zeros(3, pin_memory=True)
        assert not usual.is_pinned() and pinned.is_pinned() and usual.pin_memory().is_pinned()
        device = torch.zeros(3, device="cuda")
        pinned.copy_(device, non_blocking=True)
        assert record.counts["sync"] == 0
        usual.copy_(device, non_blocking=True)
        assert record.counts["sync"] == 1
        record.clear()
        pinned.to("cuda", non_blocking=True)
        assert record.counts["upload"] == 1 and not record.pageable
        for upload in (lambda: usual.to("cuda", non_blocking=True), lambda: pinned.to("cuda")):
            record.clear()
            upload()
            assert record.counts["upload"] == record.pageable.total() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_lays_rows_before_heads(dtype):
    """Claim: what attention gives on a GPU is right and not contiguous, from torch's call and from
    the flash operation, also when it is replayed. Fails if code that views it as heads of rows
    passes."""
    q, k, v = (torch.randn(1, 4, 3, 16).to(dtype) for _ in range(3))
    attend = nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v)
    with pretend_gpus():
        there = [each.to("cuda") for each in (q, k, v)]
        out = attend(*there)
        results = [out]
        if dtype == torch.bfloat16:
            results += [torch.ops.aten._scaled_dot_product_flash_attention(*there)[0]]
        graph = torch.cuda.CUDAGraph()
        results += [_capture(graph, lambda: attend(*there))]
        graph.replay()
        for each in results:
            assert torch.allclose(each.cpu().float(), expected.float(), atol=1e-2)
            assert not each.is_contiguous() and each.transpose(1, 2).is_contiguous()
            with pytest.raises(RuntimeError, match="view"):
                each.view(12, 16)


def test_a_graph_repeats_on_the_same_memory():
    """Claim: a capture runs once and is recorded; each replay computes anew from what its inputs
    hold by then, into the same outputs, also through views, in-place work and what it makes itself.
    Fails if a replay gives what the capture gave."""
    with pretend_gpus() as record:
        x, total = _on([1.0, 2.0]), torch.zeros(2, device="cuda")
        graph = torch.cuda.CUDAGraph()

        def work():
            made = torch.arange(2, device="cuda")
            total.add_(x)
            return (x.view(2, 1) * 2).flatten() + made

        out = _capture(graph, work)
        assert record.sizes == [4] and record.counts["capture"] == 1
        with unobserved():
            x.copy_(torch.tensor([10.0, 20.0]))
        record.clear()
        graph.replay()
        assert record.counts == {"replay": 1}
        assert out.tolist() == [20.0, 41.0]
        assert total.tolist() == [11.0, 22.0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.zeros(2)),
        lambda x: torch.tensor([1.0], device="cuda"),
        lambda x: x[x > 0],
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_a_wait_in_a_capture_raises(wait):
    """Claim: a sync or a copy from pageable memory during a capture is an error, as on a GPU.
    Fails if it is only counted."""
    with pretend_gpus():
        x = _on([1.0, 2.0])
        with pytest.raises(CaptureError):
            _capture(torch.cuda.CUDAGraph(), lambda: wait(x))
        assert x.sum().item() == 3.0  # outside of captures all of it is allowed


def test_a_pinned_copy_is_part_of_a_capture():
    """Claim: a copy from pinned memory is recorded, and a replay reads that memory again."""
    with pretend_gpus():
        host, x = torch.zeros(2, pin_memory=True), _on([1.0, 2.0])
        graph = torch.cuda.CUDAGraph()
        _capture(graph, lambda: x.copy_(host, non_blocking=True))
        host.fill_(7.0)
        graph.replay()
        assert x.tolist() == [7.0, 7.0]


def test_a_capture_on_the_wrong_stream_stays_empty():
    """Claim: without a stream of the device whose work it is, a capture records nothing, warns, and
    its replays leave the first output standing; with one it is whole. Fails if a capture takes
    whatever runs."""
    with pretend_gpus(2):
        for place in (0, 1):
            x = _on([1.0, 2.0], place)
            graphs = []
            for stream in (None, torch.cuda.Stream(device=place)):
                graph = torch.cuda.CUDAGraph()
                with warnings.catch_warnings(record=True) as warning_list, torch.cuda.device(place):
                    warnings.simplefilter("always")
                    out = _capture(graph, lambda x=x: x * 2, stream=stream)
                graphs.append((graph, out, any("empty" in str(w.message) for w in warning_list)))
            with unobserved():
                x.copy_(torch.tensor([5.0, 6.0]))
            for (graph, out, is_empty), has_stream in zip(graphs, (False, True), strict=True):
                stays_empty = place == 1 and not has_stream
                assert is_empty == stays_empty
                graph.replay()
                assert out.tolist() == ([2.0, 4.0] if stays_empty else [10.0, 12.0])


def test_graphs_of_one_pool_share_memory():
    """Claim: a replay spoils what graphs captured later in its pool gave, not what earlier ones
    gave, and not what those of other pools gave. Fails if each graph has memory of its own."""
    with pretend_gpus():
        x, pool = _on([1.0, 2.0]), torch.cuda.graph_pool_handle()
        first, second, apart = (torch.cuda.CUDAGraph() for _ in range(3))
        a = _capture(first, lambda: x * 2, pool=pool)
        b = _capture(second, lambda: x * 3, pool=pool)
        c = _capture(apart, lambda: x * 4)
        second.replay()
        assert a.tolist() == [2.0, 4.0]
        first.replay()
        assert b.isnan().all() and c.tolist() == [4.0, 8.0]
        second.replay()
        assert b.tolist() == [3.0, 6.0]


def test_streams_belong_to_a_device():
    """Claim: a stream's block makes its device the current one and puts the old one back; a stream
    that waits for a captured one is captured with it."""
    with pretend_gpus(2):
        side = torch.cuda.Stream(device=1)
        with torch.cuda.stream(side):
            assert torch.cuda.current_device() == 1
            assert torch.cuda.current_stream() is side
            assert torch.zeros(1, device="cuda").device.index == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.current_stream(1) is torch.cuda.default_stream(1)
        x, graph, other = _on([1.0, 2.0]), torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            first = torch.cuda.current_stream()
            other.wait_stream(first)
            with torch.cuda.stream(other):
                out = x * 2
            first.wait_stream(other)
        x.fill_(4.0)
        graph.replay()
        assert out.tolist() == [8.0, 8.0]


def test_models_move_and_memory_is_counted():
    """Claim: a module moves whole, a copy of it stays there, memory is the sum of live tensors, and
    threads see the device too. Fails if a thread's tensors count as the CPU's."""
    with pretend_gpus():
        before = torch.cuda.memory_allocated()
        model = nn.Linear(16, 4).to("cuda")
        assert all(weight.is_cuda for weight in copy.deepcopy(model).parameters())
        assert torch.cuda.memory_allocated() - before == 4 * (16 * 4 + 4)
        heard = []

        def work():
            heard.append(model(torch.ones(1, 16, device="cuda")).device.type)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert heard == ["cuda"]


def test_everything_is_put_back():
    """Claim: after the block torch is as before, also after an error, and no tensor is tagged.
    Fails if a patch leaks into other tests."""
    names = [name for name in dir(torch.cuda) if not name.startswith("__")]
    before = {name: getattr(torch.cuda, name) for name in names}
    run = threading.Thread.run
    with pytest.raises(ZeroDivisionError), pretend_gpus():
        assert torch.cuda.is_available()
        left = torch.zeros(2, device="cuda")
        raise ZeroDivisionError
    assert {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if name in before} == before
    assert threading.Thread.run is run and not torch.cuda.is_available()
    assert left.device == torch.device("cpu") and not left.is_cuda and left.get_device() == -1
    assert "device" not in vars(torch.Tensor)
    assert (left + torch.ones(2)).tolist() == [1.0, 1.0]
