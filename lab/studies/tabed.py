"""Measures TABED's figures: which weights are right, what a window changes, and a step's cost.

TABED (``saccade/methods/tabed.py``) drafts by a weighted mean of the laws that one draft has under
several views of the prompt: M sees all of it, T its text alone, C a caption and P pooled visual
tokens in place of the video. MT and MTCP mix these with fixed weights, and MT* and MTCP* learn the
weights while decoding, from the last h verified tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import mean

import numpy as np
import torch

from lab import draw
from lab.draw import Data
from lab.studies.experiment import TAU, AnsweredClip, Experiment, interval_over_clips, rounded_taus
from lab.studies.step_timing import step_milliseconds
from lab.studies.study import Study
from lab.training import agreement
from saccade.bench.measures import Interval
from saccade.core.result import Timings
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.methods import resolve
from saccade.world import dialogues, drawing
from saccade.world import scenes as world

WEIGHT_STEPS = 20  # Weights are tried from 0 to 1 in so many steps.
# Label -> what a method's name has to end with for this window h.
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
BATCHES = (1, 2, 3, 4)  # Requests of a draft's step.
GAMMAS = (1, 3, 5, 7)  # Tokens of a target's step.
CONTEXTS = (256, 512, 1024, 2048, 4096)
PICTURES = 5  # The largest number of pictures in a prompt.


def measure_weights(experiment: Experiment) -> Data:
    """Measures Fig. 3-4: the weights of M with which the target's token would be drafted.

    What M does not get is the weight of T.
    """
    what, draft = next(iter(experiment.drafts.items()))
    panels = {}
    for title, clip in _first_and_second_answers(experiment):
        panel = _weights_panel(experiment, clip, draft)
        share_words = [
            f"{name} {_share_right(panel['accepted'], line):.2f}"
            for name, line in panel["weights"].items()
        ]
        share_by_any_weight = mean(map(any, panel["accepted"]))
        about = f"tokens drafted right: {', '.join(share_words)}"
        panels[f"{title}\n{about}; by some weight {share_by_any_weight:.2f}"] = panel
    return {
        "x": f"token of the target's answer; a draft that {what}",
        "y": "weight of M",
        "panels": panels,
    }


def _first_and_second_answers(experiment: Experiment) -> Iterator[tuple[str, AnsweredClip]]:
    """Yields a description of the first clip, and an answer in a second turn.

    The second turn needs the video less, because it repeats parts of the description in the first.
    It is taken from the clip where the true answer in the second turn is longest.
    """
    yield (
        f'first turn: "{agreement.unseen_clip(0, experiment.size)[2]}"',
        experiment.answered_clip(0),
    )
    scenes = [world.scene(agreement.FIRST_SEED + number) for number in range(experiment.clips)]
    conversations = [dialogues.conversation(scene, "chat", i)[:2] for i, scene in enumerate(scenes)]
    number = max(range(experiment.clips), key=lambda i: len(conversations[i][1].answer))
    first_question, second_question = (turn.question for turn in conversations[number])
    clip, _ = experiment.inputs(number)
    first_inputs = ask(experiment.target, first_question, clips=[clip])
    first_answer = experiment.answer("ar", clip, first_inputs).text or ""
    history = [(first_question, first_answer)]
    inputs = ask(experiment.target, second_question, clips=[clip], history=history)
    yield (
        f'second turn, after a description: "{second_question}"',
        experiment.answer_clip(number, clip, inputs),
    )


def _weights_panel(experiment: Experiment, clip: AnsweredClip, draft: Loaded) -> Data:
    """Returns which weights of M draft each token of an answer right, and the weights in use.

    "accepted" has for each token whether it would be drafted by each candidate weight from 0 to 1.
    "weights" has for MT* and for fixed weights the weight of M at each token.
    """
    m_probabilities, t_probabilities = (
        experiment.draft_logits(clip, view, draft).double().softmax(-1) for view in ("full", "text")
    )
    target_ids = torch.tensor(clip.ids)
    candidate_weights = [w / WEIGHT_STEPS for w in range(WEIGHT_STEPS + 1)]
    accepted = torch.stack(
        [
            (w * m_probabilities + (1 - w) * t_probabilities).argmax(-1) == target_ids
            for w in candidate_weights
        ],
        1,
    )
    result = experiment.answer("tabed", clip.clip, clip.inputs, draft=draft)
    # A round's note has the weight of each view. That of M is repeated for each emitted token.
    m_place = resolve("tabed").view.name.split("+").index("full")
    adapted = [round.note[m_place] for round in result.forwards for _ in round.emitted]
    # The prefill's token was drafted by no weights, so it is drawn with the weight after it.
    adapted = [*adapted[:1], *adapted]
    fixed = {"M": 1.0, "T": 0.0, "MT": 0.5}
    fixed_lines = {name: [weight] * len(clip.ids) for name, weight in fixed.items()}
    return {"accepted": accepted.tolist(), "weights": {"MT*": adapted, **fixed_lines}}


def _share_right(accepted: Sequence[Sequence[bool]], weights: Sequence[float]) -> float:
    """Returns the share of tokens that are right at the candidate nearest to a line's weight."""
    pairs = zip(accepted, weights, strict=True)
    return mean(
        accepted_by_weight[round(weight * WEIGHT_STEPS)] for accepted_by_weight, weight in pairs
    )


