"""From options to what a command works with: names, recipes, clips, models, inputs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.cli.options import DEFAULT_METHOD, LoadOptions, ModelOptions
from saccade.cli.terminal import err, status, steps
from saccade.core.errors import OptionError
from saccade.inputs import checkpoints, texts

if TYPE_CHECKING:
    import numpy as np

    from saccade.drafting.recipe import Recipe
    from saccade.inputs import Pair
    from saccade.inputs.media import Clip, FrameSampling
    from saccade.methods.listing import Listing


class Known(checkpoints.Answering):
    """What to run, from the command line, a configuration file, or our defaults, in that order."""

    def models(self, *, quiet: bool, tp: bool = False) -> Pair:
        return models(self.target, self.draft, quiet=quiet, tp=tp, **dict(self.load))

    def captions(self, media: Sequence[Sequence[np.ndarray]]) -> Any:
        """Who puts the frames of each video and image into words; None where nobody does."""
        from saccade.inputs import captions

        return captions.chosen(self.captioner, self.target, media, dict(self.load)["device"])


def known(given: ModelOptions, how: LoadOptions, method: str | None = None) -> Known:
    found: dict[str, Any] = {}
    if given.config is not None:
        from saccade.cli.config import read

        found = read(given.config)
    # a file's draft goes with its target
    same = given.target is None or given.target == found.get("target")
    told = Known(
        found.get("target", "shapes") if given.target is None else given.target,
        (found.get("draft") if same else None) if given.draft is None else given.draft,
        found.get("method", DEFAULT_METHOD) if method is None else method,
        given.captioner,
        how.threads or found.get("threads"),
        tuple(how.load.items()),
    )
    check_methods([told.method])
    look_for(told.target, told.draft)
    return told


def look_for(*names: str | None, weights: bool = True) -> None:
    """Raises ModelError for a checkpoint that is not there, before PyTorch is started."""
    for name in (each for each in names if each is not None):
        with status(f"looking for {name}", quiet=False):
            checkpoints.check(name, weights=weights)


def listing() -> Listing:
    """Every method there is: as data where our own are all, else as they are brought."""
    from saccade.methods.listing import load_listing

    if (stored := load_listing()) is not None:
        return stored
    from saccade.methods import names

    return names.listing()


def check_methods(names: Iterable[str], beside: Sequence[str] = ()) -> None:
    """Raises MethodError for a name that is neither a method's nor among those ``beside``; the
    values of its axes are read when it is resolved."""
    known = listing()
    known = replace(known, methods={**known.methods, **{name: {} for name in beside}})
    for name in names:
        known.check(name)


def split(names: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def method_names(given: str) -> tuple[str, ...]:
    """Methods named between commas, each once; ``all`` is every one of ours."""
    known = listing().methods
    every = [each for name in split(given) for each in (known if name == "all" else [name])]
    if not every:
        raise OptionError("name a method: saccade methods")
    return tuple(dict.fromkeys(every))


def recipes(methods: Sequence[str], exact: bool = False) -> list[Recipe]:
    """Recipes by name; a process for a draft in parallel starts while the models load.

    Raises MethodError for a method of trees where ``exact`` is asked for.
    """
    from saccade.drafting.parallel import process
    from saccade.drafting.recipe import chained
    from saccade.drafting.schedule import parallel
    from saccade.methods import resolve

    recipes = [resolve(method) for method in methods]
    if exact:
        recipes = [chained(recipe) for recipe in recipes]
    if any(recipe.schedule is parallel for recipe in recipes):
        process.prepare()
    return recipes


def read(
    video: str,
    sampling: FrameSampling,
    *,
    quiet: bool,
    warn: bool = True,
    target: str | None = None,
) -> Clip:
    """The clip, its warnings told; where ``target`` is the embedded pair, also that it knows
    nothing of such a clip."""
    from saccade.inputs import media

    if not video.strip():
        raise OptionError(
            "name a video: a file, a folder of frames, or - for standard input; "
            "a text is named by --document, where a command takes one"
        )
    with steps(quiet=quiet) as tell:
        tell("opening the video")
        clip = media.read(video, sampling, progress=partial(tell, "decoding frames"))
    if target is not None:
        from saccade.world import drawn_world

        clip = drawn_world.warn_if_foreign(clip, target)
    for warning in clip.warnings if warn else ():
        err.print(warning, style="yellow", markup=False, soft_wrap=True)
    return clip


def warn_of_embedded(target: str) -> None:
    """Says what the embedded pair knows, before it answers about media nobody has seen yet."""
    from saccade.world import drawn_world

    if checkpoints.embedded(target):
        err.print(drawn_world.FOREIGN_CLIP_WARNING, style="yellow", markup=False, soft_wrap=True)


def models(target: str, draft: str | None, *, quiet: bool, **how: Any) -> Pair:
    """Both models, loaded as :func:`saccade.inputs.load_pair` does by the settings given."""
    from saccade.inputs import Pair, load_pair

    with status("loading the models", quiet=quiet):
        return Pair(*load_pair(target, draft, **how))


def about(
    video: str | None,
    documents: Sequence[Path] | None,
    sampling: FrameSampling,
    *,
    quiet: bool,
    warn: bool = True,
    target: str,
) -> texts.About:
    """What a command was given: texts are read first, a video only where one is named."""
    found = tuple(texts.document(file) for file in documents or ())
    if video is not None or not found:
        clip = read(video or "", sampling, quiet=quiet, warn=warn, target=target)
        return texts.About(clip, found)
    if warn:
        warn_of_embedded(target)
    return texts.About(None, found)
