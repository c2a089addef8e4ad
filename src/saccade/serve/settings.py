"""What a server is to be, as plain values: another machine may get them."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.inputs.checkpoints import Answering
from saccade.inputs.media import FrameSampling, Limits
from saccade.inputs.media.fetch import Sources


@dataclass(frozen=True)
class Media:
    """What clients may send, and how it is looked at."""

    sources: Sources = Sources()
    limits: Limits = Limits()
    sampling: FrameSampling = FrameSampling()
    most: int = 16  # of one request
    options: bool = False  # whether a request may choose its frames


@dataclass(frozen=True)
class Settings(Answering):
    """Everything of a server but where it listens."""

    names: tuple[str, ...] = ("shapes",)  # of the model; the first is told
    media: Media = Media()
    key: str | None = field(default=None, repr=False)  # in no log
    cors: tuple[str, ...] = ()  # origins whose pages may ask
    rows: int = 8  # requests worked on at once
    queue: int = 32  # requests that may wait beside them
    seconds: float = 600.0  # an answer may take
    choices: int = 8
    most_tokens: int = 2048  # of one answer
    body: int = 256 << 20  # bytes of a request
    prefix_cache: int = 2 << 30  # bytes of media and prompts kept for later requests; 0 keeps none
    exact: bool = False
