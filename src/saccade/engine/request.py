"""Checks the inputs and arguments of a call, and makes its :class:`Request` of them.

A request has all that the engine needs to answer: the inputs, the sampling rules, and where answers
stop. It is made before any forward, so a call that cannot be answered fails at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from typing import Any, Protocol, Unpack, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from saccade.core import generation_settings
from saccade.core.answer_text import TextDecoder
from saccade.core.errors import ModelError, OptionError
from saccade.core.generation_settings import GenerateArguments, Settings
from saccade.core.prompt import DOCUMENT_MASK, Inputs
from saccade.core.sampling import Grammar, Sampling
from saccade.core.stopping import StopConditions
from saccade.drafting.setup import Captioner, TextMaker
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import unused_bytes
from saccade.model.session import MAX_RESERVED_ANSWER_TOKENS, forward_rows

# Inputs beside pixels that transformers has prepared when it calls ``custom_generate``.
PREPARED_INPUTS = {"attention_mask", "position_ids", "mm_token_type_ids", "mm_encoder_outputs"}
# The input with the pixels of each kind of media. Some families count the patches of each medium
# in another input, ``image_grid_thw`` or ``video_grid_thw``.
PIXELS = {"image": "pixel_values", "video": "pixel_values_videos"}
# Arguments that transformers' ``generate`` passes to its own decoding loops, which are not used
# here. The cache is named "cache" from Transformers 5.24 on.
IGNORED_ARGUMENTS = ("past_key_values", "cache", "logits_to_keep", "use_cache", "synced_gpus")

Spans = tuple[int, int] | Sequence[tuple[int, int]]
"""(start, stop) of one document among a prompt's tokens, or a list of such pairs."""


class RequestArguments(GenerateArguments, total=False):
    """What a request may ask for beside its inputs; every other name is a setting of
    ``GenerationConfig``."""

    draft_inputs: Inputs | None
    """The draft's processor output, where it differs from the target's."""
    tokenizer: Any
    """A tokenizer or processor, for text in rounds and results and for stop strings."""
    seed: int | None
    """The seed of sampling; None picks one at random."""
    captioner: Captioner | None
    """A function of the inputs. It returns for each request one caption, or one per video and
    image in prompt order. Where a core is free, it runs in a thread beside the target's prefill."""
    presence_penalty: float | None
    """How far the logit of a token falls once the answer contains it (OpenAI's penalty)."""
    frequency_penalty: float | None
    """How far the logit of a token falls for each time that the answer contains it."""
    skip_special_tokens: bool
    """Whether to leave special tokens out of the text, which is the default. If not, the text has
    all of them except the one that ends the answer."""
    context: Spans | Sequence[Spans] | None
    """(start, stop) of a document among the prompt's tokens, or a list of such: text that views may
    prune like a video. For several requests, a list with one each."""


PENALTIES = ("presence_penalty", "frequency_penalty")
# Names of arguments that are not settings of ``GenerationConfig``.
NON_GENERATION_ARGUMENTS = RequestArguments.__annotations__.keys() - Settings.__annotations__.keys()
# Arguments that are not inputs of the model. The signature of ``saccade.generate`` names each of
# them, because transformers passes to a ``custom_generate`` function only those that the function
# names. Transformers refuses all others, or takes them as settings of its own. For example, it
# would make a stopping criterion of ``stop_strings``. That would fail, because the criterion needs
# the tokenizer, and transformers drops ``tokenizer=`` where the function is a custom one.
CALL_ARGUMENTS = {*NON_GENERATION_ARGUMENTS, "stop_strings"}


