"""More of what people and cameras make: odd pictures, odd streams, odd times; and no message that
gives a path or an address away."""

import base64
import io
import os
import random
import re
import struct
import subprocess
import sys
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage
from reels import (
    EVERY,
    HEIGHT,
    WIDTH,
    animation,
    numbers,
    picture,
    refused,
    sound,
    still,
    video,
)

from saccade.core.errors import VideoInputError
from saccade.inputs import python_media
from saccade.inputs.media import FrameSampling, Limits, arrays, read, read_frames, read_image
from saccade.inputs.media.fetch import Sources


def saved(image, form, **more):
    out = io.BytesIO()
    image.save(out, form, **more)
    return out.getvalue()


def muxed(form, streams, packets):
    """A container of JPEG pictures: `packets` are (stream, number, pts, dts) in this order."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        made = []
        for _ in range(streams):
            stream = container.add_stream("mjpeg", rate=10)
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
            made.append(stream)
        for which, number, pts, dts in packets:
            packet = av.Packet(saved(PILImage.fromarray(picture(number)), "JPEG", quality=95))
            packet.stream, packet.pts, packet.dts = made[which], pts, dts
            packet.time_base, packet.is_keyframe = Fraction(1, 10), True
            container.mux(packet)
    return out.getvalue()


# Pictures


def test_cmyk_jpeg():
    """A JPEG in printing colours, as cameras' software writes, comes as the RGB it stands for."""
    red = PILImage.new("CMYK", (32, 32), (0, 255, 255, 0))
    image = read_image(saved(red, "JPEG", quality=95))
    assert image.shape == (32, 32, 3)
    assert (image.reshape(-1, 3).mean(0) > [200, -1, -1]).all()
    assert (image.reshape(-1, 3).mean(0) < [256, 60, 60]).all()


def png16(rgb):
    """A PNG of 16 bits a channel; Pillow writes none in colour."""
    height, width, _ = rgb.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in rgb)

    def chunk(kind, body):
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    head = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_sixteen_bits_a_channel():
    """Sixteen bits of colour or grey keep their upper eight, and do not wrap around."""
    rgb = np.zeros((8, 8, 3), np.uint16)
    rgb[...] = (0xFF80, 0x8001, 0x00FF)
    assert (read_image(png16(rgb)) == (0xFF, 0x80, 0x00)).all()
    grey = PILImage.fromarray(np.full((8, 8), 0xABCD, np.uint16))
    assert (read_image(saved(grey, "PNG")) == 0xAB).all()


def test_palette_with_transparency():
    """A GIF or PNG with a palette and a transparent colour shows white there, in image_rows and in
    animations, and its colours elsewhere."""
    pixels = np.zeros((16, 16), np.uint8)
    pixels[:, 8:] = 1
    image = PILImage.fromarray(pixels).convert("P")
    image.putpalette([200, 10, 10, 10, 200, 10] + [0] * 750)
    for form in ("GIF", "PNG"):
        for frame in (read_image(saved(image, form, transparency=0)),
                      read(saved(image, form, transparency=0)).frames[0]):  # fmt: skip
            assert (frame[:, :8] == 255).all() and (frame[:, 8:] == (10, 200, 10)).all(), form
    moving = saved(image, "GIF", transparency=0, save_all=True, append_images=[image.rotate(90)],
                   duration=100, disposal=2)  # fmt: skip
    assert (read(moving, EVERY).frames[0][:, :8] == 255).all()
    alpha = saved(PILImage.new("RGBA", (8, 8), (255, 0, 0, 128)), "PNG")
    assert np.abs(read_image(alpha)[0, 0].astype(int) - (255, 127, 127)).max() <= 1


def test_grey_of_16_bits_with_a_transparent_number_is_white_there():
    """A PNG of 16 bits may name one grey as transparent, as one of 8 bits may."""
    pixels = np.full((8, 8), 40_000, np.uint16)
    pixels[:, :4] = 7
    for image in (PILImage.fromarray(pixels), PILImage.fromarray((pixels >> 8).astype(np.uint8))):
        clear = int(np.asarray(image)[0, 0])
        frame = read_image(saved(image, "PNG", transparency=clear))
        assert (frame[:, :4] == 255).all() and (frame[:, 4:] == 40_000 >> 8).all()


