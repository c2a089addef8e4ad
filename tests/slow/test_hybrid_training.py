"""Training of the hybrid pair: its forward is transformers', and seconds of it make a pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.training import build, hybrid
from lab.training.batch import collate, draw_example
from lab.training.hybrid_model import (
    TARGET_PATTERN,
    TARGET_SOURCES,
    convert,
    encode_frames,
    load_hybrid,
    make_hybrid_processor,
    run_decoder,
)
from lab.training.model import embed
from saccade.inputs import ask, load
from saccade.inputs.checkpoints import EMBEDDED
from saccade.inputs.media.clip import make_clip
from saccade.world import dialogues
from saccade.world.train_draft.samples import Canvas, render_pictures

pytestmark = pytest.mark.slow

CASES = [
    (Canvas("video", 8, 112, 112), "describe"),
    (Canvas("video", 4, 224, 168), "events"),
    (Canvas("image", 1, 112, 168), "image"),
    (Canvas("diff", 1, 112, 112), "diff"),
]


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved hybrid whose norms and biases are far from where conversion leaves them."""
    model = convert(build.load(EMBEDDED / "draft-naive"), TARGET_PATTERN, TARGET_SOURCES)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim == 1:
                p.add_(0.2 * torch.randn_like(p))
            elif name.endswith("out_proj.weight"):
                torch.nn.init.normal_(p, std=0.05)
    folder = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(folder)
    tokenizer = build.load_processor(EMBEDDED / "target").tokenizer
    make_hybrid_processor(tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("canvas", "task"), CASES, ids=[task for _, task in CASES])
def test_a_row_is_what_the_processor_and_model_make(
    random_folder: Path, canvas: Canvas, task: str
) -> None:
    """Claim: ids and logits of a training row are those of the processor and of transformers.

    Fails if times are written or counted otherwise, or if axes of rotation are.
    """
    loaded = load(str(random_folder))
    row = draw_example(loaded.tokenizer, canvas, 3, task, form=hybrid.FORM)
    batch = collate([row], canvas, form=hybrid.FORM)
    turn = dialogues.conversation(row.dialogue.scene, task, row.dialogue.seed)[0]
    frames = render_pictures(row.dialogue, canvas)
    media: dict[str, Any] = {"images": list(frames)}
    if canvas.kind == "video":
        media = {"clips": [make_clip(frames, row.dialogue.seconds)]}
    inputs = ask(loaded, turn.question, **media)
    length = inputs["input_ids"].shape[1]
    assert batch.ids[0, :length].tolist() == inputs["input_ids"][0].tolist()
    model = load_hybrid(random_folder)
    with torch.no_grad():
        visual = encode_frames(model, batch.frames)
        hidden = run_decoder(model, embed(model, batch.ids, visual), batch.positions)
        expected = loaded.backbone.model(**inputs).logits[0]
    torch.testing.assert_close(
        hidden[0, :length] @ model.lm_head.weight.T, expected, atol=1e-4, rtol=0
    )


def test_seconds_of_training_make_a_pair(tmp_path: Path) -> None:
    """Claim: a few seconds of each stage lower the errors and leave a pair that is loaded, and
    whose methods answer as generate() does; its numbers fill the page."""
    from typer.testing import CliRunner

    from lab.__main__ import app

    torch.set_num_threads(1)
    run_dir, folder, page = tmp_path / "run", tmp_path / "pair", tmp_path / "hybrids.md"
    words = ["train-hybrid", str(folder), "--run-dir", str(run_dir), "--seconds", "8"]
    result = CliRunner().invoke(app, [*words, "--threads", "1"])
    assert result.exit_code == 0, result.output
    errors = [
        json.loads(line)["loss"] for line in (run_dir / "tower.jsonl").read_text().splitlines()
    ]
    assert min(errors[-3:]) < errors[0]
    for extra in ([], ["--timed", "2"]):
        words = ["hybrid", str(folder), "--clips", "2", "--out", str(page), "--threads", "1"]
        result = CliRunner().invoke(app, [*words, *extra])
        assert result.exit_code == 0, result.output
    facts = json.loads(page.with_suffix(".json").read_text())
    assert facts["speed"] and all(row["same"] for row in facts["speed"])
    assert "| `auto`: tau; decoding" in page.read_text()
