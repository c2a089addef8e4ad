"""A Hugging Face model as the rest of the package sees it: its prompts, its decoder, and what two
models have in common.

``Backbone.prompts`` returns what the model passes to its language model (see ``prompt_reader``).
``Backbone.forward`` runs the language model: a list of tokens in, hidden states out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
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

from saccade.core.errors import ModelError, OptionError, SaccadeError, first_line
from saccade.core.once import once
from saccade.core.prompt import Inputs, Prompt
from saccade.model import families, memory, recurrent, tensor_parallel, windowed_attention
from saccade.model.attention import ForwardAttention, quickest_attention
from saccade.model.cache import Cache, HeadShape, max_window_rows
from saccade.model.change_detection import (
    HOOKS,
    Description,
    Snapshot,
    foreign_hooks,
    is_patched,
    lock_of,
    refuse_autocast,
)
from saccade.model.decoder import FusedDecoder
from saccade.model.hidden_states import AFTER_NORM, HiddenStates
from saccade.model.kernels import few_bits
from saccade.model.kernels.few_bits import Rounding
from saccade.model.kernels.few_rows import Kernels, kernels_for
from saccade.model.kernels.tower import OutsideKernels
from saccade.model.prefix_cache import PrefixCache
from saccade.model.prompt_reader import PromptReader
from saccade.model.recurrent import LayerStates, MixerRows, RowsBySegment, StateRows
from saccade.model.rotary import depends_on_length, rotary_by_length
from saccade.model.segments import HiddenStateWriter, Segment
from saccade.model.vision_cache import ConversationVision, cache_vision
from saccade.model.window_rule import KeyWindow
from saccade.model.windowed_attention import LogitExtras

log = logging.getLogger(__name__)

ATTENTION_NAME = "saccade"  # The name of our attention in transformers' AttentionInterface.
BACKBONE_ATTRIBUTE = "_saccade_backbone"  # A model's backbone is stored in this attribute of it.

MAX_ROUNDING_DIFFERENCE = {
    torch.float32: 1e-4,
    torch.float16: 0.02,
    torch.bfloat16: 0.05,
    torch.float64: 1e-6,
}
"""How much logits may differ by rounding alone, as a share of the largest logit."""


class Backbone:
    """A loaded model: inputs -> prompts, ids -> embeddings, embeddings -> hidden states -> logits.

    ``positions`` says which positions text after a video has: those that transformers gives it
    ("library", so that answers are those of ``generate``), or those that Qwen2.5-VL was trained
    with ("trained").
    ``fused`` picks the decoder. None is our own where the architecture is known, and else the
    modules of the model. True is our own, and raises ModelError where the architecture is not
    known. False is the modules of the model, which are also the reference in tests.
    """

    hidden_layers: Sequence[int] = ()
    """Which hidden states of the target a draft head reads (``HiddenStates``). A whole model, as
    here, reads none."""
    levels_per_forward: int = 1
    """How many levels of a draft one forward scores: several for a draft head that drafts whole
    blocks of tokens."""

    def __init__(
        self,
        model: nn.Module,
        *,
        fused: bool | None = None,
        positions: Literal["library", "trained"] = "library",
    ) -> None:
        # The caller's weights may become views of tensors that are made here. If these were made in
        # the caller's inference mode, the weights could not be trained after it.
        with torch.inference_mode(False), torch.no_grad():
            self._build(model, fused, positions)

    def _build(
        self, model: nn.Module, fused: bool | None, positions: Literal["library", "trained"]
    ) -> None:
        self.model = cast(Any, model)
        self._fused_option, self._position_rule = fused, positions
        try:
            families.refuse_unsupported(
                self.model.config, self.model.config.get_text_config(decoder=True)
            )
            self.text = families.language_model(self.model)
            config = cast(Any, self.text.config)
            layers = [*self.text.layers[: config.num_hidden_layers]]
            self.heads: int = config.num_attention_heads
            self.kv_heads: int = config.num_key_value_heads or self.heads
            head = self.head_module = cast(Any, self.model.get_output_embeddings())
            self.vocab: int = head.weight.shape[0]
        except AttributeError as error:
            raise ModelError(
                f"{type(model).__name__} has no decoder of layers, with a head over them, that "
                "Saccade knows how to drive"
            ) from error

        # A model may be split by heads over several processes (tensor parallelism). From here on
        # ``heads`` and ``kv_heads`` are the numbers of this process's heads.
        self.shares = tensor_parallel.head_shares(layers[0])
        self.heads //= self.shares.count
        self.kv_heads //= self.shares.count

        # Which layers have keys, and which a state.
        self.config = config
        self.layer_count: int = len(layers)
        self.mixers = recurrent.mixers_of(layers, config)
        """The recurrent layers, which have a state instead of keys, by their place among all
        layers."""
        with_keys = [layer for layer in range(self.layer_count) if layer not in self.mixers]
        self.key_layers = {layer: number for number, layer in enumerate(with_keys)}
        """The layers that have keys: their place among all layers -> their place among these."""
        self.key_layer_count: int = len(self.key_layers)
        # The sliding window of each layer that has keys, None where it sees all keys. The list is
        # empty if no layer has a window.
        windows = windowed_attention.windows_of(config, [*self.key_layers])
        self.windows: list[KeyWindow | None] = windows if any(windows) else []

        # The width of heads, the positions and the embeddings.
        config_fields = config.to_dict()
        self.head_dim: int = (
            config_fields.get("head_dim") or config.hidden_size // config.num_attention_heads
        )
        rope = config_fields.get("rope_parameters") or {}
        # Where a config leaves the sections of the axes out, the rotary module has the usual ones.
        rotary = self.text._modules.get("rotary_emb")
        default_sections = () if rotary is None else vars(rotary).get("mrope_section", ())
        # How many position numbers a token has: three for M-RoPE (time, height, width), else one.
        self.axes = len(rope.get("mrope_section") or default_sections or ()) or 1
        # Some models (Gemma 3n and 4) read a second embedding of each token, with a part for each
        # layer. Only their configs have this field, the width of such a part.
        has_layer_embeddings = bool(config_fields.get("hidden_size_per_layer_input"))
        self._row_argument_names = {"per_layer_inputs"} if has_layer_embeddings else set()
        self.max_positions: int | None = config_fields.get("max_position_embeddings")
        self._embed: Any = self.model.get_input_embeddings()
        # The head of a model may have more ids than its embedding can read.
        self.embedding_count: int = self._embed.weight.shape[0]

        # Where and how the model is run: the reader of prompts, the vision tower and the decoder.
        self.device = device_of(self._embed)
        self.devices = [device_of(layers[layer]) for layer in self.key_layers]
        self.dtype: torch.dtype = head.weight.dtype
        self._reader = PromptReader(
            self.model,
            self.text,
            self.axes,
            self.device,
            uses_trained_positions=positions == "trained",
        )
        self.placeholders = self._reader.placeholders
        can_fuse = self.shares.count == 1 and not self.windows and FusedDecoder.supports(self.text)
        if fused and not can_fuse:
            raise ModelError(
                f"the fused decoder does not know {config.model_type}: leave it to choose by itself"
            )
        memory.reuse_freed_memory()  # This has to come before anything is timed.
        self.rotates_by_length = depends_on_length(self.text)
        self.lock = lock_of(self.text)
        # This runs the modules outside the decoder and its head, such as the vision tower, by the
        # fastest kernels.
        self._outside_kernels = OutsideKernels(self.model, self.text, head)
        self.prefix_cache: PrefixCache | None = None  # A server shares one between its requests.
        self.graphs: dict[int, Any] = {}
        """The decoding forwards that were captured as CUDA graphs, by the number of layers that
        they run. :meth:`first_layers` shares the dictionary."""
        self.full_backbone: Backbone | None = None  # The whole model, if this is its first layers.
        self.rounding: Rounding | None = None  # How a draft's copies of the weights are rounded.
        self._rounded: dict[Rounding, Backbone] = {}
        self.fused: FusedDecoder | None = None
        self.few_row_kernels: Kernels | None = None  # attention for captured forwards, on GPUs
        if can_fuse and fused is not False:
            self.fused = FusedDecoder(self.text, head, self.axes)

        # The heads as the layers use them, and the attention kernels for them.
        self.head_shapes = self._find_head_shapes()
        shapes = {*self.head_shapes}
        # Whether layers differ in their key heads, or values have another width than keys.
        self.has_uneven_heads = len(shapes) > 1 or any(
            shape.key_dim != shape.value_dim for shape in shapes
        )
        if shapes and not self.has_uneven_heads:
            (shape,) = shapes
            self.kv_heads, self.head_dim = shape.kv_heads, shape.key_dim
        self.attention_choice = quickest_attention(
            self.heads, self.kv_heads, self.head_dim, self.devices, self.dtype
        )
        if self.fused is not None:
            self.few_row_kernels = kernels_for(
                self.heads, self.kv_heads, self.head_dim, self.devices, self.dtype
            )

        # Whether the model's logits here were compared with those of its ``generate``
        # (``generate_check``).
        self.is_checked_against_generate = False
        # The backbone that ``current`` made after the latest change of the model.
        self._newest: Backbone | None = None
        modules = [*self.model.modules()]
        outer = [each for each in modules if any(self.text is part for part in each.modules())]
        self.outer_modules: list[nn.Module] = [each for each in outer if each is not self.text]
        """The modules that contain the language model."""
        # Whether logits are more than the output of the head; None until that was tried.
        self.needs_model_for_logits: bool | None = None
        # Somebody's hook or forward around the language model may change the logits.
        if any(foreign_hooks(each) or is_patched(each) for each in self.outer_modules):
            self.needs_model_for_logits = True
        self._snapshot, self.description = self._describe_modules()

    @classmethod
    def of(cls, model: nn.Module) -> Backbone:
        """Returns the backbone of a model as it is now. A new one is made at the first call, and
        after a change of the model."""
        with lock_of(model):
            # It is stored on the model itself, so that both are freed together.
            old: Backbone | None = vars(model).get(BACKBONE_ATTRIBUTE)
            backbone = cls(model) if old is None or old.model is not model else old.current()
            if backbone is not old:
                vars(model)[BACKBONE_ATTRIBUTE] = backbone
            return backbone

    # -- changes of the model ------------------------------------------------------------------

    def current(self) -> Backbone:
        """Returns this backbone if its model is unchanged, else one of the model as it is now.

        It is called before every answer. Where nothing was changed it takes a few microseconds for
        each layer.
        """
        newest = self._newest or self
        if newest._is_current():
            return newest
        with self.lock:
            newest = self._newest or self
            if newest._is_current():
                return newest
            snapshot, description = newest._describe_modules()
            if description == newest.description and not newest._weights_changed():
                newest._snapshot = snapshot  # The change does not matter to any computation.
                return newest
            rebuilt = Backbone(self.model, fused=self._fused_option, positions=self._position_rule)
            if self.rounding is not None:
                rebuilt = rebuilt.rounded(self.rounding)
            rebuilt.prefix_cache = self.prefix_cache
            has_same_structure = rebuilt.description.structure == newest.description.structure
            rebuilt.is_checked_against_generate = (
                newest.is_checked_against_generate and has_same_structure
            )
            if has_same_structure:
                rebuilt.needs_model_for_logits = newest.needs_model_for_logits
            if rebuilt.prefix_cache is not None:
                rebuilt.prefix_cache.clear()  # It has outputs of the model before the change.
            self._newest = rebuilt
            return rebuilt

    def _is_current(self) -> bool:
        return self._snapshot.is_current() and not self._weights_changed()

    def _weights_changed(self) -> bool:
        """Returns whether weights of which there are copies were written to."""
        decoder_changed = self.fused is not None and self.fused.weights_changed()
        return decoder_changed or self._outside_kernels.weights_changed()

    def _describe_modules(self) -> tuple[Snapshot, Description]:
        """Returns the model's present state in two forms.

        The snapshot tells quickly whether anything was changed since. The description has what
        matters to the computation, to find out whether a change that was noticed matters.
        """
        # A rotary module that depends on the length stores numbers of the last text in itself. We
        # never read them, so they do not count as a change of the model.
        ignored = self.text.rotary_emb if self.rotates_by_length else None
        modules = [each for each in self.model.modules() if each is not ignored]
        configs = list({id(config): config for config in self._configs()}.values())
        return Snapshot(modules, configs, self.outer_modules), Description.of(modules, configs)

    def _configs(self) -> Iterator[Any]:
        for module in self.model.modules():
            if "config" in vars(module):
                yield vars(module)["config"]

    # -- prompts -------------------------------------------------------------------------------

    @torch.no_grad()
    def prompts(
        self,
        inputs: Inputs,
        vision_outputs: Sequence[Any] | None = None,
        *,
        with_averaged_rows: bool = False,
        vision: ConversationVision | None = None,
    ) -> list[Prompt]:
        """Returns every request of a processor's output as the language model would read it.

        Padding is dropped, so prompts may differ in length.

        Args:
            inputs: the processor's output.
            vision_outputs: what the vision tower of another model, which has the same weights,
                returned for these inputs (:meth:`record_vision`). It is used instead of running
                this model's tower.
            with_averaged_rows: whether ``Media.averaged_rows`` is filled in too: the visual rows,
                averaged in blocks of 2x2 before the projector. It stays empty for models that
                cannot do this (:attr:`can_average_rows`). The vision tower does not run again.
            vision: the tower's outputs that a conversation has stored. Media that are among them do
                not go through the tower again. A model with a prefix cache does not use these
                outputs, because it looks them up in that cache.
        """
        with self.lock, nullcontext() if vision is None else vision.reading(self.model):
            return self._read_prompts(inputs, vision_outputs, with_averaged_rows, vision)

    def _read_prompts(
        self,
        inputs: Inputs,
        vision_outputs: Sequence[Any] | None,
        with_averaged_rows: bool,
        vision: ConversationVision | None,
    ) -> list[Prompt]:
        refuse_autocast(self.device)
        if self.windows:
            _refuse_hidden_tokens(inputs.get("attention_mask"))
        with_averaged_rows = with_averaged_rows and self.can_average_rows
        # What the tower gives for these inputs, to be replayed below: first the outputs that the
        # caller has given, then those of the calls that are recorded here.
        recorded = [*(vision_outputs or ())]
        store = vision if self.prefix_cache is None else self.prefix_cache
        if self.prefix_cache is not None:
            # The cache remembers the pixels' digests, which are cheaper to compute before the
            # pixels are moved to the model's device.
            inputs = self.prefix_cache.move_pixels(inputs, self.device)
        with (
            cache_vision(self.model, store),
            self._replay_vision(vision_outputs),
            self._outside_kernels.use_quickest_kernels(),
        ):
            with self.record_vision(recorded) if with_averaged_rows else nullcontext():
                prompts = self._reader.read(inputs)
        if not with_averaged_rows:
            return prompts
        # The prompts are read again. The tower's outputs are replayed, and averaged before they are
        # projected.
        with (
            self._replay_vision(recorded),
            self._reader.average_pictures(),
            self._outside_kernels.use_quickest_kernels(),
        ):
            averaged_prompts = self._reader.read(inputs)
        rows_of_prompts = [prompt.embeds[prompt.visual] for prompt in averaged_prompts]
        return [
            replace(prompt, media=replace(prompt.media, averaged_rows=rows))
            for prompt, rows in zip(prompts, rows_of_prompts, strict=True)
        ]

    @property
    def can_average_rows(self) -> bool:
        """Whether the output of the vision tower can be averaged before it is projected."""
        return self.model.config.model_type in families.TOKENWISE_PROJECTORS

    @torch.no_grad()
    def assemble(self, inputs: Inputs, rows: Float[Tensor, "visual dim"]) -> Prompt:
        """Returns one request's prompt from its visual rows, whichever model computed them."""
        return self._reader.assemble(inputs, rows)

    # -- decoding ------------------------------------------------------------------------------

    def embed(self, ids: Sequence[int] | Tensor) -> Float[Tensor, "... dim"]:
        return self._embed(torch.as_tensor(ids, device=self.device))

    def row_arguments(
        self, ids: Sequence[int], embeds: Float[Tensor, "all dim"]
    ) -> dict[str, Tensor]:
        """Returns what the language model reads of rows of text besides their embeddings."""
        if not self._row_argument_names:
            return {}
        rows = torch.as_tensor(ids, device=self.device)[None]
        return {
            name: compute(self.text, rows, embeds[None])[0]
            for name, compute in families.ROW_ARGUMENTS.items()
            if name in self._row_argument_names and compute is not None
        }

    def forward(
        self,
        embeds: Float[Tensor, "all dim"],
        positions: Int[Tensor, "axes all"] | Sequence[int],
        step: ForwardAttention,
        deepstack: tuple[Tensor, Tensor] | None = None,
        only_last_row: bool = False,
        length: int | None = None,
        row_arguments: Mapping[str, Tensor] | None = None,
        mixer_rows: MixerRows | None = None,
    ) -> Float[Tensor, "rows dim"]:
        """Returns the hidden states (after the last norm) of a flat list of tokens.

        Args:
            embeds: the embedded tokens of all requests, one request after another.
            positions: on each axis; a list for text, whose position is the same on every axis.
            step: the attention, which also writes keys and values.
            deepstack: (mask of visual rows, [layer, visual, dim] to add to the first layers).
            only_last_row: only the last hidden state is needed, so earlier ones may be left out.
            length: the number of tokens of the prompt that these rows belong to. Only rotary rules
                that depend on the length of a text read it. If it is None, each row is rotated as
                the last token of its own text.
            row_arguments: what the language model reads of each row besides its embedding
                (``families.ROW_ARGUMENTS``).
            mixer_rows: the object through which recurrent layers read and write their states for
                these rows. By default it uses the states in the caches of the step's requests.
        """
        refuse_autocast(self.device)
        writer = HiddenStateWriter(step.segments)
        if self.fused is not None:
            rotation = self.fused.rotation(embeds, positions)
            if deepstack is not None and len(deepstack[1]) >= self.key_layer_count:
                # Deepstack adds to the output of the last layer too. It finds the rows to add to by
                # a mask over all rows, so the last layer must return all of them.
                only_last_row = False
            # A draft head may read what the last layer computes for every row.
            only_last_row = only_last_row and not writer.needs_last_layer(self.layer_count)
            write_hidden = writer.write if writer.layers else None
            return self.fused.decode(
                embeds, rotation, step, deepstack, only_last_row, write_hidden=write_hidden
            )
        if not isinstance(positions, Tensor):
            positions = torch.tensor(positions, device=self.device).expand(self.axes, -1)
        extra: dict[str, Any] = {name: each[None] for name, each in (row_arguments or {}).items()}
        if deepstack is not None:
            mask, layers = deepstack
            extra |= {"visual_pos_masks": mask[None], "deepstack_visual_embeds": list(layers)}
        with (
            self.lock,
            self._use_lengths_for_rotary(positions, length),
            self._run_mixers(step.segments, mixer_rows),
            self._write_hidden(writer),
        ):
            before = self.text.config._attn_implementation
            self.text.config._attn_implementation = ATTENTION_NAME
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
        writer.write(AFTER_NORM, out.last_hidden_state[0])
        return out.last_hidden_state[0]

    @contextmanager
    def _write_hidden(self, writer: HiddenStateWriter) -> Iterator[None]:
        """While this lasts, each layer whose input a draft head reads also writes that input to the
        caches.

        ``writer.layers`` has the numbers of these layers. In a model of 32 layers, 32 stands for
        the last norm, whose input is what the last layer returns. The norm's output
        (``AFTER_NORM``) is written by :meth:`forward`.
        """
        modules = [*self.text.layers[: self.layer_count], self.text._modules.get("norm")]
        with ExitStack() as stack:
            for number in writer.layers - {AFTER_NORM}:
                run = _with_input_written(modules[number], partial(writer.write, number))
                stack.enter_context(_replace_attributes(modules[number], forward=run))
            yield

    def hidden_states(self, layers: Sequence[int], capacity: int) -> HiddenStates:
        """Returns room for these layers' hidden states of ``capacity`` tokens, for a request's
        cache."""
        return HiddenStates(
            layers,
            self.config.hidden_size,
            capacity,
            dtype=self.dtype,
            device=self.devices[-1] if self.devices else self.device,
        )

    @contextmanager
    def _run_mixers(
        self, segments: Sequence[Segment], rows: MixerRows | None = None
    ) -> Iterator[None]:
        """While this lasts, recurrent layers read and write their states through ``rows``. If that
        is None, they use the states of the segments' requests. If there are no segments either,
        they return zeros, which is enough for :meth:`_find_head_shapes`.
        """
        if not self.mixers:
            yield
            return
        if rows is None and segments:
            rows = RowsBySegment([state_rows(segment) for segment in segments])
        with ExitStack() as stack:
            for number, mixer in enumerate(self.mixers.values()):
                run = recurrent.replacement_forward(mixer, rows, number)
                stack.enter_context(_replace_attributes(mixer.module, forward=run))
            yield

    def prepare(self, threads: int) -> None:
        """Chooses kernels for a number of CPU threads ahead, so that no answer waits for it.

        The fused decoder then goes back to its kernels for the number of threads in use.
        """
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            self._outside_kernels.prepare()
            if self.fused is not None:
                self.fused.refresh()
        finally:
            torch.set_num_threads(before)
        if self.fused is not None:
            self.fused.refresh()

    @contextmanager
    def _use_lengths_for_rotary(
        self, positions: Int[Tensor, "axes all"], length: int | None
    ) -> Iterator[None]:
        """While this lasts, rotary rules that depend on the length of a text rotate each row as in
        a text of ``length`` tokens. If that is None, each row is rotated as in a text that ends
        with this row."""
        if not self.rotates_by_length:
            yield
            return
        lengths = positions[0] + 1 if length is None else positions.new_full((1,), length)
        rotary = self.text.rotary_emb
        with _replace_attributes(rotary, forward=partial(rotary_by_length, rotary, lengths)):
            yield

    def logits(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        """Returns the model's logits: the output of its head (the matrix from hidden states to the
        vocabulary), scaled or capped where the model's own forward does so."""
        full = self.full_backbone or self  # A model stopped early uses the whole model's head.
        if full.needs_model_for_logits is None:
            full.needs_model_for_logits = full._does_more_than_its_head()
        if full.needs_model_for_logits:
            return full._logits_of_model(hidden)
        head = self.head_module
        if self.fused is not None and self.fused.head is not None:
            head = self.fused.head
        return head(hidden).to(self.device)

    def _logits_of_model(self, hidden: Float[Tensor, "rows dim"]) -> Float[Tensor, "rows vocab"]:
        """Returns what the model's own forward makes of these hidden states.

        Some families scale or cap the output of their head, each in its own way. The model's
        forward is called with a stand-in for its decoder, which returns ``hidden``.
        """

        def decode(*args: Any, **kwargs: Any) -> BaseModelOutputWithPast:
            return BaseModelOutputWithPast(last_hidden_state=hidden[None])

        # The hooks ran when these hidden states were computed, and must not run twice.
        no_hooks: dict[str, Any] = {name: {} for name in HOOKS}
        # The ids matter only by their number, as `decode` does not read them. They must not stand
        # for a picture, because none is given.
        plain_id = next(id_ for id_ in range(self.embedding_count) if id_ not in self.placeholders)
        ids = torch.full((1, len(hidden)), plain_id, device=self.device)
        with self.lock, _replace_attributes(self.text, forward=decode, **no_hooks):
            out = self.model(input_ids=ids, use_cache=False)
        return out.logits[0].to(self.device)

    @torch.no_grad()
    def _does_more_than_its_head(self) -> bool:
        """Returns whether the model's logits differ from the output of its head.

        A cap shows on large logits alone, so this also tries hidden states that are far too large.
        """
        noise = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, self.config.hidden_size, generator=noise)
        hidden = (hidden * torch.tensor([[1.0], [64.0]])).to(self.device, self.dtype)
        try:
            logits = self._logits_of_model(hidden)
        except Exception as error:  # A model raises almost anything over a prompt without pictures.
            log.info(
                "the model's own forward failed on plain text, so its head is used alone: %s", error
            )
            return False
        head_logits = self.head_module(hidden).to(self.device)
        if head_logits.shape != logits.shape:
            return True
        gap = (head_logits.float() - logits.float()).abs().amax(1)
        largest = logits.float().abs().amax(1)
        bfloat16_difference = MAX_ROUNDING_DIFFERENCE[torch.bfloat16]
        max_difference = MAX_ROUNDING_DIFFERENCE.get(self.dtype, bfloat16_difference)
        return bool((gap > max_difference * largest).any())

    @property
    def head_weights(self) -> int:
        """How many weights the head has, which turns a hidden state into logits."""
        return int(self.vocab * self.config.hidden_size)

    @property
    def weight_bytes_per_step(self) -> float:
        """The bytes of weights that a forward of one row reads."""
        layers = families.weights_per_token(self.text.layers, self.config)
        rounding = self.rounding
        size = self.dtype.itemsize if rounding is None else rounding.bytes_per_weight
        return (layers + self.head_weights) * size

    @property
    def token_bytes(self) -> int:
        """Bytes that the keys and values of a token take."""
        return sum(self._row_bytes)

    @property
    def _row_bytes(self) -> list[int]:
        """The bytes that the keys and values of a token take in each layer that has keys."""
        size = self.dtype.itemsize
        return [
            shape.kv_heads * (shape.key_dim + shape.value_dim) * size for shape in self.head_shapes
        ]

    def window_bytes(self, tokens: int, forward_rows: int) -> int:
        """Returns the bytes that a request of so many tokens takes at most in the layers that evict
        the keys behind their window (see :meth:`new_cache`).

        They include copies of earlier windows, which the cache keeps so that it can be cut back to
        earlier lengths.
        """
        if not self.windows:
            return 0
        return sum(
            row_bytes * max_window_rows(window, tokens, forward_rows)
            for row_bytes, window in zip(self._row_bytes, self.windows, strict=True)
            if window is not None
        )

    @property
    def unbounded_token_bytes(self) -> int:
        """Bytes that a token takes in layers without a window."""
        if not self.windows:
            return self.token_bytes
        pairs = zip(self._row_bytes, self.windows, strict=True)
        return sum(row_bytes for row_bytes, window in pairs if window is None)

    def hidden_state_bytes(self, layers: Sequence[int]) -> int:
        """Returns the bytes that the hidden states of these layers take for a token."""
        return len(layers) * int(self.config.hidden_size) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes that the states of a request take at most, however long it is.

        Besides the latest states there are older ones, to which the request can be cut back. It is
        0 where every layer has keys.
        """
        mixers = self.mixers.values()
        # A state has the last inputs of a convolution (its window), and in Gated DeltaNet also a
        # memory, which is in fp32.
        convolution_bytes = sum(mixer.conv_state_numbers for mixer in mixers) * self.dtype.itemsize
        memory_bytes = sum(mixer.fp32_state_numbers for mixer in mixers) * torch.float32.itemsize
        return (convolution_bytes + memory_bytes) * recurrent.STATES_PER_REQUEST

    def new_cache(self, capacity: int, forward_rows: int | None = None) -> Cache:
        """Returns an empty cache for ``capacity`` tokens of a request. Each layer's tensors are on
        the device of that layer.

        If ``forward_rows`` is given, layers with a window evict the keys behind it, and a forward
        has at most so many rows. If it is None, all keys are kept.
        """
        return Cache(
            self.head_shapes,
            capacity,
            dtype=self.dtype,
            devices=self.devices,
            states=self.empty_states(),
            windows=() if forward_rows is None else self.windows,
            forward_rows=forward_rows or 0,
        )

    def _find_head_shapes(self) -> list[HeadShape]:
        """Returns the shapes of the keys and values that each layer hands to attention.

        The fused decoder has one shape for all layers. The layers of other models are run on one
        token, without the caller's hooks, because the shapes cannot be told from their configs:
        some models have latent attention, some have other heads in layers with a window, and some
        configs have settings that no layer reads.
        """
        usual = HeadShape(self.kv_heads, self.head_dim, self.head_dim)
        if self.fused is not None:
            return [usual] * self.key_layer_count
        probe = _ShapeProbe(self.key_layers)
        try:
            with self.lock, _without_foreign_hooks(self.text):
                embeds = self.embed([0])
                self.forward(embeds, [0], probe, row_arguments=self.row_arguments([0], embeds))
        except SaccadeError:
            raise
        except Exception as error:  # The modules of an unknown model may raise anything.
            # It is no error yet. Such a target is refused before its first answer
            # (``generate_check``), and an answer goes on without a draft that fails.
            log.info("the layers could not be run on one token: %s", first_line(error))
        return [probe.shapes.get(number, usual) for number in range(self.key_layer_count)]

    def empty_states(self) -> LayerStates | None:
        """Returns the states before the first token; None where every layer has keys."""
        if not self.mixers:
            return None
        return LayerStates([mixer.empty(self.dtype) for mixer in self.mixers.values()])

    def with_prefix_cache(self, prefix_cache: PrefixCache | None) -> Backbone:
        """Returns the same model with a prefix cache. Its sessions reuse the prefixes stored there,
        and store what they prefill."""
        backbone = copy(self)
        backbone.prefix_cache = prefix_cache
        # The original's rebuilt backbone, if it has one, does not use this prefix cache.
        backbone._newest = None
        return backbone

    def first_layers(self, count: int) -> Backbone:
        """Returns the same model stopped after its first ``count`` layers, with its norm and head.
        No weight is copied."""
        short = copy(self)
        short.full_backbone = self.full_backbone or self
        short.layer_count = count
        short.mixers = {layer: mixer for layer, mixer in self.mixers.items() if layer < count}
        short.key_layers = {
            layer: number for layer, number in self.key_layers.items() if layer < count
        }
        short.key_layer_count = len(short.key_layers)
        short.windows = self.windows[: short.key_layer_count]
        short.head_shapes = self.head_shapes[: short.key_layer_count]
        short.devices = self.devices[: short.key_layer_count]
        short.fused = None if self.fused is None else self.fused.first_layers(count)
        short.text = copy(self.text)
        short.text._modules = {**self.text._modules, "layers": self.text.layers[:count]}
        return short

    def rounded(self, rounding: Rounding) -> Backbone:
        """Returns the same model as a draft, whose forwards of few rows may use rounded copies of
        the weights.

        Forwards of many rows, such as a prompt's, use the weights themselves, which are shared and
        unchanged. Each rounding's copies are made once. Raises ModelError for a decoder that is
        not fused, for a device that cannot multiply with such weights, and where there is no
        memory.
        """
        if self.rounding == rounding:
            return self
        with self.lock:
            if rounding not in self._rounded:
                self._rounded[rounding] = self._make_rounded(rounding)
            return self._rounded[rounding]

    def _make_rounded(self, rounding: Rounding) -> Backbone:
        if not rounding.is_available_on(self.device):
            reason = few_bits.why_unavailable(rounding, self.device)
            raise ModelError(
                f"draft_quantize={rounding.name} is not available on {self.device}: {reason}"
            )
        if self.fused is None:
            raise ModelError(
                f"draft_quantize rounds decoders that Saccade runs itself, and this "
                f"{self.config.model_type} runs by its own modules: leave draft_quantize out, or "
                "name another draft"
            )
        rounded_copy = copy(self)
        with torch.inference_mode(False), torch.no_grad():
            rounded_copy.fused = self.fused.rounded(rounding)
        rounded_copy.rounding, rounded_copy.graphs, rounded_copy._rounded = rounding, {}, {}
        rounded_copy._newest = None
        return rounded_copy

    def is_rounded_copy_of(self, target: Backbone) -> bool:
        """Returns whether this is the target with rounded weights, so that it may read the
        target's keys."""
        return self.rounding is not None and self.model is target.model

    @torch.no_grad()
    def embed_missing_rows(self, prompt: Prompt) -> Prompt:
        """Returns the prompt with the embeddings of those rows for which a view has given ids alone
        (``Reading.ids_to_embed``, which is -1 for all other rows)."""
        ids = prompt.reading.ids_to_embed
        if ids is None:
            return prompt
        embeds = prompt.embeds.clone()
        embeds[ids >= 0] = self.embed(ids[ids >= 0])
        return replace(prompt, embeds=embeds, reading=replace(prompt.reading, ids_to_embed=None))

    # -- two models ----------------------------------------------------------------------------

    @once
    def shares_rows_with(self, target: Backbone) -> bool:
        """Returns whether both models turn pixels into the very same rows at the same positions.

        Weights are compared once, so a tower may still count as equal after it was trained.
        """
        rope = self.config.to_dict().get("rope_parameters")
        target_rope = target.config.to_dict().get("rope_parameters")
        weights = _vision_weights(self)
        return bool(weights) and rope == target_rope and _equal(weights, _vision_weights(target))

    @once
    def shares_vision_with(self, target: Backbone) -> bool:
        """Returns whether both have the very same vision tower on the same device, whatever
        projects its output."""
        tower, target_tower = self._vision_tower, target._vision_tower
        if tower is None or target_tower is None or self.device != target.device:
            return False
        return _equal(dict(tower.named_parameters()), dict(target_tower.named_parameters()))

    def record_vision(self, outputs: list[Any]) -> RemovableHandle:
        """Appends (pixels, output) to a list whenever the vision tower runs, until the handle is
        removed."""
        assert self._vision_tower is not None, "shares_vision_with says whether there is a tower"
        return self._vision_tower.register_forward_hook(
            lambda module, args, output: outputs.append((args[0] if args else None, output))
        )

    @contextmanager
    def _replay_vision(self, outputs: Sequence[Any] | None) -> Iterator[None]:
        """While this lasts the vision tower does not run on pixels that ``outputs`` has, as
        :meth:`record_vision` recorded them, but returns that output."""
        tower = self._vision_tower
        if outputs is None or tower is None:
            yield
            return
        own_forward = vars(tower).get("forward")
        forward = tower.forward

        def replay(*args: Any, **kwargs: Any) -> Any:
            for pixels, output in outputs:
                same_shape = args and pixels is not None and pixels.shape == args[0].shape
                if same_shape and torch.equal(pixels, args[0].to(pixels)):
                    return output
            return forward(*args, **kwargs)

        tower.forward = replay
        try:
            yield
        finally:
            del tower.forward
            if own_forward is not None:
                tower.forward = own_forward

    @property
    def _vision_tower(self) -> Any:
        return self.model.base_model._modules.get("vision_tower")

    @torch.no_grad()
    def adopt(self, prompt: Prompt) -> Prompt:
        """Returns another model's prompt with its text embedded by this model. The rows that the
        other model's towers computed stay."""
        prompt = prompt.to(self.device)
        embeds = self.embed(prompt.full_ids)
        tower_rows = prompt.visual | prompt.fixed
        embeds[tower_rows] = prompt.embeds[tower_rows].to(embeds)
        return replace(prompt, embeds=embeds)


