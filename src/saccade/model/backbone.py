"""A Hugging Face model as the rest sees it: its prompts, its decoder, and what two of them share.

``prompts`` is what the model hands to its language model (``prompting``); ``forward`` drives the
language model, token lists in, hidden states out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPast

from saccade.core.errors import ModelError
from saccade.core.once import once
from saccade.core.prompt import Inputs, Prompt
from saccade.model import families, memory, tensor_parallel
from saccade.model.attention import Step, ways_of
from saccade.model.cache import Cache
from saccade.model.decoder import FusedDecoder
from saccade.model.fidelity import (
    HOOKS,
    Description,
    Snapshot,
    foreign_hooks,
    is_patched,
    lock_of,
    refuse_autocast,
)
from saccade.model.kept import Kept, looked_at
from saccade.model.kernels.few_rows import Kernels, kernels_for
from saccade.model.kernels.tower import Tower
from saccade.model.prompting import Reader
from saccade.model.rotary import depends_on_length, rotate_by_length

log = logging.getLogger(__name__)

ATTENTION = "saccade"
REMEMBERED = "_saccade_backbone"

APART = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05, torch.float64: 1e-6}
"""How far logits may be apart by rounding alone, as a share of the largest."""


class Backbone:
    """A loaded model seen as: inputs -> prompts, ids -> embeddings, embeddings -> logits.

    ``positions`` says where text stands after a video: where transformers puts it ("library", so
    that answers are ``generate``'s), or as Qwen2.5-VL was trained ("trained"). ``fused`` picks the
    decoder: ours beside the modules where the architecture is known (None or True), or the modules
    themselves (False), which are the fallback and the oracle.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        fused: bool | None = None,
        positions: Literal["library", "trained"] = "library",
    ) -> None:
        # What is made here outlives the caller's inference mode, and his weights become part of it:
        # tensors made in that mode could never be trained again.
        with torch.inference_mode(False), torch.no_grad():
            self._build(model, fused, positions)

    def _build(
        self, model: nn.Module, fused: bool | None, positions: Literal["library", "trained"]
    ) -> None:
        self.model = cast(Any, model)
        self._wanted, self._positions = fused, positions
        try:
            families.refuse(self.model.config, self.model.config.get_text_config(decoder=True))
            self.text = cast(Any, self.model.get_decoder())
            config = cast(Any, self.text.config)
            layers = self.text.layers[: config.num_hidden_layers]
            self.heads: int = config.num_attention_heads
            self.kv_heads: int = config.num_key_value_heads or self.heads
            head = self.head_module = cast(Any, self.model.get_output_embeddings())
            self.vocab: int = head.weight.shape[0]
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__} has no decoder of layers, with a head over them, that "
                "Saccade knows how to drive"
            ) from error
        self.shares = tensor_parallel.shares(layers[0])
        self.heads //= self.shares.count  # those of this process from here on
        self.kv_heads //= self.shares.count
        self.config = config
        self.layers: int = len(layers)
        self.head_dim: int = (
            config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        )
        rope = config.to_dict().get("rope_parameters") or {}
        self.axes = 3 if "mrope_section" in rope else 1
        self.context: int | None = config.to_dict().get("max_position_embeddings")
        self._embed: Any = self.model.get_input_embeddings()
        self.embeddings: int = self._embed.weight.shape[0]  # ids it can read; heads may be wider
        self.device = place_of(self._embed)
        self.devices = [place_of(layer) for layer in layers]
        self.dtype: torch.dtype = head.weight.dtype
        trained = positions == "trained"
        self._reader = Reader(self.model, self.text, self.axes, self.device, trained)
        self.placeholders = self._reader.placeholders
        known = self.shares.count == 1 and FusedDecoder.knows(self.text)
        if fused and not known:
            raise ModelError(
                f"the fused decoder does not know {config.model_type}: leave it to choose by itself"
            )
        memory.keep_freed()  # before anything is timed
        self.ways = ways_of(self.heads, self.kv_heads, self.head_dim, self.devices, self.dtype)
        self.rotates_by_length = depends_on_length(self.text)
        self.lock = lock_of(self.text)
        self._tower = Tower(self.model, self.text, head)
        self.kept: Kept | None = None  # what later prompts need not read again; a server's
        self.graphs: dict[int, Any] = {}  # of cuda_graphs, by layers; shared by copies of this
        self.whole: Backbone | None = None  # the model of which this is the first layers
        self.fused = (
            FusedDecoder(self.text, head, self.axes) if known and fused is not False else None
        )
        heads = self.heads, self.kv_heads, self.head_dim
        self.few_rows: Kernels | None = None  # by which captured forwards attend, on GPUs
        if self.fused is not None:
            self.few_rows = kernels_for(*heads, self.devices, self.dtype)
        self.tried = False  # whether its logits were compared with ``generate``'s
        self._newest: Backbone | None = None  # made when the model was found changed
        modules = [*self.model.modules()]
        outside = [each for each in modules if any(self.text is part for part in each.modules())]
        self.outside: list[nn.Module] = [each for each in outside if each is not self.text]
        self.through_model: bool | None = None  # whether the model does more than apply its head
        if any(foreign_hooks(each) or is_patched(each) for each in self.outside):
            self.through_model = True
        self._snapshot, self.description = self._look_at_modules()

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        """The backbone of a model as it is now, made anew only when something was changed."""
        with lock_of(model):
            # It is kept on the model itself, so that both are freed together.
            kept: Backbone | None = vars(model).get(REMEMBERED)
            found = cls(model) if kept is None or kept.model is not model else kept.current()
            if found is not kept:
                vars(model)[REMEMBERED] = found
            return found

    # -- following the model -------------------------------------------------------------------

    def current(self) -> Backbone:
        """This backbone if its model is what it was, else one of the model as it is now.

        Every answer begins with it. A few microseconds for each layer where nothing was changed.
        """
        newest = self._newest or self
        if newest._is_current():
            return newest
        with self.lock:
            newest = self._newest or self
            if newest._is_current():
                return newest
            snapshot, description = newest._look_at_modules()
            if description == newest.description and not newest._weights_changed():
                newest._snapshot = snapshot  # something that does not matter was changed
                return newest
            found = Backbone(self.model, fused=self._wanted, positions=self._positions)
            found.kept = self.kept
            same = found.description.structure == newest.description.structure
            found.tried = newest.tried and same
            if same:
                found.through_model = newest.through_model
            if found.kept is not None:
                found.kept.clear()  # what the model gave before, it may not give now
            self._newest = found
            return found

    def _is_current(self) -> bool:
        return self._snapshot.is_current() and not self._weights_changed()

    def _weights_changed(self) -> bool:
        """Whether weights of which there are copies were written to."""
        decoder = self.fused is not None and self.fused.weights_changed()
        return decoder or self._tower.weights_changed()

    def _look_at_modules(self) -> tuple[Snapshot, Description]:
        # Such a rotary module remembers the last text; none of ours computes with what it holds.
        notes = self.text.rotary_emb if self.rotates_by_length else None
        modules = [each for each in self.model.modules() if each is not notes]
        configs = [each for each in {id(c): c for c in self._configs()}.values()]
        return Snapshot(modules, configs, self.outside), Description.of(modules, configs)

    def _configs(self) -> Iterator[Any]:
        for module in self.model.modules():
            if "config" in vars(module):
                yield vars(module)["config"]

    @torch.no_grad()
    def prompts(
        self, inputs: Inputs, looked: Sequence[Any] | None = None, *, coarse: bool = False
    ) -> list[Prompt]:
        """Every request of a processor's output, as the language model would read it.

        Padding is dropped: prompts differ in length, and none pays for another. ``looked`` is what
        another model's equal vision tower gave for these inputs (:meth:`record_vision`).
        ``coarse`` asks for ``Media.coarse``, which only families that have it (:attr:`coarsens`)
        give; the vision tower looks once all the same.
        """
        with self.lock:
            return self._read_prompts(inputs, looked, coarse)

    def _read_prompts(
        self, inputs: Inputs, looked: Sequence[Any] | None, coarse: bool
    ) -> list[Prompt]:
        refuse_autocast(self.device)
        coarse, seen = coarse and self.coarsens, [*(looked or ())]
        if self.kept is not None:
            inputs = self.kept.send_pixels(inputs, self.device)
        with looked_at(self.model, self.kept), self._shown(looked), self._tower.quick():
            with self.record_vision(seen) if coarse else nullcontext():
                found = self._reader.read(inputs)
        if not coarse:
            return found
        with self._shown(seen), self._reader.averaging(), self._tower.quick():
            again = self._reader.read(inputs)
        rows = [prompt.embeds[prompt.visual] for prompt in again]
        return [
            replace(prompt, media=replace(prompt.media, coarse=each))
            for prompt, each in zip(found, rows, strict=True)
        ]

    @property
    def coarsens(self) -> bool:
        """Whether what the vision tower gives can be averaged before it is projected."""
        return self.model.config.model_type in families.PROJECTS_ROWS

    @torch.no_grad()
    def assemble(self, inputs: Inputs, rows: Float[Tensor, "seen dim"]) -> Prompt:
        """One request's prompt from the rows its visual tokens are, whoever computed them."""
        return self._reader.assemble(inputs, rows)

    # -- decoding ------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int] | Tensor) -> Float[Tensor, "... dim"]:
        return self._embed(torch.as_tensor(ids, device=self.device))

    def forward(
        self,
        embeds: Float[Tensor, "all dim"],
        positions: Int[Tensor, "axes all"] | Sequence[int],
        step: Step,
        deepstack: tuple[Tensor, Tensor] | None = None,
        last: bool = False,
        length: int | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Hidden states (after the last norm) of a flat list of tokens; ``step`` is the attention.

        Text stands at one position on every axis: a list of them will do.
        ``deepstack`` is (mask of visual rows, [layer, seen, dim] to add to the first layers).
        ``last``: only the last one is wanted; what comes before it may be left out.
        ``length``: tokens of the prompt these rows are of, which rotary rules may depend on; a row
        that was written is the last of its text.
        """
        refuse_autocast(self.device)
        if self.fused is not None:
            rotation = self.fused.rotation(embeds, positions)
            if deepstack is not None and len(deepstack[1]) >= self.layers:
                last = False  # the last layer, too, has rows added
            return self.fused.decode(embeds, rotation, step, deepstack, last)
        if not isinstance(positions, Tensor):
            positions = torch.tensor(positions, device=self.device).expand(self.axes, -1)
        extra: dict[str, Any] = {}
        if deepstack is not None:
            mask, layers = deepstack
            extra = {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(layers)}
        with self.lock, self._turning(positions, length):
            before = self.text.config._attn_implementation
            self.text.config._attn_implementation = ATTENTION  # for the length of this call
            try:
                out = self.text(
                    inputs_embeds=embeds[None],
                    position_ids=positions[:, None] if self.axes > 1 else positions,
                    use_cache=False,
                    saccade_step=step,
                    **extra,
                )
            finally:
                self.text.config._attn_implementation = before
        return out.last_hidden_state[0]

    def prepare(self, threads: int) -> None:
        """Gets ready to compute with so many threads of the CPU, so that no answer has to."""
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            self._tower.prepare()
            if self.fused is not None:
                self.fused.refresh()
        finally:
            torch.set_num_threads(before)
        if self.fused is not None:
            self.fused.refresh()

    @contextmanager
    def _turning(self, positions: Int[Tensor, "axes all"], length: int | None) -> Iterator[None]:
        """While this lasts each row is rotated as in a text of its own length, where that tells."""
        if not self.rotates_by_length:
            yield
            return
        lengths = positions[0] + 1 if length is None else positions.new_full((1,), length)
        rotary = self.text.rotary_emb
        with _attributes(rotary, forward=partial(rotate_by_length, rotary, lengths)):
            yield

    def logits(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        """The model's logits: its head's output, and what its own forward makes of that."""
        whole = self.whole or self  # A model that is stopped early has the whole one's head.
        if whole.through_model is None:
            whole.through_model = whole._does_more_than_its_head()
        if whole.through_model:
            return whole._logits_of_model(hidden)
        head = (
            self.head_module if self.fused is None or self.fused.head is None else self.fused.head
        )
        return head(hidden).to(self.device)

    def _logits_of_model(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        """Logits by the model's own forward, in which its decoder gives these hidden states.

        Families scale or cap what their head gives, each in its own way.
        """

        def give(*args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=hidden[None])

        unhooked: dict[str, Any] = {name: {} for name in HOOKS}  # hooks have seen these states
        plain = next(id_ for id_ in range(self.embeddings) if id_ not in self.placeholders)
        ids = torch.full((1, len(hidden)), plain, device=self.device)
        with self.lock, _attributes(self.text, forward=give, **unhooked):
            out = self.model(input_ids=ids, use_cache=False)
        return out.logits[0].to(self.device)

    @torch.no_grad()
    def _does_more_than_its_head(self) -> bool:
        """Whether the model's logits are other numbers than its head gives.

        A cap shows on large logits alone, so hidden states are tried that are far too large.
        """
        noise = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, self.config.hidden_size, generator=noise)
        hidden = (hidden * torch.tensor([[1.0], [64.0]])).to(self.device, self.dtype)
        try:
            theirs = self._logits_of_model(hidden)
        except Exception as error:  # a model raises almost anything over a prompt it does not take
            log.info("the model's head is tried alone: %s", error)
            return False
        ours = self.head_module(hidden).to(self.device)
        if ours.shape != theirs.shape:
            return True
        gap = (ours.float() - theirs.float()).abs().amax(1)
        most = theirs.float().abs().amax(1)
        return bool((gap > APART.get(self.dtype, APART[torch.bfloat16]) * most).any())

    @property
    def token_bytes(self) -> int:
        """Bytes a token's keys and values take."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    def cache(self, capacity: int) -> Cache:
        """Room for the keys and values of a request, where each layer is."""
        return Cache(
            self.layers,
            self.kv_heads,
            self.head_dim,
            capacity,
            dtype=self.dtype,
            devices=self.devices,
        )

    def keeping(self, kept: Kept | None) -> Backbone:
        """The same model, whose sessions keep what they read and begin with what is kept."""
        found = copy(self)
        found.kept = kept
        return found

    def first(self, layers: int) -> Backbone:
        """The same model stopped after its first ``layers``, then its norm and head; no copies."""
        short = copy(self)
        short.whole = self.whole or self
        short.layers, short.devices = layers, self.devices[:layers]
        short.fused = None if self.fused is None else self.fused.first(layers)
        short.text = copy(self.text)
        short.text._modules = {**self.text._modules, "layers": self.text.layers[:layers]}
        return short

    @torch.no_grad()
    def written(self, prompt: Prompt) -> Prompt:
        """The prompt with the rows a view left blank embedded as the ids they are to say."""
        ids = prompt.reading.ids_to_embed
        if ids is None:
            return prompt
        embeds = prompt.embeds.clone()
        embeds[ids >= 0] = self.embed(ids[ids >= 0])
        return replace(prompt, embeds=embeds, reading=replace(prompt.reading, ids_to_embed=None))

    # -- sharing -------------------------------------------------------------------------------

    @once
    def shares_rows_with(self, other: Backbone) -> bool:
        """Whether both models turn pixels into the very same rows at the same positions. Weights
        are compared once: a tower that is trained later on is another's no more."""
        ropes = [each.config.to_dict().get("rope_parameters") for each in (self, other)]
        mine = _tower(self)
        return bool(mine) and ropes[0] == ropes[1] and _equal(mine, _tower(other))

    @once
    def shares_vision_with(self, other: Backbone) -> bool:
        """Whether both have the very same vision tower, whatever projects what it gives."""
        mine, theirs = self._eyes, other._eyes
        if mine is None or theirs is None or self.device != other.device:
            return False
        return _equal(dict(mine.named_parameters()), dict(theirs.named_parameters()))

    def record_vision(self, seen: list[Any]) -> RemovableHandle:
        """From now on ``seen`` takes (pixels, what the vision tower gives), until removed."""
        assert self._eyes is not None, "shares_vision_with says whether there is a tower"
        return self._eyes.register_forward_hook(
            lambda module, args, given: seen.append((args[0] if args else None, given))
        )

    @contextmanager
    def _shown(self, seen: Sequence[Any] | None) -> Iterator[None]:
        """The vision tower gives what was ``seen`` of these very pixels instead of looking."""
        if seen is None or self._eyes is None:
            yield
            return
        before, look = vars(self._eyes).get("forward"), self._eyes.forward

        def remembered(*args: Any, **kwargs: Any) -> Any:
            for pixels, given in seen:
                same = args and pixels is not None and pixels.shape == args[0].shape
                if same and torch.equal(pixels, args[0].to(pixels)):
                    return given
            return look(*args, **kwargs)

        self._eyes.forward = remembered
        try:
            yield
        finally:
            del self._eyes.forward
            if before is not None:
                self._eyes.forward = before

    @property
    def _eyes(self) -> Any:
        return self.model.base_model._modules.get("vision_tower")

    @torch.no_grad()
    def adopt(self, prompt: Prompt) -> Prompt:
        """Another model's prompt with its visual rows kept and its text embedded by this one."""
        prompt = prompt.to(self.device)
        embeds = self.embed(prompt.context)
        seen = prompt.visual | prompt.fixed
        embeds[seen] = prompt.embeds[seen].to(embeds)
        return replace(prompt, embeds=embeds)


@contextmanager
def _attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """While this lasts a module has these attributes instead of its own."""
    own, before = vars(module), {name: vars(module).get(name) for name in values}
    there = {name for name in values if name in own}
    own.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in there:
                own[name] = before[name]
            else:
                del own[name]


def _step_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """What transformers' layers call: our attention when a step came along, else plain SDPA."""
    step: Step | None = kwargs.pop("saccade_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    out = step(module.layer_idx, query[0], key[0], value[0], float(kwargs["scaling"]))
    return out.view(1, out.shape[0], query.shape[1], query.shape[3]), None


AttentionInterface.register(ATTENTION, _step_attention)


def place_of(module: nn.Module) -> torch.device:
    """Where a module computes; of one that is kept elsewhere and fetched, where accelerate says."""
    hook = vars(module).get("_hf_hook")
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    return next(module.parameters()).device


def _equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Whether these are the very same weights; quantised ones never count as such."""
    return mine.keys() == theirs.keys() and all(
        type(mine[name].data) is type(theirs[name].data) is Tensor
        and mine[name].shape == theirs[name].shape
        and mine[name].dtype == theirs[name].dtype
        and torch.equal(mine[name], theirs[name].to(mine[name].device))
        for name in mine
    )


def _tower(backbone: Backbone) -> dict[str, Tensor]:
    """Every weight between pixels and the language model."""
    text = {id(p) for p in backbone.text.parameters()} | {id(backbone.head_module.weight)}
    return {n: p for n, p in backbone.model.named_parameters() if id(p) not in text}
