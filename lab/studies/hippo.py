"""HIPPO's figures: what attention keeps, what the draft can do with it, and where a round goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import numpy as np

from lab import draw
from lab.draw import Data
from lab.studies import methods
from lab.studies.lab import TAU, Lab, interval
from lab.studies.specvlm import less, over_shares
from lab.studies.study import Study
from saccade.bench import draft_only, text_scores
from saccade.bench.runner import media_arguments
from saccade.bench.suites.shapes import LENGTHS, SHORTEST, suites
from saccade.inputs import ask

EDGE = 0.1  # of a frame's height is its top, and as much its bottom
CHOSEN = ("attention", "specvlm", "holistic", "random", "uniform")  # a tenth each
SHOWN = ("attention", "specvlm", "holistic", "random", "dycoke")
ANSWERED = {
    "the whole video": "full",
    "attention": "attention",
    "SpecVLM": "specvlm",
    "holistic": "holistic",
    "random": "random",
    "uniform": "uniform",
    "no video": "none",
}
TIMED = (256, 2048, 8192)
VANILLA = {"all": "sd/shape=chain-5", "a tenth": "sd/view=holistic/keep=0.1/shape=chain-5"}
EARLY = {
    "HIPPO, waits": "hippo/early=wait",
    "HIPPO, superset": "hippo/early=superset",
    "HIPPO, all": "hippo/early=all",
    "PEARL": "pearl",
    "PEARL, syn-prefill": "pearl-syn",
    "PEARL, SpecVLM's view": "pearl-specvlm",
    "plain decoding": "ar",
}
CRITERIA = ("holistic", "attention", "random", "frames", "fastvid", "dycoke")
WITHOUT = ("attn", "temp", "spa")


def edges(lab: Lab) -> Data:
    """Fig. 2, 8: the share of what is kept that lies at a frame's top and bottom, by view."""
    found: dict[str, list[tuple[float, float]]] = {view: [] for view in CHOSEN}
    for number in range(lab.clips):
        seen = methods.kept(lab, number, CHOSEN)
        for view, cells in seen["kept"].items():
            found[view].append(at_edges(cells, seen["grid"][1]))
    rows = {}
    for view, own in found.items():
        top, bottom = zip(*own, strict=True)
        rows[view] = {"top tenth": interval(top), "bottom tenth": interval(bottom)}
    across = "share of a frame's kept tokens (a tenth of the video kept)"
    return {"x": across, "rows": rows, "marks": {"if spread evenly": EDGE}}


def at_edges(cells: Sequence[Sequence[int]], high: int) -> tuple[float, float]:
    """The shares of cells (t, h, w) in the top and the bottom tenth, means over the frames.

    A row of cells counts by how much of it lies there: a tenth of 8 rows is 0.8 of one.
    """
    top = np.clip(EDGE * high - np.arange(high), 0, 1)
    frames: dict[int, list[int]] = defaultdict(list)
    for t, h, _ in cells:
        frames[t].append(h)
    shares = [(top[rows].mean(), top[::-1][rows].mean()) for rows in frames.values()]
    at_top, at_bottom = np.mean(shares, axis=0).tolist()
    return at_top, at_bottom


def kept(lab: Lab) -> Data:
    """Fig. 1, 8: the tokens kept of some frames of the first clip, by view."""
    return methods.kept(lab, 0, SHOWN)


def accuracy(lab: Lab) -> Data:
    """Fig. 3: how often the draft by itself answers right, by what it sees; the target beside.

    Of suites up to the lab's size, the shortest in any case.
    """
    lengths = {name: length.tokens for name, length in LENGTHS.items()}
    panels = {
        f"{tokens} visual tokens": _answered(lab, name)
        for name, tokens in lengths.items()
        if tokens <= max(lab.size, lengths[SHORTEST])
    }
    return {"x": "share of short questions answered right", "panels": panels}


