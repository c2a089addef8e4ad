"""Decoding in a process of its own, for a server that must survive hostile files.

A decoder that is broken into, crashes, hangs or eats the memory takes only its own process down.
The child gets no secrets of the environment, little memory, few open files, may write no file, and
has a deadline; it is not kept from reading files or from the network, for which run the server in a
container. What it sends back is checked like any other hostile input: numbers as JSON and pixels as
bytes, never pickles. Knows what `read` takes and gives; nothing of how it decodes.
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
from pathlib import Path
from typing import Any, get_args

import numpy as np

from saccade.core.errors import OptionError, VideoInputCode, VideoInputError
from saccade.inputs.media import read, read_frames, read_image
from saccade.inputs.media.clip import MIN_SIDE, Clip, FrameSampling, Image
from saccade.inputs.media.limits import TOO_SLOW, Limits, Why, left, refusal
from saccade.inputs.media.opening import printable

MEMORY = 4 << 30  # of address space: of that, Python and the libraries take about half of one
REUSED = 200  # requests a child answers before a fresh one takes its place
STARTING = 60.0  # seconds a child may take to import what it needs
SHARE = 10.0  # seconds a call may keep a child for which another waits
PATIENCE = 60.0  # seconds a call waits for a child
POLL = 0.1
OPEN_FILES = 32
MAX_HEADER = 1 << 20  # bytes of JSON from a child
MAX_SENTENCE = 500
SIZE = struct.Struct(">Q")
READY = b"to work."
OUT_OF_MEMORY = 77  # a child's exit code
BOOT = "from saccade.inputs.media.guard import serve; serve()"
HERE = str(Path(__file__).parents[3])  # where a child finds this package
# What the loader and the clock need; keys and tokens stay with the parent.
PASSED = ("LD_LIBRARY_PATH", "PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
CODES = frozenset(get_args(VideoInputCode))

DAMAGED: Why = ("is damaged: the decoder broke off; convert it again", "damaged")
TOO_LARGE: Why = ("needs more memory than it may have: scale it down", "too_large")
CROWDED: Why = (
    "took long to read while others waited: try again later, take a part or scale it down",
    "busy",
)
WAITED: Why = ("waited for a decoder, and all of them read other files: try again later", "busy")
DEATHS = {OUT_OF_MEMORY: TOO_LARGE, -signal.SIGKILL: TOO_LARGE, -signal.SIGXCPU: TOO_SLOW}


class Guard(AbstractContextManager["Guard"]):
    """Reads media in child processes, `children` at a time; any thread may call.

    Whatever happens to a child is a `VideoInputError`, and the next call gets a fresh one.
    `seconds` bounds one call from the moment it has a child, and `share` once another waits for
    one; `memory` the address space of one child in bytes. A call that is given a `Stop` can be
    ended from another thread.
    """

    def __init__(
        self,
        seconds: float = 60.0,
        memory: int = MEMORY,
        children: int = 1,
        share: float = SHARE,
    ) -> None:
        self.seconds, self.memory, self.share = seconds, memory, share
        self._idle: queue.LifoQueue[_Child | None] = queue.LifoQueue()
        for _ in range(children):
            self._idle.put(None)
        self._busy: set[_Child] = set()
        self._closed = False

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the children, and with them the calls under way."""
        self._closed = True
        for busy in list(self._busy):
            busy.process.kill()
        waiting = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self._idle.get_nowait())
        for child in waiting:
            if child is not None:
                child.end()
            self._idle.put(None)

    def read(
        self,
        source: bytes | Path,
        sampling: FrameSampling | None = None,
        limits: Limits | None = None,
        stop: "Stop | None" = None,
    ) -> Clip:
        """As :func:`saccade.inputs.media.read`."""
        more = {"sampling": asdict(sampling or FrameSampling())}
        return self._clip("read", [source], limits, more, stop)

    def read_frames(
        self,
        pictures: Sequence[bytes],
        fps: float | int | None = None,
        limits: Limits | None = None,
        stop: "Stop | None" = None,
    ) -> Clip:
        """As :func:`saccade.inputs.media.read_frames`."""
        return self._clip("read_frames", pictures, limits, {"fps": fps}, stop)

    def read_image(
        self, source: bytes | Path, limits: Limits | None = None, stop: "Stop | None" = None
    ) -> Image:
        """As :func:`saccade.inputs.media.read_image`."""
        return self._clip("read_image", [source], limits, {}, stop).frames[0]

    def _clip(
        self,
        task: str,
        sources: Sequence[bytes | Path],
        limits: Limits | None,
        more: Mapping[str, Any],
        stop: "Stop | None",
    ) -> Clip:
        limits, stop = limits or Limits(), stop or Stop()
        seconds = min(self.seconds, limits.max_seconds or self.seconds)
        paths = [str(source) for source in sources if isinstance(source, Path)]
        payloads = [source for source in sources if isinstance(source, bytes)]
        label = printable(Path(paths[0]).name) if paths else "the input"
        limits.check(label, nbytes=sum(map(len, payloads)))
        plain = asdict(limits) | {"root": None if limits.root is None else str(limits.root)}
        plain["max_seconds"] = seconds
        asked = {"task": task, "paths": paths, "limits": plain, **more}
        asked |= {"sizes": [len(payload) for payload in payloads], "seconds": seconds}
        most = limits.max_memory or self.memory
        with self._child(stop) as child:
            end = min(time.monotonic() + seconds, stop.end)
            try:
                child.send(asked, payloads, end)
                answer = child.receive(most, end)
            except TimeoutError:
                raise refusal(label, *TOO_SLOW, seconds) from None
            except (OSError, EOFError):
                why = DEATHS.get(child.end(), DAMAGED)
                raise refusal(label, *(CROWDED if child.overdue else why)) from None
            except Nonsense:
                raise refusal(label, *DAMAGED) from None
        if isinstance(answer, VideoInputError):
            raise answer
        return answer

    @contextmanager
    def _child(self, stop: "Stop") -> Iterator["_Child"]:
        """A child for one request: it goes back if it is still well, else nothing does."""
        child, kept = self._turn(stop), None
        try:
            stop.check()
            if child is not None and not child.well():
                child.end()
                child = None
            child = child or _Child(self.memory)
            child.since = time.monotonic()
            self._busy.add(child)
            stop.watch(child.process)
            yield child  # after an exception it is ended: it may still be sending
            kept = child if child.well() else None
        finally:
            stop.watch(None)
            if child is not None:
                self._busy.discard(child)
            if child is not None and kept is None:
                child.end()
            self._idle.put(kept)
            if self._closed:
                self.close()

    def _turn(self, stop: "Stop") -> "_Child | None":
        """The next free place; who has had a share while others wait is ended for it."""
        end = min(time.monotonic() + PATIENCE, stop.end)
        while not self._closed:
            stop.check()
            try:
                return self._idle.get(timeout=min(left(end), POLL))
            except TimeoutError:
                raise refusal("the input", *WAITED) from None
            except queue.Empty:
                eldest = min(list(self._busy), key=lambda child: child.since, default=None)
                if eldest is not None and eldest.since + self.share < time.monotonic():
                    eldest.overdue = True
                    eldest.process.kill()
        raise OptionError("this reader of media is closed: make another")


