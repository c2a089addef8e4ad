"""The options that several commands take, alone and in groups, and their defaults.

A command takes a group as one parameter, annotated with the group's class. The decorator
`with_option_groups` makes an option of each of its fields.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import wraps
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer

from saccade.cli.terminal import Threads
from saccade.core.errors import OptionError
from saccade.inputs.subjects import is_media_name

if TYPE_CHECKING:
    from saccade.inputs.media import FrameSampling

QUESTION = "Describe the video in detail."
DEFAULT_METHOD = "auto"
URL = re.compile(r"\w+://")

Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        help=f"NAME/axis=value/..., see `saccade methods`; else {DEFAULT_METHOD}.",
    ),
]
Target = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", help="Target: a checkpoint folder or hub id; else the embedded pair."
    ),
]
Draft = Annotated[
    str | None, typer.Option("--draft", "-d", help="Draft: a checkpoint folder or hub id.")
]
Video = Annotated[
    str | None, typer.Argument(help="A video, GIF, image or folder of frames.", show_default=False)
]
Documents = Annotated[
    list[Path] | None,
    typer.Option(
        "--document", help="A file of long text beside the video, or instead (repeatable)."
    ),
]
Prompt = Annotated[
    str, typer.Option("--prompt", "-p", help="What to ask; the same as the QUESTION argument.")
]
Question = Annotated[
    str | None, typer.Argument(help=f"What to ask about it; else '{QUESTION}'", show_default=False)
]
Tokens = Annotated[
    int, typer.Option("--max-new-tokens", "-n", min=1, help="The longest answer, in tokens.")
]
Tp = Annotated[
    bool, typer.Option("--tp", help="Split the target over the processes torchrun started.")
]
Fps = Annotated[float | None, typer.Option(help="Frames to take per second.")]
NumFrames = Annotated[int | None, typer.Option(help="Frames to take in all, evenly in time.")]
Seed = Annotated[int | None, typer.Option(help="Seed of sampling; by default a random one.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Answer bit for bit as `ar --exact` does, in any dtype.")
]
Repeat = Annotated[int, typer.Option(min=1, help="Interleaved runs of each method.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
DraftDevice = Annotated[
    str | None, typer.Option(help="Where the draft is, if not beside the target: cuda:1, ...")
]
DraftQuantize = Annotated[
    str | None,
    typer.Option(
        help="Round the draft's weights to int8, int4 or fp8; without a draft, a copy of the "
        "target's, which then drafts."
    ),
]
Quantize = Annotated[
    str | None,
    typer.Option(help="Read the target in fewer bits: bnb-8bit, bnb-4bit or torchao-int8."),
]
Positions = Annotated[
    Literal["auto", "library", "trained"],
    typer.Option(
        help="Positions of the text after a Qwen2.5-VL video: as in transformers (library), as in "
        "training and vLLM (trained), or by the checkpoint (auto)."
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
]
KEYWORD = Parameter.KEYWORD_ONLY


def check_output_path(path: Path | None) -> Path | None:
    """Returns the path of a file to be written. Raises OptionError where its folder is missing."""
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"{path} cannot be written: there is no folder {path.parent}")
    return path


Trace = Annotated[
    Path | None,
    typer.Option(
        help="Write the rounds here (JSON lines), a file a method.", callback=check_output_path
    ),
]


@dataclass(frozen=True)
class ModelOptions:
    """Which models answer. Options that are left out come from the config file, if there is one."""

    target: Target = None
    draft: Draft = None
    config: Annotated[
        Path | None,
        typer.Option(help="A file written by `calibrate`, for options that are not given."),
    ] = None
    captioner: Annotated[
        str | None,
        typer.Option(help="Image-to-text model for views that read a caption: a folder or hub id."),
    ] = None


@dataclass(frozen=True)
class DeviceOptions:
    """The device, number type and threads with which models run."""

    threads: Threads = None
    dtype: Dtype = None
    device: Device = None

    @property
    def load_arguments(self) -> dict[str, Any]:
        """The fields that are arguments of :func:`saccade.inputs.load_pair`."""
        return {name: value for name, value in asdict(self).items() if name != "threads"}


@dataclass(frozen=True)
class LoadOptions(DeviceOptions):
    """How and where models are loaded, including models that do not fit one device."""

    device_map: Annotated[
        str | None, typer.Option(help="auto spreads the target over the devices there are.")
    ] = None
    draft_device: DraftDevice = None
    draft_quantize: DraftQuantize = None
    quantize: Quantize = None
    trust_remote_code: Trust = False
    positions: Positions = "auto"


@dataclass(frozen=True)
class FrameOptions:
    """Which frames of a video to take."""

    fps: Fps = None
    num_frames: NumFrames = None
    every_frame: Annotated[bool, typer.Option("--every-frame", help="Take every frame.")] = False

    def sampling(self) -> FrameSampling:
        from saccade.inputs.media import FrameSampling

        return FrameSampling(self.fps, self.num_frames, every=self.every_frame)


@dataclass(frozen=True)
class ClipOptions(FrameOptions):
    """Which frames to take, and from which part of a video."""

    start: Annotated[float | None, typer.Option(help="Start at this second.")] = None
    end: Annotated[float | None, typer.Option(help="End at this second.")] = None

    def sampling(self) -> FrameSampling:
        return replace(super().sampling(), start=self.start, end=self.end)


@dataclass(frozen=True)
class SamplingOptions:
    """How an answer's tokens are sampled, and where it stops."""

    temperature: Annotated[float, typer.Option(min=0, help="0 decodes greedily.")] = 0.0
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text (repeatable).")] = None

    def generation_settings(self) -> dict[str, Any]:
        """Returns transformers' generation settings. Raises OptionError for a conflict."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.temperature == 0:
            if self.top_p is not None or self.top_k is not None:
                raise OptionError("--top-p and --top-k sample, so they need --temperature above 0")
            sampling = {}
        stops = {"stop_strings": self.stop} if self.stop else {}
        return {"do_sample": self.temperature > 0, **sampling, **stops}


def split_arguments(
    video: str | None, question: str | None, has_document: bool
) -> tuple[str | None, str | None]:
    """Returns the video and the question of a command's arguments.

    With a document, a single argument that names no file is the question.
    """
    if video is None or question is not None or not has_document:
        return video, question
    names_a_file = (
        video.strip() in ("", "-")  # "-" is standard input.
        or URL.match(video)
        or is_media_name(video)
        or os.path.exists(video)
    )
    return (video, None) if names_a_file else (None, video)


def resolve_question(question: str | None, prompt: str) -> str:
    """Returns the question, which is the argument after the video or that of --prompt.

    ``prompt`` is the default question where --prompt was not given. Raises OptionError where both
    were given, or where the argument is a file or folder that exists.
    """
    if question is not None and prompt != QUESTION:
        raise OptionError("give the question after the video or by --prompt, not both")
    if question is not None and os.path.exists(question):
        raise OptionError(
            f"{question} is a file or folder, and one video is answered about at a time; if it is "
            "the question, use --prompt"
        )
    return prompt if question is None else question


def with_option_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Wraps a command so that typer sees an option for each field of its groups of options.

    A group is a parameter whose annotation is a dataclass. An option has the annotation and the
    default of its field. If the command is called from Python, options that are left out have
    their defaults.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    options: list[Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if (group := groups.get(name)) is None:
            options.append(parameter.replace(kind=KEYWORD, annotation=hints[name]))
            continue
        field_hints = get_type_hints(group, include_extras=True)
        options += [
            Parameter(
                field.name, KEYWORD, default=field.default, annotation=field_hints[field.name]
            )
            for field in fields(group)
        ]

    @wraps(command)
    def wrapper(**arguments: Any) -> None:
        filled_groups = {}
        for group_name, group in groups.items():
            names = [field.name for field in fields(group) if field.name in arguments]
            group_arguments = {name: arguments.pop(name) for name in names}
            filled_groups[group_name] = group(**group_arguments)
        command(**arguments, **filled_groups)

    wrapper.__annotations__ = {option.name: option.annotation for option in options}
    vars(wrapper)["__signature__"] = inspect.Signature(options)
    return wrapper
