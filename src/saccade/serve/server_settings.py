"""The settings of a server, as plain values, so that they can be sent to another machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from saccade.inputs.checkpoints import EMBEDDED_TARGET, ModelsAndMethod
from saccade.inputs.media import FrameSampling, Limits
from saccade.inputs.media.fetch import Sources


@dataclass(frozen=True)
class MediaSettings:
    """What media clients may send, and how frames are chosen from them."""

    sources: Sources = Sources()
    limits: Limits = Limits()
    sampling: FrameSampling = FrameSampling()
    max_items: int = 16  # Images and videos of one request.
    clients_may_choose_frames: bool = False


@dataclass(frozen=True)
class ServerSettings(ModelsAndMethod):
    """All settings of a server but the address on which it listens."""

    model_names: tuple[str, ...] = (
        EMBEDDED_TARGET,
    )  # What requests call the model; errors name the first.
    media: MediaSettings = MediaSettings()
    api_key: str | None = field(default=None, repr=False)  # It must not appear in a log.
    cors_origins: tuple[str, ...] = ()  # Origins whose pages may send requests.
    max_running: int = 8  # Requests that are decoded at once.
    max_waiting: int = 32  # Requests that may wait beside them.
    timeout_seconds: float = 600.0  # How long an answer may take.
    max_choices: int = 8  # The largest ``n``.
    max_answer_tokens: int = 2048  # The most that a request may ask for, and the default.
    max_body_bytes: int = 256 << 20
    prefix_cache_bytes: int = 2 << 30  # For media and prompts of earlier requests; 0 keeps none.
    # Whether drafted answers equal those of plain decoding (the method ``ar``) bit for bit, also in
    # bf16 and fp16. Plain decoding must run with ``exact`` too. Every draft is then a chain.
    exact: bool = False