@dataclass(frozen=True)
class Request:
    """One call's inputs, sampling rules and limits; ``inputs`` has one request or several."""

    inputs: Inputs
    # Takes the ids of every prompt, and returns the sampling rules of every request.
    rules: Callable[[Sequence[Tensor]], list[Sampling]]
    limits: StopConditions
    draft_inputs: Inputs | None = None
    # Ids to text, without special tokens. Where ``skip_special_tokens`` is False, only the token
    # that ends the answer is left out.
    decode: Callable[[Sequence[int]], str] | None = None
    decode_with_special: Callable[[Sequence[int]], str] | None = None  # with special tokens
    text_maker: TextMaker = TextMaker()  # makes texts that replace a video in a draft's prompt
    # Whether tokens are sampled. Then no timing may influence drafts, so that a seed gives the same
    # answer.
    is_sampled: bool = False
    # The settings of ``RETURN_SETTINGS`` that are on: what ``generate`` returns beside the ids.
    returned: frozenset[str] = frozenset()
    copies: int = 1  # how often each prompt is in ``inputs``

    @classmethod
    def of(
        cls,
        target: Backbone,
        inputs: Inputs,
        *,
        grammar: Grammar | None = None,
        supported_by_caller: frozenset[str] = frozenset(),
        **arguments: Unpack[RequestArguments],
    ) -> Request:
        """Makes a request from a processor's output.

        Args:
            inputs: what the target's processor returned, for one request or several.
            grammar: an answer's ids -> the tokens that may follow; drafts obey it too.
            supported_by_caller: settings that the caller of this function handles itself, such as
                ``output_scores``. They are refused if they are not named here.
            arguments: see :class:`RequestArguments`.

        Raises OptionError for an input or an argument that cannot be used.
        """
        # Check the arguments, and merge the settings.
        seed = arguments.get("seed")
        tokenizer = arguments.get("tokenizer")
        draft_inputs = arguments.get("draft_inputs")
        logits_processor = arguments.get("logits_processor")
        stopping_criteria = arguments.get("stopping_criteria")
        prefix_allowed_tokens_fn = arguments.get("prefix_allowed_tokens_fn")
        settings = {
            name: each for name, each in arguments.items() if name not in NON_GENERATION_ARGUMENTS
        }
        generation_settings.check_whole("seed", seed)
        for name in PENALTIES:
            generation_settings.check_number(name, arguments.get(name))
        generation_settings.check_callables(
            logits_processor=logits_processor, stopping_criteria=stopping_criteria
        )
        if prefix_allowed_tokens_fn is not None and not callable(prefix_allowed_tokens_fn):
            raise OptionError("prefix_allowed_tokens_fn= is a function of (request, ids)")
        config = generation_settings.merge_settings(
            target.model, arguments.get("generation_config"), settings, supported_by_caller
        )
        # Complete the inputs: masks, documents, and a copy of each prompt for every answer to it.
        copies = generation_settings.sequence_count(config)
        pad = config.pad_token_id
        ends = generation_settings.end_ids(config)
        inputs = _with_attention_mask(_check_inputs(target, inputs), pad, ends)
        if isinstance(draft_inputs, Mapping):
            draft_inputs = _with_attention_mask(draft_inputs, pad, ends)
        inputs = _with_documents(inputs, arguments.get("context"), draft_inputs)
        if copies > 1:
            requests = len(inputs["input_ids"])
            inputs = _repeat(inputs, copies)
            draft_inputs = None if draft_inputs is None else _repeat(draft_inputs, copies)
            if prefix_allowed_tokens_fn is not None:
                prefix_allowed_tokens_fn = _renumber_rows(
                    prefix_allowed_tokens_fn, requests, copies
                )
        # Make the limits, the sampling rules and the decoders.
        limits = generation_settings.answer_limits(
            config, inputs["input_ids"].shape[1], stopping_criteria or ()
        )
        if limits.stop and tokenizer is None:
            raise OptionError("stop strings need the tokenizer: pass tokenizer=")
        rules = partial(
            generation_settings.sampling_rules,
            target.model,
            config,
            length=limits.max_new_tokens,
            extra=logits_processor,
            allowed=prefix_allowed_tokens_fn,
            seed=None if seed is None else int(seed),
            grammar=grammar,
            presence_penalty=float(arguments.get("presence_penalty") or 0.0),
            frequency_penalty=float(arguments.get("frequency_penalty") or 0.0),
        )
        text_maker = TextMaker(_encoder(tokenizer), arguments.get("captioner"))
        decode = _decoder(tokenizer, skips_special=True)
        decode_with_special = _decoder(tokenizer, skips_special=False)
        if not arguments.get("skip_special_tokens", True):
            decode = without_end(decode_with_special, ends)
        samples = bool(config.do_sample)
        returned = generation_settings.returned_settings(config)
        return cls(
            inputs,
            rules,
            limits,
            draft_inputs,
            decode,
            decode_with_special,
            text_maker,
            samples,
            returned,
            copies,
        )

    @classmethod
    def from_transformers(
        cls,
        target: Backbone,
        ids: Tensor,
        **arguments: Unpack[RequestArguments],
    ) -> Request:
        """Makes a request from a call by transformers' ``generate`` (``custom_generate=``).

        Transformers has made the logits processors and the stopping criteria, and may have run the
        vision tower. Arguments that are not in ``RequestArguments`` are inputs of the model.
        Settings of the answer are in ``generation_config``. Only ``stop_strings`` is an argument of
        its own, because transformers does not put it into that config. Raises OptionError for an
        argument that cannot be used.
        """
        seed = arguments.get("seed")
        draft_inputs = arguments.get("draft_inputs")
        generation_settings.check_whole("seed", seed)
        stopping_criteria = arguments.get("stopping_criteria")
        if any(arguments.get(name) for name in PENALTIES):
            raise OptionError(
                f"{' and '.join(PENALTIES)} cannot come through custom_generate: call "
                "saccade.generate directly"
            )
        tokenizer = arguments.get("tokenizer")
        stop_strings = arguments.get("stop_strings")
        checked = generation_settings.merge_settings(
            target.model,
            arguments.get("generation_config"),
            {},
            generation_settings.GENERATE_SETTINGS,
        )
        model_inputs: dict[str, Any] = {
            name: value
            for name, value in arguments.items()
            if value is not None and name not in CALL_ARGUMENTS and name not in IGNORED_ARGUMENTS
        }
        # What transformers passes on is an input of the model, such as a processor's output, if the
        # model's forward takes it. Of these only ``inputs_embeds`` is refused, because it would
        # take the place of the ids.
        forward_inputs = inspect.signature(target.model.forward).parameters.keys()
        accepted_inputs = PREPARED_INPUTS | (forward_inputs - {"inputs_embeds"})
        if unknown := sorted(model_inputs.keys() - accepted_inputs):
            if unknown[0] in checked.to_dict():
                raise OptionError(
                    f"{unknown[0]}= is a setting that transformers prepares: give it to "
                    "model.generate(), beside custom_generate="
                )
            raise OptionError(f"saccade.generate does not take {', '.join(unknown)}")
        if stop_strings is not None and tokenizer is None:
            raise OptionError(
                "transformers passes no tokenizer on, and stop strings need it: write "
                "custom_generate=saccade.generate.with_(tokenizer=tokenizer)"
            )
        sampling = Sampling(
            bool(checked.do_sample),
            tuple(arguments.get("logits_processor") or ()),
            # The seed comes from torch's generator, so that ``torch.manual_seed`` fixes it as it
            # does in transformers.
            int(torch.randint(2**62, ())) if seed is None else seed,
            generation_settings.end_ids(checked),
        )
        processors_by_request = generation_settings.copy_processors(sampling.processors, len(ids))
        mask = model_inputs.get("attention_mask")
        if sampling.reads_ids and mask is not None and not bool(mask.bool().all()):
            raise OptionError(
                "a padded batch with penalties cannot come through custom_generate: call "
                "saccade.generate directly"
            )
        limits = generation_settings.answer_limits(checked, ids.shape[1], stopping_criteria or ())
        # The config's own stop strings are left out of the limits, because transformers has made
        # one of the stopping criteria of them.
        stops = generation_settings.stop_strings(stop_strings)
        text_maker = TextMaker(_encoder(tokenizer), arguments.get("captioner"))
        inputs = {"input_ids": ids, **model_inputs}
        return cls(
            _with_documents(inputs, arguments.get("context"), draft_inputs),
            lambda contexts: [
                replace(sampling, processors=tuple(processors))
                for processors in processors_by_request
            ],
            replace(limits, stop=stops),
            draft_inputs,
            _decoder(tokenizer, skips_special=True),
            _decoder(tokenizer, skips_special=False),
            text_maker,
            is_sampled=sampling.sample,
            returned=generation_settings.returned_settings(checked),
        )

    @property
    def ids(self) -> list[list[int]]:
        """Each request's ids without its padding."""
        ids = self.inputs["input_ids"]
        mask = self.inputs.get("attention_mask")
        if mask is None:
            return ids.tolist()
        return [row[real].tolist() for row, real in zip(ids, mask.bool(), strict=True)]

    @property
    def media(self) -> dict[str, Tensor]:
        """The tensors of a processor's output that do not have one entry for each token."""
        requests_and_tokens = self.inputs["input_ids"].shape
        return {
            name: value
            for name, value in self.inputs.items()
            if isinstance(value, Tensor) and value.shape[:2] != requests_and_tokens
        }

    def all_have_media(self, target: Backbone) -> bool:
        """Returns whether every prompt has a video, a picture or a document."""
        placeholders = target.placeholders.keys()
        return all(
            not placeholders.isdisjoint(ids) or any(self.document_marks(number))
            for number, ids in enumerate(self.ids)
        )

    def document_marks(self, number: int) -> list[bool]:
        """Returns for each token of a request, padding left out, whether a document contains it."""
        marks = self.inputs.get(DOCUMENT_MASK)
        mask = self.inputs.get("attention_mask")
        if marks is None:
            return [False] * len(self.ids[number])
        row = marks[number].bool()
        return (row if mask is None else row[mask[number].bool()]).tolist()

    def starts_with_media(self, earlier: Mapping[str, Tensor]) -> bool:
        """Returns whether this request has the same first picture and the same first video as an
        earlier request of the conversation.

        ``earlier`` are the ``media`` of that request. If it had none, the answer is True.
        """
        media = self.media
        grid_names = {name: f"{kind}_grid_thw" for kind, name in PIXELS.items()}
        for name, old in earlier.items():
            new = media.get(name)
            if new is None or new.ndim != old.ndim:
                return False
            if old.ndim > 0:
                # A tensor has one row for each medium, or one row for each patch. If there is a
                # grid, the rows are patches, and the first medium has t * h * w of them.
                first_rows = 1
                grid = earlier.get(grid_names[name]) if name in grid_names else None
                if old.ndim == 2 and grid is not None:
                    first_rows = int(grid[0].prod())
                old = old[:first_rows]
                new = new[:first_rows]
            if not torch.equal(old, new):
                return False
        return True

    def reserved_tokens(self) -> int:
        """Returns for how many tokens of prompts and answers the caches have room at first."""
        return sum(map(len, self.ids)) + MAX_RESERVED_ANSWER_TOKENS * len(self.inputs["input_ids"])

    def check_length(self, target: Backbone) -> None:
        """Raises ModelError where a prompt is longer than the target's context."""
        longest = max(map(len, self.ids))
        most = target.max_positions
        if most is not None and longest > most:
            raise ModelError(
                f"the prompt has {longest} tokens, and this model reads {most} at most: "
                "take fewer frames (--num-frames), or a shorter document or question"
            )

    def check_memory(
        self,
        target: Backbone,
        hidden_layers: Sequence[int] = (),
        *,
        keeps_all_keys: bool = True,
    ) -> None:
        """Raises ModelError where a prompt is too long for the target or for the memory.

        The arguments are those of :meth:`fits`.
        """
        self.check_length(target)
        if not self.fits(target, hidden_layers=hidden_layers, keeps_all_keys=keeps_all_keys):
            raise self.too_long_error(target, hidden_layers, keeps_all_keys=keeps_all_keys)

    def fits(
        self,
        target: Backbone,
        others: Iterable[Request] = (),
        hidden_layers: Sequence[int] = (),
        *,
        keeps_all_keys: bool = True,
    ) -> bool:
        """Returns whether the target's device has memory for this request's caches.

        On a target that is spread over several devices a request is taken to fit, since it is
        unknown how much of its caches each device gets.

        Args:
            others: requests that have no caches yet and for which there must be room as well.
            hidden_layers: the layers whose hidden states are stored for each token, for a draft
                head (see ``HiddenStates.layers``).
            keeps_all_keys: whether layers with a window keep the keys behind it.
        """
        if len(set(target.devices)) > 1:
            return True
        tokens, fixed_bytes = 0, 0
        for request in (self, *others):
            tokens += request.reserved_tokens()
            # Every request has the same ``token_bytes``, so those of the last one are used below.
            token_bytes, own_fixed_bytes = request._bytes(target, hidden_layers, keeps_all_keys)
            fixed_bytes += own_fixed_bytes
        unused = unused_bytes(target)
        return memory.has_room(tokens, token_bytes, target.device, unused, fixed_bytes)

    def too_long_error(
        self,
        target: Backbone,
        hidden_layers: Sequence[int] = (),
        *,
        keeps_all_keys: bool = True,
    ) -> ModelError:
        """Returns the error to raise where memory runs out."""
        token_bytes, fixed = self._bytes(target, hidden_layers, keeps_all_keys)
        return memory.too_long_error(self.reserved_tokens(), token_bytes, target.device, fixed)

    def _bytes(
        self, target: Backbone, hidden_layers: Sequence[int], keeps_all_keys: bool
    ) -> tuple[int, int]:
        """Returns the bytes that each token takes, and the bytes that do not grow with the tokens:
        recurrent states, and the caches of layers that evict keys."""
        state_bytes = target.state_bytes * len(self.inputs["input_ids"])
        hidden_bytes = target.hidden_state_bytes(hidden_layers)
        if keeps_all_keys or not target.windows:
            return target.token_bytes + hidden_bytes, state_bytes
        # Only layers without a window take memory for each token. Those with one have caches of a
        # bounded size.
        lengths = [len(ids) + MAX_RESERVED_ANSWER_TOKENS for ids in self.ids]
        window_bytes = sum(target.window_bytes(length, forward_rows()) for length in lengths)
        return target.unbounded_token_bytes + hidden_bytes, state_bytes + window_bytes

    @property
    def text_decoder(self) -> TextDecoder | None:
        """What turns an answer's ids into text; None without a tokenizer."""
        if self.decode is None:
            return None
        return TextDecoder(self.decode, self.decode_with_special, self.limits.stop)

    def text(self, answer: Sequence[int], stop: str | None) -> str | None:
        """Returns an answer's text, up to the string it stopped at; None without a tokenizer."""
        decoder = self.text_decoder
        return None if decoder is None else decoder.whole_text(answer, stop)


