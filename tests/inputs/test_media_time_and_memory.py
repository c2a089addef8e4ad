"""Claims about media that take too long, too much memory, or are cut: a sentence, in time."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image as PILImage
from reels import EVERY, animation, faststart, refused, sound, still, video

from saccade.core.errors import VideoInputError
from saccade.inputs.loading import read_config, read_processor
from saccade.inputs.media import Limits, decoder_pool, read, read_frames, read_image
from saccade.inputs.media.decoder_pool import DecoderPool, StopSignal

FORMS = (None, "channels_last")  # of a picture's axes: to be guessed, and told
SLOW_CHILD = (
    "import saccade.inputs.media.decoder_pool as g, time\n"
    "g.read = lambda *_: time.sleep(60)\ng.serve_requests()"
)


def crowd(side: int, frames: int) -> bytes:
    """A small GIF file of many large frames, of which each paints one pixel."""
    screen = struct.pack(
        "<6sHHBBB6s", b"GIF89a", side, side, 0x80, 0, 0, bytes([0] * 3 + [255] * 3)
    )
    frame = struct.pack("<BHHHHB", 0x2C, 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return screen + frame * frames + b";"


def test_a_gif_of_eleven_hours_is_refused_before_it_is_decoded(monkeypatch) -> None:
    """Claim: 39,999 frames of 7000 x 7000 in a file of 0.6 MB are refused by what they would take,
    at once. Fails if a frame is painted."""
    data = crowd(7000, 39_999)
    PILImage.init()  # Some of Pillow's plugins load a picture of their own when they are imported.
    monkeypatch.setattr(PILImage.Image, "load", lambda self: pytest.fail("decoding started"))
    began = time.monotonic()
    error = refused(data, "too_slow")
    assert "too many pixels in too many frames" in str(error) and time.monotonic() - began < 20
    assert len(data) < 1e6


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    "make",
    [
        lambda: crowd(400, 200),
        lambda: video(n=120, gop=120, options={"preset": "ultrafast"}),
        lambda: animation("WEBP", [100] * 200),
    ],
    ids=["gif", "mp4", "webp"],
)
def test_reading_ends_in_its_time(make: Callable[[], bytes]) -> None:
    """Claim: the time a source may take holds while it is decoded. Control: it is a clip else."""
    source = make()
    began = time.monotonic()
    error = refused(source, "too_slow", EVERY, Limits(max_seconds=0.01))
    assert error.limit == 0.01 and time.monotonic() - began < 5
    assert len(read(source, EVERY, Limits(max_memory=0)).frames) >= 120


def test_lists_of_frames_end_in_their_time() -> None:
    """Claim: so do pictures one after another. Control: they are a clip else."""
    pictures = [still("JPEG")] * 100
    with pytest.raises(VideoInputError, match="took too long"):
        read_frames(pictures, limits=Limits(max_seconds=0.005))
    assert len(read_frames(pictures).frames) == 100


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch):
    """Two decoders that are held by files which never end; those who come later get honest ones."""
    honest = decoder_pool.CHILD_COMMAND
    monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", SLOW_CHILD)
    made = DecoderPool(seconds=50, processes=2, share=1.0)
    with ThreadPoolExecutor(8) as pool:
        slow_reads = [pool.submit(made.read, video(n=3), EVERY) for _ in range(2)]
        while len(made._busy) < 2:
            time.sleep(0.01)
        monkeypatch.setattr(decoder_pool, "CHILD_COMMAND", honest)
        yield made, pool, slow_reads
        made.close()


@pytest.mark.extra
def test_slow_files_do_not_starve_the_others(slow) -> None:
    """Claim: with both decoders held, others are read once the share is over, and who held them is
    told why. Fails if anyone waits for the whole time that a file may take."""
    made, pool, slow_reads = slow
    began = time.monotonic()
    others = [pool.submit(made.read, video(n=3), EVERY) for _ in range(4)]
    assert all(len(other.result(20).frames) == 3 for other in others)
    assert time.monotonic() - began < 15
    errors = [each.exception(20) for each in slow_reads]
    assert any(each is not None and "while others waited" in str(each) for each in errors)
    assert all(each is None or each.code == "busy" for each in errors if each is not None)


def test_waiting_for_a_decoder_ends_in_a_sentence(slow, monkeypatch) -> None:
    """Claim: it names what it waited for, with 503; also where the request's own time is up."""
    made, _, _ = slow
    made.share = 1000.0
    with pytest.raises(VideoInputError, match="waited for a decoder") as caught:
        made.read_image(still(), stop=StopSignal(time.monotonic() + 0.3))
    assert caught.value.status == 503
    monkeypatch.setattr(decoder_pool, "WAIT_SECONDS", 0.2)
    with pytest.raises(VideoInputError, match="waited for a decoder"):
        made.read_image(still())


