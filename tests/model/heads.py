"""Heads computed without a cache, from the start of the text, by plain formulas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from helpers import backbone
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from lab.checkpoints import heads
from saccade.core.prompt import Prompt
from saccade.core.tree import ROOT, Tree, path
from saccade.model.backbone import Backbone
from saccade.model.heads.dflash import make_dflash_head
from saccade.model.heads.head import Head, make_eagle3_head, make_mtp_head
from saccade.model.heads.layouts import MTP_LAYOUTS

OWN = {"mtp": MTP_LAYOUTS[0], "nextn": MTP_LAYOUTS[1]}
STYLES = ("angelslim", "specforge", "speculators")
DFLASH = {
    "dflash": "z-lab",
    "dflash of speculators": "speculators",
    "dflash of transformers": "transformers",
}
KINDS = ("mtp", "nextn", *STYLES, *DFLASH)


def tensors_of(target: Backbone, kind: Any) -> dict[str, Tensor]:
    if kind in OWN:
        return heads.random_own_head(target, kind)
    if kind in DFLASH:
        return heads.random_dflash(target, DFLASH[kind], 100)
    return heads.random_eagle3(target, kind, 100)


def head_of(model: Any, kind: Any, fused: bool | None = None) -> Head:
    """A head of random weights over a shared target."""
    return head_over(backbone(model, fused), kind)


def head_over(target: Backbone, kind: Any) -> Head:
    """A head of random weights over this target."""
    tensors = tensors_of(target, kind)
    if kind in OWN:
        return make_mtp_head(target, OWN[kind], tensors, "a model")
    if kind in DFLASH:
        settings = heads.dflash_settings(target, DFLASH[kind], 100)
        return make_dflash_head(target, settings, tensors, "a head")
    return make_eagle3_head(target, heads.eagle3_settings(target, kind, 100), tensors, "a head")


def write_head(folder: Path, target: Backbone, kind: str) -> Path:
    """Writes a head of random weights that has a folder of its own, and returns the folder."""
    if kind in DFLASH:
        return heads.make_dflash(folder, target, DFLASH[kind])
    return heads.make_eagle3(folder, target, kind)


def change_settings(folder: Path, **settings: Any) -> None:
    """Changes entries of a checkpoint's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def _angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rows at these positions."""
    angles = positions[:, None] / 10000.0 ** (torch.arange(0, 32, 2) / 32)
    cos, sin = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
    return cos, sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + torch.cat([-x[..., 16:], x[..., :16]], -1) * sin


