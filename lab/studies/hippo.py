"""HIPPO's figures: what attention keeps, how the draft answers with it, and a round's seconds.

HIPPO's draft sees a tenth of the video, which the view ``holistic`` chooses by three scores: the
text's attention, and how much a token differs from its neighbours in time and in space. PEARL
also drafts in parallel, and HIPPO is compared with it. ``python -m lab figure`` runs these studies.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from lab import draw
from lab.draw import Data
from lab.studies import methods
from lab.studies.experiment import TAU, Experiment, interval_over_clips
from lab.studies.specvlm import measure_over_shares, measure_tau_differences
from lab.studies.study import Study
from saccade.bench import draft_only, text_scores
from saccade.bench.runner import media_arguments
from saccade.inputs import ask
from saccade.world.suites import DEFAULT_LENGTH, LENGTHS, suites

EDGE = 0.1  # The share of a frame's height that is its top, and that is its bottom.
EDGE_VIEWS = ("attention", "specvlm", "holistic", "random", "uniform")  # Each keeps a tenth.
KEPT_VIEWS = ("attention", "specvlm", "holistic", "random", "dycoke")  # Each keeps a tenth.
# The rows of Fig. 3 by what the draft sees of the video, each with the view that shows it that.
VIEW_BY_ROW = {
    "the whole video": "full",
    "attention": "attention",
    "SpecVLM": "specvlm",
    "holistic": "holistic",
    "random": "random",
    "uniform": "uniform",
    "no video": "none",
}
TIMED_SIZES = (256, 2048, 8192)
# Vanilla speculative decoding with a chain of 5 tokens, by how much of the video the draft sees.
VANILLA = {"all": "sd/shape=chain-5", "a tenth": "sd/view=holistic/keep=0.1/shape=chain-5"}
# While the target prefills, HIPPO's draft waits for the attention, or reads a set of tokens that
# the scores without attention choose (superset), or the whole video.
EARLY_METHODS = {
    "HIPPO, waits": "hippo/early=wait",
    "HIPPO, superset": "hippo/early=superset",
    "HIPPO, all": "hippo/early=all",
    "PEARL": "pearl",
    "PEARL, syn-prefill": "pearl-syn",
    "PEARL, SpecVLM's view": "pearl-specvlm",
    "plain decoding": "ar",
}
CRITERIA = ("holistic", "attention", "random", "frames", "fastvid", "dycoke")
SCORES = ("attn", "temp", "spa")  # s_attn, s_temp and s_spa in the paper.


def measure_edges(experiment: Experiment) -> Data:
    """Measures Fig. 2 and 8: the share of kept tokens at a frame's top and bottom, by view."""
    shares_by_view: dict[str, list[tuple[float, float]]] = {view: [] for view in EDGE_VIEWS}
    for number in range(experiment.clips):
        kept_cells = methods.measure_kept_cells(experiment, number, EDGE_VIEWS)
        for view, cells in kept_cells["kept"].items():
            shares_by_view[view].append(edge_shares(cells, kept_cells["grid"][1]))
    rows = {}
    for view, own in shares_by_view.items():
        top, bottom = zip(*own, strict=True)
        rows[view] = {
            "top tenth": interval_over_clips(top),
            "bottom tenth": interval_over_clips(bottom),
        }
    across = "share of a frame's kept tokens (a tenth of the video kept)"
    return {"x": across, "rows": rows, "marks": {"if spread evenly": EDGE}}


def edge_shares(cells: Sequence[Sequence[int]], high: int) -> tuple[float, float]:
    """Returns the shares of cells (t, h, w) in the top and the bottom tenth, means over frames.

    Frames without a cell among ``cells`` are left out of the means. ``high`` is the number of rows
    of cells in a frame. A row counts by the part of it that lies in the tenth: of 8 rows 0.8 of the
    first one does, and of 15 rows the first and half of the second.
    """
    part_in_top = np.clip(EDGE * high - np.arange(high), 0, 1)  # Of each row.
    part_in_bottom = part_in_top[::-1]
    rows_by_frame: dict[int, list[int]] = defaultdict(list)
    for t, h, _ in cells:
        rows_by_frame[t].append(h)
    shares = [
        (part_in_top[rows].mean(), part_in_bottom[rows].mean()) for rows in rows_by_frame.values()
    ]
    at_top, at_bottom = np.mean(shares, axis=0).tolist()
    return at_top, at_bottom


def measure_kept(experiment: Experiment) -> Data:
    """Measures Fig. 1 and 8: the tokens kept of the first clip, by view. Some frames are drawn."""
    return methods.measure_kept_cells(experiment, 0, KEPT_VIEWS)


def measure_accuracy(experiment: Experiment) -> Data:
    """Measures Fig. 3: how often the draft by itself answers right, by what it sees of the video.

    The target's own answers are scored too, for comparison. There is a panel for each length of
    videos up to the experiment's size, and always one for the shortest.
    """
    lengths = {name: length.tokens for name, length in LENGTHS.items()}
    panels = {
        f"{tokens} visual tokens": _share_right(experiment, name)
        for name, tokens in lengths.items()
        if tokens <= max(experiment.size, lengths[DEFAULT_LENGTH])
    }
    return {"x": "share of short questions answered right", "panels": panels}


