"""Claims about five-panel stories: each suite is what it says it is."""

from __future__ import annotations

from itertools import islice, pairwise

import numpy as np
import pytest

from lab import stories
from saccade.bench.suites.types import IMAGE_MARK, Suite
from saccade.world import scenes
from saccade.world.scenes import Scene
from saccade.world.suites import FIRST_SEED, SAMPLES

SEEDS = range(stories.FIRST_SEED, stories.FIRST_SEED + 8)
STORIES = {seed: stories.panels(seed) for seed in SEEDS}


def looks(scene: Scene) -> set[tuple[str, ...]]:
    """What a still picture shows: each thing by its size, colour, shape and place."""
    states = scenes.visible_states(scene, 0.5)
    return {
        (
            scene.objects[state.index].size,
            state.color,
            scene.objects[state.index].shape,
            scenes.cell_name(state.cell),
        )
        for state in states
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_a_story_goes_on_from_panel_to_panel(seed):
    """Claim: of five panels no two show the same, and each changes one or two things of the one
    before it. Fails if panels are unrelated pictures, or repeat one."""
    story = STORIES[seed]
    assert len(story) == 5
    assert len({frozenset(looks(scene)) for scene in story}) == 5
    for before, after in pairwise(story):
        assert 1 <= max(len(looks(before) - looks(after)), len(looks(after) - looks(before))) <= 2


def test_control_unrelated_pictures_are_no_story():
    """Control: two scenes of different seeds differ in more than two things, for some seeds."""
    pictures = [looks(scenes.scene(seed)) for seed in SEEDS]
    assert any(len(one - other) > 2 for one, other in pairwise(pictures))


@pytest.mark.parametrize("suite", stories.SUITES, ids=lambda suite: suite.name)
def test_an_item_has_five_pictures_and_asks_for_the_last(suite):
    """Claim: five pictures stand where the question has its five marks, no caption in the question
    is the answer, and the answer is the last panel's. Fails if the text gives the answer away."""
    assert isinstance(suite, Suite)
    for item, story in zip(islice(suite.items(), len(SEEDS)), STORIES.values(), strict=True):
        assert [medium.kind for medium in item.media] == ["image"] * 5
        assert item.question.count(IMAGE_MARK) == 5
        assert item.answers == (stories.captions(story)[-1],)
        assert item.answers[0] not in item.question
    pictures = [medium.read() for medium in item.media]
    assert {picture.shape for picture in pictures} == {(stories.SIDE, stories.SIDE, 3)}
    assert all(not np.array_equal(*pair) for pair in pairwise(pictures))


def test_captions_stand_after_their_pictures():
    """Claim: only the suite of captions has them: the first four in order, each after its mark."""
    whole, captioned = (next(iter(suite.items())).question for suite in stories.SUITES)
    own = stories.captions(STORIES[stories.FIRST_SEED])
    assert not any(caption in whole for caption in own)
    after_marks = captioned.split(IMAGE_MARK)[1:]
    assert all(caption in text for caption, text in zip(own[:-1], after_marks, strict=False))
    assert after_marks[-1].strip() == "Caption #5:"


def test_stories_share_no_scene_with_other_suites():
    """Claim: stories begin beyond every scene that a suite of clips has."""
    assert stories.FIRST_SEED >= FIRST_SEED + SAMPLES
