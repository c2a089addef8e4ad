"""One tiny checkpoint of every family, saved and reloaded, and prompts of every kind for it.

Everything here is a function of a seed, so that a mismatch can be asked for again by name. The
tests of this folder and ``sweep.py`` share it; it needs no pytest.
"""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.generation.utils import ALL_CACHE_NAMES

import saccade
from lab import checkpoints
from lab.checkpoints import Size
from saccade import inputs as models
from saccade.core.prompt import Inputs, Prefill, Prompt
from saccade.core.result import Result
from saccade.core.sampling import Sampling
from saccade.inputs import Loaded
from saccade.inputs.media import Clip
from saccade.model.session import Session

NOISE = 0.05  # of a draft's decoder: it is right about two times in three
FPS = 2.0
CACHE = ALL_CACHE_NAMES[0]  # "cache", and "past_key_values" before Transformers 5.24
NEW = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 18)  # names of its options
LONGEST = 32  # tokens of the answers that several tests compare with
RATE = 16000  # samples a second of sound
SMALL = Size(1, 128, 320)  # another depth than the target's

QWEN = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe", "qwen2.5-omni")
LLAVA = ("llava-1.5", "llava-next", "llava-next-video", "llava-onevision")
DEEP = ("qwen3-vl", "qwen3-vl-moe")  # have rows for early layers too
STILL = ("llava-1.5", "llava-next")  # have no videos
FAMILIES = (*QWEN, *LLAVA, "llama")  # tested here; the sweep takes all of ``checkpoints.FAMILIES``
SEEING = tuple(name for name in FAMILIES if name != "llama")

PICTURES = ("text", "image", "images")
FILMS = (*PICTURES, "video", "videos")

# What the families of 2025 and 2026 read; ``test_newer_families.py`` compares them.
NEWER_KINDS: dict[str, tuple[str, ...]] = {
    "qwen3.5": (*FILMS, "both"),
    "qwen3.5-moe": (*FILMS, "both"),
    "qwen3-omni-moe": (*FILMS, "both"),
    "glm4v": FILMS,  # Its videos are written with the token of pictures, so both do not go.
    "glm4.6v": FILMS,
    "glm4v-moe": FILMS,
    "gemma3": PICTURES,
    "gemma3n": PICTURES,
    "gemma4": (*FILMS, "both"),
    "paligemma": ("image", "images"),  # Its processor wants a picture.
    "mistral3": PICTURES,
    "llama4": PICTURES,
    "aya-vision": PICTURES,
    "perception-lm": (*FILMS, "both"),
    "fast-vlm": PICTURES,
    "idefics3": PICTURES,
    "ovis2": PICTURES,
    "deepseek-vl": PICTURES,
    "lfm2-vl": PICTURES,
    "lfm3-vl": (*FILMS, "both"),
    "step3.7": PICTURES,
    "ernie4.5-vl-moe": (*FILMS, "both"),
    "kimi-k2.5": PICTURES,  # transformers 5.23 counts its videos' rows before they are merged.
    "hunyuan-vl": PICTURES,
    "paddleocr-vl": PICTURES,
    "minimax-m3-vl": (*FILMS, "both"),
    "minicpm-v4.6": (*FILMS, "both"),
    "minicpm-v4.7": (*FILMS, "both"),
    "molmo2": (*PICTURES, "video"),
    "internvl": (*FILMS, "both"),
    "smolvlm": FILMS,
    "video-llama-3": (*FILMS, "both"),
}

WORDS = "what how many red blue boxes cats move left behind before after is the in this why".split()


@dataclass(frozen=True)
class Media:
    """What one prompt shows and asks."""

    question: str
    images: tuple[np.ndarray, ...] = ()
    clips: tuple[Clip, ...] = ()
    sound: tuple[np.ndarray, ...] = ()
    heard: bool = False  # the sound is the video's own


# -- checkpoints -------------------------------------------------------------------------------


@cache
def member(
    family: str,
    seed: int = 0,
    noise: float = 0.0,
    size: Size | None = None,
    fused: bool | None = None,
) -> Loaded:
    """A model of a family, written to a folder and loaded from there."""
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoints.make(family, f"{folder}/{family}", seed=seed, noise=noise, size=size)
        return models.load(str(path), device="cpu", fused=fused)


def draft_of(family: str, seed: int = 0) -> Loaded:
    """A draft that is right more often than not."""
    return member(family, seed, NOISE)


# -- prompts -----------------------------------------------------------------------------------


def kinds(family: str) -> tuple[str, ...]:
    """The kinds of prompt a family reads."""
    if family == "llama":
        return ("text",)
    if family in NEWER_KINDS:
        return NEWER_KINDS[family]
    if family in STILL:
        return ("image", "images")
    if family == "qwen2.5-omni":
        return ("image", "images", "video", "videos", "both", "audio", "heard")
    return ("image", "images", "video", "videos", "both")


PAIRS = tuple((family, kind) for family in FAMILIES for kind in kinds(family))


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed)
    return noise.integers(0, 256, (height, width, 3), dtype=np.uint8)


def clip(frames: int, height: int, width: int, seed: int = 0) -> Clip:
    noise = np.random.default_rng(seed)
    pixels = noise.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return Clip(pixels, np.arange(frames) / FPS, frames / FPS, FPS, frames, FPS)


