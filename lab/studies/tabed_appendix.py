"""TABED's appendices D and E: what a caption costs beside a prefill, and how right answers are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipImageProcessor,
    BlipProcessor,
)

from lab import draw
from lab.draw import Data
from lab.studies.lab import Lab, interval
from lab.studies.study import Study
from lab.studies.tabed import _picture
from saccade.bench import text_scores
from saccade.bench.runner import media_arguments
from saccade.bench.suites.shapes import TASKS, suites
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.inputs.captions import SHAPES, ImageToText, captioner

TURNS = 5  # of each that is timed, a warm-up before them
PICTURES = (1, 2, 5)
SENTENCE = 20  # tokens of a caption by weights that never end one
SUFFIX = {256: "", 2048: "-2k"}  # of a suite's name, by its visual tokens


def captioners(lab: Lab) -> Data:
    """Table 4: what captioning one frame takes, over what the target takes to its first token.

    In seconds of the processor, which a busy machine stretches little; with one thread they are
    what the clock of an idle one would show.
    """
    blip = small_blip()
    size = sum(each.numel() for each in blip.model.parameters())
    whole = sum(each.numel() for each in lab.target.backbone.model.parameters())
    names = {
        "captioner": "the embedded captioner",
        "blip": f"random weights in BLIP's form, 1/{round(whole / size)} of the target, "
        f"{SENTENCE} tokens",
    }
    ratios: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(lab.clips):
        for row, (media, inputs) in _shown(lab, number).items():
            lab.tell(f"{row}, {number + 1} of {lab.clips}".replace("\n", " "))
            small = captioner(SHAPES, media)
            found = _in_turns(
                {
                    "target": partial(_first_token, lab, inputs),
                    "captioner": partial(small, {}),
                    "blip": partial(replace(blip, frames=small.frames), {}),
                }
            )
            for key, taken in found.items():
                seconds.setdefault(row, {}).setdefault(key, []).append(round(taken, 4))
            for key, name in names.items():
                ratio = found[key] / found["target"]
                ratios.setdefault(row, {}).setdefault(name, []).append(ratio)
    return {
        "x": "processor seconds of one caption / of the target's first token",
        "rows": {
            row: {name: interval(values) for name, values in own.items()}
            for row, own in ratios.items()
        },
        "marks": {"as long": 1.0},
        "clips_seconds": seconds,
    }


def _shown(lab: Lab, number: int) -> Mapping[str, tuple[list[list[np.ndarray]], Inputs]]:
    """What is shown, by its name: the frames of each medium, and the target's inputs."""
    found: dict[str, tuple[list[list[np.ndarray]], Inputs]] = {}
    pictures = [_picture(max(PICTURES) * number + i, lab.size // 4) for i in range(max(PICTURES))]
    for count in PICTURES:
        inputs = ask(lab.target, "Describe the images in detail.", images=pictures[:count])
        found[f"{count} picture{'s'[: count - 1]} of\n{lab.size // 4} tokens"] = (
            [[picture] for picture in pictures[:count]],
            inputs,
        )
    clip, inputs = lab.inputs(number)
    found[f"a video of\n{lab.size} tokens"] = [list(clip.frames)], inputs
    return found


def _in_turns(timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Processor seconds of each, medians of a few turns; who goes first rotates."""
    found: dict[str, list[float]] = {name: [] for name in timed}
    order = list(timed)
    for turn in range(1 + TURNS):
        at = turn % len(order)
        for name in (*order[at:], *order[:at]):
            began = time.process_time()
            timed[name]()
            found[name].append(time.process_time() - began)
    return {name: median(taken[1:]) for name, taken in found.items()}


def _first_token(lab: Lab, inputs: Inputs) -> None:
    """Vision, prefill and one token."""
    run(lab.target.backbone, inputs, method="ar", max_new_tokens=1, do_sample=False)


def small_blip() -> ImageToText:
    """BLIP's architecture with random weights: what a forward of its size costs, and no more.

    As BLIP it sees 576 patches; it is to the embedded target about what BLIP is to a 7B model, and
    never ends a caption by itself.
    """
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", *(f"w{i}" for i in range(500))]
    layers = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 2}
    text = {
        "vocab_size": len(vocab),
        "encoder_hidden_size": 64,
        "max_position_embeddings": 64,
        "num_hidden_layers": 2,
        "bos_token_id": 5,
        "eos_token_id": 3,
        "sep_token_id": 3,
        "pad_token_id": 0,
    }
    vision = {"image_size": 384, "patch_size": 16, "num_hidden_layers": 2}
    config = BlipConfig(text_config=layers | text, vision_config=layers | vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = BlipForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("predictions.bias", "decoder.bias")):
                weight[:6] = -100.0  # words only: it goes on to the end
    processor = BlipProcessor(
        BlipImageProcessor(size={"height": 384, "width": 384}),
        BertTokenizer(vocab={word: i for i, word in enumerate(vocab)}, bos_token="[DEC]"),
    )
    return ImageToText(model, processor, [], max_tokens=SENTENCE)


def quality(lab: Lab) -> Data:
    """Table 5: how right the target's own answers are, with and without what is shown, and the
    drafts'."""
    if lab.size not in SUFFIX:
        raise OptionError(f"there are no suites of {lab.size} visual tokens; known: {[*SUFFIX]}")
    readers: dict[str, tuple[Loaded, bool]] = {
        "target": (lab.target, True),
        "target (text-only)": (lab.target, False),
        **{f"a draft that {what}": (draft, True) for what, draft in lab.drafts.items()},
    }
    known = suites()
    scores: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        suite = known[task + SUFFIX[lab.size]]
        longest = min(lab.tokens, suite.setting.max_new_tokens)
        for number, item in enumerate(islice(suite.items(), lab.clips)):
            lab.tell(f"{suite.name}, {number + 1} of {lab.clips}")
            media = media_arguments(item)
            for name, (reader, seeing) in readers.items():
                said = _said(reader, item.question, media if seeing else {}, longest)
                found = text_scores.score(item.task, said, item.answers)
                measure = "accuracy" if "accuracy" in found else "rouge_l"
                row = f"{suite.name}\n{MEASURES[measure]}"
                scores.setdefault(row, {}).setdefault(name, []).append(round(found[measure], 4))
    return {
        "x": "how right the first answer is",
        "rows": {
            row: {name: interval(values) for name, values in own.items()}
            for row, own in scores.items()
        },
        "scores": scores,
    }


MEASURES = {"accuracy": "exact match", "rouge_l": "ROUGE-L"}


def _said(reader: Loaded, question: str, media: Mapping[str, Any], longest: int) -> str:
    """A model's own greedy answer."""
    told = run(
        reader.backbone,
        ask(reader, question, **media),
        method="ar",
        tokenizer=reader.tokenizer,
        max_new_tokens=longest,
        do_sample=False,
    )
    return told.text or ""


STUDIES = {
    "tabed-captioners": Study(
        "TABED, Table 4",
        "Processor seconds of one frame's caption over those of the target's first token; below 1 "
        "a caption made beside the prefill holds nobody up.",
        captioners,
        draw.bars,
        clips=6,
        timed=True,
    ),
    "tabed-quality": Study(
        "TABED, Table 5",
        "How right answers are of the target, of the target shown nothing, and of the drafts.",
        quality,
        draw.bars,
        clips=50,
        size=256,
        tokens=256,
    ),
}