def measure_drift(experiment: Experiment) -> Data:
    """Measures the weights of MTCP* by the paper's printed equation, over rounds, by the window.

    No paper has this figure. With the whole history the weights drift to equal ones.
    """
    what, draft = next(iter(experiment.drafts.items()))
    method = RULES["MTCP*, printed"]
    views = resolve(method).view.name.split("+")
    heaviest: dict[str, list[float]] = {}
    panels: Data = {f"the heaviest view's\nweight, {experiment.clips} clips": heaviest}
    for window, suffix in WINDOWS.items():
        weights_by_clip = [
            [round.note for round in experiment.run(method + suffix, number, draft=draft).forwards]
            for number in range(experiment.clips)
        ]
        # The line ends with the rounds of the clip that has the fewest.
        rounds_of_all_clips = zip(*weights_by_clip, strict=False)
        heaviest[window] = [mean(map(max, clip_weights)) for clip_weights in rounds_of_all_clips]
        if window in ("h = 1", "h = all"):
            weights_by_view = zip(*weights_by_clip[0], strict=True)
            panels[f"weights of the\nfirst clip, {window}"] = {
                view: list(line) for view, line in zip(views, weights_by_view, strict=True)
            }
    for panel in panels.values():
        panel["equal"] = [1 / len(views)] * max(map(len, panel.values()))
    return {
        "x": f"round; a draft that {what}",
        "panels": panels,
        "guides": ["equal"],
        "apart": True,
    }


def measure_windows(experiment: Experiment) -> Data:
    """Measures Table 3: tau by the window h, and by the distance of a view from the target."""
    what, draft = next(iter(experiment.drafts.items()))
    methods = {
        rule: {h: name + suffix for h, suffix in WINDOWS.items()} for rule, name in RULES.items()
    }
    methods |= {rule: {"no weights learnt": name} for rule, name in FIXED.items()}
    taus = {
        name: experiment.tau_by_clip(name, draft)
        for own in methods.values()
        for name in own.values()
    }
    return {
        "x": f"{TAU}, a draft that {what}",
        "rows": {
            rule: {h: interval_over_clips(taus[name]) for h, name in own.items()}
            for rule, own in methods.items()
        },
        "start": 1,
        "clips_tau": rounded_taus(taus),
    }


