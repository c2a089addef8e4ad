"""Measures the trained hybrid pair (``lab/training/hybrid.py``) beside the embedded pair.

A hybrid model has layers of attention and layers of Gated DeltaNet, which keep a recurrent state
instead of keys. Pruning the prompt takes keys from a draft's attention and also changes its states,
because a state sums up every token that was read.

Both pairs answer the same unseen clips. Measured are what the targets get right, whether every
method gives the ids of ``generate()``, what a pruned prompt costs a draft in acceptance, and the
seconds of methods and of forwards with several rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lab.hardware.prefill import measure_verifications
from lab.studies.experiment import Experiment
from lab.studies.seeing import content_word_f1
from lab.training import agreement, build, evaluate
from lab.training.hybrid import FORM
from lab.training.hybrid_model import HYBRID, TARGET_PATTERN, create_hybrid, load_hybrid
from saccade.bench import measures
from saccade.core.prompt import DOCUMENT_MASK, Prefill
from saccade.inputs import Loaded, ask, load
from saccade.inputs.checkpoints import EMBEDDED, NAMES
from saccade.methods import resolve
from saccade.model.backbone import Backbone
from saccade.world import dialogues
from saccade.world.train_draft.samples import Canvas

HYBRID_FAMILY = evaluate.Family(load_hybrid, FORM, HYBRID)
SIZES = (256, 512)  # Visual tokens of the clips.
TOKENS = 192  # Of an answer, at most.
PRUNED_VIEWS = tuple(
    f"{view}/keep={keep}" for view in ("attention", "uniform") for keep in (0.5, 0.25, 0.1)
)
VIEWS = ("full", *PRUNED_VIEWS, "none")
METHODS = ("ar", "auto", "sd", "sd-tree", "specvlm", "sage", "lookup")
TIMED = (*METHODS, "hf")
ROWS = (1, 2, 4, 8, 16)  # Tokens in a forward that is timed.
TIMED_FORWARDS = 40  # Of each number of rows; the fastest counts.
ACCURACY_CLIPS = 32  # Clips of each size that a model reads with the true answer.


@dataclass(frozen=True)
class PairFolders:
    """Where a pair's models are, and how they are run to measure their accuracy."""

    target: Path
    draft: Path
    family: evaluate.Family  # How both are loaded, prompted and computed.

    def load(self) -> tuple[Loaded, Loaded]:
        return load(str(self.target)), load(str(self.draft))


def pairs_to_compare(folder: Path) -> dict[str, PairFolders]:
    """Returns the hybrid pair in ``folder`` and the embedded pair."""
    return {
        "hybrid": PairFolders(folder / "target", folder / "draft", HYBRID_FAMILY),
        "embedded": PairFolders(
            EMBEDDED / "target", NAMES["shapes-draft"], evaluate.EMBEDDED_FAMILY
        ),
    }


# -- what the models know, and how often drafts are right --------------------------------------


