"""The class that vLLM creates: it turns what vLLM's runner holds into requests for the proposer.

vLLM calls the constructor of a custom class with the config alone, and its ``propose`` with rows
that do not name their requests. So ``plugin`` also hands over the runner that created the object.
The names of the rows are read from the runner's batch, and the prompts from the runner's
``requests`` and ``encoder_cache``. If drafting fails, the engine goes on without a draft.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from saccade.core.capabilities import Capability
from saccade.core.errors import DraftFailed, ModelError
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.inputs.loading import Loaded, load
from saccade.inputs.pair_check import check_tokenizers
from saccade.model.families import placeholders
from saccade.model.memory import GIB
from saccade.vllm import attention_watch, cpu_fixes, draft_options, mm_features, plugin
from saccade.vllm.proposer import Proposer
from saccade.vllm.request_drafts import DraftRequest, LookupDrafts, ModelDrafts

log = logging.getLogger("vllm.saccade")  # A child of vLLM's logger, so that it is displayed alike.

# How far two engines' outputs of the same vision tower may differ by rounding: the norm of the
# difference of two rows over the norm of a row.
MAX_RELATIVE_DIFFERENCE = 1e-2
LEAST_SHARE_ALIKE = 0.99  # More than this share of the rows must be so near.


class Draft(plugin.RunnerAware):
    """The draft that vLLM creates where it is named in the option ``--speculative-config``.

    The option is ``'{"method": "custom_class", "model": "saccade.vllm.Draft", ...}'``. The draft's
    own options are those of ``draft_options``. Raises OptionError, MethodError or ModelError while
    the engine starts, and never later.
    """

    def __init__(self, vllm_config: Any, runner: Any = None) -> None:
        self._config, self._runner = vllm_config, runner
        self._max_draft_tokens: int = vllm_config.speculative_config.num_speculative_tokens
        config = (vllm_config.additional_config or {}).get("saccade", {})
        # The option ``length`` is the length of every draft. If it is None, drafts are as long as
        # pays, up to ``_max_draft_tokens``.
        self._options = draft_options.read_options(config, os.environ, self._max_draft_tokens)
        self._view = self._options.resolve_view()
        self._proposer: Proposer | None = None  # None before a model is loaded and after a failure.
        # Whether the draft may use the output of the target's vision tower in vLLM instead of
        # running its own tower (see ``_make_prompt``). None until both were compared for a prompt.
        self._rows_are_alike: bool | None = None
        self._has_warned_of_pruning = False
        self._reserve: Tensor | None = None  # It keeps memory free, see ``load_model``.
        self._attention_watch: attention_watch.AttentionWatch | None = None
        # vLLM gives the config alone, and the plug-in calls ``set_runner`` later. A caller that
        # gives a runner itself, such as a test, needs no plug-in and no fixes of vLLM.
        if runner is None:
            plugin.check_patched()
            if str(vllm_config.device_config.device) == "cpu":
                cpu_fixes.apply_fixes()

    # -- what vLLM calls -----------------------------------------------------------------------

    @torch.inference_mode(False)
    def load_model(self, target: Any) -> None:
        """Loads the draft on the target's device, and reserves the memory of its caches there. A
        lookup has no model, so nothing is loaded or reserved for it. ``target`` is not used."""
        model_config = self._config.model_config
        device = self._config.device_config.device
        if self._options.draft == draft_options.LOOKUP_DRAFT:
            banned = placeholders(model_config.hf_config.to_dict())
            self._proposer = Proposer(
                LookupDrafts(banned),
                max_length=self._max_draft_tokens,
                length=self._options.length,
            )
            return
        dtype = str(model_config.dtype).removeprefix("torch.")
        self._loaded = load(self._options.draft, dtype=dtype, device=str(device))
        self._proposer = self._make_proposer(self._loaded, model_config)
        # Once the models are loaded, vLLM gives the memory that is left to its own cache. This
        # tensor keeps some of it for the draft, and the first ``propose`` frees the tensor. The
        # draft's caches may take ``memory`` bytes. The attention watch stores keys, which may take
        # another ``memory`` bytes.
        memory = int(self._options.memory * GIB)
        reads_attention = Capability.ATTENTION in self._view.needs
        reserved = 2 * memory if reads_attention else memory
        self._reserve = torch.zeros(reserved, dtype=torch.uint8, device=device)
        if reads_attention:
            layers = self._config.compilation_config.static_forward_context
            tokens = self._loaded.backbone.placeholders
            self._attention_watch = attention_watch.AttentionWatch(
                self._runner, layers, tokens, memory
            )

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Returns the drafted tokens of each row of the batch; a row is one request.

        There are none for a row that emitted nothing, or whose text is so near the longest length
        that vLLM allows (``max_model_len``) that the longest draft may not fit. There are none for
        any row after drafting has failed. ``sampled_token_ids`` are the tokens that each row has
        just emitted. ``token_ids_cpu`` has the ids of each row's prompt and of all its emitted
        tokens, and ``num_tokens_no_spec`` the number of these ids. ``slot_mappings`` is not used.
        """
        proposals: list[list[int]] = [[] for _ in sampled_token_ids]
        self._reserve = None
        if self._proposer is None:
            return proposals
        try:
            names = self._runner.input_batch.req_ids[: len(proposals)]
            requests = {}
            for row, (name, end) in enumerate(zip(names, num_tokens_no_spec, strict=False)):
                new = sampled_token_ids[row]
                length = int(end)
                has_room = length + self._max_draft_tokens < self._config.model_config.max_model_len
                if new and has_room:
                    requests[row] = self._request_for(name, new, token_ids_cpu[row], length)
            self._proposer.forget_all_except(names)
            if self._attention_watch is not None:
                self._attention_watch.forget_ended()
            # The proposer learns the cost of decoding from the seconds of the target's last
            # forward, if that forward only decoded. There are three special cases:
            # * The forward prefilled a part of a row's prompt, but not its end. The row emitted
            #   nothing and has no request, so ``decoding_only`` is False.
            # * The forward completed a row's prompt. The row emitted its first token and has a
            #   request, so ``decoding_only`` may be True. The proposer sees that the request is
            #   new, and does not count the forward.
            # * A row is near the longest length. It has no request, so ``decoding_only`` is False
            #   even if the forward only decoded.
            decoding_only = len(requests) == len(names)
            drafts = self._proposer.propose(list(requests.values()), decoding_only=decoding_only)
            for row, each in requests.items():
                proposals[row] = list(drafts[each.name].tokens)
        except Exception as error:  # The target can go on without a draft.
            self._give_up(error)
            proposals = [[] for _ in sampled_token_ids]
        return proposals

    # -- reading the runner --------------------------------------------------------------------

    def set_runner(self, runner: Any) -> None:
        self._runner = runner

    def _request_for(self, name: str, new: Sequence[int], ids: Any, length: int) -> DraftRequest:
        """Returns the proposer's request for a row.

        The row's text is the first ``length`` of ``ids``, and ``new`` are the tokens that the row
        has just emitted.
        """
        state = self._runner.requests[name]
        read = functools.partial(self._read_prefill, name, state)
        return DraftRequest(name, ids[:length], state.num_prompt_tokens, new, read)

    def _read_prefill(self, name: str, state: Any) -> Prefill | None:
        """Returns the draft's whole prompt of a request, at the target's positions.

        Where vLLM prunes videos and the prompt has one, it is the text alone (:meth:`_read_text`).
        Otherwise the result has the target's attention if that was recorded. Returns None where
        the draft needs the pixels and vLLM has dropped them.
        """
        model = self._loaded.backbone
        if self._prunes_videos() and mm_features.have_videos(state.mm_features):
            return self._read_text(name, state)
        inputs = mm_features.draft_inputs(
            state.prompt_token_ids, state.mm_features, model.placeholders, self._loaded.processor
        )
        if inputs is None:
            return None
        # The output of the target's vision tower, if vLLM still has it for all media.
        cached = [self._runner.encoder_cache.get(each.identifier) for each in state.mm_features]
        rows = None
        if cached and all(each is not None for each in cached):
            rows = torch.cat(cached)
            if self._prunes_videos():
                # Where videos are pruned, the positions of the rows follow as further columns.
                rows = rows[:, : self._config.model_config.get_inputs_embeds_size()]
        have_pixels = mm_features.have_pixels(state.mm_features)
        prompt = self._make_prompt(inputs, rows, have_pixels=have_pixels)
        if prompt is None:
            return None
        if model.axes > 1 and state.mrope_positions is not None:
            positions = state.mrope_positions[:, : len(prompt)].to(prompt.positions)
            next_position = len(prompt) + int(state.mrope_position_delta)
            prompt = replace(prompt, positions=positions, next_position=next_position)
        attention = None if self._attention_watch is None else self._attention_watch.take(name)
        if attention is None:
            return _without_target(prompt)
        # Attention was recorded for all rows of the vision tower. A view chooses among the visual
        # rows alone, so the attention to the ``fixed`` rows (newlines of pictures) is left out.
        is_from_tower = prompt.visual | prompt.fixed
        is_visual = prompt.visual[is_from_tower]
        # The attention [layer, kv_head, visual] that each visual key got, with the softmax over all
        # keys (mass) and over the visual keys alone (relevance).
        mass, relevance = (each[..., is_visual] for each in attention)
        return replace(_without_target(prompt), mass=mass, relevance=relevance)

    def _read_text(self, name: str, state: Any) -> Prefill:
        """Returns a prompt's text without its media, at the target's positions.

        This is what the draft reads where vLLM prunes videos, because only the target's encoder
        knows which visual tokens are left. The positions are those that the target computed after
        pruning.
        """
        if not self._has_warned_of_pruning:
            self._has_warned_of_pruning = True
            log.warning(
                "vLLM prunes videos (--video-pruning-rate), so the draft sees none and reads the "
                "text alone; leave the option out to draft with a view of the video"
            )
        if self._attention_watch is not None:
            self._attention_watch.take(name)  # It is of no use here, and its memory becomes free.
        model = self._loaded.backbone
        placeholder_ids = torch.tensor([*model.placeholders], dtype=torch.long)
        ids = torch.tensor(state.prompt_token_ids)
        is_text = ~torch.isin(ids, placeholder_ids)
        inputs = mm_features.draft_inputs(
            ids[is_text].tolist(), (), model.placeholders, self._loaded.processor
        )
        assert inputs is not None
        prompt = model.prompts(inputs)[0]
        if model.axes > 1 and state.mrope_positions is not None:
            prompt_positions = state.mrope_positions[:, : len(ids)]
            positions = prompt_positions[:, is_text.to(prompt_positions.device)].to(
                prompt.positions
            )
            next_position = len(ids) + int(state.mrope_position_delta)
        else:
            positions = is_text.nonzero().T.to(prompt.positions)
            next_position = len(ids)
        prompt = replace(prompt, positions=positions, next_position=next_position)
        return _without_target(prompt)

    def _prunes_videos(self) -> bool:
        """Returns whether vLLM drops visual tokens of videos after its encoder."""
        multimodal = self._config.model_config.multimodal_config
        return multimodal is not None and bool(multimodal.is_multimodal_pruning_enabled())

    def _make_prompt(
        self, inputs: Inputs, rows: Tensor | None, *, have_pixels: bool
    ) -> Prompt | None:
        """Makes the draft's prompt from the target's visual rows, or else from the pixels.

        ``rows`` are the output of the target's vision tower, or None. They are used only after an
        earlier prompt has shown that the draft's own tower gives equal rows. Otherwise the draft's
        tower reads the pixels. Returns None where the pixels are needed and vLLM has dropped them
        (``have_pixels`` is False).
        """
        model = self._loaded.backbone
        if rows is not None and self._rows_are_alike:
            return model.assemble(inputs, rows)
        if not have_pixels:
            return None
        prompt = model.prompts(inputs)[0]
        if rows is not None and self._rows_are_alike is None:
            own_rows = prompt.embeds[prompt.visual | prompt.fixed]
            # ``assemble`` makes no deepstack rows, so a model that needs them reads the pixels.
            self._rows_are_alike = not prompt.media.deepstack and are_alike(own_rows, rows)
        return prompt

    # -- starting and giving up ----------------------------------------------------------------

    def _make_proposer(self, draft: Loaded, model_config: Any) -> Proposer:
        """Makes the proposer of a loaded draft, for vLLM's config of the target. Raises ModelError
        where the two do not fit together."""
        backbone, hf_config = draft.backbone, model_config.hf_config
        family, target_family = backbone.model.config.model_type, hf_config.model_type
        if backbone.placeholders and family != target_family:
            raise ModelError(
                f"{draft.name} is a {family} and needs a processor of its own for media, which "
                f"vLLM does not run: choose a draft of the target's family, {target_family}"
            )
        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer, trust_remote_code=model_config.trust_remote_code
        )
        check_tokenizers(model_config.model, tokenizer, draft.name, draft.tokenizer)
        vocab = min(backbone.vocab, model_config.get_vocab_size())
        banned = {*backbone.placeholders, *placeholders(hf_config.to_dict())}
        eos = backbone.model.generation_config.eos_token_id
        if eos is None:
            ends: tuple[int, ...] = ()
        else:
            ends = tuple(eos) if isinstance(eos, list) else (eos,)
        drafts = ModelDrafts(
            backbone,
            self._view,
            vocab=vocab,
            banned=sorted(token for token in banned if token < vocab),
            ends=ends,
            memory=int(self._options.memory * GIB),
        )
        return Proposer(drafts, max_length=self._max_draft_tokens, length=self._options.length)

    def _give_up(self, error: BaseException) -> None:
        """Ends drafting for good, and frees the draft's model, its caches and the recorded
        attention."""
        if isinstance(error, DraftFailed):
            # ``DraftFailed`` has the tokens that were drafted before the failure. They may be
            # dropped here, because they are the draft's arg-max: dropping a token that was drawn
            # at random could change the distribution of the answers.
            error = error.__cause__ or error
        log.warning(
            "drafting failed with %s: %s; vLLM goes on without a draft",
            type(error).__name__,
            error,
            exc_info=error,
        )
        self._proposer = None
        vars(self).pop("_loaded", None)  # A lookup draft has no model, and so no ``_loaded``.
        if self._attention_watch is not None:
            self._attention_watch.close()
            self._attention_watch = None


def _without_target(prompt: Prompt) -> Prefill:
    """Returns a prompt as a prefill that has neither the target's cache nor its logits."""
    return Prefill(prompt, cache=None, logits=torch.empty(0))


def are_alike(own_rows: Tensor, other_rows: Tensor) -> bool:
    """Returns whether the rows [row, dim] that two engines made of the same pixels are equal.

    Two rows count as equal if they differ by no more than ``MAX_RELATIVE_DIFFERENCE``, as rounding
    may make them differ. A few rows may differ by more (``LEAST_SHARE_ALIKE``).
    """
    if own_rows.shape != other_rows.shape:
        return False
    distance = (own_rows.float() - other_rows.to(own_rows).float()).norm(dim=-1)
    is_near = distance <= MAX_RELATIVE_DIFFERENCE * own_rows.float().norm(dim=-1)
    return bool(is_near.float().mean() > LEAST_SHARE_ALIKE)
