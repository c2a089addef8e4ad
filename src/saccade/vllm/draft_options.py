"""Reads the options of the draft that Saccade runs inside vLLM, from vLLM's config or from
environment variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from saccade.core.capabilities import Capability
from saccade.core.errors import OptionError
from saccade.core.protocols import View
from saccade.methods.names import resolve

ENVIRONMENT_PREFIX = "SACCADE_VLLM_"
LOOKUP_DRAFT = "lookup"
AUTO_LENGTH = "auto"


@dataclass(frozen=True)
class DraftOptions:
    """The options of the draft inside vLLM.

    They are given by ``--additional-config '{"saccade": {...}}'``, or each by an environment
    variable: ``SACCADE_VLLM_VIEW`` sets ``view``.
    """

    # A checkpoint, or "lookup". A lookup drafts the tokens that followed an earlier occurrence of
    # the latest ones.
    draft: str
    view: str = "scattered"  # The name of the view that chooses what the draft sees of a video.
    # The share of visual tokens that the draft sees. None leaves it to the view.
    keep: float | None = None
    # How many tokens every draft has. None ("auto") drafts as far as it pays.
    length: int | None = None
    memory: float = 1.0  # In GiB, for the caches of all requests' drafts.

    def resolve_view(self) -> View:
        """Returns the view. Raises MethodError or OptionError where it cannot work inside vLLM."""
        keep = "" if self.keep is None else f"/keep={self.keep:g}"
        # A view is looked up as a part of a method. The other parts of this method are not used.
        view = resolve(f"specvlm/view={self.view}{keep}").view
        # Inside vLLM the draft can only leave out rows of the prompt. Of all that a view may need,
        # only the target's attention is recorded there (``attention_watch``).
        chooses_rows = Capability.PROMPT_ROWS in view.offers
        has_what_it_needs = view.needs <= {Capability.ATTENTION}
        if not chooses_rows or not has_what_it_needs:
            raise OptionError(
                f"view={self.view} does not work inside vLLM: choose one that keeps a part of the "
                "video, for instance scattered, uniform, frames, full or specvlm"
            )
        return view


def read_options(config: Any, environment: Mapping[str, str], max_length: int) -> DraftOptions:
    """Returns the options; those of the config win over those of the environment.

    ``config`` is the object that ``--additional-config`` has under "saccade". ``max_length`` is
    ``num_speculative_tokens``. Raises OptionError for an unknown option, for a number out of range
    and where no draft is named. The view's name is checked by :meth:`DraftOptions.resolve_view`.
    """
    values: dict[str, Any] = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    if not isinstance(config, Mapping):
        raise OptionError(
            f"saccade in --additional-config is {config!r}, and not an object such as "
            '{"draft": "lookup"}'
        )
    # An option that is null in the config is one that the config does not set.
    values |= {name: value for name, value in config.items() if value is not None}
    names = [field.name for field in fields(DraftOptions)]
    for name in {**values, **config}:
        if name not in names:
            raise OptionError(f"unknown option {name!r} for the draft; known: {', '.join(names)}")
    if not values.get("draft"):
        raise OptionError(
            "no draft is named: set SACCADE_VLLM_DRAFT to a checkpoint, or to lookup, which needs "
            "no draft model"
        )
    length = values.get("length", AUTO_LENGTH)
    return DraftOptions(
        draft=str(values["draft"]),
        view=str(values.get("view", DraftOptions.view)),
        keep=_parse_number("keep", values["keep"], 1.0) if "keep" in values else None,
        length=None if length == AUTO_LENGTH else _parse_count("length", length, max_length),
        memory=_parse_number("memory", values.get("memory", DraftOptions.memory), math.inf),
    )


def _parse_number(name: str, value: Any, maximum: float) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not 0 < number <= maximum or math.isinf(number):
        bound = "" if math.isinf(maximum) else f" and up to {maximum:g}"
        raise OptionError(f"{name}={value} is not a number above 0{bound}")
    return number


def _parse_count(name: str, value: Any, maximum: int) -> int:
    text = str(value)
    if not text.isdecimal() or not 1 <= int(text) <= maximum:
        raise OptionError(
            f"{name}={value}: write auto, or a whole number up to num_speculative_tokens={maximum}"
        )
    return int(text)
