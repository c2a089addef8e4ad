"""Media: every input here is generated, and every frame carries its own number as a bar code."""

import io
import itertools
import random
import struct
import sys
import types
from fractions import Fraction

import av
import numpy as np
import pytest
from PIL import Image as PILImage
from reels import (
    EVERY,
    HEIGHT,
    VIDEOS,
    WIDTH,
    animation,
    jpegs,
    numbers,
    picture,
    refused,
    still,
    video,
)

from saccade.core.errors import VideoInputError
from saccade.inputs.media import FrameSampling, Limits, read, read_image
from saccade.inputs.media.images import upright_rgb
from saccade.inputs.media.media_file import open_media
from saccade.inputs.media.video import Video


@pytest.fixture(scope="module")
def mp4():
    return video()


# Containers, time and sampling


@pytest.mark.representatives(5)
@pytest.mark.parametrize("name", VIDEOS)
def test_every_container(name):
    """All frames come in display order with their own times, B-frames included, with the pixels of
    plain PyAV; and decoding only what is wanted gives those same pixels."""
    form, codec, more = VIDEOS[name]
    data = video(form, codec, **more)
    whole = read(data, EVERY)
    assert numbers(whole) == list(range(30))
    assert np.abs(whole.timestamps - np.arange(30) / 30).max() < 1e-3
    assert whole.duration == pytest.approx(1, abs=0.01)
    assert (whole.fps, whole.sampled_fps, whole.source_frames) == (30, 30, 30)
    assert whole.warnings == ()
    with av.open(io.BytesIO(data)) as container:
        plain = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert np.array_equal(whole.frames, plain)
    part = read(data, FrameSampling(fps=5, start=0.5))
    assert numbers(part) == [15, 21, 27]
    assert np.array_equal(part.frames, whole.frames[[15, 21, 27]])
    assert part.timestamps == pytest.approx([0.5, 0.7, 0.9], abs=1e-3)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("x264", ["", "open-gop=1:keyint=8"])
def test_skipping_is_invisible(x264):
    """Any subset equals the same rows of the whole, also next to open GOPs; and packets really are
    skipped: decoding for frame 55 of 60 starts after packet 35."""
    data = video(n=60, gop=8, x264=x264)
    whole = read(data, EVERY)
    chance = random.Random(0)
    for _ in range(25):
        wanted = sorted(chance.sample(range(60), 3))
        with open_media(data, Limits()) as file:
            got = dict(Video(file, Limits()).fetch(wanted))
        assert list(got) == wanted
        assert all(np.array_equal(got[i], whole.frames[i]) for i in wanted)
    with open_media(data, Limits()) as file:
        reel = Video(file, Limits())
        assert 35 < reel.start_packets[55] and (np.diff(reel.start_packets) >= 0).all()


def test_default_sampling():
    """Two frames a second; at least four, but never a frame twice; none in the last half frame,
    so that 1.001 seconds give two and not three."""
    assert numbers(read(video(n=50, rate=10))) == list(range(0, 50, 5))
    assert numbers(read(video(n=8, rate=8))) == [0, 2, 4, 6]
    assert numbers(read(video(n=3, rate=30))) == [0, 1, 2]
    ntsc = video(n=30, rate=Fraction(30000, 1001))
    assert numbers(read(ntsc, FrameSampling(fps=2))) == [0, 14]


def test_millisecond_containers():
    """MKV rounds times to milliseconds: the frame meant is taken, and the rate is the true one."""
    assert numbers(read(video("matroska"), FrameSampling(fps=15))) == list(range(0, 30, 2))
    clip = read(video("matroska", n=20, rate=Fraction(30000, 1001)), EVERY)
    assert clip.fps == clip.sampled_fps == 30000 / 1001


def test_num_frames_spread(mp4):
    """`num_frames` are evenly spaced from the start, and more than there are gives each once."""
    clip = read(mp4, FrameSampling(num_frames=5))
    assert numbers(clip) == [0, 6, 12, 18, 24] and clip.sampled_fps == 5
    clip = read(mp4, FrameSampling(num_frames=500))
    assert numbers(clip) == list(range(30)) and "all 30" in clip.warnings[0]


def test_fps_above_source(mp4):
    """A rate above the source's gives each frame once, at the source's rate."""
    clip = read(mp4, FrameSampling(fps=1000))
    assert numbers(clip) == list(range(30)) and clip.sampled_fps == 30


