"""The fused decoder: a language model written out beside Hugging Face's modules, on their weights.

Fused projections and no module overhead; laws equal the modules' to rounding (tests hold 1e-5).
Covers decoders made of RMSNorm, grouped attention with rotary positions (queries and keys normed or
not) and a gated SiLU MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.activations import SiLUActivation

from saccade.model import memory
from saccade.model.attention import Attend
from saccade.model.fidelity import is_from_library, settings, unusual_changes
from saccade.model.kernels import Matrix, Quickest, Use
from saccade.model.kernels.few_rows import FewRowAttention

# Text models known to be exactly this decoder.
KNOWN = (
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen2_5_omni_text", "qwen3_vl_text",
    "qwen2", "qwen3", "llama", "mistral",
)  # fmt: skip
TABLE = 4096  # rows of the rotary table to begin with


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, fused by rows."""

    norm_in: Tensor
    qkv: Matrix
    norm_qk: tuple[Tensor, Tensor] | None  # of every query head, of every key head
    out: Matrix
    norm_mlp: Tensor
    gated: Matrix  # the gate and what it lets through
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out, self.gated, self.down


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight. On a CPU in fp32, in as few passes as torch allows."""

    def __init__(self, dim: int, eps: float, like: Tensor) -> None:
        self._dim, self._eps = dim, float(eps)
        self._slim = like.device.type == "cpu" and like.dtype == torch.float32
        self._eps_tensor = like.new_tensor(self._eps)

    def __call__(self, x: Float[Tensor, "all dim"], weight: Tensor) -> Float[Tensor, "all dim"]:
        if not self._slim:
            return rms_norm(x, (self._dim,), weight, self._eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / self._dim).rsqrt_()
        return (x * scale).mul_(weight)


class FusedDecoder:
    """Embeddings, their rotations and an attention step in, hidden states out.

    The modules' q, k, v, gate and up weights become views of the fused tensors, so weights changed
    in place are changed here too (their copies by :meth:`refresh`, with which every prompt begins).
    """

    def __init__(self, text: Any, head: Any, axes: int) -> None:
        config = text.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        first = text.layers[0].self_attn
        self.head_dim: int = first.q_proj.weight.shape[0] // self.heads
        self.scale = float(first.scaling)
        self.norm_of = RmsNorm(config.hidden_size, config.rms_norm_eps, text.norm.weight)
        self.norm: Tensor = text.norm.weight.data
        self.eps = float(config.rms_norm_eps)
        self.layers = [_fuse(layer) for layer in text.layers[: config.num_hidden_layers]]
        memory.return_unused(self.norm.device)  # the weights that were fused are freed
        self.rotary: nn.Module = text.rotary_emb
        self.axes = axes
        self._table: tuple[Tensor, Tensor] | None = None
        # A head that somebody wrapped, hooked or quantised is not ours to multiply with.
        plain_head = type(head) is nn.Linear and not unusual_changes([("the head", head)])
        self.head = Matrix(head.weight.data, head.bias) if plain_head else None
        inner = [matrix for layer in self.layers for matrix in layer.matrices]
        self._quickest = Quickest(inner if self.head is None else [*inner, self.head])
        self.refresh()

    def refresh(self) -> None:
        """As :meth:`Quickest.refresh`."""
        self._quickest.refresh()

    def first(self, layers: int) -> FusedDecoder:
        """The decoder stopped after its first ``layers``; the weights are shared."""
        short = copy(self)
        short.layers = self.layers[:layers]
        return short

    def weights_changed(self) -> bool:
        """As :meth:`Quickest.weights_changed`."""
        return self._quickest.weights_changed()

    @staticmethod
    def knows(text: Any) -> bool:
        """Whether this decoder computes what those modules compute: plain weights, static rope, all
        layers alike, and nothing hooked, patched or put in the place of what was loaded."""
        config = text.config.to_dict()
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        if config.get("model_type") not in KNOWN or rope not in ("default", "llama3", "linear"):
            return False
        if config.get("hidden_act") != "silu" or config.get("mlp_bias"):
            return False
        layers = text.layers[: text.config.num_hidden_layers]
        own = all(is_from_library(type(module)) for module in text.modules())
        if not len(layers) or not own or unusual_changes(text.named_modules()):
            return False
        first = _blueprint(layers[0])
        if any(_blueprint(layer) != first for layer in layers):
            return False
        attention, mlp = layers[0].self_attn, layers[0].mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linears = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        biases = [module.bias for module in linears[3:] if isinstance(module, nn.Linear)]
        same_bias = len({module.bias is None for module in projections[:3]}) == 1
        plain = all(type(module) is nn.Linear for module in linears)
        if not plain or not same_bias or any(bias is not None for bias in biases):
            return False
        norms = [text.norm, layers[0].input_layernorm, layers[0].post_attention_layernorm]
        alike = len({(type(norm), norm.variance_epsilon) for norm in norms}) == 1
        if not alike or text.norm.variance_epsilon != text.config.rms_norm_eps:
            return False
        # An offloaded weight is elsewhere.
        devices = {parameter.device for parameter in text.parameters()}
        here = len(devices) == 1 and torch.device("meta") not in devices
        return here and type(mlp.act_fn) in (nn.SiLU, SiLUActivation)

    def decode(
        self,
        embeds: Float[Tensor, "all dim"],
        rotation: tuple[Tensor, Tensor],
        step: Attend,
        deepstack: tuple[Tensor, Tensor] | None = None,
        last: bool = False,
        few_rows: FewRowAttention | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """The layers, given each token's (cos, sin). ``last``: only the last token's hidden state
        is wanted; the last layer computes keys, values and queries alone of the others.
        ``few_rows`` attends in the place of ``step``, and norms and rotates by itself."""
        count = embeds.shape[0]
        heads, kv_heads, width, norm = self.heads, self.kv_heads, self.head_dim, self.norm_of
        cos, sin = rotation
        half = width // 2
        hidden = embeds
        for index, layer in enumerate(self.layers):
            normed = norm(hidden, layer.norm_in)
            by_head = layer.qkv(normed).view(count, heads + 2 * kv_heads, width)
            if few_rows is not None:
                mixed = few_rows.rotate_and_attend(
                    index, by_head, self.scale, rotation, layer.norm_qk, self.eps
                )
            else:
                qkv = by_head.transpose(0, 1)
                qk, v = qkv[: heads + kv_heads], qkv[heads + kv_heads :]
                if layer.norm_qk is not None:
                    parts = zip(qk.split((heads, kv_heads)), layer.norm_qk, strict=True)
                    qk = torch.cat(
                        [rms_norm(part, (width,), each, self.eps) for part, each in parts]
                    )
                turned = torch.cat((qk[..., half:], qk[..., :half]), -1)
                qk = torch.addcmul(qk * cos, turned, sin)
                if last and index == len(self.layers) - 1:
                    step, hidden = partial(step, last=True), hidden[-1:]
                mixed = step(index, qk[:heads], qk[heads:], v, self.scale)
            hidden = layer.out.onto(hidden, mixed)
            normed = norm(hidden, layer.norm_mlp)
            hidden = layer.down.onto(hidden, layer.gated(normed))
            if deepstack is not None and index < len(deepstack[1]):
                hidden[deepstack[0]] += deepstack[1][index]
        return norm(hidden, self.norm)

    def rotation(
        self, embeds: Tensor, positions: Int[Tensor, "axes all"] | Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """cos and sin per token, sin with the sign of rotate-half folded in.

        Text, at one position on every axis, is looked up; tokens of a prompt are computed.
        """
        if isinstance(positions, Tensor):
            return self._rotate(embeds, positions)
        cos, sin = self.table(max(positions), embeds)
        if len(positions) == 1:
            (at,) = positions
            return cos[at : at + 1], sin[at : at + 1]
        rows = torch.tensor(positions, device=embeds.device)
        return cos.index_select(0, rows), sin.index_select(0, rows)

    def table(self, last: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of text at every position up to ``last`` and beyond."""
        if self._table is None or last >= self._table[0].shape[0]:
            rows = torch.arange(max(TABLE, 2 * last), device=like.device)
            self._table = self._rotate(like, rows.expand(self.axes, -1))
        return self._table

    def _rotate(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        shaped = positions[:, None] if positions.shape[0] > 1 else positions
        cos, sin = self.rotary(embeds[None], shaped)
        sin = sin[0].clone()
        sin[:, : sin.shape[1] // 2].neg_()
        return cos[0], sin


def _fuse(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norm = None
    if "q_norm" in attention._modules:
        norm = attention.q_norm.weight.data, attention.k_norm.weight.data
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    biased = attention.q_proj.bias is not None
    return Layer(
        norm_in=layer.input_layernorm.weight.data,
        qkv=Matrix(
            _stack([module.weight for module in projections]),
            _stack([module.bias for module in projections]) if biased else None,
        ),
        norm_qk=norm,
        out=Matrix(attention.o_proj.weight.data, use=Use.ONTO),
        norm_mlp=layer.post_attention_layernorm.weight.data,
        gated=Matrix(_stack([mlp.gate_proj.weight, mlp.up_proj.weight]), use=Use.GATED),
        down=Matrix(mlp.down_proj.weight.data, use=Use.ONTO),
    )


def _blueprint(layer: nn.Module) -> tuple[object, ...]:
    """What a layer is made of: its modules' classes and settings, and the shapes of its weights."""
    return tuple(
        (name, type(module), settings(module, leave_out="layer_idx"), _shapes(module))
        for name, module in layer.named_modules()
    )


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size | None]]:
    own = vars(module)["_parameters"]
    return [(name, None if each is None else each.shape) for name, each in own.items()]


def _stack(parameters: list[nn.Parameter]) -> Tensor:
    """The parameters stacked by rows; each becomes a view of its part.

    Where they are such views already (of a model that was sent from another process, or had a
    decoder before) that memory is used again.
    """
    fused = _stacked(parameters)
    if fused is not None:
        return fused
    fused = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        rows = parameter.shape[0]
        parameter.data = fused[at : at + rows]
        at += rows
    return fused


def _stacked(parameters: list[nn.Parameter]) -> Tensor | None:
    """All parameters as one tensor without a copy, where they lie one after the other."""
    first = parameters[0].data
    end = first.storage_offset()
    for parameter in parameters:
        part = parameter.data
        here = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        same = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        if not (here and same and part.is_contiguous() and part.storage_offset() == end):
            return None
        end += part.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