class Reference:
    """A head's logits after any place of a text, by formulas that share nothing with the package.

    ``kept`` are the rows of the prompt that the head reads.
    """

    def __init__(self, head: Head, kind: str, prompt: Prompt, kept: Tensor | None = None) -> None:
        self.kind, self.prompt, self.model = kind, prompt, head.target.model
        self.layer = None if kind not in OWN else head.module.layer
        self.target = head.target
        self.t = tensors_of(head.target, kind)
        self.kept = torch.arange(len(prompt)) if kept is None else kept
        self.rotary = self.model.get_decoder().rotary_emb
        self.depth = head.target.layer_count

    # -- the target ----------------------------------------------------------------------------

    def _inputs(self, text: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Embeddings and positions of the prompt and the text after it."""
        prompt, new = self.prompt, torch.tensor(list(text), dtype=torch.long)
        embeds = torch.cat([prompt.embeds, self.model.get_input_embeddings()(new)])
        later = prompt.next_position + torch.arange(len(new))
        positions = torch.cat([prompt.positions, later.expand(prompt.positions.shape[0], -1)], 1)
        return embeds, positions

    def _target_hidden(self, embeds: Tensor, positions: Tensor) -> Tensor:
        """What the head reads of each place, from one forward of transformers."""
        out = self.model.get_decoder()(
            inputs_embeds=embeds[None],
            position_ids=positions[:, None] if len(positions) > 1 else positions,
            attention_mask=torch.ones_like(positions[:1]),
            use_cache=False,
            output_hidden_states=self.kind not in OWN,
        )
        if self.kind in OWN:
            return out.last_hidden_state[0]
        # Of the last entry transformers has the norm applied; the layer before it is run again.
        layers = (0, 1, self.depth) if self.kind == "speculators" else (0, 1, 2)
        if self.kind in DFLASH:
            layers = tuple(each + 1 for each in heads.dflash_layers(self.target))
        if self.kind == "angelslim":
            layers = (2, self.depth // 2, max(0, self.depth - 3))
        every = [each[0] for each in out.hidden_states]
        every[-1] = self._before_norm(embeds, positions)
        return torch.cat([every[layer] for layer in layers], -1)

    def _before_norm(self, embeds: Tensor, positions: Tensor) -> Tensor:
        text, seen = self.model.get_decoder(), []
        handle = text.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
        try:
            text(
                inputs_embeds=embeds[None],
                position_ids=positions[:, None] if len(positions) > 1 else positions,
                attention_mask=torch.ones_like(positions[:1]),
                use_cache=False,
            )
        finally:
            handle.remove()
        return seen[0]

    # -- the head ------------------------------------------------------------------------------

    def _embed(self, ids: Tensor) -> Tensor:
        if "embed_tokens.weight" in self.t:
            return self.t["embed_tokens.weight"][ids]
        return self.model.get_input_embeddings()(ids)

    def _run(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        return (self._run_own if self.kind in OWN else self._run_eagle3)(embeds, hidden, positions)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        zero_centred = "Qwen3_5" in type(self.model).__name__
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return normed * (1 + weight if zero_centred and self.kind in OWN else weight)

    def _run_own(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        names = heads.OWN_NAMES[self.kind]
        if self.kind == "nextn":
            embeds = torch.where(positions[0, :, None] == 0, 0, embeds)
        e = self._norm(embeds, self.t[names["embedding"]])
        h = self._norm(hidden, self.t[names["hidden"]])
        x = linear(torch.cat([e, h], -1), self.t[names["fc"]])[None]
        shaped = positions[:, None] if len(positions) > 1 else positions
        # Without a step the layer attends as transformers does: causally, over these rows.
        out = self.layer(x, position_embeddings=self.rotary(x, shaped), attention_mask=None)
        out = out[0] if isinstance(out, Tensor) else out[0][0]
        return self._norm(out, self.t[names["norm"]]) if self.kind == "mtp" else out

    def _run_eagle3(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        prefix = "layers.0." if self.kind == "speculators" else "midlayer."
        w = {key.removeprefix(prefix).removesuffix(".weight"): each for key, each in self.t.items()}
        normed = self._norm(hidden, w["hidden_norm"])
        residual = normed if self.kind == "speculators" else hidden
        both = torch.cat([self._norm(embeds, w["input_layernorm"]), normed], -1)
        q, k, v = (
            linear(both, w[f"self_attn.{each}_proj"]).view(len(both), -1, 32).transpose(0, 1)
            for each in "qkv"
        )
        q, k = (_rotate(each, *_angles(positions[0])) for each in (q, k))
        attended = scaled_dot_product_attention(
            q[None], k[None], v[None], is_causal=True, enable_gqa=True
        )[0]
        x = residual + linear(
            attended.transpose(0, 1).reshape(len(both), -1), w["self_attn.o_proj"]
        )
        m = self._norm(x, w["post_attention_layernorm"])
        return x + linear(
            silu(linear(m, w["mlp.gate_proj"])) * linear(m, w["mlp.up_proj"]), w["mlp.down_proj"]
        )

    # -- a DFlash head ---------------------------------------------------------------------------

    def _sees(self, layer: int, texts: int, size: int) -> Tensor:
        """What each row of a block sees: the rows of the text that are read, then the block's."""
        row = texts + torch.arange(size)[:, None]
        key = torch.arange(texts + size)
        has_window = self.kind == "dflash of transformers" or (self.kind == "dflash" and layer == 1)
        sees = row - key < (heads.DFLASH_WINDOW if has_window else texts + size)
        return sees & (key <= row) if self.kind == "dflash" and layer == 1 else sees

    def _block(self, hidden: Tensor, positions: Tensor, last: int, place: int) -> Tensor:
        """Logits of every level of the block after a text, whose rows have these hidden states and
        positions; ``place`` is the position of its last token."""
        w = {name.removesuffix(".weight"): each for name, each in self.t.items()}
        fc, norm = "fc", "hidden_norm"
        if self.kind == "dflash of transformers":
            fc, norm = "encoder.fc", "encoder.output_norm_enc"
        text = self._norm(linear(hidden, w[fc]), w[norm])
        size = heads.DFLASH_BLOCKS[DFLASH[self.kind]]
        x = self._embed(torch.tensor([last, *[heads.DFLASH_MASK] * (size - 1)]))
        cos, sin = _angles(torch.cat([positions[0], place + torch.arange(size)]))
        for layer in range(heads.DFLASH_LAYERS):
            own = {
                name.removeprefix(f"layers.{layer}."): each
                for name, each in w.items()
                if name.startswith(f"layers.{layer}.")
            }
            block = self._norm(x, own["input_layernorm"])
            both = torch.cat([text, block])
            q, k, v = (
                linear(rows, own[f"self_attn.{each}_proj"]).view(len(rows), -1, 32).transpose(0, 1)
                for each, rows in (("q", block), ("k", both), ("v", both))
            )
            q = _rotate(self._norm(q, own["self_attn.q_norm"]), cos[-size:], sin[-size:])
            k = _rotate(self._norm(k, own["self_attn.k_norm"]), cos, sin)
            sees = self._sees(layer, len(text), size)
            out = scaled_dot_product_attention(
                q[None], k[None], v[None], sees[None, None], enable_gqa=True
            )[0]
            x = x + linear(out.transpose(0, 1).reshape(size, -1), own["self_attn.o_proj"])
            m = self._norm(x, own["post_attention_layernorm"])
            gate, up = (linear(m, own[f"mlp.{each}_proj"]) for each in ("gate", "up"))
            x = x + linear(silu(gate) * up, own["mlp.down_proj"])
        out = self._norm(x, w["norm"])
        if self.kind != "dflash of speculators":
            return self.model.get_output_embeddings()(out[1:])
        own = linear(out, w["lm_head"])
        logits = own.new_full(
            (size, self.model.get_output_embeddings().weight.shape[0]), -torch.inf
        )
        logits[:, torch.arange(own.shape[1]) + self.t["d2t"]] = own
        return logits

    def _block_rows(self, text: Sequence[int], tree: Tree) -> Tensor:
        """The logits at the end of a text and at every node, which are those of its depth."""
        embeds, positions = self._inputs(text)
        hidden = self._target_hidden(embeds[:-1], positions[:, :-1])
        places = torch.cat([self.kept, torch.arange(len(self.prompt), len(embeds))])
        places = places[places < len(embeds) - 1]
        ids = [*self.prompt.full_ids.tolist(), *text]
        block = self._block(hidden[places], positions[:, places], ids[-1], int(positions[0, -1]))
        beyond = torch.zeros_like(block[:1])
        levels = [len(path(tree, node)) for node in range(ROOT, len(tree))]
        return torch.stack([torch.cat([block, beyond])[min(n, len(block))] for n in levels])

    # -- either ------------------------------------------------------------------------------------

    def _logits(self, out: Tensor) -> Tensor:
        if self.kind == "mtp":
            return self.model.get_output_embeddings()(out)
        if self.kind == "nextn":
            norm = self.t["shared_head.norm.weight"]
            return self.model.get_output_embeddings()(self._norm(out, norm))
        own = linear(self._norm(out, self.t["norm.weight"]), self.t["lm_head.weight"])
        logits = own.new_full((self.model.get_output_embeddings().weight.shape[0],), -torch.inf)
        logits[torch.arange(len(own)) + self.t["d2t"]] = own
        return logits

    @torch.no_grad()
    def rows(self, text: Sequence[int], tree: Tree) -> Tensor:
        """The logits at the end of a text and at every node of a tree."""
        if self.kind in DFLASH:
            return self._block_rows(text, tree)
        embeds, positions = self._inputs(text)
        hidden = self._target_hidden(embeds[:-1], positions[:, :-1])
        ids = torch.cat([self.prompt.full_ids, torch.tensor(list(text), dtype=torch.long)])
        after = embeds[1:] if self.kind in OWN else self._embed(ids[1:])
        places = torch.cat([self.kept, torch.arange(len(self.prompt), len(ids))])
        places = places[places < len(ids) - 1]
        if self.kind not in OWN:
            hidden = linear(hidden, self.t["fc.weight"])
        start = (after[places], hidden[places], positions[:, places])
        logits = []
        for node in range(ROOT, len(tree)):
            e, h, p = start
            out = self._run(e, h, p)
            for token in (tree.tokens[each] for each in path(tree, node)):
                e = torch.cat([e, self._embed(torch.tensor([token]))])
                h = torch.cat([h, out[-1:]])
                # The place after the last one of a text or a prompt counts on from the text.
                beyond = self.prompt.next_position + len(text) - 1 + len(e) - len(places)
                p = torch.cat([p, torch.full_like(p[:, :1], beyond - 1)], 1)
                out = self._run(e, h, p)
            logits.append(self._logits(out[-1]))
        return torch.stack(logits)