def test_start_end(mp4):
    """A window takes the frames shown inside it, with times of the source; beyond the end fails."""
    clip = read(mp4, FrameSampling(every=True, start=0.2, end=0.3))
    assert numbers(clip) == [6, 7, 8]
    assert clip.timestamps == pytest.approx([6 / 30, 7 / 30, 8 / 30])
    clip = read(mp4, FrameSampling(num_frames=2, start=0.51, end=0.6))
    assert numbers(clip) == [15, 16] and clip.timestamps[0] == 0.51
    assert numbers(read(mp4, FrameSampling(fps=2, start=0.9, end=99))) == [27]
    refused(mp4, "bad_option", FrameSampling(start=1.0))


def test_animations_and_stills():
    """GIF, WebP and PNG animations keep their own frame times; a still image is one frame."""
    for form in ("GIF", "WEBP", "PNG"):
        clip = read(animation(form, [100, 200, 300, 400]), EVERY)
        assert numbers(clip) == [0, 1, 2, 3], form
        assert clip.timestamps == pytest.approx([0, 0.1, 0.3, 0.6]) and clip.duration == 1.0
        assert numbers(read(animation(form, [100] * 8), FrameSampling(fps=5))) == [0, 2, 4, 6]
    for form in ("PNG", "JPEG", "WEBP", "BMP", "GIF"):
        clip = read(still(form))
        assert clip.frames.shape == (1, HEIGHT, WIDTH, 3) and clip.duration == 1.0


def test_folder(tmp_path):
    """A folder gives all its images in natural order, one a second or at `fps`; sizes are made
    equal and other files ignored."""
    for i in range(12):
        PILImage.fromarray(picture(i)).save(tmp_path / f"frame{i}.png")
    (tmp_path / "notes.txt").write_text("not an image")
    clip = read(tmp_path)
    assert numbers(clip) == list(range(12)) and clip.timestamps.tolist() == list(range(12))
    assert read(str(tmp_path), FrameSampling(fps=4)).duration == 3.0
    assert numbers(read(tmp_path, FrameSampling(num_frames=3))) == [0, 4, 8]
    assert numbers(read(tmp_path, FrameSampling(start=2, end=4))) == [2, 3]
    clip = read(tmp_path, limits=Limits(max_frames=6))
    assert numbers(clip) == [0, 2, 4, 6, 8, 10] and "6 frames" in clip.warnings[0]
    PILImage.fromarray(picture(3, 128, 96)).save(tmp_path / "frame3.png")
    clip = read(tmp_path)
    assert clip.frames.shape == (12, HEIGHT, WIDTH, 3) and "size changes" in clip.warnings[0]
    refused(tmp_path, "too_large", limits=Limits(max_bytes=100))
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "empty")


def test_sources(mp4, tmp_path, monkeypatch):
    """Paths, bytes, file objects and standard input give the same clip; progress counts up."""
    (tmp_path / "clip.mp4").write_bytes(mp4)
    whole, seen = read(mp4, EVERY), []
    sources = [tmp_path / "clip.mp4", str(tmp_path / "clip.mp4"), io.BytesIO(mp4), "-"]
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(mp4)))
    for source in sources:
        clip = read(source, EVERY, progress=lambda *args: seen.append(args))
        assert np.array_equal(clip.frames, whole.frames)
    assert seen[:2] == [(1, 30), (2, 30)] and seen[-1] == (30, 30)
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(buffer=io.BytesIO(mp4)))
    refused("-", "too_large", limits=Limits(max_bytes=len(mp4) - 1))


def test_progress_may_stop(mp4):
    """An exception of the caller's own passes through unchanged: it is how a server cancels."""

    def stop(done, total):
        raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        read(mp4, progress=stop)


def test_read_image():
    """Images come upright, on white where transparent, with grey of 16 bits and of floats scaled;
    videos are not images."""
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the camera was held sideways
    assert read_image(still("JPEG", exif=exif)).shape == (WIDTH, HEIGHT, 3)
    assert (read_image(still(mode="RGBA", color=(9, 9, 9, 0))) == 255).all()
    assert (read_image(still(mode="LA", color=(9, 0))) == 255).all()
    assert (read_image(still(mode="I;16", color=32768)) == 128).all()
    brighter_than_16_bits = PILImage.fromarray(np.full((4, 4), 70_000, np.int32), "I")
    assert (upright_rgb(brighter_than_16_bits) == 255).all()
    # Grey in floats: of 1, of 255 or of 65535, whichever its largest number fits.
    for white, nan in ((1.0, 0.0), (255.0, np.nan), (65535.0, 0.0)):
        floats = np.full((8, 8), white / 2, np.float32)
        floats[0, 0], floats[7, 7] = nan, white
        file = io.BytesIO()
        PILImage.fromarray(floats, "F").save(file, "TIFF")
        grey = read_image(file.getvalue())[..., 0]
        assert (grey[0, 0], grey[4, 4], grey[7, 7]) == (0, 128, 255)
    assert read_image(animation("GIF", [100, 100])).shape == (HEIGHT, WIDTH, 3)
    with pytest.raises(VideoInputError, match="not an image"):
        read_image(video(n=2))