def hum(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


def draw(kind: str, seed: int) -> Media:
    """A prompt of this kind: sizes, numbers, pixels and words by the seed."""
    rng = random.Random(f"{kind} {seed}")

    def size() -> tuple[int, int]:
        return rng.randint(56, 168), rng.randint(56, 168)

    def number() -> int:
        return rng.randrange(2**30)

    images: tuple[np.ndarray, ...] = ()
    clips: tuple[Clip, ...] = ()
    sound: tuple[np.ndarray, ...] = ()
    frames = rng.choice((2, 4, 5, 6))  # the same in every video: LLaVA's ask for that
    if kind in ("image", "both"):
        images = (picture(*size(), number()),)
    if kind == "images":
        images = tuple(picture(*size(), number()) for _ in range(rng.choice((2, 3))))
    if kind in ("video", "both", "heard"):
        clips = (clip(frames, *size(), number()),)
    if kind == "videos":
        clips = tuple(clip(frames, *size(), number()) for _ in range(2))
    if kind == "heard":
        sound = (hum(frames / FPS, number()),)
    if kind == "audio":
        sound = tuple(hum(rng.uniform(0.5, 3), number()) for _ in range(rng.choice((1, 2))))
    question = " ".join(rng.choices(WORDS, k=rng.randint(2, 9))) + "?"
    return Media(question, images, clips, sound, kind == "heard")


def read(loaded: Loaded, media: Media) -> Inputs:
    """What the processor makes of it."""
    if media.sound:
        return _listen(loaded, media)
    return models.ask(loaded, media.question, clips=media.clips, images=media.images)


def make_inputs(loaded: Loaded, kind: str, seed: int = 0) -> Inputs:
    return read(loaded, draw(kind, seed))


def _listen(loaded: Loaded, media: Media) -> Inputs:
    """With sound, which ``models.ask`` does not take: straight from the processor."""
    content: list[dict[str, str]] = [{"type": "video"} for _ in media.clips]
    content += [] if media.heard else [{"type": "audio"} for _ in media.sound]
    content.append({"type": "text", "text": media.question})
    turns = [{"role": "user", "content": content}]
    text = loaded.processor.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    more: dict[str, Any] = {}
    if media.clips:
        more["videos"] = [clip.frames for clip in media.clips]
        more["video_metadata"] = [clip.metadata for clip in media.clips]
        more["do_sample_frames"] = False
    if media.heard:  # the track as an array, so that nothing is decoded
        more["load_audio_from_video" if NEW else "use_audio_in_video"] = True
        more["audio_from_video_indices"] = list(range(len(media.clips)))
    with warnings.catch_warnings():  # it makes arrays of tensors in a way numpy dislikes
        warnings.simplefilter("ignore", DeprecationWarning)
        inputs = loaded.processor(
            text=[text], audio=list(media.sound), sampling_rate=RATE, return_tensors="pt", **more
        )
    return {**inputs, "use_audio_in_video": True} if media.heard else inputs


# -- answers -----------------------------------------------------------------------------------


@torch.no_grad()
def hf_greedy(loaded: Loaded, inputs: Inputs, count: int) -> list[int]:
    """What transformers' own generate answers."""
    model = loaded.backbone.model
    out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@cache
def case(
    loaded: Loaded, kind: str, seed: int = 0, count: int = LONGEST
) -> tuple[Inputs, list[int]]:
    """A prompt and the answer of ``generate``, asked once whoever compares with it."""
    inputs = make_inputs(loaded, kind, seed)
    return inputs, hf_greedy(loaded, inputs, count)


def run(
    target: Loaded, draft: Loaded, inputs: Inputs, method: str, count: int, **more: Any
) -> Result:
    """Our greedy answer."""
    return saccade.run(
        target.backbone,
        inputs,
        draft=draft.backbone,
        method=method,
        max_new_tokens=count,
        do_sample=False,
        tokenizer=target.tokenizer,
        **more,
    )


@torch.no_grad()
def hf_logits(loaded: Loaded, inputs: Inputs) -> Tensor:
    """Transformers' own logits after the prompt."""
    return loaded.backbone.model(**inputs, use_cache=False).logits[0, -1]


def session(loaded: Loaded, prompt: Prompt) -> tuple[Session, Prefill]:
    """A session that has read one prompt."""
    fresh = Session(loaded.backbone, [Sampling()])
    return fresh, fresh.prefill([prompt])[0]


def prompt_of(loaded: Loaded, inputs: Inputs) -> Prompt:
    return loaded.backbone.prompts(inputs)[0]


def apart(mine: Tensor, theirs: Tensor) -> float:
    """The largest difference, as a share of the largest value."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


def varied(ids: list[int]) -> bool:
    """Whether a text is worth comparing: one that repeats itself proves little."""
    return len(set(ids)) > len(ids) // 4


def tally(result: Result) -> Mapping[str, int]:
    """Accepted tokens and refusals of one answer."""
    return {
        "accepted": sum(len(round.accepted) for round in result.rounds),
        "refused": sum(round.kind == "recovered" for round in result.rounds),
    }