@pytest.mark.representatives(1)
@pytest.mark.parametrize("head", [b"", b"\0\0\0\x18ftypmp42"], ids=["zeros", "like a video"])
def test_an_endless_stream_takes_little_memory(head: bytes) -> None:
    """Claim: from a stream without end no more is read than is allowed, and of that 64 MB are in
    memory: the peak of a process stays under 300 MB with a limit of 400 MB."""
    code = (
        "import io\n"
        "from saccade.inputs.media import Limits, read\n"
        "class Endless(io.RawIOBase):\n"
        f"    head = {head!r}\n"
        "    def read(self, size=-1):\n"
        "        assert 0 <= size <= 1 << 24\n"
        "        piece, self.head = self.head.ljust(size, b'\\0'), b''\n"
        "        return piece\n"
        "try:\n"
        "    read(Endless(), limits=Limits(max_bytes=400 << 20))\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, getattr(error, 'code', error))\n"
        # not getrusage: it begins with what the process that started this one had
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))\n"
        "print(int(peak.split()[1]) >> 10)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    outcome, peak = done.stdout.strip().splitlines()
    assert outcome == f"VideoInputError {'too_large' if head else 'not_a_video'}"
    assert int(peak) < 300


def test_streams_beyond_what_is_held_in_memory_are_whole(monkeypatch) -> None:
    """Claim: a stream that goes to disk gives the clip its bytes give."""
    from saccade.inputs.media import media_file

    monkeypatch.setattr(media_file, "MAX_STREAM_MEMORY_BYTES", 1000)
    monkeypatch.setattr(media_file, "STREAM_PIECE_BYTES", 333)
    data = video()
    assert (read(io.BytesIO(data), EVERY).frames == read(data, EVERY).frames).all()
    assert (read_image(io.BytesIO(still())) == read_image(still())).all()


def test_no_words_of_a_file_in_its_error(tmp_path) -> None:
    """Claim: of a text given as a video no word is repeated."""
    secret = b"hunter2 is the password\nand more\n"
    for data in (secret, b"<secret>hunter2</secret>" + secret, secret * 10):
        error = refused(data, "not_a_video")
        assert not {"hunter2", "password", "secret"} & set(str(error).replace(":", " ").split())
        assert "hunter2" not in str(error)


def test_an_index_cut_short_is_damage(tmp_path) -> None:
    """Claim: an MP4 whose index breaks off anywhere is called cut short, not one of sound only.
    Control: a whole file of sound is."""
    data = faststart(tmp_path)
    at = data.find(b"moov")
    length = int.from_bytes(data[at - 4 : at])
    for cut in range(at + 8, at - 4 + length, max(1, length // 40)):
        error = refused(data[:cut], "truncated")
        assert "cut short" in str(error)
    refused(sound("mp4"), "no_video_stream")


@pytest.mark.parametrize("height", [1, 2, 3, 4, 5])
def test_no_side_is_taken_for_channels(height: int) -> None:
    """Claim: what a processor makes of a flat picture or video is what it makes of one that it is
    told is of height, width and channels. Fails where a side of 4 pixels is taken for channels."""
    source = still(size=(8, height))
    processor = read_processor("shapes", read_config("shapes"))
    for reads, seen in (
        (processor.image_processor, read_image(source)),
        (processor.video_processor, read(source).frames.repeat(2, 0)),
    ):
        made = [reads([seen], return_tensors="pt", input_data_format=how) for how in FORMS]
        for guessed, known in zip(*(each.values() for each in made), strict=True):
            assert torch.equal(guessed, known)
