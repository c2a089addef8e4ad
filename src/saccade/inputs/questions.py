"""Makes a model's inputs of videos, images and a question, after earlier turns if there are any.

The model's chat template writes the conversation as text. Its processor then turns the text and the
media into ``Inputs``: ids, pixels and what belongs to them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError

from saccade.core.errors import ModelError, OptionError, first_line
from saccade.core.generation_settings import check_text
from saccade.core.prompt import DOCUMENT_MASK, Inputs
from saccade.inputs import literal_text
from saccade.inputs.loading import Loaded
from saccade.inputs.media import Clip
from saccade.model.backbone import Backbone


@dataclass(frozen=True)
class Dialogue:
    """A conversation with its media: every turn may bring videos, images and documents.

    ``turns`` are in the form of :func:`conversation_inputs`, and ``clips`` and ``images`` are those
    of all turns in order.
    """

    turns: tuple[Mapping[str, Any], ...] = ()
    clips: tuple[Clip, ...] = ()
    images: tuple[np.ndarray, ...] = ()
    continues_last_turn: bool = False  # whether the last turn, the assistant's, is unfinished

    def ask(
        self,
        question: str,
        *,
        clips: Sequence[Clip] = (),
        images: Sequence[np.ndarray] = (),
        documents: Sequence[str] = (),
    ) -> Dialogue:
        """Returns the dialogue with one more question, after the media that it brings.

        Raises OptionError if the question or a document is not text.
        """
        content = _question_content(question, clips, images, documents)
        turns = (*self.turns, {"role": "user", "content": content})
        return Dialogue(turns, (*self.clips, *clips), (*self.images, *images))

    def answer(self, text: str) -> Dialogue:
        """Returns the dialogue with the answer to its last question."""
        content = [{"type": "text", "text": text}]
        return replace(self, turns=(*self.turns, {"role": "assistant", "content": content}))


@dataclass(frozen=True)
class Pair:
    """A target, and the draft beside it if there is one."""

    target: Loaded
    draft: Loaded | None = None

    @property
    def draft_backbone(self) -> Backbone | None:
        return None if self.draft is None else self.draft.backbone

    def ask(self, question: str, **arguments: Any) -> tuple[Inputs, Inputs | None]:
        """Returns the target's inputs and the draft's own; arguments are those of :func:`ask`.

        The draft's are None where there is no draft, or where it uses the target's inputs.
        """
        inputs = ask(self.target, question, **arguments)
        if self.draft is None:
            return inputs, None
        return inputs, ask_draft(self.target, self.draft, question, **arguments)

    def converse(self, dialogue: Dialogue) -> tuple[Inputs, Inputs | None]:
        """Returns the target's inputs of a dialogue and the draft's own, as :meth:`ask` does."""
        target, draft = self.target, self.draft
        inputs = dialogue_inputs(target, dialogue)
        if draft is None or same_inputs(target, draft):
            return inputs, None
        return inputs, dialogue_inputs(draft, dialogue)

    def batch(
        self, requests: Sequence[tuple[Inputs, Inputs | None]]
    ) -> tuple[Inputs, Inputs | None]:
        """Joins several results of :meth:`ask` into one batch; see :func:`batch_inputs`."""
        all_draft_inputs = [draft for _, draft in requests if draft is not None]
        inputs = batch_inputs(self.target, [inputs for inputs, _ in requests])
        if self.draft is None or not all_draft_inputs:
            return inputs, None
        return inputs, batch_inputs(self.draft, all_draft_inputs)


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
    system: str | None = None,
) -> Inputs:
    """Returns the model's inputs for a question about videos and images, after earlier turns.

    The first message of the user has the videos, the images, the documents, and then the first
    question.

    Args:
        history: the earlier questions, each with its answer.
        documents: long texts that views may prune.
        parts: the parts of the user's first message, in the form of chat templates. They replace
            that message, documents and question included, so media may stand between its words.
        last: the parts of the user's last message, in the same form. They replace ``question``.
            Without ``history`` this is also the first message, which ``parts`` replace instead.
        system: a system message before all others.
    """
    processor = loaded.processor
    inputs = question_inputs(
        loaded.name, processor, question, clips, images, history, parts, documents, last, system
    )
    return cast_pixels(inputs, loaded.backbone.dtype)


def dialogue_inputs(loaded: Loaded, dialogue: Dialogue) -> Inputs:
    """Returns the model's inputs for a dialogue.

    Raises ModelError or OptionError for what the model cannot read.
    """
    clips, images = dialogue.clips, dialogue.images
    inputs = conversation_inputs(
        loaded.name,
        loaded.processor,
        dialogue.turns,
        clips,
        images,
        continues_last_turn=dialogue.continues_last_turn,
    )
    return cast_pixels(inputs, loaded.backbone.dtype)


def cast_pixels(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Returns inputs in which pixels of half precision have the model's type.

    Llama 4's processor gives its pixels in bfloat16, which a model in float32 cannot multiply.
    Models cast pixels in float32 themselves.
    """
    cast = {
        name: value.to(dtype)
        for name, value in inputs.items()
        if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    }
    return {**inputs, **cast} if cast else inputs


