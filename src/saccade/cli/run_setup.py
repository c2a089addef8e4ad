"""Turns the options of a command into what it works with: names, recipes, clips and models.

The commands of ``saccade`` call these functions. Heavy modules are imported inside them, so that a
wrong option is refused before PyTorch is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from saccade.cli.command_options import DEFAULT_METHOD, LoadOptions, ModelOptions
from saccade.cli.terminal import err, progress_bars, status
from saccade.core.errors import OptionError
from saccade.inputs import checkpoints, subjects
from saccade.inputs.checkpoints import EMBEDDED_TARGET

if TYPE_CHECKING:
    import numpy as np

    from saccade.drafting.recipe import Recipe
    from saccade.inputs import Pair
    from saccade.inputs.media import Clip, FrameSampling
    from saccade.methods.listing import Listing


class RunSettings(checkpoints.ModelsAndMethod):
    """Which models and method to run, from the command line, a config file, or the defaults."""

    def load_models(self, *, quiet: bool, tp: bool = False) -> Pair:
        """Loads the target and the draft; ``tp`` splits the target over processes."""
        return load_models(self.target, self.draft, quiet=quiet, tp=tp, **dict(self.load))

    def make_captioner(self, media: Sequence[Sequence[np.ndarray]]) -> Any:
        """Returns a captioner of the videos and images whose frames are given.

        Returns None if no captioner was named and the target has none of its own.
        """
        from saccade.inputs import captions

        return captions.lazy_captioner(
            self.captioner, self.target, media, dict(self.load)["device"]
        )


def resolve_settings(
    models: ModelOptions, loading: LoadOptions, method: str | None = None, *, tp: bool = False
) -> RunSettings:
    """Returns the settings of a run. ``tp`` says whether the target is split over processes.

    An option of the command line comes before one of the config file, which comes before the
    default. Raises MethodError or ModelError for a method or checkpoint that does not exist.
    """
    config: dict[str, Any] = {}
    if models.config is not None:
        from saccade.cli.config_file import read_config

        config = read_config(models.config)
    draft = models.draft
    # The draft in the file, and how its weights are rounded, belong to the target in the file. With
    # another target from the command line they are not used.
    has_target_of_file = models.target in (None, config.get("target", EMBEDDED_TARGET))
    if draft is None and has_target_of_file:
        draft = config.get("draft")
    load_arguments = loading.load_arguments
    if load_arguments["draft_quantize"] is None and has_target_of_file:
        load_arguments["draft_quantize"] = config.get("draft_quantize")
    target = config.get("target", EMBEDDED_TARGET) if models.target is None else models.target
    if method is None:
        method = config.get("method", _default_method(target, draft, tp=tp))
    settings = RunSettings(
        target=target,
        draft=draft,
        method=method,
        captioner=models.captioner,
        threads=loading.threads or config.get("threads"),
        load=tuple(load_arguments.items()),
    )
    check_methods([settings.method])
    check_checkpoints(settings.target, settings.draft)
    return settings


def _default_method(target: str, draft: str | None, *, tp: bool) -> str:
    if not tp:
        return DEFAULT_METHOD
    # DEFAULT_METHOD measures costs, which would differ between the processes. ``specvlm`` needs a
    # draft model, and the embedded target is always loaded with one. By ``std``
    # (Sparse-to-Dense) the target drafts for itself.
    has_draft = draft is not None or target == EMBEDDED_TARGET
    return "specvlm" if has_draft else "std"


def check_checkpoints(*names: str | None, weights: bool = True) -> None:
    """Raises ModelError for a missing checkpoint, before PyTorch is imported.

    ``weights`` says whether a local folder must have weights too, besides its config.
    """
    for name in (each for each in names if each is not None):
        with status(f"looking for {name}", quiet=False):
            checkpoints.check_checkpoint(name, weights=weights)


def list_methods() -> Listing:
    """Returns the names and settings of every method.

    They come from the stored listing, which needs no PyTorch, or from the methods' own files if the
    listing does not have them all.
    """
    from saccade.methods.listing import load_listing

    if (stored := load_listing()) is not None:
        return stored
    from saccade.methods import names

    return names.listing()


def check_methods(names: Iterable[str], extra_names: Sequence[str] = ()) -> None:
    """Raises MethodError for a name that is neither a method's nor one of ``extra_names``.

    A name may set axes, as in ``ours/drafter=model``. Whether an axis exists is checked here too.
    Its value is checked later, when the name is resolved.
    """
    listing = list_methods()
    extra: dict[str, dict[str, str]] = {name: {} for name in extra_names}
    listing = replace(listing, methods={**listing.methods, **extra})
    for name in names:
        listing.check(name)


def split_names(names: str) -> list[str]:
    """Returns the names between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def parse_method_names(text: str) -> tuple[str, ...]:
    """Returns the methods named between commas, each once; ``all`` stands for every method."""
    methods = list_methods().methods
    names: list[str] = []
    for name in split_names(text):
        names += methods if name == "all" else [name]
    if not names:
        raise OptionError("name a method: saccade methods")
    return tuple(dict.fromkeys(names))


