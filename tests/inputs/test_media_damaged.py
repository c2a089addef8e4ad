"""Media that are damaged or meant ill: each is decoded right or refused in one sentence."""

import io
import os
import random
import re
import struct
import sys
import types
import warnings
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image as PILImage
from reels import (
    EVERY,
    HEIGHT,
    WIDTH,
    animation,
    faststart,
    numbers,
    picture,
    refused,
    sound,
    still,
    video,
)

from saccade.core.errors import VideoInputError
from saccade.inputs.media import Clip, FrameSampling, Limits, images, media_file, read, read_image
from saccade.inputs.media.media_file import Handle, open_media
from saccade.inputs.media.video import Video


def no_decoding(monkeypatch):
    """Fail the test if a decoder or even the packet reader starts."""

    def fail(*args, **kwargs):
        pytest.fail("decoding started")

    monkeypatch.setattr(Video, "_packets", fail)
    monkeypatch.setattr(images, "upright_rgb", fail)
    monkeypatch.setattr(PILImage.Image, "load", fail)


@pytest.fixture(scope="module")
def mp4():
    return video()


def test_an_empty_file_is_refused_as_empty(tmp_path):
    """An empty file says that it is empty."""
    (tmp_path / "a.mp4").touch()
    assert refused(tmp_path / "a.mp4", "empty").status == 400
    refused(b"", "empty")


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"<html><head><title>404</title>", "a web page"),
        (b"\n\n<!DOCTYPE html>\n<html lang='en'>", "a web page"),
        (b'{"error": "not found"}', "text"),
        (bytes(1000), "zeros"),
        (b"hello\x1b[31m", None),
        (bytes(range(256)) * 4, None),
    ],
)
def test_a_web_page_saved_as_a_video_is_refused(data, kind, tmp_path):
    """A web page saved as .mp4 is named for what it is; none of its bytes reach the message."""
    (tmp_path / "clip.mp4").write_bytes(data)
    error = refused(tmp_path / "clip.mp4", "not_a_video")
    assert str(error).startswith("clip.mp4 is not a video")
    assert kind is None or f"not a video but {kind}: give" in str(error)
    assert str(error).isprintable()


def test_files_of_other_kinds_are_distinguished_from_damaged_videos():
    """Documents, sound and containers that are not read are told from damaged videos."""
    refused(b"%PDF-1.7\n\xe2\xe3" + bytes(200), "unsupported")
    refused(b"OggS" + bytes(200), "unsupported")
    # Without pillow-heif HEIC is not read, and with it this file is damaged.
    heic = "truncated" if find_spec("pillow_heif") else "unsupported"
    refused(b"\0\0\0\x20ftypheic" + bytes(200), heic)  # type: ignore[arg-type]
    refused(b"ID3\4" + bytes(200), "no_video_stream")


