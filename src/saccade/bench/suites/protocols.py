"""How each paper ran each benchmark, as data: samples, frames, split, token limit and prompt.

What a paper leaves open is filled in and said so in `Setting.paper`, after the semicolon. A prompt
may hold {question}, {options}, {caption1} .. (the captions that a story's question gives) and
`<image>`, which marks where an image stands; without a mark the media come before the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from saccade.bench.suites.types import Setting

IMAGE = "<image>"

DESCRIBE = (
    "Please provide a detailed description of the video, focusing on the main subjects, "
    "their actions, and the background scenes."
)
CHOICE = "{question}\n{options}"
THINK = CHOICE + "\nLet's think step by step."
LETTER = CHOICE + "\nAnswer with the option's letter from the given choices directly."
REASON = (
    "For the following question, provide a detailed explanation of your reasoning leading to "
    "the answer. {question}"
)
EDIT = (
    "Please provide instructions for editing the source image to match the target image. "
    "Source Image: <image> Target Image: <image> Instruction:"
)
DIFFER = "Explain the disparities between the first and second image. <image> <image> Difference:"
# The full stop after the second caption is the paper's.
_STORY = (
    " <image> Caption #1: {caption1} <image> Caption #2: {caption2}. <image> Caption #3: "
    "{caption3} <image> Caption #4: {caption4} <image> Caption #5:"
)
PORORO = (
    "Given the progression of the story with the first few images, can you write a fitting end "
    "considering the last image?" + _STORY
)
VIST = (
    "With the narratives paired with the initial images, how would you conclude the story using "
    "the last picture?" + _STORY
)

_SPECVLM = Setting(
    "SpecVLM, Sec. 4.1 and App. A; prompt not stated beyond a description rich in visual "
    "information: the wording of its published code",
    samples=50,
    max_new_tokens=256,
    frames=64,
    prompt=DESCRIBE,
)
_SAGE_VIDEO = Setting(
    "SAGE, Sec. 5.1; samples, frames, token limit and prompt not stated: SpecVLM's, which it "
    "follows, on every sample",
    max_new_tokens=256,
    frames=64,
    prompt=DESCRIBE,
)
_SAGE_IMAGE = Setting(
    "SAGE, Sec. 5.1; samples, token limit and prompt not stated: lmms-eval's question without "
    "its short-answer sentence, as the paper generates long texts",
    max_new_tokens=256,
    prompt="{question}",
)
_SAGE_TEXT = Setting(
    "SAGE, Sec. 5.4; samples, token limit and prompt not stated",
    max_new_tokens=256,
    prompt="{question}",
)
_HIPPO = Setting(
    "HIPPO, Sec. 6 and App. B; samples and prompt not stated: lmms-eval's without its "
    "letter-only sentence, as 256 tokens are generated",
    max_new_tokens=256,
    frames=64,
    prompt=CHOICE,
)
_HIPPO_ACCURACY = Setting(
    "HIPPO, Sec. 4 and Fig. 3; samples, frames, token limit and prompt not stated: lmms-eval's",
    max_new_tokens=16,
    frames=64,
    prompt=LETTER,
)
_STD = Setting(
    "Sparse-to-Dense, Sec. 4; asks for a chain of thought: wording, samples, frames and token "
    "limit not stated",
    max_new_tokens=256,
    prompt=THINK,
)
_TABED = Setting("TABED, Sec. 4.1, App. I.1 and J", max_new_tokens=128, prompt=REASON)
_TABED_OPEN = replace(
    _TABED,
    paper="TABED, Sec. 4.1, App. I.1 and J; samples not stated for this set: 100 as for its others",
    samples=100,
)
_TABED_SIDE = replace(_TABED, prompt="{question}")


def _two_lengths(name: str, setting: Setting) -> dict[str, Setting]:
    """The 64 frames of the 72B pair and the 128 that the same sentence gives for the 7B."""
    return {name: setting, f"{name}-128": replace(setting, frames=128)}


def _video(
    split: str, *, own: bool = False, specvlm_split: str | None = None
) -> dict[str, Setting]:
    """SpecVLM, SAGE and HIPPO on one benchmark; `own` keeps the dataset's own question."""
    describe, choose = ("{question}", "{question}") if own else (DESCRIBE, CHOICE)
    specvlm = replace(_SPECVLM, split=specvlm_split or split, prompt=describe)
    return {
        **_two_lengths("specvlm", specvlm),
        "sage": replace(_SAGE_VIDEO, split=split, prompt=describe),
        **_two_lengths("hippo", replace(_HIPPO, split=split, prompt=choose)),
    }


