"""TABED's appendices D and E: a caption's cost beside a prefill, and how right answers are.

One of TABED's drafts reads a caption instead of the video. If a small model writes it while the
target prefills, it delays nothing. ``python -m lab figure`` runs these studies.
"""

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
from lab.studies.experiment import Experiment, interval_over_clips
from lab.studies.study import Study
from lab.studies.tabed import unseen_picture
from saccade.bench import text_scores
from saccade.bench.runner import media_arguments
from saccade.core.errors import OptionError
from saccade.core.prompt import Inputs
from saccade.engine.generate import run
from saccade.inputs import Loaded, ask
from saccade.inputs.captions import SHAPES, ImageToText, captioner
from saccade.world.suites import TASKS, suites

TURNS = 5  # How often each captioner and the target are timed on a prompt, after a warm-up.
PICTURES = (1, 2, 5)  # How many pictures a prompt has, in one row each.
CAPTION_TOKENS = 20  # Tokens of a caption by random weights, which never end one.
SUFFIX = {256: "", 2048: "-2k"}  # The end of a suite's name, by its visual tokens.


def measure_captioners(experiment: Experiment) -> Data:
    """Measures Table 4: the time of a prompt's captions, over the target's time to first token.

    A caption is made of every picture of the prompt, or of one frame of its video. Times are
    processor seconds, which a busy machine changes little. With one thread they equal the seconds
    of an idle machine's clock.
    """
    blip = small_blip()
    blip_size = sum(each.numel() for each in blip.model.parameters())
    target_size = sum(each.numel() for each in experiment.target.backbone.model.parameters())
    names = {
        "captioner": "the embedded captioner",
        "blip": f"random weights in BLIP's form, 1/{round(target_size / blip_size)} of the target, "
        f"{CAPTION_TOKENS} tokens",
    }
    ratios: dict[str, dict[str, list[float]]] = {}
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(experiment.clips):
        for row, (media, inputs) in _media_and_inputs(experiment, number).items():
            experiment.on_progress(f"{row}, {number + 1} of {experiment.clips}".replace("\n", " "))
            small = captioner(SHAPES, media)
            seconds_by_name = _processor_seconds(
                {
                    "target": partial(_decode_first_token, experiment, inputs),
                    "captioner": partial(small, {}),
                    "blip": partial(replace(blip, frames=small.frames), {}),
                }
            )
            for key, spent in seconds_by_name.items():
                seconds.setdefault(row, {}).setdefault(key, []).append(round(spent, 4))
            for key, name in names.items():
                ratio = seconds_by_name[key] / seconds_by_name["target"]
                ratios.setdefault(row, {}).setdefault(name, []).append(ratio)
    return {
        "x": "processor seconds of one caption / of the target's first token",
        "rows": {
            row: {name: interval_over_clips(values) for name, values in own.items()}
            for row, own in ratios.items()
        },
        "marks": {"as long": 1.0},
        "clips_seconds": seconds,
    }