def _check_inputs(target: Backbone, inputs: Inputs) -> Inputs:
    """Returns the inputs with ids as 64-bit integers. Raises OptionError for what the target cannot
    read."""
    ids = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    is_integer = isinstance(ids, Tensor) and not (ids.is_floating_point() or ids.is_complex())
    if not isinstance(ids, Tensor) or not is_integer or ids.ndim != 2 or ids.is_meta:
        raise OptionError(
            "inputs are what a processor returns: a mapping whose input_ids are a tensor of "
            "[requests, tokens]; use return_tensors='pt'"
        )
    if not ids.numel():
        raise OptionError("input_ids are empty: there is nothing to answer")
    rows = target.embedding_count
    if int(ids.min()) < 0 or int(ids.max()) >= rows:
        raise OptionError(
            f"input_ids go from {int(ids.min())} to {int(ids.max())}, and this model has {rows} "
            "ids: they are another tokenizer's"
        )
    mask = inputs.get("attention_mask")
    if mask is not None and not _leaves_tokens(mask, ids):
        raise OptionError(
            f"attention_mask is {list(np.shape(mask))} for input_ids of {list(ids.shape)}, or "
            "hides all of a request: it must have the shape of input_ids and leave a token of each "
            "request"
        )
    checked: Inputs = {**inputs, "input_ids": ids.long()}
    tensors = [each for each in inputs.values() if isinstance(each, Tensor)]
    has_pixels = any(each.is_floating_point() and each.ndim > 1 for each in tensors)
    placeholders = torch.tensor([*target.placeholders], dtype=torch.long, device=ids.device)
    if not has_pixels and bool(torch.isin(checked["input_ids"], placeholders).any()):
        raise OptionError(
            "the prompt has places for images or videos and the pixels are not there: pass "
            "everything the processor returned"
        )
    for kind, name in PIXELS.items():
        _check_grid(f"{kind}_grid_thw", inputs.get(f"{kind}_grid_thw"), name, inputs.get(name))
    return checked


