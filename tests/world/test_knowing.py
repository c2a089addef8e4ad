"""What is of the drawn world and what is not, by its frames alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from saccade.inputs import checkpoints, media
from saccade.world import drawing, drawn_world, scenes


@pytest.mark.parametrize("size", [56, 112, 224, (120, 200)])
def test_every_drawn_clip_is_of_the_world(size: int | tuple[int, int]) -> None:
    """Claim: scenes of every texture, of any size and any number of frames, are recognised.

    150 scenes: were one in 50 refused, this would pass one time in 20."""
    sides = (size, size) if isinstance(size, int) else size
    for seed in range(20_000_000, 20_000_150):
        assert drawn_world.is_drawn_world(drawing.render(scenes.scene(seed), 3, *sides)), seed


def test_a_clip_that_was_compressed_still_is(tmp_path: Path) -> None:
    """Claim: what was written as H.264 and read again is recognised, one picture too."""
    for seed in range(20_000_001, 20_000_007):
        path = tmp_path / f"{seed}.mp4"
        drawing.write_clip(scenes.scene(seed), path, 16, 112)
        clip = media.read(path)
        assert drawn_world.is_drawn_world(clip.frames)
        assert drawn_world.is_drawn_world(clip.frames[:1])
        assert drawn_world.warn_if_foreign(clip, "shapes") is clip


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
def test_nothing_else_is(kind: str) -> None:
    """Claim: none of these is taken for the drawn world, so that it is said of each."""
    frames = others()[kind]
    assert not drawn_world.is_drawn_world(frames)
    times = np.arange(4.0)
    clip = media.Clip(frames, times, 4.0, 1.0, 4, 1.0)
    assert drawn_world.FOREIGN_CLIP_WARNING in drawn_world.warn_if_foreign(clip, "shapes").warnings
    assert drawn_world.warn_if_foreign(clip, "some/model") is clip


def test_the_pair_is_known_by_name_and_folder() -> None:
    """Claim: the embedded models are known by both; no other is."""
    assert checkpoints.embedded("shapes") and checkpoints.embedded("shapes-draft")
    assert checkpoints.embedded(str(checkpoints.EMBEDDED / "target"))
    assert not checkpoints.embedded("Qwen/Qwen2.5-VL-7B-Instruct")
