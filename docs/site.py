"""What the site adds to the folder of documents: the other pages there are, and plain docstrings.

MkDocs builds from one folder, while README, CHANGELOG, CONTRIBUTING and the examples stand where
people look for them. Here they become pages, and links between the two are moved. A link to a file
that is in the repository and not on the site becomes that file's path.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "Dockerfile": "examples/dockerfile.md",
    "examples/vllm/Dockerfile": "examples/vllm/dockerfile.md",
    **{
        f"examples/{path.name}": f"examples/{path.stem}.md"
        for path in sorted((ROOT / "examples").glob("*.py"))
    },
}
HOMES = {page: source for source, page in PAGES.items()}
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PICTURE = re.compile(r"(!\[[^\]]*\]\(| src=\")([^)\s\"]+)")
MATH = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
ROLE = re.compile(r":(?:func|class|meth|mod|attr):`~?([^`]+)`")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that stand outside the folder."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        if not source.endswith(".md"):
            kind = "python" if source.endswith(".py") else "dockerfile"
            text = f"# {source}\n\n```{kind}\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Moves the links of a page from where its file stands to where its page does, and sets its
    equations: browsers know MathML by themselves, so the site needs no script for them."""
    own = page.file.src_uri
    home = HOMES.get(own, f"docs/{own}")
    on_site = {file.src_uri for file in files if file.inclusion.is_included()}

    def place(link: str) -> tuple[str, str]:
        """The path in the repository that a link leads to, and that of its page on the site."""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(home), link.partition("#")[0]))
        return path, PAGES.get(path, path.removeprefix("docs/"))

    def moved(link: str) -> str:
        path, hash, anchor = link.partition("#")
        if not path or ":" in path:
            return link
        return posixpath.relpath(place(link)[1], posixpath.dirname(own) or ".") + hash + anchor

    def linked(match: re.Match[str]) -> str:
        words, link = match.groups()
        path, page_uri = place(link)
        is_elsewhere = ":" in link or link.startswith("#")
        if is_elsewhere or page_uri in on_site or not (ROOT / path).exists():
            return f"[{words}]({moved(link)})"
        return f"`{path}`" if words.strip("`") in path else f"{words} (`{path}`)"

    markdown = MATH.sub(lambda match: f"\n{convert(match.group(1), display='block')}\n", markdown)

    def with_links(text: str) -> str:
        text = PICTURE.sub(lambda match: match.group(1) + moved(match.group(2)), text)
        return LINK.sub(linked, text)

    parts, at = [], 0
    for fence in FENCED.finditer(markdown):  # Code stays as it is.
        parts += [with_links(markdown[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, with_links(markdown[at:])])


class Roles(griffe.Extension):
    """Docstrings name objects as Sphinx does; the site shows those names as code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one object's docstring."""
        if obj.docstring is not None:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
