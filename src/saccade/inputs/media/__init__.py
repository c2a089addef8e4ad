"""Files and bytes to frames, with limits. How a file becomes frames:

1. `opening` checks that the path may be read and tells by the first bytes what the file is.
2. `video` or `images` makes a reel of it: when each frame appears, found without keeping any frame.
3. `choose` turns what was asked for into moments, and those into the frames on screen then.
4. The reel decodes these frames and no more than it must; they are a `Clip`.

The bytes are taken to be hostile: every limit is checked on what a file declares before a decoder
starts, then again on what comes out of it. Knows nothing of models, processors or addresses.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from saccade.inputs.media.choose import Progress, sample
from saccade.inputs.media.clip import Clip, FrameSampling, Image
from saccade.inputs.media.images import Animation, Pictures, folder, listed, read_image
from saccade.inputs.media.limits import Limits, bad_option
from saccade.inputs.media.opening import Source, allowed, opened

__all__ = [
    "Clip", "Image", "Limits", "Progress", "FrameSampling", "Source",
    "read", "read_frames", "read_image",
]  # fmt: skip


def read(
    source: Source,
    sampling: FrameSampling | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Clip:
    """Frames of a video, an animation, an image or a folder of images; "-" is standard input.

    `progress(done, total)` is called as frames are kept, and may raise to stop. Whatever is wrong
    with the input is a `VideoInputError`.
    """
    sampling, limits = sampling or FrameSampling(), limits or Limits()
    if limits.max_frames and (sampling.num_frames or 0) > limits.max_frames:
        raise bad_option(f"num_frames may be at most {limits.max_frames}", limits.max_frames)
    if isinstance(source, str | Path) and source != "-":
        path = allowed(source, limits)
        if path.is_dir():
            return _pictures(folder(path, sampling.fps, limits), sampling, limits, progress)
    with opened(source, limits) as file:
        if file.kind == "image":
            return sample(Animation(file, limits), sampling, limits, progress)
        # PyAV is imported here: whoever reads no video, on a bare GPU machine say, needs none.
        from saccade.inputs.media.video import Video

        return sample(Video(file, limits), sampling, limits, progress)


def read_frames(
    pictures: Sequence[bytes],
    fps: float | int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Clip:
    """Encoded images as one clip, `fps` being the rate they were taken at (default 1)."""
    limits, sampling = limits or Limits(), FrameSampling(fps=fps)
    return _pictures(listed(pictures, fps, limits), sampling, limits, progress)


def _pictures(
    reel: Pictures, sampling: FrameSampling, limits: Limits, progress: Progress | None
) -> Clip:
    """All of them unless a number is asked for."""
    if not (sampling.num_frames or sampling.every):
        sampling = replace(sampling, fps=reel.rate)
    return sample(reel, sampling, limits, progress)
