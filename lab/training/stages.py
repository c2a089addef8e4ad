"""Defines the stages of training: depths, seconds of CPU time, clips and learning rates.

`train.py` says what each stage of the embedded pair is for, and trains them. A probe is a head that
learns to predict from each visual token what the token shows. Its loss trains the vision tower.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from saccade.world.train_draft.samples import Canvas

TARGET_LAYERS, MEDIUM_LAYERS, DRAFT_LAYERS = 20, 6, 2
Shares = list[tuple[Canvas, float]]
"""Sizes of clips or pictures, each with its share of the batches. Shares need not sum to 1."""


def _video_shares(*sizes: tuple[int, int, int, float]) -> Shares:
    """Returns videos with their shares. A size is (frames, height, width, share), in pixels."""
    return [(Canvas("video", t, h, w), share) for t, h, w, share in sizes]


def _image_shares(*sides: int, share: float) -> Shares:
    """Returns square pictures by their sides in pixels, which together have the share ``share``.

    Half of it are single pictures, and half are pairs of pictures that differ ("diff").
    """
    images = [(Canvas("image", 1, s, s), 0.5 * share / len(sides)) for s in sides]
    return images + [(Canvas("diff", 1, s, s), 0.5 * share / len(sides)) for s in sides]


SHORT = _video_shares(
    (8, 112, 112, 0.40),
    (12, 112, 112, 0.12),
    (16, 112, 112, 0.12),
    (8, 112, 168, 0.09),
    (4, 168, 168, 0.09),
    (8, 140, 140, 0.09),
    (6, 168, 140, 0.09),
)
MIDDLE = _video_shares(
    (32, 112, 112, 0.3),
    (16, 168, 168, 0.1),
    (8, 224, 224, 0.2),
    (16, 140, 140, 0.1),
    (24, 112, 140, 0.05),
    (4, 280, 280, 0.05),
    (10, 196, 196, 0.1),
    (4, 224, 224, 0.1),
)
BIG = _video_shares((4, 336, 336, 0.5), (4, 448, 448, 0.3), (8, 336, 280, 0.2))
LONG = _video_shares(
    (64, 112, 112, 0.15),
    (16, 224, 224, 0.15),
    (32, 168, 168, 0.1),
    (64, 168, 168, 0.1),
    (32, 224, 224, 0.1),
    (16, 336, 336, 0.05),
    (8, 448, 448, 0.05),
    (64, 224, 224, 0.25),
    (128, 112, 112, 0.05),
)
HUGE = _video_shares((128, 224, 224, 0.7), (32, 448, 448, 0.3))


def _scale(shares: Shares, by: float) -> Shares:
    return [(canvas, share * by) for canvas, share in shares]


def _rising_objects(*steps: tuple[float, int]) -> Callable[[float], int]:
    """Returns a function from a stage's progress (0 to 1) to the most objects of a scene.

    A step is (progress until which it holds, most objects). After the last step there may be 6.
    """
    return lambda progress: next((most for until, most in steps if progress < until), 6)


@dataclass(frozen=True)
class Stage:
    """What one stage trains, and on what."""

    name: Literal[
        "probe",
        "small",
        "medium",
        "large",
        "early",
        "naive",
        "draft",
        "words",
        "sees",
        "longer",
        "tower",
        "decoder",
        "hybrid",
    ]
    layers: int  # Of the language model.
    cpu_s: float  # The budget in CPU seconds.
    lr: float  # The learning rate.
    canvases: Shares
    tokens: int = 3000  # About how many tokens a batch has.
    vision: bool = True  # Whether the vision tower trains.
    probe: float = 0.3  # The weight of the probes' loss; 0: without probes.
    # Returns the most objects that a scene may have, by the stage's progress (0 to 1).
    objects: Callable[[float], int] = lambda progress: 6
    drops: bool = False  # Whether visual tokens are dropped, as the views of a draft do.
    # Conversations take these tasks equally often. None stands for a task that is drawn, in a video
    # with ``VIDEO_TASK_WEIGHTS``.
    tasks: tuple[str | None, ...] = (None,)


STAGES = (  # The stages of the embedded pair (`train.py`).
    Stage(
        name="probe",
        layers=DRAFT_LAYERS,
        cpu_s=360,
        lr=3e-3,
        canvases=SHORT + _image_shares(112, 224, share=0.1),
        tokens=4000,
        probe=1.0,
    ),
    Stage(
        name="small",
        layers=DRAFT_LAYERS,
        cpu_s=720,
        lr=3e-3,
        canvases=SHORT + _image_shares(112, 168, 224, share=0.15),
        objects=_rising_objects((0.15, 3), (0.3, 4)),
    ),
    Stage(
        name="medium",
        layers=MEDIUM_LAYERS,
        cpu_s=9000,
        lr=5e-4,
        canvases=_scale(SHORT, 0.15)
        + _scale(MIDDLE, 0.4)
        + _scale(LONG, 0.27)
        + _scale(BIG, 0.08)
        + _image_shares(112, 168, 224, 336, 448, share=0.1),
        tokens=3500,
    ),
    Stage(
        name="large",
        layers=TARGET_LAYERS,
        cpu_s=3600,
        lr=3e-4,
        canvases=_scale(SHORT, 0.1)
        + _scale(MIDDLE, 0.4)
        + _scale(LONG, 0.35)
        + _scale(HUGE, 0.012)
        + _scale(BIG, 0.05)
        + _image_shares(112, 224, 336, 448, share=0.1),
    ),
    Stage(
        name="early",
        layers=DRAFT_LAYERS,
        cpu_s=225,
        lr=2e-3,
        canvases=_scale(SHORT, 0.5)
        + _scale(MIDDLE, 0.35)
        + _image_shares(112, 224, 336, share=0.12),
        vision=False,
        probe=0.0,
    ),
    Stage(
        name="naive",
        layers=DRAFT_LAYERS,
        cpu_s=1500,
        lr=1.2e-3,
        canvases=_scale(SHORT, 0.4)
        + _scale(MIDDLE, 0.4)
        + _scale(LONG, 0.1)
        + _image_shares(112, 224, 336, share=0.12),
        vision=False,
        probe=0.0,
    ),
    Stage(
        name="draft",
        layers=DRAFT_LAYERS,
        cpu_s=1800,
        lr=1.2e-3,
        canvases=_scale(SHORT, 0.2)
        + _scale(MIDDLE, 0.5)
        + _scale(LONG, 0.2)
        + _image_shares(112, 224, 336, share=0.12),
        vision=False,
        probe=0.0,
        drops=True,
    ),
)


SEEING_SHORT = _video_shares((8, 112, 112, 0.7), (4, 168, 168, 0.15), (12, 112, 112, 0.15))
SEEING_LONG = _video_shares(
    (16, 224, 224, 0.4),
    (32, 112, 112, 0.1),
    (8, 224, 224, 0.15),
    (16, 168, 168, 0.1),
    (16, 140, 140, 0.1),
    (8, 112, 112, 0.15),
)
SEEING = (  # The stages of a language model that learns to see (`seeing.py`).
    Stage(name="words", layers=30, cpu_s=80, lr=3e-3, canvases=SHORT, tokens=4000, probe=1.0),
    Stage(
        name="sees",
        layers=30,
        cpu_s=4800,
        lr=1e-3,
        canvases=SEEING_SHORT,
        tokens=1100,
        probe=0.0,
        objects=_rising_objects((0.05, 2), (0.15, 3)),
        tasks=("qa", None),
    ),
    Stage(
        name="longer",
        layers=30,
        cpu_s=600,
        lr=5e-4,
        canvases=SEEING_LONG,
        tokens=900,
        probe=0.0,
        tasks=("qa", None, None),
    ),
)
SEEING_DRAFT = (  # The stages of a draft for that language model (`seeing_draft.py`).
    Stage(
        name="early",
        layers=4,
        cpu_s=120,
        lr=1.2e-3,
        canvases=SEEING_LONG,
        tokens=3000,
        vision=False,
        probe=0.0,
    ),
    Stage(
        name="draft",
        layers=4,
        cpu_s=240,
        lr=1.2e-3,
        canvases=SEEING_LONG,
        tokens=1500,
        vision=False,
        probe=0.0,
        drops=True,
    ),
)


HYBRID_SHORT = _video_shares(
    (8, 112, 112, 0.5),
    (16, 112, 112, 0.25),
    (32, 112, 112, 0.15),
    (8, 224, 224, 0.1),
)
HYBRID_LONG = _video_shares(
    (8, 112, 112, 0.15),
    (16, 112, 112, 0.2),
    (32, 112, 112, 0.4),
    (8, 224, 224, 0.1),
    (16, 224, 224, 0.15),
)
# Half of the conversations are descriptions, and so are about half of those with a drawn task.
DESCRIBING = ("describe", None)
HYBRID = (  # The stages of a hybrid pair (`hybrid.py`).
    Stage(
        name="tower",
        layers=6,
        cpu_s=300,
        lr=3e-3,
        canvases=SHORT + _video_shares((8, 224, 224, 0.2)),
        probe=0.0,
    ),
    Stage(
        name="decoder",
        layers=6,
        cpu_s=205,
        lr=1e-3,
        canvases=HYBRID_SHORT,
        tokens=2500,
        vision=False,
        probe=0.0,
        tasks=DESCRIBING,
    ),
    Stage(
        name="hybrid",
        layers=6,
        cpu_s=110,
        lr=5e-4,
        canvases=HYBRID_LONG,
        tokens=2500,
        vision=False,
        probe=0.0,
        tasks=DESCRIBING,
    ),
    Stage(
        name="early",
        layers=2,
        cpu_s=130,
        lr=2e-3,
        canvases=HYBRID_SHORT,
        vision=False,
        probe=0.0,
        objects=_rising_objects((0.15, 3), (0.3, 4)),
        tasks=DESCRIBING,
    ),
    Stage(
        name="draft",
        layers=2,
        cpu_s=190,
        lr=1.2e-3,
        canvases=HYBRID_LONG,
        vision=False,
        probe=0.0,
        drops=True,
        tasks=DESCRIBING,
    ),
)


def shorten(stage: Stage) -> Stage:
    """Returns the stage with clips of one object and 64 visual tokens, and a budget of seconds.

    All of ``STAGES`` together then take two CPU minutes, most of it in "probe" and "small".
    """
    seconds = {"probe": 20.0, "small": 60.0}
    return replace(
        stage,
        cpu_s=seconds.get(stage.name, 8.0),
        lr=stage.lr if stage.vision and stage.name != "medium" else 2e-4,
        canvases=SHORT[:1],
        tokens=1500,
        objects=lambda progress: 1,
    )
