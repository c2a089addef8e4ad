"""How published checkpoints name the tensors of a draft head, and what our modules call them.

Some targets bring a head in their own checkpoint, for multi-token prediction (MTP). It is stored as
``mtp.*`` (Qwen3-Next, Qwen3.5) or as the layer after the last one (``model.layers.N.eh_proj``:
DeepSeek-V3, GLM-4.5, GLM-4.6V).

EAGLE-3 and DFlash heads are checkpoints of their own, with names that depend on the library that
saved them. The decoder layer of an EAGLE-3 head is ``midlayer.*`` with AngelSlim and SpecForge, and
``layers.0.*`` with speculators. In a DFlash head, the modules that read the target's hidden states
are ``encoder.*`` with transformers' own class (``MuseGlimmerAssistantModel``), and ``fc.*`` and
``hidden_norm.*`` with z-lab and speculators.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Shaped
from torch import Tensor

from saccade.core.errors import ModelError

Tensors = Mapping[str, Shaped[Tensor, "..."]]

LAYER = "layer."
"""The prefix of the decoder layer's tensors in the names of our modules, ``MtpHead`` and
``Eagle3Head``."""


@dataclass(frozen=True)
class MtpLayout:
    """How a target's own checkpoint names the tensors of its head.

    A tensor has three names. For example, ``mtp.pre_fc_norm_hidden.weight`` in a checkpoint is
    ``pre_fc_norm_hidden.weight`` within the head, and ``norm_hidden.weight`` in our module
    (:class:`saccade.model.heads.modules.MtpHead`).

    ``pattern`` matches the names in the checkpoint, with ``{depth}`` for the number of the target's
    layers; its group is the name within the head. ``names`` has the name within the head for each
    name in our module, other than the decoder layer's. Tensors whose names within the head begin
    with one of ``shared`` are copies of the target's.
    """

    pattern: str
    names: Mapping[str, str]
    layer: str  # the prefix of the decoder layer's tensors in their names within the head
    shared: tuple[str, ...] = ()
    next_step_reads_normed: bool = True
    """Whether the head's next step reads the output of its last norm. Otherwise it reads that
    norm's input."""
    zeroes_first_embedding: bool = False
    """Whether the embedding in the row at position 0 is zero, as DeepSeek-V3 trained it."""

    def find(self, names: Collection[str], depth: int) -> dict[str, str]:
        """Returns the names that the head's tensors have in a checkpoint, by their names within the
        head. ``names`` are those of all tensors."""
        pattern = re.compile(self.pattern.replace("{depth}", str(depth)))
        matches = {name: pattern.match(name) for name in names}
        return {match[1]: name for name, match in matches.items() if match is not None}

    def parts(self, tensors: Tensors) -> dict[str, Tensor]:
        """Returns the tensors by the names of :class:`saccade.model.heads.modules.MtpHead`.

        ``tensors`` are by their names within the head. Those of ``names`` and of the decoder layer
        are returned, except for copies of the target's. Raises ModelError where one of ``names`` is
        missing.
        """
        parts = {}
        for part, name in self.names.items():
            if name not in tensors:
                raise ModelError(f"the checkpoint's own head lacks {name}")
            parts[part] = tensors[name]
        others = tensors.keys() - {*self.names.values()}
        for name in others:
            if name.startswith(self.layer) and not name.startswith(self.shared):
                parts[LAYER + name.removeprefix(self.layer)] = tensors[name]
        return parts


MTP_LAYOUTS: tuple[MtpLayout, ...] = (
    MtpLayout(
        pattern=r"(?:model\.)?mtp\.(.*)",
        names={
            "fc.weight": "fc.weight",
            "norm_embedding.weight": "pre_fc_norm_embedding.weight",
            "norm_hidden.weight": "pre_fc_norm_hidden.weight",
            "norm.weight": "norm.weight",
        },
        layer="layers.0.",
    ),
    MtpLayout(
        pattern=r"(?:language_model\.)?model\.(?:language_model\.)?layers\.{depth}\.(.*)",
        names={
            "fc.weight": "eh_proj.weight",
            "norm_embedding.weight": "enorm.weight",
            "norm_hidden.weight": "hnorm.weight",
            "norm.weight": "shared_head.norm.weight",
        },
        layer="",  # The head is itself a layer, so its decoder layer's names have no prefix.
        shared=("shared_head.head.", "embed_tokens."),
        next_step_reads_normed=False,
        zeroes_first_embedding=True,
    ),
)


def find_mtp_layout(names: Collection[str], depth: int) -> tuple[MtpLayout, dict[str, str]] | None:
    """Returns the layout of the head in a checkpoint with these names, and what its
    :meth:`MtpLayout.find` returns; None where the checkpoint has no head."""
    for layout in MTP_LAYOUTS:
        head_names = layout.find(names, depth)
        if layout.names["fc.weight"] in head_names:
            return layout, head_names
    return None


_MAX_MTP_HEADS = 8  # At most this many layers after the target's are taken for heads.