def _with_attention_mask(inputs: Inputs, pad: int | None, ends: Sequence[int]) -> Inputs:
    """Returns the inputs with the attention mask that ``generate`` infers where there is none.

    Its rule: pad tokens are hidden, unless the pad token also ends answers. Raises OptionError
    where that hides all of a request.
    """
    ids = inputs.get("input_ids")
    if inputs.get("attention_mask") is not None or pad is None or pad in ends:
        return inputs
    if not isinstance(ids, Tensor) or not bool((ids == pad).any()):
        return inputs
    mask = (ids != pad).long()
    if not _leaves_tokens(mask, ids):
        raise OptionError(
            f"a request is nothing but pad tokens ({pad}): give attention_mask= if they are text"
        )
    return {**inputs, "attention_mask": mask}


def _leaves_tokens(mask: Any, ids: Tensor) -> bool:
    """Returns whether a mask fits these ids and leaves some tokens of every request."""
    fits = isinstance(mask, Tensor) and mask.shape == ids.shape and not mask.is_meta
    return fits and bool(mask.bool().any(1).all())


def _with_documents(inputs: Inputs, context: Any, draft_inputs: Inputs | None) -> Inputs:
    """Returns the inputs with these spans of each request marked as documents. Raises OptionError
    for a span that is not within the prompt."""
    if context is None:
        return inputs
    if draft_inputs is not None:
        raise OptionError(
            f"context= counts tokens of the target's prompt, and draft_inputs have other tokens: "
            f"put {DOCUMENT_MASK} into inputs and draft_inputs instead"
        )
    ids = inputs["input_ids"]
    spans_by_request: Any = [context] if len(ids) == 1 else context
    mask = inputs.get("attention_mask")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    marked = torch.zeros_like(ids)
    # ``context`` may be anything, so errors of type, value and index become one message.
    try:
        for row, spans in enumerate(spans_by_request):
            # Spans count a prompt's tokens without its padding: token i is in column places[i].
            places = real[row].nonzero().squeeze(-1)
            if not spans and len(ids) > 1:
                continue  # This request of a batch has no document.
            pairs = [spans] if isinstance(spans[0], Integral) else spans
            for start, stop in pairs:
                if not 0 <= start < stop <= len(places):
                    raise OptionError(
                        f"context=({start}, {stop}) is not within the prompt's {len(places)} tokens"
                    )
                marked[row, places[start:stop]] = 1
        if len(spans_by_request) != len(ids):
            raise IndexError  # It is caught below.
    except (TypeError, ValueError, IndexError) as error:
        raise OptionError(
            "context= is (start, stop) in tokens of the prompt, or a list of such; of several "
            "requests a list with an entry for each, which is [] for one without a document"
        ) from error
    return {**inputs, DOCUMENT_MASK: marked}