def unnamed_methods(text: str, methods: Sequence[str]) -> frozenset[str]:
    """Returns those of ``methods`` that the text does not name.

    They are run because the text has ``all``.
    """
    return frozenset(methods) - frozenset(split_names(text))


def resolve_recipes(methods: Sequence[str], exact: bool = False) -> list[Recipe]:
    """Returns the recipe of each method that is named.

    If one of them drafts in a process of its own, that process is started here, so that it is ready
    when the models are loaded. With ``exact`` every draft is a chain, and MethodError is raised for
    a method that can only draft trees.
    """
    from saccade.drafting.parallel import process
    from saccade.drafting.recipe import as_chains
    from saccade.methods import resolve

    recipes = [resolve(method) for method in methods]
    if exact:
        recipes = [as_chains(recipe) for recipe in recipes]
    if any(recipe.drafts_beside_target for recipe in recipes):
        process.prepare()
    return recipes


def read_clip(
    video: str,
    sampling: FrameSampling,
    *,
    quiet: bool,
    warn: bool = True,
    target: str | None = None,
) -> Clip:
    """Reads a clip and prints its warnings.

    With ``warn`` False they are not printed. Where the ``target`` was trained on one kind of
    pictures only and the clip shows others, one of the warnings says so.
    """
    from saccade.inputs import media

    if not video.strip():
        raise OptionError(
            "name a video: a file, a folder of frames, or - for standard input; "
            "a text is named by --document, where a command takes one"
        )
    with progress_bars(quiet=quiet) as tell:
        tell("opening the video")
        clip = media.read(video, sampling, progress=partial(tell, "decoding frames"))
    if target is not None:
        from saccade.inputs.training_domain import read_training_domain, warn_outside_domain

        clip = warn_outside_domain(clip, read_training_domain(target))
    for warning in clip.warnings if warn else ():
        err.print(warning, style="yellow", markup=False, soft_wrap=True)
    return clip


def warn_about_training(target: str) -> None:
    """Prints a warning where the target was trained on one kind of pictures only."""
    from saccade.inputs.training_domain import read_training_domain

    if (domain := read_training_domain(target)) is not None:
        err.print(domain.warning, style="yellow", markup=False, soft_wrap=True)


def load_models(target: str, draft: str | None, *, quiet: bool, **options: Any) -> Pair:
    """Loads both models; ``options`` are those of :func:`saccade.inputs.load_pair`."""
    from saccade.inputs import Pair, load_pair

    with status("loading the models", quiet=quiet):
        return Pair(*load_pair(target, draft, **options))


def read_subject(
    video: str | None,
    documents: Sequence[Path] | None,
    sampling: FrameSampling,
    *,
    quiet: bool,
    warn: bool = True,
    target: str,
) -> subjects.Subject:
    """Reads what a question is about: documents and a video, of which one may be missing.

    Raises OptionError where neither is named.
    """
    texts = tuple(subjects.read_document(file) for file in documents or ())
    if video is not None or not texts:
        # With an empty name, this raises an error that names both ways to give a subject.
        clip = read_clip(video or "", sampling, quiet=quiet, warn=warn, target=target)
        return subjects.Subject(clip, texts)
    if warn:
        warn_about_training(target)
    return subjects.Subject(clip=None, documents=texts)