def measure_accuracy(
    pairs: Mapping[str, PairFolders], on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns the share of right content words when the true text is read, by model and size.

    Each row has one share for each of ``evaluate.VIEWS``: with the clip itself ("own"), with
    another clip and without one.
    """
    rows = []
    for name, pair in pairs.items():
        for role, folder in (("target", pair.target), ("draft", pair.draft)):
            for size in SIZES:
                on_progress(f"{role} of the {name} pair, {size} visual tokens, true answers")
                frames, side = (agreement.FRAMES | agreement.EXTRA_FRAMES)[size]
                accuracy = evaluate.teacher_forced(
                    folder,
                    Canvas("video", frames, side, side),
                    ACCURACY_CLIPS,
                    "describe",
                    family=pair.family,
                )
                content = {view: round(own["content"], 4) for view, own in accuracy.items()}
                rows.append({"pair": name, "model": role, "size": size, "content": content})
    return rows


def measure_acceptance(
    pairs: Mapping[str, PairFolders], clips: int, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns for each pair, size and clip how true the answer is, and the tau of a chain by view.

    The answer's truth is the F1 of its content words and those of the true description. Tau is
    computed, not run: it follows from where the draft's arg-max is the target's token along the
    answer of ``generate()``. The share of such tokens ("agreement") is stored too, and both once
    more for a draft whose states are those of the whole prompt
    (``agreeing_tokens_with_whole_states``).
    """
    rows = []
    for name, pair in pairs.items():
        target, draft = pair.load()
        for size in SIZES:
            for number in range(clips):
                on_progress(f"{name} pair, {size} visual tokens, clip {number + 1} of {clips}")
                rows.append(
                    {"pair": name, "size": size, "clip": number}
                    | _measure_clip(target, draft, number, size)
                )
    return rows


def _measure_clip(target: Loaded, draft: Loaded, number: int, size: int) -> dict[str, Any]:
    scene, clip, question = agreement.unseen_clip(number, size)
    inputs = ask(target, question, clips=[clip])
    reference = generate_ids(target, inputs)
    prefill = agreement.prefill_with_attention(target.backbone, inputs)
    agreements = {
        view: agreement.agreeing_tokens(draft, target, prefill, view, reference) for view in VIEWS
    }
    with_whole_states = {
        view: agreeing_tokens_with_whole_states(draft, target, prefill, view, reference)
        for view in VIEWS[1:]
    }
    truth = dialogues.conversation(scene, "describe", number)[0].answer
    return {
        "tokens": len(reference),
        "f1": round(content_word_f1(target.decode(reference), truth), 4),
        "views": {
            view: {
                "agreement": round(fmean(own), 4),
                "tau": round(agreement.tau(own), 4),
            }
            for view, own in agreements.items()
        },
        "with_whole_states": {
            view: {
                "agreement": round(fmean(own), 4),
                "tau": round(agreement.tau(own), 4),
            }
            for view, own in with_whole_states.items()
        },
    }


@torch.no_grad()
def agreeing_tokens_with_whole_states(
    draft: Loaded, target: Loaded, prefill: Prefill, view: str, ids: Sequence[int]
) -> list[bool]:
    """Returns whether the draft's arg-max is each token of the answer if only attention is pruned.

    ``ids`` are the answer's, and ``view`` has a view's name and budget, such as "uniform/keep=0.1".
    ``agreement.agreeing_tokens`` does the same for a draft that reads nothing but the tokens of the
    view. Here the draft reads the whole prompt, so layers with a recurrent state have the state
    after all of it. In layers of attention, tokens that the view leaves out are masked for all
    others. So the difference of the two results is what it costs that pruning changes the states.
    For a draft of attention alone there is no difference.
    """
    # The rows are the whole prompt and all tokens of the answer but the last. ``kept`` says which
    # of them others may see.
    model = draft.backbone
    whole = prefill.prompt
    if model.shares_rows_with(target.backbone):
        whole = model.adopt(whole)
    kept = torch.zeros(len(whole) + len(ids) - 1, dtype=torch.bool)
    kept[len(whole) :] = True
    kept_prompt_rows = resolve(f"sd/view={view}").view(prefill, whole).places
    kept[kept_prompt_rows] = True
    answer_positions = whole.next_position + torch.arange(len(ids) - 1)
    positions = torch.cat([whole.positions, answer_positions.expand(3, -1)], 1)
    embeds = torch.cat([whole.embeds, model.embed(torch.tensor(ids[:-1]))])
    causal = torch.ones(len(kept), len(kept), dtype=torch.bool).tril_()
    visible = causal & kept
    visible.fill_diagonal_(True)  # Every row sees itself, because one that sees nothing is NaN.
    hidden = model.model.model.language_model(
        inputs_embeds=embeds[None],
        position_ids=positions[:, None],
        attention_mask={"full_attention": visible[None, None], "linear_attention": None},
        use_cache=False,
    ).last_hidden_state[0, len(whole) - 1 :]
    guesses = model.model.lm_head(hidden).argmax(-1).tolist()
    return [guess == token for guess, token in zip(guesses, ids, strict=True)]


def generate_ids(model: Loaded, inputs: Mapping[str, Any]) -> tuple[int, ...]:
    """Returns the ids of transformers' own greedy answer."""
    own_inputs = {name: value for name, value in inputs.items() if name != DOCUMENT_MASK}
    ids = model.backbone.model.generate(**own_inputs, max_new_tokens=TOKENS, do_sample=False)
    return tuple(ids[0, inputs["input_ids"].shape[1] :].tolist())


# -- seconds -----------------------------------------------------------------------------------


@dataclass
class ExperimentWithDraft(Experiment):
    """An experiment with ``own_draft`` in place of the embedded pair's draft."""

    own_draft: Loaded | None = None

    @property
    def draft(self) -> Loaded:
        assert self.own_draft is not None
        return self.own_draft


def time_methods(
    pairs: Mapping[str, PairFolders],
    clips: int,
    size: int,
    on_progress: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Returns the seconds and tau of each method's answer to each clip, all methods in turn.

    ``same`` says whether the answer's ids are those of ``generate()``, which is the peer `hf`. The
    ratios ``decode_over_ar``, ``whole_over_hf`` and so on say how many times as fast the answer was
    as that of `ar` or `hf`. Raises RuntimeError where drafting fell back to plain decoding.
    """
    rows = []
    for name, pair in pairs.items():
        target, draft = pair.load()
        answers = ExperimentWithDraft(
            clips,
            size,
            TOKENS,
            lambda text, name=name: on_progress(f"{name} pair: {text}"),
            target=target,
            own_draft=draft,
        ).run_interleaved(*TIMED)
        # Speedups by (method, baseline), each with a value for every clip.
        decoding, whole = (
            {
                (method, baseline): measures.speedups(own, answers[baseline], whole=is_whole)
                for method, own in answers.items()
                for baseline in ("ar", "hf")
            }
            for is_whole in (False, True)
        )
        for method, own in answers.items():
            for place, (each, reference) in enumerate(zip(own, answers["hf"], strict=True)):
                rows.append(
                    {
                        "pair": name,
                        "method": method,
                        "clip": int(each.item),
                        "same": each.ids == reference.ids,
                        "tokens": len(each.ids),
                        "tau": measures.tau([each]),
                        "decode_seconds": round(each.decode, 5),
                        "seconds": round(each.total, 5),
                    }
                    | {
                        f"{part}_over_{baseline}": round(ratios[method, baseline][place], 4)
                        for part, ratios in (("decode", decoding), ("whole", whole))
                        for baseline in ("ar", "hf")
                    }
                )
    return rows


def time_layers(size: int, on_progress: Callable[[str], None]) -> list[dict[str, Any]]:
    """Returns what four layers of attention and four layers of Gated DeltaNet add to a forward.

    Forwards of three models are timed: of two layers of attention, of six, and of two with four
    layers of Gated DeltaNet. The seconds of the four layers are the larger model's less those of
    the two layers alone. Results have seconds by the number of rows, over ``size`` cached keys, for
    the three models and for both differences. Weights are random, because seconds do not depend on
    them.
    """
    shapes = {
        "two of attention": ("full_attention",) * 2,
        "six of attention": ("full_attention",) * 6,
        "four of Gated DeltaNet, two of attention": TARGET_PATTERN,
    }
    seconds = {}
    for name, pattern in shapes.items():
        on_progress(f"forwards by rows: {name}")
        model = Loaded(
            name,
            Backbone(create_hybrid(pattern).eval()),
            build.load_processor(EMBEDDED / "target"),
        )
        seconds[name] = measure_verifications(model, size, ROWS, TIMED_FORWARDS)
    base = seconds["two of attention"]
    whole = [
        {"layers": name, "seconds": own, "ratio": _ratios(own)} for name, own in seconds.items()
    ]
    parts = []
    for name, whole_name in (
        ("four of attention alone", "six of attention"),
        ("four of Gated DeltaNet alone", "four of Gated DeltaNet, two of attention"),
    ):
        difference = {rows: seconds[whole_name][rows] - base[rows] for rows in base}
        parts.append({"layers": name, "seconds": difference, "ratio": _ratios(difference)})
    return [*whole, *parts]


def time_forwards(
    pairs: Mapping[str, PairFolders], size: int, on_progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Returns the seconds of forwards of every model by their rows, over ``size`` keys."""
    rows = []
    for name, pair in pairs.items():
        for role, model in zip(("target", "draft"), pair.load(), strict=True):
            on_progress(f"forwards by rows: {role} of the {name} pair")
            seconds = measure_verifications(model, size, ROWS, TIMED_FORWARDS)
            rows.append(
                {"pair": name, "model": role, "seconds": seconds, "ratio": _ratios(seconds)}
            )
    return rows


def _ratios(seconds: Mapping[int, float]) -> dict[int, float]:
    """Returns the seconds by rows as multiples of those with one row."""
    return {rows: round(each / seconds[1], 3) for rows, each in seconds.items()}


def machine_load() -> dict[str, Any]:
    """Returns torch's threads, and the load: how many processes of the machine ran, or waited to
    run, on average in the last minute."""
    return {"threads": torch.get_num_threads(), "load": round(os.getloadavg()[0], 2)}
