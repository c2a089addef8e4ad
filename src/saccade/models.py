"""A folder or hub id to a loaded model; a clip and a question to that model's inputs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from saccade.backbone import Backbone
from saccade.errors import ModelError, OptionError
from saccade.media import Clip
from saccade.types import Inputs

EMBEDDED = Path(__file__).parent / "shapes" / "pair"
NAMES = {  # what --target and --draft call the pair in the package
    "shapes": EMBEDDED / "target",
    "shapes-draft": EMBEDDED / "draft",
    "shapes-draft-naive": EMBEDDED / "draft-naive",
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to answer."""

    name: str
    backbone: Backbone
    processor: Any  # or a tokenizer, for a text-only model

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)


def load(
    name: str, *, dtype: str | None = None, device: str | None = None, lean: bool | None = None
) -> Loaded:
    """Loads a checkpoint folder, a hub id, or one of the embedded models by ``NAMES``.

    ``dtype`` defaults to float32 on a CPU and to the checkpoint's own elsewhere. Only safetensors
    weights are read, and no code of the checkpoint's is run.
    """
    place = pick_device(device)
    source = str(NAMES.get(name, name))
    check_folder(name, source)
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    precision = "auto" if place.type != "cpu" else torch.float32
    if dtype is not None:
        precision = DTYPES[dtype]
    try:
        config = AutoConfig.from_pretrained(source)
        if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            kind, reader = AutoModelForImageTextToText, AutoProcessor
        elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
            kind, reader = AutoModelForCausalLM, AutoTokenizer
        else:
            raise ModelError(f"{name}: a {config.model_type} model does not generate text")
        processor = reader.from_pretrained(source)
        model = kind.from_pretrained(source, dtype=precision, use_safetensors=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_why(name, source, error)) from error
    return Loaded(name, Backbone(model.to(place).eval(), lean=lean), processor)


def pick_device(device: str | None) -> torch.device:
    """The device asked for, or a GPU where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise OptionError(f"device {device!r} is not available here; try --device cpu") from error
    return place


def check_pair(target: Loaded, draft: Loaded) -> None:
    """Raises ModelError, naming the first difference, unless both read and write the same ids.

    Vocabularies may be padded differently; the tokens themselves must agree one by one.
    """
    mine, theirs = _tokens(target.tokenizer), _tokens(draft.tokenizer)
    for number in sorted(mine.keys() | theirs.keys()):
        if mine.get(number) != theirs.get(number):
            raise ModelError(
                f"{draft.name} cannot draft for {target.name}: their tokenizers differ at id "
                f"{number} ({theirs.get(number)!r} against {mine.get(number)!r}); "
                "choose a draft of the same family"
            )


def ask(
    loaded: Loaded,
    question: str,
    *,
    clips: Sequence[Clip] = (),
    images: Sequence[np.ndarray] = (),
    history: Sequence[tuple[str, str]] = (),
) -> Inputs:
    """What the processor makes of videos, images and a question (after earlier turns, if any)."""
    media = [{"type": "video"} for _ in clips] + [{"type": "image"} for _ in images]
    turns: list[dict[str, Any]] = []
    for asked, answered in history:
        turns.append({"role": "user", "content": [{"type": "text", "text": asked}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answered}]})
    turns.append({"role": "user", "content": [{"type": "text", "text": question}]})
    turns[0]["content"] = [*media, *turns[0]["content"]]
    if not getattr(loaded.processor, "chat_template", None):
        raise ModelError(f"{loaded.name} has no chat template, so questions cannot be put to it")
    text_only = loaded.processor is loaded.tokenizer
    if text_only and media:
        raise ModelError(f"{loaded.name} reads text only; give a vision-language --target")
    if text_only:
        for turn in turns:
            turn["content"] = turn["content"][0]["text"]
    text = loaded.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    if text_only:
        return loaded.processor(text, return_tensors="pt", add_special_tokens=False)
    seen: dict[str, Any] = {}
    if clips:
        seen["videos"] = [clip.frames for clip in clips]
        seen["video_metadata"] = [clip.metadata for clip in clips]
        seen["do_sample_frames"] = False
    if images:
        seen["images"] = list(images)
    return loaded.processor(text=[text], return_tensors="pt", **seen)


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def check_folder(name: str, source: str) -> None:
    """Says what a local folder lacks before transformers tries to find it elsewhere."""
    folder = Path(source)
    looks_local = source.startswith((".", "/", "~")) or folder.exists() or source.count("/") > 1
    if not looks_local:
        return
    if not folder.is_dir():
        raise ModelError(f"no checkpoint folder at {name}; give a folder or a hub id")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name} has no config.json, so it is not a checkpoint folder")
    if not any(folder.glob("*.safetensors")):
        raise ModelError(f"{name} holds no *.safetensors weights; save the model there first")


def _why(name: str, source: str, error: Exception) -> str:
    if Path(source).is_dir():
        first = str(error).strip().split("\n")[0].rstrip(".")
        return f"the checkpoint in {name} cannot be loaded: {first}"
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    where = "the local cache (HF_HUB_OFFLINE is set)" if offline else "the hub and the local cache"
    return f"cannot find or load model {name!r}: looked in {where}; a checkpoint folder works too"
