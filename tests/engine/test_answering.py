"""From a file to an answer in Python: every way to ask, and the lines of README and guides."""

from __future__ import annotations

import inspect
import io
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from PIL import Image

import saccade
from lab import checkpoints
from saccade.answering.coloured_text import IncrementalDecoder
from saccade.core import generation_settings
from saccade.core.answer_text import TextDecoder
from saccade.core.errors import ModelError, OptionError, VideoInputError
from saccade.core.generation_settings import GenerateArguments, Settings
from saccade.core.protocols import Growing, Shape, State
from saccade.core.result import Round
from saccade.core.tree import Tree
from saccade.drafting.shapes.policies import Chain
from saccade.engine.generate import CallArguments
from saccade.inputs import media
from saccade.methods import resolve
from saccade.world import drawing, scenes

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("first-answer", "own-models", "python", "live")),
    ROOT / "docs" / "from-transformers.md",
]
QUESTION = "Describe the video in detail."
FOLDERS_BY_HUB_ID = {
    "llava-hf/llava-onevision-qwen2-7b-ov-hf": "big",
    "llava-hf/llava-onevision-qwen2-0.5b-ov-hf": "small",
}


@pytest.fixture(scope="module")
def model() -> saccade.Model:
    return saccade.load(method="sd", device="cpu")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    paths = [folder / "clip.mp4", folder / "other.mp4"]
    for seed, path in enumerate(paths, start=20_000_001):
        drawing.write_clip(scenes.scene(seed), path, 8, 112)
    return paths


@pytest.mark.representatives(1)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_pages_lines_run(
    clips: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: Path
) -> None:
    """Claim: a page's Python runs as it stands, one block after the other, in a folder with what
    the commands of the first pages make there; folders of random weights stand for models of the
    hub. Clips and answers are shorter here; ``tests/slow/test_first_hour.py`` runs the commands."""
    for path in clips:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "clip.json").write_text('{"shape": "circle", "color": "red"}')
    for folder in ("big", "small"):
        checkpoints.make("qwen2.5-vl", tmp_path / folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generation_settings, "MAX_NEW_TOKENS", 24)
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        for hub_id, folder in FOLDERS_BY_HUB_ID.items():
            block = block.replace(hub_id, folder)
        exec(compile(block, page.name, "exec"), names)
    answer = names["answer"]
    assert isinstance(answer, saccade.Result) and answer.text


def test_every_way_to_ask_gives_one_answer(model: saccade.Model, clips: list[Path]) -> None:
    """Claim: describing, streaming, a batch and a conversation's first turn say the same; a file
    may be given by path, as bytes, or read already, and of the first the text streams whole."""
    first, second = clips
    answer = model.describe(first, QUESTION, max_new_tokens=40)
    assert answer.text and answer.method == "sd"
    rounds = list(stream := model.stream(str(first), QUESTION, max_new_tokens=40))
    assert "".join(round.text for round in rounds) == answer.text == stream.results[0].text
    assert model.describe(first.read_bytes(), QUESTION, max_new_tokens=40).ids == answer.ids
    both = model.batch([(first, QUESTION), (second, QUESTION)], max_new_tokens=40)
    assert both[0].ids == answer.ids
    assert both[1].ids == model.describe(second, QUESTION, max_new_tokens=40).ids
    assert model.batch([]) == []
    with model.chat(first, max_new_tokens=40) as talk:
        assert talk.ask(QUESTION).ids == answer.ids
        again = talk.ask("Name only the colours, in order.")
    assert again.reused_tokens > 0 and len(talk.history) == 2
    with pytest.raises(saccade.VideoInputError, match="does not exist"):
        model.describe("nope.mp4")


def test_several_videos_and_pictures(
    model: saccade.Model, clips: list[Path], tmp_path: Path
) -> None:
    """Claim: two videos are both read, by the frames asked for; a foreign picture warns, and a
    list of none is no question about text."""
    one = model.describe(clips[0], QUESTION, frames={"num_frames": 4}, max_new_tokens=2)
    two = model.describe(clips, QUESTION, frames={"num_frames": 4}, max_new_tokens=2)
    assert two.visual_tokens == 2 * one.visual_tokens
    picture = tmp_path / "noise.png"
    noise = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    Image.fromarray(noise).save(picture)
    domain = model.pair.target.training_domain
    assert domain is not None
    with pytest.warns(UserWarning, match=re.escape(domain.warning)):
        model.describe(picture, "Describe the image in detail.", max_new_tokens=2)
    with pytest.raises(saccade.OptionError, match="give a video, or None for text alone"):
        model.describe([], QUESTION)