def test_size_change():
    """Frames that change size half-way are resized to the first, and the clip says so; frames
    larger than the header declares do not get past the limits on pixels and memory."""
    data = jpegs([(WIDTH, HEIGHT)] * 2 + [(128, 96)] * 2)
    clip = read(data, EVERY)
    assert clip.frames.shape == (4, HEIGHT, WIDTH, 3) and "size changes" in clip.warnings[0]
    clip = read(data, EVERY, Limits(max_pixels=WIDTH * HEIGHT))
    assert len(clip.frames) == 2 and "2 of 4" in clip.warnings[0]
    larger = jpegs([(128, 96)] * 4)
    refused(larger, "too_many_pixels", EVERY, Limits(max_memory=4 * WIDTH * HEIGHT * 3))
    refused(larger, "damaged", EVERY, Limits(max_pixels=WIDTH * HEIGHT))


# What processors make of it


def qwen2_5(clip):
    """Grid and seconds per grid step, from transformers' own code."""
    from transformers import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor = Qwen2VLVideoProcessor()
    made = processor(
        [clip.frames], video_metadata=[clip.metadata], do_sample_frames=False,
        return_metadata=True, return_tensors="pt",
    )  # fmt: skip
    (meta,) = made["video_metadata"]
    assert isinstance(meta, VideoMetadata)
    return made["video_grid_thw"][0].tolist(), processor.temporal_patch_size / meta.sampled_fps


def qwen3_times(clip):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    meta = clip.metadata
    times = Qwen3VLProcessor._calculate_timestamps(None, meta["frames_indices"], meta["fps"], 2)
    assert clip.metadata["frames_indices"] == meta["frames_indices"][: len(clip.frames)]
    return times


@pytest.mark.representatives(4)
@pytest.mark.parametrize(
    ("rate", "sampling", "step"),
    [
        (10, FrameSampling(), 1.0),
        (10, EVERY, 0.2),
        (10, FrameSampling(fps=5), 0.4),
        (10, FrameSampling(num_frames=8), 1.0),
        (10, FrameSampling(num_frames=5), 1.6),
        (10, FrameSampling(fps=2, start=1.0, end=3.0), 1.0),
        (Fraction(30000, 1001), FrameSampling(fps=2), 1.0),
        (Fraction(30000, 1001), FrameSampling(fps=3), 2 / 3),
    ],
)
def test_metadata_gives_right_times(rate, sampling, step):
    """Through the real Qwen2.5-VL video processor, a grid step lasts two sampled frames, exact in
    float32 (positions are truncated, so 0.999 for 1 would be a position lost); through Qwen3-VL's
    code, times are those of the frames. Odd counts are padded by the processor."""
    clip = read(video(n=40, rate=rate), sampling)
    grid, seconds = qwen2_5(clip)
    n = len(clip.frames)
    assert grid[0] == (n + 1) // 2
    assert np.float32(seconds) == np.float32(step)
    padded = np.append(clip.timestamps, clip.timestamps[-1:])[: n + n % 2]
    assert qwen3_times(clip) == pytest.approx(padded.reshape(-1, 2).mean(axis=1), abs=6e-4)
    assert clip.metadata["duration"] == clip.duration
    assert (clip.metadata["height"], clip.metadata["width"]) == (HEIGHT, WIDTH)


def test_metadata_through_whole_processor():
    """The whole Qwen2.5-VL processor, given a clip at two frames a second, emits one second per
    grid step; without metadata it would assume 24 frames a second and emit 1/12."""
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import (
        PreTrainedTokenizerFast,
        Qwen2_5_VLProcessor,
        Qwen2VLImageProcessor,
        Qwen2VLVideoProcessor,
    )

    special = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    words = {word: i for i, word in enumerate(["[UNK]", *special])}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(model),
        unk_token="[UNK]",
        pad_token="[UNK]",
        additional_special_tokens=special,
    )
    processor = Qwen2_5_VLProcessor(
        Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor(), chat_template=""
    )
    clip = read(video(n=20, rate=10))
    made = processor(
        text="<|vision_start|><|video_pad|><|vision_end|>",
        videos=[clip.frames],
        video_metadata=[clip.metadata],
        do_sample_frames=False,
    )
    assert np.float32(made["second_per_grid_ts"][0]) == 1.0


