"""TABED's five-panel stories: whether a draft fails on five pictures after training on one or two.

A story is a prompt of five pictures. ``python -m lab figure tabed-stories`` runs this study, and
``lab.claims.tabed`` judges two claims by it.
"""

from __future__ import annotations

from itertools import islice

from lab import draw, stories
from lab.draw import Data
from lab.studies.experiment import DRAFTS, TAU, Experiment, interval_over_clips, rounded_taus
from lab.studies.study import Study
from saccade.bench.runner import media_arguments
from saccade.bench.suites.types import Item
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.inputs.captions import SHAPES, captioner

# By TABED's letters for what a draft reads: M is the whole prompt, T its text alone, C captions and
# P pooled pictures. Several letters are a mixture, with weights that adapt where there is a star.
METHODS = {
    "M": "sd",
    "T": "sd/view=text",
    "C": "sd/view=caption",
    "P": "sd/view=pooled",
    "MT": "tabed-mt",
    "MT*": "tabed",
    "MTCP*": "tabed-mtcp",
}
# A name for each pair of a story suite and a draft. A claim is judged over all of these rows.
ROWS = tuple(f"{suite.name}, {what}" for suite in stories.SUITES for what in DRAFTS)


def measure_stories(experiment: Experiment) -> Data:
    """Measures Fig. 1 and Table 1's last sets: tau on five-panel stories, by view and by draft."""
    taus: dict[str, dict[str, list[float]]] = {
        row: {name: [] for name in METHODS.values()} for row in ROWS
    }
    for suite in stories.SUITES:
        for item in islice(suite.items(), experiment.clips):
            for what, draft in experiment.drafts.items():
                own = taus[f"{suite.name}, {what}"]
                for label, method in METHODS.items():
                    experiment.on_progress(f"{item.id}, {what}: {label}")
                    own[method].append(_tau(experiment, item, method, draft))
    return {
        "x": TAU,
        "rows": {
            row.replace(", ", "\n"): {
                label: interval_over_clips(own[method]) for label, method in METHODS.items()
            }
            for row, own in taus.items()
        },
        "start": 1,
        "clips_tau": {row: rounded_taus(own) for row, own in taus.items()},
    }


def _tau(experiment: Experiment, item: Item, method: str, draft: Loaded) -> float:
    """Returns the tau of a method's answer to an item. Raises RuntimeError where it fell back."""
    media = media_arguments(item)
    result = run(
        experiment.target.backbone,
        ask(experiment.target, item.question, **media),
        draft=draft.backbone,
        method=method,
        tokenizer=experiment.target.tokenizer,
        captioner=captioner(SHAPES, [[picture] for picture in media["images"]]),
        max_new_tokens=experiment.tokens,
        do_sample=False,
    )
    if result.fallback_reason is not None:
        raise RuntimeError(f"{method}: {result.fallback_reason}")
    return result.tau or 0.0


STUDIES = {
    "tabed-stories": Study(
        "TABED, Fig. 1 and Table 1",
        "Tau on stories of five pictures, which neither model was trained on, by view and draft.",
        measure_stories,
        draw.bars,
        clips=12,
        size=stories.VISUAL_TOKENS,
    ),
}
