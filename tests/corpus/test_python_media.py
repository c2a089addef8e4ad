"""What programs have as media: pictures, arrays, tensors, addresses and messages."""

from __future__ import annotations

import base64
import io
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import saccade
from saccade.core.errors import OptionError, VideoInputError
from saccade.inputs import media, python_media
from saccade.inputs.media import FrameSampling
from saccade.inputs.media.fetch import Sources
from saccade.world import drawing, scenes

QUESTION = "Name only the colours, in order."
NO_SOURCES = Sources()


@pytest.fixture(scope="module")
def clip_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("media") / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 8, 112)
    return path


@pytest.fixture(scope="module")
def frames(clip_file: Path) -> np.ndarray:
    return media.read(clip_file, FrameSampling(num_frames=4)).frames


@pytest.fixture(scope="module")
def model() -> saccade.Model:
    return saccade.load(method="sd", device="cpu")


def _png(frame: np.ndarray) -> bytes:
    page = io.BytesIO()
    Image.fromarray(frame).save(page, format="PNG")
    return page.getvalue()


def _data_url(frame: np.ndarray) -> str:
    return f"data:image/png;base64,{base64.b64encode(_png(frame)).decode()}"


def test_a_picture_is_the_same_in_every_form(frames: np.ndarray) -> None:
    """Claim: Pillow's image, an array or tensor in either order of axes and as bytes or floats, a
    data: address and a file's bytes are the same pixels, and one picture."""
    frame = frames[0]
    first = torch.from_numpy(frame).permute(2, 0, 1)
    forms: list[Any] = [
        *(Image.fromarray(frame), frame, frame.astype(np.int64), frame.astype(np.float32) / 255),
        *(first, first.float() / 255, torch.from_numpy(frame), _data_url(frame), _png(frame)),
    ]
    for form in forms:
        clip = python_media.read(form, FrameSampling(), NO_SOURCES)
        assert (clip.frames == frame[None]).all(), type(form)
        assert clip.source_frames == 1


def test_frames_are_the_same_video_in_every_form(frames: np.ndarray) -> None:
    """Claim: an array or tensor of frames and a list of pictures are one video, with ``fps`` as the
    rate at which they were taken, and a number of them on request."""
    forms: list[Any] = [
        *(frames, torch.from_numpy(frames), torch.from_numpy(frames).permute(0, 3, 1, 2)),
        *([Image.fromarray(each) for each in frames], list(frames)),
    ]
    for form in forms:
        clip = python_media.read(form, FrameSampling(fps=2), NO_SOURCES)
        assert (clip.frames == frames).all() and clip.timestamps.tolist() == [0, 0.5, 1, 1.5]
        two = python_media.read(form, FrameSampling(num_frames=2), NO_SOURCES)
        assert len(two.frames) == 2


def test_pictures_are_made_upright_and_opaque() -> None:
    """Claim: EXIF's rotation is applied, transparency is white, and grey has three channels."""
    pixels = np.arange(8 * 6 * 3, dtype=np.uint8).reshape(8, 6, 3)
    image = Image.fromarray(pixels)
    image.getexif()[0x0112] = 6  # turned by a quarter
    turned = python_media.read(image, FrameSampling(), NO_SOURCES).frames[0]
    assert (turned == np.rot90(pixels, -1)).all()
    clear = np.zeros((8, 6, 4), np.uint8)
    assert (python_media.read(clear, FrameSampling(), NO_SOURCES).frames == 255).all()
    grey = np.full((8, 6), 7, np.uint8)
    assert python_media.read(grey, FrameSampling(), NO_SOURCES).frames.shape == (1, 8, 6, 3)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (np.full((8, 8, 3), -1.0), "undo the processor's normalisation"),
        (np.full((8, 8, 3), 300), "from 0 to 255"),
        (np.zeros((8, 8, 7), np.uint8), "no axis of 1, 3 or 4 channels"),
        (np.zeros((2, 2, 8, 8, 3), np.uint8), r"\[height, width, 3\] for a picture"),
        (np.zeros((8, 8, 3), complex), "whole numbers"),
        ([], "at least one picture"),
        (np.zeros((0, 8, 8, 3), np.uint8), "for a picture"),
        ("https://example.com/clip.mp4", "media_hosts="),
        ("file:///etc/passwd", "media_root="),
        (7, "not int"),
    ],
    ids=str,
)
def test_other_values_are_refused_in_a_sentence(value: Any, sentence: str) -> None:
    """Claim: what is no picture is refused by a sentence that says what is one, or what allows
    it."""
    with pytest.raises(VideoInputError, match=sentence):
        python_media.read(value, FrameSampling(), NO_SOURCES)


