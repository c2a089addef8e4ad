"""Decoding in a guarded process: the same clips, and a parent that survives whatever comes back.

A hostile child is played by putting other code in its place: in `decoder_pool.CHILD_COMMAND`.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from beside import Forked
from helpers import few
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from reels import EVERY, animation, faststart, numbers, picture, sound, still, video

from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs.media import FrameSampling, Limits, decoder_pool, read, read_frames, read_image
from saccade.inputs.media.decoder_pool import DecoderPool

SMALL = Limits(max_pixels=1 << 20, max_memory=1 << 26)


@pytest.fixture(scope="module")
def shared():
    """One pool for the tests that do not harm it."""
    with DecoderPool() as pool:
        yield pool


@pytest.fixture
def at_once(monkeypatch):
    """Children are forks of this process: for what the parent does with what they say."""
    # A fork begins with the files that this process has open.
    monkeypatch.setattr(decoder_pool, "MAX_OPEN_FILES", 1 << 12)
    monkeypatch.setattr(
        decoder_pool, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
    )


@pytest.fixture
def played(monkeypatch):
    """A pool whose first child runs this code before it serves; those after it are honest."""
    guards = []

    def make(code: str, **more: float) -> DecoderPool:
        honest = decoder_pool.CHILD_COMMAND
        monkeypatch.setattr(
            decoder_pool,
            "CHILD_COMMAND",
            f"import saccade.inputs.media.decoder_pool as g\n{code}\ng.serve_requests()",
        )
        made = DecoderPool(**{"seconds": 20.0, **more})
        with made._child(decoder_pool.StopSignal()):
            pass  # it starts here
        monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", honest)
        guards.append(made)
        return made

    yield make
    for made in guards:
        made.close()


def same(one, two) -> bool:
    """Whether two clips are equal in every field."""
    plain = (one.duration, one.fps, one.source_frames, one.sampled_fps, one.warnings)
    return (
        np.array_equal(one.frames, two.frames)
        and np.array_equal(one.timestamps, two.timestamps)
        and plain == (two.duration, two.fps, two.source_frames, two.sampled_fps, two.warnings)
    )


def test_clips_are_those_of_read(shared, tmp_path):
    """Claim: through the pool comes what `read` gives: every field, for bytes, files, folders,
    animations and clips with warnings. Fails if a field is lost or rounded on the way."""
    (tmp_path / "clip.mp4").write_bytes(video())
    folder = tmp_path / "frames"
    folder.mkdir()
    for i in range(3):
        PILImage.fromarray(picture(i)).save(folder / f"{i}.png")
    cut = faststart(tmp_path)
    sources = [video(), tmp_path / "clip.mp4", folder, animation("WEBP", [100] * 5)]
    for source in (*sources, cut[: len(cut) * 6 // 10]):
        for sampling in (EVERY, FrameSampling(), FrameSampling(num_frames=3, start=0.1)):
            assert same(shared.read(source, sampling), read(source, sampling))
    assert shared.read(cut[: len(cut) * 6 // 10]).warnings


def test_images_and_lists_of_frames(shared):
    """Claim: a picture, and a list of encoded pictures, are those of the plain functions."""
    image = still("JPEG", color=(200, 30, 30))
    assert np.array_equal(shared.read_image(image), read_image(image))
    frames = [still("JPEG", color=(20 * i, 0, 0)) for i in range(5)]
    assert same(shared.read_frames(frames, 4), read_frames(frames, 4))
    assert shared.read_frames(frames, 4).timestamps.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert same(shared.read_frames(frames), read_frames(frames))


@pytest.mark.parametrize(
    "data", [b"", b"<html>", bytes(500), video()[:400], sound("mp4")], ids=range(5)
)
def test_refusals_are_those_of_read(shared, data):
    """Claim: sentence, code and limit of a refusal come through. Fails if the child's errors turn
    into the general one."""
    with pytest.raises(VideoInputError) as plain:
        read(data)
    with pytest.raises(VideoInputError) as guarded:
        shared.read(data)
    assert guarded.value.args == plain.value.args
    with pytest.raises(VideoInputError, match="list of frames is empty"):
        shared.read_frames([])
    with pytest.raises(VideoInputError) as caught:
        shared.read(b"x" * 101, limits=Limits(max_bytes=100))
    assert (caught.value.code, caught.value.limit) == ("too_large", 100)


def test_root_holds_in_the_child(shared, tmp_path):
    """Claim: only files inside `root` are read, by any name."""
    inside, outside = tmp_path / "in" / "clip.mp4", tmp_path / "out.mp4"
    inside.parent.mkdir()
    for path in (inside, outside):
        path.write_bytes(video())
    (inside.parent / "link.mp4").symlink_to(outside)
    limits = Limits(root=inside.parent)
    assert shared.read(inside, limits=limits).source_frames == 30
    for path in (outside, inside.parent / "link.mp4", inside.parent / ".." / "out.mp4"):
        with pytest.raises(VideoInputError, match="must be inside the allowed folder") as caught:
            shared.read(path, limits=limits)
        assert caught.value.code == "not_allowed"


def test_a_child_is_light():
    """Claim: what a child imports holds neither torch nor transformers, so it starts at once."""
    code = "import sys, saccade.inputs.media.decoder_pool\n"
    code += "print({'torch', 'transformers'} & set(sys.modules))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.strip() == "set()"


def answering(code: str) -> str:
    """A child whose answer to any request is made by this code."""
    body = "\n".join(f"    {line}" for line in code.splitlines())
    return f"import os, signal, resource\ndef answer(*asked):\n{body}\ng._read_clip = answer"


DEATHS = {
    "memory": ("bytearray(1 << 40)", "too_large"),
    "segfault": ("import ctypes; ctypes.string_at(0)", "damaged"),
    "processor time": ("os.kill(os.getpid(), signal.SIGXCPU)", "too_slow"),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", "too_large"),
    "abort": ("os.abort()", "damaged"),
    "quiet end": ("os._exit(0)", "damaged"),
    "a bug": ("raise KeyError('/etc/passwd')", "damaged"),
    "memory in numpy": ("g.np.ones(1 << 38)", "too_large"),
}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", few(DEATHS, 4))
def test_a_death_is_one_sentence(played, name):
    """Claim: however a child dies, the call gets a typed refusal in one sentence, and the next
    call a clip. Fails if a death hangs, tears the parent down or shows a traceback."""
    code, expected = DEATHS[name]
    made = played(answering(code))
    with pytest.raises(VideoInputError) as caught:
        made.read(video())
    assert caught.value.code == expected and str(caught.value).startswith("the input ")
    assert str(caught.value).isprintable() and "/" not in str(caught.value)
    assert caught.value.__suppress_context__
    assert made.read(video()).source_frames == 30


@pytest.mark.extra
def test_a_hanging_child_meets_its_deadline(played):
    """Claim: a child that neither answers nor ends is ended, and the next call gets a clip."""
    made = played(answering("while True: g.time.sleep(1)"), seconds=1.0)
    (child,) = made._idle.queue
    with pytest.raises(VideoInputError, match="took too long") as caught:
        made.read(video())
    assert caught.value.code == "too_slow" and caught.value.limit == 1.0
    assert child.process.poll() is not None
    made.seconds = 20.0
    assert made.read(video()).source_frames == 30


def test_a_child_that_does_not_listen_meets_its_deadline(played):
    """Claim: the deadline also holds while the parent is still sending."""
    made = played("g._serve_one = lambda parent: __import__('time').sleep(1000)", seconds=0.3)
    with pytest.raises(VideoInputError, match="took too long"):
        made.read(b"\0" * (16 << 20))


GOOD = {
    "shape": [1, 8, 8], "duration": 1.0, "fps": 1.0, "source_frames": 1,
    "sampled_fps": 1.0, "warnings": [],
}  # fmt: skip
REFUSAL = {"error": "is bad", "code": "damaged", "limit": None}
ANSWERS = {
    "no json": b"\x80\x04pickle",
    "deep json": b"[" * 100_000,
    "a number": b"7",
    "nothing": b"{}",
    "missing fields": {"shape": [1, 8, 8]},
    "more fields": GOOD | {"frames": "x"},
    "no frames": GOOD | {"shape": [0, 8, 8]},
    "negative sides": GOOD | {"shape": [1, -8, -8]},
    "float sides": GOOD | {"shape": [1.0, 8, 8]},
    "true sides": GOOD | {"shape": [True, 8, 8]},
    "more than fits": GOOD | {"shape": [1 << 20, 8192, 8192]},
    "endless": GOOD | {"fps": float("inf")},
    "no rate": GOOD | {"sampled_fps": 0},
    "not a number": GOOD | {"duration": float("nan")},
    "huge number": GOOD | {"duration": 10**400},
    "path in a warning": GOOD | {"warnings": ["see /etc/passwd"]},
    "escape codes": REFUSAL | {"error": "\x1b[31mred"},
    "path in an error": REFUSAL | {"error": "/home/user/secret is bad"},
    "long error": REFUSAL | {"error": "x" * 501},
    "unknown code": REFUSAL | {"code": "root"},
    "code of a kind": REFUSAL | {"code": ["damaged"]},
    "limit of a kind": REFUSAL | {"limit": "all"},
    "error of a kind": REFUSAL | {"error": 7},
    "half an error": {"error": "is bad"},
}


ROOMY = 1 << 42  # bytes of address space, of which a fork of this process has many already


def saying(reply: bytes | dict, pixels: bytes = bytes(8 + 192)) -> str:
    """A child that takes a request and sends this header, then these bytes."""
    header = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return f"""
