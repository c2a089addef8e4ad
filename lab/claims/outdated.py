"""Says which stored runs cannot decide any more, so that no verdict rests on them.

A run is known by the digest of what it holds. Once it was made again, its digest is another one,
and its claims are judged without a change here.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outdated:
    """Runs that something made unfit, by their digests.

    ``methods`` are the methods whose numbers are unfit, or nothing for all of them.
    """

    reason: str
    digests: Mapping[str, str]
    only_seconds: bool
    methods: tuple[str, ...] = ()


def digest(path: Path) -> str:
    """Returns the digest of a stored file's content, however it was compressed."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return hashlib.sha256(content).hexdigest()[:12]


def reason(name: str, content_digest: str, is_time: bool, methods: Sequence[str]) -> str:
    """Returns why a run is unfit for a comparison of these methods, or nothing where it is fit."""
    parts = {part.removeprefix("shape=") for method in methods for part in method.split("/")}
    for each in OUTDATED:
        concerns = not each.methods or not parts.isdisjoint(each.methods)
        if (
            each.digests.get(name) == content_digest
            and concerns
            and (is_time or not each.only_seconds)
        ):
            return each.reason
    return ""


OUTDATED: tuple[Outdated, ...] = ()
"""None at present: whoever changes what a stored run measured lists the run here."""
