"""A draft put together from a language model and a vision tower that exist already, as TABED's are
from LLaMA-68M and CLIP: the target's own class around smaller parts. Only the projector is new.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import ModelError, first_line
from saccade.inputs.checkpoints import cached_only
from saccade.inputs.loading import Loaded, check_tokenizers, load, read_config
from saccade.model.backbone import Backbone


def assembled(target: Loaded, language: str, tower: str | None, seed: int) -> Loaded:
    """An untrained draft of the target's class: a language model by folder or hub id, and a vision
    tower likewise, or the target's own where none is named.

    Raises ModelError where the target is not of LLaVA's form, where the tokenizers differ, or where
    the tower sees other pictures than the target's processor prepares.
    """
    whole: Any = target.backbone.model
    if "vision_tower" not in dict(whole.base_model.named_children()):
        raise ModelError(
            f"a draft is put together in LLaVA's form, and {target.name} is a "
            f"{whole.config.model_type}: give --draft, a checkpoint of its family to start from"
        )
    text = load(language, dtype="float32", fused=False)
    check_tokenizers(target.name, target.tokenizer, language, text.tokenizer)
    small: Any = text.backbone.model
    config = deepcopy(whole.config)
    config.text_config = deepcopy(small.config)
    config.text_config.vocab_size = rows = target.backbone.vocab
    config.tie_word_embeddings = small.config.tie_word_embeddings
    if tower is not None:
        config.vision_config = _tower_config(tower, target)
    torch.manual_seed(seed)
    model: Any = type(whole)(config).float().train()
    seeing, theirs = model.base_model.vision_tower, whole.base_model.vision_tower
    if tower is not None:
        theirs = _read_tower(tower, type(seeing))
    seeing.load_state_dict(theirs.state_dict())
    ours = small.get_decoder().state_dict()
    ours |= {"embed_tokens.weight": _padded(ours["embed_tokens.weight"], rows)}
    model.get_decoder().load_state_dict(ours)
    said = small.get_output_embeddings().weight.detach()
    model.get_output_embeddings().load_state_dict({"weight": _padded(said, rows)})
    model.generation_config = whole.generation_config
    name = f"{language} behind {tower or 'the tower of ' + target.name}"
    return Loaded(name, Backbone(model, fused=False), target.processor)


def _padded(weight: Tensor, rows: int) -> Tensor:
    """The embedding of so many tokens: one that is new is the mean of those that were known."""
    new = weight.mean(0, keepdim=True).expand(max(0, rows - len(weight)), -1)
    return torch.cat([weight[:rows], new])


def _tower_config(tower: str, target: Loaded) -> Any:
    """The configuration of a tower, alone or within a model that reads text too."""
    found = read_config(tower)
    if "vision_config" in found.to_dict():
        found = found.vision_config
    pairs = zip(*map(_seen, (found, target.backbone.model.config.vision_config)), strict=True)
    for what, (here, there) in zip(("pictures", "patches"), pairs, strict=True):
        if here != there:
            raise ModelError(
                f"the tower {tower} sees {what} of {here} pixels, and {target.name} prepares "
                f"{there}: choose a tower like the target's, or leave --tower out for its own"
            )
    return found


def _seen(vision: Any) -> tuple[Any, Any]:
    told = vision.to_dict()
    return told.get("image_size"), told.get("patch_size")


def _read_tower(tower: str, kind: Any) -> Any:
    """A tower with every one of its weights."""
    local = cached_only(tower, tower)
    how = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": local}
    try:
        model, told = kind.from_pretrained(tower, output_loading_info=True, **how)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tower {tower} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(told["missing_keys"]):
        raise ModelError(f"the tower {tower} lacks {missing[0]}: it is no {kind.__name__}")
    return model