def _repeat(inputs: Inputs, copies: int) -> Inputs:
    """Returns the inputs of a batch in which all requests, as one block, stand ``copies`` times."""
    repeated: dict[str, Any] = {}
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            repeated[name] = torch.cat([value] * copies)
        else:
            repeated[name] = value if value is None else [*value] * copies
    return repeated


def _renumber_rows(
    allowed: Callable[..., list[int]], requests: int, copies: int
) -> Callable[..., list[int]]:
    """Returns a caller's ``prefix_allowed_tokens_fn``, to be called with our row numbers.

    The caller's function expects the row numbers of transformers, which puts the copies of a
    request next to each other. Our batch has another order (:func:`_repeat`): with two copies of
    the requests A and B, the rows of transformers are A A B B, and ours are A B A B.
    """

    def allowed_by_our_row(row: int, ids: Any) -> list[int]:
        copy, request = divmod(row, requests)
        return allowed(request * copies + copy, ids)

    return allowed_by_our_row


def _check_grid(grid_name: str, grid: Any, pixels_name: str, pixels: Any) -> None:
    """Raises OptionError unless pixels and the grid that counts their patches fit together.

    The names are those of the two inputs. The grid has a row (t, h, w) for each medium.
    """
    # Pixels of two dimensions are one list of the patches of all media.
    are_patches = isinstance(pixels, Tensor) and pixels.ndim == 2
    if grid is None and not are_patches:
        return
    if not isinstance(pixels, Tensor) or grid is None:
        given, missing = grid_name, pixels_name
        if grid is None:
            given, missing = pixels_name, grid_name
        raise OptionError(f"{given} is there and {missing} is not: pass all the processor returned")
    are_integers = isinstance(grid, Tensor) and not grid.is_floating_point()
    if not are_integers or grid.ndim != 2 or grid.shape[1] != 3 or bool((grid < 1).any()):
        raise OptionError(f"{grid_name} must be whole numbers above 0, a row of 3 for each medium")
    if are_patches and len(pixels) != int(grid.prod(1).sum()):
        raise OptionError(
            f"{pixels_name} holds {len(pixels)} patches and {grid_name} counts "
            f"{int(grid.prod(1).sum())}: pass both as the processor returned them"
        )