def ask_draft(target: Loaded, draft: Loaded, question: str, **arguments: Any) -> Inputs | None:
    """Returns the draft's own inputs, None where it uses the target's.

    The arguments are those of :func:`ask`.
    """
    return None if same_inputs(target, draft) else ask(draft, question, **arguments)


def same_inputs(target: Loaded, draft: Loaded) -> bool:
    """Whether the draft uses the target's inputs."""
    is_text_only = draft.processor is draft.tokenizer  # Such a draft reads the target's ids.
    return is_text_only or _processor_key(target.processor) == _processor_key(draft.processor)


def clip_arguments(clip: Clip) -> dict[str, Any]:
    """Returns a clip as keyword arguments of :func:`ask`; a single picture is an image."""
    if len(clip.frames) == 1 and clip.source_frames == 1:
        return {"images": list(clip.frames)}
    return {"clips": [clip]}


def batch_inputs(loaded: Loaded, requests: Sequence[Inputs]) -> Inputs:
    """Joins several requests' inputs into one batch, padded on the left as generation needs it.

    Raises OptionError where they cannot be in one batch.
    """
    if len(requests) == 1:
        return requests[0]
    pad_id = loaded.tokenizer.pad_token_id
    fill_values = {"input_ids": loaded.tokenizer.eos_token_id if pad_id is None else pad_id}
    # A request that has no mask gets the one that changes nothing.
    with_masks = [{"attention_mask": torch.ones_like(one["input_ids"]), **one} for one in requests]
    if any(DOCUMENT_MASK in one for one in with_masks):
        with_masks = [
            {DOCUMENT_MASK: torch.zeros_like(one["input_ids"]), **one} for one in with_masks
        ]
    longest = max(one["input_ids"].shape[1] for one in with_masks)
    if any(one.keys() != with_masks[0].keys() for one in with_masks):
        raise OptionError(f"{loaded.name} cannot read videos and pictures in one batch")

    def pad(one: Inputs, name: str) -> torch.Tensor:
        if one[name].shape != one["input_ids"].shape:  # Pixels do not have one entry per token.
            return one[name]
        missing = longest - one[name].shape[1]
        return torch.nn.functional.pad(one[name], (missing, 0), value=fill_values.get(name) or 0)

    try:
        return {name: torch.cat([pad(one, name) for one in with_masks]) for name in with_masks[0]}
    except (AttributeError, TypeError, RuntimeError) as error:
        raise OptionError(f"{loaded.name} cannot read these videos in one batch") from error


