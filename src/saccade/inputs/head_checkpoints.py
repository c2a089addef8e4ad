"""Finds and reads draft heads: small modules that draft from the target's hidden states.

A target's checkpoint may bring a head for multi-token prediction (MTP). EAGLE-3 and DFlash heads
are published in folders of their own.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from saccade.core.errors import ModelError, SaccadeError, first_line, kind_and_line
from saccade.core.json_text import parse_json
from saccade.inputs.checkpoints import fetch_folder
from saccade.inputs.footprint import Footprint, dflash_footprint, eagle3_footprint
from saccade.inputs.packed_checkpoints import find_packing, unpack_tensors
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.heads import layouts
from saccade.model.heads.dflash import make_dflash_head
from saccade.model.heads.head import Head, describe_other_target, make_eagle3_head, make_mtp_head

log = logging.getLogger(__name__)

# Config entries that count the layers of a multi-token-prediction head in a target's checkpoint.
OWN_HEAD_SETTINGS = ("mtp_num_hidden_layers", "num_nextn_predict_layers", "num_mtp_layers")
MASK_EMBEDDING_FILE = "mask_embedding.pt"  # The embedding of some DFlash heads' mask token.
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")  # Some heads are published as the latter.


def read_settings(name: str) -> dict[str, Any]:
    """Returns the entries of a checkpoint's config.json; none where that file is missing or broken.

    Raises ModelError where a hub id cannot be fetched.
    """
    try:
        folder = fetch_folder(name, ("config.json",))
        settings = parse_json((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


@dataclass(frozen=True)
class HeadKind:
    """A kind of head that is published in a folder of its own."""

    name: str  # as messages write it, with an article: "an EAGLE-3 head"
    architectures: re.Pattern[str]  # matches the architectures that its configs name
    make: Callable[[Backbone, dict[str, Any], layouts.Tensors, str], Head]
    """(target, config's entries, tensors, name) -> the head."""
    count_footprint: Callable[[Mapping[str, Any], Any], Footprint]
    """(config's entries, target's config) -> how large the head is, before it is loaded."""


HEAD_KINDS = (
    HeadKind("an EAGLE-3 head", layouts.EAGLE3_ARCHITECTURES, make_eagle3_head, eagle3_footprint),
    HeadKind("a DFlash head", layouts.DFLASH_ARCHITECTURES, make_dflash_head, dflash_footprint),
)


def find_kind(settings: Mapping[str, Any]) -> HeadKind | None:
    """Returns the kind of head that a config describes; None where it describes no head."""
    architectures = settings.get("architectures")
    listed = architectures if isinstance(architectures, list) else [architectures]
    # Configs of the library speculators name the kind of head in an entry of their own.
    names = [str(each) for each in (*listed, settings.get("speculators_model_type")) if each]
    kinds = (kind for kind in HEAD_KINDS if any(map(kind.architectures.search, names)))
    return next(kinds, None)


def find_problems(settings: dict[str, Any], target_config: Any, name: str) -> list[str]:
    """Returns why the head ``name`` cannot draft for a target, as far as their configs say.

    This is one sentence if the head's config declares another target, and nothing otherwise.
    """
    sentence = describe_other_target(settings, target_config, name)
    return [] if sentence is None else [sentence]


def names_mtp_head(target_config: Any) -> bool:
    """Returns whether a target's config says that its own checkpoint has a head."""
    settings = target_config.get_text_config(decoder=True).to_dict()
    return any(settings.get(name) for name in OWN_HEAD_SETTINGS)


def load_head(name: str, target: Backbone) -> Head:
    """Loads an EAGLE-3 or DFlash head from a folder or hub id, for a loaded target. Raises
    ModelError where it cannot be read or is another target's."""
    folder = fetch_folder(name, ("config.json", MASK_EMBEDDING_FILE, *WEIGHT_FILES))
    settings = read_settings(name)
    kind = find_kind(settings)
    if kind is None:
        raise ModelError(f"{name} is no head: its config.json names no EAGLE-3 or DFlash head")
    tensors = dict(_read_all(folder, name))
    if not tensors:
        raise ModelError(f"{name} holds no weights: give a folder with a head's *.safetensors")
    try:
        return kind.make(target, settings, tensors, name)
    except SaccadeError:
        raise
    except Exception as error:  # Libraries raise almost anything over malformed configs.
        if memory.is_out_of_memory(error):
            raise
        raise ModelError(
            f"the config.json of {name} describes no head that can be built "
            f"({kind_and_line(error)})"
        ) from error


def load_own_head(name: str, target: Backbone) -> Head | None:
    """Loads the head in a target's own checkpoint; None where it has none.

    Its tensors are read from the checkpoint's files, because transformers does not load them.
    Tensors in few bits are unpacked. Where a file cannot be read or the head cannot be used, this
    warns and returns None, since the target works without a head. It returns None without a warning
    if the checkpoint itself cannot be fetched.
    """
    try:
        folder = fetch_folder(name, ("*.safetensors",))
    except ModelError:
        return None
    try:
        # The names of all tensors are read first, to find out which tensors are the head's.
        file_by_key: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            file_by_key |= dict.fromkeys(_keys(file), file)
        match = layouts.find_mtp_layout(file_by_key.keys(), target.layer_count)
        if match is None:
            return None
        layout, key_by_name = match
        # Of the tensors themselves only the head's are read.
        tensors: dict[str, Tensor] = {}
        for file in sorted({file_by_key[key] for key in key_by_name.values()}):
            with safe_open(file, framework="pt") as opened:
                for tensor_name, key in key_by_name.items():
                    if file_by_key[key] == file:
                        tensors[tensor_name] = opened.get_tensor(key)
        packing = find_packing(read_settings(name).get("quantization_config") or {})
        if packing is not None:
            tensors = dict(
                unpack_tensors(
                    tensors.keys(),
                    tensors.__getitem__,
                    packing,
                    target.dtype,
                    f"the head of {name}",
                )
            )
        return make_mtp_head(target, layout, tensors, name)
    except (ModelError, SafetensorError, OSError) as error:
        log.warning("the head that %s brings along is not used: %s", name, error)
        return None


def _keys(file: Path) -> list[str]:
    """Returns the names of the tensors in a file."""
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _read_all(folder: Path, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a head's checkpoint with its name.

    Files of PyTorch are read only where there are no safetensors. The mask embedding may be in a
    file of its own, and is yielded last. Raises ModelError for a file that cannot be read.
    """
    safetensors_files = sorted(folder.glob("*.safetensors"))
    try:
        for file in safetensors_files:
            with safe_open(file, framework="pt") as opened:
                yield from ((key, opened.get_tensor(key)) for key in opened.keys())
        if not safetensors_files:
            for file in sorted(folder.glob("pytorch_model*.bin")):
                # Only tensors are read, so no code of the file is run.
                yield from torch.load(file, map_location="cpu", weights_only=True).items()
        mask_file = folder / MASK_EMBEDDING_FILE
        if mask_file.is_file():
            stored = torch.load(mask_file, map_location="cpu", weights_only=True)
            embedding = stored["embedding"] if isinstance(stored, dict) else stored
            yield "mask_embedding", embedding.flatten()
    except Exception as error:  # Libraries raise almost anything over damaged files.
        raise ModelError(f"the head in {name} cannot be read: {first_line(error)}") from error
