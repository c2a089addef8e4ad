"""The options that several commands take, and what holds when one is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

QUESTION = "Describe the video in detail."
DEFAULT_METHOD = "auto"

Target = Annotated[
    str | None, typer.Option(help="Target: a checkpoint folder or hub id; else the embedded pair.")
]
Draft = Annotated[str | None, typer.Option(help="Draft: a checkpoint folder or hub id.")]
Method = Annotated[
    str | None,
    typer.Option(help=f"NAME/axis=value/..., see `saccade methods`; else {DEFAULT_METHOD}."),
]
Config = Annotated[
    Path | None, typer.Option(help="Take what is not given from this file of `calibrate`.")
]
Captioner = Annotated[
    str | None,
    typer.Option(help="Image-to-text model for views that read a caption: a folder or hub id."),
]
Prompt = Annotated[str, typer.Option(help="What to ask about the video.")]
Tokens = Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto spreads the target over the devices there are.")
]
Tp = Annotated[
    bool, typer.Option("--tp", help="Split the target over the processes torchrun started.")
]
Quantize = Annotated[
    str | None,
    typer.Option(help="Read the target in fewer bits: bnb-8bit, bnb-4bit or torchao-int8."),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with a checkpoint.")
]
Seed = Annotated[int | None, typer.Option(help="Names the noise of sampling.")]
Fps = Annotated[float | None, typer.Option(help="Frames to take per second.")]
NumFrames = Annotated[int | None, typer.Option(help="Frames to take in all, evenly in time.")]
Every = Annotated[bool, typer.Option("--every-frame", help="Take every frame.")]
Start = Annotated[float | None, typer.Option(help="Start at this second.")]
End = Annotated[float | None, typer.Option(help="End at this second.")]
Exact = Annotated[
    bool, typer.Option("--exact", help="Bit for bit plain decoding's answer in bf16 and fp16 too.")
]
Repeat = Annotated[int, typer.Option(min=1, help="Interleaved runs of each method.")]