def question_inputs(
    name: str,
    processor: Any,
    question: str,
    clips: Sequence[Clip],
    images: Sequence[np.ndarray],
    history: Sequence[tuple[str, str]],
    parts: Sequence[Mapping[str, str]] | None = None,
    documents: Sequence[str] = (),
    last: Sequence[Mapping[str, str]] | None = None,
    system: str | None = None,
) -> Inputs:
    """Returns what :func:`ask` does, from a processor alone; pixels keep the processor's type.

    Raises OptionError if the question, a document or the system message is not text.
    """
    *media_parts, _ = _question_content("", clips, images, documents)  # All but the question.
    _question_content(question)  # This only raises an error if the question is not text.
    turns: list[dict[str, Any]] = []
    for earlier_question, answer in history:
        turns.append({"role": "user", "content": [{"type": "text", "text": earlier_question}]})
        turns.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
    turns.append({"role": "user", "content": [{"type": "text", "text": question}]})
    if last is not None:
        turns[-1]["content"] = [*last]
    # The media belong to the first question of the conversation.
    turns[0]["content"] = [*media_parts, *turns[0]["content"]] if parts is None else [*parts]
    if system is not None:
        turns.insert(0, system_turn(system))
    return conversation_inputs(name, processor, turns, clips, images)


def system_turn(text: str) -> dict[str, Any]:
    """Returns a system prompt as a message. Raises OptionError if it is not text."""
    if not isinstance(text, str):
        raise OptionError(f"a system prompt is text, not {type(text).__name__}")
    return {"role": "system", "content": [{"type": "text", "text": text}]}


def check_documents(documents: Any) -> None:
    """Raises OptionError unless these are a list of texts."""
    is_list = isinstance(documents, list | tuple)
    if not is_list or not all(isinstance(each, str) for each in documents):
        raise OptionError("documents are a list of texts, such as [text]")


def _question_content(
    question: str,
    clips: Sequence[Clip] = (),
    images: Sequence[np.ndarray] = (),
    documents: Sequence[str] = (),
) -> list[dict[str, str]]:
    """Returns the parts of a user's turn: its media and documents, then the question.

    Raises OptionError if the question or a document is not text.
    """
    check_documents(documents)
    if not isinstance(question, str):
        raise OptionError(f"a question is text, not {type(question).__name__}")
    media = [{"type": "video"} for _ in clips] + [{"type": "image"} for _ in images]
    media += [literal_text.document_part(text) for text in documents]
    return [*media, {"type": "text", "text": question}]


