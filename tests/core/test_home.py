"""What this machine remembers between runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from saccade.core.home import MeasurementFile


def test_what_others_remember_is_seen_and_a_file_is_read_once(tmp_path, monkeypatch):
    """Claim: a value that another process saved is seen at once, and one that it dropped or broke
    is gone. Our own saves are seen even where the file's time and size stay the same. While nobody
    writes, the file is read once. Fails if what was read is kept for good."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    measured, read = MeasurementFile("some.json"), []
    real = json.loads
    monkeypatch.setattr("saccade.core.home.json.loads", lambda text: read.append(1) or real(text))
    assert measured.load("a") is None
    measured.save("a", 1)
    assert [measured.load("a") for _ in range(3)] == [1, 1, 1] and len(read) == 1
    measured.save("b", [2])
    assert (measured.load("a"), measured.load("b")) == (1, [2])
    file = tmp_path / "saccade" / "some.json"
    file.write_text('{"a": 3}')  # in place, and as long as it was at first
    os.utime(file, ns=(1, 1))
    assert (measured.load("a"), measured.load("b")) == (3, None)
    file.write_text("{")
    os.utime(file, ns=(2, 2))
    assert measured.load("a") is None
    file.write_text("{}")
    with monkeypatch.context() as patch:
        stat, still = Path.stat, {"st_ino": 1, "st_mtime_ns": 1, "st_size": 1}
        patch.setattr(
            Path, "stat", lambda path: SimpleNamespace(st_mode=stat(path).st_mode, **still)
        )
        for value in range(3):
            measured.save("c", value)
            assert measured.load("c") == value
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path / "elsewhere"))
    assert measured.load("b") is None


@pytest.mark.parametrize("facts", [("a",), ("a", 1)])
def test_a_key_is_of_what_was_measured_and_the_threads(monkeypatch, facts):
    """Claim: other facts and another number of threads have another key, the same the same."""
    measured = MeasurementFile("some.json")
    key = measured.key(*facts)
    assert key == measured.key(*facts) != measured.key(*facts, "b")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert key != measured.key(*facts)
