"""Whether a model's answers by Saccade are those of its own ``generate()``: tried before the first.

What a model computes is known from its modules only as far as they are known. So a target's logits
are compared with those that its own ``generate()`` gives over a few tokens: after a prompt, after
one token, and after several that were read in one forward, as drafted ones are. What differs runs
by the model's own modules, or is refused with a sentence that names the cause.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from saccade.core.errors import ModelError, first_line
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, Tree, chain
from saccade.model import memory
from saccade.model.backbone import MAX_ROUNDING_DIFFERENCE, Backbone, device_of
from saccade.model.fidelity import foreign_hooks, oddities, refuse_autocast
from saccade.model.session import Session

log = logging.getLogger(__name__)

PROMPT_TOKENS = 6
STEPS = 4  # Logits that are compared: after the prompt, after one token, after two more at once.
NAMED_CAUSES = 3  # of a refusal; more than these are counted
NUDGE = 1e-5  # share by which the inputs of a product are changed to see whether it rounds them
NUDGED_ROWS = 256
SMOOTH = 3e-5  # share of the largest output that such a change may make
SMOOTH_TYPES = (torch.float32, torch.float64)


@torch.no_grad()
def check(target: Backbone) -> None:
    """Raises ModelError, naming the cause, unless the target's answers are ``generate()``'s.

    Takes a few forwards of a few tokens the first time, and after changes to modules.
    """
    refuse_autocast(target.device)
    if target.has_passed_trial:
        return
    with target.lock, torch.inference_mode(False):
        _refuse_changed_inputs(target)
        _refuse_numbered_otherwise(target)
        _refuse_rounded_inputs(target)
        _compare(target)
        target.has_passed_trial = True


def _refuse_changed_inputs(target: Backbone) -> None:
    for module in target.outer_modules:
        changing = vars(module)["_forward_pre_hooks_with_kwargs"]
        hooks = [key for key in vars(module)["_forward_pre_hooks"] if key in changing]
        if hooks and foreign_hooks(module):
            raise ModelError(
                f"a forward pre-hook on {type(module).__name__} may change what the model reads at "
                "every step, which Saccade does not follow: remove it, hook the decoder's layers "
                "instead, or call the model's own generate()"
            )


def _refuse_numbered_otherwise(target: Backbone) -> None:
    numbers = [
        vars(module)["layer_idx"]
        for layer in target.text.layers[: target.layers]
        for module in layer.modules()
        if "layer_idx" in vars(module)
    ]
    expected = sorted({*numbers}) == list(range(len({*numbers})))
    if numbers and (not expected or numbers != sorted(numbers)):
        raise ModelError(
            f"the decoder's layers are numbered {sorted({*numbers})} (layer_idx), so its own cache "
            "would mix them up: number them from 0 on after removing or repeating one"
        )


def _refuse_rounded_inputs(target: Backbone) -> None:
    """Refuses products that round what they are given, as int8 activations do.

    Which numbers round up then depends on the last bit of each, and so on how many rows are
    computed at once. Such a product jumps where its inputs change by next to nothing.
    """
    if target.dtype not in SMOOTH_TYPES:
        return  # There every product rounds its inputs.
    noise = torch.Generator().manual_seed(0)
    for name, module in _decoding_modules(target):
        into = vars(module).get("in_features")
        if not isinstance(into, int) or not oddities(module.named_modules()):
            continue
        place = device_of(module)
        x, change = torch.randn(2, NUDGED_ROWS, into, generator=noise, dtype=target.dtype)
        first = module(x.to(place))
        second = module((x * (1 + NUDGE * change)).to(place))
        if bool((second - first).abs().amax() > SMOOTH * first.abs().amax()):
            weight = vars(module)["_parameters"].get("weight")
            kind = type(module if weight is None else weight.data).__name__
            raise ModelError(
                f"{name} ({kind}) rounds its activations, so that answers "
                "depend on how many tokens are computed at once and drafting could not keep them: "
                "quantise weights alone, or call the model's own generate()"
            )


def _decoding_modules(target: Backbone) -> Iterator[tuple[str, nn.Module]]:
    """Those of the decoder and the head, by their names in the model."""
    own = {*target.text.modules(), *target.head_module.modules()}
    return ((name, each) for name, each in target.model.named_modules() if each in own)


def _compare(target: Backbone) -> None:
    ids, forced = _tokens(target)
    try:
        theirs = _generated_logits(target, ids, forced)
    except Exception as error:  # a model raises almost anything over a prompt it does not take
        if memory.is_out_of_memory(error):
            raise
        log.warning(
            "%s was not compared with its own generate(), which failed on a prompt of text: %s",
            type(target.model).__name__,
            first_line(error),
        )
        return
    if not bool(theirs.isfinite().any(-1).all()) or bool(theirs.isnan().any()):
        return  # Its numbers broke down, which the answer will say.
    apart = _apart(target, ids, forced, theirs)
    if apart and not target.needs_model_for_logits:
        target.needs_model_for_logits = True
        apart = _apart(target, ids, forced, theirs)
    if apart and target.fused is not None:
        log.warning("%s runs by its own modules: fused ones differ", type(target.model).__name__)
        target.fused = None
        apart = _apart(target, ids, forced, theirs)
    if apart:
        raise ModelError(_cause(target))


def _cause(target: Backbone) -> str:
    named = [*_decoding_modules(target), *_named(target, target.outer_modules)]
    causes = oddities(dict(named).items())
    more = f" and {len(causes) - NAMED_CAUSES} more" if len(causes) > NAMED_CAUSES else ""
    said = ", ".join(causes[:NAMED_CAUSES]) or "its forward does what Saccade does not know"
    return (
        f"{type(target.model).__name__} gives other logits in its own generate() than token by "
        f"token, several at once or beside other requests ({said}{more}): undo that, or call the "
        "model's own generate()"
    )


def _named(target: Backbone, modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    return [(name, each) for name, each in target.model.named_modules() if each in {*modules}]


def _tokens(target: Backbone) -> tuple[Int[Tensor, "1 prompt"], list[int]]:
    """A prompt of text and what follows it, always the same of one model."""
    special = {*target.placeholders, *_special_ids(target.model.config.to_dict())}
    random = torch.Generator().manual_seed(0)
    most = min(target.vocab, target.embedding_count)
    drawn = torch.randint(most, (64,), generator=random).tolist()
    plain = [id_ for id_ in drawn if id_ not in special] or [0]
    found = [plain[place % len(plain)] for place in range(PROMPT_TOKENS + STEPS)]
    return torch.tensor([found[:PROMPT_TOKENS]], device=target.device), found[PROMPT_TOKENS:]


def _special_ids(config: dict[Any, Any]) -> Iterator[int]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _special_ids(value)
        elif isinstance(value, int) and str(name).endswith(("token_id", "token_index")):
            yield value


class _Forced(LogitsProcessor):
    """Has ``generate`` write these tokens."""

    def __init__(self, prompt: int, tokens: Sequence[int]) -> None:
        self._prompt, self._tokens = prompt, tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[:, self._tokens[input_ids.shape[1] - self._prompt]] = 0
        return forced


def _generated_logits(
    target: Backbone, ids: Int[Tensor, "1 prompt"], forced: Sequence[int]
) -> Float[Tensor, "step vocab"]:
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
        logits_processor=LogitsProcessorList([_Forced(ids.shape[1], forced)]),
    )
    return torch.cat(out.logits).to(target.device)


def _apart(
    target: Backbone,
    ids: Int[Tensor, "1 prompt"],
    forced: Sequence[int],
    theirs: Float[Tensor, "step vocab"],
) -> bool:
    """Whether our logits are further from ``generate``'s than rounding takes them."""
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    session = Session(target, [Sampling()], room=STEPS, cuda_graphs=False)
    (prefill,) = session.prefill(target.prompts(inputs))
    session.commit({0: forced[:1]})
    rows = [prefill.logits, session.score({0: Tree()})[0].logits(ROOT)]
    tree = chain(list(forced[1 : STEPS - 1]))
    scores = session.score({0: tree})[0]
    rows += [scores.logits(node) for node in range(len(tree))]
    if any(row.shape != theirs.shape[1:] for row in rows):
        return True
    ours, theirs = torch.stack(rows).float(), theirs.float()
    theirs = theirs.masked_fill(theirs == float("-inf"), 0)
    ours = ours.masked_fill(ours == float("-inf"), 0)
    limit = MAX_ROUNDING_DIFFERENCE.get(target.dtype, MAX_ROUNDING_DIFFERENCE[torch.bfloat16])
    return not bool(((ours - theirs).abs().amax(1) <= limit * theirs.abs().amax(1)).all())