class Stop:
    """Ends a call of a guard from another thread: nobody wants any more what it reads.

    After ``end``, on the clock of time.monotonic, nobody does either.
    """

    def __init__(self, end: float = math.inf) -> None:
        self.end = end
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._said = False

    def __call__(self) -> None:
        with self._lock:
            self._said = True
        self.watch(self._process)

    def watch(self, process: "subprocess.Popen[bytes] | None") -> None:
        """The process that works for the call now, if any does."""
        with self._lock:
            self._process = process
            if self._said and process is not None:
                process.kill()

    def check(self) -> None:
        """Raises VideoInputError once it was said."""
        if self._said:
            raise refusal("the input", "is no longer wanted: ask again", "unreadable")


class Nonsense(Exception):
    """A child said something that is no answer."""


class _Child:
    """One process, and the socket to it."""

    def __init__(self, memory: int) -> None:
        self.left = REUSED
        self.since, self.overdue = 0.0, False  # when it was lent; whether others waited too long
        self.socket, theirs = socket.socketpair()
        kept = {name: os.environ[name] for name in PASSED if name in os.environ}
        path = [os.path.abspath(entry) for entry in [*filter(None, sys.path), HERE]]
        more = {"PYTHONPATH": os.pathsep.join(path), "OPENBLAS_NUM_THREADS": "1"}
        try:
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-c", BOOT, str(theirs.fileno()), str(memory)],
                    env=kept | more | {"MALLOC_ARENA_MAX": "2"},
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # Ctrl-C is for the parent, which then ends it
                )
        except OSError:
            self.socket.close()
            raise _no_start(memory) from None
        ready = b""
        with suppress(OSError, EOFError):
            ready = _received(self.socket, len(READY), time.monotonic() + STARTING)
        if ready != READY:
            self.end()
            raise _no_start(memory)

    def well(self) -> bool:
        """Whether it can take another request."""
        return self.left > 0 and self.process.poll() is None

    def end(self) -> int:
        """Ends it; what it ended with, if it did so by itself."""
        self.left = 0
        self.socket.close()
        with suppress(subprocess.TimeoutExpired):  # a crash closes the socket before it is over
            self.process.wait(0.5)
        self.process.kill()
        return self.process.wait()

    def send(self, asked: Mapping[str, Any], payloads: Sequence[bytes], end: float) -> None:
        self.left -= 1
        header = json.dumps(asked).encode()
        for part in (SIZE.pack(len(header)), header, *payloads):
            view = memoryview(part)
            while view:
                self.socket.settimeout(left(end))
                view = view[self.socket.send(view[: 1 << 20]) :]

    def receive(self, most: int, end: float) -> Clip | VideoInputError:
        """What it answers, believed only as far as it can be checked: frames of `most` bytes."""
        (size,) = SIZE.unpack(_received(self.socket, SIZE.size, end))
        if size > MAX_HEADER:
            raise Nonsense
        try:
            said = json.loads(_received(self.socket, size, end))
            if "error" in said:
                return _error(**said)
            shape, facts = _shape(said.pop("shape"), most), _facts(**said)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise Nonsense from None
        timestamps = np.empty(shape[0], np.float64)
        frames = np.empty(shape, np.uint8)
        self._fill(timestamps, end)
        self._fill(frames, end)
        if not (np.isfinite(timestamps).all() and (np.diff(timestamps) >= 0).all()):
            raise Nonsense
        return Clip(frames, timestamps, **facts)

    def _fill(self, array: np.ndarray, end: float) -> None:
        view = array.data.cast("B")
        while view:
            self.socket.settimeout(left(end))
            got = self.socket.recv_into(view)
            if not got:
                raise EOFError
            view = view[got:]


