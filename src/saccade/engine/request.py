"""What one call asks for, settled before any work: what to read, how to draw, where to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from saccade.core import options
from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import Inputs
from saccade.core.sampling import Grammar, Sampling
from saccade.drafting.setup import Words
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.session import LONG

PREPARED = ("attention_mask", "position_ids", "mm_token_type_ids", "mm_encoder_outputs")
IGNORABLE = ("past_key_values", "logits_to_keep", "use_cache", "synced_gpus")  # generate's own

Captioner = Callable[[Inputs], Sequence[str]]


@dataclass(frozen=True)
class Request:
    """What one call asks for; ``inputs`` hold one request or several."""

    inputs: Inputs
    rules: Callable[[Sequence[Tensor]], list[Sampling]]  # by each request's prompt
    stops: Callable[[Sequence[Tensor]], options.Stops]
    draft_inputs: Inputs | None = None
    decode: Callable[[Sequence[int]], str] | None = None
    words: Words = Words()

    @classmethod
    def of(
        cls,
        target: Backbone,
        inputs: Inputs,
        *,
        draft_inputs: Inputs | None = None,
        tokenizer: Any = None,
        seed: int | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: Sequence[Any] | None = None,
        prefix_allowed_tokens_fn: Callable[..., list[int]] | None = None,
        captioner: Captioner | None = None,
        grammar: Grammar | None = None,
        **settings: Any,
    ) -> Request:
        """What is asked for, checked before any work.

        Args:
            inputs: what the target's processor returned, one or several requests.
            draft_inputs: the draft's processor output, where it differs from the target's.
            tokenizer: a tokenizer or processor, for text in the result and for stop strings.
            seed: names the noise of sampling; a fresh one when None.
            captioner: inputs -> one caption a request, for views that read one.
            grammar: an answer's ids -> the tokens that may follow, which drafts obey too.
            settings: ``GenerationConfig``'s names (max_new_tokens, do_sample, temperature, ...).

        Raises OptionError in one sentence.
        """
        inputs = _readable(target, inputs)
        if seed is not None and not isinstance(seed, int):
            raise OptionError(f"seed={seed!r} is not a whole number")
        config = options.settle(target.model, generation_config, settings)
        decode = _decoder(tokenizer)
        longest = int(inputs["input_ids"].shape[1])
        bounds = options.limits(config, longest, tuple(stopping_criteria or ()))
        if bounds.stop and decode is None:
            raise OptionError("stop strings need the tokenizer: pass tokenizer=")

        def rules(contexts: Sequence[Tensor]) -> list[Sampling]:
            return options.rules(
                target.model,
                config,
                contexts,
                length=bounds.max_new_tokens,
                extra=logits_processor,
                allowed=prefix_allowed_tokens_fn,
                seed=seed,
                grammar=grammar,
            )

        return cls(
            inputs,
            rules,
            lambda contexts: options.Stops(bounds, contexts, decode),
            draft_inputs,
            decode,
            Words(_encoder(tokenizer), captioner),
        )

    @classmethod
    def prepared(
        cls,
        target: Backbone,
        ids: Tensor,
        given: Mapping[str, Any],
        *,
        draft_inputs: Inputs | None,
        tokenizer: Any,
        seed: int | None,
        generation_config: GenerationConfig,
        logits_processor: LogitsProcessorList | None,
        stopping_criteria: Sequence[Any] | None,
        captioner: Captioner | None,
    ) -> Request:
        """The call transformers makes: rules and stops are ready made, pixels already features.

        ``given`` are the model's arguments beside the ids. Raises OptionError in one sentence.
        """
        checked = options.settle(target.model, generation_config, {})
        features = {key: given[key] for key in PREPARED if given.get(key) is not None}
        others = {k for k, v in given.items() if k not in (*PREPARED, *IGNORABLE) and v is not None}
        if unknown := others - {name for name in others if name.endswith(("_grid_thw", "_ts"))}:
            raise OptionError(f"saccade.generate does not take {', '.join(sorted(unknown))}")
        features |= {name: given[name] for name in others}
        sampling = Sampling(
            bool(checked.do_sample),
            tuple(logits_processor or ()),
            # from torch's generator, so that ``torch.manual_seed`` fixes it as it does there
            int(torch.randint(2**62, ())) if seed is None else seed,
            options.ends(checked),
        )
        mask = given.get("attention_mask")
        if sampling.contextual and mask is not None and not bool(mask.bool().all()):
            raise OptionError(
                "a padded batch with penalties cannot come through custom_generate: call "
                "saccade.generate directly"
            )
        bounds = options.limits(checked, ids.shape[1], tuple(stopping_criteria or ()))
        # stop strings are among the criteria already
        own = options.Options(bounds.max_new_tokens, bounds.eos, (), bounds.criteria)
        return cls(
            {"input_ids": ids, **features},
            lambda contexts: [sampling] * len(contexts),
            lambda contexts: options.Stops(own, contexts, None),
            draft_inputs,
            words=Words(_encoder(tokenizer), captioner),
        )

    @property
    def for_draft(self) -> Inputs:
        return self.inputs if self.draft_inputs is None else self.draft_inputs

    @property
    def ids(self) -> list[list[int]]:
        """Each request's ids without its padding."""
        ids, mask = self.inputs["input_ids"], self.inputs.get("attention_mask")
        if mask is None:
            return ids.tolist()
        return [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]

    @property
    def media(self) -> dict[str, Tensor]:
        """What of a processor's output is not text."""
        length = self.inputs["input_ids"].shape
        return {
            name: value
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] != length
        }

    def contexts(self, device: torch.device) -> list[Tensor]:
        """Each request's ids, as tensors."""
        return [torch.tensor(ids, device=device) for ids in self.ids]

    def tokens(self) -> int:
        """Of all prompts and answers, as far as caches are made for them at first."""
        return sum(map(len, self.ids)) + LONG * len(self.inputs["input_ids"])

    def check(self, target: Backbone) -> None:
        """Raises ModelError where a prompt is longer than the target was made for, or where its
        device has no memory for these caches."""
        longest, most = max(map(len, self.ids)), target.context
        if most is not None and longest > most:
            raise ModelError(
                f"the prompt has {longest} tokens, and this model reads {most} at most: "
                "take fewer frames (--num-frames), smaller ones (--size) or a shorter question"
            )
        if len(set(target.devices)) == 1:
            memory.check_prompt(self.tokens(), target.token_bytes, target.device)

    def too_long(self, target: Backbone) -> ModelError:
        """What to raise once memory ran out after all."""
        return ModelError(memory.too_long(self.tokens(), target.token_bytes, target.device))

    def text(self, answer: Sequence[int], stop: str | None) -> str | None:
        """An answer in words, up to the string it stopped at."""
        if self.decode is None:
            return None
        text = self.decode(answer)
        return text if stop is None else text.partition(stop)[0]


