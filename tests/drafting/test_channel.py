"""Claims about the line between a draft's process and its parent: messages arrive whole, tensors
stay what they are, and no descriptor is written to that is not the line's own."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from saccade.drafting.parallel.channel import (
    MAX_DESCRIPTORS,
    MAX_INLINE_BYTES,
    Channel,
    ConnectionClosed,
    SharedTensor,
)

Line = tuple[Channel, Channel]


@pytest.fixture
def line() -> Iterator[Line]:
    here, there = map(Channel, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def no_more_descriptors(spare: int = 0) -> Iterator[None]:
    """In this block only so many more files can be opened."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    while fillers[-1] < highest:  # no number below it is free any more
        fillers.append(os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 1 + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for each in fillers:
            os.close(each)


SIZES = {"small": 8, "large": MAX_INLINE_BYTES}


@pytest.mark.parametrize("size", SIZES)
def test_tensors_arrive_as_they_were(line, size):
    """Claim: numbers, shapes, strides and types of tensors survive, an empty one among them, and
    tensors over one storage share it again. Fails if an empty tensor's neighbour is taken for it.
    """
    here, there = line
    whole = torch.randn(SIZES[size], 6)
    sent = {
        "empty": torch.empty(5, 0),
        "whole": whole,
        "none": torch.empty(0, dtype=torch.long),
        "part": whole[3:5, ::2],
        "turned": whole.t(),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.randn(9).bfloat16(),
        "yes": torch.tensor([True, False]),
    }
    here.send(("a message", sent))
    name, tensors = there.receive(1.0)
    assert name == "a message"
    for key, tensor in sent.items():
        assert tensors[key].dtype == tensor.dtype and tensors[key].stride() == tensor.stride()
        assert torch.equal(tensors[key], tensor)
    tensors["whole"][3] = 7.0
    assert (tensors["part"][0] == 7).all() and (tensors["turned"][:, 3] == 7).all()
    assert not (whole[3] == 7).any(), "the sender's memory is its own"


def test_a_message_may_have_no_numbers(line):
    """Claim: a message whose tensors are all empty arrives. Fails where a file is looked for that
    was not sent, as beside tensors that stay on a GPU."""
    here, there = line
    here.send(("prompt", torch.empty(0, 3)))
    name, received = there.receive()
    assert name == "prompt" and received.shape == (0, 3)


def test_a_model_arrives_with_its_ties(line):
    """Claim: a model arrives whole, its tied weights are one parameter, and it takes no descriptor
    here or there once it has arrived, however many weights it has."""
    here, there = line
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(60)))
    model.append(nn.Linear(40, 40, bias=False))
    model[-1].weight = model[0].weight
    before = descriptors()
    with no_more_descriptors(spare=2):
        here.send(model)
        model_copy = there.receive(1.0)
    assert descriptors() <= before  # an object of an earlier test may close its own meanwhile
    assert model_copy[-1].weight is model_copy[0].weight and model_copy[0].weight.requires_grad
    assert all(map(torch.equal, model_copy.state_dict().values(), model.state_dict().values()))


def test_a_shared_tensor_may_be_empty():
    """Claim: a tensor without numbers is shared like any other. Fails if there is no memory that
    can be mapped."""
    assert SharedTensor((0, 3)).tensor.shape == (0, 3)


def test_memory_is_shared_both_ways(line):
    """Claim: what one end writes into a shared tensor the other end reads."""
    here, there = line
    mine = SharedTensor((2, 3, 4))
    here.send({"laws": mine, "large": torch.ones(MAX_INLINE_BYTES)})
    message = there.receive(1.0)
    message["laws"].tensor[1, 2] = 5.0
    assert mine.tensor[1, 2].tolist() == [5.0] * 4 and not mine.tensor[0].any()
    mine.tensor[0, 0, 0] = 2.0
    assert message["laws"].tensor[0, 0, 0] == 2


def test_messages_come_in_order_and_one_at_a_time(line):
    """Claim: any number of messages arrive in order, and none is none."""
    here, there = line
    assert there.receive(0.0) is None
    for number in range(50):
        here.send((number, torch.full((3,), number)))
    for number in range(50):
        label, tensor = there.receive(0.0)
        assert label == number and tensor.tolist() == [number] * 3
    assert there.receive(0.01) is None