def one(parent):
    (size,) = g.SIZE.unpack(g._receive_bytes(parent, 8))
    for n in g.json.loads(g._receive_bytes(parent, size))["sizes"]:
        g._receive_bytes(parent, n)
    parent.sendall(g.SIZE.pack({len(header)}) + {header!r} + {pixels!r})
g._serve_one = one"""


@pytest.mark.representatives(3)
@pytest.mark.parametrize("name", ANSWERS)
def test_a_malformed_answer_of_the_child_is_rejected(at_once, played, name):
    """Claim: an answer that is none is a refusal in our own words, whatever it says, and the child
    that gave it gives no other. Fails if the parent believes, echoes or trips over it."""
    made = played(saying(ANSWERS[name]), memory=ROOMY)
    with pytest.raises(VideoInputError) as caught:
        made.read(still())
    assert str(caught.value) == "the input is damaged: the decoder broke off; convert it again"
    assert made.read_image(still()).shape == (48, 64, 3)


def test_control_a_valid_answer_of_the_child_is_accepted(at_once, played):
    """Control: the same made-up child with a good answer is taken at its word, so the refusals
    above are for what was wrong in each."""
    played = partial(played, memory=ROOMY)
    assert played(saying(GOOD)).read(still()).frames.shape == (1, 8, 8, 3)
    with pytest.raises(VideoInputError, match="^is bad$"):
        played(saying(REFUSAL)).read(still())
    times = np.array([np.nan]).tobytes() + bytes(192)
    with pytest.raises(VideoInputError, match="broke off"):
        played(saying(GOOD, times)).read(still())
    with pytest.raises(VideoInputError, match="took too long"):  # pixels that never come
        played(saying(GOOD, bytes(100)), seconds=0.3).read(still())


def test_a_huge_header_is_not_read(played):
    """Claim: a child cannot make the parent reserve what it likes by announcing a long answer."""
    made = played(
        "def one(parent):\n    parent.sendall(g.SIZE.pack(1 << 60))\n    g.time.sleep(1000)\n"
        "g._serve_one = one"
    )
    with pytest.raises(VideoInputError, match="broke off"):
        made.read(still())


def child_report(made: DecoderPool) -> str:
    """What a child found out, said as a refusal."""
    with pytest.raises(VideoInputError) as caught:
        made.read(still())
    return str(caught.value)


def test_a_child_gets_little(played, monkeypatch, tmp_path):
    """Claim: in the child no file can be written, few can be open, memory is bounded, there is no
    core dump and no secret of the environment; in the parent all is as it was."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    made = played(
        answering(
            "found = []\n"
            f"try: open({str(tmp_path / 'new')!r}, 'wb', 0).write(b'x')\n"
            "except OSError: found.append('no writing')\n"
            "try:\n"
            "    kept = [open('/dev/null') for _ in range(99)]\n"
            "except OSError: found.append('few files')\n"
            "found.append(str(resource.getrlimit(resource.RLIMIT_AS)[0]))\n"
            "found.append(str(resource.getrlimit(resource.RLIMIT_CORE)[1]))\n"
            "found.append(str(sorted(set(os.environ) & {'HF_TOKEN', 'HOME'})))\n"
            "raise g.VideoInputError(', '.join(found), 'damaged')"
        ),
        memory=3 << 30,
    )
    assert child_report(made) == f"no writing, few files, {3 << 30}, 0, []"
    assert not (tmp_path / "new").exists() or not (tmp_path / "new").stat().st_size
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_a_child_does_not_import_from_where_it_stands(monkeypatch, tmp_path):
    """Claim: a module in the working directory cannot take the place of one a child imports."""
    (tmp_path / "json.py").write_text("raise SystemExit('hijacked')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    with DecoderPool() as made:
        assert made.read_image(still()).shape == (48, 64, 3)


def test_a_child_that_cannot_start_is_no_fault_of_the_input():
    """Claim: a pool that cannot start a child, because it ends at once or the system gives no
    process, says so as an option's error; the next call starts one."""
    made = DecoderPool()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/nonexistent/python")
        with pytest.raises(OptionError, match="cannot start"):
            made.read(still())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder_pool, "CHILD_COMMAND", "raise SystemExit(1)")
        with pytest.raises(OptionError, match="cannot start"):
            made.read(still())
    assert made.read_image(still()).shape == (48, 64, 3)
    made.close()


