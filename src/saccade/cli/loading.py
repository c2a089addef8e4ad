"""From options to what a command works with: names, recipes, clips, models, inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.cli.options import DEFAULT_METHOD
from saccade.cli.terminal import err, status, steps

if TYPE_CHECKING:
    import numpy as np

    from saccade.core.prompt import Inputs
    from saccade.drafting.recipe import Recipe
    from saccade.inputs import Loaded
    from saccade.inputs.media import Clip, Sampling


@dataclass(frozen=True)
class Models:
    """What a command works with."""

    target: Loaded
    draft: Loaded | None


@dataclass(frozen=True)
class Place:
    """How and where to load a pair."""

    dtype: str | None = None
    device: str | None = None
    device_map: str | None = None
    quantize: str | None = None
    trust_remote_code: bool = False
    tp: bool = False


@dataclass(frozen=True)
class Known:
    """What to run, from the command line, a configuration file, or our defaults, in that order."""

    target: str
    draft: str | None
    method: str
    threads: int | None


def known(config: Path | None, target: str | None, draft: str | None, method: str | None) -> Known:
    found: dict[str, Any] = {}
    if config is not None:
        from saccade.bench.calibrate import read

        found = read(config)
    same = target is None or target == found.get("target")  # a file's draft goes with its target
    return Known(
        target or found.get("target", "shapes"),
        draft or (found.get("draft") if same else None),
        method or found.get("method", DEFAULT_METHOD),
        found.get("threads"),
    )


def recipes(methods: Sequence[str], exact: bool = False) -> list[Recipe]:
    """Recipes by name; a process for a draft in parallel starts while the models load.

    Raises MethodError for a method of trees where ``exact`` is asked for.
    """
    from saccade.drafting import worker
    from saccade.drafting.schedule import parallel
    from saccade.methods import resolve

    recipes = [resolve(method) for method in methods]
    if exact:
        recipes = [recipe.chained() for recipe in recipes]
    if any(recipe.schedule is parallel for recipe in recipes):
        worker.prepare()
    return recipes


def split(recipe: Recipe, exact: bool) -> Recipe:
    """A recipe for a target split over processes. Raises where it cannot be."""
    from saccade.core.errors import OptionError

    if exact:
        raise OptionError("--exact adds in one order, which a split target does not: leave out one")
    return recipe.split()


def captioner(name: str | None, target: str, clip: Clip, device: str | None) -> Any:
    """:func:`captioner_of` a clip's frames."""
    return captioner_of(name, target, list(clip.frames), device)


def captioner_of(
    name: str | None, target: str, frames: Sequence[np.ndarray], device: str | None
) -> Any:
    """A function from inputs to captions, loaded only if it is called; None without a model."""
    if name is None and target != "shapes":
        return None
    from saccade.inputs import captions

    return captions.later(name or captions.SHAPES, frames, device)


def sampling(
    fps: float | None, frames: int | None, every: bool, start: float | None, end: float | None
) -> Sampling:
    from saccade.inputs.media import Sampling

    return Sampling(fps=fps, num_frames=frames, every=every, start=start, end=end)


def read(video: str, sampling: Sampling, *, quiet: bool, warn: bool = True) -> Clip:
    from saccade.inputs import media

    with steps(quiet=quiet) as tell:
        tell("opening the video")
        clip = media.read(video, sampling, progress=partial(tell, "decoding frames"))
    for warning in clip.warnings if warn else ():
        err.print(warning, style="yellow", markup=False)
    return clip


def models(target: str, draft: str | None, place: Place, *, quiet: bool) -> Models:
    """Both models. The target may be spread over devices or quantised, the draft is on one."""
    from saccade.inputs import load_pair

    with status("loading the models", quiet=quiet):
        return Models(*load_pair(target, draft, **asdict(place)))


def shown(clip: Clip) -> dict[str, Any]:
    from saccade import inputs as models

    return models.shown(clip)


def inputs(
    target: Loaded, clip: Clip, prompt: str, history: Sequence[tuple[str, str]] = ()
) -> Inputs:
    from saccade.inputs import ask

    return ask(target, prompt, **shown(clip), history=history)


def draft_inputs(
    models: Models, clip: Clip, prompt: str, history: Sequence[tuple[str, str]] = ()
) -> Inputs | None:
    """The draft's own inputs; None where there is no draft or the target's serve it too."""
    from saccade.inputs import ask_draft

    if models.draft is None:
        return None
    return ask_draft(models.target, models.draft, prompt, **shown(clip), history=history)
