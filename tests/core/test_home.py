"""What this machine remembers between runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from saccade.core.home import WRITE_EVERY_SECONDS, MeasurementFile


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
    for step, broken in enumerate(("{", "5", "[1]"), start=2):
        file.write_text(broken)
        os.utime(file, ns=(step, step))
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


def test_values_that_change_often_are_written_seldom(tmp_path, monkeypatch):
    """Claim: they are seen by this process at once, and written at most every few seconds, together
    with all that others wrote meanwhile. What is saved for good is written at once. Fails if an
    answer waits for the disk, or if a value that waits overwrites another process's."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    seconds = [100.0]
    monkeypatch.setattr("saccade.core.home.time.monotonic", lambda: seconds[0])
    measured, other = MeasurementFile("some.json"), MeasurementFile("some.json")
    measured.save_later("a", 1)
    assert other.load("a") == 1
    measured.save_later("a", 2)
    measured.save_later("b", 3)
    assert (measured.load("a"), measured.load("b")) == (2, 3)
    assert (other.load("a"), other.load("b")) == (1, None)
    other.save("c", 4)
    seconds[0] += WRITE_EVERY_SECONDS
    measured.save_later("b", 5)
    assert [other.load(key) for key in "abc"] == [2, 5, 4]
    measured.save_later("a", 6)
    measured.save("d", 7)
    assert [other.load(key) for key in "abcd"] == [6, 5, 4, 7]


def test_values_that_wait_are_written_when_the_process_ends(tmp_path):
    """Claim: the last answers of a process are remembered. Fails if what waits is lost."""
    code = """
from saccade.core.home import MeasurementFile
measured = MeasurementFile("some.json")
for value in range(3):
    measured.save_later("a", value)
"""
    environment = os.environ | {"SACCADE_CACHE": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert json.loads((tmp_path / "saccade" / "some.json").read_text()) == {"a": 2}


@pytest.mark.parametrize("facts", [("a",), ("a", 1)])
def test_a_key_is_of_what_was_measured_and_the_threads(monkeypatch, facts):
    """Claim: other facts and another number of threads have another key, the same the same."""
    measured = MeasurementFile("some.json")
    key = measured.key(*facts)
    assert key == measured.key(*facts) != measured.key(*facts, "b")
    monkeypatch.setattr("torch.get_num_threads", lambda: 77)
    assert key != measured.key(*facts)
