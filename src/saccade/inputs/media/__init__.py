"""Reads frames of videos and images from files and bytes, within limits.

A file becomes frames in four steps:

1. `media_file` checks that the path may be read, and detects the file's type by its first bytes.
2. `video` or `images` makes a `FrameSource` of it, which has the times at which frames appear.
3. `frame_sampling` turns the request into moments, and those into the frames displayed then.
4. The frame source decodes these frames, and no others where that is possible. They are a `Clip`.

The bytes may be hostile. Every limit is checked on what a file declares before a decoder starts,
and again on what the decoder returns. A server reads media in child processes (`decoder_pool`), and
gets them from web addresses by `fetch`. This package knows no models or processors.
"""

from collections.abc import Sequence
from pathlib import Path

from saccade.inputs.media.clip import Clip, FrameSampling, Image
from saccade.inputs.media.frame_sampling import Progress, sample
from saccade.inputs.media.images import (
    Animation,
    ImageSequence,
    image_folder,
    image_list,
    read_image,
)
from saccade.inputs.media.limits import Limits, bad_option
from saccade.inputs.media.media_file import Readable, Source, check_path, open_media

__all__ = [
    "Readable",
    "Clip", "Image", "Limits", "Progress", "FrameSampling", "Source",
    "read", "read_frames", "read_image",
]  # fmt: skip


def read(
    source: Source,
    sampling: FrameSampling | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
) -> Clip:
    """Reads frames of a video, an animation, an image or a folder of images.

    A source of "-" is standard input. `progress(done, total)` is called after each frame, and may
    raise to stop. Raises VideoInputError for whatever is wrong with the input or the `sampling`.
    """
    sampling = sampling or FrameSampling()
    limits = limits or Limits()
    if limits.max_frames and (sampling.num_frames or 0) > limits.max_frames:
        raise bad_option(f"num_frames may be at most {limits.max_frames}", limits.max_frames)
    if isinstance(source, str | Path) and source != "-":
        path = check_path(source, limits)
        if path.is_dir():
            return _sample_sequence(
                image_folder(path, sampling.fps, limits), sampling, limits, progress
            )
    with open_media(source, limits) as file:
        if file.kind == "image":  # A still image is an animation of one frame.
            return sample(Animation(file, limits), sampling, limits, progress)
        # PyAV is imported here, so that it is needed for reading videos only.
        from saccade.inputs.media.video import Video

        return sample(Video(file, limits), sampling, limits, progress)


def read_frames(
    pictures: Sequence[bytes],
    fps: float | int | None = None,
    limits: Limits | None = None,
    progress: Progress | None = None,
    *,
    sampling: FrameSampling | None = None,
) -> Clip:
    """Reads encoded images as one clip; `fps` is the rate at which they were taken (default 1).

    `sampling` may also choose some of the images. If it is given, its own rate counts and `fps` is
    ignored.
    """
    limits = limits or Limits()
    sampling = sampling or FrameSampling(fps=fps)
    return _sample_sequence(image_list(pictures, sampling.fps, limits), sampling, limits, progress)


def _sample_sequence(
    frame_source: ImageSequence, sampling: FrameSampling, limits: Limits, progress: Progress | None
) -> Clip:
    """Reads the images between the sampling's start and end: all, or as many as it asks for."""
    return sample(frame_source, sampling.for_sequence(frame_source.rate), limits, progress)
