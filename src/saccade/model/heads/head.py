"""A draft head in the form of a draft model, and the functions that make EAGLE-3 and MTP heads.

A draft head is a small module that drafts from the target's hidden states. It has a decoder layer
of its own, and may have embeddings and an output matrix. What it lacks, such as a vision tower, is
the target's. An EAGLE-3 head is a checkpoint of its own. An MTP head (multi-token prediction) is
part of the target's checkpoint. DFlash heads, which have several layers, are in ``dflash``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from saccade.core.errors import ModelError
from saccade.core.prompt import Prompt
from saccade.model.attention import Step, quickest_attention
from saccade.model.backbone import ATTENTION_NAME, Backbone
from saccade.model.cache import HeadShape
from saccade.model.heads import layouts
from saccade.model.heads.modules import Eagle3Head, Hidden, MtpHead, Rotation
from saccade.model.kernels.few_bits import Rounding
from saccade.model.segments import Segment

EAGLE3_HIDDEN_STATES = 3  # How many of the target's hidden states an EAGLE-3 head reads.


class HeadConfig(LlamaConfig):
    """The config of an EAGLE-3 head's layer.

    Its ``rope_parameters`` may have the entries of M-RoPE, about which transformers would warn in
    the config of a Llama.
    """

    ignore_keys_at_rope_validation = {"mrope_section", "mrope_interleaved"}


class Head(Backbone):
    """A draft head over a loaded target.

    It differs from the target's :class:`Backbone` in the decoder, which is the head's one layer
    (:meth:`step`), and in :meth:`logits`. Its requests are in a
    :class:`saccade.model.heads.head_session.HeadSession`, which gives each row the target's hidden
    state as well as an embedding.
    """

    drafts_blocks = False
    """Whether one forward drafts several tokens, each without knowing the others."""

    def __init__(
        self,
        target: Backbone,
        module: Any,
        config: Any,
        rotary: Any,
        axes: int,
        template_layer: int | None = None,
    ) -> None:
        """Makes a head over ``target``.

        Args:
            module: a :class:`~saccade.model.heads.modules.HeadModule`, or a DFlash head's layers.
            config: the config of the head's layer.
            rotary: the rotary embedding of the head's layers.
            axes: how many position numbers of a token ``rotary`` reads: three for M-RoPE (time,
                height, width), else one.
            template_layer: the number of the target's layer whose shape the head's layer has. None
                where ``config`` has the shape.
        """
        if target.shares.count > 1:
            raise ModelError(
                "a target that is split over processes cannot be drafted for by a head"
            )
        # A head shares with its target whatever is not replaced below.
        vars(self).update(vars(target))
        self.target, self.module = target, module
        self._newest_head: Head | None = None  # Made when the target was changed.
        self.config = config
        self.hidden_layers = module.hidden_layers
        self.axes = axes
        self.text: Any = SimpleNamespace(layers=module, rotary_emb=rotary)
        # The rest replaces what describes the layers of the target, or was made for them: recurrent
        # layers (``mixers``), windows, the fused decoder, kernels, stored prefixes, and captured
        # forwards.
        self.layer_count = self.key_layer_count = 1
        self.mixers = {}
        self.windows = []
        self.fused = self.few_row_kernels = None
        self.prefix_cache = None
        self.graphs = {}
        self.device = next(module.parameters()).device
        self.devices = [self.device]
        self._template_layer = template_layer
        # ``key_layers`` maps a layer's number to its place among the layers that have keys. A layer
        # gives the attention the number that it was constructed with. For the head's only layer,
        # that is the number of its template, or 0 without a template, and its place is 0.
        layer_number = 0 if template_layer is None else template_layer
        self.key_layers = {layer_number: 0}
        if template_layer is None:
            self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
            self.head_dim = config.head_dim
            self.head_shapes = [HeadShape(self.kv_heads, self.head_dim, self.head_dim)]
            self.has_uneven_heads = False
        else:
            template_place = target.key_layers[template_layer]
            self.head_shapes = [target.head_shapes[template_place]]
            self.windows = [target.windows[template_place]] if target.windows else []
        self.attention_choice = quickest_attention(
            self.heads, self.kv_heads, self.head_dim, self.devices, self.dtype
        )

    def current(self) -> Head:
        """Returns the head over the target's newest version.

        After the target's model was changed, its newest version is another object, and another head
        is returned. Otherwise this head itself is returned.
        """
        target = self.target.current()
        if target is self.target:
            return self
        if self._newest_head is None or self._newest_head.target is not target:
            self._newest_head = self._copy_for_target(target)
        return self._newest_head

    def _copy_for_target(self, target: Backbone) -> Head:
        """Returns a head with the same weights over another target."""
        rotary = self.text.rotary_emb
        return Head(target, self.module, self.config, rotary, self.axes, self._template_layer)

    def embed(self, ids: Any) -> Float[Tensor, "... dim"]:
        if self.module.embed_tokens is None:
            return self.target.embed(ids).to(self.device)
        return self.module.embed_tokens(torch.as_tensor(ids, device=self.device))

    def embed_next(self, prompt: Prompt, rows: Int[Tensor, " row"]) -> Hidden:
        """Returns the embedding of the token after each of these rows of a whole prompt.

        A picture's token is embedded as its row from the vision tower or as its placeholder,
        whichever the head reads (``HeadModule.reads_media_rows``).
        """
        if self.module.reads_media_rows:
            return prompt.embeds[rows + 1].to(self.device)
        return self.embed(prompt.full_ids[rows + 1])

    def shares_rows_with(self, target: Backbone) -> bool:
        return self.target.shares_rows_with(target)

    def shares_vision_with(self, target: Backbone) -> bool:
        return self.target.shares_vision_with(target)

    def rounded(self, rounding: Rounding) -> Backbone:
        """Raises ModelError, because only the weights of a draft model can be rounded."""
        raise ModelError(
            f"draft_quantize={rounding.name} rounds draft models, and this draft is a head: leave "
            "draft_quantize out, or name another draft"
        )

    @property
    def weight_bytes_per_step(self) -> float:
        """The bytes of weights that a step reads."""
        parameter_counts = {name: each.numel() for name, each in self.module.named_parameters()}
        layer_weights = sum(
            count
            for name, count in parameter_counts.items()
            if not name.startswith("embed_tokens.")
        )
        has_own_logits = "lm_head.weight" in parameter_counts
        weights = layer_weights if has_own_logits else layer_weights + self.target.head_weights
        return weights * self.dtype.itemsize

    def rotation(self, rows: Hidden, positions: Int[Tensor, "axes row"]) -> Rotation:
        """Returns the cosines and sines that rotate rows at these positions, on the head's axes."""
        # Rotary embeddings take positions as [axes, batch, row], or as [batch, row] where they read
        # one axis. The batch has one entry, so [1 axis, row] serves as [1 entry, row].
        shaped = positions[:, None] if self.axes > 1 else positions
        rotation: Rotation = self.text.rotary_emb(rows[None], shaped)
        return rotation

    @torch.no_grad()
    def step(
        self,
        embeds: Hidden,
        hidden: Hidden,
        positions: Int[Tensor, "axes row"],
        segments: list[Segment],
    ) -> Hidden:
        """Runs the head's layer on rows of several requests, writes the rows' keys, and returns the
        layer's output.

        Args:
            embeds: the embedding of the token after each row.
            hidden: the hidden state that each row reads. A row of text reads the target's,
                projected to the head's width. The row of a drafted token reads the head's output in
                its parent's row.
            positions: the position of each row, as the target counts them.
            segments: the rows of each request.
        """
        own_positions = positions[: self.axes].to(self.device)
        rotation = self.rotation(embeds, own_positions)
        attend = Step(
            segments,
            self.heads // self.kv_heads,
            self.dtype,
            self.attention_choice,
            self.key_layers,
            self.windows,
            self.has_uneven_heads,
        )
        return self.module(embeds, hidden, rotation, own_positions, saccade_step=attend)

    @torch.no_grad()
    def logits(self, hidden: Hidden) -> Float[Tensor, "rows vocab"]:
        """Returns logits over the target's vocabulary from the output of :meth:`step`."""
        prepared = self.module.prepare_logits(hidden)
        own_logits = self.module.own_logits(prepared)
        return self.target.logits(prepared) if own_logits is None else own_logits


