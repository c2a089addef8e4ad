"""The connection between a draft's process and its parent: whole messages over a pair of sockets.

A draft has a process of its own in the parallel schedule. The two processes send each other pickled
objects, which may contain tensors. All CPU tensors of a message are sent as one block of bytes:
inside the message where they are small, else in an anonymous file whose descriptor is sent with it.
So the tensors of a message take one file descriptor at most, and only until the message is read.
Each :class:`SharedTensor` takes one more. Tensors on a GPU stay there, and torch shares them.

The descriptor of a connection is used only inside its socket object, and a socket that is closed
forgets its descriptor. So a closed connection raises an error, and never writes to a file that got
the same number later.
"""

from __future__ import annotations

import mmap
import os
import pickle
import socket
import struct
import sys
import tempfile
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO, IOBase
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
import torch.multiprocessing  # It teaches ForkingPickler to hand over tensors on a GPU.
from torch import Tensor
from torch.storage import TypedStorage, UntypedStorage

# Each message begins with three numbers: the bytes of its pickle, the bytes of the tensors that
# follow the pickle inside the message, and the count of descriptors that are sent with it.
HEADER = struct.Struct("=QQQ")
MAX_INLINE_BYTES = 2**15  # Larger blocks of tensors are sent in a file of their own.
MAX_DESCRIPTORS = 8  # One message can bring at most this many.
PICKLE_PROTOCOL = 5
READ_BYTES = 2**16  # One read from the socket takes at most this many bytes.


class ConnectionClosed(ConnectionError):
    """The other end of the connection is gone, or this end was closed."""


class SharedTensor:
    """An fp32 tensor, at first all zeros, in memory that both ends share once it was sent.

    ``descriptor`` is that of the file with a received tensor, and is closed together with this
    object. Without it a new file is opened.
    """

    def __init__(self, shape: Sequence[int], descriptor: int | None = None) -> None:
        self.shape = tuple(shape)
        count = torch.Size(self.shape).numel()
        size = 4 * max(1, count)  # In bytes; an empty file cannot be mapped.
        if descriptor is None:
            descriptor = _open_anonymous_file()
            os.ftruncate(descriptor, size)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)
        weakref.finalize(self, self._file.close)
        mapping = mmap.mmap(descriptor, size)
        numbers: Tensor = torch.frombuffer(mapping, dtype=torch.float32, count=size // 4)
        self.tensor = numbers[:count].view(self.shape)

    @property
    def descriptor(self) -> int:
        return self._file.fileno()


@dataclass(frozen=True)
class _StorageAt:
    """Stands in a pickle for a storage, the memory behind one or more tensors, whose bytes are in
    the message's block."""

    number: int  # The storage's number among those of the message.
    start: int  # Where its bytes begin in the block.
    size: int  # In bytes.
    dtype: torch.dtype

    def load(self, message: _Received) -> TypedStorage:
        """Returns the storage in new memory. The first call for its number copies the bytes, and
        later ones return the same memory, so that the tensors that shared it share it again."""
        if self.number not in message.storages:
            copied = torch.empty(self.size, dtype=torch.uint8).untyped_storage()
            message.read(self.start, _bytes_of(copied))
            message.storages[self.number] = copied
        untyped = message.storages[self.number]
        return TypedStorage(wrap_storage=untyped, dtype=self.dtype, _internal=True)


@dataclass(frozen=True)
class _SharedAt:
    """Stands in a pickle for a :class:`SharedTensor`."""

    descriptor_index: int  # The place of its file's descriptor among those of the message.
    shape: tuple[int, ...]

    def load(self, message: _Received) -> SharedTensor:
        return SharedTensor(self.shape, os.dup(message.descriptors[self.descriptor_index]))


@dataclass
class _Received:
    """What a received message has beside its pickle, for the objects that are unpickled."""

    # ``read(start, buffer)`` fills the buffer with the block's bytes from ``start`` on.
    read: Callable[[int, memoryview], None]
    descriptors: Sequence[int]
    storages: dict[int, UntypedStorage] = field(default_factory=dict)  # copied so far, by number


class _Pickler(ForkingPickler):
    """Pickles a message and collects the storages of its tensors on the CPU."""

    def __init__(self, file: IOBase) -> None:
        super().__init__(file, PICKLE_PROTOCOL)
        self.storages: list[UntypedStorage] = []
        self.shared: list[SharedTensor] = []
        self.size = 0  # The bytes of ``storages`` together.
        # The number and the start in the block of each storage, by its address.
        self._places: dict[int, tuple[int, int]] = {}

    def reducer_override(self, part: Any) -> Any:
        """Pickles a CPU tensor as ``torch.save`` does: as a view of its storage. The storage is
        then given to :meth:`persistent_id`, which collects it for the block. Otherwise torch's
        multiprocessing would send each storage by itself."""
        if isinstance(part, Tensor) and part.device.type == "cpu":
            return part.__reduce_ex__(2)
        return NotImplemented

    def persistent_id(self, part: Any) -> Any:
        """Returns what the pickle has in the place of a shared tensor or of a CPU storage; None for
        any other object, which is pickled as usual."""
        if isinstance(part, SharedTensor):
            self.shared.append(part)
            return _SharedAt(len(self.shared) - 1, part.shape)
        if not isinstance(part, TypedStorage):
            return None
        untyped = part._untyped_storage
        if untyped.device.type != "cpu":
            return None
        if untyped._cdata not in self._places:
            self._places[untyped._cdata] = len(self.storages), self.size
            self.storages.append(untyped)
            self.size += untyped.nbytes()
        return _StorageAt(*self._places[untyped._cdata], untyped.nbytes(), part.dtype)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IOBase, message: _Received) -> None:
        super().__init__(file)
        self._message = message

    def persistent_load(self, stand_in: Any) -> Any:
        return cast(_StorageAt | _SharedAt, stand_in).load(self._message)