@pytest.fixture
def server(frames: np.ndarray) -> Iterator[int]:
    """Yields the port of a server on this machine that has one picture."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = _png(frames[0])
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield http.server_port
        http.shutdown()


def test_addresses_are_opened_by_the_servers_rules(
    server: int, frames: np.ndarray, clip_file: Path
) -> None:
    """Claim: an address is fetched where its host is named and may be private, and refused where
    either is missing; a file: address is read below the folder that is named, and no other."""
    url = f"http://127.0.0.1:{server}/picture.png"
    host = f"127.0.0.1:{server}"
    named = Sources(hosts=(host,), allows_private_hosts=True)
    assert (python_media.read(url, FrameSampling(), named).frames[0] == frames[0]).all()
    for sources in (NO_SOURCES, Sources(hosts=(host,)), Sources(any_host=True)):
        with pytest.raises(VideoInputError, match="may not be opened"):
            python_media.read(url, FrameSampling(), sources)
    below = Sources(root=clip_file.parent)
    assert (
        len(python_media.read(clip_file.as_uri(), FrameSampling(num_frames=4), below).frames) == 4
    )
    with pytest.raises(VideoInputError):
        python_media.read(Path(__file__).as_uri(), FrameSampling(), below)


def test_load_says_what_addresses_are_allowed() -> None:
    """Claim: ``saccade.load`` takes the server's options by their names, a host alone too."""
    loaded = saccade.load(media_hosts="example.com", private_media_hosts=True, device="cpu")
    assert loaded.sources == Sources(hosts=("example.com",), allows_private_hosts=True)
    with pytest.raises(OptionError, match="name them"):
        saccade.load(private_media_hosts=True)


def test_describe_answers_alike_in_every_form(
    model: saccade.Model, frames: np.ndarray, clip_file: Path
) -> None:
    """Claim: frames as an array, as pictures and in messages of either form get the answer of the
    clip that they were read from, with the same times."""
    clip = media.read(clip_file, FrameSampling(num_frames=4))
    answer = model.describe(clip, QUESTION, max_new_tokens=12)
    rate = clip.sampled_fps
    pictures = [Image.fromarray(each) for each in frames]
    for value in (frames, [pictures]):
        assert model.describe(value, QUESTION, fps=rate, max_new_tokens=12).ids == answer.ids
    text = {"type": "text", "text": QUESTION}
    for part in (
        {"type": "video", "video": pictures, "fps": rate},
        {"type": "video", "path": str(clip_file), "nframes": 4},
    ):
        messages = [{"role": "user", "content": [part, text]}]
        assert model.describe(messages, max_new_tokens=12).ids == answer.ids


@pytest.mark.filterwarnings("ignore:.*drawn")
def test_pictures_in_messages_and_lists(model: saccade.Model, frames: np.ndarray) -> None:
    """Claim: two pictures in a list are two images, as the same two in messages of transformers'
    and of OpenAI's form, by value or address."""
    one, two = (Image.fromarray(each) for each in frames[:2])
    answer = model.describe([one, two], QUESTION, max_new_tokens=8)
    first: list[dict[str, Any]] = [{"type": "image", "image": each} for each in (one, two)]
    second = [{"type": "image_url", "image_url": {"url": _data_url(each)}} for each in frames[:2]]
    third = [
        {"type": "image", "base64": base64.b64encode(_png(frames[0])).decode()},
        {"type": "image", "base64": _data_url(frames[1])},
    ]
    for parts in (first, second, third):
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        assert model.describe(messages, max_new_tokens=8).ids == answer.ids


def test_warnings_point_to_the_callers_line(model: saccade.Model) -> None:
    """Claim: a warning about media names the file that called Saccade, whatever was called."""
    noise = np.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=np.uint8)
    still = Image.fromarray(noise)
    calls = (
        lambda: model.describe(still, max_new_tokens=1),
        lambda: model.stream(still, max_new_tokens=1).close(),
        lambda: model.chat(still, max_new_tokens=1).close(),
        lambda: model.batch([(still, QUESTION)], max_new_tokens=1),
    )
    for call in calls:
        with pytest.warns(UserWarning) as caught:
            call()
        assert {each.filename for each in caught} == {__file__}


def test_messages_are_no_media_of_a_chat(model: saccade.Model) -> None:
    """Claim: messages given to what takes media alone are refused by a sentence that says so."""
    messages = [{"role": "user", "content": "hi"}]
    for call in (lambda: model.chat(messages), lambda: model.batch([(messages, "hi")])):
        with pytest.raises(OptionError, match="messages have their questions in them"):
            call()