@pytest.mark.extra
def test_large_pictures_meet_the_memory_cap():
    """Claim: what would fit our limits but not the child's memory is a refusal that says so,
    with the parent and the next call unharmed."""
    big = video("matroska", "ffv1", n=8, size=(3840, 2160),
                image=lambda i: np.zeros((2160, 3840, 3), np.uint8))  # fmt: skip
    with DecoderPool(memory=420 << 20) as small:
        with pytest.raises(VideoInputError) as caught:
            small.read(big, EVERY)
        assert caught.value.code == "too_large" and "memory" in str(caught.value)
        assert small.read(video()).source_frames == 30
    with DecoderPool() as large:
        assert large.read(big, EVERY).frames.shape == (8, 2160, 3840, 3)


@pytest.mark.extra
def test_many_threads_share_a_few_children():
    """Claim: called from eight threads, two children answer each with its own clip."""
    lengths = [3, 5, 7, 9] * 6
    clips = {n: video(n=n, rate=10) for n in set(lengths)}
    with DecoderPool(processes=2) as made, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda n: made.read(clips[n], EVERY), lengths))
        assert len(set(made._idle.queue)) == 2
    assert [numbers(clip) for clip in answers] == [list(range(n)) for n in lengths]


@pytest.mark.extra
def test_children_are_replaced_and_end():
    """Claim: a child that died while idle, or has answered its share, is replaced without a word;
    closing ends all of them and refuses further calls; a child whose parent is gone ends."""
    made = DecoderPool()
    made.read(still())
    (first,) = made._idle.queue
    assert made.read(still()).source_frames == 1 and list(made._idle.queue) == [first]
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait()
    made.read(still())
    (second,) = made._idle.queue
    second.requests_left = 1
    made.read(still())
    made.read(still())
    (third,) = made._idle.queue
    assert len({first, second, third}) == 3 and second.process.wait(10) is not None
    made.close()
    assert third.process.poll() is not None
    with pytest.raises(OptionError, match="closed"):
        made.read(still())
    orphan = decoder_pool._Child(decoder_pool.MEMORY_BYTES)
    orphan.socket.shutdown(socket.SHUT_RDWR)  # what the end of the parent does
    assert orphan.process.wait(10) == 0
    orphan.end()


