"""Media made for the tests: every frame carries its own number as a bar code.

Needs no pytest fixture; what must be refused goes through ``refused``.
"""

import io
import pickle
import re
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image as PILImage

from saccade.core.errors import SaccadeError, VideoInputError
from saccade.inputs.media import FrameSampling, read
from saccade.world.drawing import PALETTE

EVERY = FrameSampling(every=True)
WIDTH, HEIGHT = 64, 48


def picture(number, width=WIDTH, height=HEIGHT):
    """A noisy picture whose top eight cells spell `number` in black and white."""
    image = np.random.default_rng(number).integers(60, 200, (height, width, 3), np.uint8)
    for bit in range(8):
        image[:8, bit * 8 : bit * 8 + 8] = 255 if number >> bit & 1 else 0
    return image


def numbers(clip):
    """The numbers spelled by the frames of a clip."""
    cells = clip.frames[:, :8, :64].reshape(len(clip.frames), 8, 8, 8, 3).mean(axis=(1, 3, 4))
    return [sum(int(cell > 128) << bit for bit, cell in enumerate(row)) for row in cells]


def video(form="mp4", codec="libx264", n=30, rate=30, gop=10, b_frames=2, ticks=None, **more):
    """A video as bytes; `ticks`: display time of each frame in milliseconds."""
    size, pix = more.get("size", (WIDTH, HEIGHT)), more.get("pix", "yuv420p")
    out, options = more.get("out", io.BytesIO()), {"g": str(gop), **more.get("options", {})}
    with av.open(out, "w", format=form, options=more.get("container", {})) as container:
        stream = container.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = *size, pix
        stream.codec_context.thread_count = 1
        if codec == "libx264":
            fixed = f"bframes={b_frames}:b-adapt=0:scenecut=0:{more.get('x264', '')}"
            stream.options = {**options, "x264-params": fixed.rstrip(":")}
        elif codec == "mpeg4":
            stream.codec_context.max_b_frames = b_frames
            stream.bit_rate = 4_000_000
        if ticks:
            stream.codec_context.time_base = Fraction(1, 1000)
        for i in range(n):
            image = more["image"](i) if "image" in more else picture(i, *size)
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts = ticks[i] if ticks else i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.read_bytes() if isinstance(out, Path) else out.getvalue()


def faststart(folder):
    """An MP4 with its index at the front."""
    return video(out=folder / "fast.mp4", b_frames=0, container={"movflags": "faststart"})


def sound(form, cover=False):
    """A file with an audio stream only, or with a cover picture too."""
    out = io.BytesIO()
    with av.open(out, "w", format=form) as container:
        stream = container.add_stream("aac", rate=8000)
        if cover:
            picture_stream = container.add_stream("mjpeg", rate=1)
            picture_stream.width, picture_stream.height = WIDTH, HEIGHT
            picture_stream.pix_fmt = "yuvj420p"
            picture_stream.disposition = av.stream.Disposition.attached_pic.value
            image = av.VideoFrame.from_ndarray(picture(0), format="rgb24")
            container.mux(picture_stream.encode(image))
            container.mux(picture_stream.encode())
        for i in range(4):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
            frame.rate, frame.pts = 8000, i * 1024
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def animation(form, milliseconds, **more):
    pictures = [PILImage.fromarray(picture(i)) for i in range(len(milliseconds))]
    out = io.BytesIO()
    more = {"WEBP": {"lossless": True}, "GIF": {}, "PNG": {}}[form] | more
    pictures[0].save(
        out, form, save_all=True, append_images=pictures[1:], duration=milliseconds, **more
    )
    return out.getvalue()


def still(form="PNG", size=(WIDTH, HEIGHT), mode="RGB", color=0, **more):
    out = io.BytesIO()
    PILImage.new(mode, size, color).save(out, form, **more)
    return out.getvalue()


def refused(source, code, sampling=None, limits=None):
    """Read what must be refused; the error is one clean sentence."""
    with pytest.raises(VideoInputError) as caught:
        read(source, sampling, limits)
    error, message = caught.value, str(caught.value)
    assert error.code == code and isinstance(error, SaccadeError)
    assert error.status in (400, 413, 415, 422)
    assert "\n" not in message and ". " not in message and not re.search(r"\b0x", message)
    assert str(Path.cwd()) not in message and "/tmp" not in message and "Errno" not in message
    assert error.__cause__ is None and (error.__suppress_context__ or not error.__context__)
    assert str(pickle.loads(pickle.dumps(error))) == message
    return error


VIDEOS = {
    "mp4-h264": ("mp4", "libx264", {}),
    "mp4-hevc": ("mp4", "libx265", {"options": {"x265-params": "log-level=none:pools=none"}}),
    "mp4-fragmented": ("mp4", "libx264", {"container": {"movflags": "frag_keyframe+empty_moov"}}),
    "mov-mpeg4": ("mov", "mpeg4", {}),
    "mov-png": ("mov", "png", {"pix": "rgb24"}),
    "mkv-h264": ("matroska", "libx264", {}),
    "mkv-ffv1": ("matroska", "ffv1", {}),
    "webm-vp8": ("webm", "libvpx", {"options": {"auto-alt-ref": "1", "lag-in-frames": "16"}}),
    "webm-vp9": ("webm", "libvpx-vp9", {"options": {"deadline": "realtime", "cpu-used": "8"}}),
    "avi-h264": ("avi", "libx264", {}),
    "avi-mpeg4": ("avi", "mpeg4", {}),
    "avi-mjpeg": ("avi", "mjpeg", {"pix": "yuvj420p"}),
}


def jpegs(sizes):
    """An MKV that declares 64x48, with JPEG pictures of these sizes."""
    out = io.BytesIO()
    with av.open(out, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuvj420p"
        for i, (width, height) in enumerate(sizes):
            jpeg = io.BytesIO()
            PILImage.fromarray(picture(i, width, height)).save(jpeg, "JPEG")
            packet = av.Packet(jpeg.getvalue())
            packet.stream, packet.pts, packet.dts = stream, i, i
            packet.time_base, packet.is_keyframe = Fraction(1, 10), True
            container.mux(packet)
    return out.getvalue()


def nearest(pixels: np.ndarray) -> int:
    """The palette index of a set of pixels [n, 3] by majority of those near any colour."""
    far = np.linalg.norm(pixels[:, None].astype(float) - PALETTE, axis=2)
    near = far.argmin(axis=1)[far.min(axis=1) < 40]
    return int(np.bincount(near, minlength=8).argmax()) if near.size else -1
