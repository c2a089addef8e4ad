"""One tiny clip and two pictures for all layouts; each test unpacks into a folder of its own."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from handmade_layouts import Art
from PIL import Image


def picture(kind: str, height: int, width: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(buffer, kind)
    return buffer.getvalue()


@pytest.fixture(scope="session")
def art(tmp_path_factory: pytest.TempPathFactory) -> Art:
    """A clip of 3 seconds, 12 frames of 32 by 48, and pictures of 24 by 36."""
    path = tmp_path_factory.mktemp("art") / "clip.mp4"
    _clip(path)
    return Art(path.read_bytes(), picture("PNG", 24, 36), picture("JPEG", 24, 36))


def _clip(path: Path) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.options = {"preset": "ultrafast", "threads": "1"}
        for number in range(12):
            frame = np.full((32, 48, 3), 20 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


@pytest.fixture(autouse=True)
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test unpacks to; the hub cache and HF_HOME are empty folders of it too."""
    from huggingface_hub import constants

    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "unpacked"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    return tmp_path / "unpacked"
