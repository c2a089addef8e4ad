"""Training of the embedded pair: the fused forward is Hugging Face's, and two minutes teach it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor
from transformers.video_utils import VideoMetadata

from lab.training import build, evaluate, train
from lab.training.batch import collate, draw_example
from lab.training.model import create, embed, encode_frames, grow, pixel_rows, run_decoder
from saccade.world import dialogues, drawing
from saccade.world import scenes as world
from saccade.world.train_draft.samples import Canvas

pytestmark = pytest.mark.slow

CLIP = Canvas("video", 8, 112, 112)
CASES = [
    (Canvas("video", 8, 112, 168), "chat"),
    (Canvas("video", 4, 448, 448), "describe"),
    (Canvas("video", 64, 112, 112), "events"),
    (Canvas("image", 1, 224, 168), "image"),
    (Canvas("diff", 1, 112, 112), "diff"),
]


@pytest.fixture(scope="module")
def random_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved untrained model whose biases and norms are far from their defaults."""
    model, folder = create(4), tmp_path_factory.mktemp("random")
    for name, p in model.named_parameters():
        if p.ndim == 1:
            torch.nn.init.normal_(p, mean=float("norm" in name or "ln_q" in name), std=0.3)
    build.save(model, build.make_processor(samples=300), folder)
    return folder


@pytest.mark.parametrize(("canvas", "task"), CASES, ids=[task for _, task in CASES])
def test_a_row_is_what_the_processor_and_model_make(
    random_folder: Path, canvas: Canvas, task: str
) -> None:
    """Ids, pixels, M-RoPE ids and logits; a wrong layout would train for inputs nobody sends."""
    processor = AutoProcessor.from_pretrained(random_folder)
    huggingface = AutoModelForImageTextToText.from_pretrained(random_folder, dtype=torch.float32)
    row = draw_example(processor.tokenizer, canvas, 3, task)
    batch, talk = collate([row], canvas), row.dialogue

    media_parts = [{"type": "video" if canvas.kind == "video" else "image"}]
    media_parts *= 2 if canvas.kind == "diff" else 1
    messages = []
    for turn in dialogues.conversation(talk.scene, task, talk.seed):
        content = [*media_parts, {"type": "text", "text": turn.question}]
        messages += [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": turn.answer}]
        media_parts = []
    prompt = processor.apply_chat_template(messages, tokenize=False)
    if canvas.kind == "video":
        metadata = VideoMetadata(
            total_num_frames=canvas.frames,
            fps=canvas.frames / talk.seconds,
            duration=talk.seconds,
            frames_indices=list(range(canvas.frames)),
        )
        clip = drawing.render(talk.scene, canvas.frames, canvas.height, canvas.width)
        inputs = processor(
            text=[prompt],
            videos=[clip],
            videos_kwargs={"video_metadata": [metadata], "do_sample_frames": False},
            return_tensors="pt",
        )
        rows = inputs.pixel_values_videos
    else:
        scenes = [talk.scene, world.edit(talk.scene, talk.seed)][
            : 2 if canvas.kind == "diff" else 1
        ]
        pictures = [drawing.image_frame(s, canvas.height, canvas.width) for s in scenes]
        inputs = processor(text=[prompt], images=pictures, return_tensors="pt")
        rows = inputs.pixel_values

    assert inputs.input_ids.tolist() == batch.ids.tolist()
    torch.testing.assert_close(rows, pixel_rows(batch.frames).flatten(0, 1), atol=1e-6, rtol=0)
    positions, _ = huggingface.model.get_rope_index(
        inputs.input_ids,
        inputs.mm_token_type_ids,
        inputs.get("image_grid_thw"),
        inputs.get("video_grid_thw"),
        inputs.get("second_per_grid_ts"),
    )
    assert torch.equal(positions, batch.positions)
    model = build.load(random_folder)
    with torch.no_grad():
        hidden = run_decoder(
            model, embed(model, batch.ids, encode_frames(model, batch.frames)), batch.positions
        )
        logits = huggingface(**inputs).logits
    torch.testing.assert_close(hidden @ model.lm_head.weight.T, logits, atol=1e-5, rtol=0)


def test_growth_changes_nothing(random_folder: Path) -> None:
    """New layers add zero; a mistake in their order would show at once."""
    model = build.load(random_folder)
    ids = torch.randint(0, 1000, (2, 30))
    positions = torch.arange(30).expand(3, 2, -1)
    with torch.no_grad():
        before = run_decoder(model, embed(model, ids, None), positions)
        grown = grow(model, 9)
        after = run_decoder(grown, embed(grown, ids, None), positions)
    assert torch.equal(before, after)


def test_two_minutes_of_training(tmp_path: Path) -> None:
    """Own pixels must tell far more than another clip's, or the vision tower learnt nothing."""
    torch.set_num_threads(1)
    train.train(tmp_path / "run", smoke=True)
    train.export(tmp_path / "run", tmp_path / "pair")
    for name in ("target", "draft", "draft-naive"):
        seen = evaluate.teacher_forced(tmp_path / "pair" / name, CLIP, 32, max_objects=1)
        assert seen["own"]["nll"] < 0.7 * seen["other"]["nll"], name
        processor = AutoProcessor.from_pretrained(tmp_path / "pair" / name)
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "pair" / name)
        content = [{"type": "video"}, {"type": "text", "text": "Describe the video in detail."}]
        prompt = processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        clip = drawing.render(world.scene(10_000_001, max_objects=1), 8, 112)
        inputs = processor(text=[prompt], videos=[clip], return_tensors="pt")
        made = model.generate(**inputs, max_new_tokens=24)
        assert made.shape[1] > inputs.input_ids.shape[1]
