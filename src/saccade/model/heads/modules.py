"""The modules of draft heads: a decoder layer, what makes its input, and what makes the logits.

A head has a row for each position of the text. The row reads the target's hidden state there and
the embedding of the next token, and predicts the token after that. The row of a drafted token reads
the head's own output instead of the target's hidden state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from saccade.model.hidden_states import AFTER_NORM

Hidden = Float[Tensor, "row dim"]
Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of every row, [1, row, width]."""


class HeadModule(nn.Module, ABC):
    """One decoder layer over pairs of an embedding and a hidden state."""

    hidden_layers: tuple[int, ...]
    """Which of the target's hidden states it reads.

    A number n stands for the input of layer n, and ``AFTER_NORM`` for the output of the last norm
    (see ``HiddenStates``).
    """
    reads_media_rows: bool
    """Whether a picture's token is embedded as its row from the vision tower. Otherwise it is
    embedded as its placeholder."""
    embed_tokens: nn.Embedding | None
    """The head's own embeddings; None where it uses the target's."""

    def project(self, target_hidden: Float[Tensor, "row layers_dim"]) -> Hidden:
        """Returns the hidden states that the layer reads.

        Each row of ``target_hidden`` has the target's hidden states of ``hidden_layers`` side by
        side.
        """
        return target_hidden

    @abstractmethod
    def forward(
        self,
        embeds: Hidden,
        hidden: Hidden,
        rotation: Rotation,
        positions: Int[Tensor, "axes row"],
        **attention: Any,
    ) -> Hidden:
        """Returns the output of each row, which the next step reads as its hidden state.

        ``attention`` has further arguments of the layer's attention.
        """

    @abstractmethod
    def prepare_logits(self, output: Hidden) -> Hidden:
        """Turns the output of :meth:`forward` into the input of the output matrix."""

    def own_logits(self, prepared: Hidden) -> Float[Tensor, "row vocab"] | None:
        """Returns logits over the target's vocabulary; None where the head has no output matrix,
        so that the target's computes them."""
        return None


class MtpHead(HeadModule):
    """The head of a target's own checkpoint (MTP), around a decoder layer of the target's family.

    ``fc`` reads the embedding and the hidden state, both normed. Families differ in two things.
    With ``next_step_reads_normed`` the head's next step reads the output of the last norm, else
    that norm's input. With ``zeroes_first_embedding`` the embedding in the row at position 0 is
    zero.

    Sources: DeepSeek-V3 (arXiv:2412.19437, section 2.2), and vLLM's ``qwen3_5_mtp``,
    ``qwen3_next_mtp`` and ``glm4_moe_mtp`` for which hidden state is read and what the next step
    reads.
    """

    hidden_layers = (AFTER_NORM,)
    reads_media_rows = True

    def __init__(
        self,
        layer: nn.Module,
        norm: type[Any],
        config: Any,
        next_step_reads_normed: bool,
        zeroes_first_embedding: bool,
    ) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = None
        self.norm_embedding = norm(dim, eps=eps)
        self.norm_hidden = norm(dim, eps=eps)
        self.fc = nn.Linear(2 * dim, dim, bias=False)
        self.layer = layer
        self.norm = norm(dim, eps=eps)
        self._next_step_reads_normed = next_step_reads_normed
        self._zeroes_first_embedding = zeroes_first_embedding

    def forward(
        self,
        embeds: Hidden,
        hidden: Hidden,
        rotation: Rotation,
        positions: Int[Tensor, "axes row"],
        **attention: Any,
    ) -> Hidden:
        if self._zeroes_first_embedding:
            embeds = embeds.masked_fill((positions[0] == 0)[:, None], 0)
        both = torch.cat([self.norm_embedding(embeds), self.norm_hidden(hidden)], -1)
        out = self.layer(
            self.fc(both)[None],
            position_embeddings=rotation,
            attention_mask=None,
            **attention,
        )
        # Some families' layers return a tensor [1, row, dim], others a tuple that begins with it.
        out = out[0] if isinstance(out, Tensor) else out[0][0]
        return self.norm(out) if self._next_step_reads_normed else out

    def prepare_logits(self, output: Hidden) -> Hidden:
        return output if self._next_step_reads_normed else self.norm(output)