def measure_latency(experiment: Experiment) -> Data:
    """Measures Fig. 5-6 and Table 6: milliseconds of steps of the draft and the target.

    A draft's step is for B requests, and the target's is for gamma tokens. A third panel has the
    ratio of a draft's step to a target's step of one token.
    """
    target, draft = experiment.target.backbone, experiment.draft.backbone
    t_q: dict[str, list[Interval]] = {f"B = {batch}": [] for batch in BATCHES}
    t_p: dict[str, list[Interval]] = {f"gamma = {gamma}": [] for gamma in GAMMAS}
    ratio: dict[str, list[float]] = {name: [] for name in t_q}
    for context in CONTEXTS:
        experiment.on_progress(f"steps over {context} keys")
        drafting = step_milliseconds(draft, context, [(batch, 1) for batch in BATCHES])
        judging = step_milliseconds(target, context, [(1, gamma) for gamma in GAMMAS])
        for own, interval in zip((*t_q.values(), *t_p.values()), drafting + judging, strict=True):
            own.append(interval)
        target_milliseconds, _, _ = judging[0]  # GAMMAS begins with one token.
        for own_ratio, (draft_milliseconds, _, _) in zip(ratio.values(), drafting, strict=True):
            own_ratio.append(draft_milliseconds / target_milliseconds)
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


def measure_stages(experiment: Experiment) -> Data:
    """Measures Fig. 9: seconds of plain decoding's stages by the number of pictures.

    All answers have one length.
    """
    timings: dict[str, list[Timings]] = {}
    for number in range(-1, experiment.clips):  # -1 is a warm-up on the pictures of 0.
        pictures = [
            unseen_picture(PICTURES * max(0, number) + i, experiment.size // 4)
            for i in range(PICTURES)
        ]
        for count in range(1, PICTURES + 1):
            experiment.on_progress(f"{count} pictures, {max(0, number) + 1} of {experiment.clips}")
            inputs = ask(
                experiment.target, "Describe the images in detail.", images=pictures[:count]
            )
            result = run(
                experiment.target.backbone,
                inputs,
                method="ar",
                max_new_tokens=experiment.tokens,
                do_sample=False,
                eos_token_id=experiment.target.backbone.vocab,  # No token ends a text.
            )
            if number >= 0:
                noun = "picture" if count == 1 else "pictures"
                row = f"{count} {noun}\n({result.visual_tokens} tokens)"
                timings.setdefault(row, []).append(result.timings)
    return {
        "x": f"seconds of plain decoding, {experiment.tokens} tokens written",
        "rows": {
            row: {
                "vision": interval_over_clips([each.vision for each in own]),
                "prefill": interval_over_clips([each.prefill for each in own]),
                "decoding": interval_over_clips([each.decode for each in own]),
            }
            for row, own in timings.items()
        },
        "stacked": True,
    }


def unseen_picture(number: int, tokens: int) -> np.ndarray:
    """Returns a frame of an unseen scene with so many visual tokens, a power of two.

    It is square, or twice as wide as high: 512 tokens are 16 rows of 32. A token has 28 pixels a
    side.
    """
    rows = 1 << (int(math.log2(tokens)) // 2)
    scene = world.scene(agreement.FIRST_SEED + number)
    return drawing.image_frame(scene, 28 * rows, 28 * (tokens // rows))


STUDIES = {
    "tabed-weights": Study(
        "TABED, Fig. 3 and 4",
        "Weights of M under which each token of the target would have been drafted, and MT*'s.",
        measure_weights,
        draw.shaded_weights,
        clips=12,
    ),
    "tabed-drift": Study(
        "TABED, Sec. 6",
        "Weights of MTCP* as printed over rounds: with the whole history they drift to equal.",
        measure_drift,
        clips=8,
    ),
    "tabed-window": Study(
        "TABED, Table 3",
        "Tau of MT* and MTCP* by history window and distance, beside fixed weights.",
        measure_windows,
        draw.bars,
        clips=4,
    ),
    "tabed-latency": Study(
        "TABED, Fig. 5 and 6, Table 6",
        "Milliseconds of a draft's step for B requests and of the target's for gamma tokens.",
        measure_latency,
        clips=8,
        timed=True,
    ),
    "tabed-stages": Study(
        "TABED, Fig. 9",
        "Seconds of vision, prefill and decoding as pictures grow; end of text is ignored.",
        measure_stages,
        draw.bars,
        tokens=100,
        timed=True,
        clips=8,
    ),
}
