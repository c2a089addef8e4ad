"""Claims about the fuzzer: it finds what is planted, and in a minute nothing else."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import fuzz
import pytest

from saccade.core.errors import MethodError


@pytest.mark.slow
def test_a_minute_of_fuzzing_finds_nothing(tmp_path: Path) -> None:
    """Claim: damaged media, bodies, names and configs each end in a result or a sentence."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = fuzz.fuzz(60, tmp_path, seed=7)
    assert {name.split()[0] for name in counts} == {"media", "bodies", "names", "configs"}
    left = {path.name: path.read_text() for path in tmp_path.glob("*.txt")}
    assert not left and not any(name.endswith("finding") for name in counts)


def test_control_a_planted_bug_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: an error that is none of ours is written down with its input, once; what was tried
    last lies there too. Ours is no finding."""

    def broken(name: str) -> None:
        if "/" in name:
            raise KeyError(name)
        raise MethodError("no such method")

    monkeypatch.setattr(fuzz, "resolve", broken)
    counts = fuzz.fuzz(0.5, tmp_path, seed=1, only="names")
    (crash,) = tmp_path.glob("names-KeyError-????????????")
    assert (
        b"/" in crash.read_bytes() and "broken" in crash.with_name(crash.name + ".txt").read_text()
    )
    assert (tmp_path / "last-names").exists()
    assert 0 < counts["names finding"] < counts["names refused"]


def test_the_same_seed_tries_the_same() -> None:
    """Claim: what was tried can be tried again."""
    tried = [
        [fuzz.mutated([b"abc 12", b"x/y=3"], random.Random(5)) for _ in range(9)] for _ in "ab"
    ]
    assert tried[0] == tried[1]
