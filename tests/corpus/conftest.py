"""Videos small enough to caption many of them, one that is broken, and the work they are for."""

from __future__ import annotations

from pathlib import Path

import pytest

from saccade.corpus import manifest
from saccade.inputs.media import FrameSampling

COUNT, TOKENS = 6, 8


@pytest.fixture(scope="session")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of clips of different length, and ``bad.mp4``."""
    from saccade.world import drawing, scenes

    folder = tmp_path_factory.mktemp("videos")
    for number in range(COUNT - 1):
        path = folder / f"clip{number}.mp4"
        drawing.write_clip(scenes.scene(20_000_100 + number), path, 8 + 4 * (number % 3), 56)
    (folder / "bad.mp4").write_bytes(b"no video at all")
    return folder


@pytest.fixture
def work() -> manifest.CaptionSettings:
    return manifest.CaptionSettings(
        method="specvlm/shape=chain-3",
        max_new_tokens=TOKENS,
        sampling=FrameSampling(num_frames=4),
        load=(("device", "cpu"),),
    )


@pytest.fixture
def jobs(videos: Path) -> list[manifest.Job]:
    return manifest.read_jobs(videos, "Describe the video in detail.")
