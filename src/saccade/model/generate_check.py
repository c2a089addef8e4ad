"""Checks before the first answer that a target's logits are those of its own ``generate()``.

A model may do things that its modules do not tell us: a hook may change its inputs, or its forward
may scale the logits. So changes that a short comparison cannot show are looked for first, and such
a model is refused. Then the target's logits over a few tokens are compared with those of its own
``generate()``: after a prompt, after one token, and after several tokens that were read in one
forward, as drafted tokens are. If the logits differ, slower ways to run the target are tried: the
model's own forward for the logits, and its own modules for the layers. If the logits differ in
every way, the model is refused with a sentence that names the cause.

A model whose ``generate()`` fails on a prompt of text is not compared, which is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from saccade.core.errors import ModelError, SaccadeError, first_line
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.model import memory
from saccade.model.backbone import MAX_ROUNDING_DIFFERENCE, Backbone, device_of
from saccade.model.change_detection import (
    foreign_attention,
    foreign_hooks,
    names_of,
    refuse_autocast,
    unusual_changes,
)
from saccade.model.session import Session

log = logging.getLogger(__name__)

PROMPT_TOKENS = 6
# The rows of logits that are compared: one after the prompt, one after the first token, and one
# after each of the next two tokens, which are read in one forward.
STEPS = 4
MAX_NAMED_CAUSES = 3  # A refusal names so many causes, and counts the others.
# In half precision, logits of a deep model may differ by ``MAX_DEEP_FACTOR`` times the usual
# rounding, if their cosine similarity is at least ``LEAST_SIMILARITY``.
MAX_DEEP_FACTOR = 3.0
LEAST_SIMILARITY = 0.99
# The inputs of each linear layer are perturbed by this share, to see whether the layer rounds them.
INPUT_CHANGE = 1e-5
PERTURBED_ROWS = 256  # Each layer is run on this many random rows, and on the same rows perturbed.
MAX_OUTPUT_CHANGE = 3e-5  # As a share of the largest output. A layer that rounds changes by more.
UNROUNDED_TYPES = (torch.float32, torch.float64)


@torch.no_grad()
def check_against_generate(target: Backbone) -> None:
    """Raises ModelError, naming the cause, if the target's answers are not ``generate()``'s.

    If only a slower way to run the target gives ``generate()``'s answers, the target runs in that
    way from then on. This function computes a few forwards of a few tokens, and only at the first
    call and after changes to the model's modules.
    """
    refuse_autocast(target.device)
    if target.is_checked_against_generate:
        return
    with target.lock, torch.inference_mode(False):
        _refuse_changed_inputs(target)
        _refuse_foreign_attention(target)
        _refuse_odd_layer_numbers(target)
        _refuse_rounded_inputs(target)
        _compare_logits(target)
        target.is_checked_against_generate = True


def _refuse_changed_inputs(target: Backbone) -> None:
    """Refuses hooks outside of the decoder that may change what the model reads."""
    for module in target.outer_modules:
        # The modules around the decoder are called by keyword, and torch gives keyword arguments
        # only to hooks that were registered with ``with_kwargs``. No other hook can change them.
        with_keywords = vars(module)["_forward_pre_hooks_with_kwargs"]
        pre_hooks = vars(module)["_forward_pre_hooks"]
        may_change_inputs = any(key in with_keywords for key in pre_hooks)
        # A module that has only hooks of torch, transformers and Saccade is not refused.
        if may_change_inputs and foreign_hooks(module):
            raise ModelError(
                f"a forward pre-hook on {type(module).__name__} may change what the model reads at "
                "every step, which Saccade does not follow: remove it, hook the decoder's layers "
                "instead, or call the model's own generate()"
            )


def _refuse_foreign_attention(target: Backbone) -> None:
    """Refuses a decoder whose config names an attention function or a mask of the caller's.

    Attention over a tree of drafted tokens is our own, so the caller's function is never called. A
    comparison over a few tokens would not show what it does to a long text.
    """
    if functions := foreign_attention(target.text.config):
        name = target.text.config._attn_implementation
        raise ModelError(
            f"{type(target.text).__name__} attends by {names_of(functions)}, which was registered "
            f"with transformers as {name}, and Saccade computes attention itself: choose another "
            "one by model.set_attn_implementation('sdpa'), or call the model's own generate()"
        )


def _refuse_odd_layer_numbers(target: Backbone) -> None:
    """Refuses layers that are not numbered from 0 on, in order."""
    # Several modules of a layer may have its number, so a number may come several times.
    numbers = [
        vars(module)["layer_idx"]
        for layer in target.text.layers[: target.layer_count]
        for module in layer.modules()
        if isinstance(vars(module).get("layer_idx"), int)
    ]
    distinct = sorted({*numbers})
    is_counted_from_0 = distinct == list(range(len(distinct)))
    is_in_order = numbers == sorted(numbers)
    if not (is_counted_from_0 and is_in_order):
        raise ModelError(
            f"the decoder's layers are numbered {distinct} (layer_idx), so its own cache "
            "would mix them up: number them from 0 on after removing or repeating one"
        )


def _refuse_rounded_inputs(target: Backbone) -> None:
    """Refuses linear layers that round their inputs, as those with int8 activations do.

    Whether a number is rounded up depends on its last bit, which in turn depends on how many rows
    are computed at once. The output of such a layer jumps where its inputs change by next to
    nothing. So each layer that was quantised, hooked or replaced is run on random inputs, and again
    on slightly different ones.
    """
    if target.dtype not in UNROUNDED_TYPES:
        return  # In low precision every layer rounds its inputs.
    random = torch.Generator().manual_seed(0)
    for name, module in _decoding_modules(target):
        width = vars(module).get("in_features")
        if not isinstance(width, int) or not unusual_changes(module.named_modules()):
            continue  # This is no linear layer, or an unchanged one, which does not round.
        device = device_of(module)
        inputs, noise = torch.randn(2, PERTURBED_ROWS, width, generator=random, dtype=target.dtype)
        output = module(inputs.to(device))
        changed_output = module((inputs * (1 + INPUT_CHANGE * noise)).to(device))
        if not isinstance(output, Tensor):
            continue  # This is a router, which returns its choice of experts.
        if bool((changed_output - output).abs().amax() > MAX_OUTPUT_CHANGE * output.abs().amax()):
            weight = vars(module)["_parameters"].get("weight")
            kind = type(module if weight is None else weight.data).__name__
            raise ModelError(
                f"{name} ({kind}) rounds its activations, so that answers "
                "depend on how many tokens are computed at once and drafting could not keep them: "
                "quantise weights alone, or call the model's own generate()"
            )


def _decoding_modules(target: Backbone) -> Iterator[tuple[str, nn.Module]]:
    """Returns the modules of the decoder and the head, with their names in the model."""
    decoding_modules = {*target.text.modules(), *target.head_module.modules()}
    return ((name, each) for name, each in target.model.named_modules() if each in decoding_modules)


def _compare_logits(target: Backbone) -> None:
    """Compares the target's logits with ``generate``'s, and changes how it runs if that is needed.

    Raises ModelError if they differ in every way to run it, or if it cannot be run token by token.
    Nothing is compared where ``generate`` itself fails or gives broken numbers.
    """
    ids, forced = _tokens(target)
    try:
        generated_logits = _generated_logits(target, ids, forced)
    except Exception as error:  # A model may raise anything over a prompt that it cannot read.
        if memory.is_out_of_memory(error):
            raise
        log.warning(
            "%s was not compared with its own generate(), which failed on a prompt of text: %s",
            type(target.model).__name__,
            first_line(error),
        )
        return
    every_row_has_numbers = bool(generated_logits.isfinite().any(-1).all())
    if not every_row_has_numbers or bool(generated_logits.isnan().any()):
        return  # The model's numbers are broken, and the answer will report that.
    try:
        differ = _every_way_differs(target, ids, forced, generated_logits)
    except Exception as error:  # An unknown model may raise anything where it is driven by us.
        if isinstance(error, SaccadeError) or memory.is_out_of_memory(error):
            raise
        raise ModelError(
            f"{type(target.model).__name__} cannot be run token by token ({first_line(error)}): "
            "call the model's own generate()"
        ) from error
    if differ:
        raise ModelError(_explain_difference(target))


def _every_way_differs(
    target: Backbone,
    ids: Int[Tensor, "1 prompt"],
    forced: Sequence[int],
    generated_logits: Float[Tensor, "step vocab"],
) -> bool:
    """Tries up to three ways to run the target, and returns True if the logits differ in all.

    The ways are: as it is set up now; with its logits computed by the model's own forward; and also
    with its layers computed by their own modules. The target stays in the first way that agrees.
    """
    differ = _logits_differ(target, ids, forced, generated_logits)
    if differ and not target.needs_model_for_logits:
        target.needs_model_for_logits = True
        differ = _logits_differ(target, ids, forced, generated_logits)
    if differ and target.fused is not None:
        log.warning(
            "%s runs by its own modules, because the fused decoder's logits differ",
            type(target.model).__name__,
        )
        target.fused = None
        differ = _logits_differ(target, ids, forced, generated_logits)
    return differ


def _explain_difference(target: Backbone) -> str:
    """Returns the message for logits that differ, with the changes to the model that may be why."""
    named = [*_decoding_modules(target), *_with_names(target, target.outer_modules)]
    causes = unusual_changes(dict(named).items())
    count = len(causes) - MAX_NAMED_CAUSES
    more_causes = f" and {count} more" if count > 0 else ""
    reasons = ", ".join(causes[:MAX_NAMED_CAUSES])
    reasons = reasons or "its forward does what Saccade does not know"
    return (
        f"{type(target.model).__name__} gives other logits in its own generate() than when "
        f"Saccade runs it, one or several tokens at once ({reasons}{more_causes}): undo that, "
        "or call the model's own generate()"
    )


def _with_names(target: Backbone, modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in target.model.named_modules() if each in {*modules}]


def _tokens(target: Backbone) -> tuple[Int[Tensor, "1 prompt"], list[int]]:
    """Returns random ids without special tokens: those of a prompt, and those that follow it.

    They are the same in every call for a model.
    """
    special = {*target.placeholders, *_special_ids(target.model.config.to_dict())}
    if target.model.can_generate():
        special |= {*_special_ids(target.model.generation_config.to_dict())}
    random = torch.Generator().manual_seed(0)
    id_count = min(target.vocab, target.embedding_count)
    drawn = torch.randint(id_count, (64,), generator=random).tolist()
    ordinary = [id_ for id_ in drawn if id_ not in special] or [0]
    ids = [ordinary[place % len(ordinary)] for place in range(PROMPT_TOKENS + STEPS)]
    return torch.tensor([ids[:PROMPT_TOKENS]], device=target.device), ids[PROMPT_TOKENS:]


def _special_ids(config: dict[Any, Any]) -> Iterator[int]:
    """Yields the ids of tokens that a config names, such as ``eos_token_id``, at any depth."""
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif str(name).endswith(("token_id", "token_index")):
            ids = value if isinstance(value, list) else [value]
            yield from (id_ for id_ in ids if isinstance(id_, int))


class _ForcedTokens(LogitsProcessor):
    """Makes ``generate`` choose these tokens after the prompt."""

    def __init__(self, prompt_length: int, tokens: Sequence[int]) -> None:
        self._prompt_length, self._tokens = prompt_length, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._tokens[input_ids.shape[1] - self._prompt_length]] = 0
        return forced


def _generated_logits(
    target: Backbone, ids: Int[Tensor, "1 prompt"], forced: Sequence[int]
) -> Float[Tensor, "step vocab"]:
    """Returns the raw logits of the model's own ``generate`` while it writes the forced tokens."""
    config = GenerationConfig(
        max_new_tokens=STEPS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    out = target.model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        generation_config=config,
        logits_processor=LogitsProcessorList([_ForcedTokens(ids.shape[1], forced)]),
    )
    return torch.cat(out.logits).to(target.device)