@runtime_checkable
class Streamer(Protocol):
    """The interface of transformers' streamers."""

    def put(self, value: Tensor) -> None: ...

    def end(self) -> None: ...


@runtime_checkable
class Tokenizer(Protocol):
    """The method of a tokenizer or processor that is used: ids to text."""

    def decode(self, token_ids: Any, **how: Any) -> Any: ...


def check_streamer(streamer: Any) -> None:
    """Raises OptionError unless this is None or a streamer."""
    if streamer is not None and not isinstance(streamer, Streamer):
        raise OptionError("streamer= needs put and end, as transformers' TextStreamer has them")


def current_backbone(model: nn.Module | Backbone) -> Backbone:
    """Returns the backbone of a model as it is now, with all changes since it was loaded."""
    if not isinstance(model, nn.Module | Backbone):
        raise OptionError(f"a model is a loaded Hugging Face model, not {type(model).__name__}")
    return model.current() if isinstance(model, Backbone) else Backbone.of(model)


def _decoder(tokenizer: Any, skips_special: bool) -> Callable[[Sequence[int]], str] | None:
    """Returns a function from ids to text; None without a tokenizer."""
    if tokenizer is None:
        return None
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=skips_special)


def without_end(
    decode: Callable[[Sequence[int]], str] | None, end_ids: Sequence[int]
) -> Callable[[Sequence[int]], str] | None:
    """Returns a decoder that leaves out the token that ends an answer."""
    if decode is None:
        return None
    return lambda ids: decode(ids[:-1] if ids and ids[-1] in end_ids else ids)


def _encoder(tokenizer: Any) -> Callable[[str], list[int]] | None:
    """Returns a function from text to ids, without special tokens; None without a tokenizer.

    Raises OptionError for what is not a tokenizer or a processor.
    """
    if tokenizer is None:
        return None
    if not isinstance(tokenizer, Tokenizer):
        kind = type(tokenizer).__name__
        raise OptionError(f"tokenizer= is a loaded tokenizer or processor, not {kind}")
    inner = vars(tokenizer).get("tokenizer", tokenizer)  # A processor holds a tokenizer.
    return lambda text: inner.encode(text, add_special_tokens=False)
