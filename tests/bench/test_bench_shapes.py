"""Claims about the suites of the synthetic world: the same items each time, of the stated size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from written_out import Embedded

import saccade
from saccade.bench.suites.benchmarks import SECOND_TURNS
from saccade.bench.suites.types import Item, Suite
from saccade.inputs import ask
from saccade.inputs.media import Clip
from saccade.world import descriptions, dialogues, drawing, scenes, suites

SUITES = suites.suites()
STATED = {"": 256, "-2k": 2048, "-8k": 8192, "-10k": 10240}


def items(name: str) -> list[Item]:
    return list(SUITES[name].items())


def plain(item: Item) -> dict[str, Any]:
    """An item without its media, which are functions."""
    fields = {
        name: getattr(item, name) for name in vars(item) if name not in ("media", "next_item")
    }
    after = item.next_item and plain(item.next_item)
    return {**fields, "media": [(each.kind, each.name) for each in item.media], "next_item": after}


def test_there_are_six_tasks_at_up_to_three_lengths() -> None:
    """Claim: six tasks, videos at 256, 2k and 8k, the pair of pictures at 256 and 2k, captions at
    10k too, and four second turns over a picture, 50 each."""
    videos = [f"shapes-{task}" for task in ("caption", "events", "qa", "chat", "ood")]
    expected = {f"{task}{length}" for task in videos for length in ("", "-2k", "-8k")}
    expected |= {f"shapes-second-{turn}" for turn in ("qa", "captioning", "summary", "story")}
    assert set(SUITES) == expected | {"shapes-diff", "shapes-diff-2k", "shapes-caption-10k"}
    for name, suite in SUITES.items():
        assert isinstance(suite, Suite) and suite.name == name
        assert len(items(name)) == suite.setting.samples == 50


def test_the_same_items_each_time() -> None:
    """Claim: items are the same in every listing, pixels included.

    Fails if anything is drawn from a stream that goes on. Control: items of one suite differ.
    """
    again = suites.suites()
    for name in (*suites.TASKS, *suites.SECOND_TURN_TASKS):  # other lengths are of the same makers
        listed = items(name)
        assert [plain(item) for item in listed] == [plain(item) for item in again[name].items()]
        assert len({item.answers + item.later_questions for item in listed}) > 10
    one, same, other = (
        items("shapes-qa")[3],
        list(again["shapes-qa"].items())[3],
        items("shapes-qa")[4],
    )
    frames = [item.media[0].read().frames for item in (one, same, other)]  # type: ignore[union-attr]
    assert np.array_equal(frames[0], frames[1]) and not np.array_equal(frames[0], frames[2])


SIZES = [name for name in SUITES if not name.endswith("-8k")]  # captions at 10k among them
SIZES += ["shapes-caption-8k", "shapes-ood-8k"]  # the others are drawn like the first


@pytest.mark.representatives(2)
@pytest.mark.parametrize("name", SIZES)
def test_visual_tokens(name: str, embedded: Embedded) -> None:
    """Claim: an item has the number of visual tokens its suite's name states.

    Fails if the embedded processor resizes, resamples or tops frames up.
    """
    item = items(name)[1]
    media = [medium.read() for medium in item.media]
    clips = [each for each in media if isinstance(each, Clip)]
    images = [each for each in media if not isinstance(each, Clip)]
    pictures = 2 if "diff" in name else 1 if "second" in name else 0
    assert (len(clips), len(images)) == ((0, pictures) if pictures else (1, 0))
    inputs = ask(embedded.target, item.question, clips=clips, images=images)
    length = name[name.rindex("-") :] if name.endswith("k") else ""
    places = embedded.target.backbone.placeholders
    seen = sum(int(number) in places for number in inputs["input_ids"][0])
    assert seen == STATED[length]
    for clip in clips:
        assert clip.fps == 8 and clip.timestamps[-1] == (len(clip.frames) - 1) / 8


def test_answers_are_the_worlds() -> None:
    """Claim: what counts as right is what the world's own text says of the scene.

    Fails if questions and answers are of different scenes or turns.
    """
    known = {question for prompts in descriptions.WORDS["prompts"].values() for question in prompts}
    listed = {name: items(name) for name in suites.TASKS}
    for number in range(50):
        seed = suites.FIRST_SEED + number
        scene = scenes.scene(seed)
        cases = {name.removeprefix("shapes-"): own[number] for name, own in listed.items()}
        assert cases["caption"].answers == cases["ood"].answers == (descriptions.describe(scene),)
        assert cases["events"].answers == (descriptions.events(scene),)
        assert cases["caption"].question in descriptions.WORDS["prompts"]["describe"]
        assert cases["events"].question in descriptions.WORDS["prompts"]["events"]
        assert cases["ood"].question not in known
        assert cases["diff"].answers == (descriptions.describe_diff(scene, seed),)
        qa, chat = cases["qa"], cases["chat"]
        replies = {turn.question: turn.answer for turn in dialogues.conversation(scene, "qa", seed)}
        assert qa.answers == (replies[qa.question],) and qa.later_questions == ()
        turns = dialogues.conversation(scene, "chat", seed)
        assert chat.answers == (turns[0].answer,) and chat.question == turns[0].question
        assert chat.later_questions == (turns[1].question,)


def test_second_turns_are_the_published_ones() -> None:
    """Claim: after a description of a picture the second turn asks for a caption, a summary or a
    story in the words of TABED's code, and for qa it is the next item, picture and all; the last
    one's is the first."""
    listed = {name: items(f"shapes-second-{name}") for name in SECOND_TURNS}
    assert {name for name, question in SECOND_TURNS.items() if question is None} == {"qa"}
    for name, question in SECOND_TURNS.items():
        for item, after in zip(listed[name], [*listed[name][1:], listed[name][0]], strict=True):
            scene = scenes.scene(item.meta["seed"])
            assert item.answers == (descriptions.describe_image(scene),)
            if question is not None:
                assert item.questions == (item.question, question) and item.next_item is None
                continue
            assert item.next_item is not None and item.later_questions == ()
            assert plain(item.next_item) == {**plain(after), "next_item": None}
            assert item.questions == (item.question, after.question)
    picture = listed["qa"][0].media[0].read()
    scene = scenes.scene(suites.FIRST_SEED)
    assert np.array_equal(picture, drawing.image_frame(scene, 448, 448))  # type: ignore[arg-type]