def test_what_was_sent_before_the_end_is_received_first(line):
    """Claim: messages of an end that is closed are all received, and only then that it is."""
    here, there = line
    here.send("one")
    here.send(torch.ones(MAX_INLINE_BYTES))
    here.close()
    assert there.receive(0.0) == "one"
    assert there.receive(0.0).sum() == MAX_INLINE_BYTES
    with pytest.raises(ConnectionClosed):
        there.receive(0.0)
    with pytest.raises(ConnectionClosed):
        there.send("anything")


def test_a_line_that_is_closed_writes_to_nobodys_file(line, tmp_path):
    """Claim: after a line's end was closed, a file that has its number stays as it is, and sending
    fails; closing it again closes nothing else. Fails if anything keeps the number itself."""
    here, _ = line
    number = here._socket.fileno()
    here.close()
    with open(tmp_path / "log", "w+b", buffering=0) as file:
        assert file.fileno() == number, "the test proves nothing"
        for message in ("small", torch.ones(MAX_INLINE_BYTES)):
            with pytest.raises(ConnectionClosed):
                here.send(message, 0.0)
        with pytest.raises(ConnectionClosed):
            here.receive(0.0)
        here.close()
        file.write(b"still open")
    assert (tmp_path / "log").read_bytes() == b"still open"


def test_an_end_that_reads_nothing_is_waited_for_no_longer_than_said(line):
    """Claim: a full line is an error in time, and not a wait without end."""
    here, _ = line
    with pytest.raises(TimeoutError):
        for _ in range(10**6):
            here.send(b"x" * 10_000, 0.0)


def test_messages_that_nobody_reads_leave_no_descriptor(line):
    """Claim: descriptors of messages that were never read end with the line."""
    before = descriptors()
    here, there = map(Channel, socket.socketpair())
    for _ in range(5):
        here.send((SharedTensor((3,)), torch.ones(MAX_INLINE_BYTES)))
    assert there.receive(0.0) is not None
    here.close()
    there.close()
    assert descriptors() == before


def test_a_sender_without_descriptors_says_so_and_goes_on(line):
    """Claim: where no descriptor is left a large message is an OSError, small ones still pass, and
    the next large one does once there is."""
    here, there = line
    large = torch.ones(MAX_INLINE_BYTES)
    with no_more_descriptors():
        with pytest.raises(OSError, match="open files"):
            here.send(large)
        here.send("small")
    here.send(large)
    assert there.receive(0.0) == "small" and torch.equal(there.receive(0.0), large)


def test_a_receiver_without_descriptors_is_not_left_waiting(line):
    """Claim: a message whose descriptor cannot be taken is an error at once."""
    here, there = line
    here.send(torch.ones(MAX_INLINE_BYTES))
    with no_more_descriptors(), pytest.raises(ConnectionClosed):
        there.receive(5.0)


def test_what_cannot_be_read_is_passed_over(line: Line, monkeypatch: Any, tmp_path: Path):
    """Claim: a message of something that is not known here is an ordinary error, and the one after
    it is read as if nothing had been."""
    here, there = line
    (tmp_path / "unheard_of.py").write_text("class Thing: ...\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    thing = __import__("unheard_of").Thing()
    here.send(thing)
    here.send("next")
    del sys.modules["unheard_of"]
    (tmp_path / "unheard_of.py").unlink()
    with pytest.raises(ModuleNotFoundError):
        there.receive(0.0)
    assert there.receive(0.0) == "next"


def test_too_many_shared_tensors_are_refused_before_they_are_sent(line):
    """Claim: a message with more descriptors than the other end reads is refused where it is sent,
    and the connection still works. Fails if the other end loses some of them."""
    ours, theirs = line
    with pytest.raises(ValueError, match="at most"):
        ours.send([SharedTensor((1,)) for _ in range(MAX_DESCRIPTORS + 1)])
    ours.send("afterwards")
    assert theirs.receive(1.0) == "afterwards"