class Channel:
    """One end of a connection. Only one thread may use it at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._descriptors: deque[int] = deque()

    def send(self, message: Any, patience: float | None = None) -> None:
        """Sends a message. Waits at most ``patience`` seconds in all for the other end to make
        room by reading (None: without limit).

        Raises:
            ConnectionClosed: the other end is gone, or this end was closed.
            OSError: no descriptor or no memory is left for its tensors.
            ValueError: it has more than ``MAX_DESCRIPTORS`` shared tensors and files.
            TimeoutError: there was no room in time. The connection cannot be used any more.
        """
        pickled = BytesIO()
        pickler = _Pickler(pickled)
        pickler.dump(message)
        parts: list[Any] = [pickled.getbuffer()]
        block_descriptor: int | None = None
        if pickler.size > MAX_INLINE_BYTES:
            block_descriptor = _write_file(pickler.storages)
        else:
            parts += map(_bytes_of, pickler.storages)
        try:
            descriptors = [each.descriptor for each in pickler.shared]
            if block_descriptor is not None:
                # The receiver expects the block's descriptor last.
                descriptors.append(block_descriptor)
            if len(descriptors) > MAX_DESCRIPTORS:
                raise ValueError(
                    f"a message of {len(descriptors)} files, at most {MAX_DESCRIPTORS}"
                )
            inline_bytes = sum(map(len, parts[1:]))
            header = HEADER.pack(len(parts[0]), inline_bytes, len(descriptors))
            self._write(b"".join([header, *parts]), descriptors, patience)
        finally:
            if block_descriptor is not None:
                os.close(block_descriptor)

    def receive(self, patience: float | None = None) -> Any:
        """Returns the next message; None if there is none within ``patience`` seconds (None: waits
        without limit).

        Raises ConnectionClosed once all messages are read and no more will come.
        """
        deadline = None if patience is None else time.monotonic() + patience
        while True:
            if self._has_whole_message():
                return self._unpack()
            seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._read(seconds_left):
                return None

    def close(self) -> None:
        """Closes this end; a second call does nothing."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _write(self, content: bytes, descriptors: Sequence[int], patience: float | None) -> None:
        """Sends bytes, and the descriptors with the first of them."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))]
        deadline = None if patience is None else time.monotonic() + patience
        unsent = memoryview(content)
        try:
            while unsent:
                seconds_left = None if deadline is None else max(0.0, deadline - time.monotonic())
                self._socket.settimeout(seconds_left)
                count = self._socket.sendmsg([unsent], rights if descriptors else [])
                unsent = unsent[count:]
                descriptors = ()  # They were sent with the first bytes.
        except BlockingIOError as error:
            raise TimeoutError("the other end reads nothing") from error
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionClosed(str(error)) from error

    def _read(self, patience: float | None) -> bool:
        """Reads what has arrived, and returns whether there was anything.

        Where nothing has arrived yet, it waits at most ``patience`` seconds (None: without limit).
        """
        room = socket.CMSG_SPACE(MAX_DESCRIPTORS * array("i").itemsize)
        try:
            self._socket.settimeout(patience)
            content, extra, flags, _ = self._socket.recvmsg(READ_BYTES, room)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError as error:
            raise ConnectionClosed(str(error)) from error
        for _, _, packed in extra:
            descriptors = array("i")
            whole_bytes = len(packed) // descriptors.itemsize * descriptors.itemsize
            descriptors.frombytes(packed[:whole_bytes])
            self._descriptors += descriptors
        if flags & socket.MSG_CTRUNC:
            raise ConnectionClosed("no file descriptor is left for what was sent")
        if not content:
            raise ConnectionClosed("the other end is closed")
        self._received += content
        return True

    def _has_whole_message(self) -> bool:
        """Returns whether a whole message has arrived."""
        if len(self._received) < HEADER.size:
            return False
        pickle_bytes, inline_bytes, count = HEADER.unpack_from(self._received)
        received_bytes = len(self._received) - HEADER.size
        has_bytes = received_bytes >= pickle_bytes + inline_bytes
        return has_bytes and len(self._descriptors) >= count

    def _unpack(self) -> Any:
        """Removes the first message from what has arrived and returns it."""
        pickle_bytes, inline_bytes, count = HEADER.unpack_from(self._received)
        pickle_end = HEADER.size + pickle_bytes
        end = pickle_end + inline_bytes
        pickled = bytes(self._received[HEADER.size : pickle_end])
        inline_block = bytes(self._received[pickle_end:end])
        del self._received[:end]
        descriptors = [self._descriptors.popleft() for _ in range(count)]

        def read(start: int, into: memoryview) -> None:
            if not into:
                return  # Where all tensors are empty, nothing was sent that could be read.
            if inline_block:
                into[:] = inline_block[start : start + len(into)]
            else:
                _read_file(descriptors[-1], start, into)

        try:
            return _Unpickler(BytesIO(pickled), _Received(read, descriptors)).load()
        finally:
            for descriptor in descriptors:
                os.close(descriptor)


def _bytes_of(storage: UntypedStorage) -> memoryview:
    """Returns the memory of a storage, without a copy."""
    if not storage.nbytes():
        return memoryview(bytearray())
    array_of_bytes: Any = torch.empty(0, dtype=torch.uint8).set_(cast(Any, storage)).numpy()
    return memoryview(array_of_bytes)


def _open_anonymous_file() -> int:
    """Opens a file without a name, in memory where possible, and returns its descriptor."""
    if sys.platform == "linux":
        return os.memfd_create("saccade")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _write_file(storages: Sequence[UntypedStorage]) -> int:
    """Writes storages one after another into a new file and returns its descriptor."""
    descriptor = _open_anonymous_file()
    try:
        for storage in storages:
            unwritten = _bytes_of(storage)
            while unwritten:
                unwritten = unwritten[os.write(descriptor, unwritten) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read_file(descriptor: int, start: int, into: memoryview) -> None:
    """Fills a buffer with the file's bytes from ``start`` on."""
    while into:
        count = os.preadv(descriptor, [into], start)
        if not count:
            raise EOFError("a block of tensors is shorter than its message says")
        start = start + count
        into = into[count:]
