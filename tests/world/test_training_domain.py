"""What is of the drawn world and what is not, by its frames alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from saccade.core.errors import ModelError
from saccade.inputs import checkpoints, media
from saccade.inputs.training_domain import (
    DOMAIN_FILE,
    TrainingDomain,
    read_training_domain,
    warn_outside_domain,
)
from saccade.world import drawing, scenes


@pytest.fixture(scope="module")
def domain() -> TrainingDomain:
    """What the embedded pair's own file says."""
    read = read_training_domain("shapes")
    assert read is not None
    return read


@pytest.mark.representatives(2)
@pytest.mark.parametrize("size", [56, 112, 224, (120, 200)])
def test_every_drawn_clip_is_of_the_world(
    domain: TrainingDomain, size: int | tuple[int, int]
) -> None:
    """Claim: scenes of every texture, of any size and any number of frames, are recognised.

    150 scenes: were one in 50 refused, this would pass one time in 20."""
    sides = (size, size) if isinstance(size, int) else size
    for seed in range(20_000_000, 20_000_150):
        assert domain.includes(drawing.render(scenes.scene(seed), 3, *sides)), seed


def test_a_compressed_clip_is_still_recognised(domain: TrainingDomain, tmp_path: Path) -> None:
    """Claim: what was written as H.264 and read again is recognised, one picture too."""
    for seed in range(20_000_001, 20_000_007):
        path = tmp_path / f"{seed}.mp4"
        drawing.write_clip(scenes.scene(seed), path, 16, 112)
        clip = media.read(path)
        assert domain.includes(clip.frames)
        assert domain.includes(clip.frames[:1])
        assert warn_outside_domain(clip, domain) is clip


def others() -> dict[str, np.ndarray]:
    """Frames of other kinds: noise, flat ones, gradients, and such as cameras see."""
    random = np.random.default_rng(0)
    rows = np.linspace(0, 255, 112, dtype=np.uint8)
    smooth = random.normal(size=(4, 14, 14, 3)).repeat(8, 1).repeat(8, 2)
    for _ in range(8):  # blurred, as a photograph is smooth
        smooth = (smooth + np.roll(smooth, 3, 1) + np.roll(smooth, 3, 2)) / 3
    photo = (122 + smooth / smooth.std() * 45).clip(0, 255).astype(np.uint8)
    grey = photo[..., :1].repeat(3, axis=-1)
    return {
        "noise": random.integers(0, 256, (4, 112, 112, 3), dtype=np.uint8),
        "dim noise": random.integers(90, 150, (4, 112, 112, 3), dtype=np.uint8),
        "black": np.zeros((4, 112, 112, 3), np.uint8),
        "white": np.full((4, 112, 112, 3), 255, np.uint8),
        "gradient": np.broadcast_to(rows[None, :, None, None], (4, 112, 112, 3)),
        "photograph": photo,
        "grey photograph": grey,
        "sky above earth": np.concatenate(
            [np.full((4, 60, 112, 3), (120, 160, 220)), np.full((4, 52, 112, 3), (90, 110, 60))], 1
        ).astype(np.uint8),
        "mid-grey": np.full((4, 112, 112, 3), 122, np.uint8),
    }


@pytest.mark.parametrize("kind", others())
def test_other_frames_are_not_taken_for_the_drawn_world(domain: TrainingDomain, kind: str) -> None:
    """Claim: none of these is taken for the drawn world, so that it is said of each."""
    frames = others()[kind]
    assert not domain.includes(frames)
    times = np.arange(4.0)
    clip = media.Clip(frames, times, 4.0, 1.0, 4, 1.0)
    assert domain.warning in warn_outside_domain(clip, domain).warnings
    assert warn_outside_domain(clip, read_training_domain("some/model")) is clip


def test_the_pair_is_known_by_name_and_folder() -> None:
    """Claim: the embedded models are known by both; no other is."""
    assert checkpoints.is_embedded("shapes") and checkpoints.is_embedded("shapes-draft")
    assert checkpoints.is_embedded(str(checkpoints.EMBEDDED / "target"))
    assert checkpoints.is_embedded(os.path.relpath(checkpoints.EMBEDDED / "draft"))
    assert not checkpoints.is_embedded("Qwen/Qwen2.5-VL-7B-Instruct")


def test_any_checkpoint_may_say_what_it_was_trained_on(pair: Path, tmp_path: Path) -> None:
    """Claim: the file of a folder is what is read, for each of the pair and for a copy elsewhere
    with a sentence of its own; a folder without one says nothing. Fails where a name decides."""
    for name in ("target", "draft", "draft-naive"):
        assert read_training_domain(str(pair / name)) == read_training_domain("shapes")
    assert read_training_domain(str(tmp_path)) is None
    own = json.loads((pair / "target" / DOMAIN_FILE).read_text()) | {"warning": "only charts"}
    (tmp_path / DOMAIN_FILE).write_text(json.dumps(own))
    read = read_training_domain(str(tmp_path))
    assert read is not None and read.warning == "only charts"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"texture": 3}', '{"texture": [0, "x"]}'])
def test_a_broken_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    """Claim: a file that is not what it should be is one sentence that names it and its fields."""
    (tmp_path / DOMAIN_FILE).write_text(text)
    with pytest.raises(ModelError, match=f"{DOMAIN_FILE}.*warning, grey"):
        read_training_domain(str(tmp_path))