def conversation_inputs(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    clips: Sequence[Clip] = (),
    images: Sequence[np.ndarray] = (),
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    continues_last_turn: bool = False,
    opens_answer: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> Inputs:
    """Returns the model's inputs for a conversation in the form of chat templates.

    Each turn has a role and a content of parts: ``{"type": "text", "text": ...}``, the same of type
    "document" for text that views may prune, and ``{"type": "video"}`` or ``{"type": "image"}``
    in the place of the next of ``clips`` or ``images``.
    An assistant's turn may have ``tool_calls`` and ``reasoning_content`` as templates take them.
    The template describes the ``tools`` to the model. With ``continues_last_turn`` the last turn,
    the assistant's, is left unfinished. Otherwise the template begins the assistant's turn, if
    ``opens_answer`` is set. The template also gets the ``variables``, such as
    ``enable_thinking``.
    Raises ModelError or OptionError for what the model cannot read.
    """
    if not getattr(processor, "chat_template", None):
        raise ModelError(f"{name} has no chat template, so questions cannot be put to it")
    for part in (part for turn in turns for part in turn["content"]):
        check_text("the text", part.get("text", ""))
    is_text_only = getattr(processor, "tokenizer", None) is None
    if is_text_only and (clips or images):
        raise ModelError(f"{name} reads text only; give a vision-language --target")
    if clips and getattr(processor, "video_processor", None) is None:
        raise ModelError(f"{name} reads images and no videos; give it a picture")
    text, placeholders = _render(
        name, processor, turns, tools, continues_last_turn, opens_answer, variables
    )
    if is_text_only:
        inputs = processor(text, return_tensors="pt", add_special_tokens=False)
        return literal_text.replace_placeholders(name, inputs, placeholders)
    media: dict[str, Any] = {}
    clips = [_pad_clip(clip, processor) for clip in clips]
    if clips:
        media["videos"] = [clip.frames for clip in clips]
        media["video_metadata"] = [clip.metadata for clip in clips]
        media["do_sample_frames"] = False
        # MiniMax's processor leaves frames as they are, because its own sampling has resized them.
        # Ours are as decoded, so it is told to resize them.
        if getattr(type(processor), "videos_kwargs", {}).get("do_resize") is False:
            media["videos_kwargs"] = {"do_resize": processor.video_processor.do_resize}
    if images:
        # Some families count the images of each request, so they are in a list for the request.
        media["images"] = [list(images)]
    try:
        inputs = processor(text=[text], return_tensors="pt", **media)
    except (ValueError, TypeError) as error:
        if len({len(clip.frames) for clip in clips}) > 1:
            raise OptionError(
                f"{name} takes several videos only if they have as many frames: "
                "choose a number of frames (--num-frames)"
            ) from error
        raise OptionError(f"{name} cannot take this: {first_line(error)}") from error
    if "video_second_per_grid" in inputs:
        # The processor computes these seconds from a default frame rate, not from the clip's.
        frames_per_patch = int(processor.video_processor.temporal_patch_size)
        inputs["video_second_per_grid"] = torch.tensor(
            [frames_per_patch / clip.sampled_fps for clip in clips]
        )
    return literal_text.replace_placeholders(name, inputs, placeholders)


def _pad_clip(clip: Clip, processor: Any) -> Clip:
    """Repeats a clip's last frame where the clip is shorter than a patch.

    A processor may make each patch of several frames (``temporal_patch_size``). Some processors
    repeat the last frame themselves, and some (Qwen3-VL's) refuse such a clip.
    """
    missing = getattr(processor.video_processor, "temporal_patch_size", 1) - len(clip.frames)
    if missing <= 0:
        return clip
    frames = np.concatenate([clip.frames, clip.frames[-1:].repeat(missing, axis=0)])
    times = np.concatenate([clip.timestamps, clip.timestamps[-1:].repeat(missing)])
    return replace(clip, frames=frames, timestamps=times)


def template_ids(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    *,
    continues_last_turn: bool = False,
) -> list[int]:
    """Returns the ids of a conversation before images and videos are expanded into their tokens.

    The conversation is that of :func:`conversation_inputs`. The tokenizer may add special tokens
    around it, such as one at the beginning, also where ``conversation_inputs`` adds none.
    """
    text, placeholders = _render(name, processor, turns, (), continues_last_turn)
    tokenizer = getattr(processor, "tokenizer", processor)
    encoded = tokenizer(text, return_tensors="pt")
    inputs = literal_text.replace_placeholders(name, encoded, placeholders)
    return list(inputs["input_ids"][0].tolist())


def _render(
    name: str,
    processor: Any,
    turns: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    continues_last_turn: bool,
    opens_answer: bool = True,
    variables: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[str, literal_text.Placeholders | None]:
    """Returns a conversation as its template writes it, and its placeholders.

    A placeholder stands for a text that must be encoded literally. The second result has the ids of
    these texts, in order; None where there are none.
    """
    is_text_only = getattr(processor, "tokenizer", None) is None

    def render(turns: list[dict[str, Any]]) -> str:
        if is_text_only:
            turns = [
                {**turn, "content": "".join(part["text"] for part in turn["content"])}
                for turn in turns
            ]
        try:
            return str(
                processor.apply_chat_template(
                    turns,
                    add_generation_prompt=opens_answer and not continues_last_turn,
                    continue_final_message=continues_last_turn,
                    tokenize=False,
                    **({"tools": [*tools]} if tools else {}),
                    **variables,
                )
            )
        except TemplateError as error:
            raise OptionError(
                f"{name}'s chat template refuses this conversation: {first_line(error)}"
            ) from error
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            if not variables:
                raise
            names = ", ".join(variables)
            raise OptionError(
                f"{name}'s chat template cannot use these values of {names}: {first_line(error)}"
            ) from error

    return literal_text.render_conversation(name, processor, turns, render)


def _processor_key(processor: Any) -> str:
    """Returns a text that is the same for two processors if they make the same inputs."""
    is_text_only = getattr(processor, "tokenizer", None) is None
    settings = None if is_text_only else processor.to_dict()
    return repr((settings, processor.chat_template))