def state_rows(segment: Segment) -> StateRows:
    """Returns the rows of one request in a forward (a segment) as recurrent layers need them: rows
    that will be committed, then new nodes of its tree."""
    states = segment.cache.states
    assert states is not None
    committed, scored = segment.committed_rows, segment.scored_nodes
    new = segment.stop - segment.start - committed
    # Each row of ``ancestors`` is a new node's, and marks the nodes on its path, itself included.
    # The columns are the nodes that earlier forwards scored, then the new nodes. Without a
    # ``recent_mask`` the tree is a chain, so a new node's path has all earlier nodes and the new
    # ones up to itself.
    if segment.recent_mask is None:
        ancestors = torch.ones(new, scored + new, dtype=torch.bool).tril_(scored)
    else:
        # A segment has committed rows or earlier scored nodes, never both. With committed rows,
        # both axes of ``recent_mask`` begin with these, and all nodes follow. Without, its rows are
        # the new nodes, and its columns the scored nodes and then the new ones. In both cases, what
        # is left without the committed rows has the rows and columns that are described above.
        ancestors = segment.recent_mask[committed:, committed:]
    return StateRows(states, segment.start, segment.stop, committed, scored, ancestors)


class _ShapeProbe:
    """Takes the place of a forward's attention, to record the shapes of layers' keys and values."""

    def __init__(self, key_layers: Mapping[int, int]) -> None:
        self.segments: list[Segment] = []
        self.shapes: dict[int, HeadShape] = {}
        self._key_layers = key_layers

    def key_layer(self, layer: int) -> int:
        return self._key_layers[layer]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, **_: LogitExtras
    ) -> Tensor:
        self.shapes[layer] = HeadShape(k.shape[0], k.shape[2], v.shape[2])
        return q.new_zeros(q.shape[1], q.shape[0] * v.shape[2])


