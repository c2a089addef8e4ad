"""What a checkpoint is called and where it lies, before any library of models is asked; and which
of them answer, as commands, a corpus and a server are told."""

from __future__ import annotations

import http.client
import os
import threading
import urllib.error
import urllib.request
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from saccade.core.errors import ModelError

PATIENCE = 3.0  # seconds for the hub to answer at all

EMBEDDED = Path(__file__).parents[1] / "world" / "pair"
NAMES = {  # what --target and --draft call the pair in the package
    "shapes": EMBEDDED / "target",
    "shapes-draft": EMBEDDED / "draft",
    "shapes-draft-naive": EMBEDDED / "draft-naive",
}


@dataclass(frozen=True)
class Answering:
    """Who answers, and how. Plain values, so that they can be sent to another machine."""

    target: str = "shapes"
    draft: str | None = None
    method: str = "auto"
    captioner: str | None = None  # for views that read a caption
    threads: int | None = None
    load: tuple[tuple[str, Any], ...] = ()  # settings of `load`: dtype, device, ...


def source_of(name: str) -> str:
    """The folder or hub id that a name stands for. Raises ModelError for what is no name."""
    if not isinstance(name, str | Path) or not str(name):
        raise ModelError(f"a model is a checkpoint folder or a hub id, not {name!r}")
    return str(NAMES.get(name, name))


def embedded(name: str) -> bool:
    """Whether a model's name or folder is the embedded pair's."""
    return source_of(name).startswith(str(EMBEDDED))


def looks_local(source: str) -> bool:
    """Whether this is a folder, here or not, and no hub id."""
    return source.startswith((".", "/", "~")) or Path(source).exists() or source.count("/") > 1


def check_folder(name: str, source: str, *, weights: bool = True) -> None:
    """Says what a local folder lacks before transformers tries to find it elsewhere."""
    folder = Path(source)
    if not looks_local(source):
        return
    if not folder.is_dir():
        raise ModelError(f"no checkpoint folder at {name}; give a folder or a hub id")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is not a checkpoint folder")
    if weights and not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} holds no *.safetensors weights; save the model there first")


def check(name: str, *, weights: bool = True) -> None:
    """Raises ModelError for a checkpoint that cannot be had, before anything heavy is imported."""
    source = source_of(name)
    check_folder(name, source, weights=weights)
    cached_only(name, source)


def cached_only(name: str, source: str) -> bool:
    """Whether to read a model from the local cache alone, the hub being out of reach.

    Raises ModelError where it is not there either. The hub is asked once a process.
    """
    if looks_local(source) or offline() or _reachable(endpoint()):
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        found = try_to_load_from_cache(source, "config.json")
    except ValueError as error:  # a name that no model can have
        raise ModelError(f"no checkpoint folder at {name!r}, and no hub id: give one") from error
    if not isinstance(found, str):
        raise ModelError(
            f"the hub ({endpoint()}) cannot be reached and {name!r} is not in the local cache "
            f"({HF_HUB_CACHE}): check the network, or give a checkpoint folder"
        )
    return True


def offline() -> bool:
    """Whether the user wants the hub left alone."""
    return os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")


def endpoint() -> str:
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@cache
def _reachable(address: str) -> bool:
    """Whether a server answers there, whatever it says, by the proxies the environment names."""
    answered = []

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=PATIENCE)
        except urllib.error.HTTPError:
            pass  # it answers
        except (OSError, ValueError, http.client.HTTPException):
            return
        answered.append(True)

    # a name server that is silent is bound by no timeout of a socket's
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return bool(answered)
