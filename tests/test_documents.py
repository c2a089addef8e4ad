"""Claims about the documents: what they link to is there, and the site shows all of them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from saccade.core.errors import how_to_install

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("notebook/*.md")])
OFF_SITE = re.compile(r"results/.*|upstream-[\w-]+\.md")
FENCED = re.compile(r"^(`{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)| src=\"([^\"]+)\"")


def _links(text: str) -> list[str]:
    """Every link and picture of a page that leads to a file or a heading, code left out."""
    links = (one or other for one, other in LINK.findall(FENCED.sub("", text)))
    return [link for link in links if not re.match(r"[a-z]+:", link)]


@cache
def _anchors(page: Path) -> frozenset[str]:
    """A page's headings as GitHub and the site name them: lower case, words joined by hyphens."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", t.lower()).replace(" ", "-") for t in titles)


def _dead(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere."""
    dead = []
    for link in _links(text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        inside = target.is_relative_to(ROOT) and target.exists()
        if not inside or (anchor and anchor not in _anchors(target)):
            dead.append(link)
    return dead


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page):
    """Claim: each relative link of README and docs, with its anchor, and each picture is there.
    Fails on a page that moved or a heading that was renamed."""
    assert _dead(page, page.read_text()) == []


def test_control_dead_links_are_seen():
    """Control: a missing file, a missing heading and a missing picture are found; a link in code,
    an address and what is there are not."""
    page = ROOT / "README.md"
    text = (
        "[a](docs/nowhere.md) [b](docs/numbers.md#nothing) ![c](docs/no.png) [d](#read-on)\n"
        '<img src="docs/none.svg"> [e](https://example.org) [f](docs/numbers.md)\n'
        "```\n[g](not/there.md)\n```\n"
    )
    dead = ["docs/nowhere.md", "docs/numbers.md#nothing", "docs/no.png", "docs/none.svg"]
    assert _dead(page, text) == dead


def test_the_site_has_every_page():
    """Claim: each document stands in the site's navigation once, but for results that commands
    write and texts for other projects, which do not stand there. Fails on a page that nobody would
    find, and on a report of a single run among a user's pages."""
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    entries = re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE)
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    beside = {"index.md", "changelog.md", "contributing.md"}
    assert sorted(entries) == sorted({p for p in pages if not OFF_SITE.fullmatch(p)} | beside)


def test_nothing_is_installed_from_an_index_that_lacks_it():
    """Claim: no document and no message tells anyone to install `saccade[...]`, which is published
    nowhere: what is installed is a clone or a wheel. Fails on a command that finds nothing."""
    sources = [
        *(ROOT / "src").rglob("*.py"),
        *(page for page in PAGES if page.parent.name != "notebook"),
    ]
    index = re.compile(r"(install|add|--with) [\"'`]*saccade\b")
    assert [path for path in sources if index.search(path.read_text())] == []
    assert index.search("`pip install 'saccade[ray]'`") and index.search('install "saccade[serve]"')
    assert "'PATH/TO/CLONE[ray,serve]'" in how_to_install("ray", "serve")
