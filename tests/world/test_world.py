"""Claims about the shapes world: seeded pixels, true answers, real videos."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
from reels import nearest

from saccade.world import descriptions, dialogues, drawing
from saccade.world import scenes as world
from saccade.world.scenes import Scene

SCENES = [world.scene(seed) for seed in range(300)]
NUMBERS = {word: n for n, word in enumerate(descriptions.NUMBERS)} | {"none": 0}


def test_same_seed_same_pixels_and_words():
    """Claim: all is a function of the seed. Fails if a cache is mutated or state leaks."""
    for seed in range(20):
        first, second = world.scene(seed), world.scene(seed)
        assert first == second
        pixels = drawing.render(first, 6, 84, 112)
        drawing.render(world.scene(seed + 1), 6, 84, 112)
        assert np.array_equal(pixels, drawing.render(second, 6, 84, 112))
        for task in dialogues.TASKS:
            assert dialogues.conversation(first, task, 3) == dialogues.conversation(second, task, 3)
    scenes = {replace(s, seed=0) for s in SCENES}
    assert len(scenes) > 290
    assert len({descriptions.describe(s) for s in SCENES}) > 290
    assert len({drawing.render(s, 4, 56).tobytes() for s in SCENES[:50]}) == 50
    prompts = {dialogues.conversation(SCENES[0], "qa", seed) for seed in range(10)}
    assert len(prompts) == 10


def test_scenes_obey_their_rules():
    """Claim: looks are distinct, paths share no cell, events have their own times and objects."""
    for scene in SCENES:
        assert 1 <= len(scene.objects) <= 6 and len(scene.events) <= 3
        assert list(scene.objects) == sorted(scene.objects, key=lambda o: o.start)
        looks = [(o.color, o.shape) for o in scene.objects]
        looks += [(e.color, scene.objects[e.index].shape) for e in scene.events if e.color]
        assert len(set(looks)) == len(looks)
        cells = [c for o in scene.objects for c in _path(o)]
        assert len(set(cells)) == len(cells)
        assert len({e.index for e in scene.events}) == len(scene.events)
        quarters = [e.time_index for e in scene.events]
        assert quarters == sorted(set(quarters))
        for event in scene.events:
            thing = scene.objects[event.index]
            assert event.kind == "recolour" or thing.start == thing.end
    assert all(len(world.scene(s, max_objects=2).objects) <= 2 for s in range(50))
    counts = np.bincount([len(s.objects) for s in SCENES], minlength=7)[1:] / len(SCENES)
    assert abs(counts - np.array(world.COUNT_WEIGHTS)).max() < 0.08


def _path(thing: world.Object) -> list[tuple[int, int]]:
    (r0, c0), (r1, c1) = thing.start, thing.end
    rows = range(min(r0, r1), max(r0, r1) + 1)
    return [(r, c) for r in rows for c in range(min(c0, c1), max(c0, c1) + 1)]


@pytest.mark.parametrize(("frames", "height", "width"), [(1, 56, 56), (3, 57, 91), (9, 200, 70)])
def test_any_size_renders(frames: int, height: int, width: int):
    """Claim: every T x H x W >= 56 renders, objects at the borders included."""
    for scene in SCENES[:30]:
        clip = drawing.render(scene, frames, height, width)
        assert clip.shape == (frames, height, width, 3) and clip.dtype == np.uint8
    with pytest.raises(ValueError, match="56"):
        drawing.render(SCENES[0], 2, 55)


def test_tint_tells_place_and_time():
    """Claim: red grows with x, green with y, blue with time, whatever the texture."""
    for texture in world.TEXTURES:
        empty = Scene(0, (), (), texture, world.TEXTURES.index(texture))
        clip = drawing.render(empty, 8, 112).astype(float)
        cells = clip.reshape(8, 4, 28, 4, 28, 3).mean(axis=(2, 4))
        assert (np.diff(cells[..., 0], axis=2) > 5).all()
        assert (np.diff(cells[..., 1], axis=1) > 5).all()
        assert (np.diff(cells[..., 2], axis=0) > 5).all()


def _sizes() -> str:
    return "small|large|little|big"


# An independent reading of the four voices: what is named in a sentence, as words.
_OBJECT = re.compile(
    rf"(?:{_sizes()})? ?({'|'.join(world.COLORS)}) ({'|'.join(world.SHAPES)})"
    rf"(?: in the ({'|'.join(world.CELLS)}))?"
)


def test_descriptions_are_true():
    """Claim: counts, colours, shapes and places of a description are those of the scene."""
    for scene in SCENES:
        description = descriptions.describe(scene)
        sentences = re.split(r"(?<=\.) ", description)
        assert scene.texture in sentences[0]
        number = next(w for w in re.findall(r"\w+", sentences[0].lower()) if w in NUMBERS)
        assert NUMBERS[number] == len(scene.objects)
        appear = [e.index for e in scene.events if e.kind == "appear"]
        body = sentences[2 if appear else 1 :]
        for index, (thing, sentence) in enumerate(zip(scene.objects, body, strict=False)):
            assert f"{thing.color} {thing.shape}" in sentence
            assert world.cell_name(thing.start) in sentence.lower()
            assert ("small" in sentence or "little" in sentence) == (thing.size == "small")
            late = ("later", "will be", "at first")
            assert any(w in sentence for w in late) == (index in appear)
            if thing.start != thing.end:
                assert f"{thing.motion} to the {world.cell_name(thing.end)}" in sentence
        recap = next(s for s in body if re.match("At the end|In the end|The last pic|When it", s))
        named = [m.groups() for m in _OBJECT.finditer(recap)]
        truth = []
        for index, thing in enumerate(scene.objects):
            color: str | None = thing.color
            for event in scene.events:
                if event.index == index and event.kind != "appear":
                    color = event.color
            if color is not None:
                truth.append((color, thing.shape, world.cell_name(thing.end)))
        assert named == sorted(truth, key=lambda t: world.CELLS.index(t[2])) or (
            recap.startswith("The last") and len(truth) == 0
        )
        if len(scene.objects) > 1:
            moves = next(s for s in body if s.startswith("In all"))
            counts = [NUMBERS[w] for w in re.findall(r"\w+", moves) if w in NUMBERS]
            moving = sum(o.start != o.end for o in scene.objects)
            assert counts == [moving, len(scene.objects) - moving]


def test_events_come_in_order():
    """Claim: an event list names each event once, in order of time, with its new colour."""
    for scene in SCENES:
        sentences = re.split(r"(?<=\.) ", descriptions.events(scene))
        for event, sentence in zip(scene.events, sentences, strict=False):
            thing = scene.objects[event.index]
            assert sentence.lower().startswith(
                descriptions.VOICES[scene.voice].when[event.time_index]
            )
            assert f"{thing.color} {thing.shape}" in sentence
            assert event.color is None or sentence.endswith(f" {event.color}.")
        assert len(sentences) == max(1, len(scene.events)) + 1


def test_answers_are_true():
    """Claim: short answers about colours, counts, places and existence hold in the scene."""
    checked = {kind: 0 for kind in ("colour", "count", "place", "exists", "kind")}
    for scene in SCENES:
        here = [
            o
            for i, o in enumerate(scene.objects)
            if not any(e.index == i and e.kind == "appear" for e in scene.events)
        ]
        for turn in dialogues.conversation(scene, "qa", 1):
            query, answer = turn.question, turn.answer
            cell = re.search(r"in the ([a-z ]+?)(?: at the start)?[?.,]", query)
            if "colour" in query and cell and "end" not in query:
                thing = next(o for o in here if world.cell_name(o.start) == cell[1])
                assert answer == f"It is {thing.color}."
                checked["colour"] += 1
            elif count := re.search(r"(\w+) shapes.* at the start", query):
                number = sum(o.color == count[1] for o in here)
                assert NUMBERS[answer.split()[0].lower()] == number
                checked["count"] += 1
            elif where := re.match(r"Where (?:is|does) the (\w+) (\w+) .*start", query):
                thing = next(o for o in here if (o.color, o.shape) == where.groups())
                assert answer == f"In the {world.cell_name(thing.start)}."
                checked["place"] += 1
            elif there := re.search(r"a (\w+) (\w+) at the start\?", query):
                yes = any((o.color, o.shape) == there.groups() for o in here)
                assert answer.startswith("Yes" if yes else "No")
                checked["exists"] += 1
            elif query.endswith(("vanish?", "vanish.")) and query.startswith(("Which", "Name")):
                gone = [scene.objects[e.index] for e in scene.events if e.kind == "vanish"]
                assert all(f"{o.color} {o.shape}" in answer for o in gone)
                assert len(_OBJECT.findall(answer)) == len(gone)
                checked["kind"] += 1
    assert min(checked.values()) >= 10, checked


def test_prompts_fix_the_kind_of_answer():
    """Claim: of one scene, the same question never has two answers, in any draw."""
    for scene in SCENES[:40]:
        known: dict[str, str] = {}
        for seed in range(20):
            for turn in dialogues.conversation(scene, "qa", seed):
                assert known.setdefault(turn.question, turn.answer) == turn.answer


def test_an_edited_clip_differs_as_described():
    """Claim: the two pictures differ in one or two objects, and the answer names those."""
    for scene in SCENES[:200]:
        other, changes = world.edit_with_changes(scene, 5)
        assert other == world.edit(scene, 5)
        assert 1 <= len(changes) <= 2

        def looks(s: Scene) -> set[tuple[str, str, str, str]]:
            at = [(s.objects[x.index], x) for x in world.visible_states(s, 0.5)]
            return {(o.size, x.color, o.shape, world.cell_name(x.cell)) for o, x in at}

        before, after = looks(scene), looks(other)
        assert {c.look for c in changes if c.kind != "new"} == before - after
        assert len(after - before) == sum(c.kind != "gone" for c in changes)
        assert {c.look for c in changes if c.kind == "new"} <= after - before
        answer = dialogues.conversation(scene, "diff", 5)[0].answer
        for change in changes:
            assert f"{change.look[1]} {change.look[2]} in the {change.look[3]}" in answer
        assert (drawing.render(scene, 1, 56) != drawing.render(other, 1, 56)).any()


def test_lengths():
    """Claim: descriptions have 55 to 300 words and marks, lists and pictures no more than 120."""
    for scene in SCENES:
        for task, low, high in (("describe", 55, 300), ("image", 8, 120), ("events", 8, 120)):
            answer = dialogues.conversation(scene, task, 0)[0].answer
            assert low <= len(re.findall(r"\w+|[^\w\s]", answer)) <= high
        assert 3 <= len(dialogues.conversation(scene, "qa", 0)) <= 6
        assert 2 <= len(dialogues.conversation(scene, "chat", 0)) <= 4
    with pytest.raises(ValueError, match="no such task"):
        dialogues.conversation(SCENES[0], "song", 0)


def test_vocabulary_is_small_and_plain():
    """Claim: under 350 words in all, so that a 1,024-entry BPE holds nearly every one."""
    words = set()
    for scene in SCENES:
        for task in dialogues.TASKS:
            for turn in dialogues.conversation(scene, task, scene.seed):
                words |= set(re.findall(r"\w+", f"{turn.question} {turn.answer}"))
                assert turn.answer.isascii() and "  " not in turn.answer
                assert turn.answer[0].isupper() and turn.answer[-1] == "."
    assert len(words) < 350


def test_written_clip_decodes(tmp_path: Path):
    """Claim: an MP4 has the frames, size and rate asked for, and objects keep their colours."""
    still = [s for s in SCENES if all(o.size == "large" for o in s.objects) and not s.events]
    checked = 0
    for scene in still[:4]:
        path = tmp_path / f"{scene.seed}.mp4"
        drawing.write_clip(scene, path, 24, 112, 168, fps=12.0)
        with av.open(str(path)) as container:
            stream = container.streams.video[0]
            assert stream.codec_context.name == "h264"
            assert stream.average_rate == 12
            assert float(stream.duration * stream.time_base) == pytest.approx(2.0, abs=0.01)
            frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
        clip = np.stack(frames)
        assert clip.shape == (24, 112, 168, 3)
        raw = drawing.render(scene, 24, 112, 168)
        assert abs(clip.astype(float) - raw).mean() < 6
        for state in world.visible_states(scene, 0.5 + 0.5 / 24):
            if scene.objects[state.index].shape not in ("circle", "triangle", "cross"):
                continue
            y, x = int(state.y * 112 / 3), int(state.x * 168 / 3)
            middle = clip[12, y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3)
            assert world.COLORS[nearest(middle)] == state.color
            checked += 1
    assert checked >= 2
    with pytest.raises(ValueError, match="even"):
        drawing.write_clip(still[0], tmp_path / "odd.mp4", 2, 57)


def test_a_clips_file_is_the_same_whenever_it_is_written(tmp_path):
    """Claim: one scene is one file, byte for byte, wherever its pictures lie in memory. Fails with
    the encoder's own choice of instructions, which goes by how they are aligned."""
    files = set()
    for _ in range(4):
        drawing.write_clip(world.scene(20_000_002), tmp_path / "clip.mp4", 32, 224)
        files.add((tmp_path / "clip.mp4").read_bytes())
    assert len(files) == 1


def test_truth_is_json():
    """Claim: the facts of a clip survive JSON, and times are seconds within the clip."""
    for scene in SCENES[:30]:
        facts = world.scene_facts(scene, 16, 112, fps=8.0)
        assert json.loads(json.dumps(facts)) == facts
        assert facts["seconds"] == 2.0
        assert all(0 < e["seconds"] < 2 for e in facts["events"])
