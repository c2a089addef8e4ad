"""TABED's figures: which weights would have been right, what a window does, what a step costs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np
import torch

from lab import draw
from lab.draw import Data
from lab.studies.lab import TAU, Lab, Shot, interval, rounded
from lab.studies.steps import milliseconds
from lab.studies.study import Study
from lab.training import agreement
from saccade.bench.measures import Interval
from saccade.core.result import Timings
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.methods import resolve
from saccade.world import dialogues, drawing
from saccade.world import scenes as world

STEPS = 20  # of the weights tried
WINDOWS = {"h = 1": "-1", "h = 4": "-4", "h = 16": "-16", "h = all": ""}
RULES = {
    "MT*, KL": "tabed/weights=kl",
    "MT*, TVD": "tabed/weights=tvd",
    "MT*, matches": "tabed/weights=matches",
    "MTCP*, KL": "tabed-mtcp/weights=inverse",
    "MTCP*, TVD": "tabed-mtcp/weights=inverse-tvd",
    "MTCP*, printed": "tabed-mtcp/weights=softmax",
}
FIXED = {"MT": "tabed-mt", "MTCP": "tabed-mtcp/weights=equal", "M": "sd", "T": "sd/view=text"}
BATCHES, GAMMAS = (1, 2, 3, 4), (1, 3, 5, 7)
CONTEXTS = (256, 512, 1024, 2048, 4096)
PICTURES = 5


def weights(lab: Lab) -> Data:
    """Fig. 3-4: the weights of M with which the target's token would have been drafted."""
    what, draft = next(iter(lab.drafts.items()))
    panels = {}
    for title, shot in _answers(lab):
        own = _panel(lab, shot, draft)
        right = [
            f"{name} {_share(own['accepted'], line):.2f}" for name, line in own["weights"].items()
        ]
        some = mean(map(any, own["accepted"]))
        panels[f"{title}\ntokens drafted right: {', '.join(right)}; by some weight {some:.2f}"] = (
            own
        )
    return {
        "x": f"token of the target's answer; a draft that {what}",
        "y": "weight of M",
        "panels": panels,
    }


def _answers(lab: Lab) -> Iterator[tuple[str, Shot]]:
    """A description; and, where the video is needed less, the next answer of a conversation: of
    the lab's clips the one whose next answer says most again of what was said."""
    yield f'first turn: "{agreement.held_out(0, lab.size)[2]}"', lab.shot(0)
    scenes = [world.scene(agreement.FIRST_SEED + number) for number in range(lab.clips)]
    talks = [dialogues.conversation(scene, "chat", i)[:2] for i, scene in enumerate(scenes)]
    number = max(range(lab.clips), key=lambda i: len(talks[i][1].answer))
    first, second = (turn.question for turn in talks[number])
    clip, _ = lab.inputs(number)
    said = lab.answer("ar", clip, ask(lab.target, first, clips=[clip])).text or ""
    inputs = ask(lab.target, second, clips=[clip], history=[(first, said)])
    yield f'second turn, after a description: "{second}"', lab.look(number, clip, inputs)


def _panel(lab: Lab, shot: Shot, draft: Loaded) -> Data:
    m, t = (lab.along(shot, view, draft).double().softmax(-1) for view in ("full", "text"))
    right = torch.tensor(shot.ids)
    tried = [w / STEPS for w in range(STEPS + 1)]
    accepted = torch.stack([(w * m + (1 - w) * t).argmax(-1) == right for w in tried], 1)
    used = lab.answer("tabed", shot.clip, shot.inputs, draft=draft)
    first = resolve("tabed").view.name.split("+").index("full")
    # the prefill's token came of no weights: it shows those that follow it
    adapted = [round.note[first] for round in used.forwards for _ in round.emitted]
    adapted = [*adapted[:1], *adapted]
    fixed = {"M": 1.0, "T": 0.0, "MT": 0.5}
    lines = {name: [weight] * len(shot.ids) for name, weight in fixed.items()}
    return {"accepted": accepted.tolist(), "weights": {"MT*": adapted, **lines}}


def _share(accepted: Sequence[Sequence[bool]], weights: Sequence[float]) -> float:
    """Of the tokens, those right at the weight tried next to a line's."""
    pairs = zip(accepted, weights, strict=True)
    return mean(tried[round(weight * STEPS)] for tried, weight in pairs)


def drift(lab: Lab) -> Data:
    """Our own: MTCP*'s weights as printed over rounds by the window; with everything they drift to
    equal."""
    what, draft = next(iter(lab.drafts.items()))
    method = RULES["MTCP*, printed"]
    views = resolve(method).view.name.split("+")
    heaviest: dict[str, list[float]] = {}
    panels: Data = {f"the heaviest view's\nweight, {lab.clips} clips": heaviest}
    for window, suffix in WINDOWS.items():
        notes = [
            [round.note for round in lab.run(method + suffix, number, draft=draft).forwards]
            for number in range(lab.clips)
        ]
        # as far as every clip's rounds go
        heaviest[window] = [mean(map(max, each)) for each in zip(*notes, strict=False)]
        if window in ("h = 1", "h = all"):
            own = zip(*notes[0], strict=True)
            panels[f"weights of the\nfirst clip, {window}"] = {
                view: list(line) for view, line in zip(views, own, strict=True)
            }
    for panel in panels.values():
        panel["equal"] = [1 / len(views)] * max(map(len, panel.values()))
    return {
        "x": f"round; a draft that {what}",
        "panels": panels,
        "guides": ["equal"],
        "apart": True,
    }