def test_a_round_prints_itself_in_a_line(model: saccade.Model, clips: list[Path]) -> None:
    """Claim: a round's print has what was accepted and its text, and none of its laws."""
    (round, *_) = model.stream(clips[0], QUESTION, max_new_tokens=12)
    line = repr(round)
    assert len(line) < 200 and "accepted" in line and repr(round.text) in line
    assert "tensor" not in line


def test_requests_of_a_batch_have_captions(clips: list[Path]) -> None:
    """Claim: a method that reads captions drafts in a batch what it drafts for each alone."""
    model = saccade.load(method="tabed-mtcp", device="cpu")
    together = model.batch([(clip, QUESTION) for clip in clips], max_new_tokens=16)
    alone = [model.describe(clip, QUESTION, max_new_tokens=16) for clip in clips]
    for one, other in zip(together, alone, strict=True):
        assert one.fallback_reason is None and one.ids == other.ids
        assert [round.tokens for round in one.rounds] == [round.tokens for round in other.rounds]


@dataclass(frozen=True)
class EveryOtherRound(Shape):
    """A chain of three in every other round, and no draft in the rounds between."""

    @property
    def spelling(self) -> str:
        return "every-other-round"

    def start(self) -> State:
        return 0

    def grow(self, state: State) -> Growing:
        if state % 2:
            return Tree()
        return (yield from Chain(3).grow(None))

    def fold(self, state: State, round: Round) -> State:
        return state + 1


def test_a_round_without_a_draft_has_no_scores_of_one(clips: list[Path]) -> None:
    """Claim: ``Round.q`` is of this round's draft: where nothing was drafted it is None, and not
    the scores of the draft before."""
    recipe = replace(resolve("sd"), shape=EveryOtherRound())
    model = saccade.load(method=recipe, device="cpu")
    rounds = [*model.stream(clips[0], QUESTION, max_new_tokens=24)][1:]
    assert len(rounds) > 4
    for number, round in enumerate(rounds):
        assert (len(round.tree) > 0) == (round.q is not None) == (number % 2 == 0)


