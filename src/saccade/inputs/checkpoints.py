"""Names and folders of checkpoints, checked before torch or transformers is imported.

So a command refuses a wrong name at once. `ModelsAndMethod` says which models and which method a
command, a corpus run or a server uses.
"""

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

from saccade.core.errors import ModelError, first_line

HUB_TIMEOUT_SECONDS = 3.0  # The hub must answer within this time.

TRUE_VALUES = {"1", "ON", "YES", "TRUE"}  # Of a variable of the environment.
EMBEDDED = Path(__file__).parents[1] / "world" / "pair"
EMBEDDED_TARGET, EMBEDDED_DRAFT = "shapes", "shapes-draft"
NAMES = {  # The names by which --target and --draft call the embedded models.
    EMBEDDED_TARGET: EMBEDDED / "target",
    EMBEDDED_DRAFT: EMBEDDED / "draft",
    "shapes-draft-naive": EMBEDDED / "draft-naive",
}


@dataclass(frozen=True)
class ModelsAndMethod:
    """Which models answer and by which method, as plain values that another machine can read."""

    target: str = EMBEDDED_TARGET
    draft: str | None = None
    method: str = "auto"
    captioner: str | None = None  # For views that read a caption.
    threads: int | None = None
    # Further arguments of `saccade.inputs.load_pair`, such as dtype and device.
    load: tuple[tuple[str, Any], ...] = ()


def source_of(name: str) -> str:
    """Returns the folder or hub id of a name. Raises ModelError for what is no name."""
    if not isinstance(name, str | Path) or not str(name):
        raise ModelError(f"a model is a checkpoint folder or a hub id, not {name!r}")
    return os.path.expanduser(NAMES.get(name, name))


def is_embedded(name: str) -> bool:
    """Whether a model's name or folder is the embedded pair's."""
    return Path(source_of(name)).absolute().is_relative_to(EMBEDDED)


def looks_local(source: str) -> bool:
    """Whether a source is a local path rather than a hub id.

    It is one if it exists, begins with ".", "/" or "~", or has more than one "/". So a missing
    folder "models/target" counts as a hub id.
    """
    # Unlike Path.exists, os.path.exists returns False for a name that no file may have.
    is_there = os.path.exists(source)
    return is_there or source.startswith((".", "/", "~")) or source.count("/") > 1


def check_folder(name: str, source: str, *, weights: bool = True) -> None:
    """Raises ModelError, which says what a local folder lacks. Does nothing for a hub id.

    ``weights`` says whether it must have weights too, besides its config. Without this check
    transformers would look for a missing folder on the hub.
    """
    folder = Path(source)
    if not looks_local(source):
        return
    if not os.path.isdir(source):
        raise ModelError(f"no checkpoint folder at {name}; give a folder or a hub id")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is not a checkpoint folder")
    if weights and not any(folder.glob("*.safetensors")) and not _is_pickled_head(folder):
        raise ModelError(f"{name} holds no *.safetensors weights; save the model there first")


def _is_pickled_head(folder: Path) -> bool:
    """Whether a folder has an EAGLE-3 head in the older format, in which some are published."""
    is_head = "eagle3" in (folder / "config.json").read_text("utf-8", "replace").lower()
    return is_head and any(folder.glob("pytorch_model*.bin"))


def check_checkpoint(name: str, *, weights: bool = True) -> None:
    """Raises ModelError for a folder that is no checkpoint, and for a hub id that is not cached
    while the hub cannot be reached.

    A hub id is not checked where the environment forbids using the hub (``offline``).
    ``weights`` says whether a folder must have weights too, besides its config.
    """
    source = source_of(name)
    check_folder(name, source, weights=weights)
    must_use_cache(name, source)  # Called for the error that it raises.


def must_use_cache(name: str, source: str) -> bool:
    """Whether a library has to be told to read a model from the local cache alone.

    Returns True where the hub cannot be reached, which is tried once a process. Returns False for a
    local folder, and where the environment forbids using the hub (``offline``), because the
    libraries then read the cache alone by themselves. Raises ModelError where the hub cannot be
    reached and the model is not cached either.
    """
    if looks_local(source) or offline() or _reachable(endpoint()):
        return False
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        cached = try_to_load_from_cache(source, "config.json")
    except ValueError as error:  # No model can have this name.
        message = f"{name!r} is neither a checkpoint folder nor a hub id: give one"
        raise ModelError(message) from error
    if not isinstance(cached, str):
        raise ModelError(
            f"the hub ({endpoint()}) cannot be reached and {name!r} is not in the local cache "
            f"({HF_HUB_CACHE}): check the network, or give a checkpoint folder"
        )
    return True


def fetch_folder(name: str, patterns: tuple[str, ...]) -> Path:
    """Returns the folder of a checkpoint, after fetching a hub id's files that match ``patterns``.

    A local folder is returned as it is. Raises ModelError where they cannot be fetched.
    """
    source = source_of(name)
    if looks_local(source):
        return Path(source)
    from huggingface_hub import snapshot_download

    is_cached_only = must_use_cache(name, source)
    try:
        folder = snapshot_download(
            source, allow_patterns=[*patterns], local_files_only=is_cached_only
        )
    except Exception as error:  # The hub's library raises almost anything.
        raise ModelError(f"cannot find or load {name!r}: {first_line(error)}") from error
    return Path(folder)


def offline() -> bool:
    """Whether the environment forbids using the hub, by the rules of the hub's own library."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.upper() in TRUE_VALUES for value in values)


def endpoint() -> str:
    """Returns the address of the hub."""
    return os.environ.get("HF_ENDPOINT") or "https://huggingface.co"


@cache
def _reachable(address: str) -> bool:
    """Whether a server answers at an address, through the environment's proxies if any."""
    responses = []

    def request() -> None:
        try:
            head = urllib.request.Request(address, method="HEAD")
            urllib.request.urlopen(head, timeout=HUB_TIMEOUT_SECONDS)
        except urllib.error.HTTPError:
            pass  # An error is an answer too.
        except (OSError, ValueError, http.client.HTTPException):
            return
        responses.append(True)

    # The request is in a thread, because its timeout does not limit how long a name server takes.
    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return bool(responses)
