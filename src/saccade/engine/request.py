"""What one call asks for, settled before any work: what to read, how to draw, where to stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList

from saccade.core import options
from saccade.core.errors import ModelError, OptionError
from saccade.core.prompt import CONTEXT, Inputs
from saccade.core.sampling import Grammar, Sampling
from saccade.drafting.setup import Captioner, Words
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import unused_bytes
from saccade.model.session import LONG

PREPARED = {"attention_mask", "position_ids", "mm_token_type_ids", "mm_encoder_outputs"}
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}  # and ..._grid_thw beside them
# Transformers 5.17 leaves the pixels to its callable. Later ones pass what the tower made of them.
UNREAD = {*PIXELS.values(), "image_sizes", "batch_num_images", "pixel_attention_mask"}
# What generate passes to its own loops. The cache is named "cache" from Transformers 5.24 on.
IGNORABLE = ("past_key_values", "cache", "logits_to_keep", "use_cache", "synced_gpus")

Spans = tuple[int, int] | Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Request:
    """What one call asks for; ``inputs`` hold one request or several."""

    inputs: Inputs
    rules: Callable[[Sequence[Tensor]], list[Sampling]]  # by each request's prompt
    limits: options.Options
    draft_inputs: Inputs | None = None
    decode: Callable[[Sequence[int]], str] | None = None  # without special tokens
    spell: Callable[[Sequence[int]], str] | None = None  # with them
    words: Words = Words()

    @classmethod
    def of(
        cls,
        target: Backbone,
        inputs: Inputs,
        *,
        context: Any = None,
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
            context: (start, stop) of a document among the prompt's tokens, or several such: text
                that views may prune like a video. Of several requests, one such entry each.
            draft_inputs: the draft's processor output, where it differs from the target's.
            tokenizer: a tokenizer or processor, for text in the result and for stop strings.
            seed: names the noise of sampling; a fresh one when None.
            captioner: inputs -> of each request one caption, or one a video and image in prompt
                order, for views that read them; called in a thread of its own where a core is free.
            grammar: an answer's ids -> the tokens that may follow, which drafts obey too.
            settings: ``GenerationConfig``'s names (max_new_tokens, do_sample, temperature, ...).

        Raises OptionError in one sentence.
        """
        options.check_whole("seed", seed)
        options.check_called(logits_processor=logits_processor, stopping_criteria=stopping_criteria)
        if prefix_allowed_tokens_fn is not None and not callable(prefix_allowed_tokens_fn):
            raise OptionError("prefix_allowed_tokens_fn= is a function of (request, ids)")
        config = options.settle(target.model, generation_config, settings)
        pad, ends = config.pad_token_id, options.ends(config)
        inputs = _with_mask(_readable(target, inputs), pad, ends)
        if isinstance(draft_inputs, Mapping):
            draft_inputs = _with_mask(draft_inputs, pad, ends)
        inputs = _with_documents(inputs, context, draft_inputs)
        limits = options.limits(config, inputs["input_ids"].shape[1], stopping_criteria or ())
        if limits.stop and tokenizer is None:
            raise OptionError("stop strings need the tokenizer: pass tokenizer=")
        rules = partial(
            options.rules,
            target.model,
            config,
            length=limits.max_new_tokens,
            extra=logits_processor,
            allowed=prefix_allowed_tokens_fn,
            seed=None if seed is None else int(seed),
            grammar=grammar,
        )
        words = Words(_encoder(tokenizer), captioner)
        decode, spell = _decoder(tokenizer, True), _decoder(tokenizer, False)
        return cls(inputs, rules, limits, draft_inputs, decode, spell, words)

    @classmethod
    def prepared(
        cls,
        target: Backbone,
        ids: Tensor,
        given: Mapping[str, Any],
        *,
        context: Any,
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
        features = {k: v for k, v in given.items() if v is not None and k not in IGNORABLE}
        others = features.keys() - PREPARED - UNREAD
        if unknown := [name for name in others if not name.endswith(("_grid_thw", "_ts"))]:
            raise OptionError(f"saccade.generate does not take {', '.join(sorted(unknown))}")
        sampling = Sampling(
            bool(checked.do_sample),
            tuple(logits_processor or ()),
            # from torch's generator, so that ``torch.manual_seed`` fixes it as it does there
            int(torch.randint(2**62, ())) if seed is None else seed,
            options.ends(checked),
        )
        each = options.copies(sampling.processors, len(ids))
        mask = given.get("attention_mask")
        if sampling.contextual and mask is not None and not bool(mask.bool().all()):
            raise OptionError(
                "a padded batch with penalties cannot come through custom_generate: call "
                "saccade.generate directly"
            )
        limits = options.limits(checked, ids.shape[1], stopping_criteria or ())
        return cls(
            _with_documents({"input_ids": ids, **features}, context, draft_inputs),
            lambda contexts: [replace(sampling, processors=tuple(own)) for own in each],
            replace(limits, stop=()),  # stop strings are among the criteria already
            draft_inputs,
            words=Words(_encoder(tokenizer), captioner),
        )

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

    def tokens(self) -> int:
        """Of all prompts and answers, as far as caches are made for them at first."""
        return sum(map(len, self.ids)) + LONG * len(self.inputs["input_ids"])

    def check_length(self, target: Backbone) -> None:
        """Raises ModelError where a prompt is longer than the target was made for."""
        longest, most = max(map(len, self.ids)), target.context
        if most is not None and longest > most:
            raise ModelError(
                f"the prompt has {longest} tokens, and this model reads {most} at most: "
                "take fewer frames (--num-frames), or a shorter document or question"
            )

    def check(self, target: Backbone) -> None:
        """Raises ModelError where a prompt is longer than the target reads, or has no room."""
        self.check_length(target)
        if not self.fits(target):
            raise self.too_long(target)

    def fits(self, target: Backbone, beside: int = 0) -> bool:
        """Whether the target's device has memory for these caches and ``beside`` tokens more; of
        several devices nobody knows."""
        tokens, several = self.tokens() + beside, len(set(target.devices)) > 1
        unused = unused_bytes(target)
        return several or memory.has_room(tokens, target.token_bytes, target.device, unused)

    def too_long(self, target: Backbone) -> ModelError:
        """What to raise where memory runs out."""
        return memory.too_long(self.tokens(), target.token_bytes, target.device)

    def text(self, answer: Sequence[int], stop: str | None) -> str | None:
        """An answer in words, up to the string it stopped at."""
        if self.decode is None:
            return None
        text = self.decode(answer)
        if stop is None:
            return text
        before, found, _ = text.partition(stop)
        return before if found else self._before_special(answer, stop)

    def _before_special(self, answer: Sequence[int], stop: str) -> str:
        """The words of an answer before a stop string that holds special tokens."""
        assert self.decode is not None and self.spell is not None
        spelled = self.spell(answer)
        end, count = spelled.find(stop), len(answer)
        if end < 0:  # A decoder that tidies the whole text up may write it otherwise.
            return self.decode(answer)
        while count and not (
            len(head := self.spell(answer[:count])) <= end and spelled.startswith(head)
        ):
            count -= 1
        shared = answer[count : count + 1]  # The token in which the stop string begins.
        rest = spelled[len(self.spell(answer[:count])) : end] if self.decode(shared) else ""
        return self.decode(answer[:count]) + rest


def _readable(target: Backbone, inputs: Inputs) -> Inputs:
    """The inputs, ids as 64-bit integers. Raises OptionError for what no model can read."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    whole = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not isinstance(ids, Tensor) or not whole or ids.ndim != 2 or ids.is_meta:
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
    if mask is not None and not _keeps_some(mask, ids):
        raise OptionError(
            f"attention_mask is {list(np.shape(mask))} for input_ids of {list(ids.shape)}, or "
            "hides all of a request: it must be a tensor as large and keep some of each"
        )
    found: Inputs = {**inputs, "input_ids": ids.long()}
    tensors = [each for each in inputs.values() if isinstance(each, Tensor)]
    shown = any(each.is_floating_point() and each.ndim > 1 for each in tensors)
    places = torch.tensor([*target.placeholders], dtype=torch.long, device=ids.device)
    if not shown and bool(torch.isin(found["input_ids"], places).any()):
        raise OptionError(
            "the prompt has places for images or videos and the pixels are not there: pass "
            "everything the processor returned"
        )
    for kind, name in PIXELS.items():
        _check_grid(f"{kind}_grid_thw", inputs.get(f"{kind}_grid_thw"), name, inputs.get(name))
    return found


def _with_mask(inputs: Inputs, pad: int | None, ends: Sequence[int]) -> Inputs:
    """The inputs with the attention mask that ``generate`` infers where none is given.

    Its rule: pad tokens are hidden, unless the pad token also ends answers. Raises OptionError
    where that hides all of a request.
    """
    ids = inputs.get("input_ids")
    if inputs.get("attention_mask") is not None or pad is None or pad in ends:
        return inputs
    if not isinstance(ids, Tensor) or not bool((ids == pad).any()):
        return inputs
    mask = (ids != pad).long()
    if not _keeps_some(mask, ids):
        raise OptionError(
            f"a request is nothing but pad tokens ({pad}): give attention_mask= if they are text"
        )
    return {**inputs, "attention_mask": mask}


def _keeps_some(mask: Any, ids: Tensor) -> bool:
    """Whether a mask belongs to these ids and leaves something of every request."""
    fits = isinstance(mask, Tensor) and mask.shape == ids.shape and not mask.is_meta
    return fits and bool(mask.bool().any(1).all())


def _with_documents(inputs: Inputs, context: Any, draft_inputs: Inputs | None) -> Inputs:
    """The inputs with these spans of each request marked, if any. Raises OptionError for such as
    are not within the prompt."""
    if context is None:
        return inputs
    if draft_inputs is not None:
        raise OptionError(
            f"context= counts the target's tokens, and the draft's own are others: put "
            f"{CONTEXT} into inputs and draft_inputs"
        )
    ids = inputs["input_ids"]
    several: Any = [context] if len(ids) == 1 else context
    real = inputs.get("attention_mask", torch.ones_like(ids)).bool()
    marked = torch.zeros_like(ids)
    try:
        for row, own in enumerate(several):
            places = real[row].nonzero().squeeze(-1)
            for start, stop in [own] if isinstance(own[0], int) else own:
                if not 0 <= start < stop <= len(places):
                    raise OptionError(
                        f"context=({start}, {stop}) is not within the prompt's {len(places)} tokens"
                    )
                marked[row, places[start:stop]] = 1
        if len(several) != len(ids):
            raise IndexError
    except (TypeError, ValueError, IndexError) as error:
        raise OptionError(
            "context= is (start, stop) in tokens of the prompt, or a list of such; of several "
            "requests a list with an entry for each"
        ) from error
    return {**inputs, CONTEXT: marked}


def _check_grid(grid: str, sizes: Any, name: str, pixels: Any) -> None:
    """Raises OptionError unless patches and the grids that count them belong together."""
    flat = isinstance(pixels, Tensor) and pixels.ndim == 2  # patches of all media in a row
    if sizes is None and not flat:
        return
    if not isinstance(pixels, Tensor) or sizes is None:
        there, lacks = (grid, name) if sizes is not None else (name, grid)
        raise OptionError(f"{there} is there and {lacks} is not: pass all the processor returned")
    numbers = isinstance(sizes, Tensor) and not sizes.is_floating_point()
    if not numbers or sizes.ndim != 2 or sizes.shape[1] != 3 or bool((sizes < 1).any()):
        raise OptionError(f"{grid} must be whole numbers above 0, a row of 3 for each medium")
    if flat and len(pixels) != int(sizes.prod(1).sum()):
        raise OptionError(
            f"{name} holds {len(pixels)} patches and {grid} counts {int(sizes.prod(1).sum())}: "
            "pass both as the processor returned them"
        )


@runtime_checkable
class Streamer(Protocol):
    """What transformers' streamers do."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@runtime_checkable
class Tokenizer(Protocol):
    """What of a tokenizer or a processor is used: ids to words."""

    def decode(self, token_ids: Any, **how: Any) -> Any: ...


def check_streamer(streamer: Any, requests: int) -> None:
    """Raises OptionError for what cannot be streamed to."""
    if streamer is not None and not isinstance(streamer, Streamer):
        raise OptionError("streamer= needs put and end, as transformers' TextStreamer has them")
    if streamer is not None and requests > 1:
        raise OptionError("streamer= needs a single request")


def backbone(model: nn.Module | Backbone) -> Backbone:
    """The backbone of a model as it is at this moment, whatever was done to it since."""
    if not isinstance(model, nn.Module | Backbone):
        raise OptionError(f"a model is a loaded Hugging Face model, not {type(model).__name__}")
    return model.current() if isinstance(model, Backbone) else Backbone.of(model)


def _decoder(tokenizer: Any, skips_special: bool) -> Callable[[Sequence[int]], str] | None:
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=skips_special)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, Tokenizer):
        said = type(tokenizer).__name__
        raise OptionError(f"tokenizer= is a loaded tokenizer or processor, not {said}")
    inner = vars(tokenizer).get("tokenizer", tokenizer)  # of a processor
    return lambda text: inner.encode(text, add_special_tokens=False)