def window(lab: Lab) -> Data:
    """Table 3: tau by the window h and by what measures a view's distance from the target."""
    what, draft = next(iter(lab.drafts.items()))
    methods = {
        rule: {h: name + suffix for h, suffix in WINDOWS.items()} for rule, name in RULES.items()
    }
    methods |= {rule: {"no weights learnt": name} for rule, name in FIXED.items()}
    taus = {name: lab.by_clip(name, draft) for own in methods.values() for name in own.values()}
    return {
        "x": f"{TAU}, a draft that {what}",
        "rows": {
            rule: {h: interval(taus[name]) for h, name in own.items()}
            for rule, own in methods.items()
        },
        "start": 1,
        "clips_tau": rounded(taus),
    }


def latency(lab: Lab) -> Data:
    """Fig. 5-6, Table 6: milliseconds of a draft's step for B requests, of the target's for gamma
    tokens, and the one over the other."""
    target, draft = lab.target.backbone, lab.draft.backbone
    t_q: dict[str, list[Interval]] = {f"B = {batch}": [] for batch in BATCHES}
    t_p: dict[str, list[Interval]] = {f"gamma = {gamma}": [] for gamma in GAMMAS}
    ratio: dict[str, list[float]] = {name: [] for name in t_q}
    for context in CONTEXTS:
        lab.tell(f"steps over {context} keys")
        drafting = milliseconds(draft, context, [(batch, 1) for batch in BATCHES])
        judging = milliseconds(target, context, [(1, gamma) for gamma in GAMMAS])
        for own, taken in zip((*t_q.values(), *t_p.values()), drafting + judging, strict=True):
            own.append(taken)
        for own_ratio, (middle, _, _) in zip(ratio.values(), drafting, strict=True):
            own_ratio.append(middle / judging[0][0])
    return {
        "x": "keys S in each cache (log scale)",
        "at": list(CONTEXTS),
        "tall": True,
        "apart": True,
        "from zero": True,
        "panels": {
            "T_q(B, S, 1)\nms a draft's step": t_q,
            "T_p(1, S, gamma)\nms a target's step": t_p,
            "T_q(B, S, 1) / T_p(1, S, 1)": ratio,
        },
    }


def stages(lab: Lab) -> Data:
    """Fig. 9: seconds of plain decoding's stages as the pictures grow; answers of one length."""
    found: dict[str, list[Timings]] = {}
    for number in range(-1, lab.clips):  # the first is a warm-up
        pictures = [_picture(PICTURES * max(0, number) + i, lab.size // 4) for i in range(PICTURES)]
        for count in range(1, PICTURES + 1):
            lab.tell(f"{count} pictures, {max(0, number) + 1} of {lab.clips}")
            inputs = ask(lab.target, "Describe the images in detail.", images=pictures[:count])
            told = run(
                *(lab.target.backbone, inputs),
                method="ar",
                max_new_tokens=lab.tokens,
                do_sample=False,
                eos_token_id=lab.target.backbone.vocab,  # no token ends a text
            )
            if number >= 0:
                row = f"{count} picture{'s'[: count - 1]}\n({told.visual_tokens} tokens)"
                found.setdefault(row, []).append(told.timings)
    return {
        "x": f"seconds of plain decoding, {lab.tokens} tokens written",
        "rows": {
            row: {
                "vision": interval([each.vision for each in own]),
                "prefill": interval([each.prefill for each in own]),
                "decoding": interval([each.decode for each in own]),
            }
            for row, own in found.items()
        },
        "stacked": True,
    }


def _picture(number: int, tokens: int) -> np.ndarray:
    """A frame of an unseen scene, of so many visual tokens (a power of two)."""
    high = 1 << (int(math.log2(tokens)) // 2)
    scene = world.scene(agreement.FIRST_SEED + number)
    return drawing.image_frame(scene, 28 * high, 28 * (tokens // high))


STUDIES = {
    "tabed-weights": Study(
        "TABED, Fig. 3 and 4",
        "Weights of M under which each token of the target would have been drafted, and MT*'s.",
        weights,
        draw.shaded_weights,
        clips=12,
    ),
    "tabed-drift": Study(
        "TABED, Sec. 6",
        "Weights of MTCP* as printed over rounds: with the whole history they drift to equal.",
        drift,
        clips=8,
    ),
    "tabed-window": Study(
        "TABED, Table 3",
        "Tau of MT* and MTCP* by history window and distance, beside fixed weights.",
        window,
        draw.bars,
        clips=4,
    ),
    "tabed-latency": Study(
        "TABED, Fig. 5 and 6, Table 6",
        "Milliseconds of a draft's step for B requests and of the target's for gamma tokens.",
        latency,
        clips=1,
        timed=True,
    ),
    "tabed-stages": Study(
        "TABED, Fig. 9",
        "Seconds of vision, prefill and decoding as pictures grow; end of text is ignored.",
        stages,
        draw.bars,
        tokens=100,
        timed=True,
        clips=2,
    ),
}