def test_apng_keeps_its_times_and_its_first_picture():
    """An animated PNG has its own lengths of frames; read as an image it is its first picture."""
    data = animation("PNG", [50, 500, 50])
    clip = read(data, EVERY)
    assert numbers(clip) == [0, 1, 2] and clip.timestamps.tolist() == pytest.approx([0, 0.05, 0.55])
    assert np.array_equal(read_image(data), picture(0))


@pytest.mark.parametrize("size", [(63, 47), (65, 33), (17, 91)])
def test_odd_sizes(size):
    """Odd widths and heights come whole, in lossy 4:2:0 too, without a shear from padded rows."""

    def ramp(i):
        rows, columns = np.mgrid[: size[1], : size[0]]
        return np.stack([columns * 3, rows * 2, columns + rows], 2).astype(np.uint8)

    lossless = read(video("matroska", "ffv1", n=2, size=size, image=ramp, pix="bgr0"))
    assert np.array_equal(lossless.frames[0], ramp(0))
    lossy = read(video("matroska", "libvpx", n=2, size=size, image=ramp,
                       options={"crf": "4", "b": "4M"}))  # fmt: skip
    assert lossy.frames.shape[1:] == (*size[::-1], 3)
    assert np.abs(lossy.frames[0].astype(int) - ramp(0)).mean() < 8


# Streams


def test_two_video_streams():
    """Of two video streams the first is shown, with its own frames and times only."""
    packets = [each for i in range(8) for each in ((0, i, i, i), (1, 100 + i, i, i))]
    clip = read(muxed("matroska", 2, packets), EVERY)
    assert numbers(clip) == list(range(8)) and clip.source_frames == 8
    assert clip.timestamps == pytest.approx(np.arange(8) / 10)


def test_cover_art_is_no_video():
    """Music with a cover, as MP4 or MP3, has no video; the sentence says so."""
    refused(sound("mp4", cover=True), "no_video_stream")
    cover = saved(PILImage.fromarray(picture(0)), "JPEG")
    frame = b"APIC" + struct.pack(">I", len(cover) + 14) + b"\0\0" + b"\0image/jpeg\0\3\0" + cover
    length = bytes(len(frame) >> shift & 127 for shift in (21, 14, 7, 0))
    mp3 = b"ID3\3\0\0" + length + frame + (b"\xff\xfb\x90\0" + bytes(413)) * 20
    refused(mp3, "no_video_stream")


def test_interlaced_video():
    """Interlaced video gives whole pictures, one a frame, at the frame rate."""
    data = video(n=10, x264="tff=1:interlaced=1", b_frames=0)
    with av.open(io.BytesIO(data)) as container:
        assert next(container.decode(video=0)).interlaced_frame  # it is what it is meant to be
    clip = read(data, EVERY)
    assert numbers(clip) == list(range(10)) and clip.fps == 30


@pytest.mark.representatives(2)
@pytest.mark.parametrize("codec", ["libsvtav1", "libaom-av1", "libx265", "libvpx-vp9"])
def test_newer_codecs(codec):
    """AV1, HEVC and VP9 in MP4 are read like any other, where the encoder is there to try it."""
    if codec not in av.codecs_available:
        pytest.skip(f"no {codec}")
    options = {"libsvtav1": {"preset": "12", "svtav1-params": "lp=1"},
               "libaom-av1": {"cpu-used": "8"},
               "libx265": {"x265-params": "log-level=none:pools=none"}}  # fmt: skip
    data = video("mp4", codec, n=6, rate=10, size=(128, 96), options=options.get(codec, {}))
    clip = read(data, EVERY)
    assert numbers(clip) == list(range(6)) and clip.fps == 10


@pytest.mark.extra
def test_eight_k_under_a_memory_cap():
    """Of an 8K video only as many frames are kept as the budget holds, with a warning; asked
    for more, it is refused with the number that fits."""
    black = np.zeros((4320, 7680, 3), np.uint8)
    data = video("matroska", "mjpeg", n=4, rate=4, size=(7680, 4320), pix="yuvj420p",
                 image=lambda i: black)  # fmt: skip
    room = Limits(max_memory=2 * black.nbytes)
    clip = read(data, limits=room)
    assert clip.frames.shape == (2, 4320, 7680, 3) and "2 frames" in clip.warnings[0]
    assert refused(data, "too_long", FrameSampling(num_frames=3), room).limit == 2