def test_rounds_leave_a_stop_string_out(model: saccade.Model, clips: list[Path]) -> None:
    """Claim: wherever a stop string begins and ends, the text of the rounds adds up to the text of
    the result, which ends before it; and the terminal's text too."""
    whole = model.describe(clips[0], QUESTION, max_new_tokens=40).text
    assert whole is not None
    for start in range(0, len(whole) // 2, 5):
        stop = whole[start + 3 : start + 12]
        stream = model.stream(clips[0], QUESTION, max_new_tokens=40, stop_strings=[stop])
        rounds = [*stream]
        text = whole[: whole.index(stop)]
        assert stream.results[0].text == text
        assert "".join(round.text for round in rounds) == text
        assert stream.text_decoder is not None
        text_decoder = IncrementalDecoder(stream.text_decoder)
        printed = [text_decoder.styled_text(round.to_record()).plain for round in rounds]
        assert "".join([*printed, text_decoder.rest(text)]) == text


def test_text_adds_up_where_characters_are_split() -> None:
    """Claim: whatever the cuts, the pieces add up to the whole, and none ends in half a character
    but the last."""
    whole = "aé漢🎈b".encode()

    def decode(ids: object) -> str:
        return bytes(ids).decode(errors="replace")  # type: ignore[call-overload]

    decoder = TextDecoder(decode)
    for cut in range(len(whole) + 1):
        for other in range(cut, len(whole) + 1):
            ends = [(0, cut), (cut, other), (other, len(whole))]
            pieces = [decoder.added_text(whole, a, b, b == len(whole), None) for a, b in ends]
            assert "".join(pieces[:3]).startswith(whole.decode()[:1] if cut else "")
            kept = pieces[:2] if other == len(whole) else pieces
            assert "".join(kept) == whole.decode()
            assert not any("\ufffd" in piece for piece in pieces[:2] if other < len(whole))


def test_editors_see_the_arguments() -> None:
    """Claim: ``run``, ``stream`` and ``generate`` name what they take, the settings of generation
    by a typed dictionary."""
    for function in (saccade.run, saccade.stream, saccade.generate):
        names = set(inspect.signature(function).parameters)
        own = {"draft", "draft_inputs", "method", "tokenizer", "seed", "captioner", "exact"}
        assert own <= names
        assert CallArguments.__annotations__.keys() - Settings.__annotations__.keys() <= names
    assert {"max_new_tokens", "do_sample", "temperature", "stop_strings"} <= set(
        get_type_hints(GenerateArguments)
    )


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"assistant_model": 1}, "did you mean draft"), ({"max_new_token": 1}, "max_new_tokens")],
)
def test_other_names_are_answered_with_ours(
    model: saccade.Model, clips: list[Path], given: dict[str, int], meant: str
) -> None:
    """Claim: what others call it is refused with what it is called here."""
    with pytest.raises(saccade.OptionError, match=meant):
        model.describe(clips[0], **given)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"media": 5}, "a path, bytes or an open file, not int"),
        ({"media": [None]}, "a path, bytes or an open file, not NoneType"),
        ({"media": object()}, "a path, bytes or an open file, not object"),
        ({"media": ""}, "a file without a name does not exist"),
        ({"media": io.StringIO("text")}, "open it with 'rb'"),
        ({"question": 5}, "a question is text, not int"),
        ({"question": None}, "a question is text, not NoneType"),
        ({"documents": "one text"}, "documents are a list of texts"),
        ({"documents": [5]}, "documents are a list of texts"),
        ({"frames": 5}, "frames= are by name"),
        ({"frames": {"nframes": 4}}, "no 'nframes' .did you mean num_frames.?"),
        ({"frames": {"every": "no"}}, "every must be True or False"),
        ({"method": "sd"}, "method= belongs where the models are loaded: saccade.load"),
        ({"media": "What happens?", "question": "clip.mp4"}, "media come first, then the question"),
    ],
)
def test_a_question_that_is_none_is_refused(
    model: saccade.Model, clips: list[Path], arguments: dict[str, Any], says: str
) -> None:
    """Claim: media, words and frames of another kind end in a sentence; a text in the place of a
    list of documents is not taken letter by letter, nor a nameless file for the current folder."""
    with pytest.raises((OptionError, VideoInputError), match=says):
        model.describe(**{"media": clips[0], "max_new_tokens": 2, **arguments})


@pytest.mark.parametrize("questions", [5, "ab", [5], [("clip.mp4", "What?", "Why?")], {"a": 1}])
def test_a_batch_is_of_pairs(model: saccade.Model, questions: Any) -> None:
    """Claim: what are no pairs of media and words is told as such, before a file is looked for."""
    with pytest.raises(OptionError, match="questions are pairs"):
        model.batch(questions)


def test_frames_of_another_range_are_refused(clips: list[Path]) -> None:
    """Claim: a clip of anything but bytes, or without its times, is none: processors would scale
    its pixels by what bytes are scaled by, and the answer be about a black video."""
    clip = media.read(clips[0])
    for change in (
        {"frames": clip.frames / 255},
        {"frames": clip.frames[..., 0]},
        {"frames": clip.frames[:0]},
        {"frames": list(clip.frames)},
        {"timestamps": clip.timestamps[:1]},
        {"timestamps": clip.timestamps * np.nan},
        {"sampled_fps": 0.0},
    ):
        with pytest.raises(VideoInputError, match="a clip"):
            replace(clip, **change)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"target": b"shapes"}, "a model is a checkpoint folder or a hub id, not b'shapes'"),
        ({"target": ["shapes"]}, "a model is a checkpoint folder or a hub id"),
        ({"target": ""}, "a model is a checkpoint folder or a hub id, not ''"),
        ({"positions": "learnt"}, "unknown positions 'learnt'; known: auto, library, trained"),
        ({"device": "meta"}, "device 'meta' is not available"),
        ({"threads": 0}, "threads 0 is too few"),
        ({"threads": "2"}, "threads='2' is not a whole number"),
        ({"threads": 10**6}, "threads 1000000 is more than this machine bears"),
        ({"assistant_model": "x"}, "load does not take assistant_model: its name here is draft="),
        ({"treads": 2}, "load does not take treads .did you mean threads.?"),
    ],
)
def test_what_cannot_be_loaded_is_refused(arguments: dict[str, Any], says: str) -> None:
    """Claim: so do names, devices and numbers of threads that are none."""
    with pytest.raises((ModelError, OptionError), match=says):
        saccade.load(**arguments)
