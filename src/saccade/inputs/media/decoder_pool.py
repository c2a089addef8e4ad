"""Decodes media in child processes, for a server that must survive hostile files.

A decoder that is exploited, crashes, hangs or uses up its memory takes only its own process down.
A child gets no secrets of the environment, little memory and few open files, may write no file, and
has a deadline. It can still read files and use the network; to prevent that, run the server in a
container. What it sends back is checked like any other hostile input: numbers are sent as JSON and
pixels as bytes, never as pickles. This module knows the arguments and results of `read`, and not
how it decodes.
"""

import json
import math
import os
import queue
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import numpy as np

from saccade.core.errors import OptionError, VideoInputCode, VideoInputError
from saccade.core.own_processes import count_as_own
from saccade.inputs.media import read, read_frames, read_image
from saccade.inputs.media.clip import MIN_SIDE, Clip, FrameSampling, Image
from saccade.inputs.media.limits import TOO_SLOW, Limits, Refusal, refusal, seconds_left
from saccade.inputs.media.media_file import printable_name

MEMORY_BYTES = 4 << 30  # Address space of a child. Python and the libraries take half a GiB of it.
MAX_REQUESTS_PER_CHILD = 200  # After so many requests a fresh child takes its place.
START_TIMEOUT_SECONDS = 60.0  # How long a child may take to import what it needs.
SHARE_SECONDS = 10.0  # How long a call may keep its child while another call waits for one.
WAIT_SECONDS = 60.0  # How long a call waits for a child before it is refused.
POLL_SECONDS = 0.1  # How often a call that waits for a child looks for what may end its waiting.
MAX_OPEN_FILES = 32
MAX_HEADER_BYTES = 1 << 20  # Of the JSON that a child sends.
SEND_BYTES = 1 << 20  # So much is sent to a child at once.
MAX_SENTENCE_CHARACTERS = 500
SIZE = struct.Struct(">Q")  # The number of bytes of a JSON header, which is sent before it.
READY = b"ready"
OUT_OF_MEMORY_EXIT = 77
CHILD_COMMAND = "from saccade.inputs.media.decoder_pool import serve_requests; serve_requests()"
PACKAGE_FOLDER = str(Path(__file__).parents[3])  # Where a child finds this package.
# A child inherits only these variables of the environment. The dynamic loader and the clock need
# some of them. Keys and tokens stay with the parent.
PASSED_VARIABLES = ("LD_LIBRARY_PATH", "PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
CODES = frozenset(get_args(VideoInputCode))

CLOSED = "this reader of media is closed: make another"
DAMAGED: Refusal = ("is damaged: the decoder broke off; convert it again", "damaged")
TOO_LARGE: Refusal = ("needs more memory than it may have: scale it down", "too_large")
CROWDED: Refusal = (
    "took long to read while others waited: try again later, take a part or scale it down",
    "busy",
)
WAITED: Refusal = (
    "waited for a decoder, and all of them read other files: try again later",
    "busy",
)
# What is wrong with an input, by the exit code of its child as Popen gives it. The system sends
# SIGKILL to a process for which it has no memory left.
REFUSAL_BY_EXIT = {
    OUT_OF_MEMORY_EXIT: TOO_LARGE,
    -signal.SIGKILL: TOO_LARGE,
    -signal.SIGXCPU: TOO_SLOW,
}


class DecoderPool(AbstractContextManager["DecoderPool"]):
    """Reads media in child processes, at most `processes` at once; any thread may call it.

    Whatever a source does to a child is a `VideoInputError`, and the next call gets a fresh child.
    A call raises `OptionError` if no child can start, or after `close`.
    `seconds` is the most time that one call may take once it has a child. While another call waits
    for a child, the oldest call is ended after `share` seconds. `memory` is the address space of
    one child in bytes. A call with a `StopSignal` can be ended from another thread.
    """

    def __init__(
        self,
        seconds: float = 60.0,
        memory: int = MEMORY_BYTES,
        processes: int = 1,
        share: float = SHARE_SECONDS,
    ) -> None:
        self.seconds, self.memory, self.share = seconds, memory, share
        # The pool has ``processes`` places for children, and a call takes one for as long as it
        # lasts. There is one entry here for each free place: its idle child, or None without one.
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(processes):
            self._idle.put(None)
        self._busy: set[_Child] = set()
        self._busy_lock = threading.Lock()
        self._is_closed = False

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the children, and with them the calls under way."""
        self._is_closed = True
        for child in list(self._busy):
            child.process.kill()
        idle = []
        with suppress(queue.Empty):
            while True:
                idle.append(self._idle.get_nowait())
        for idle_child in idle:
            if idle_child is not None:
                idle_child.end()
            self._idle.put(None)  # The place stays, without a child.

    def read(
        self,
        source: bytes | Path,
        sampling: FrameSampling | None = None,
        limits: Limits | None = None,
        stop: "StopSignal | None" = None,
    ) -> Clip:
        """As :func:`saccade.inputs.media.read`."""
        task_arguments = {"sampling": asdict(sampling or FrameSampling())}
        return self._clip("read", [source], limits, task_arguments, stop)

    def read_frames(
        self,
        pictures: Sequence[bytes],
        fps: float | int | None = None,
        limits: Limits | None = None,
        stop: "StopSignal | None" = None,
    ) -> Clip:
        """As :func:`saccade.inputs.media.read_frames`."""
        return self._clip("read_frames", pictures, limits, {"fps": fps}, stop)

    def read_image(
        self, source: bytes | Path, limits: Limits | None = None, stop: "StopSignal | None" = None
    ) -> Image:
        """As :func:`saccade.inputs.media.read_image`."""
        return self._clip("read_image", [source], limits, {}, stop).frames[0]

    def _clip(
        self,
        task: str,
        sources: Sequence[bytes | Path],
        limits: Limits | None,
        task_arguments: Mapping[str, Any],
        stop: "StopSignal | None",
    ) -> Clip:
        """Has a child run the function of ``saccade.inputs.media`` called ``task``, and returns
        its result as a clip.

        ``sources`` are the paths or contents of files, and ``task_arguments`` the arguments of that
        function besides these and the limits.
        """
        limits = limits or Limits()
        stop = stop or StopSignal()
        seconds = min(self.seconds, limits.max_seconds or self.seconds)
        paths = [str(source) for source in sources if isinstance(source, Path)]
        payloads = [source for source in sources if isinstance(source, bytes)]
        label = printable_name(Path(paths[0]).name) if paths else "the input"
        limits.check(label, nbytes=sum(map(len, payloads)))
        root = None if limits.root is None else str(limits.root)  # JSON cannot hold a Path.
        request = {
            "task": task,
            "paths": paths,
            "limits": asdict(limits) | {"root": root, "max_seconds": seconds},
            **task_arguments,
            "sizes": [len(payload) for payload in payloads],
            "seconds": seconds,
        }
        max_bytes = limits.max_memory or self.memory
        with self._child(stop) as child:
            start = time.monotonic()
            deadline = min(start + seconds, stop.deadline)
            # The limit that the error reports if the call is not finished by the deadline.
            allowed_seconds = min(seconds, round(stop.deadline - start, 1))
            try:
                child.send(request, payloads, deadline)
                result = child.receive(max_bytes, deadline)
            except TimeoutError:
                raise refusal(label, *TOO_SLOW, allowed_seconds) from None
            except (OSError, EOFError):
                # The child is gone: killed by ``stop``, by ``close`` or by a waiting call, or ended
                # by the file that it read.
                stop.check()
                if self._is_closed:
                    raise OptionError(CLOSED) from None
                reason = REFUSAL_BY_EXIT.get(child.end(), DAMAGED)
                raise refusal(label, *(CROWDED if child.is_overdue else reason)) from None
            except InvalidResponse:
                raise refusal(label, *DAMAGED) from None
        if isinstance(result, VideoInputError):
            raise result
        return result

    @contextmanager
    def _child(self, stop: "StopSignal") -> Iterator["_Child"]:
        """Yields a child for one request. If it is usable afterwards, a later request may get it.

        After an exception it is ended, because it may still be sending.
        """
        child = self._take_turn(stop)
        reusable = None
        try:
            stop.check()
            if child is not None and not child.is_usable():
                child.end()
                child = None
            child = child or _Child(self.memory)
            child.lent_at = time.monotonic()
            with self._busy_lock:
                self._busy.add(child)
            if self._is_closed:  # ``close`` may have looked at the busy children before this one.
                raise OptionError(CLOSED)
            stop.watch(child.process)
            yield child
            reusable = child if child.is_usable() else None
        finally:
            stop.watch(None)
            if child is not None:
                with self._busy_lock:
                    self._busy.discard(child)
                # From here on no waiting call can kill the child. One may have done so since the
                # request ended.
                if reusable is None or child.is_overdue:
                    reusable = None
                    child.end()
            self._idle.put(reusable)
            if self._is_closed:  # It was closed meanwhile, so the child must be ended too.
                self.close()

    def _take_turn(self, stop: "StopSignal") -> "_Child | None":
        """Waits for a free place, and returns the idle child in it; None if the place is empty.

        While it waits, it kills the child of the oldest call once that call has lasted longer than
        ``share`` seconds.
        """
        deadline = min(time.monotonic() + WAIT_SECONDS, stop.deadline)
        while not self._is_closed:
            stop.check()
            try:
                child = self._idle.get(timeout=min(seconds_left(deadline), POLL_SECONDS))
            except TimeoutError:
                raise refusal("the input", *WAITED) from None
            except queue.Empty:
                self._kill_overdue_child()
            else:
                if not self._is_closed:
                    return child
                self._idle.put(child)  # The pool was closed while this call waited.
                self.close()
        raise OptionError(CLOSED)

    def _kill_overdue_child(self) -> None:
        """Kills the child of the oldest call if that call has lasted longer than ``share``
        seconds."""
        with self._busy_lock:
            eldest = min(self._busy, key=lambda child: child.lent_at, default=None)
            if eldest is not None and eldest.lent_at + self.share < time.monotonic():
                eldest.is_overdue = True
                eldest.process.kill()


class StopSignal:
    """Ends a call of a `DecoderPool` from another thread, when its result is no longer needed.

    A call also ends at ``deadline``, on the clock of time.monotonic.
    """

    def __init__(self, deadline: float = math.inf) -> None:
        self.deadline = deadline
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_set = False

    def set(self) -> None:
        """Ends the call, at once if a process works for it, else at its next ``check``."""
        with self._lock:
            self._is_set = True
            if self._process is not None:
                self._process.kill()

    def watch(self, process: "subprocess.Popen[bytes] | None") -> None:
        """Takes the process that works for the call from now on; None if there is none."""
        with self._lock:
            self._process = process
            if self._is_set and process is not None:
                process.kill()

    def check(self) -> None:
        """Raises VideoInputError once ``set`` has been called."""
        if self._is_set:
            raise refusal("the input", "is no longer wanted: ask again", "unreadable")


class InvalidResponse(Exception):
    """A child sent something that is no valid response."""


class _Child:
    """A child process and the socket to it."""

    def __init__(self, memory: int) -> None:
        self.requests_left = MAX_REQUESTS_PER_CHILD
        self.lent_at = 0.0  # When the current call got it, on the clock of time.monotonic.
        self.is_overdue = False  # Whether it was ended because other calls waited too long.
        self.socket, child_socket = socket.socketpair()
        inherited = {name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ}
        path = [os.path.abspath(entry) for entry in [*filter(None, sys.path), PACKAGE_FOLDER]]
        child_variables = {
            "PYTHONPATH": os.pathsep.join(path),
            "OPENBLAS_NUM_THREADS": "1",
            # The C library reserves address space for each arena, and the child's is limited.
            "MALLOC_ARENA_MAX": "2",
        }
        try:
            with child_socket:
                self.process = subprocess.Popen(
                    [
                        sys.executable,
                        "-P",  # Python does not add the working folder to its module path.
                        "-c",
                        CHILD_COMMAND,
                        str(child_socket.fileno()),
                        str(memory),
                    ],
                    env=inherited | child_variables,
                    pass_fds=[child_socket.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C goes to the parent alone, which then ends it.
                )
        except OSError:
            self.socket.close()
            raise _start_error(memory) from None
        # Its processor time is Saccade's own, and not that of other programs on the machine.
        count_as_own(self.process)
        ready = b""
        with suppress(OSError, EOFError):
            deadline = time.monotonic() + START_TIMEOUT_SECONDS
            ready = _receive_bytes(self.socket, len(READY), deadline)
        if ready != READY:
            self.end()
            raise _start_error(memory)

    def is_usable(self) -> bool:
        """Whether it can take another request."""
        return self.requests_left > 0 and self.process.poll() is None

    def end(self) -> int:
        """Waits half a second for the process to end, kills it otherwise, and returns its exit
        code."""
        self.requests_left = 0
        self.socket.close()
        # A process that crashes closes its socket before it ends, and its exit code is wanted.
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0.5)
        self.process.kill()
        return self.process.wait()

    def send(self, request: Mapping[str, Any], payloads: Sequence[bytes], deadline: float) -> None:
        """Sends a request. Raises TimeoutError after the deadline."""
        self.requests_left -= 1
        header = json.dumps(request).encode()
        for part in (SIZE.pack(len(header)), header, *payloads):
            unsent = memoryview(part)
            while unsent:
                self.socket.settimeout(seconds_left(deadline))
                sent_bytes = self.socket.send(unsent[:SEND_BYTES])
                unsent = unsent[sent_bytes:]

    def receive(self, max_bytes: int, deadline: float) -> Clip | VideoInputError:
        """Returns the child's result after checking it; its frames have at most `max_bytes`.

        Raises InvalidResponse for anything that is no valid result.
        """
        (size,) = SIZE.unpack(_receive_bytes(self.socket, SIZE.size, deadline))
        if size > MAX_HEADER_BYTES:
            raise InvalidResponse
        try:
            header = json.loads(_receive_bytes(self.socket, size, deadline))
            if "error" in header:
                return _check_error(**header)
            shape = _check_shape(header.pop("shape"), max_bytes)
            fields = _check_fields(**header)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise InvalidResponse from None
        timestamps = np.empty(shape[0], np.float64)
        frames = np.empty(shape, np.uint8)
        self._fill(timestamps, deadline)
        self._fill(frames, deadline)
        if not (np.isfinite(timestamps).all() and (np.diff(timestamps) >= 0).all()):
            raise InvalidResponse
        return Clip(frames, timestamps, **fields)

    def _fill(self, array: np.ndarray, deadline: float) -> None:
        """Fills an array with bytes from the child. Raises EOFError where they end too soon."""
        view = array.data.cast("B")
        while view:
            self.socket.settimeout(seconds_left(deadline))
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError
            view = view[count:]


def _start_error(memory: int) -> OptionError:
    what = f"give it more than {memory} bytes of memory, or allow this user more processes"
    return OptionError(f"the process that reads media cannot start: {what}")


def _receive_bytes(connection: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Receives exactly ``size`` bytes, without copying them where they arrive in one piece.

    Raises TimeoutError after the deadline, and EOFError where the connection ends before.
    """
    pieces = []
    while size:
        if deadline is not None:
            connection.settimeout(seconds_left(deadline))
        piece = connection.recv(size, socket.MSG_WAITALL)
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_sentence(value: Any) -> bool:
    """Whether a value is text that may be displayed: no control characters, and no path."""
    is_short = isinstance(value, str) and len(value) <= MAX_SENTENCE_CHARACTERS
    return is_short and value.isprintable() and "/" not in value


def _check_error(error: Any, code: Any, limit: Any) -> VideoInputError:
    """Returns the error that a child sent. Raises InvalidResponse for one that our code never
    sends."""
    if not _is_sentence(error) or code not in CODES or not isinstance(limit, int | float | None):
        raise InvalidResponse
    return VideoInputError(error, code, limit)


def _check_shape(shape: Any, max_bytes: int) -> tuple[int, int, int, int]:
    """Returns the shape of the frames. Raises InvalidResponse for an impossible shape, and for
    frames of more than ``max_bytes``."""
    frames, height, width = shape
    are_integers = all(type(side) is int for side in shape)
    if not are_integers or frames < 1 or min(height, width) < MIN_SIDE:
        raise InvalidResponse
    if frames * height * width * 3 > max_bytes:
        raise InvalidResponse
    return frames, height, width, 3


def _check_fields(
    duration: Any, fps: Any, source_frames: Any, sampled_fps: Any, warnings: Any
) -> Any:
    """Returns the other fields of a clip. Raises InvalidResponse for invalid numbers or texts."""
    duration = float(duration)
    fps = float(fps)
    sampled_fps = float(sampled_fps)
    if not all(math.isfinite(each) and each > 0 for each in (duration, fps, sampled_fps)):
        raise InvalidResponse
    if type(source_frames) is not int or not all(map(_is_sentence, warnings)):
        raise InvalidResponse
    return {
        "duration": duration, "fps": fps, "source_frames": source_frames,
        "sampled_fps": sampled_fps, "warnings": tuple(warnings),
    }  # fmt: skip


# What follows runs in the child.


def serve_requests() -> None:
    """Answers requests until the parent closes the connection."""
    descriptor, memory = map(int, sys.argv[1:])
    import_module("saccade.inputs.media.video")  # So that the first video does not wait for PyAV.
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (MAX_OPEN_FILES, MAX_OPEN_FILES))
    with socket.socket(fileno=descriptor) as parent, suppress(EOFError, ConnectionError):
        parent.sendall(READY)
        while True:
            try:
                _serve_one(parent)
            except MemoryError:
                os._exit(OUT_OF_MEMORY_EXIT)