def test_a_video_of_one_frame_is_a_clip_of_one_frame():
    """A video of one frame is a clip of one frame."""
    for form in ("mp4", "matroska", "avi"):
        clip = read(video(form, n=1))
        assert len(clip.frames) == 1 and clip.timestamps.tolist() == [0.0]
        assert clip.duration > 0 and clip.sampled_fps > 0


def test_a_variable_frame_rate_keeps_its_times():
    """Steps of 20, 33 and 500 ms: times are the packets' own, and sampling shows at each moment
    the frame that was on screen, held as long as it was."""
    ticks = [0, 20, 40, 73, 106, 606, 1106, 1126, 1626, 1646]
    data = video("matroska", n=10, b_frames=0, ticks=ticks)
    clip = read(data, EVERY)
    assert numbers(clip) == list(range(10))
    assert clip.timestamps == pytest.approx(np.array(ticks) / 1000)
    clip = read(data, FrameSampling(fps=4))
    assert numbers(clip) == [0, 4, 4, 5, 5, 7, 7]
    assert clip.timestamps == pytest.approx([0, 0.106, 0.5, 0.606, 1.0, 1.126, 1.5])
    assert clip.sampled_fps == 4 and (np.diff(clip.timestamps) > 0).all()
    clip = read(data, FrameSampling(num_frames=1, start=0.9))
    assert numbers(clip) == [5] and clip.timestamps.tolist() == [0.9]


@pytest.mark.parametrize(
    ("matrix", "turns"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)]
)
def test_a_phones_rotation_is_applied(matrix, turns):
    """A phone's rotation is applied: the first pixel row ends where the player would show it."""
    data = bytearray(video(n=2))
    plain = read(bytes(data), EVERY)
    at = data.find(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    turned = read(bytes(data), EVERY)
    assert np.array_equal(turned.frames, np.rot90(plain.frames, turns, axes=(1, 2)))
    assert turned.metadata["height"] == turned.frames.shape[1]


def shown_by(frames: np.ndarray, a: int, b: int, c: int, d: int) -> np.ndarray:
    """Frames as the format's definition shows them: the pixel (x, y) goes to (ax + cy, bx + dy)."""
    height, width = frames.shape[1:3]
    y, x = np.indices((height, width))
    right, down = a * x + c * y, b * x + d * y
    right, down = right - right.min(), down - down.min()
    canvas = np.zeros((len(frames), down.max() + 1, right.max() + 1, 3), np.uint8)
    canvas[:, down, right] = frames
    return canvas


@pytest.mark.parametrize("scale", [1, 0.5])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("signs", [*itertools.product((1, -1), repeat=2)])
def test_every_display_matrix_is_applied(signs, is_transposed, scale):
    """Claim: the eight ways to turn and mirror a video are those of the format's definition, at any
    scale of the matrix. Fails if only a turn is read off it: selfies are mirrored."""
    data = bytearray(video(n=2))
    plain = read(bytes(data), EVERY).frames
    first, second = signs
    matrix = (0, first, second, 0) if is_transposed else (first, 0, 0, second)
    at = data.find(b"tkhd") + 4 + 40
    a, b, c, d = (int(value * scale * 65536) for value in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    clip = read(bytes(data), EVERY)
    assert np.array_equal(clip.frames, shown_by(plain, *matrix))
    assert clip.metadata["width"] == clip.frames.shape[2]


def test_tiny_videos_are_enlarged_and_thin_ones_refused():
    """16x16 passes as it is; 1x1 is enlarged so that no side can be taken for channels; a strip no
    processor accepts is refused."""
    tiny = video("matroska", "ffv1", n=2, size=(16, 16), image=lambda i: picture(0)[:16, :16])
    assert read(tiny).frames.shape[1:] == (16, 16, 3)
    assert read(still(size=(1, 1), color=(1, 2, 3))).frames.tolist() == [[[[1, 2, 3]] * 5] * 5]
    assert read_image(still(size=(3, 5))).shape == (10, 6, 3)
    one = video("matroska", "ffv1", n=2, size=(1, 1), image=lambda i: picture(0)[:1, :1])
    grid, _ = qwen2_5(read(one))
    assert grid[0] == 1 and min(grid[1:]) > 0
    refused(still(size=(1, 1000)), "unsupported")


def test_an_animated_gif_is_a_video():
    """An animated GIF is composed frame by frame; a length of 0 means a tenth of a second."""
    clip = read(animation("GIF", [0] * 10))
    assert clip.duration == pytest.approx(1.0) and numbers(clip) == [0, 2, 5, 7]


def test_an_animated_webp_is_a_video():
    """An animated WebP, which FFmpeg cannot decode, is read by Pillow."""
    clip = read(animation("WEBP", [500] * 6))
    assert numbers(clip) == list(range(6)) and clip.timestamps.tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
