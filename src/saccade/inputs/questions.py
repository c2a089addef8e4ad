"""Videos, images and a question (after earlier turns, if any) to a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from saccade.core.errors import ModelError, OptionError, first_line
from saccade.core.generation_settings import check_text
from saccade.core.prompt import CONTEXT, Inputs
from saccade.inputs import literal
from saccade.inputs.loading import Loaded
from saccade.inputs.media import Clip
from saccade.model.backbone import Backbone


@dataclass(frozen=True)
class Pair:
    """A target, and the draft beside it if there is one."""

    target: Loaded
    draft: Loaded | None = None

    @property
    def drafting(self) -> Backbone | None:
        return None if self.draft is None else self.draft.backbone

    def ask(self, question: str, **asked: Any) -> tuple[Inputs, Inputs | None]:
        """The target's inputs and the draft's own, arguments as :func:`ask`; None where there is no
        draft or the target's inputs serve it too."""
        inputs = ask(self.target, question, **asked)
        if self.draft is None:
            return inputs, None
        return inputs, ask_draft(self.target, self.draft, question, **asked)

    def together(
        self, asked: Sequence[tuple[Inputs, Inputs | None]]
    ) -> tuple[Inputs, Inputs | None]:
        """Several of what :meth:`ask` gave as one batch; see :func:`joined`."""
        owns = [own for _, own in asked if own is not None]
        inputs = joined(self.target, [inputs for inputs, _ in asked])
        return inputs, joined(self.draft, owns) if self.draft and owns else None


def ask(
    loaded: Loaded,
    question: str,
    *,
    clips: Sequence[Clip] = (),
    images: Sequence[np.ndarray] = (),
    history: Sequence[tuple[str, str]] = (),
    parts: Sequence[Mapping[str, str]] | None = None,
    last: Sequence[Mapping[str, str]] | None = None,
    documents: Sequence[str] = (),
) -> Inputs:
    """What the processor makes of videos, images and a question (after earlier turns, if any).

    ``documents`` are long texts that views may prune; they stand after the pictures.
    ``parts`` is the first message as a chat template takes it, where pictures stand between words;
    ``last`` the last one, where a further question shows pictures of its own.
    """
    processor = loaded.processor
    return put(loaded.name, processor, question, clips, images, history, parts, documents, last)


def ask_draft(target: Loaded, draft: Loaded, question: str, **asked: Any) -> Inputs | None:
    """The draft's own inputs, arguments as :func:`ask`; None where the target's serve it too."""
    return None if same_inputs(target, draft) else ask(draft, question, **asked)


def same_inputs(target: Loaded, draft: Loaded) -> bool:
    """Whether the target's inputs serve the draft too."""
    # a text-only draft reads the target's ids
    return draft.processor is draft.tokenizer or (
        _described(target.processor) == _described(draft.processor)
    )


def shown(clip: Clip) -> dict[str, Any]:
    """A clip as what :func:`ask` takes: a single picture is an image."""
    if len(clip.frames) == 1 and clip.source_frames == 1:
        return {"images": list(clip.frames)}
    return {"clips": [clip]}


def joined(loaded: Loaded, many: Sequence[Inputs]) -> Inputs:
    """Several requests of one processor as one batch, padded on the left as generation wants it.

    Raises OptionError where they cannot stand in one batch.
    """
    if len(many) == 1:
        return many[0]
    token = loaded.tokenizer.pad_token_id
    pads = {"input_ids": loaded.tokenizer.eos_token_id if token is None else token}
    masked = [{"attention_mask": torch.ones_like(one["input_ids"]), **one} for one in many]
    if any(CONTEXT in one for one in masked):
        masked = [{CONTEXT: torch.zeros_like(one["input_ids"]), **one} for one in masked]
    longest = max(one["input_ids"].shape[1] for one in masked)
    if any(one.keys() != masked[0].keys() for one in masked):
        raise OptionError(f"{loaded.name} cannot read videos and pictures in one batch")

    def padded(one: Inputs, name: str) -> torch.Tensor:
        if one[name].shape != one["input_ids"].shape:  # not one entry a token
            return one[name]
        missing = longest - one[name].shape[1]
        return torch.nn.functional.pad(one[name], (missing, 0), value=pads.get(name) or 0)

    try:
        return {name: torch.cat([padded(one, name) for one in masked]) for name in masked[0]}
    except (AttributeError, TypeError, RuntimeError) as error:
        raise OptionError(f"{loaded.name} cannot read these videos in one batch") from error