SETTINGS: Mapping[str, Mapping[str, Setting]] = {
    "videodetailcaption": _video("test", own=True),
    "mvbench": _video("train"),
    "mlvu": {
        **_video("test"),
        "hippo-accuracy": replace(
            _HIPPO_ACCURACY, prompt=CHOICE + "\nOnly give the best option.\n\nBest option: ("
        ),
        "std": _STD,
    },
    "longvideobench": _video("validation", specvlm_split="test"),
    "video-mme": {
        **_two_lengths("hippo", _HIPPO),
        "hippo-accuracy": _HIPPO_ACCURACY,
        "std": _STD,
    },
    "lvbench": {
        **_two_lengths("hippo", replace(_HIPPO, split="train")),
        "hippo-accuracy": replace(
            _HIPPO_ACCURACY,
            split="train",
            prompt=CHOICE + "\nAnswer the question with the option letter.",
        ),
    },
    "textvqa": {"sage": replace(_SAGE_IMAGE, split="validation")},
    "gqa": {"sage": replace(_SAGE_IMAGE, split="testdev")},
    "chartqa": {
        "sage": _SAGE_IMAGE,
        "tabed": replace(
            _TABED_SIDE, paper="TABED, App. J.3 (timing only); samples and prompt not stated"
        ),
    },
    "seed-bench": {"sage": replace(_SAGE_IMAGE, prompt=CHOICE)},
    "llava-bench-wild": {"tabed": replace(_TABED, samples=60, split="train")},
    "docvqa": {
        "tabed": replace(
            _TABED_OPEN,
            paper=_TABED_OPEN.paper + "; its link is LMMs-Eval-Lite",
            split="lite",
        )
    },
    "pope": {"tabed": replace(_TABED, samples=100)},
    "mm-vet": {"tabed": _TABED_OPEN},
    "spot-the-diff": {"tabed": replace(_TABED, samples=100, prompt=DIFFER)},
    "iedit": {"tabed": replace(_TABED, samples=100, prompt=EDIT)},
    "magicbrush": {"tabed": replace(_TABED, samples=100, prompt=EDIT)},
    "pororosv": {"tabed": replace(_TABED, samples=100, prompt=PORORO)},
    "vist": {"tabed": replace(_TABED, samples=100, prompt=VIST)},
    "ocrbench": {
        "tabed": replace(
            _TABED_SIDE, paper="TABED, App. H.2 (the draft's quality); prompt not stated"
        )
    },
    "textcaps": {
        "tabed": replace(
            _TABED_SIDE,
            paper="TABED, App. H.2 (the draft's quality); split and prompt not stated: lmms-eval's",
            split="val",
            prompt="Provide a one-sentence caption for the provided image.",
        )
    },
    "convbench": {
        "tabed": replace(
            _TABED_SIDE, paper="TABED, Sec. 4.1 (second turns); samples and prompt not stated"
        )
    },
    "gsm8k": {
        "sage": _SAGE_TEXT,
        "tabed": replace(
            _TABED_SIDE, paper="TABED, Sec. 4.1 (second turns); samples and prompt not stated"
        ),
    },
    "humaneval": {"sage": _SAGE_TEXT},
    "nq": {
        "tabed": replace(
            _TABED_SIDE,
            paper="TABED, Sec. 4.1 (second turns); samples, split and prompt not stated",
            split="validation",
        )
    },
}
