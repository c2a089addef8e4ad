"""Finds the folder in which Saccade keeps files between runs, and stores measurements there."""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import threading
import time
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
CPU_INFO = Path("/proc/cpuinfo")
WRITE_EVERY_SECONDS = 5.0  # Values that change with every answer are not written more often.


def home() -> Path:
    """Returns the folder ``saccade`` below SACCADE_CACHE, or below the user's cache folder.

    A process in a container may run as a user without a name and a home. It gets a temporary
    folder.
    """
    cache_folder = os.environ.get("SACCADE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if cache_folder:
        return Path(cache_folder) / "saccade"
    try:
        return Path.home() / ".cache" / "saccade"
    except RuntimeError:
        return _temporary_home()


@cache
def _temporary_home() -> Path:
    """Returns a folder that only this user may write to, since compiled code is loaded from it."""
    try:
        folder = Path(tempfile.gettempdir(), f"saccade-{os.getuid()}")
        # What exists may also be a file, or a link to nothing. The checks below refuse both.
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        state = folder.lstat()
        others_may_write = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not others_may_write:
            return folder
        return Path(tempfile.mkdtemp(prefix="saccade-"))
    except OSError as error:
        log.info("nothing can be remembered: %s", error)
        return Path(os.devnull, "saccade")  # Nothing can be written there.


class MeasurementFile:
    """Numbers measured on this machine, such as a kernel's seconds, in a file below ``home()``.

    Each is stored under a key (:meth:`key`): a digest of what was measured, the machine, its
    processor, torch's version and the number of threads in use.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._unwritten: dict[Path, dict[str, Any]] = {}  # Values that are not in their file yet.
        # The time of the last write, by ``time.monotonic``. At first it is so early that the first
        # value is written at once, even where that clock starts at 0.
        self._last_write = -WRITE_EVERY_SECONDS
        self._lock = threading.RLock()
        atexit.register(self.write_all)

    def key(self, *facts: object) -> str:
        """Returns the key of a measurement that depends on these facts."""
        machine = platform.node(), processor(), os.cpu_count(), torch.get_num_threads()
        return hashlib.sha256(repr((machine, torch.__version__, facts)).encode()).hexdigest()[:24]

    def load(self, key: str) -> Any:
        """Returns the value that was saved under this key; None where there is none."""
        unwritten = self._unwritten.get(self._path, {})
        return unwritten[key] if key in unwritten else _read_file(self._path).get(key)

    def save(self, key: str, value: Any) -> None:
        """Saves a value. Where nothing can be written, it is remembered in this process alone."""
        with self._lock:
            self._unwritten.setdefault(self._path, {})[key] = value
            self.write_all()

    def save_later(self, key: str, value: Any) -> None:
        """Saves a value that changes often, without writing the file each time.

        This process reads the value at once. Other processes read it after the next write, which
        happens when a value is saved at least ``WRITE_EVERY_SECONDS`` after the last write, or when
        this process ends. If this process is killed before that, the value is lost.
        """
        with self._lock:
            self._unwritten.setdefault(self._path, {})[key] = value
            if time.monotonic() - self._last_write >= WRITE_EVERY_SECONDS:
                self.write_all()

    def write_all(self) -> None:
        """Writes the values that are not in their file yet."""
        with self._lock:
            for path, values in [*self._unwritten.items()]:
                if self._write(path, values):
                    del self._unwritten[path]
            self._last_write = time.monotonic()

    def _write(self, path: Path, values: dict[str, Any]) -> bool:
        """Adds values to a file, whose other values stay. Returns whether it could be written."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({**_read_file(path), **values}))
            scratch.replace(path)
            # The new file may have the inode, time and size of an older one, which is cached.
            _read.cache_clear()
        except OSError as error:
            log.info("%s not written: %s", self._name, error)
            return False
        return True

    @property
    def _path(self) -> Path:
        return home() / self._name


def _read_file(path: Path) -> dict[str, Any]:
    """Returns the content of a file; nothing where it is missing or broken. Do not modify it."""
    try:
        state = path.stat()
        return _read(path, state.st_ino, state.st_mtime_ns, state.st_size)
    except (OSError, ValueError, TypeError):
        return {}


@lru_cache(maxsize=4)
def _read(path: Path, *state: int) -> dict[str, Any]:
    """Returns the content of a file. Do not modify it.

    ``state`` is only part of the cache's key: a file with another inode, time or size is read
    again.
    """
    return dict(json.loads(path.read_text()))


def processor() -> str:
    """Returns the processor's name."""
    return _cpu_info_line("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Returns the processor's instruction sets; its name where the system does not list them."""
    return _cpu_info_line("flags", "Features") or processor()


@cache
def _cpu_info_line(*names: str) -> str:
    """Returns the value of the first line of CPU_INFO that starts with one of these names; empty
    where there is none."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