def put(
    name: str,
    processor: Any,
    question: str,
    clips: Sequence[Clip],
    images: Sequence[np.ndarray],
    history: Sequence[tuple[str, str]],
    parts: Sequence[Mapping[str, str]] | None = None,
    documents: Sequence[str] = (),
    last: Sequence[Mapping[str, str]] | None = None,
) -> Inputs:
    """:func:`ask` without a loaded model. Raises OptionError for what are no words."""
    several = isinstance(documents, list | tuple)
    if not several or not all(isinstance(each, str) for each in documents):
        raise OptionError("documents are a list of texts, such as [text]")
    if not isinstance(question, str):
        raise OptionError(f"a question is text, not {type(question).__name__}")
    media = [{"type": "video"} for _ in clips] + [{"type": "image"} for _ in images]
    media += [literal.document(text) for text in documents]
    turns: list[dict[str, Any]] = []
    for asked, answered in history:
        turns.append({"role": "user", "content": [{"type": "text", "text": asked}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answered}]})
    turns.append({"role": "user", "content": [{"type": "text", "text": question}]})
    turns[0]["content"] = [*media, *turns[0]["content"]] if parts is None else [*parts]
    if last is not None:
        turns[-1]["content"] = [*last]
    return converse(name, processor, turns, clips, images)


def converse(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    clips: Sequence[Clip] = (),
    images: Sequence[np.ndarray] = (),
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continued: bool = False,
) -> Inputs:
    """What the processor makes of a conversation as chat templates take it.

    Each turn has a role and a content of parts: ``{"type": "text", "text": ...}``, the same of type
    "document" for text that views may prune, and
    ``{"type": "video"}`` or ``{"type": "image"}`` where the next of ``clips`` or ``images`` stands.
    An assistant's turn may have ``tool_calls`` and ``reasoning_content`` as templates take them.
    ``tools`` are told as the template tells of them; ``continued`` leaves the last turn, the
    assistant's, unfinished.
    """
    if not getattr(processor, "chat_template", None):
        raise ModelError(f"{name} has no chat template, so questions cannot be put to it")
    for part in (part for turn in turns for part in turn["content"]):
        check_text("the text", part.get("text", ""))
    text_only = getattr(processor, "tokenizer", None) is None
    if text_only and (clips or images):
        raise ModelError(f"{name} reads text only; give a vision-language --target")
    if clips and getattr(processor, "video_processor", None) is None:
        raise ModelError(f"{name} reads images and no videos; give it a picture")
    text, standing = _written(name, processor, turns, tools, continued)
    if text_only:
        inputs = processor(text, return_tensors="pt", add_special_tokens=False)
        return literal.spell(name, inputs, standing)
    seen: dict[str, Any] = {}
    clips = [_long_enough(clip, processor) for clip in clips]
    if clips:
        seen["videos"] = [clip.frames for clip in clips]
        seen["video_metadata"] = [clip.metadata for clip in clips]
        seen["do_sample_frames"] = False
    if images:
        seen["images"] = [list(images)]  # those of one request: some families look at how many
    try:
        inputs = processor(text=[text], return_tensors="pt", **seen)
    except (ValueError, TypeError) as error:
        if len({len(clip.frames) for clip in clips}) > 1:
            raise OptionError(
                f"{name} takes several videos only if they have as many frames: "
                "choose a number of frames (--num-frames)"
            ) from error
        raise OptionError(f"{name} cannot take this: {first_line(error)}") from error
    if "video_second_per_grid" in inputs:  # taken from a default, not from the videos
        group = int(processor.video_processor.temporal_patch_size)
        inputs["video_second_per_grid"] = torch.tensor([group / c.sampled_fps for c in clips])
    return literal.spell(name, inputs, standing)


def _long_enough(clip: Clip, processor: Any) -> Clip:
    """The clip, its last frame repeated where it has fewer than a processor puts in one row.

    Some processors do this themselves and some (Qwen3-VL's) refuse such a clip.
    """
    missing = getattr(processor.video_processor, "temporal_patch_size", 1) - len(clip.frames)
    if missing <= 0:
        return clip
    frames = np.concatenate([clip.frames, clip.frames[-1:].repeat(missing, axis=0)])
    times = np.concatenate([clip.timestamps, clip.timestamps[-1:].repeat(missing)])
    return replace(clip, frames=frames, timestamps=times)


def words(
    name: str, processor: Any, turns: Sequence[Mapping[str, Any]], *, continued: bool = False
) -> list[int]:
    """The ids of a conversation's template alone, as :func:`converse` takes it: each picture is
    still the mark that stands for it."""
    text, standing = _written(name, processor, turns, (), continued)
    tokenizer = getattr(processor, "tokenizer", processor)
    found = literal.spell(name, tokenizer(text, return_tensors="pt"), standing)
    return list(found["input_ids"][0].tolist())


def _written(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    continued: bool,
) -> tuple[str, literal.Standing | None]:
    """A conversation as its template has it, and what stands in it for words."""
    is_text_only = getattr(processor, "tokenizer", None) is None

    def render(turns: list[dict[str, Any]]) -> str:
        if is_text_only:
            turns = [
                {**turn, "content": "".join(part["text"] for part in turn["content"])}
                for turn in turns
            ]
        return str(
            processor.apply_chat_template(
                turns,
                add_generation_prompt=not continued,
                continue_final_message=continued,
                tokenize=False,
                **({"tools": [*tools]} if tools else {}),
            )
        )

    return literal.write(name, processor, turns, render)


def _described(processor: Any) -> str:
    """How a processor prepares pixels and places them in the text."""
    inner = getattr(processor, "tokenizer", None)
    return repr((inner is None or processor.to_dict(), processor.chat_template))
