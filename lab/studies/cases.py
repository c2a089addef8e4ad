"""SpecVLM's case study: what the draft was shown of a clip, and whose words the answer is."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lab.draw import Data
from lab.studies import methods
from lab.studies.lab import Lab
from lab.studies.specvlm import CALIBRATED
from lab.studies.study import Study
from saccade.bench.figures import COLOURS, FONT_SIZE
from saccade.core.result import Result

METHODS = {"a tenth of the video": CALIBRATED, "all of it": "sd-tree"}
LINE = 104  # letters


def cases(lab: Lab) -> Data:
    """Fig. 10-11: of each clip the tokens kept, the answer token by token, with whether the draft
    wrote it, and accepted tokens a round beside those of a draft that sees everything."""
    found = []
    for number in range(lab.clips):
        answers = {what: lab.run(name, number) for what, name in METHODS.items()}
        found.append(
            {
                **methods.kept(lab, number, [CALIBRATED]),
                "words": _words(lab, answers["a tenth of the video"]),
                "accepted": {
                    what: mean(len(round.accepted) for round in answer.forwards)
                    for what, answer in answers.items()
                },
            }
        )
    return {"cases": found}


def _words(lab: Lab, answer: Result) -> list[tuple[str, bool]]:
    """Every token as it is spelt, and whether it was drafted."""
    drafted = [kind == "accepted" for round in answer.rounds for kind in round.kinds]
    before, found = "", []
    for place, own in enumerate(drafted, 1):
        text = lab.target.decode(answer.ids[:place])
        found.append((text[len(before) :], own))
        before = text
    return found


def draw(data: Data) -> Figure:
    """A case below another: its frames, veiled where a token was dropped, and the answer under
    them, what the draft wrote on a grey ground."""
    figure = Figure(figsize=(7.5, 2.7 * len(data["cases"])), layout="constrained")
    parts = figure.subfigures(len(data["cases"]), 1, squeeze=False)[:, 0]
    for number, (part, case) in enumerate(zip(parts, data["cases"], strict=True)):
        above, below = part.subfigures(2, 1, height_ratios=(1, 0.8))
        methods.veiled(above, case | {"size": data["size"]}, number)
        told = ", ".join(f"{value:.2f} from {what}" for what, value in case["accepted"].items())
        axis = below.subplots()
        axis.set_title(f"accepted a round: {told}", fontsize=FONT_SIZE)
        _write(axis, case["words"])
    return figure


def _write(axis: Axes, words: Sequence[tuple[str, bool]]) -> None:
    axis.set(xlim=(0, LINE), ylim=(7.5, -0.5))
    axis.axis("off")
    at, line = 0, 0
    for text, drafted in words:
        if at + len(text) > LINE:
            at, line = 0, line + 1
        ground = {"fc": "#d8d8d8", "lw": 0, "pad": 1.0} if drafted else {"fc": "none", "lw": 0}
        colour = "black" if drafted else COLOURS[4]
        axis.text(at, line, text, family="monospace", fontsize=6, color=colour, bbox=ground)
        at += len(text)


STUDIES = {
    "specvlm-cases": Study(
        "SpecVLM, Fig. 10 and 11",
        "Two clips, the tenth of each that the draft sees, and the words that are the draft's.",
        cases,
        draw,
        clips=2,
    ),
}
