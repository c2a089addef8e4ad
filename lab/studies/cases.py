"""SpecVLM's case study (Fig. 10 and 11), as one study of ``python -m lab figure``.

For two clips it shows the part of the clip that the draft saw, and the words of the answer that the
draft wrote and the target accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.draw import Data
from lab.studies import methods
from lab.studies.experiment import Experiment
from lab.studies.specvlm import CALIBRATED
from lab.studies.study import Study
from saccade.bench.figures import COLOURS, FONT_SIZE
from saccade.core.result import Result

# ``CALIBRATED`` is SpecVLM at the setting that suits the embedded pair.
METHOD_BY_SHARE_SEEN = {"a tenth of the video": CALIBRATED, "all of it": "sd-tree"}
LETTERS_PER_LINE = 104


def measure_cases(experiment: Experiment) -> Data:
    """Measures for each clip the kept tokens, the answer's words, and accepted tokens per round.

    Of each word it is said whether the draft wrote it. The kept tokens and the words are of the
    draft that sees a tenth of the video. Accepted tokens per round, a mean over the answer, are
    measured for this draft and for one that sees all of the video.
    """
    cases = []
    for number in range(experiment.clips):
        answers = {
            what: experiment.run(name, number) for what, name in METHOD_BY_SHARE_SEEN.items()
        }
        cases.append(
            {
                **methods.measure_kept_cells(experiment, number, [CALIBRATED]),
                "words": _drafted_words(experiment, answers["a tenth of the video"]),
                "accepted": {
                    what: mean(len(round.accepted) for round in answer.forwards)
                    for what, answer in answers.items()
                },
            }
        )
    return {"cases": cases}


def _drafted_words(experiment: Experiment, answer: Result) -> list[tuple[str, bool]]:
    """Returns the text of every token of an answer, and whether the draft wrote it.

    A token's text is what it adds to the decoded text, because a character may take several tokens.
    """
    drafted = [kind == "accepted" for round in answer.rounds for kind in round.kinds]
    before, words = "", []
    for place, is_drafted in enumerate(drafted, 1):
        text = experiment.target.decode(answer.ids[:place])
        words.append((text[len(before) :], is_drafted))
        before = text
    return words


def draw_cases(data: Data) -> Figure:
    """Draws the cases below each other: the frames of a clip, and the answer under them.

    Frames are veiled where a token was dropped. What the draft wrote has a grey background.
    """
    figure = Figure(figsize=(7.5, 2.7 * len(data["cases"])), layout="constrained")
    parts = figure.subfigures(len(data["cases"]), 1, squeeze=False)[:, 0]
    for number, (part, case) in enumerate(zip(parts, data["cases"], strict=True)):
        upper, lower = part.subfigures(2, 1, height_ratios=(1, 0.8))
        methods.draw_veiled_frames(upper, case | {"size": data["size"]}, number)
        accepted_words = ", ".join(
            f"{value:.2f} from {what}" for what, value in case["accepted"].items()
        )
        axis = lower.subplots()
        axis.set_title(f"accepted a round: {accepted_words}", fontsize=FONT_SIZE)
        _write_words(axis, case["words"])
    return figure


def _write_words(axis: Axes, words: Sequence[tuple[str, bool]]) -> None:
    """Writes the words in lines; those that the draft wrote have a grey background."""
    axis.set(xlim=(0, LETTERS_PER_LINE), ylim=(7.5, -0.5))
    axis.axis("off")
    at, line = 0, 0
    for text, drafted in words:
        if at + len(text) > LETTERS_PER_LINE:
            at = 0
            line = line + 1
        background = {"fc": "#d8d8d8", "lw": 0, "pad": 1.0} if drafted else {"fc": "none", "lw": 0}
        colour = "black" if drafted else COLOURS[4]
        axis.text(at, line, text, family="monospace", fontsize=6, color=colour, bbox=background)
        at += len(text)


STUDIES = {
    "specvlm-cases": Study(
        "SpecVLM, Fig. 10 and 11",
        "Two clips, the tenth of each that the draft sees, and the words that are the draft's.",
        measure_cases,
        draw_cases,
        clips=2,
    ),
}