def for_our_attention(config: Any) -> Any:
    """Returns a copy of a config that makes layers call Saccade's attention."""
    our_config = deepcopy(config)
    our_config._attn_implementation = ATTENTION_NAME
    return our_config


def fill_module(module: nn.Module, parts: dict[str, Tensor], target: Backbone, name: str) -> None:
    """Loads tensors into a module that was made on the meta device.

    ``parts`` are the tensors by the names that they have in the module. ``name`` is the
    checkpoint's, for errors. Raises ModelError where names or shapes do not match, or where a
    tensor holds NaN or infinity.
    """
    expected = module.state_dict()
    parts = layouts.stack_experts(parts, expected.keys())
    common = expected.keys() & parts.keys()
    reshaped = {key for key in common if expected[key].shape != parts[key].shape}
    for problem, names in (
        ("lacks", expected.keys() - parts.keys()),
        ("has tensors that such a head does not use", parts.keys() - expected.keys()),
        ("has in another shape", reshaped),
    ):
        if names:
            raise ModelError(f"the head of {name} {problem}: {', '.join(sorted(names)[:3])}")
    device = target.devices[-1] if target.devices else target.device
    placed = {
        key: each.to(device, target.dtype if each.is_floating_point() else each.dtype)
        for key, each in parts.items()
    }
    for key, each in placed.items():
        if each.is_floating_point() and not bool(each.isfinite().all()):
            raise ModelError(f"the head of {name} holds NaN or infinity in {key}")
    module.load_state_dict(placed, assign=True)
    module.eval().requires_grad_(False)


