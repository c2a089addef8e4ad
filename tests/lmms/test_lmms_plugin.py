"""Claims about the lmms-eval plug-in. What lmms-eval itself must run is skipped where it is not."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shapes_task import FOLDER, TASKS, write

import saccade
from saccade import inputs as models
from saccade.cli import lmms
from saccade.core.errors import ModelError, OptionError, VideoInputError
from saccade.inputs import media
from saccade.inputs.media import FrameSampling
from saccade.inputs.media.clip import make_clip
from saccade.world import drawing, scenes

ROOT = Path(__file__).parents[2]
TEXT = "What is in the picture?"
METHOD = "specvlm/shape=fit"

needs_lmms_eval = pytest.mark.skipif(
    importlib.util.find_spec("lmms_eval") is None, reason="lmms-eval is not installed"
)


@cache
def plugged() -> lmms.Saccade:
    return lmms.Saccade("shapes", method=METHOD, frames=8)


def make_request(content: Any, given: dict[str, Any]) -> Any:
    """A request of lmms-eval's chat interface, about the one document of a task."""
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return SimpleNamespace(args=("", lambda doc: messages, given, 0, "task", "test"))


def results(*requests: Any) -> list[Any]:
    model = plugged()
    model.task_dict = {"task": {"test": [{}]}}
    return list(model.results(requests))


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(words: str = TEXT) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image(seed: int = 1) -> Image.Image:
    return Image.fromarray(drawing.image_frame(scenes.scene(seed), 112))


# -- arguments ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"do_sample": False, "max_new_tokens": 9}),
        ({"temperature": 0, "top_p": 1.0, "num_beams": 1}, {"do_sample": False, "num_beams": 1}),
        ({"temperature": 0.7, "top_p": 0.9}, {"do_sample": True, "temperature": 0.7, "top_p": 0.9}),
        ({"temperature": 0.2, "do_sample": False}, {"do_sample": False}),
        ({"temperature": 0.0, "do_sample": True}, {"do_sample": False}),
        ({"do_sample": True, "top_p": None}, {"do_sample": True}),
        ({"until": ["\n\n", ""]}, {"do_sample": False, "stop_strings": ["\n\n"]}),
        ({"until": "."}, {"do_sample": False, "stop_strings": ["."]}),
        ({"until": []}, {"do_sample": False}),
        ({"max_new_tokens": 5, "seed": 3}, {"do_sample": False, "max_new_tokens": 5, "seed": 3}),
    ],
)
def test_generation_settings_mean_what_they_say(given: dict, expected: dict):
    """Claim: a task's settings arrive as ours, greedy where lmms-eval means greedy."""
    settings, unknown = lmms.translate_generation_kwargs(given, 9)
    assert settings == {"max_new_tokens": 9, **expected} and unknown == []


def test_what_is_no_generation_setting_is_named():
    """Claim: image_aspect_ratio and the like come back by name; stops can be left out."""
    settings, unknown = lmms.translate_generation_kwargs(
        {"image_aspect_ratio": "pad", "until": "x"}, 9, uses_stops=False
    )
    assert unknown == ["image_aspect_ratio"]
    assert settings == {"do_sample": False, "max_new_tokens": 9}


