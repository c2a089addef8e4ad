"""The Python API on the embedded pair: a clip of the shapes world, plainly and by SpecVLM.

uv run python examples/describe.py
"""

import tempfile
from pathlib import Path

import saccade
from saccade import inputs as models
from saccade.inputs import media
from saccade.world import drawing, scenes

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "clip.mp4"
    drawing.write_clip(scenes.scene(7), path, frames=32, height=112)
    clip = media.read(path, media.FrameSampling(every=True))

target, draft = models.load("shapes"), models.load("shapes-draft")
inputs = models.ask(target, "Describe the video in detail.", clips=[clip])
for method in ("ar", "specvlm/shape=fit"):
    result = saccade.run(
        target.backbone,
        inputs,
        draft=draft.backbone,
        method=method,
        tokenizer=target.tokenizer,
        max_new_tokens=128,
        do_sample=False,
    )
    seconds = result.timings.decode
    print(f"{method}: {len(result.ids)} tokens in {seconds:.2f} s, tau {result.tau:.2f}")  # noqa: T201
print(result.text)  # noqa: T201