def _media_and_inputs(
    experiment: Experiment, number: int
) -> Mapping[str, tuple[list[list[np.ndarray]], Inputs]]:
    """Returns what is captioned, by the name of its row: the frames of each picture or video, and
    the target's inputs with all of them."""
    by_name: dict[str, tuple[list[list[np.ndarray]], Inputs]] = {}
    pictures = [
        unseen_picture(max(PICTURES) * number + i, experiment.size // 4)
        for i in range(max(PICTURES))
    ]
    for count in PICTURES:
        inputs = ask(experiment.target, "Describe the images in detail.", images=pictures[:count])
        noun = "picture" if count == 1 else "pictures"
        frames_by_picture = [[picture] for picture in pictures[:count]]
        by_name[f"{count} {noun} of\n{experiment.size // 4} tokens"] = frames_by_picture, inputs
    clip, inputs = experiment.inputs(number)
    by_name[f"a video of\n{experiment.size} tokens"] = [list(clip.frames)], inputs
    return by_name


def _processor_seconds(timed: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the processor seconds of each function: medians of turns, whose order rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    order = list(timed)
    for turn in range(1 + TURNS):
        at = turn % len(order)
        for name in (*order[at:], *order[:at]):
            started_at = time.process_time()
            timed[name]()
            seconds[name].append(time.process_time() - started_at)
    return {name: median(turns[1:]) for name, turns in seconds.items()}


def _decode_first_token(experiment: Experiment, inputs: Inputs) -> None:
    """Runs the target's vision tower and prefill, and decodes one token."""
    run(experiment.target.backbone, inputs, method="ar", max_new_tokens=1, do_sample=False)


def small_blip() -> ImageToText:
    """Makes a captioner of BLIP's architecture with random weights, which is good for timing alone.

    It has no frames yet. Like BLIP it sees 576 patches. Its size is to the embedded target's about
    what BLIP's is to a 7B model's. It never ends a caption by itself.
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
                weight[:6] = -100.0  # Special tokens become impossible, so no caption ends.
    processor = BlipProcessor(
        BlipImageProcessor(size={"height": 384, "width": 384}),
        BertTokenizer(vocab={word: i for i, word in enumerate(vocab)}, bos_token="[DEC]"),
    )
    return ImageToText(model, processor, [], max_tokens=CAPTION_TOKENS)


def measure_quality(experiment: Experiment) -> Data:
    """Measures Table 5: how right the target's answers are, with and without its media.

    The drafts' own answers are beside them. Only the first question of each item is asked. Raises
    OptionError for a size without suites.
    """
    if experiment.size not in SUFFIX:
        raise OptionError(
            f"there are no suites of {experiment.size} visual tokens; known: {[*SUFFIX]}"
        )
    readers: dict[str, tuple[Loaded, bool]] = {
        "target": (experiment.target, True),
        "target (text-only)": (experiment.target, False),
        **{f"a draft that {what}": (draft, True) for what, draft in experiment.drafts.items()},
    }
    suite_by_name = suites()
    scores: dict[str, dict[str, list[float]]] = {}
    for task in TASKS:
        suite = suite_by_name[task + SUFFIX[experiment.size]]
        longest = min(experiment.tokens, suite.setting.max_new_tokens)
        for number, item in enumerate(islice(suite.items(), experiment.clips)):
            experiment.on_progress(f"{suite.name}, {number + 1} of {experiment.clips}")
            media = media_arguments(item)
            for name, (reader, seeing) in readers.items():
                answer = _plain_answer(reader, item.question, media if seeing else {}, longest)
                score = text_scores.score(item.task, answer, item.answers)
                measure = "accuracy" if "accuracy" in score else "rouge_l"
                row = f"{suite.name}\n{MEASURES[measure]}"
                scores.setdefault(row, {}).setdefault(name, []).append(round(score[measure], 4))
    return {
        "x": "how right the first answer is",
        "rows": {
            row: {name: interval_over_clips(values) for name, values in own.items()}
            for row, own in scores.items()
        },
        "scores": scores,
    }


MEASURES = {"accuracy": "exact match", "rouge_l": "ROUGE-L"}


def _plain_answer(reader: Loaded, question: str, media: Mapping[str, Any], longest: int) -> str:
    """Returns a model's own greedy answer."""
    result = run(
        reader.backbone,
        ask(reader, question, **media),
        method="ar",
        tokenizer=reader.tokenizer,
        max_new_tokens=longest,
        do_sample=False,
    )
    return result.text or ""


STUDIES = {
    "tabed-captioners": Study(
        "TABED, Table 4",
        "Processor seconds of one frame's caption over those of the target's first token; below 1 "
        "a caption made beside the prefill holds nobody up.",
        measure_captioners,
        draw.bars,
        clips=8,
        timed=True,
    ),
    "tabed-quality": Study(
        "TABED, Table 5",
        "How right answers are of the target, of the target shown nothing, and of the drafts.",
        measure_quality,
        draw.bars,
        clips=50,
        size=256,
        tokens=256,
    ),
}