# Times


def test_negative_times():
    """Times that begin below zero are counted from the first frame on."""
    data = video("matroska", n=10, b_frames=0, ticks=list(range(-500, 500, 100)))
    clip = read(data, EVERY)
    assert numbers(clip) == list(range(10))
    assert clip.timestamps == pytest.approx(np.arange(10) / 10)
    clip = read(data, FrameSampling(fps=5))
    assert numbers(clip) == [0, 2, 4, 6, 8] and clip.timestamps[0] == 0


def test_times_out_of_order():
    """Packets whose times jump back and forth (no encoder means that): times rise, each frame is
    the one of its time or the one before it in the file, and all is as it was after the jump. Of
    pairs at one time at most one frame is lost."""
    order = [0, 3, 1, 2, *range(4, 12)]
    clip = read(muxed("matroska", 1, [(0, i, i, n - 3) for n, i in enumerate(order)]), EVERY)
    assert clip.timestamps == pytest.approx(np.arange(12) / 10)
    indices = numbers(clip)
    assert [indices[0], *indices[4:]] == [0, *range(4, 12)] and set(indices[1:4]) <= {0, 1, 2, 3}
    clip = read(muxed("matroska", 1, [(0, i, i // 2, i // 2) for i in range(8)]), EVERY)
    assert (np.diff(clip.timestamps) >= 0).all() and clip.metadata["fps"] > 0
    assert len(clip.frames) >= 7 and set(numbers(clip)) <= set(range(8))


def test_no_duration():
    """A stream whose every frame is at one moment still is a clip with a length and a rate."""
    clip = read(muxed("matroska", 1, [(0, i, 0, 0) for i in range(4)]), EVERY)
    assert clip.duration > 0 and clip.fps > 0 and np.isfinite(clip.metadata["fps"])
    assert len(clip.frames) >= 1 and np.isfinite(clip.timestamps).all()
    data = bytearray(video(n=4, b_frames=0))
    for box, at in ((b"mvhd", 20), (b"mdhd", 20), (b"tkhd", 24)):
        place = data.find(box) + at
        data[place : place + 4] = bytes(4)
    clip = read(bytes(data), EVERY)
    assert len(clip.frames) == 4 and clip.duration > 0


# Lists, and standard input


def test_lists_of_frames():
    """Encoded pictures become a clip at the rate given; more than allowed are thinned out evenly
    with a warning, other sizes made equal, and one that is no picture is refused."""
    frames = [saved(PILImage.fromarray(picture(i)), "PNG") for i in range(8)]
    clip = read_frames(frames, 4)
    assert numbers(clip) == list(range(8)) and clip.timestamps == pytest.approx(np.arange(8) / 4)
    clip = read_frames(frames, limits=Limits(max_frames=4))
    assert numbers(clip) == [0, 2, 4, 6] and "4 frames" in clip.warnings[0]
    large = saved(PILImage.fromarray(picture(8, 128, 96)), "PNG")
    assert "size changes" in read_frames([*frames, large]).warnings[0]
    for bad, code in (([], "empty"), ([*frames, b"<html>"], "not_a_video"), ([b""], "empty")):
        with pytest.raises(VideoInputError) as caught:
            read_frames(bad)
        assert caught.value.code == code
    with pytest.raises(VideoInputError, match="larger than 100 bytes"):
        read_frames(frames, limits=Limits(max_bytes=100))
    with pytest.raises(VideoInputError, match="fps"):
        read_frames(frames, 0)


def test_standard_input_of_a_process():
    """A video piped into a real process is read there from standard input."""
    code = "from saccade.inputs.media import read\n"
    code += "c = read('-'); print(c.source_frames, len(c.frames))"
    done = subprocess.run([sys.executable, "-c", code], input=video(), capture_output=True)
    assert done.stdout.split() == [b"30", b"4"], done.stderr


# What messages hold


SECRET = "very-private-folder"
ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}|\d+\.\d+\.\d+\.\d+")
STARTS = [
    *(b"<html>", b"/etc/passwd", b"file '/etc/passwd'", b"ffconcat version 1.0\nfile '/x/y'"),
    *(b"http://10.0.0.1/x", b"#EXTM3U\n/x/y", b"C:\\Users\\me\\x", b'{"path": "/home/me"}'),
    *(b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0", b"GIF89a", b"RIFF\x10\0\0\0WEBPVP8 ", b"BM"),
    *(b"\0\0\0\x20ftypisom", b"\x1aE\xdf\xa3", b"RIFF\x10\0\0\0AVI ", b"OggS", b"%PDF", b""),
]
SAMPLINGS = [
    FrameSampling(),
    EVERY,
    FrameSampling(num_frames=9),
    FrameSampling(fps=900),
    FrameSampling(start=1e6),
]
GOOD = [video(n=4), video("avi", "mjpeg", n=3, pix="yuvj420p"), still(), animation("GIF", [10] * 3)]
LIMITS = st.builds(
    Limits,
    max_bytes=st.sampled_from([None, 10, 1 << 30]),
    max_pixels=st.sampled_from([1, 100, 1 << 20]),
    max_frames=st.sampled_from([1, 5, 768]),
    max_duration_s=st.sampled_from([0.01, None]),
    max_memory=st.sampled_from([1, 1000, 1 << 26]),
)


@pytest.mark.extra
@given(
    data=st.builds(bytes.__add__, st.sampled_from(STARTS), st.binary(max_size=64))
    | st.builds(lambda good, n: good[: n % len(good)], st.sampled_from(GOOD), st.integers(1, 9999))
    | st.sampled_from(GOOD),
    name=st.text(st.characters(blacklist_characters="/\0", blacklist_categories=["Cs"]),
                 min_size=1, max_size=20).filter(lambda name: name not in (".", "..")),
    sampling=st.sampled_from(SAMPLINGS),
    limits=LIMITS,
    way=st.sampled_from(["bytes", "path", "missing", "outside", "folder", "image", "list", "url"]),
)  # fmt: skip
@settings(max_examples=400)
def test_no_message_gives_a_place_away(tmp_path_factory, data, name, sampling, limits, way):
    """Whatever is wrong, by whichever way it came: no folder, no address of memory or network, no
    second line and no escape code is in the message; at most the file's own name is (400 draws)."""
    folder = tmp_path_factory.getbasetemp() / SECRET
    folder.mkdir(exist_ok=True)
    path = folder / name
    try:
        if way in ("path", "outside"):
            path.write_bytes(data)
        elif way == "folder":
            path.mkdir(exist_ok=True)
            (path / "1.png").write_bytes(data)
    except OSError:
        return  # a name too long for this file system
    root = folder / "root" if way == "outside" else None
    within = Limits(**{**vars(limits), "root": root})
    ways = {
        "bytes": lambda: read(data, sampling, limits),
        "image": lambda: read_image(data, limits),
        "list": lambda: read_frames([data, data], sampling.fps, limits),
        "url": lambda: Sources(root=folder).load("file://" + str(path)),
    }
    try:
        ways.get(way, lambda: read(path, sampling, within))()
    except VideoInputError as error:
        message = str(error)
        display_name = "".join(c if c.isprintable() else "?" for c in name)
        assert message.isprintable()
        for part in (message, message.replace(display_name, "", 1)):
            assert SECRET not in part and str(Path.cwd()) not in part and "Errno" not in part
        assert not ADDRESS.search(message.replace(display_name, "", 1))
        assert "/" not in message and "\\" not in message.replace(display_name, "", 1)
        assert len(message) < 300
    finally:
        if path.is_file():
            os.unlink(path)


def test_hidden_files_are_no_frames(tmp_path):
    """Claim: a folder copied by macOS, with "._frame.jpg" beside every frame, is its frames."""
    for number in range(3):
        PILImage.fromarray(picture(number)).save(tmp_path / f"frame{number}.png")
        (tmp_path / f"._frame{number}.png").write_bytes(b"\0\5\x16\7" + bytes(60))
    clip = read(tmp_path)
    assert numbers(clip) == [0, 1, 2] and not clip.warnings


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    "kind", ["zTXt", "iTXt", "iTXt, packed", "tEXt", "iCCP", "many", "hardly packed"]
)
@pytest.mark.parametrize("place", ["before", "after"])
def test_long_texts_in_a_png_are_left_out(kind, place):
    """Claim: a picture with megabytes of text beside it (a prompt, a workflow) is the picture.
    Control: Pillow alone refuses those that come packed."""
    plain = saved(PILImage.fromarray(picture(5)), "PNG")
    words = b"x" * (3 << 20)
    chunks = {
        "tEXt": (b"tEXt", b"prompt\0" + words),
        "zTXt": (b"zTXt", b"prompt\0\0" + zlib.compress(words)),
        "iTXt": (b"iTXt", b"prompt\0\0\0\0\0" + words),
        "iTXt, packed": (b"iTXt", b"prompt\0\1\0\0\0" + zlib.compress(words)),
        "iCCP": (b"iCCP", b"profile\0\0" + zlib.compress(words)),
        "many": (b"zTXt", b"prompt\0\0" + zlib.compress(bytes(900_000))),
        "hardly packed": (
            b"zTXt",
            b"prompt\0\0" + zlib.compress(random.Random(0).randbytes(1_300_000)),
        ),
    }
    name, body = chunks[kind]
    chunk = len(body).to_bytes(4) + name + body + zlib.crc32(name + body).to_bytes(4)
    at = 33 if place == "before" else len(plain) - 12  # after IHDR, or before IEND
    data = plain[:at] + chunk * (80 if kind == "many" else 1) + plain[at:]
    assert np.array_equal(read_image(data), picture(5))
    if kind in ("zTXt", "iTXt, packed", "hardly packed") and place == "before":
        with pytest.raises(ValueError, match="too large"):
            PILImage.open(io.BytesIO(data))


def test_short_texts_in_a_png_stay():
    """Claim: a picture turned by what a short text says of it is still turned."""
    exif = PILImage.Exif()
    exif[0x0112] = 3
    raw = exif.tobytes()
    text = f"\nexif\n{len(raw):8d}\n{raw.hex()}\n".encode()
    plain = saved(PILImage.fromarray(picture(5)), "PNG")
    body = b"Raw profile type exif\0\0" + zlib.compress(text)
    chunk = len(body).to_bytes(4) + b"zTXt" + body + zlib.crc32(b"zTXt" + body).to_bytes(4)
    turned = read_image(plain[:33] + chunk + plain[33:])
    assert np.array_equal(turned, picture(5)[::-1, ::-1])


def test_numbers_of_numpy_choose_frames():
    """Claim: counts and rates of NumPy are counts and rates; a fraction is no count."""
    assert FrameSampling(num_frames=np.int64(3)) == FrameSampling(num_frames=3)
    assert FrameSampling(fps=np.float32(0.5), end=np.int32(9)) == FrameSampling(fps=0.5, end=9)
    for wrong in (np.float64(3.0), np.bool_(True)):
        with pytest.raises(VideoInputError, match="num_frames must be a whole number"):
            FrameSampling(num_frames=wrong)


@pytest.mark.parametrize("form", ["AVIF", "TIFF", "HEIF"])
def test_pictures_of_phones_and_scanners_are_read(form):
    """AVIF, TIFF and, with its extra, HEIC give the pixels of Pillow's own decoder, as one picture;
    without the extra the sentence names it. Fails where one is taken for a video."""
    image = PILImage.fromarray(np.arange(24 * 16 * 3, dtype=np.uint8).reshape(24, 16, 3))
    if form == "HEIF":
        heif = pytest.importorskip("pillow_heif")
        heif.register_heif_opener()
    data = saved(image, form)
    expected = np.asarray(PILImage.open(io.BytesIO(data)).convert("RGB"))
    clip = read(data)
    assert (clip.frames == expected[None]).all() and clip.source_frames == 1
    assert (read_image(data) == expected).all()


def test_heic_without_its_package_names_the_extra(monkeypatch):
    """Where pillow-heif is missing a HEIC picture is refused, and the sentence names the extra."""
    from saccade.inputs.media import media_file

    monkeypatch.setattr(media_file, "find_spec", lambda name: None)
    with pytest.raises(VideoInputError, match="--extra heic"):
        read(b"\0\0\0\x20ftypheic" + bytes(200))


def test_an_avif_under_the_common_brand_is_no_heic(monkeypatch):
    """Claim: a file of the brand that AVIF and HEIC share is what its compatible brands say, so an
    AVIF needs no package; without any it counts as HEIC. Fails if the first brand decides."""
    from saccade.inputs.media import media_file

    monkeypatch.setattr(media_file, "find_spec", lambda name: None)
    image = PILImage.new("RGB", (16, 16), "red")
    data = bytearray(saved(image, "AVIF"))
    assert b"avif" in data[16:40]
    data[8:12] = b"mif1"
    assert read(bytes(data)).frames.shape == (1, 16, 16, 3)
    with pytest.raises(VideoInputError, match="--extra heic"):
        read(b"\0\0\0\x18ftypmif1\0\0\0\0mif1heic" + bytes(200))


@pytest.mark.parametrize("hidden", [[7], [3, 7], [6, 7]])
def test_a_packet_without_a_picture_shows_the_picture_before_it(hidden):
    """Claim: a VP8 packet that is decoded but not displayed leaves the picture before it on
    display, also at the end of a file. Fails if the last such packets lose their frames."""
    plain, out = video("webm", "libvpx", n=8, rate=10, b_frames=0), io.BytesIO()
    with av.open(io.BytesIO(plain)) as source, av.open(out, "w", format="webm") as container:
        stream = container.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(source.demux(source.streams.video[0])):
            if packet.size:
                data = bytearray(packet)
                data[0] &= 0xEF if number in hidden else 0xFF  # The bit that says it is displayed.
                copy = av.Packet(bytes(data))
                copy.pts, copy.dts, copy.time_base = packet.pts, packet.dts, packet.time_base
                copy.is_keyframe, copy.stream = packet.is_keyframe, stream
                container.mux(copy)
    before, after = (read(each, EVERY).frames for each in (plain, out.getvalue()))
    assert len(after) == len(before) == 8
    shown = np.maximum.accumulate([0 if i in hidden else i for i in range(8)])
    assert (after == before[shown]).all()


def test_a_stream_that_breaks_off_is_no_lack_of_room():
    """Claim: an error of the stream itself is said to be one, and not taken for a full disk."""

    class Broken:
        def read(self, size: int = -1) -> bytes:
            raise ConnectionResetError("reset by peer")

    with pytest.raises(VideoInputError, match="broke off"):
        read(Broken())


def test_the_pages_of_a_tiff_are_no_frames():
    """A TIFF of two pages is one picture, its first page, and a warning says so."""
    pages = [PILImage.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    clip = read(saved(pages[0], "TIFF", save_all=True, append_images=pages[1:]))
    assert len(clip.frames) == 1 and clip.frames[0, 0, 0].tolist() == [255, 0, 0]
    assert any("2 pages" in warning for warning in clip.warnings)
    assert not read(saved(pages[0], "TIFF")).warnings


@pytest.mark.parametrize("height", [1, 3, 4])
def test_a_flat_tensor_is_one_grey_picture(height: int) -> None:
    """Claim: a tensor of two axes is [height, width], however few rows it has. Fails if rows are
    taken for channels."""
    pixels = np.arange(height * 7, dtype=np.uint8).reshape(height, 7)
    frames = arrays.rgb_frames(pixels, channels_first=True)
    assert frames.shape == (1, height, 7, 3)
    assert all(np.array_equal(frames[0, :, :, channel], pixels) for channel in range(3))


def test_listed_frames_are_sampled_like_a_list_of_pictures() -> None:
    """Claim: ``num_frames`` chooses among the frames of a data: address as among pictures."""
    frames = [saved(PILImage.fromarray(picture(n)), "PNG") for n in range(4)]
    url = "data:video/jpeg;base64," + ",".join(base64.b64encode(each).decode() for each in frames)
    sampling = FrameSampling(num_frames=2)
    listed = python_media.read(url, sampling, Sources())
    expected = python_media.read(frames, sampling, Sources())
    assert np.array_equal(listed.frames, expected.frames) and len(listed.frames) == 2
