"""What a server is, as plain values, and how such values become one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from saccade.drafting.parallel import process
from saccade.drafting.planning import chained
from saccade.drafting.recipe import Recipe
from saccade.drafting.schedule import parallel
from saccade.engine.scheduler import Scheduler
from saccade.inputs import Loaded, load_pair
from saccade.inputs.media.guard import Guard
from saccade.methods import resolve
from saccade.serve.app import Engine, Service
from saccade.serve.desk import Desk
from saccade.serve.reading import Media, Pair, Reader


@dataclass(frozen=True)
class Settings:
    """Everything of a server but where it listens. Plain values: another machine may get them."""

    target: str = "shapes"
    draft: str | None = None
    method: str = "auto"
    names: tuple[str, ...] = ("shapes",)  # of the model; the first is told
    media: Media = Media()
    captioner: str | None = None  # for views that read a caption
    key: str | None = field(default=None, repr=False)  # in no log
    rows: int = 8  # requests worked on at once
    queue: int = 32  # requests that may wait beside them
    seconds: float = 600.0  # an answer may take
    choices: int = 8
    most_tokens: int = 2048  # of one answer
    body: int = 256 << 20  # bytes of a request
    exact: bool = False
    threads: int | None = None
    place: tuple[tuple[str, Any], ...] = ()  # of `load`: dtype, device, ...


def build(settings: Settings) -> tuple[Service, Callable[[], Engine]]:
    """The server, without models yet, and what loads them: both for `app`.

    Raises MethodError for a method there is not; what starts the models raises the rest.
    """
    recipe = chosen(settings)
    if recipe.schedule is parallel:
        process.prepare()  # the draft's process starts while the models load
    service = Service(
        settings.names, settings.key, settings.seconds, settings.choices, settings.body
    )
    return service, lambda: _engine(settings, recipe)


def chosen(settings: Settings) -> Recipe:
    """The method. Raises MethodError where there is none, or none of it that is exact."""
    recipe = resolve(settings.method)
    return chained(recipe) if settings.exact else recipe


def _engine(settings: Settings, recipe: Recipe) -> Engine:
    """What answers, with models of its own."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)  # the engine's thread takes over the number
    target, draft = load_pair(settings.target, settings.draft, **dict(settings.place))
    return engine(settings, recipe, target, draft)


def engine(settings: Settings, recipe: Recipe, target: Loaded, draft: Loaded | None) -> Engine:
    """What answers, with these models."""
    captioner = settings.captioner or ("shapes" if settings.target == "shapes" else None)
    guard = Guard(children=2)
    drafting = None if draft is None else draft.backbone
    requests = Scheduler(target.backbone, recipe, drafting, exact=settings.exact)
    return Engine(
        Desk(requests, rows=settings.rows, queue=settings.queue),
        Reader(
            Pair(target, draft, captioner),
            settings.media,
            most_tokens=settings.most_tokens,
            guard=guard,
        ),
        target.decode,
        guard.close,
    )