SEEDS = (video(n=4, gop=2), video("matroska", n=4), animation("GIF", [100] * 3),
         animation("WEBP", [100] * 3), still("JPEG"), still(mode="P"), video("avi", "mjpeg", n=3,
         pix="yuvj420p"))  # fmt: skip


def damaged(data, changes, cut):
    """Bytes changed in place, and the end cut off."""
    data = bytearray(data)
    for at, byte in changes:
        data[at % len(data)] = byte
    return bytes(data[: len(data) - cut % len(data)])


MEDIA = st.one_of(
    st.binary(max_size=300),
    st.builds(
        damaged,
        st.sampled_from(SEEDS),
        st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=40),
        st.integers(0, 1 << 20) | st.just(0),
    ),
)


def survives(shared, data):
    """A clip, or one clean sentence."""
    try:
        clip = shared.read(data, limits=SMALL)
    except VideoInputError as error:
        message = str(error)
        assert (
            message.isprintable()
            and "/" not in message
            and ". " not in message
            and not re.search(r"\b0x", message)
        )
        assert len(message) < 300 and error.status in (400, 413, 415, 422)
    else:
        assert len(clip.frames) == len(clip.timestamps) > 0 and clip.metadata["fps"] > 0


@given(data=MEDIA)
@settings(max_examples=150)
def test_fuzz(shared, data):
    """Claim: random bytes and damaged files of every kind give a clip or one clean sentence, and
    the parent goes on (150 draws)."""
    survives(shared, data)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@given(data=MEDIA)