def _with_input_written(module: Any, write: Callable[[Tensor], None]) -> Callable[..., Any]:
    """Returns the forward of a module, extended to pass its input hidden states to ``write``."""
    forward = module.forward

    def run(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        write(hidden_states[0])
        return forward(hidden_states, *args, **kwargs)

    return run


@contextmanager
def _without_foreign_hooks(model: nn.Module) -> Iterator[None]:
    """While this lasts a model runs without the caller's hooks, but with those of transformers."""
    with ExitStack() as stack:
        for module in model.modules():
            foreign = {id(hook) for hook in foreign_hooks(module)}
            for name in HOOKS if foreign else ():
                hooks = vars(module)[name].items()
                known_hooks = OrderedDict(
                    (key, hook) for key, hook in hooks if id(hook) not in foreign
                )
                stack.enter_context(_replace_attributes(module, **{name: known_hooks}))
        yield


@contextmanager
def _replace_attributes(module: nn.Module, **values: Any) -> Iterator[None]:
    """While this lasts a module has these attributes instead of its own."""
    attributes = vars(module)
    before = {name: attributes[name] for name in values if name in attributes}
    attributes.update(values)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                attributes[name] = before[name]
            else:
                del attributes[name]


def _step_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attends for a layer of transformers: by the ``saccade_step`` that our forward passed to it,
    or by SDPA in any other forward."""
    step: ForwardAttention | None = kwargs.pop("saccade_step", None)
    if step is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    layer = step.key_layer(module.layer_idx)
    extras = LogitExtras(kwargs.get("softcap"), kwargs.get("s_aux"))
    extras_argument: dict[str, Any] = {"extras": extras} if extras else {}
    out = step(layer, query[0], key[0], value[0], float(kwargs["scaling"]), **extras_argument)
    return out.view(1, out.shape[0], query.shape[1], value.shape[3]), None


AttentionInterface.register(ATTENTION_NAME, _step_attention)


def device_of(module: nn.Module) -> torch.device:
    """Returns the device where a module computes.

    accelerate may store a module's weights elsewhere and fetch them when it runs. Then this is the
    device that they are fetched to.
    """
    hook = vars(module).get("_hf_hook")
    if hook is not None and hook.execution_device is not None:
        return torch.device(hook.execution_device)
    return next(module.parameters()).device


def _equal(weights: dict[str, Tensor], other_weights: dict[str, Tensor]) -> bool:
    """Returns whether these are the very same weights. Quantised ones never count as equal."""
    # The type of quantised weights is a subclass of Tensor.
    return weights.keys() == other_weights.keys() and all(
        type(weights[name].data) is type(other_weights[name].data) is Tensor
        and weights[name].shape == other_weights[name].shape
        and weights[name].dtype == other_weights[name].dtype
        and torch.equal(weights[name], other_weights[name].to(weights[name].device))
        for name in weights
    )


def _vision_weights(backbone: Backbone) -> dict[str, Tensor]:
    """Returns every weight between the pixels and the language model, by name."""
    text_weights = {id(p) for p in backbone.text.parameters()}
    text_weights.add(id(backbone.head_module.weight))
    return {
        name: weight
        for name, weight in backbone.model.named_parameters()
        if id(weight) not in text_weights
    }


def _refuse_hidden_tokens(mask: Tensor | None) -> None:
    """Raises OptionError for a mask that hides tokens between others.

    Such tokens are left out of the prompt here, but transformers counts them in sliding windows.
    """
    if mask is None or mask.ndim != 2:
        return
    is_real = mask.bool()
    is_after_first = is_real.long().cumsum(1) > 0
    is_before_last = is_real.flip(1).long().cumsum(1).flip(1) > 0
    if bool((is_after_first & is_before_last & ~is_real).any()):
        raise OptionError(
            "the attention mask hides tokens between others, which a model with sliding windows "
            "counts all the same: leave them out of the prompt, or give a mask of ones if they are "
            "text"
        )
