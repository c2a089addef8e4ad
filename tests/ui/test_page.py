"""Claims about the page without a browser: it is built, offline, and refuses in sentences."""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from saccade.core.errors import OptionError
from saccade.inputs.media import Limits
from saccade.ui.page_run import PageSettings
from saccade.world.demo_clips import EXAMPLES

Call = Callable[..., tuple[int, str, str]]
TRAINED_BELOW = 10_000_000  # training draws its seeds there


@pytest.fixture(scope="module")
def page() -> Any:
    """The page's module: gradio takes many seconds to import, so only who asks waits for it."""
    pytest.importorskip("gradio", reason="the page is an extra: uv sync --extra ui")
    from saccade.ui import page

    return page


BUILD = """
from saccade.ui import page

def nobody():
    raise AssertionError("the page asked for models before there was anything to answer")

built = page.build_page(nobody)
assert page.make_app(built) is not None
print(built.analytics_enabled, *sorted(type(block).__name__ for block in built.blocks.values()))
"""


@pytest.mark.slow
def test_the_page_is_built_without_models_and_tells_nobody() -> None:
    """Claim: ``build_page`` and ``make_app`` load no model, and analytics are off.

    Fails if a component's name or an option of gradio's changed. In a process of its own: gradio
    leaves event loops open behind it."""
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    analytics, *kinds = done.stdout.split()
    assert analytics == "False"
    assert kinds.count("File") == 1 and kinds.count("Button") == 2


GONE = """
import socket, threading, time
import httpx, uvicorn
from saccade.ui import page

steps = []

def endless(*asked):
    try:
        while True:
            steps.append(threading.current_thread().name)
            time.sleep(0.05)
            yield shown
    finally:
        steps.append("closed")

from saccade.methods import METHODS
from saccade.ui.page_run import PageRun
from saccade.world.demo_clips import EXAMPLES
from saccade.ui.duel import Column, Duel

duel = Duel(Column("ar"), Column("x"))
shown = PageRun(duel, METHODS["sd"], next(iter(EXAMPLES.values())).clip())
page.run_question = endless
door = socket.create_server(("127.0.0.1", 0))
config = uvicorn.Config(page.make_app(page.build_page(lambda: None)), log_level="error")
server = uvicorn.Server(config)
threading.Thread(target=server.run, args=([door],), daemon=True).start()
at = f"http://127.0.0.1:{door.getsockname()[1]}"
while not server.started:
    time.sleep(0.1)
(run,) = [d for d in httpx.get(f"{at}/config").json()["dependencies"] if len(d["inputs"]) == 7]
asked = {"data": [None, None, "?", "sd", 8, 0, 0], "fn_index": run["id"], "session_hash": "tab"}
httpx.post(f"{at}/gradio_api/queue/join", json=asked).raise_for_status()
with httpx.stream("GET", f"{at}/gradio_api/queue/data?session_hash=tab", timeout=60) as news:
    for number, line in enumerate(news.iter_lines()):
        if number > 12:
            break
until = time.monotonic() + 30
while "closed" not in steps and time.monotonic() < until:
    time.sleep(0.1)
print(*sorted(set(steps)))
server.should_exit = True
"""


@pytest.mark.slow
def test_a_tab_that_goes_ends_its_run() -> None:
    """Claim: every step of a run is made by one thread, and a run whose reader goes is closed.

    Fails if a run went on for nobody, or its steps wandered between threads."""
    done = subprocess.run([sys.executable, "-c", GONE], capture_output=True, text=True)
    assert done.stdout.split() == ["closed", "saccade-ui_0"], done.stderr


def test_examples_are_clips_no_training_drew() -> None:
    """Claim: each example renders the frames it names, from a seed far from training's."""
    for name, example in EXAMPLES.items():
        assert example.seed >= 2 * TRAINED_BELOW, name
    clip = EXAMPLES["Five shapes, short (256)"].clip()
    assert clip.frames.shape == (32, 112, 112, 3) and clip.duration == 8.0


def test_looking_at_a_clip_shows_frames_or_the_sentence(page: Any, tmp_path: Path) -> None:
    """Claim: a picture is shown, a file that is none is refused in a sentence that names it."""
    picture, other = tmp_path / "one.png", tmp_path / "page.mp4"
    Image.fromarray(np.full((32, 32, 3), 200, np.uint8)).save(picture)
    other.write_text("<html>gone</html>")
    assert page.preview_clip(None, str(picture), PageSettings()).count("<img") == 1
    refused = page.preview_clip(None, str(other), PageSettings())
    assert "page.mp4 is not a video" in refused and "sac-error" in refused
    assert "<img" not in refused and "Traceback" not in refused
    assert "pick an example clip" in page.preview_clip(None, None, PageSettings())


def test_limits_of_the_house_hold_for_uploads(page: Any, tmp_path: Path) -> None:
    """Claim: a file over the house's limit is refused with the limit."""
    picture = tmp_path / "one.png"
    Image.fromarray(np.full((32, 32, 3), 200, np.uint8)).save(picture)
    small = PageSettings(limits=Limits(max_bytes=10))
    assert "larger than 10 bytes" in page.preview_clip(None, str(picture), small)


def test_a_bug_is_a_sentence_too(page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: an error that is none of ours shows no traceback and nothing of its text."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("secret")

    monkeypatch.setattr(page, "read_clip", broken)
    preview = page.preview_clip("x", None, PageSettings())
    assert page.INTERNAL_ERROR in preview and "secret" not in preview


@pytest.fixture
def without_gradio(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find(name: str, *others: Any) -> Any:
        return None if name == "gradio" else real(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find)


@pytest.mark.usefixtures("without_gradio")
def test_without_the_extra_it_says_how_to_get_it() -> None:
    """Claim: one sentence with both ways to install it, before anything heavy is imported."""
    from saccade.cli.ui import ui

    with pytest.raises(OptionError, match=r"uv run --extra ui.*CLONE\[ui\]"):
        ui()


def test_a_port_that_is_taken_is_a_sentence() -> None:
    """Claim: a port in use is refused before models are loaded, with what would work."""
    from saccade.cli.ui import ui

    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(
            OptionError, match=f"cannot listen on 127.0.0.1 port {number}.*another --port"
        ):
            ui(port=number)