def _answered(lab: Lab, length: str) -> Data:
    name = "shapes-qa" if length == SHORTEST else f"shapes-qa-{length}"
    model, tokenizer = lab.target.backbone.model, lab.target.tokenizer
    right: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, item in enumerate(islice(suites()[name].items(), lab.clips)):
        lab.tell(f"{name}, question {number + 1} of {lab.clips}")
        media = media_arguments(item)
        inputs = ask(lab.target, item.question, **media)
        plain = lab.answer("ar", media["clips"][0], inputs).ids
        said: dict[tuple[str, str], Sequence[int]] = {("the target", "the target"): plain}
        for what, draft in lab.drafts.items():
            for row, view in ANSWERED.items():
                said[row, f"a draft that {what}"] = draft_only.draft_answer(
                    lab.target,
                    draft,
                    inputs,
                    None,
                    draft_only.draft_only_recipe(f"draft/view={view}"),
                    tokens=lab.tokens,
                    ends=model.generation_config.eos_token_id,
                )
        for (row, series), ids in said.items():
            text = tokenizer.decode(list(ids), skip_special_tokens=True)
            right[row][series].append(text_scores.exact_match(text, item.answers))
    return {row: {name: interval(own) for name, own in by.items()} for row, by in right.items()}


def times(lab: Lab) -> Data:
    """Fig. 4: where the seconds of vanilla SD's rounds go, with the whole video and a tenth."""
    rows = {}
    for size in [size for size in TIMED if size <= lab.size] or [lab.size]:
        ran = lab.race(*VANILLA.values(), size=size)
        for seen, method in VANILLA.items():
            spent = [
                (own.draft, own.verify, own.decode - own.draft - own.verify) for own in ran[method]
            ]
            shares = 100 * np.sum(spent, axis=0) / np.sum(spent)
            rows[f"{size} visual tokens,\nthe draft sees {seen}"] = dict(
                zip(("the draft", "the target", "the rest"), shares.tolist(), strict=True)
            )
    return {"x": "per cent of the seconds of decoding", "rows": rows, "stacked": True}


def early(lab: Lab) -> Data:
    """Our own: seconds of whole answers by what the draft reads before the target's attention is
    known; PEARL's beside it, which knows nothing of attention."""
    rows: Data = {}
    each: Data = {}
    for size in [size for size in TIMED if size <= lab.size] or [lab.size]:
        ran = lab.race(*EARLY.values(), size=size)
        rows[f"{size} visual tokens"] = {
            name: interval([own.total for own in ran[method]]) for name, method in EARLY.items()
        }
        each[str(size)] = {
            method: [
                {"total": round(own.total, 4), "first": round(own.first, 4), "tokens": len(own.ids)}
                for own in answers
            ]
            for method, answers in ran.items()
        }
    return {"x": "seconds of a whole answer", "rows": rows, "answers": each}


def ablation(lab: Lab) -> Data:
    """Fig. 6: what tau loses without one of the three scores, clip by clip.

    Without its parallel schedule (w/o vpsd) tau is the same: that one is about seconds.
    """
    views = {f"without s_{part}": f"holistic-no-{part}/keep=0.1" for part in WITHOUT}
    return less(lab, "holistic/keep=0.1", views, f"{TAU} less the whole score's on the same clip")


def pruning(lab: Lab) -> Data:
    """Fig. 7: tau by the share pruned, for each way to choose; both drafts."""
    return over_shares(lab, CRITERIA)


STUDIES = {
    "hippo-edges": Study(
        "HIPPO, Fig. 2 and 8",
        "Kept tokens in the outermost tenth of a frame, at the top and at the bottom.",
        edges,
        draw.bars,
        clips=50,
    ),
    "hippo-kept": Study(
        "HIPPO, Fig. 1 and 8",
        "The tenth of a clip that each way to choose keeps, over its frames.",
        kept,
        methods.strips,
        clips=1,
    ),
    "hippo-accuracy": Study(
        "HIPPO, Fig. 3",
        "How often the draft by itself answers a short question right, by what it sees.",
        accuracy,
        draw.bars,
        clips=50,
        tokens=32,
        size=256,
    ),
    "hippo-times": Study(
        "HIPPO, Fig. 4",
        "Where the seconds of vanilla speculative decoding's rounds go.",
        times,
        draw.bars,
        size=8192,
        timed=True,
        clips=2,
    ),
    "hippo-early": Study(
        "HIPPO, Sec. 5.2 and Table 3",
        "Seconds of whole answers by what the draft reads during the target's prefill.",
        early,
        draw.bars,
        size=8192,
        timed=True,
        clips=3,
    ),
    "hippo-ablation": Study(
        "HIPPO, Fig. 6",
        "What tau loses without one of the three scores.",
        ablation,
        draw.bars,
        clips=50,
    ),
    "hippo-pruning": Study(
        "HIPPO, Fig. 7",
        "Tau of a chain of 5 against the share pruned, for each way to choose.",
        pruning,
        clips=24,
    ),
}
