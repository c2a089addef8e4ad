"""Lists stored runs that no longer show what Saccade does, so that no claim is judged by them.

A claim is a paper's sentence that a stored run confirms or refutes (``lab.claims``). A listed run
is recognized by the digest of its file's content. Once the run is made again its digest differs, so
its claims are judged by the new run without a change here.
"""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outdated:
    """Stored runs that cannot be used any more, and why."""

    reason: str
    # By a run's name, the digest of its file's content. A figure is named "figure sage-plan", and a
    # JSON file "real.json".
    digests: Mapping[str, str]
    only_seconds: bool  # Whether counts of tokens can still be used.
    # The outdated parts of methods, such as "sage" or a shape's name; nothing if all are outdated.
    methods: tuple[str, ...] = ()


def digest(path: Path) -> str:
    """Returns the digest of a stored file's content, however it was compressed."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return hashlib.sha256(content).hexdigest()[:12]


def reason(name: str, content_digest: str, is_time: bool, methods: Sequence[str]) -> str:
    """Returns why these methods cannot be compared by a run, or nothing if they can.

    ``name`` is the run's, as in ``Outdated.digests``, and ``is_time`` says whether the methods'
    seconds are compared.
    """
    # The parts of "specvlm/shape=sage" are "specvlm" and "sage".
    parts = {part.removeprefix("shape=") for method in methods for part in method.split("/")}
    for each in OUTDATED:
        is_this_run = each.digests.get(name) == content_digest
        concerns_methods = not each.methods or not parts.isdisjoint(each.methods)
        concerns_unit = is_time or not each.only_seconds
        if is_this_run and concerns_methods and concerns_unit:
            return each.reason
    return ""


OUTDATED: tuple[Outdated, ...] = ()
"""None at present: whoever changes what a stored run measured lists the run here."""