def is_mtp_tensor(name: str, depth: int) -> bool:
    """Returns whether a tensor belongs to one of the checkpoint's own heads.

    A checkpoint may have several heads, in the layers ``depth``, ``depth + 1`` and so on after the
    target's. Saccade drafts with the first one alone.
    """
    patterns = (layout.pattern for layout in MTP_LAYOUTS)
    head_layers = "|".join(str(depth + head) for head in range(_MAX_MTP_HEADS))
    return any(re.match(each.replace("{depth}", f"(?:{head_layers})"), name) for each in patterns)


_STACKED_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""For each matrix that holds all experts: the matrices of a single expert that are joined in it."""


def stack_experts(tensors: dict[str, Tensor], names: Collection[str]) -> dict[str, Tensor]:
    """Returns the tensors of a module, after stacking the weights of single experts for each
    parameter that holds all experts. ``names`` are the names of the module's parameters.

    For example, checkpoints have ``experts.3.gate_proj.weight`` and ``experts.3.up_proj.weight``
    for each expert. Layers of transformers have one ``experts.gate_up_proj`` for all of them
    [expert, gate and up, dim].
    """
    stacked = dict(tensors)
    for name in names:
        base, _, matrix = name.rpartition(".")
        parts = _STACKED_MATRICES.get(matrix)
        if name in tensors or not base.endswith("experts") or parts is None:
            continue
        experts: list[Tensor] = []
        while all(f"{base}.{len(experts)}.{part}.weight" in stacked for part in parts):
            each = [stacked.pop(f"{base}.{len(experts)}.{part}.weight") for part in parts]
            experts.append(torch.cat(each))
        if experts:
            stacked[name] = torch.stack(experts)
    return stacked


# This is searched for in the config of a head's checkpoint: in the names of its architectures and
# in its ``speculators_model_type``. So is DFLASH_ARCHITECTURES.
EAGLE3_ARCHITECTURES = re.compile("eagle3", re.IGNORECASE)
EAGLE3_LAYER = re.compile(r"^(?:model\.)?(?:midlayer|layers\.0)\.")
# ``t2d`` says which of the target's ids the head knows, which follows from ``d2t``. ``verifier_*``
# are the target's own tensors: speculators calls the target the verifier.
IGNORED_HEAD_TENSORS = re.compile(r"^(?:model\.)?(?:t2d$|verifier_|rotary_emb\.)")


def eagle3_parts(tensors: Tensors) -> dict[str, Tensor]:
    """Returns the tensors of an EAGLE-3 head by the names of
    :class:`saccade.model.heads.modules.Eagle3Head`, whoever saved it."""
    parts = {}
    for name, tensor in tensors.items():
        if IGNORED_HEAD_TENSORS.match(name):
            continue
        parts[EAGLE3_LAYER.sub(LAYER, name).removeprefix("model.")] = tensor
    return parts


DFLASH_ARCHITECTURES = re.compile("dflash|museglimmerassistant", re.IGNORECASE)
DFLASH_RENAMED = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


def dflash_parts(tensors: Tensors) -> dict[str, Tensor]:
    """Returns the tensors of a DFlash head by the names of
    :class:`saccade.model.heads.dflash.BlockModule`, whoever saved it."""
    parts = {}
    for name, tensor in tensors.items():
        if IGNORED_HEAD_TENSORS.match(name):
            continue
        module_name = name.removeprefix("model.")
        for old, new in DFLASH_RENAMED.items():
            module_name = module_name.replace(old, new)
        parts[module_name] = tensor
    return parts


def add_id_map(parts: dict[str, Tensor], target_vocab: int, name: str) -> None:
    """Makes sure that the parts of a head have a valid ``d2t``, the map from its ids to the
    target's.

    ``d2t`` holds differences: the head's id i is the target's id ``i + d2t[i]``. A head without it
    has the target's ids, so it gets zeros. Raises ModelError where such a head has another number
    of ids than the target, and where ``d2t`` does not lead from each id to one of the target's.
    """
    draft_vocab = parts["lm_head.weight"].shape[0]
    if "d2t" not in parts:
        if draft_vocab != target_vocab:
            raise ModelError(
                f"{name} has {draft_vocab} ids of its own and no d2t that says which of the "
                f"target's {target_vocab} they are"
            )
        parts["d2t"] = torch.zeros(draft_vocab, dtype=torch.long)
    parts["d2t"] = parts["d2t"].long()
    if parts["d2t"].shape != (draft_vocab,):
        raise ModelError(
            f"{name} has {draft_vocab} ids of its own, and its d2t has the shape "
            f"{tuple(parts['d2t'].shape)}: it needs one number for each id"
        )
    target_ids = parts["d2t"] + torch.arange(draft_vocab)
    if int(target_ids.min()) < 0 or int(target_ids.max()) >= target_vocab:
        raise ModelError(f"{name} drafts ids that the target, of {target_vocab} ids, does not have")