def _serve_one(parent: socket.socket) -> None:
    (size,) = SIZE.unpack(_receive_bytes(parent, SIZE.size))
    request = json.loads(_receive_bytes(parent, size))
    payloads = [_receive_bytes(parent, size) for size in request["sizes"]]
    _limit_cpu_time(request["seconds"])
    try:
        clip = _read_clip(request, payloads)
        arrays = [np.ascontiguousarray(array) for array in (clip.timestamps, clip.frames)]
        header = {
            "shape": clip.frames.shape[:3], "duration": clip.duration, "fps": clip.fps,
            "source_frames": clip.source_frames, "sampled_fps": clip.sampled_fps,
            "warnings": clip.warnings,
        }  # fmt: skip
    except VideoInputError as error:
        arrays = []
        header = {"error": str(error), "code": error.code, "limit": error.limit}
    encoded = json.dumps(header).encode()
    parent.sendall(SIZE.pack(len(encoded)) + encoded)
    for array in arrays:
        parent.sendall(array.data.cast("B"))


def _read_clip(request: Mapping[str, Any], payloads: Sequence[bytes]) -> Clip:
    fields = dict(request["limits"])
    if fields["root"] is not None:
        fields["root"] = Path(fields["root"])
    limits = Limits(**fields)
    sources: list[bytes | Path] = [*payloads, *map(Path, request["paths"])]
    if request["task"] == "read_frames":
        return read_frames(payloads, request["fps"], limits)
    if request["task"] == "read_image":
        image = read_image(sources[0], limits)
        # The parent uses the frame alone. It refuses a clip whose duration or rates are not above
        # 0, so they are 1 here.
        return Clip(
            frames=image[None],
            timestamps=np.zeros(1),
            duration=1.0,
            fps=1.0,
            source_frames=1,
            sampled_fps=1.0,
        )
    return read(sources[0], FrameSampling(**request["sampling"]), limits)


def _limit_cpu_time(seconds: float) -> None:
    """Limits the CPU time of this request to ``seconds`` on all cores.

    The parent usually ends a child that takes longer. This limit is for a parent that has ended.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    max_seconds = used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)
    limit = math.ceil(max_seconds) + 1
    # Only the soft limit is set. Only root could raise a lowered hard limit for the next request.
    _, hard_limit = resource.getrlimit(resource.RLIMIT_CPU)
    if hard_limit != resource.RLIM_INFINITY:
        limit = min(limit, hard_limit)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard_limit))