def make_mtp_head(
    target: Backbone, layout: layouts.MtpLayout, tensors: layouts.Tensors, name: str
) -> Head:
    """Returns the multi-token-prediction (MTP) head that is stored in a target's own checkpoint.

    Its decoder layer has the class of the target's last layer that has keys. Raises ModelError
    where the tensors do not make such a head.
    """
    if not target.key_layers:
        raise ModelError(f"{name} has no attention layer, so its own head cannot be made")
    number = max(target.key_layers)
    layer = target.text.layers[number]
    config = for_our_attention(target.config)
    # The head's norms have the class of this layer's norms.
    norms = [each for key, each in layer.named_children() if "norm" in key]
    with torch.device("meta"):
        kind: Any = type(layer)
        module = MtpHead(
            kind(config, number),
            type(norms[0]),
            config,
            next_step_reads_normed=layout.next_step_reads_normed,
            zeroes_first_embedding=layout.zeroes_first_embedding,
        )
    fill_module(module, layout.parts(tensors), target, name)
    return Head(target, module, config, target.text.rotary_emb, target.axes, template_layer=number)


def make_eagle3_head(
    target: Backbone, settings: dict[str, Any], tensors: layouts.Tensors, name: str
) -> Head:
    """Returns the EAGLE-3 head with this config (``settings``) and these tensors.

    Raises ModelError if they make no such head, or if it was made for another target.
    """
    config = eagle3_config(settings)
    parts = layouts.eagle3_parts(tensors)
    for needed in ("fc.weight", "lm_head.weight", "norm.weight"):
        if needed not in parts:
            raise ModelError(f"{name} is no EAGLE-3 head: it lacks {needed}")
    check_target(target, settings, name)
    layouts.add_id_map(parts, target.vocab, name)
    draft_vocab = len(parts["d2t"])
    target_dim = target.config.hidden_size
    hidden_layers = _eagle3_layers(target, settings)
    check_layers(target, hidden_layers, parts["fc.weight"], name)
    embeddings = parts.get("embed_tokens.weight")
    if embeddings is None and config.hidden_size != target_dim:
        raise ModelError(f"{name} lacks embeddings, and the target's have another width")
    config.attention_bias = f"{layouts.LAYER}self_attn.o_proj.bias" in parts
    with torch.device("meta"):
        module = Eagle3Head(
            config,
            hidden_layers,
            target_dim,
            target.vocab,
            draft_vocab,
            embedding_count=None if embeddings is None else len(embeddings),
            has_qk_norm=f"{layouts.LAYER}self_attn.q_norm.weight" in parts,
            norm_before_residual=bool(settings.get("norm_before_residual")),
        )
    fill_module(module, parts, target, name)
    rotary, axes = make_rotary(target, config)
    return Head(target, module, config, rotary.to(next(module.parameters()).device), axes)


def eagle3_config(settings: dict[str, Any]) -> LlamaConfig:
    """Returns the config of an EAGLE-3 head's layer, from the entries of the head's config.json.

    They are those of ``transformer_layer_config`` in a config of speculators, else of the config
    itself.
    """
    layer_settings = settings.get("transformer_layer_config") or settings
    config: LlamaConfig = for_our_attention(HeadConfig.from_dict(plain_settings(layer_settings)))
    return config