def _share_right(experiment: Experiment, length: str) -> Data:
    """Returns the shares of right answers to the questions about videos of one length.

    They are by what is seen of the video, and then by who answers.
    """
    name = "shapes-qa" if length == DEFAULT_LENGTH else f"shapes-qa-{length}"
    model, tokenizer = experiment.target.backbone.model, experiment.target.tokenizer
    scores: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, item in enumerate(islice(suites()[name].items(), experiment.clips)):
        experiment.on_progress(f"{name}, question {number + 1} of {experiment.clips}")
        media = media_arguments(item)
        inputs = ask(experiment.target, item.question, **media)
        plain = experiment.answer("ar", media["clips"][0], inputs).ids
        answers: dict[tuple[str, str], Sequence[int]] = {("the target", "the target"): plain}
        for what, draft in experiment.drafts.items():
            for row, view in VIEW_BY_ROW.items():
                answers[row, f"a draft that {what}"] = draft_only.draft_answer(
                    experiment.target,
                    draft,
                    inputs,
                    draft_inputs=None,
                    recipe=draft_only.draft_only_recipe(f"draft/view={view}"),
                    max_new_tokens=experiment.tokens,
                    end_ids=model.generation_config.eos_token_id,
                )
        for (row, series), ids in answers.items():
            text = tokenizer.decode(list(ids), skip_special_tokens=True)
            scores[row][series].append(text_scores.exact_match(text, item.answers))
    return {
        row: {name: interval_over_clips(own) for name, own in by_series.items()}
        for row, by_series in scores.items()
    }


def measure_round_times(experiment: Experiment) -> Data:
    """Measures Fig. 4: where the seconds of rounds go, by how much of the video the draft sees."""
    rows = {}
    for size in _timed_sizes(experiment):
        answers_by_method = experiment.run_interleaved(*VANILLA.values(), size=size)
        for what_is_seen, method in VANILLA.items():
            spent = [
                (own.draft, own.verify, own.decode - own.draft - own.verify)
                for own in answers_by_method[method]
            ]
            shares = 100 * np.sum(spent, axis=0) / np.sum(spent)
            rows[f"{size} visual tokens,\nthe draft sees {what_is_seen}"] = dict(
                zip(("the draft", "the target", "the rest"), shares.tolist(), strict=True)
            )
    return {"x": "per cent of the seconds of decoding", "rows": rows, "stacked": True}


def _timed_sizes(experiment: Experiment) -> list[int]:
    """Returns the ``TIMED_SIZES`` up to the experiment's size, or this size if it is below all."""
    return [size for size in TIMED_SIZES if size <= experiment.size] or [experiment.size]


def measure_early_drafts(experiment: Experiment) -> Data:
    """Measures seconds of whole answers by what the draft reads during the target's prefill.

    No paper has this figure.
    """
    rows: Data = {}
    answers_by_size: Data = {}
    for size in _timed_sizes(experiment):
        answers_by_method = experiment.run_interleaved(*EARLY_METHODS.values(), size=size)
        rows[f"{size} visual tokens"] = {
            name: interval_over_clips([own.total for own in answers_by_method[method]])
            for name, method in EARLY_METHODS.items()
        }
        answers_by_size[str(size)] = {
            method: [
                {"total": round(own.total, 4), "first": round(own.first, 4), "tokens": len(own.ids)}
                for own in answers
            ]
            for method, answers in answers_by_method.items()
        }
    return {"x": "seconds of a whole answer", "rows": rows, "answers": answers_by_size}


def measure_ablation(experiment: Experiment) -> Data:
    """Measures Fig. 6: what tau loses without one of the three scores, clip by clip.

    The parallel schedule (w/o vpsd) is left out, because it changes seconds and not tau.
    """
    views = {f"without s_{part}": f"holistic-no-{part}/keep=0.1" for part in SCORES}
    return measure_tau_differences(
        experiment, "holistic/keep=0.1", views, f"{TAU} less the whole score's on the same clip"
    )


def measure_pruning(experiment: Experiment) -> Data:
    """Measures Fig. 7: tau by the share pruned, for each way to choose, with both drafts."""
    return measure_over_shares(experiment, CRITERIA)


STUDIES = {
    "hippo-edges": Study(
        "HIPPO, Fig. 2 and 8",
        "Kept tokens in the outermost tenth of a frame, at the top and at the bottom.",
        measure_edges,
        draw.bars,
        clips=50,
    ),
    "hippo-kept": Study(
        "HIPPO, Fig. 1 and 8",
        "The tenth of a clip that each way to choose keeps, over its frames.",
        measure_kept,
        methods.draw_strips,
        clips=1,
    ),
    "hippo-accuracy": Study(
        "HIPPO, Fig. 3",
        "How often the draft by itself answers a short question right, by what it sees.",
        measure_accuracy,
        draw.bars,
        clips=50,
        tokens=32,
        size=256,
    ),
    "hippo-times": Study(
        "HIPPO, Fig. 4",
        "Where the seconds of vanilla speculative decoding's rounds go.",
        measure_round_times,
        draw.bars,
        size=8192,
        timed=True,
        clips=8,
    ),
    "hippo-early": Study(
        "HIPPO, Sec. 5.2 and Table 3",
        "Seconds of whole answers by what the draft reads during the target's prefill.",
        measure_early_drafts,
        draw.bars,
        size=8192,
        timed=True,
        clips=8,
    ),
    "hippo-ablation": Study(
        "HIPPO, Fig. 6",
        "What tau loses without one of the three scores.",
        measure_ablation,
        draw.bars,
        clips=50,
    ),
    "hippo-pruning": Study(
        "HIPPO, Fig. 7",
        "Tau of a chain of 5 against the share pruned, for each way to choose.",
        measure_pruning,
        clips=24,
    ),
}