@settings(max_examples=20_000)
def test_any_answer_of_a_child_gives_a_clip_or_a_sentence_over_many_draws(shared, data):
    """Claim: the same for 20,000 draws."""
    survives(shared, data)


def _slow(played):
    """A pool whose first child takes long over everything."""
    return played("import time\ng.read = lambda *_: time.sleep(60)")


@pytest.mark.representatives(1)
@pytest.mark.parametrize("when", ["before", "while it works"])
def test_a_call_that_nobody_wants_is_ended(played, when):
    """Claim: stopping ends a call at once, and the next one is answered by a fresh child."""
    slow, stop = _slow(played), decoder_pool.StopSignal()
    with ThreadPoolExecutor(1) as pool:
        if when == "before":
            stop.set()
        reading = pool.submit(slow.read, video(n=3), EVERY, None, stop)
        if when != "before":
            with pytest.raises(TimeoutError):
                reading.result(0.2)
            stop.set()
        with pytest.raises(VideoInputError):
            reading.result(5)
    stop.set()  # twice is nothing
    if when != "before":
        assert len(slow.read(video(n=3), EVERY).frames) == 3


@pytest.mark.extra
def test_closing_ends_calls_under_way(played):
    """Claim: who waits for a child when the pool is closed is told so within a second or so. Fails
    if a video is called too large because its decoder was ended."""
    slow = _slow(played)
    with ThreadPoolExecutor(3) as pool:
        reading = pool.submit(slow.read, video(n=3), EVERY)
        with pytest.raises(TimeoutError):
            reading.result(0.5)
        waiting = [pool.submit(slow.read, video(n=3), EVERY) for _ in range(2)]
        time.sleep(0.1)
        slow.close()
        for each in (reading, *waiting):
            with pytest.raises(OptionError, match="closed"):
                each.result(5)