def make_rotary(target: Backbone, config: LlamaConfig) -> tuple[Any, int]:
    """Returns a head's rotary embedding, and how many axes of positions it reads.

    If the target's positions have several axes, and the head's config divides the rotation among
    them (``mrope_section``), the embedding is of the target's class and reads all of them.
    Otherwise it is Llama's and reads the first axis alone.
    """
    rope = config.rope_parameters or {}
    has_sections = target.axes > 1 and bool(rope.get("mrope_section"))
    kind: Any = type(target.text.rotary_emb) if has_sections else LlamaRotaryEmbedding
    return kind(config=config), target.axes if has_sections else 1


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a head's config entries as those of a Llama, whatever architecture they name.

    The configs of Llama and Qwen3 know no rotation of the type "mrope". It becomes "default", as in
    transformers' own config of Qwen2-VL, and keeps its ``mrope_section``.
    """
    plain = {key: value for key, value in settings.items() if key not in ("model_type", "dtype")}
    for key in ("rope_scaling", "rope_parameters"):
        rope = plain.get(key)
        if rope and (rope.get("rope_type") or rope.get("type")) == "mrope":
            plain[key] = {**rope, "rope_type": "default", "type": "default"}
    return plain


def _eagle3_layers(target: Backbone, settings: dict[str, Any]) -> tuple[int, ...]:
    """Returns which hidden states an EAGLE-3 head reads, by the numbers of ``HiddenStates``: number
    n is the input of layer n.

    The configs of vLLM and speculators name, at the top level, the layers whose *input* the head
    reads. Those of SGLang and SpecForge name, in ``eagle_config``, the layers whose *output* it
    reads, and the output of layer n is number n + 1. If a config has neither, the head reads the
    inputs of layers 2, depth / 2 and depth - 3, which is the default of all four.
    """
    if layers_by_input := settings.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(layer) for layer in layers_by_input)
    nested = settings.get("eagle_config") or {}
    if layers_by_output := nested.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(int(layer) + 1 for layer in layers_by_output)
    return (2, target.layer_count // 2, max(0, target.layer_count - 3))


def check_target(target: Backbone, settings: Mapping[str, Any], name: str) -> None:
    """Raises ModelError where a head's config declares another target than this one."""
    if (problem := describe_other_target(settings, target.model.config, name)) is not None:
        raise ModelError(problem)


def check_layers(
    target: Backbone, hidden_layers: Sequence[int], fc: Tensor | None, name: str
) -> None:
    """Raises ModelError where the target does not have the hidden states that a head reads.

    ``fc`` is the head's first matrix, [dim, layers * target_dim], which reads the hidden states of
    all ``hidden_layers`` side by side. The target may lack one of these layers, or its hidden
    states side by side may have another width than ``fc`` reads.
    """
    if any(not 0 <= each <= target.layer_count for each in hidden_layers):
        raise ModelError(
            f"{name} is a head for a deeper target: it reads layers {tuple(hidden_layers)}, and "
            f"the target has {target.layer_count}"
        )
    if fc is None:
        raise ModelError(f"the head of {name} lacks fc.weight")
    read_width = fc.shape[1]
    target_width = len(hidden_layers) * target.config.hidden_size
    if read_width != target_width:
        raise ModelError(
            f"{name} is a head for another target: it reads {read_width} numbers of hidden states "
            f"a token, and {len(hidden_layers)} layers of this one have {target_width}"
        )


def describe_other_target(settings: Mapping[str, Any], config: Any, name: str) -> str | None:
    """Returns the sentence of an error if a head's config declares another target; None if not.

    ``settings`` are the entries of the head's config.json, and ``config`` is the target's config.
    """
    text = config.get_text_config(decoder=True)
    declared_type = settings.get("target_model_type")
    verifier = (settings.get("speculators_config") or {}).get("verifier") or {}
    declared_classes = verifier.get("architectures") or []
    # A target whose config names no class is not compared by class.
    target_classes = config.architectures or declared_classes
    declared_dim = settings.get("target_hidden_size")
    declared_depth = settings.get("num_target_layers")
    declared_target = None
    if declared_type not in (None, config.model_type, text.model_type):
        declared_target = declared_type
    elif not set(declared_classes).issubset(target_classes):
        declared_target = ", ".join(declared_classes)
    elif declared_dim not in (None, text.hidden_size):
        declared_target = f"a model with hidden states of {declared_dim}"
    elif declared_depth not in (None, text.num_hidden_layers):
        declared_target = f"a model of {declared_depth} layers"
    if declared_target is None:
        return None
    return (
        f"{name} is a head for {declared_target}, and the target is a {config.model_type} of "
        f"{text.num_hidden_layers} layers with hidden states of {text.hidden_size}: choose a head "
        "that was made for it"
    )
