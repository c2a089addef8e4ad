"""Claims about the page that watches a video, without a browser."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import saccade
from saccade.core.errors import OptionError, SaccadeError
from saccade.ui.page_run import PageSettings
from saccade.ui.watching import PageWatcher, conversation_html, frames_html
from saccade.world import drawing, scenes


def test_a_tab_watches_and_asks(tmp_path: Path) -> None:
    """Claim: a tab watches a video, its latest frames are shown, an answer grows to the whole and
    is written down; another tab waits its turn, and takes it once the first has stopped."""
    path = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), path, 12, 112, fps=2.0)
    watchers = PageWatcher(saccade.load(method="sd", device="cpu"), PageSettings(max_new_tokens=8))
    with pytest.raises(OptionError, match="drop a video"):
        watchers.start("one", None, "60 s")
    with pytest.raises(OptionError, match="nothing is watched"):
        next(watchers.ask("one", "What?"))
    with pytest.raises(SaccadeError, match="window="):
        watchers.start("one", str(path), "3 cats")
    live = watchers.start("one", str(path), "60 s", realtime=False)
    assert live.wait(60)
    with pytest.raises(OptionError, match="another tab"):
        watchers.start("two", str(path), "60 s")
    with pytest.raises(SaccadeError, match="window="):
        watchers.start("one", str(path), "3 cats")  # What is watched already goes on.
    *_, last = watchers.ask("one", "What is there?")
    assert last and last == live.history[-1][1]
    assert "<img" in frames_html(watchers.get("one")) and "12 frames seen" in frames_html(
        watchers.get("one")
    )
    assert (
        "What is there?" in conversation_html(watchers.get("one")) and conversation_html(None) == ""
    )
    # Who leaves in the middle of an answer may ask again.
    answer = watchers.ask("one", "What is there?")
    next(answer)
    answer.close()
    *_, last = watchers.ask("one", "What is there?")
    assert last == live.history[-1][1]
    watchers.stop("two")
    assert watchers.get("one") is not None
    watchers.stop("one")
    assert watchers.get("one") is None and frames_html(None) == ""
    watchers.start("two", str(path), "60 s", realtime=False)
    watchers.stop("two")


BUILD = """
import saccade
from saccade.ui import page, watch_page
from saccade.ui.page_run import PageSettings

built = watch_page.build_watch_page(saccade.load(device="cpu"), PageSettings())
assert page.make_app(built) is not None
print(built.analytics_enabled, *sorted(type(block).__name__ for block in built.blocks.values()))
"""


@pytest.mark.slow
def test_the_page_is_built() -> None:
    """Claim: the page is built with analytics off, a file, three buttons and a timer. Fails if a
    component's name or an option of gradio's changed."""
    pytest.importorskip("gradio", reason="the page is an extra: uv sync --extra ui")
    done = subprocess.run([sys.executable, "-c", BUILD], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    analytics, *kinds = done.stdout.split()
    assert analytics == "False" and "Timer" in kinds
    assert kinds.count("File") == 1 and kinds.count("Button") == 3
