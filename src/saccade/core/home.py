"""Where this machine keeps what is worth keeping between runs."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)
CPUS = Path("/proc/cpuinfo")


def home() -> Path:
    """``saccade`` below SACCADE_CACHE, or below the user's cache folder.

    A process in a container may run as a user without a name and a home. It gets a folder among
    the temporary ones.
    """
    named = os.environ.get("SACCADE_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / "saccade"
    try:
        return Path.home() / ".cache" / "saccade"
    except RuntimeError:
        return _temporary_home()


@cache
def _temporary_home() -> Path:
    """A folder of this user alone, since compiled code is loaded from it."""
    try:
        folder = Path(tempfile.gettempdir(), f"saccade-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        others_may_write = state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not others_may_write:
            return folder
        return Path(tempfile.mkdtemp(prefix="saccade-"))
    except OSError as error:
        log.info("nothing can be remembered: %s", error)
        return Path(os.devnull, "saccade")  # Nothing can be written there.


class Measured:
    """Numbers measured on this machine, in a file of ``home``: each under a key of what it was
    measured of, the machine, its processor and the threads in use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def key(self, *facts: object) -> str:
        machine = platform.node(), processor(), os.cpu_count(), torch.get_num_threads()
        return hashlib.sha256(repr((machine, torch.__version__, facts)).encode()).hexdigest()[:24]

    def load(self, key: str) -> Any:
        """What was saved under this key; None where nothing was."""
        return self._all().get(key)

    def save(self, key: str, value: Any) -> None:
        """Remembering is a convenience: a read-only home only means measuring again."""
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(json.dumps({**self._all(), key: value}))
            scratch.replace(path)
            _read.cache_clear()  # its new state may look like an older one
        except OSError as error:
            log.info("%s not remembered: %s", self._name, error)

    @property
    def _path(self) -> Path:
        return home() / self._name

    def _all(self) -> dict[str, Any]:
        try:
            state = self._path.stat()
            return _read(self._path, state.st_ino, state.st_mtime_ns, state.st_size)
        except (OSError, ValueError):
            return {}


@lru_cache(maxsize=4)
def _read(path: Path, *state: int) -> dict[str, Any]:
    """A file as it is in this state. Do not modify."""
    return dict(json.loads(path.read_text()))


def processor() -> str:
    """Its name as the system tells it."""
    return _told("model name") or platform.processor() or platform.machine()


def instructions() -> str:
    """Those that the processor knows, as the system tells them; its name where it does not."""
    return _told("flags", "Features") or processor()


@cache
def _told(*names: str) -> str:
    """The first line of one of these names; empty where there is none."""
    try:
        lines = CPUS.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