def _logits_differ(
    target: Backbone,
    ids: Int[Tensor, "1 prompt"],
    forced: Sequence[int],
    generated_logits: Float[Tensor, "step vocab"],
) -> bool:
    """Returns whether our logits differ from ``generate``'s by more than rounding explains.

    Both have a row of logits after the prompt, and one after each forced token but the last. Ours
    come from three forwards: over the prompt, over the first token, and over a chain of the tokens
    between the first and the last, as a draft is scored.
    """
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    session = Session(target, [Sampling()], room=STEPS, cuda_graphs=False)
    (prefill,) = session.prefill(target.prompts(inputs))
    session.commit({0: forced[:1]})
    rows = [prefill.logits, session.score({0: Tree()})[0].logits(ROOT)]
    tree = chain(list(forced[1 : STEPS - 1]))
    scores = session.score({0: tree})[0]
    rows += [scores.logits(node) for node in range(len(tree))]
    if any(row.shape != generated_logits.shape[1:] for row in rows):
        return True
    our_logits = torch.stack(rows).float()
    generated_logits = generated_logits.float()
    # Where both logits of an id are -inf, their difference would be NaN. So 0 stands for -inf.
    generated_logits = generated_logits.masked_fill(generated_logits == float("-inf"), 0)
    our_logits = our_logits.masked_fill(our_logits == float("-inf"), 0)
    return not bool(_agree(our_logits, generated_logits, target.dtype).all())


def _agree(
    our_logits: Float[Tensor, "step vocab"],
    generated_logits: Float[Tensor, "step vocab"],
    dtype: torch.dtype,
) -> Bool[Tensor, " step"]:
    """Returns, for each row, whether the logits differ by no more than rounding.

    In half precision rounding adds up over the layers of a deep model. So rows may differ by up to
    ``MAX_DEEP_FACTOR`` times the usual rounding there, if they point in nearly the same direction.
    """
    usual = MAX_ROUNDING_DIFFERENCE.get(dtype, MAX_ROUNDING_DIFFERENCE[torch.bfloat16])
    # The largest difference in each row, as a share of the row's largest absolute logit.
    share = (our_logits - generated_logits).abs().amax(1) / generated_logits.abs().amax(1)
    if dtype not in (torch.bfloat16, torch.float16):
        return share <= usual
    # The mean is subtracted, because adding a number to all logits does not change the law.
    our_direction, generated_direction = (
        each - each.mean(1, keepdim=True) for each in (our_logits, generated_logits)
    )
    alike = cosine_similarity(our_direction, generated_direction) >= LEAST_SIMILARITY
    return (share <= usual) | ((share <= MAX_DEEP_FACTOR * usual) & alike)
