"""The fused decoder: it computes a language model's layers without calling the layers' modules.

A :class:`Backbone` uses it where it can (:meth:`FusedDecoder.supports`), and the modules elsewhere.

It reads the modules' own weights. "Fused" means that one matrix product computes queries, keys and
values together, and another one gate and up. Its logits equal the modules' up to rounding (tests
check 1e-5). It supports decoders made of RMSNorm, grouped-query attention with rotary positions,
with or without norms of queries and keys, and a gated SiLU MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers.activations import SiLUActivation

from saccade.core.errors import ModelError
from saccade.model import memory
from saccade.model.attention import Attend
from saccade.model.change_detection import is_from_library, settings, unusual_changes
from saccade.model.hidden_states import AFTER_NORM
from saccade.model.kernels import Epilogue, Matrix, TunedMatrices, choose_rounded
from saccade.model.kernels.few_bits import Rounding
from saccade.model.kernels.few_rows import FewRowAttention

# The ``model_type`` of text models whose architecture is exactly this decoder.
SUPPORTED_MODEL_TYPES = (
    "qwen2_5_vl_text", "qwen2_vl_text", "qwen2_5_omni_text", "qwen3_vl_text",
    "qwen2", "qwen3", "llama", "mistral",
)  # fmt: skip
INITIAL_TABLE_ROWS = 4096  # Positions in the rotary table, which grows when a text needs more.


@dataclass(frozen=True)
class Layer:
    """The weights of one layer. Those that are multiplied with the same input are stacked by rows
    into one matrix: ``qkv`` and ``gate_up``."""

    norm_in: Tensor  # Of the norm before attention.
    qkv: Matrix
    norm_qk: tuple[Tensor, Tensor] | None  # One for all query heads, and one for all key heads.
    out: Matrix  # The output projection of attention.
    norm_mlp: Tensor  # Of the norm before the MLP.
    gate_up: Matrix
    down: Matrix

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class RmsNorm:
    """Computes x / sqrt(mean(x^2) + eps) * weight.

    In fp32 on a CPU it makes as few passes over the numbers as torch's operations allow.
    """

    def __init__(self, dim: int, eps: float, example: Tensor) -> None:
        """``example`` has the device and the dtype of what will be normed."""
        self._dim = dim
        self._eps = float(eps)
        self._is_fp32_on_cpu = example.device.type == "cpu" and example.dtype == torch.float32
        self._eps_tensor = example.new_tensor(self._eps)

    def __call__(self, x: Float[Tensor, "all dim"], weight: Tensor) -> Float[Tensor, "all dim"]:
        if not self._is_fp32_on_cpu:
            return rms_norm(x, (self._dim,), weight, self._eps)
        # With length^2 = sum(x^2), the factor is 1 / sqrt(eps + length^2 / dim).
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / self._dim).rsqrt_()
        return (x * scale).mul_(weight)


class FusedDecoder:
    """Computes hidden states from embeddings, their rotations and an attention function.

    The modules' q, k, v, gate and up weights become views of the fused tensors, so weights that are
    changed in place are changed here too. Some kernels read copies of weights in another layout.
    :meth:`refresh`, which is called before every prompt, makes these anew after a change.
    """

    def __init__(self, text: Any, head: Any, axes: int) -> None:
        """Fuses the weights of a language model.

        Args:
            text: the language model: its layers, last norm and rotary embedding.
            head: the module that computes the logits.
            axes: how many axes positions have, such as 3 (time, height and width) in Qwen2-VL.
        """
        config = text.config
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        first = text.layers[0].self_attn
        self.head_dim: int = first.q_proj.weight.shape[0] // self.heads
        self.scale = float(first.scaling)
        self.apply_norm = RmsNorm(config.hidden_size, config.rms_norm_eps, text.norm.weight)
        self.norm_weight: Tensor = text.norm.weight.data
        self.eps = float(config.rms_norm_eps)
        self.layers = [_fuse(layer) for layer in text.layers[: config.num_hidden_layers]]
        memory.return_unused_memory(self.norm_weight.device)  # Frees the weights that were fused.
        self.rotary: nn.Module = text.rotary_emb
        self.axes = axes
        self._table: tuple[Tensor, Tensor] | None = None
        # A head that somebody wrapped, hooked or quantised must run by its own forward.
        is_plain_head = type(head) is nn.Linear and not unusual_changes([("the head", head)])
        self.head = Matrix(head.weight.data, head.bias) if is_plain_head else None
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        if self.head is not None:
            matrices.append(self.head)
        self._matrices = TunedMatrices(matrices)
        self.refresh()

    def refresh(self) -> None:
        """Copies weights anew if they were changed, and chooses kernels for the current number of
        torch's threads."""
        self._matrices.refresh()

    def first_layers(self, count: int) -> FusedDecoder:
        """Returns the decoder stopped after its first ``count`` layers. The weights are shared."""
        short = copy(self)
        short.layers = self.layers[:count]
        return short

    def rounded(self, rounding: Rounding) -> FusedDecoder:
        """Returns a decoder for a draft. It has the same weights, and copies rounded to few bits.

        A forward of few rows, such as a step of the draft, may multiply with the copies; one of
        many rows, such as a prompt, multiplies with the originals. Raises ModelError where there is
        no memory for the copies.
        """
        matrices = [matrix for layer in self.layers for matrix in layer.matrices]
        if self.head is not None:
            matrices.append(self.head)
        weight_count = sum(matrix.weight.numel() for matrix in matrices)
        needed = int(weight_count * rounding.bytes_per_weight)
        place = self.norm_weight.device
        available = memory.available_bytes(place)
        if needed > available * (1 - memory.SPARE_SHARE):
            raise ModelError(
                f"a copy of the weights in {rounding.name} takes {memory.format_bytes(needed)}, "
                f"and {place.type} has {memory.format_bytes(available)} free: leave "
                "draft_quantize out"
            )
        rounded_decoder = copy(self)
        rounded_decoder.layers = [
            replace(
                layer,
                qkv=layer.qkv.rounded(rounding),
                out=layer.out.rounded(rounding),
                gate_up=layer.gate_up.rounded(rounding),
                down=layer.down.rounded(rounding),
            )
            for layer in self.layers
        ]
        rounded_decoder.head = None if self.head is None else self.head.rounded(rounding)
        matrices = [matrix for layer in rounded_decoder.layers for matrix in layer.matrices]
        if rounded_decoder.head is not None:
            matrices.append(rounded_decoder.head)
        rounded_decoder._matrices = TunedMatrices(matrices)
        # On a GPU there is only one kernel for a rounding, so it is chosen without measuring. On a
        # CPU ``refresh`` times the kernels and chooses.
        if place.type != "cpu":
            choose_rounded(matrices)
        rounded_decoder.refresh()
        return rounded_decoder

    def weights_changed(self) -> bool:
        """Returns whether weights were changed in place since copies of them were made."""
        return self._matrices.weights_changed()

    @staticmethod
    def supports(text: Any) -> bool:
        """Returns whether this decoder can run the modules of ``text``: it computes what they
        compute, and their weights are on one device."""
        # An offloaded weight is on another device, or on none.
        devices = {parameter.device for parameter in text.parameters()}
        on_one_device = len(devices) == 1 and torch.device("meta") not in devices
        return on_one_device and FusedDecoder.computes_the_same(text)

    @staticmethod
    def computes_the_same(text: Any) -> bool:
        """Returns whether this decoder computes what the modules of ``text`` compute, wherever
        their weights are.

        They must have plain weights, static rotary rules and equal layers, and nothing may have
        been hooked, patched or replaced since they were loaded.
        """
        config = text.config.to_dict()
        rope = (config.get("rope_parameters") or {}).get("rope_type", "default")
        if config.get("model_type") not in SUPPORTED_MODEL_TYPES:
            return False
        if rope not in ("default", "llama3", "linear"):
            return False
        if config.get("hidden_act") != "silu" or config.get("mlp_bias"):
            return False
        layers = text.layers[: text.config.num_hidden_layers]
        are_from_library = all(is_from_library(type(module)) for module in text.modules())
        if not len(layers) or not are_from_library or unusual_changes(text.named_modules()):
            return False
        first = _blueprint(layers[0])
        if any(_blueprint(layer) != first for layer in layers):
            return False
        attention = layers[0].self_attn
        mlp = layers[0].mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        linears = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        are_plain = all(type(module) is nn.Linear for module in linears)
        # Queries, keys and values all have a bias, or none of them has. Nothing else may have one.
        is_bias_uniform = len({module.bias is None for module in projections[:3]}) == 1
        other_biases = [module.bias for module in linears[3:] if isinstance(module, nn.Linear)]
        if not are_plain or not is_bias_uniform or any(bias is not None for bias in other_biases):
            return False
        norms = [text.norm, layers[0].input_layernorm, layers[0].post_attention_layernorm]
        are_norms_alike = len({(type(norm), norm.variance_epsilon) for norm in norms}) == 1
        if not are_norms_alike or text.norm.variance_epsilon != text.config.rms_norm_eps:
            return False
        return type(mlp.act_fn) in (nn.SiLU, SiLUActivation)

    def decode(
        self,
        embeds: Float[Tensor, "all dim"],
        rotation: tuple[Tensor, Tensor],
        step: Attend,
        deepstack: tuple[Tensor, Tensor] | None = None,
        only_last_token: bool = False,
        few_rows: FewRowAttention | None = None,
        write_hidden: Callable[[int, Tensor], None] | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Returns the hidden states after all layers and the last norm.

        Args:
            embeds: the embeddings of all tokens.
            rotation: cos and sin of all tokens, as :meth:`rotation` returns them.
            step: the attention function, which also writes keys and values.
            deepstack: what Qwen3-VL adds to visual tokens: (mask of the visual tokens, [layer,
                visual token, dim]). The i-th entry is added to the output of layer i.
            only_last_token: return the last token's hidden state alone. The last layer then
                computes only queries, keys and values for the other tokens. This is ignored where
                ``few_rows`` is given.
            few_rows: attends instead of ``step``. It also norms and rotates queries and keys.
            write_hidden: called as (number, hidden states). The number is n for the input of layer
                n, the number of layers for the input of the last norm, and ``AFTER_NORM`` for the
                output of that norm.
        """
        count = embeds.shape[0]
        heads, kv_heads, width = self.heads, self.kv_heads, self.head_dim
        apply_norm = self.apply_norm
        cos, sin = rotation
        half = width // 2
        hidden = embeds
        for index, layer in enumerate(self.layers):
            if write_hidden is not None:
                write_hidden(index, hidden)
            normed = apply_norm(hidden, layer.norm_in)
            by_head = layer.qkv(normed).view(count, heads + 2 * kv_heads, width)
            if few_rows is not None:
                attention = few_rows.rotate_and_attend(
                    index, by_head, self.scale, rotation, layer.norm_qk, self.eps
                )
            else:
                qkv = by_head.transpose(0, 1)
                qk = qkv[: heads + kv_heads]
                v = qkv[heads + kv_heads :]
                if layer.norm_qk is not None:
                    parts = zip(qk.split((heads, kv_heads)), layer.norm_qk, strict=True)
                    qk = torch.cat(
                        [rms_norm(part, (width,), weight, self.eps) for part, weight in parts]
                    )
                # The rotation of x by its position is x cos + rotate_half(x) sin. ``rotate_half``
                # swaps the halves of a head and negates the new first half. Here ``sin`` has that
                # sign already.
                swapped = torch.cat((qk[..., half:], qk[..., :half]), -1)
                qk = torch.addcmul(qk * cos, swapped, sin)
                if only_last_token and index == len(self.layers) - 1:
                    step = partial(step, last=True)
                    hidden = hidden[-1:]
                attention = step(index, qk[:heads], qk[heads:], v, self.scale)
            hidden = layer.out.add_to(hidden, attention)
            normed = apply_norm(hidden, layer.norm_mlp)
            hidden = layer.down.add_to(hidden, layer.gate_up(normed))
            if deepstack is not None:
                is_visual, rows_by_layer = deepstack
                if index < len(rows_by_layer):
                    hidden[is_visual] += rows_by_layer[index]
        normed = apply_norm(hidden, self.norm_weight)  # The last norm.
        if write_hidden is not None:
            write_hidden(len(self.layers), hidden)
            write_hidden(AFTER_NORM, normed)
        return normed

    def rotation(
        self, embeds: Tensor, positions: Int[Tensor, "axes all"] | Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of every token. The first half of sin is negated, because
        :meth:`decode` leaves the sign of rotate-half out.

        ``positions`` are a list for text, which has the same position on every axis. The rotations
        are then looked up in the table. For a tensor, such as a prompt's positions, they are
        computed.
        """
        if isinstance(positions, Tensor):
            return self._rotate(embeds, positions)
        cos, sin = self.table(max(positions), embeds)
        if len(positions) == 1:
            (at,) = positions
            return cos[at : at + 1], sin[at : at + 1]
        rows = torch.tensor(positions, device=embeds.device)
        return cos.index_select(0, rows), sin.index_select(0, rows)

    def table(self, last: int, example: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of text at every position up to ``last``, and at some beyond.

        ``example`` has the device and the dtype of the table.
        """
        if self._table is None or last >= self._table[0].shape[0]:
            rows = torch.arange(max(INITIAL_TABLE_ROWS, 2 * last), device=example.device)
            self._table = self._rotate(example, rows.expand(self.axes, -1))
        return self._table

    def _rotate(self, embeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, computed by the model's rotary module for ``positions`` [axes,
        token]."""
        # The module takes a batch: [axes, 1, token], or [1, token] where positions have one axis.
        shaped = positions[:, None] if positions.shape[0] > 1 else positions
        cos, sin = self.rotary(embeds[None], shaped)
        sin = sin[0].clone()
        sin[:, : sin.shape[1] // 2].neg_()  # The sign of rotate-half.
        return cos[0], sin


def _fuse(layer: Any) -> Layer:
    """Returns a layer's weights. Those that are multiplied with the same input are stacked by rows,
    and the modules' parameters become views of the stack."""
    attention, mlp = layer.self_attn, layer.mlp
    norm_qk = None
    if "q_norm" in attention._modules:
        norm_qk = attention.q_norm.weight.data, attention.k_norm.weight.data
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = attention.q_proj.bias is not None
    return Layer(
        norm_in=layer.input_layernorm.weight.data,
        qkv=Matrix(
            _stack([module.weight for module in projections]),
            _stack([module.bias for module in projections]) if has_bias else None,
        ),
        norm_qk=norm_qk,
        out=Matrix(attention.o_proj.weight.data, epilogue=Epilogue.ADD),
        norm_mlp=layer.post_attention_layernorm.weight.data,
        gate_up=Matrix(
            _stack([mlp.gate_proj.weight, mlp.up_proj.weight]), epilogue=Epilogue.SILU_GATE
        ),
        down=Matrix(mlp.down_proj.weight.data, epilogue=Epilogue.ADD),
    )


def _blueprint(layer: nn.Module) -> tuple[object, ...]:
    """Returns the classes and settings of a layer's modules, and the shapes of its weights."""
    return tuple(
        (name, type(module), settings(module, leave_out="layer_idx"), _shapes(module))
        for name, module in layer.named_modules()
    )


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size | None]]:
    parameters = vars(module)["_parameters"]
    return [(name, None if each is None else each.shape) for name, each in parameters.items()]


def _stack(parameters: list[nn.Parameter]) -> Tensor:
    """Returns the parameters stacked by rows. Each parameter becomes a view of its rows.

    They may be such views already, in a model that was sent from another process or had a fused
    decoder before. Then that memory is used again.
    """
    fused = _stack_without_copy(parameters)
    if fused is not None:
        return fused
    fused = torch.cat([parameter.data for parameter in parameters])
    at = 0
    for parameter in parameters:
        rows = parameter.shape[0]
        parameter.data = fused[at : at + rows]
        at += rows
    return fused


def _stack_without_copy(parameters: list[nn.Parameter]) -> Tensor | None:
    """Returns the parameters as one tensor without a copy; None where that is impossible.

    It is possible where they follow one another in memory.
    """
    first = parameters[0].data
    end = first.storage_offset()
    for parameter in parameters:
        part = parameter.data
        shares_memory = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        is_alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        follows = part.is_contiguous() and part.storage_offset() == end
        if not (shares_memory and is_alike and follows):
            return None
        end += part.numel()
    rows = sum(parameter.shape[0] for parameter in parameters)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