def test_what_saccade_cannot_do_is_refused_by_name():
    """Claim: beams, batches, likelihoods and several rounds each end in one sentence."""
    with pytest.raises(OptionError, match="num_beams=4"):
        results(make_request([*user(text())], {"num_beams": 4}))
    with pytest.raises(OptionError, match="batch_size=8"):
        lmms.Saccade("shapes", batch_size="8")
    with pytest.raises(OptionError, match="scores none"):
        plugged().loglikelihood([])
    with pytest.raises(OptionError, match="one round"):
        plugged().generate_until_multi_round([])
    with pytest.raises(ModelError, match="no checkpoint folder"):
        lmms.Saccade("./nowhere")
    with pytest.raises(OptionError, match="unknown argument 'frame' .*did you mean frames"):
        lmms.Saccade("shapes", frame=8)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    """Claim: under accelerate with two processes nothing is loaded twice onto one device."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="one process"):
        lmms.Saccade("shapes")


# -- messages ----------------------------------------------------------------------------------


def test_text_alone_is_a_question_with_its_history():
    """Claim: earlier turns become history, and a system message leads the first question."""
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [text("One?"), text(" Or two?")]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Why?"},
    ]
    arguments = lmms.ask_arguments(turns, FrameSampling())
    assert arguments["question"] == "Why?"
    assert arguments["history"] == [("Be brief.\n\nOne? Or two?", "Two.")]
    assert "parts" not in arguments and not arguments["clips"] and not arguments["images"]


def test_pictures_stay_between_their_words():
    """Claim: words and pictures keep their order, whichever way a picture is given."""
    picture = image()
    pixels = np.asarray(picture)
    turn = user(
        text("Before"),
        {"type": "image", "url": picture},
        text("and after"),
        {"type": "image", "url": pixels},
    )
    arguments = lmms.ask_arguments(turn, FrameSampling())
    kinds = ["text", "image", "text", "image"]
    assert [part["type"] for part in arguments["parts"]] == kinds
    assert all(set(part) <= {"type", "text"} for part in arguments["parts"])
    assert all(np.array_equal(each, pixels) for each in arguments["images"])


def test_frames_for_captions_stand_in_the_order_of_the_prompt():
    """Claim: a captioner gets the frames of each medium where the prompt has it. Fails if videos
    come before pictures."""
    clip = make_clip(np.zeros((2, 4, 6, 3), np.uint8), 1.0)
    picture = np.ones((3, 5, 3), np.uint8)
    for kinds in (("image", "text", "video"), ("video", "image")):
        arguments = {"clips": [clip], "images": [picture], "parts": [{"type": k} for k in kinds]}
        frames = lmms._frames_in_order(arguments)
        expected = {"image": (1, (3, 5, 3)), "video": (2, (4, 6, 3))}
        media = [kind for kind in kinds if kind != "text"]
        assert [(len(each), each[0].shape) for each in frames] == [expected[k] for k in media]
    assert lmms._frames_in_order({"clips": [], "images": []}) == []


def test_a_picture_is_read_from_a_file_or_bytes(tmp_path: Path):
    """Claim: a path, bytes and an undecoded row of a dataset are the same picture."""
    path = tmp_path / "a.png"
    image().save(path)
    data = path.read_bytes()
    ways = [str(path), path, data, {"bytes": data, "path": None}, {"path": str(path)}]
    assert all(np.array_equal(lmms.read_picture(way), np.asarray(image())) for way in ways)
    with pytest.raises(OptionError, match="NoneType"):
        lmms.read_picture(None)


def test_a_video_is_a_file_a_part_of_one_or_its_frames(tmp_path: Path):
    """Claim: files are read as asked, cuts and counts included; frames count as two a second."""
    path = tmp_path / "a.mp4"
    drawing.write_clip(scenes.scene(1), path, 16, 56, fps=8)
    whole = lmms.read_clip({"url": str(path)}, FrameSampling(num_frames=8))
    assert len(whole.frames) == 8 and whole.duration == 2.0
    for part in (
        {"url": path, "start_time": 1.0},
        {"url": {"type": "video", "url": str(path), "video_start": 1.0, "video_end": 2.0}},
    ):
        assert lmms.read_clip(part, FrameSampling(num_frames=4)).timestamps.tolist() == [
            1.0,
            1.25,
            1.5,
            1.75,
        ]
    for frames in (whole.frames, [Image.fromarray(frame) for frame in whole.frames]):
        clip = lmms.read_clip({"url": frames}, FrameSampling(num_frames=4))
        assert np.array_equal(clip.frames, whole.frames[::2])
        assert clip.timestamps.tolist() == [0.0, 1.0, 2.0, 3.0] and clip.duration == 4.0
    three = lmms.read_clip({"url": whole.frames}, FrameSampling(num_frames=3))
    for key in ("video", "url", "path"):
        nested = lmms.read_clip({"url": {key: whole.frames}}, FrameSampling(num_frames=3))
        assert (nested.frames == three.frames).all()
    assert np.array_equal(three.frames, whole.frames[[0, 2, 5]])
    assert three.timestamps.tolist() == [0.0, 1.0, 2.5], "each frame at its own time"
    unequal = [Image.fromarray(whole.frames[0]), Image.fromarray(whole.frames[1][::2, ::2])]
    resized = lmms.read_clip({"url": unequal}, FrameSampling()).frames
    assert resized.shape == whole.frames[:2].shape and np.array_equal(resized[0], whole.frames[0])
    with pytest.raises(OptionError, match="cannot read a video, or a part"):
        lmms.read_clip({"url": whole.frames, "start_time": 1.0}, FrameSampling())


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (user({"type": "audio", "url": "a.wav"}, text()), "not audio"),
        ([{"role": "assistant", "content": "Yes."}], "assistant"),
        ([], "not a conversation"),
        (
            [
                *user(text()),
                {"role": "assistant", "content": "A box."},
                *user(text(), {"type": "image", "url": image()}),
            ],
            "after the first question",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(messages: list, why: str):
    """Claim: sound, late media and broken turns are each refused in a sentence."""
    with pytest.raises(OptionError, match=why):
        lmms.ask_arguments(messages, FrameSampling())


# -- answers -----------------------------------------------------------------------------------


def plain(question: str, settings: dict[str, Any], **ask_options: Any) -> Any:
    """What the target says by plain decoding, its inputs made without the plug-in."""
    target = plugged()._models.target
    inputs = models.ask(target, question, **ask_options)
    return saccade.run(
        target.backbone,
        inputs,
        method="ar",
        tokenizer=target.tokenizer,
        do_sample=False,
        **settings,
    )


@pytest.mark.usefixtures("unchecked")
def test_answers_are_plain_decodings_in_the_order_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Claim: a video, pictures and text, asked in turn, are answered as ``ar`` answers them."""
    path = tmp_path / "a.mp4"
    drawing.write_clip(scenes.scene(60_000_001), path, 8, 112, fps=8)
    show = {"type": "video", "url": str(path)}
    say = "Describe the video in detail."
    given = {"max_new_tokens": 48, "image_aspect_ratio": "pad"}
    answers = results(
        make_request(user(show, text(say)), given),
        make_request(user({"type": "image", "url": image()}, text()), {"max_new_tokens": 12}),
        make_request(user(text()), {"max_new_tokens": 8}),
        make_request(user(show, text(say)), {"max_new_tokens": 48, "until": ["."]}),
    )
    clip = media.read(path, FrameSampling(num_frames=8))
    expected = [
        plain(say, {"max_new_tokens": 48}, clips=[clip]),
        plain(TEXT, {"max_new_tokens": 12}, images=[np.array(image())]),
        plain(TEXT, {"max_new_tokens": 8}),
        plain(say, {"max_new_tokens": 48, "stop_strings": ["."]}, clips=[clip]),
    ]
    assert [each.text for each in answers] == [each.text for each in expected]
    assert [each.ids for each in answers] == [each.ids for each in expected]
    assert [each.method for each in answers] == [METHOD] * 4
    assert "." in answers[0].text and answers[3].text == answers[0].text.split(".")[0]
    assert caplog.text.count("image_aspect_ratio") == 1
    totals = lmms.summary(answers)
    assert totals["total_gen_tokens"] == sum(len(each.ids) for each in expected)
    assert totals["additional_metrics"]["tau"] > 1
    assert totals["additional_metrics"]["fallbacks"] == 0