class Eagle3Layer(nn.Module):
    """EAGLE-3's layer: its attention reads the embedding and the hidden state side by side.

    With ``has_qk_norm`` the attention norms queries and keys, as Qwen3's does. With
    ``norm_before_residual`` the normed hidden state is what the layer adds to, else the hidden
    state itself.
    """

    def __init__(self, config: LlamaConfig, has_qk_norm: bool, norm_before_residual: bool) -> None:
        super().__init__()
        dim, eps = config.hidden_size, config.rms_norm_eps
        kind: Any = modeling_qwen3.Qwen3Attention if has_qk_norm else modeling_llama.LlamaAttention
        attention = kind(config, layer_idx=0)
        # The projections read both side by side, so they have twice as many inputs.
        for name in ("q_proj", "k_proj", "v_proj"):
            old = attention._modules[name]
            wide = nn.Linear(2 * dim, old.out_features, bias=old.bias is not None)
            attention._modules[name] = wide
        self.self_attn = attention
        self.mlp = modeling_llama.LlamaMLP(config)
        self.input_layernorm = modeling_llama.LlamaRMSNorm(dim, eps=eps)
        self.hidden_norm = modeling_llama.LlamaRMSNorm(dim, eps=eps)
        self.post_attention_layernorm = modeling_llama.LlamaRMSNorm(dim, eps=eps)
        self._norm_before_residual = norm_before_residual

    def forward(
        self, embeds: Hidden, hidden: Hidden, rotation: Rotation, **attention: Any
    ) -> Hidden:
        normed = self.hidden_norm(hidden)
        residual = normed if self._norm_before_residual else hidden
        both = torch.cat([self.input_layernorm(embeds), normed], -1)
        attention = {"attention_mask": None, **attention}
        attended = self.self_attn(
            hidden_states=both[None], position_embeddings=rotation, **attention
        )[0][0]
        residual = residual + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Eagle3Head(HeadModule):
    """An EAGLE-3 head (arXiv:2503.01840), as AngelSlim, SpecForge and speculators publish them.

    ``fc`` reads the hidden states of three layers of the target. The output matrix has a vocabulary
    of its own: row i stands for the target's id ``i + d2t[i]``. The next step reads the layer's
    output before the last norm. As in vLLM, a picture's token is embedded as its placeholder.
    """

    reads_media_rows = False

    def __init__(
        self,
        config: LlamaConfig,
        hidden_layers: tuple[int, ...],
        target_dim: int,
        target_vocab: int,
        draft_vocab: int,
        *,
        embedding_count: int | None,
        has_qk_norm: bool,
        norm_before_residual: bool,
    ) -> None:
        super().__init__()
        dim = config.hidden_size
        self.hidden_layers = hidden_layers
        self.fc = nn.Linear(len(hidden_layers) * target_dim, dim, bias=False)
        self.layer = Eagle3Layer(config, has_qk_norm, norm_before_residual)
        self.norm = modeling_llama.LlamaRMSNorm(dim, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(dim, draft_vocab, bias=False)
        self.d2t: Tensor
        self.register_buffer("d2t", torch.zeros(draft_vocab, dtype=torch.long))
        self.target_vocab = target_vocab
        self.embed_tokens = None
        if embedding_count is not None:
            self.embed_tokens = nn.Embedding(embedding_count, dim)

    def project(self, target_hidden: Float[Tensor, "row layers_dim"]) -> Hidden:
        return self.fc(target_hidden)

    def forward(
        self,
        embeds: Hidden,
        hidden: Hidden,
        rotation: Rotation,
        positions: Int[Tensor, "axes row"],
        **attention: Any,
    ) -> Hidden:
        return self.layer(embeds, hidden, rotation, **attention)

    def prepare_logits(self, output: Hidden) -> Hidden:
        return self.norm(output)

    @property
    def target_ids(self) -> Int[Tensor, " draft_vocab"]:
        """The target's id for each id of the head's own vocabulary."""
        return target_ids_of(self.d2t)

    def own_logits(self, prepared: Hidden) -> Float[Tensor, "row vocab"]:
        return spread_logits(self.lm_head(prepared), self.target_ids, self.target_vocab)


def target_ids_of(d2t: Int[Tensor, " draft_vocab"]) -> Int[Tensor, " draft_vocab"]:
    """Returns the target's id for each id of a head's own vocabulary.

    ``d2t`` has the differences: the head's id i is the target's id ``i + d2t[i]``.
    """
    return torch.arange(len(d2t), device=d2t.device) + d2t


def spread_logits(
    logits: Float[Tensor, "row draft_vocab"], target_ids: Int[Tensor, " draft_vocab"], vocab: int
) -> Float[Tensor, "row vocab"]:
    """Returns logits over the target's vocabulary; ids that a head does not know have -inf."""
    all_ids = logits.new_full((len(logits), vocab), float("-inf"))
    return all_ids.index_copy_(1, target_ids, logits)