def test_a_system_prompt_is_the_first_message(model: saccade.Model) -> None:
    """Claim: ``system=`` gives the answer of a message with that role, in ``describe``, ``batch``
    and ``chat``, and reads more of a prompt than no system prompt; twice is refused."""
    system = "You answer in one word."
    plain = model.describe(None, QUESTION, max_new_tokens=6)
    answer = model.describe(None, QUESTION, system=system, max_new_tokens=6)
    assert answer.prompt_tokens > plain.prompt_tokens
    messages = [{"role": "system", "content": system}, {"role": "user", "content": QUESTION}]
    assert model.describe(messages, max_new_tokens=6).ids == answer.ids
    assert model.describe(messages[1:], system=system, max_new_tokens=6).ids == answer.ids
    assert model.batch([(None, QUESTION)], system=system, max_new_tokens=6)[0].ids == answer.ids
    with model.chat(None, system=system, max_new_tokens=6) as talk:
        assert talk.ask(QUESTION).ids == answer.ids
    with pytest.raises(OptionError, match="system prompt already"):
        model.describe(messages, system=system)


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([{"role": "tool", "content": "x"}], "the role 'tool'"),
        ([{"role": "user"}], "has no content"),
        ([{"role": "user", "content": [{"type": "audio", "audio": 1}]}], "type 'audio'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "type 'image'"),
    ],
    ids=str,
)
def test_messages_that_are_none_are_refused(
    model: saccade.Model, messages: list[Any], sentence: str
) -> None:
    """Claim: a role, a content or a part that is not read is named, with the message's number."""
    with pytest.raises(VideoInputError, match=f"message 1 .*{sentence}"):
        model.describe(messages)
    good = [{"role": "user", "content": "hi"}]
    with pytest.raises(OptionError, match="messages have the question in them"):
        model.describe(good, "What?")


def test_a_video_of_messages_keeps_the_sampling_that_it_does_not_replace(
    clip_file: Path,
) -> None:
    """Claim: a part that names its start keeps the caller's number of frames; a part that names a
    rate replaces it. Fails if any option of a part drops all of the caller's."""

    def frames_of(**options: Any) -> int:
        part = {"type": "video", "video": str(clip_file), **options}
        messages = [{"role": "user", "content": [part]}]
        read = python_media.Messages(messages, FrameSampling(num_frames=4), NO_SOURCES)
        return len(read.clips[0].frames)

    assert frames_of() == frames_of(start=0) == frames_of(video_end=1.0) == 4
    assert frames_of(num_frames=3, start=0) == 3
    assert frames_of(fps=None) == frames_of(num_frames=None, nframes=None) == 4
    assert frames_of(fps=2) != 4


def test_frames_have_a_short_form(model: saccade.Model, clip_file: Path) -> None:
    """Claim: ``num_frames=`` and ``fps=`` are those of ``frames=``; both at once are refused."""
    for short in ({"num_frames": 4}, {"fps": 4}):
        answer = model.describe(clip_file, QUESTION, max_new_tokens=2, **short)
        long = model.describe(clip_file, QUESTION, frames=short, max_new_tokens=2)
        assert answer.visual_tokens == long.visual_tokens and answer.ids == long.ids
    with pytest.raises(OptionError, match="short form"):
        model.describe(clip_file, QUESTION, frames={"fps": 2}, num_frames=4)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ({"torch_dtype": torch.bfloat16}, "dtype="),
        ({"attn_implementation": "sdpa"}, "leave it out"),
        ({"assistant_model": "x"}, "draft="),
        ({"load_in_4bit": True}, 'quantize="bnb-4bit"'),
        ({"devise": "cpu"}, "did you mean device"),
        ({"token": "x"}, "HF_TOKEN"),
        ({"max_pixels": 100_352}, "preprocessor_config.json"),
        ({"num_frames": 8}, "Model.describe takes it"),
    ],
    ids=str,
)
def test_load_answers_transformers_keywords(argument: dict[str, Any], sentence: str) -> None:
    """Claim: an argument of ``from_pretrained`` is answered with what is written here."""
    with pytest.raises(OptionError, match=sentence):
        saccade.load(**argument)


def test_load_takes_torchs_types() -> None:
    """Claim: ``dtype=torch.bfloat16`` is ``dtype="bfloat16"``; a type that is none of the three is
    refused by name."""
    loaded = saccade.load(dtype=torch.bfloat16, device="cpu")
    assert loaded.pair.target.backbone.dtype == torch.bfloat16
    with pytest.raises(OptionError, match="unknown dtype 'int8'"):
        saccade.load(dtype=torch.int8)