def test_pixels_are_of_the_scene() -> None:
    """Claim: what is shown is the scene that the answer is about, in its suite's size.

    Fails if media and answer come from different seeds, or the pair is twice one picture.
    """
    scene = scenes.scene(suites.FIRST_SEED + 2)
    (video,) = items("shapes-caption")[2].media
    clip = video.read()
    assert isinstance(clip, Clip) and video.name == f"scene-{scene.seed}"
    assert np.array_equal(clip.frames, drawing.render(scene, 8, 224, 224))
    (wide,) = (medium.read() for medium in items("shapes-ood")[2].media)
    assert isinstance(wide, Clip) and wide.frames.shape[:3] == (8, 112, 448)
    before, after = (medium.read() for medium in items("shapes-diff")[2].media)
    edited = scenes.edit(scene, scene.seed)
    assert np.array_equal(before, drawing.image_frame(scene, 224, 448))  # type: ignore[arg-type]
    assert np.array_equal(after, drawing.image_frame(edited, 224, 448))  # type: ignore[arg-type]
    assert not np.array_equal(before, after)  # type: ignore[arg-type]


def test_ids_are_unique() -> None:
    """Claim: no two items of any suites share an id.

    Fails if lengths or tasks share ids: resuming goes by them.
    """
    ids = [item.id for name in SUITES for item in items(name)]
    assert len(ids) == len(set(ids)) == 50 * len(SUITES)


def test_nothing_is_drawn_until_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: listing every item of every suite renders nothing; reading one medium does.

    Fails if a suite draws its clips ahead.
    """

    def drawn(*given: Any) -> None:
        raise InterruptedError("drawn")

    monkeypatch.setattr(drawing, "render", drawn)
    monkeypatch.setattr(drawing, "image_frame", drawn)
    for name in SUITES:
        first = items(name)[0]
        with pytest.raises(InterruptedError):
            first.media[0].read()


@pytest.mark.extra
def test_seeds_are_nobody_elses() -> None:
    """Claim: no other seed of the package lies within ten million of the suites'.

    Fails if a suite shows what training, `lab eval`, calibration or the demo has shown.
    Control: the known constants are found.
    """
    own = range(suites.FIRST_SEED, suites.FIRST_SEED + suites.SAMPLES)
    assert {item.meta["seed"] for name in SUITES for item in items(name)} == set(own)
    root = Path(saccade.__file__).parent
    seeds: dict[str, int] = {}
    training = Path(__file__).parents[2] / "lab"
    for path in [*root.rglob("*.py"), *training.rglob("*.py")]:
        if path == root / "world" / "suites.py":
            continue
        for name, number in re.findall(r"\b(\w*SEED)\b[^=\n]*= ([\d_]+)", path.read_text()):
            seeds[f"{path.stem}.{name}"] = int(number)
        for number in re.findall(r"\b[1-9]\d{0,2}_\d{3}_\d{3}\b", path.read_text()):
            seeds[f"{path.stem}.{number}"] = int(number)
    known = {"samples.FIRST_EVAL_SEED", "agreement.FIRST_SEED", "demo_clips.CALIBRATION_SEED"}
    assert known <= set(seeds) and seeds["samples.FIRST_EVAL_SEED"] == 10_000_000
    assert 20_000_002 in seeds.values()  # the demo's
    near = {n: v for n, v in seeds.items() if abs(v - suites.FIRST_SEED) < 10_000_000}
    assert not near
    # training draws below FIRST_EVAL_SEED, evaluation a million above it
    assert seeds["samples.FIRST_EVAL_SEED"] + 2_000_000 < suites.FIRST_SEED