def _no_start(memory: int) -> OptionError:
    what = f"allow it more memory than {memory} bytes, and this user another process"
    return OptionError(f"the process that reads media cannot start: {what}")


def _received(line: socket.socket, size: int, end: float | None = None) -> bytes:
    """Exactly so many bytes, by a deadline if there is one; in one piece wherever the kernel gives
    them so."""
    pieces = []
    while size:
        if end is not None:
            line.settimeout(left(end))
        piece = line.recv(size, socket.MSG_WAITALL)
        if not piece:
            raise EOFError
        pieces.append(piece)
        size -= len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _is_sentence(said: Any) -> bool:
    """Whether it can be shown: no control characters, and no path."""
    fine = isinstance(said, str) and len(said) <= MAX_SENTENCE
    return fine and said.isprintable() and "/" not in said


def _error(error: Any, code: Any, limit: Any) -> VideoInputError:
    """A refusal as the child worded it, if it is one of ours in form."""
    if not _is_sentence(error) or code not in CODES or not isinstance(limit, int | float | None):
        raise Nonsense
    return VideoInputError(error, code, limit)


def _shape(said: Any, most: int) -> tuple[int, int, int, int]:
    frames, height, width = said
    whole = all(type(side) is int for side in said)
    if not whole or frames < 1 or min(height, width) < MIN_SIDE:
        raise Nonsense
    if frames * height * width * 3 > most:
        raise Nonsense
    return frames, height, width, 3


def _facts(duration: Any, fps: Any, source_frames: Any, sampled_fps: Any, warnings: Any) -> Any:
    """The other fields of a clip: numbers that can be reckoned with, sentences without tricks."""
    rates = [float(value) for value in (duration, fps, sampled_fps)]
    if (
        not all(math.isfinite(rate) and rate > 0 for rate in rates)
        or type(source_frames) is not int
    ):
        raise Nonsense
    if not all(map(_is_sentence, warnings)):
        raise Nonsense
    return {
        "duration": rates[0], "fps": rates[1], "source_frames": source_frames,
        "sampled_fps": rates[2], "warnings": tuple(warnings),
    }  # fmt: skip


# The child


def serve() -> None:
    """Answers requests until the parent hangs up."""
    descriptor, memory = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))
    with socket.socket(fileno=descriptor) as parent, suppress(EOFError, ConnectionError):
        parent.sendall(READY)
        while True:
            try:
                _serve_one(parent)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)


def _serve_one(parent: socket.socket) -> None:
    (size,) = SIZE.unpack(_received(parent, SIZE.size))
    asked = json.loads(_received(parent, size))
    payloads = [_received(parent, size) for size in asked["sizes"]]
    _allow_seconds(asked["seconds"])
    try:
        clip = _clip(asked, payloads)
        arrays = [np.ascontiguousarray(array) for array in (clip.timestamps, clip.frames)]
        said = {
            "shape": clip.frames.shape[:3], "duration": clip.duration, "fps": clip.fps,
            "source_frames": clip.source_frames, "sampled_fps": clip.sampled_fps,
            "warnings": clip.warnings,
        }  # fmt: skip
    except VideoInputError as error:
        arrays, said = [], {"error": str(error), "code": error.code, "limit": error.limit}
    header = json.dumps(said).encode()
    parent.sendall(SIZE.pack(len(header)) + header)
    for array in arrays:
        parent.sendall(array.data.cast("B"))


def _clip(asked: Mapping[str, Any], payloads: Sequence[bytes]) -> Clip:
    plain = asked["limits"]
    limits = Limits(**plain | {"root": plain["root"] and Path(plain["root"])})
    sources: list[bytes | Path] = [*payloads, *map(Path, asked["paths"])]
    if asked["task"] == "read_frames":
        return read_frames(payloads, asked["fps"], limits)
    if asked["task"] == "read_image":
        image = read_image(sources[0], limits)
        return Clip(image[None], np.zeros(1), 1.0, 1.0, 1, 1.0)
    return read(sources[0], FrameSampling(**asked["sampling"]), limits)


def _allow_seconds(seconds: float) -> None:
    """A bound for a child whose parent has gone and can no longer end it: all cores, that long."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = used.ru_utime + used.ru_stime + seconds * (os.cpu_count() or 1)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(most) + 1, resource.RLIM_INFINITY))