def _readable(target: Backbone, inputs: Inputs) -> Inputs:
    """The inputs, ids as 64-bit integers. Raises OptionError for what no model can read."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise OptionError(
            "inputs are what a processor returns: a mapping whose input_ids are a tensor of "
            "[requests, tokens]; use return_tensors='pt'"
        )
    if not ids.numel():
        raise OptionError("input_ids are empty: there is nothing to answer")
    rows = target.embeddings
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise OptionError(
            f"input_ids go from {int(ids.min())} to {int(ids.max())}, and this model has {rows} "
            "ids: they are another tokenizer's"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and (mask.shape != ids.shape or not bool(mask.bool().any(1).all())):
        raise OptionError(
            f"attention_mask is {list(mask.shape)} for input_ids of {list(ids.shape)}, or hides "
            "all of a request: it must be as large and keep some of each"
        )
    found: Inputs = {**inputs, "input_ids": ids.long()}
    shown = any(isinstance(each, Tensor) and each.is_floating_point() for each in inputs.values())
    places = torch.tensor([*target.placeholders], dtype=torch.long, device=ids.device)
    if not shown and bool(torch.isin(found["input_ids"], places).any()):
        raise OptionError(
            "the prompt has places for images or videos and the pixels are not there: pass "
            "everything the processor returned"
        )
    return found


def backbone(model: nn.Module | Backbone) -> Backbone:
    if not isinstance(model, nn.Module | Backbone):
        raise OptionError(f"a model is a loaded Hugging Face model, not {type(model).__name__}")
    return model if isinstance(model, Backbone) else Backbone.of(model)


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    if tokenizer is None:
        return None
    inner = vars(tokenizer).get("tokenizer", tokenizer)  # of a processor
    return lambda text: inner.encode(text, add_special_tokens=False)
