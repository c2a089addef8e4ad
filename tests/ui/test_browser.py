"""Claims about the page in a real browser, served by the command as a person starts it."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse

import pytest
from beside import Forked

pytest.importorskip("playwright", reason="the browser's driver is a development package")

from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402

from saccade.ui import method_controls  # noqa: E402
from saccade.world import drawing, scenes  # noqa: E402

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.extra,
    pytest.mark.skipif(
        CHROMIUM is None, reason=f"no browser to look with: none of {', '.join(NAMES)} is installed"
    ),
]
ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SHORT = "Five shapes, short (256)"
PATIENCE = 120_000  # milliseconds: the machine may be busy
expect.set_options(timeout=PATIENCE / 4)


@dataclass(frozen=True)
class Served:
    """Where the page is, and where its process writes whom else it asked."""

    address: str
    hosts_file: Path


SERVE = "from ui import served; served.main()"  # in a fork of this process: torch is there


@contextmanager
def serving(folder: Path, *options: str) -> Iterator[Served]:
    """The page of ``saccade ui`` with these options, until the end."""
    hosts_file, errors = folder / "asked.txt", folder / "errors.txt"
    ours, theirs = os.pipe()
    command = ("ui", "--port", "0", "--threads", "1", "--max-upload-mb", "1", *options)
    words = ("-c", SERVE, str(theirs), str(errors), str(hosts_file), *command)
    running = Forked(words, pass_fds=[theirs])
    os.close(theirs)
    try:
        with os.fdopen(ours) as output:
            line = output.readline()
            match = re.search(r"http://\S+", line)
            assert match, line + errors.read_text()
            yield Served(match.group(0), hosts_file)
            os.kill(running.pid, signal.SIGINT)
            assert running.wait(60) in (0, 130), "Ctrl-C did not end it"
    finally:
        running.kill()
        running.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("ui")) as place:
        yield place


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(served: Served, browser: Browser) -> Iterator[Page]:
    """The page, open; every request to another host fails the test."""
    context = browser.new_context()
    context.set_default_timeout(PATIENCE)
    outside: list[str] = []

    def note(address: str) -> None:
        parts = urlparse(address)
        if parts.scheme not in ("data", "blob") and parts.hostname != "127.0.0.1":
            outside.append(address)

    context.on("request", lambda request: note(request.url))
    tab = context.new_page()
    tab.on("websocket", lambda socket: note(socket.url))
    tab.goto(served.address)
    tab.get_by_label(SHORT, exact=True).check()
    yield tab
    context.close()
    assert not outside
    assert not served.hosts_file.exists(), served.hosts_file.read_text()


def ask(page: Page, method: str, tokens: int) -> None:
    unfold(page)
    written = page.locator("#sac-method input")
    _, explained = method_controls.explain_method(method)
    for _ in range(20):  # a page that is still waking up hears no Enter
        written.fill(method)
        written.press("Enter")
        try:
            expect(page.locator("#sac-about")).to_have_text(explained, timeout=PATIENCE / 40)
            break
        except AssertionError:
            continue
    page.get_by_label("Max new tokens", exact=True).fill(str(tokens))
    page.get_by_role("button", name="Answer", exact=True).click()


def unfold(page: Page) -> None:
    """Opens what is folded under Advanced, if it is not open."""
    if not page.get_by_label("Max new tokens", exact=True).is_visible():
        page.get_by_role("button", name="Advanced").click()
        page.get_by_label("Max new tokens", exact=True).wait_for()


def finished(page: Page) -> str:
    """Waits for both answers, and gives what is said of them."""
    page.locator(".sac-same").wait_for()
    return page.locator("#sac-result").inner_text()


@pytest.mark.slow
def test_an_example_is_answered_twice_alike_and_drawn(page: Page) -> None:
    """Claim: a run shows the same text in both columns, coloured on the right alone, then what the
    draft saw and its tree, which the slider moves from round to round.

    Fails on any request to another host, by the browser or by the server."""
    ask(page, "sage", 24)
    assert "same tokens: yes" in finished(page)
    plain, drafted = page.locator("#sac-plain .sac-text"), page.locator("#sac-drafted .sac-text")
    assert drafted.inner_text() == plain.inner_text() != ""
    assert drafted.locator(".sac-accepted").count() > 0
    assert plain.locator("span").count() == 0
    page.locator("#sac-seen img").first.wait_for()
    assert page.locator("#sac-tree .sac-node-accepted").count() > 0
    round_text = page.locator("#sac-tree p").inner_text()
    turn = page.get_by_label(re.compile("^number input for Round")).or_(
        page.get_by_role("spinbutton", name=re.compile("Round"))
    )
    turn.first.fill("3")
    turn.first.press("Enter")
    expect(page.locator("#sac-tree p")).not_to_have_text(round_text)


def test_what_cannot_be_is_a_sentence_on_the_page(page: Page, tmp_path: Path) -> None:
    """Claim: an impossible method and a file that is no video are each refused in one sentence,
    without a traceback, and a run afterwards works."""
    ask(page, "hippo/shape=tree", 8)
    error = page.locator("#sac-error")
    expect(error).to_contain_text(re.compile("a chain; use .*shape=chain-N"))
    bad = tmp_path / "bad.mp4"
    bad.write_text("<html>not found</html>")
    page.locator("input[type=file]").set_input_files(bad)
    page.get_by_text("bad.mp4 is not a video").first.wait_for()
    ask(page, "sd", 8)
    expect(error).to_contain_text("bad.mp4 is not a video but a web page")
    assert "Traceback" not in page.content()
    page.get_by_label("Four on stripes (2,048)", exact=True).check()
    expect(error).to_have_text("")  # the page has answered: what it says may set the choice again
    page.get_by_label(SHORT, exact=True).check()
    ask(page, "sd/schedule=serial", 8)
    assert "same tokens: yes" in finished(page)
    expect(error).to_have_text("")


@pytest.mark.slow
def test_stop_stops_and_a_closed_tab_makes_room(page: Page) -> None:
    """Claim: Stop ends a run before its end, and says so; after a tab with a run was closed the
    next tab is served."""
    unfold(page)
    page.get_by_label("Temperature (0: greedy)", exact=True).fill("10")  # it rambles on
    ask(page, "sd/view=none/shape=chain-1", 1024)
    page.locator("#sac-plain .sac-text").get_by_text(re.compile("\\w")).wait_for()
    page.get_by_role("button", name="Stop", exact=True).click()
    page.get_by_text("Stopped.", exact=True).wait_for()
    count = page.locator("#sac-plain dd").nth(1).inner_text()
    assert int(count) > 0
    ask(page, "sd/view=none/shape=chain-1", 1024)
    expect(page.get_by_text("Stopped.", exact=True)).to_have_count(0)
    page.locator("#sac-plain .sac-text").get_by_text(re.compile("\\w")).first.wait_for()
    other = page.context.new_page()
    other.goto(page.url)
    other.get_by_label(SHORT, exact=True).check()
    page.close()
    ask(other, "sd", 8)
    assert "same tokens: yes" in finished(other)


def test_at_first_there_is_a_question_and_a_button(served: Served, browser: Browser) -> None:
    """Claim: before anything was asked no answer, measure or legend is shown and methods are folded
    away; who answers is said; on a phone the button is within the first screen."""
    size = {"width": 390, "height": 844}
    context = browser.new_context(viewport=size, is_mobile=True, has_touch=True)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(served.address)
    button = page.get_by_role("button", name="Answer", exact=True)
    button.wait_for()
    box = button.bounding_box()
    assert box is not None and box["y"] + box["height"] < size["height"]
    assert "embedded pair" in page.locator(".sac-who").inner_text()
    for hidden in (".sac-legend", "#sac-plain .sac-side", "#sac-seen img", "#sac-method"):
        assert not page.locator(hidden).first.is_visible(), hidden
    assert not page.get_by_role("button", name="Stop", exact=True).is_visible()
    context.close()


SIZES = {
    "desktop": {"viewport": {"width": 1280, "height": 800}},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}


@contextmanager
def opened(browser: Browser, place: Served, size: str) -> Iterator[Page]:
    """A page in a window of this size, which it must not be wider than at the end."""
    context = browser.new_context(**SIZES[size])
    context.set_default_timeout(PATIENCE)
    tab = context.new_page()
    broken: list[str] = []
    tab.on("pageerror", lambda error: broken.append(str(error)))
    tab.goto(place.address)
    assert "embedded pair" in tab.locator(".sac-who").inner_text()
    yield tab
    width = tab.evaluate("document.documentElement.scrollWidth")
    assert width <= SIZES[size]["viewport"]["width"] and not broken
    context.close()
    assert not place.hosts_file.exists(), place.hosts_file.read_text()


@pytest.mark.parametrize("size", SIZES)
def test_a_live_video_is_watched_and_asked_about(
    browser: Browser, tmp_path: Path, size: str
) -> None:
    """Claim: a dropped video plays, its latest frames are shown, and questions before its end and
    after it are answered, the latest first, on a desktop and on a phone."""
    clip = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), clip, 16, 112, fps=2.0)
    with serving(tmp_path, "--watch") as place, opened(browser, place, size) as page:
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator("#sac-error")).to_contain_text("press Watch")
        page.locator("input[type=file]").set_input_files(clip)
        page.get_by_text("clip.mp4").first.wait_for()
        page.get_by_role("button", name="Watch", exact=True).click()
        page.locator("#sac-live img").first.wait_for()
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".sac-exchange")).to_have_count(1)
        page.get_by_text("the video has ended; 16 frames seen").wait_for()
        page.get_by_label("Question, at any time").fill("How many things?")
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".sac-exchange")).to_have_count(2)
        expect(page.locator(".sac-asked").first).to_contain_text("How many things?")
        assert page.locator(".sac-answer").first.inner_text()


@pytest.mark.parametrize("size", SIZES)
def test_a_conversation_takes_new_videos(browser: Browser, tmp_path: Path, size: str) -> None:
    """Claim: a question brings its own file, the next one says what was read before, and Begin anew
    forgets both, on a desktop and on a phone."""
    clip = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), clip, 8, 112, fps=2.0)
    options = ("--chat", "--max-new-tokens", "8")
    with serving(tmp_path, *options) as place, opened(browser, place, size) as page:
        for count in (1, 2):
            page.locator("input[type=file]").set_input_files(clip)
            page.get_by_text("clip.mp4").first.wait_for()
            page.get_by_role("button", name="Ask", exact=True).click()
            expect(page.locator(".sac-exchange .sac-strip")).to_have_count(count)
        expect(page.locator(".sac-asked").first).to_contain_text("tokens were read before")
        page.get_by_role("button", name="Begin anew", exact=True).click()
        expect(page.locator(".sac-exchange")).to_have_count(0)