def test_an_mp4_without_its_index_is_cut_short(mp4):
    """An MP4 cut before its index, and headers alone, are reported as cut short."""
    assert mp4.find(b"moov") > len(mp4) // 2
    error = refused(mp4[: len(mp4) // 2], "truncated")
    assert error.status == 400 and "cut short" in str(error)
    refused(mp4[: mp4.find(b"moov") + 40], "truncated")
    refused(video("matroska")[:60], "truncated")
    refused(video("avi")[:60], "truncated")


def test_a_cut_mp4_gives_its_whole_frames_and_a_warning(tmp_path):
    """A faststart MP4 cut at 60 % gives its good frames, unharmed, and a warning with numbers."""
    data = faststart(tmp_path)
    whole, clip = read(data, EVERY), read(data[: len(data) * 6 // 10], EVERY)
    n = len(clip.frames)
    assert 10 <= n < 30 and numbers(clip) == list(range(n)) and clip.source_frames == n
    assert np.array_equal(clip.frames, whole.frames[:n])
    assert clip.duration == pytest.approx(n / 30)
    assert "cut short" in clip.warnings[0] and f"{n} frames" in clip.warnings[0]


@pytest.mark.parametrize(
    "form,codec", [("matroska", "libx264"), ("webm", "libvpx"), ("avi", "mjpeg")]
)
def test_a_video_cut_in_half_is_sampled_over_what_is_there(form, codec):
    """MKV, WebM and AVI cut in half: the first part, sampled over what is there, with a warning."""
    pix = "yuvj420p" if codec == "mjpeg" else "yuv420p"
    data = video(form, codec, n=60, b_frames=0, pix=pix)
    clip = read(data[: len(data) // 2], FrameSampling(num_frames=4))
    assert 8 <= clip.source_frames < 50
    assert numbers(clip) == [i * clip.source_frames // 4 for i in range(4)]
    assert "cut short" in clip.warnings[0]


def test_flipped_bytes_lose_frames_and_are_counted(tmp_path):
    """300 flipped bytes in the middle: frames before them are as they were, lost ones are counted;
    with everything flipped, one sentence."""
    data = bytearray(video("mov", "png", pix="rgb24"))
    whole = read(bytes(data), EVERY)
    middle = len(data) // 2
    for i in range(300):
        data[middle + i] ^= 0xFF
    clip = read(bytes(data), EVERY)
    kept = [int(round(t * 30)) for t in clip.timestamps]
    assert 28 <= len(kept) < 30 and f"{30 - len(kept)} of 30" in clip.warnings[0]
    assert np.array_equal(clip.frames, whole.frames[kept])
    data = bytearray(faststart(tmp_path))
    start = data.find(b"mdat") + 4
    data[start:] = bytes(byte ^ 0xFF for byte in data[start:])
    refused(bytes(data), "damaged")


@pytest.mark.representatives(2)
@pytest.mark.parametrize("form", ["mp4", "matroska", "avi", "gif", "webp"])
def test_random_damage_gives_frames_or_a_sentence(form):
    """Random damage anywhere gives a clip with frames or one sentence, nothing else (60 draws)."""
    if form in ("gif", "webp"):
        good = animation(form.upper(), [100] * 5)
    else:
        good = video(form, n=6, gop=3)
    for seed in range(60):
        chance, data = random.Random(seed), bytearray(good)
        for _ in range(chance.choice([1, 5, 50])):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if seed % 3 == 0:
            del data[chance.randrange(len(data)) :]
        try:
            clip = read(bytes(data), limits=Limits(max_pixels=1 << 20, max_memory=1 << 26))
        except VideoInputError as error:
            assert str(error).isprintable() and "0x" not in str(error)
        else:
            assert len(clip.frames) == len(clip.timestamps) > 0
            assert np.isfinite(clip.timestamps).all() and clip.metadata["fps"] > 0


def test_frames_are_counted_by_what_is_shown():
    """An edit list that hides five frames, and containers whose headers count none: frames are
    counted by what is shown, and times start at the first shown frame."""
    data = bytearray(video(b_frames=0, gop=30))
    at = data.find(b"elst") + 4
    entries, _, media_time = struct.unpack(">4xIIi", data[at : at + 16])
    assert entries == 1
    data[at + 12 : at + 16] = struct.pack(">i", media_time + 5 * 512)
    clip = read(bytes(data), EVERY)
    assert numbers(clip) == list(range(5, 30)) and clip.source_frames == 25
    assert clip.timestamps == pytest.approx(np.arange(25) / 30)
    with av.open(io.BytesIO(video("matroska"))) as container:
        assert container.streams.video[0].frames == 0
    lying = bytearray(video("avi", "mjpeg", n=12, pix="yuvj420p"))
    at = lying.find(b"avih") + 8 + 16
    lying[at : at + 4] = struct.pack("<I", 500)
    assert read(bytes(lying), EVERY).source_frames == 12


def test_sound_without_pictures_is_no_video():
    """Sound without pictures is told apart from damage; a cover picture is not a video."""
    for data in (sound("mp4"), sound("matroska"), sound("mp4", cover=True)):
        error = refused(data, "no_video_stream")
        assert error.status == 400 and "no video stream" in str(error)


def test_a_large_frame_is_refused_by_its_header(monkeypatch):
    """An 8K header is enough to refuse: neither packets nor pixels are touched."""
    big = video("matroska", "mjpeg", n=1, size=(7680, 4320), pix="yuvj420p",
                image=lambda i: np.zeros((4320, 7680, 3), np.uint8))  # fmt: skip
    no_decoding(monkeypatch)
    error = refused(big, "too_many_pixels", limits=Limits(max_pixels=4096 * 2160))
    assert error.status == 413 and error.limit == 4096 * 2160


def test_a_size_that_only_the_first_frame_tells_meets_the_limit():
    """A size that only the first frame tells (MPEG-4 in MOV) is not probed for by a decoder with no
    limit: ours, with the limit, is the first to run."""
    data = video("mov", "mpeg4", n=2)
    with open_media(data, Limits()) as file:
        reel = Video(file, Limits())
        assert reel.size == (WIDTH, HEIGHT)
        with reel._stream() as (_, stream):
            assert stream.codec_context.width == 0
    refused(data, "damaged", limits=Limits(max_pixels=WIDTH * HEIGHT - 1))


@pytest.mark.parametrize("form,codec", [("mp4", "libx264"), ("mov", "mpeg4")])
def test_frames_fit_the_memory_budget(form, codec):
    """What is kept fits the budget: fewer frames with a warning where the count was ours, a
    refusal with the number that fits where it was asked for."""
    mp4, room = video(form, codec), Limits(max_memory=10 * WIDTH * HEIGHT * 3)
    clip = read(mp4, FrameSampling(fps=15), room)
    assert numbers(clip) == list(range(0, 30, 3)) and "10 frames" in clip.warnings[0]
    for sampling in (EVERY, FrameSampling(num_frames=11)):
        assert refused(mp4, "too_long", sampling, room).limit == 10
    refused(mp4, "too_many_pixels", limits=Limits(max_memory=100))


@pytest.mark.extra
def test_four_hours_are_sampled_with_few_packets():
    """Four hours at one frame a second: 768 frames spread over all of it, few packets decoded; a
    minute near the end takes less than that."""
    data = video("mp4", "mpeg4", n=14_400, rate=1, gop=60, b_frames=0, size=(64, 16),
                 image=lambda i: picture(i // 60 % 256, 64, 16))  # fmt: skip
    clip = read(data)
    assert clip.frames.shape == (768, 16, 64, 3) and clip.source_frames == 14_400
    assert clip.duration == 14_400 and "768 frames" in clip.warnings[0]
    assert numbers(clip) == [int(t) // 60 % 256 for t in clip.timestamps]
    clip = read(data, FrameSampling(start=14_000, end=14_060))
    assert len(clip.frames) == 60 and clip.timestamps[0] == 14_000


def test_a_long_duration_is_refused_before_decoding(mp4, monkeypatch):
    """A declared duration beyond the limit is refused before anything is read."""
    no_decoding(monkeypatch)
    error = refused(mp4, "too_long", limits=Limits(max_duration_s=0.5))
    assert error.status == 413 and error.limit == 0.5


def test_a_large_file_is_refused_before_opening(tmp_path, monkeypatch):
    """A file over 2 GB, sparse here, is refused by its size without being opened by FFmpeg."""
    with open(tmp_path / "big.mp4", "wb") as file:
        file.truncate(3 << 30)
    monkeypatch.setattr(av, "open", lambda *a, **k: pytest.fail("opened"))
    assert refused(tmp_path / "big.mp4", "too_large").status == 413
    refused(bytes(200), "too_large", limits=Limits(max_bytes=100))


@pytest.mark.representatives(1)
@pytest.mark.parametrize("side", [10_000, 20_000])
def test_an_image_of_too_many_pixels_is_refused_by_its_header(side, monkeypatch):
    """A small PNG of 100 or 400 million pixels is refused by its header, not warned about; also
    with our own cap lifted."""
    bomb, small = still(mode="1", size=(side, side)), still()
    assert len(bomb) < 60_000
    no_decoding(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert refused(bomb, "too_many_pixels").status == 413
        refused(bomb, "too_many_pixels", limits=Limits(max_pixels=0))
        with pytest.raises(VideoInputError):
            read_image(bomb)
    refused(small, "too_many_pixels", limits=Limits(max_pixels=WIDTH * HEIGHT - 1))


PLAYLISTS = {
    "ffconcat": b"ffconcat version 1.0\nfile 'ok.mp4'\n",
    "hls": b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n%s\n#EXT-X-ENDLIST\n",
    "dash": b'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"></MPD>',
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nc=IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\n",
}


@pytest.mark.parametrize("sniffing", [True, False])
@pytest.mark.parametrize("kind", PLAYLISTS)
def test_a_playlist_is_refused_and_opens_nothing(kind, sniffing, mp4, tmp_path, monkeypatch):
    """A playlist is refused and opens nothing, by its first bytes and, were they to deceive, by
    FFmpeg's own list of containers. The control: plain PyAV does open the neighbour."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ok.mp4").write_bytes(mp4)
    data = PLAYLISTS[kind].replace(b"%s", str(tmp_path / "ok.mp4").encode())
    if kind == "ffconcat":
        with av.open(io.BytesIO(data)) as container:
            assert len(list(container.decode(video=0))) == 30
    if not sniffing:
        monkeypatch.setattr(media_file, "_find_refusal", lambda head: None)
    names = []
    sys.addaudithook(lambda event, args: event == "open" and names.append(str(args[0])))
    for name in ("list.m3u8", "list.mp4"):
        (tmp_path / name).write_bytes(data)
        refused(tmp_path / name, "not_a_video")
        named = io.BytesIO(data)
        named.name = str(tmp_path / "list.m3u8")
        refused(named, "not_a_video")
    refused(data, "not_a_video")
    assert not any("ok.mp4" in name for name in names)


def test_the_decoder_never_sees_a_files_name(mp4):
    """FFmpeg is never told a name, which it could take for an address."""
    named = io.BytesIO(mp4)
    named.name = "http://127.0.0.1:9/x.m3u8"
    hidden = Handle(named, lambda: None)
    with av.open(hidden) as container:
        assert container.name == "<none>"


@pytest.mark.parametrize(
    "path", ["http://127.0.0.1/a.mp4", "file:///etc/passwd", "concat:/a|/b", "file:/etc/passwd"]
)
def test_addresses_are_refused_before_opening(path):
    """Addresses of any scheme are refused before anything is opened."""
    assert refused(path, "not_allowed").status == 400


def test_nothing_outside_the_root_is_read(mp4, tmp_path):
    """With a root, nothing outside it is read: not by .., not by an absolute path, not by a link,
    not from inside a folder."""
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret.mp4").write_bytes(mp4)
    (root / "clip.mp4").write_bytes(mp4)
    (root / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    PILImage.fromarray(picture(0)).save(tmp_path / "a.png")
    (root / "frames").mkdir()
    (root / "frames" / "a.png").symlink_to(tmp_path / "a.png")
    limits = Limits(root=root)
    assert read(root / "clip.mp4", limits=limits).source_frames == 30
    for path in (root / ".." / "secret.mp4", tmp_path / "secret.mp4", root / "link.mp4"):
        refused(path, "not_allowed", limits=limits)
    refused(root / "frames", "not_allowed", limits=limits)
    refused(tmp_path, "not_allowed", limits=limits)


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), 1e300])
def test_impossible_rates_counts_and_times_are_refused(bad):
    """Zero, negative, endless and not-a-number rates, counts and times are refused by name."""
    for name in ("fps", "end", *(["num_frames"] if isinstance(bad, int) else [])):
        with pytest.raises(VideoInputError, match=name) as caught:
            FrameSampling(**{name: bad})
        assert caught.value.code == "bad_option" and caught.value.status == 422
    if bad != 0:
        with pytest.raises(VideoInputError, match="start"):
            FrameSampling(start=bad)


@pytest.mark.parametrize("bad", ["2", True, [2], 2j])
def test_sampling_of_other_types_is_refused(bad):
    """What a client's JSON may hold instead of a number is refused the same way. (Called below the
    constructor, whose types the test run itself checks.)"""
    for name in ("fps", "num_frames", "start", "end"):
        values = dict.fromkeys(("fps", "num_frames", "start", "end", "every")) | {name: bad}
        with pytest.raises(VideoInputError, match=name):
            FrameSampling.__post_init__(types.SimpleNamespace(**values))


def test_contradicting_sampling_and_huge_counts_are_refused(mp4):
    """Contradictions are refused; a huge count is refused with the limit it passed."""
    for options in (
        {"fps": 1, "num_frames": 2},
        {"fps": 1, "every": True},
        {"num_frames": 2, "every": True},
        {"start": 3, "end": 2},
        {"start": 2, "end": 2},
    ):
        with pytest.raises(VideoInputError):
            FrameSampling(**options)
    assert refused(mp4, "bad_option", FrameSampling(num_frames=10**12)).limit == 768
    assert refused(mp4, "too_long", EVERY, Limits(max_frames=29)).limit == 29
    assert len(read(mp4, FrameSampling(fps=30), Limits(max_frames=29)).frames) == 29
    assert len(read(mp4, EVERY, Limits(0, 0, 0, 0, 0)).frames) == 30


# Files


def test_missing_and_unreadable_files_are_one_sentence(mp4, tmp_path, monkeypatch):
    """Missing files, pipes, devices and forbidden files give one sentence with the name only; a
    name cannot smuggle control characters into it."""
    assert str(refused(tmp_path / "no.mp4", "missing")).startswith("no.mp4 does not exist")
    refused("nul\0byte", "missing")
    refused(tmp_path / "evil\x1b[31m\nname.mp4", "missing")
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path / "pipe", "not_a_video")
    refused("/dev/zero", "not_a_video")
    (tmp_path / "clip.mp4").write_bytes(mp4)

    def forbidden(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr(Path, "open", forbidden)
    refused(tmp_path / "clip.mp4", "unreadable")
    monkeypatch.setattr(Path, "stat", forbidden)
    refused(tmp_path / "clip.mp4", "unreadable")


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_damaged_image_is_reported_in_our_words(form):
    """A picture cut short is reported without the library's words, which can hold addresses."""
    out = io.BytesIO()
    PILImage.fromarray(picture(1, 256, 256)).save(out, form)
    data = out.getvalue()
    refused(data[: len(data) // 2], "truncated")
    with pytest.raises(VideoInputError, match="cut short"):
        read_image(data[: len(data) // 2])


def test_an_unknown_codec_says_what_to_convert_to():
    """A container we read with a codec we do not: say which codec to convert to."""
    data = video("matroska", "libx264", n=1).replace(b"V_MPEG4/ISO/AVC", b"V_MPEG4/ISO/XYZ")
    error = refused(data, "unsupported")
    assert error.status == 415 and "H.264" in str(error)


def test_a_clip_cannot_be_changed(mp4):
    """A clip is a value: its fields cannot be replaced."""
    clip = read(mp4)
    assert isinstance(clip, Clip) and clip.frames.dtype == np.uint8
    with pytest.raises(AttributeError):
        clip.fps = 1
    assert re.fullmatch(r"[\w ,.]*", "".join(clip.warnings))
