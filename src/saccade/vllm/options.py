"""What an operator may choose about the draft, from vLLM's config or the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from saccade.core.errors import OptionError
from saccade.core.protocols import View
from saccade.methods.names import resolve

PREFIX = "SACCADE_VLLM_"
LOOKUP = "lookup"
AUTO = "auto"


@dataclass(frozen=True)
class DraftOptions:
    """``--additional-config '{"saccade": {...}}'``, or ``SACCADE_VLLM_NAME`` for each."""

    draft: str  # a checkpoint, or "lookup": what followed the same words earlier in the text
    view: str = "scattered"
    keep: float | None = None  # the share of visual tokens; None leaves it to the view
    length: int | None = None  # of every draft; None ("auto") drafts as long as it pays
    memory: float = 1.0  # GiB for the caches of all requests' drafts

    def views(self) -> View:
        """The view named. Raises MethodError or OptionError where vLLM's target cannot serve it."""
        kept = "" if self.keep is None else f"/keep={self.keep:g}"
        view = resolve(f"specvlm/view={self.view}{kept}").view
        if view.own_keys or view.needs_costs or not view.subset or len(view.parts) > 1:
            raise OptionError(
                f"view={self.view} does not work inside vLLM: choose one that keeps a part of the "
                "video, for instance scattered, uniform, frames, full or specvlm"
            )
        return view


def read(config: Mapping[str, Any], environment: Mapping[str, str], most: int) -> DraftOptions:
    """The options given; the config's win over the environment's.

    ``most`` is ``num_speculative_tokens``. Raises OptionError for a name or value that is unknown.
    """
    told: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    told |= config
    known = [field.name for field in fields(DraftOptions)]
    for name in told:
        if name not in known:
            raise OptionError(f"unknown option {name!r} for the draft; known: {', '.join(known)}")
    if not told.get("draft"):
        raise OptionError(
            "no draft is named: set SACCADE_VLLM_DRAFT to a checkpoint, or to lookup for none"
        )
    length = told.get("length", AUTO)
    return DraftOptions(
        draft=str(told["draft"]),
        view=str(told.get("view", DraftOptions.view)),
        keep=_number("keep", told["keep"], 1.0) if "keep" in told else None,
        length=None if length == AUTO else _whole("length", length, most),
        memory=_number("memory", told.get("memory", DraftOptions.memory), math.inf),
    )


def _number(name: str, value: Any, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= most or math.isinf(number):
        upto = "" if math.isinf(most) else f" and up to {most:g}"
        raise OptionError(f"{name}={value} is not a number above 0{upto}")
    return number


def _whole(name: str, value: Any, most: int) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise OptionError(
            f"{name}={value}: write auto, or a whole number up to num_speculative_tokens={most}"
        )
    return int(text)
