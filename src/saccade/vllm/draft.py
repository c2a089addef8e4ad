"""The class vLLM makes: what its runner holds, turned into what ``proposing`` is asked.

vLLM hands a custom class its config alone, and ``propose`` rows without names. The runner that made
it shows itself (``plugin``); what is read of it: the batch's names, ``requests`` and
``encoder_cache``. Whatever fails in here, the engine goes on without a draft.
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

from saccade.core.errors import DraftFailed, ModelError
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.inputs.loading import Loaded, check_tokenizers, load
from saccade.model.families import placeholders
from saccade.model.memory import GIB
from saccade.vllm import features, mending, options, plugin, watching
from saccade.vllm.caches import DraftRequest, LookupDrafts, ModelDrafts
from saccade.vllm.proposing import Proposer

log = logging.getLogger("vllm.saccade")  # below vLLM's own, so that it is shown like its own

ALIKE = 1e-2  # of a row's length: how far two engines' roundings of the same tower may be apart


class Draft(plugin.Meeting):
    """``--speculative-config '{"method": "custom_class", "model": "saccade.vllm.Draft", ...}'``.

    Options: see ``options``. Raises OptionError, MethodError or ModelError, in one sentence, while
    the engine starts; never later.
    """

    def __init__(self, vllm_config: Any, runner: Any = None) -> None:
        self._config, self._runner = vllm_config, runner
        self._most: int = vllm_config.speculative_config.num_speculative_tokens
        config = (vllm_config.additional_config or {}).get("saccade", {})
        self._options = options.read(config, os.environ, self._most)
        self._view = self._options.views()
        self._proposer: Proposer | None = None  # None before a model is loaded, and after a failure
        self._alike: bool | None = None  # whether vLLM's rows of pixels are the draft's own too
        self._reserve: Tensor | None = None
        self._watch: watching.Watch | None = None
        if runner is None:
            plugin.check()
            if str(vllm_config.device_config.device) == "cpu":
                mending.mend()

    # -- what vLLM calls -----------------------------------------------------------------------

    @torch.inference_mode(False)
    def load_model(self, target: Any) -> None:
        """Loads the draft where the target is; its caches' memory counts as the model's."""
        model = self._config.model_config
        device = self._config.device_config.device
        if self._options.draft == options.LOOKUP:
            banned = placeholders(model.hf_config.to_dict())
            self._proposer = Proposer(LookupDrafts(banned), self._most, self._options.length)
            return
        kind = str(model.dtype).removeprefix("torch.")
        self._loaded = load(self._options.draft, dtype=kind, device=str(device))
        self._proposer = self._proposer_of(self._loaded, model)
        # held until the engine has divided what memory is left
        memory = int(self._options.memory * GIB)
        held = 2 * memory if self._view.attention else memory
        self._reserve = torch.zeros(held, dtype=torch.uint8, device=device)
        if self._view.attention:
            layers = self._config.compilation_config.static_forward_context
            asked = self._loaded.backbone.placeholders
            self._watch = watching.Watch(self._runner, layers, asked, memory)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """Tokens to be judged for each row of the batch; a row that emitted nothing gets none."""
        found: list[list[int]] = [[] for _ in sampled_token_ids]
        self._reserve = None
        if self._proposer is None:
            return found
        try:
            rows = dict(enumerate(self._runner.input_batch.req_ids[: len(found)]))
            asked = {
                row: self._asked(name, sampled_token_ids[row], token_ids_cpu[row], int(end))
                for (row, name), end in zip(rows.items(), num_tokens_no_spec, strict=False)
                if sampled_token_ids[row]
                and int(end) + self._most < self._config.model_config.max_model_len
            }
            self._proposer.keep(rows.values())
            if self._watch is not None:
                self._watch.forget_ended()
            alone = len(asked) == len(rows)
            drafts = self._proposer.propose(list(asked.values()), alone=alone)
            for row, each in asked.items():
                found[row] = list(drafts[each.name].tokens)
        except Exception as error:  # whatever a draft does wrong, the target can go on without it
            self._give_up(error)
            found = [[] for _ in sampled_token_ids]
        return found

    # -- reading the runner --------------------------------------------------------------------

    def meet(self, runner: Any) -> None:
        self._runner = runner

    def _asked(self, name: str, new: Sequence[int], row: Any, end: int) -> DraftRequest:
        state = self._runner.requests[name]
        read = functools.partial(self._read, name, state)
        return DraftRequest(name, row[:end], state.num_prompt_tokens, new, read)

    def _read(self, name: str, state: Any) -> Prefill | None:
        """What a draft of this request may see: its own whole prompt, at the target's positions."""
        model = self._loaded.backbone
        told = features.inputs(
            state.prompt_token_ids, state.mm_features, model.placeholders, self._loaded.processor
        )
        if told is None:
            return None
        cached = [self._runner.encoder_cache.get(each.identifier) for each in state.mm_features]
        rows = None if any(each is None for each in cached) or not cached else torch.cat(cached)
        prompt = self._prompt(told, rows, whole=features.whole(state.mm_features))
        if prompt is None:
            return None
        if model.axes > 1 and state.mrope_positions is not None:
            at = state.mrope_positions[:, : len(prompt)].to(prompt.positions)
            following = len(prompt) + int(state.mrope_position_delta)
            prompt = replace(prompt, positions=at, next_position=following)
        seen = None if self._watch is None else self._watch.take(name)
        if seen is None:
            return Prefill(prompt, None, torch.empty(0))
        cells = prompt.visual[prompt.visual | prompt.fixed]  # newlines of pictures are no cells
        mass, relevance = (each[..., cells] for each in seen)
        return Prefill(prompt, None, torch.empty(0), mass, relevance)

    def _prompt(self, told: Inputs, rows: Tensor | None, *, whole: bool) -> Prompt | None:
        """From the rows that the target's tower gave, where the draft's gives the same; else from
        all pixels, if they are there."""
        model = self._loaded.backbone
        if rows is not None and self._alike:
            return model.assemble(told, rows)
        if not whole:
            return None
        prompt = model.prompts(told)[0]
        if rows is not None and self._alike is None:
            own = prompt.embeds[prompt.visual | prompt.fixed]
            self._alike = not prompt.deepstack and alike(own, rows)
        return prompt

    # -- making --------------------------------------------------------------------------------

    def _proposer_of(self, draft: Loaded, model: Any) -> Proposer:
        """A proposer over a loaded draft. Raises ModelError where it does not fit the target."""
        backbone, kind = draft.backbone, model.hf_config.model_type
        family = backbone.model.config.model_type
        if backbone.placeholders and family != kind:
            raise ModelError(
                f"{draft.name} is a {family} and would have to look with a processor of its own, "
                f"which vLLM does not run: choose a draft of the target's family, {kind}"
            )
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, trust_remote_code=model.trust_remote_code
        )
        check_tokenizers(model.model, tokenizer, draft.name, draft.tokenizer)
        vocab = min(backbone.vocab, model.get_vocab_size())
        banned = {*backbone.placeholders, *placeholders(model.hf_config.to_dict())}
        ends = backbone.model.generation_config.eos_token_id
        drafts = ModelDrafts(
            backbone,
            self._view,
            vocab=vocab,
            banned=sorted(token for token in banned if token < vocab),
            ends=tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,),
            memory=int(self._options.memory * GIB),
        )
        return Proposer(drafts, self._most, self._options.length)

    def _give_up(self, error: BaseException) -> None:
        """Nothing is drafted from now on; what the draft held is freed."""
        if isinstance(error, DraftFailed):
            error = error.__cause__ or error  # vLLM gets chosen tokens, which may be taken back
        log.warning(
            "drafting failed with %s: %s; vLLM goes on without a draft",
            type(error).__name__,
            error,
            exc_info=error,
        )
        self._proposer = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None


def alike(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two engines' rows of the same pixels, [row, dim], come from the same tower."""
    if mine.shape != theirs.shape:
        return False
    apart = (mine.float() - theirs.to(mine).float()).norm(dim=-1)
    return bool((apart <= ALIKE * mine.float().norm(dim=-1)).float().mean() > 0.99)
