"""Assembles a draft from an existing language model and vision tower, for ``saccade train-draft``.

The draft is a model of the target's own class (LLaVA's). Its language model and its vision tower
have the weights of the existing ones. Only the projector between them is new, and has to be
trained. TABED's drafts are made in this way, from LLaMA-68M and CLIP.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from saccade.core.errors import ModelError, first_line
from saccade.inputs.checkpoints import must_use_cache, source_of
from saccade.inputs.loading import Loaded, load, read_config
from saccade.inputs.pair_check import check_tokenizers
from saccade.model.backbone import Backbone


def assemble_draft(target: Loaded, language: str, tower: str | None, seed: int) -> Loaded:
    """Returns an untrained draft of the target's class.

    ``language`` is the folder or hub id of a language model, and ``tower`` the folder or hub id of
    a vision tower, or None for the target's own.

    Raises ModelError where the target is not of LLaVA's form, where a checkpoint cannot be loaded,
    where the tokenizers differ, or where the tower takes pictures or patches of another size than
    the target's.
    """
    target_model: Any = target.backbone.model
    if "vision_tower" not in dict(target_model.base_model.named_children()):
        raise ModelError(
            f"a draft is put together in LLaVA's form, and {target.name} is a "
            f"{target_model.config.model_type}: give --draft, a checkpoint of its family to "
            "start from"
        )
    # The config is the target's, with the sizes of the language model and of the tower.
    language_source = load(language, dtype="float32", fused=False)
    check_tokenizers(target.name, target.tokenizer, language, language_source.tokenizer)
    language_model: Any = language_source.backbone.model
    config = deepcopy(target_model.config)
    config.text_config = deepcopy(language_model.config)
    config.text_config.vocab_size = vocab = target.backbone.vocab
    config.tie_word_embeddings = language_model.config.tie_word_embeddings
    if tower is not None:
        config.vision_config = _tower_config(tower, target)
    # What is not loaded below, such as the projector, keeps the random weights of this seed.
    torch.manual_seed(seed)
    model: Any = type(target_model)(config).float().train()
    vision_tower, source_tower = model.base_model.vision_tower, target_model.base_model.vision_tower
    if tower is not None:
        source_tower = _read_tower(tower, type(vision_tower))
    vision_tower.load_state_dict(source_tower.state_dict())
    # The draft has a row for each id of the target, of which the language model may have fewer.
    weights = language_model.get_decoder().state_dict()
    weights["embed_tokens.weight"] = _resize_embedding(weights["embed_tokens.weight"], vocab)
    model.get_decoder().load_state_dict(weights)
    output_weight = language_model.get_output_embeddings().weight.detach()
    model.get_output_embeddings().load_state_dict(
        {"weight": _resize_embedding(output_weight, vocab)}
    )
    model.generation_config = target_model.generation_config
    name = f"{language} behind {tower or 'the tower of ' + target.name}"
    return Loaded(name, Backbone(model, fused=False), target.processor)


def _resize_embedding(weight: Tensor, rows: int) -> Tensor:
    """Returns an embedding cut or extended to ``rows`` tokens. A new token gets the mean of the
    others."""
    added = weight.mean(0, keepdim=True).expand(max(0, rows - len(weight)), -1)
    return torch.cat([weight[:rows], added])


def _tower_config(tower: str, target: Loaded) -> Any:
    """Returns the config of a vision tower, which may be a part of a model that reads text too.

    Raises ModelError unless its pictures and patches have the sizes of the target's own tower.
    """
    config = read_config(tower)
    if "vision_config" in config.to_dict():
        config = config.vision_config
    sizes = _sizes(config)
    for quantity, expected in _sizes(target.backbone.model.config.vision_config).items():
        tower_size = sizes[quantity]
        if tower_size != expected:
            raise ModelError(
                f"the tower {tower} sees {quantity} of {tower_size} pixels, and {target.name} "
                f"prepares {expected}: choose a tower like the target's, or leave --tower out for "
                "its own"
            )
    return config


def _sizes(vision_config: Any) -> dict[str, Any]:
    """Returns the sizes of a tower's pictures and patches, in pixels."""
    fields = vision_config.to_dict()
    return {"pictures": fields.get("image_size"), "patches": fields.get("patch_size")}


def _read_tower(tower: str, kind: Any) -> Any:
    """Loads a tower, and raises ModelError unless every one of its weights is there."""
    source = source_of(tower)
    local = must_use_cache(name=tower, source=source)
    options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": local}
    try:
        model, loading_info = kind.from_pretrained(source, output_loading_info=True, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"the tower {tower} cannot be loaded: {first_line(error)}") from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ModelError(f"the tower {tower} lacks {missing[0]}: it is no {kind.__name__}")
    return model