@pytest.mark.usefixtures("unchecked")
def test_repeated_samples_differ_and_a_run_repeats():
    """Claim: one question asked twice is drawn twice, and the next run draws the same again."""
    given = {"max_new_tokens": 24, "temperature": 1.5}
    request = make_request(user({"type": "image", "url": image(3)}, text()), given)
    first, again = results(request, request), results(request, request)
    assert first[0].ids != first[1].ids
    assert [each.ids for each in first] == [each.ids for each in again]


def test_an_error_names_its_document(tmp_path: Path):
    """Claim: a video that is not there says so, and a note says whose it was."""
    gone = {"type": "video", "url": str(tmp_path / "gone.mp4")}
    with pytest.raises(VideoInputError, match="does not exist") as caught:
        results(make_request(user(gone, text()), {}))
    assert caught.value.__notes__ == ["(document 0 of task, split test)"]


# -- lmms-eval ---------------------------------------------------------------------------------


def test_the_entry_point_leads_here_and_nothing_else_does():
    """Claim: pyproject names a function that exists, and no module of ours imports the plug-in."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["lmms_eval.models"]["saccade"].partition(":")
    assert getattr(importlib.import_module(module), name) is lmms.manifest
    assert "lmms" in project["optional-dependencies"]
    imports = re.compile(r"^\s*(from saccade\.lmms|import saccade\.lmms|from saccade import.*lmms)")
    for path in Path(saccade.__file__).parent.rglob("*.py"):
        assert not any(imports.match(line) for line in path.read_text().splitlines()), path


@needs_lmms_eval
def test_lmms_eval_knows_the_model():
    """Claim: lmms-eval finds the plug-in by its name, as a chat model."""
    code = "from lmms_eval.models import get_model; m = get_model('saccade'); print(m, m.is_simple)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "<class 'saccade.cli.lmms.Saccade'> False" in done.stdout


@needs_lmms_eval
@pytest.mark.usefixtures("unchecked")
def test_lmms_eval_gets_the_answers_of_plain_decoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Claim: the command of docs/bench.md logs, for videos, pictures, text, stops and a system
    message, the texts of ``ar`` on inputs made without the plug-in, document by document."""
    monkeypatch.chdir(tmp_path)
    write(FOLDER, 2)
    command = f"""-m lmms_eval --model saccade --tasks shapes_local --include_path {TASKS}
        --model_args target=shapes,draft=shapes-draft,method={METHOD},frames=8,threads=1
        --log_samples --output_path out"""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, *command.split()],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stdout + done.stderr, done.stdout[-2000:] + done.stderr[-4000:]
    assert "tau: " in done.stdout and "fallbacks: 0" in done.stdout
    for task, answer in (
        ("caption", lambda doc: plain(doc["question"], {"max_new_tokens": 192}, **clips(doc))),
        ("diff", lambda doc: plain(doc["question"], {"max_new_tokens": 128}, **pictures(doc))),
        ("sentence", sentence),
        ("text", lambda doc: plain(doc["question"], {"max_new_tokens": 32})),
    ):
        (path,) = Path("out").rglob(f"*samples_shapes_local_{task}.jsonl")
        samples = [json.loads(line) for line in path.read_text().splitlines()]
        docs = (FOLDER / ("pictures" if task == "diff" else "clips")).with_suffix(".jsonl")
        rows = [json.loads(line) for line in docs.read_text().splitlines()]
        assert [sample["doc_id"] for sample in samples] == [0, 1]
        for sample in samples:
            result = answer(rows[sample["doc_id"]])
            assert result.text is not None
            assert sample["filtered_resps"] == result.text.strip()  # as lmms-eval logs it
            assert sample["token_counts"][0]["output_tokens"] == len(result.ids)


def clips(doc: dict[str, Any]) -> dict[str, Any]:
    return {"clips": [media.read(doc["clip"], FrameSampling(num_frames=8))]}


def pictures(doc: dict[str, Any]) -> dict[str, Any]:
    return {"images": [media.read_image(path) for path in doc["pictures"]]}


def sentence(doc: dict[str, Any]) -> Any:
    """The task of the first sentence, its system message where the plug-in says it goes."""
    instruction = "Answer the question about the video.\n\n"
    parts = [text(instruction), {"type": "video"}, text(doc["question"])]
    settings = {"max_new_tokens": 64, "stop_strings": ["."]}
    return plain("", settings, parts=parts, **clips(doc))
