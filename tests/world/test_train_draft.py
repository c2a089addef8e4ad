"""Draft training: the papers' numbers, what trains when, the loss, pruned samples, resuming."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from helpers import FAMILIES, VIDEO, frames_input, llama, no_seconds, video_input
from torch import Tensor
from typer.testing import CliRunner

import saccade
from lab.reference import Oracle
from lab.training import agreement
from saccade.cli.train_draft import train_draft
from saccade.core.errors import ModelError, OptionError, SaccadeError
from saccade.core.sampling import Sampling
from saccade.inputs import ask, load
from saccade.model.backbone import Backbone
from saccade.world.train_draft import run
from saccade.world.train_draft.recipes import (
    RECIPES,
    Settings,
    parts_by_parameter,
    share_steps,
    trained_parameters,
)
from saccade.world.train_draft.samples import Samples, append_answer, collate
from saccade.world.train_draft.trainer import (
    PhaseRun,
    answer_logits,
    distillation_loss,
    make_trainer,
)

SEEING = ("qwen2_5_vl", "qwen2_vl", "llava_onevision")
# Where the parts are in these families, written down by hand.
BY_HAND = {
    "qwen2_5_vl": ("model.visual.merger.", "model.visual."),
    "qwen2_vl": ("model.visual.merger.", "model.visual."),
    "llava_onevision": ("model.multi_modal_projector.", "model.vision_tower."),
}
TINY = Settings(steps=4, batch_size=2, distill=0.5, drop_visual=0.9, lr_scale=10.0)


def by_hand(family: str, name: str) -> str:
    projector, vision = BY_HAND[family]
    if name.startswith(projector) or name == "model.image_newline":
        return "projector"
    return "vision" if name.startswith(vision) else "language"


def sample(family: str, seed: int, *, lost: int = 0, longer: int = 0) -> dict[str, Tensor]:
    """A prompt with a video and an answer of five tokens; every other visual token of the first
    ``2 * lost`` is taken out."""
    if family == "llava_onevision":
        inputs = frames_input(seed, after=7 + longer)
    else:
        inputs = video_input(seed, after=7 + longer)
        inputs = inputs if family == "qwen2_5_vl" else no_seconds(inputs)
    stay = torch.ones_like(inputs["input_ids"], dtype=torch.bool)
    stay[0, (inputs["input_ids"][0] == VIDEO).nonzero()[: 2 * lost : 2, 0]] = False
    return append_answer(inputs, [11, 22, 33, 44, 55 + seed], stay)


# -- the recipes -------------------------------------------------------------------------------


def test_the_recipes_are_the_papers() -> None:
    """Claim: every value of TABED's tables 7 and 8, typed again. Fails on any other number."""

    def rows(name: str) -> list[tuple[Any, ...]]:
        return [
            (p.epochs, p.batch_size, p.learning_rate, p.schedule, p.warmup, p.weight_decay)
            for p in RECIPES[name].phases
        ]

    table7 = [(1, 256, 1e-3, "cosine", 0.03, 0.0), (1, 128, 2e-5, "cosine", 0.03, 0.0)]
    assert rows("llava-1.5-68m") == rows("llava-1.5-160m") == table7
    first, later = (1, 512, 1e-3, "cosine", 0.03, 0.0), (1, 512, 1e-5, "cosine", 0.03, 0.0)
    assert rows("llava-onevision-68m") == [first, later, later, later]
    whole = {"projector", "language", "vision"}
    assert [set(p.trains) for p in RECIPES["llava-1.5-68m"].phases] == [
        {"projector"},
        {"projector", "language"},
    ]
    onevision = RECIPES["llava-onevision-68m"].phases
    assert [set(p.trains) for p in onevision] == [{"projector"}, whole, whole, whole]
    assert {p.vision_rate for p in onevision} == {0.2}
    assert [p.media for p in onevision] == [("image",)] * 3 + [("video", "image", "diff")]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("steps", [4, 5, 17, 100, 9999])
def test_the_phases_share_the_steps(name: str, steps: int) -> None:
    """Claim: all steps are given, each phase has one, and shares are the papers' to within two."""
    phases = RECIPES[name].phases
    shares = share_steps(steps, phases)
    assert sum(shares) == steps and min(shares) >= 1
    theirs = {1: [1], 2: [558 / 256, 665 / 128], 4: [558, 4000, 3200, 1600]}[len(phases)]
    exact = [steps * share / sum(theirs) for share in theirs]
    assert all(abs(a - b) < len(phases) for a, b in zip(shares, exact, strict=True))
    with pytest.raises(OptionError, match="too few"):
        share_steps(len(phases) - 1, phases)


# -- what trains -------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SEEING)
def test_parts_are_found_by_structure(family: str) -> None:
    """Claim: each parameter is in the part its name says; families need no code of their own."""
    parts = parts_by_parameter(FAMILIES[family]())
    assert parts == {name: by_hand(family, name) for name in parts}


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("name", ["llava-1.5-68m", "llava-onevision-68m"])
def test_only_what_a_phase_trains_gets_gradient(family: str, name: str) -> None:
    """Claim: after a backward pass the gradients are those of the phase's parts, and no others."""
    batch = collate([sample(family, 0)])
    for phase in RECIPES[name].phases:
        model = copy.deepcopy(FAMILIES[family]()).train()
        chosen = trained_parameters(model, phase)
        for key, p in model.named_parameters():
            p.requires_grad_(key in chosen)
        logits, wanted = answer_logits(model, batch, whole_prompt=False)
        torch.autograd.backward(distillation_loss(logits, wanted, None, 0.0))
        moved = {key for key, p in model.named_parameters() if p.grad is not None}
        assert {by_hand(family, key) for key in moved} == set(phase.trains)
        # what no video reaches: the newline of images, the norm after the layer that is read
        silent = {key for key in chosen if "image_newline" in key or "post_layernorm" in key}
        assert set(chosen) - silent <= moved <= set(chosen)


def test_a_model_that_does_not_see_is_refused() -> None:
    """Claim: no recipe fits a text model, and the sentence says what is missing."""
    with pytest.raises(ModelError, match="no projector"):
        parts_by_parameter(llama())


def test_the_vision_tower_learns_at_a_fifth_of_the_rate(pair: Path, tmp_path: Path) -> None:
    """Claim: the optimizer holds each trained parameter once, the tower's at rate / 5."""
    draft = load("shapes-draft-naive", fused=False)
    phase = RECIPES["llava-onevision-68m"].phases[1]
    work = PhaseRun(phase, 1, Settings(), 0, tmp_path, 60.0)
    made = make_trainer(work, draft, draft, lambda *args: None)
    assert made.args.gradient_accumulation_steps * work.samples_per_forward == 512
    groups = made.create_optimizer().param_groups
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(draft.backbone.model.parameters()))
    for name, p in draft.backbone.model.named_parameters():
        tower = "visual" in name and "merger" not in name
        assert rates[id(p)] == pytest.approx(2e-6 if tower else 1e-5), name


# -- loss and samples --------------------------------------------------------------------------


def test_the_loss_is_the_plain_one() -> None:
    """Claim: cross-entropy and KL(target || draft) equal a loop over positions and tokens."""
    generator = torch.Generator().manual_seed(0)
    q, p = (torch.randn(5, n, generator=generator, dtype=torch.double) for n in (7, 9))
    wanted = torch.tensor([0, 6, 3, 3, 1])
    truth = away = 0.0
    for row in range(5):
        truth -= float(q[row].softmax(0)[wanted[row]].log()) / 5
        ours, theirs = q[row].softmax(0), p[row, :7].softmax(0)
        for token in range(7):
            away += float(theirs[token] * (theirs[token] / ours[token]).log()) / 5
    for weight in (0.0, 0.3, 1.0):
        loss = float(distillation_loss(q, wanted, p, weight))
        assert loss == pytest.approx((1 - weight) * truth + weight * away, abs=1e-12)
    assert float(distillation_loss(q, wanted, None, 0.3)) == pytest.approx(truth, abs=1e-12)
    assert abs(truth - away) > 0.1, "a mix of equals would prove nothing"


@pytest.mark.representatives(3)
@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("lost", [0, 2])
def test_dropped_tokens_leave_the_others_where_they_were(family: str, lost: int) -> None:
    """Claim: a batch of unequal samples gives each what the cache-free reference computes for its
    prompt with the rows gone and the positions kept; packed positions would give other logits."""
    model = FAMILIES[family]()
    samples = [sample(family, 0, lost=lost), sample(family, 1, lost=2 * lost, longer=3)]
    with torch.no_grad():
        logits, wanted = answer_logits(model, collate(samples), whole_prompt=False)
    assert wanted.tolist() == [11, 22, 33, 44, 55, 11, 22, 33, 44, 56]
    text = {"input_ids", "attention_mask", "mm_token_type_ids"}
    backbone = Backbone(copy.deepcopy(model), fused=False)
    for row, one in enumerate(samples):
        inputs = {k: v[:, :-5] if k in text else v for k, v in one.items()}
        stay = one["kept_mask"][0, :-5]
        assert int((~stay).sum()) == lost * (1 + row)
        inputs = {k: v for k, v in inputs.items() if k not in ("labels", "kept_mask")}
        prompt = backbone.prompts(inputs)[0]
        cut = replace(
            prompt,
            full_ids=prompt.full_ids[stay],
            embeds=prompt.embeds[stay],
            positions=prompt.positions[:, stay],
            visual=prompt.visual[stay],
            fixed=prompt.fixed[stay],
            grid=prompt.grid[stay[prompt.visual]],
            places=prompt.places[stay],
        )
        ours = logits[5 * row : 5 * row + 5]
        tokens = wanted[5 * row : 5 * row + 4].tolist()
        torch.testing.assert_close(
            ours, Oracle(model, [cut], [Sampling()]).logits(0, tokens), atol=1e-4, rtol=0
        )
        if lost:
            order = torch.arange(len(cut.full_ids)).expand_as(cut.positions)
            packed = replace(cut, positions=order, next_position=len(cut.full_ids))
            other = Oracle(model, [packed], [Sampling()]).logits(0, tokens)
            assert float((other - ours).abs().max()) > 1e-2


def test_a_sample_is_what_describe_would_ask(pair: Path) -> None:
    """Claim: items repeat, shares lost stay below the bound, and each ends in its whole answer."""
    loaded = load("shapes-draft-naive", fused=False)
    kinds = ("video", "image", "diff")
    samples = Samples(loaded, kinds, (3, 1), count=6, batch=2, max_drop=0.6)
    pads = torch.tensor(sorted(loaded.backbone.placeholders))
    shares = []
    for index in range(len(samples)):
        item, again = samples[index], samples[index]
        assert all(torch.equal(item[name], again[name]) for name in item)
        visual = torch.isin(item["input_ids"], pads)
        real = item["attention_mask"].bool()
        assert bool(item["kept_mask"][real & ~visual].all())
        shares += (1 - (item["kept_mask"] & visual).sum(1) / visual.sum(1)).tolist()
        for ids, labels in zip(item["input_ids"], item["labels"], strict=True):
            at = (labels >= 0).nonzero()[:, 0]
            assert torch.equal(labels[at], ids[at + 1]), "a label is the next token"
            assert int(labels[at[-1]]) == loaded.tokenizer.eos_token_id
            prompt = loaded.tokenizer.decode(ids[: at[0] + 1])
            assert prompt.endswith("<|im_start|>assistant\n")
    assert max(shares) < 0.61 and max(shares) > 0.3 and len(set(shares)) > 6


# -- a run -------------------------------------------------------------------------------------


def command(*words: object) -> Any:
    app = typer.Typer()
    app.command("train-draft")(train_draft)
    return CliRunner().invoke(app, [str(word) for word in words])


WORDS = ["--steps", 4, "--batch-size", 2, "--distill", 0.5, "--drop-visual", 0.9]
WORDS += ["--lr-scale", 10, "--threads", 1]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run nobody interrupts, by the command line; its folder and its JSON."""
    out = tmp_path_factory.mktemp("drafts") / "straight"
    done = command("--out", out, *WORDS, "--json")
    assert done.exit_code == 0, done.output
    return out, json.loads(done.stdout)


@pytest.mark.extra
def test_a_run_trains_and_its_draft_drafts(straight: tuple[Path, dict[str, Any]]) -> None:
    """Claim: the folder is a checkpoint that drafts for the target, losslessly; the vision tower is
    the target's bit for bit (LLaVA-1.5 never trains it), projector and language have moved."""
    out, report = straight
    assert [p["phase"] for p in report["phases"]] == ["pretraining", "instruction"]
    assert [p["steps"] for p in report["phases"]] == share_steps(4, RECIPES["llava-1.5-68m"].phases)
    assert not (out / "checkpoints").exists()
    target, draft = load("shapes"), load(str(out))
    start = run.make_fresh_draft(target, 2, seed=0).backbone.model.state_dict()
    for name, part in parts_by_parameter(draft.backbone.model).items():
        now = draft.backbone.model.state_dict()[name]
        assert torch.equal(now, start[name]) == (part == "vision"), name
    tower = "model.visual.blocks.0.attn.qkv.weight"
    assert torch.equal(start[tower], target.backbone.model.state_dict()[tower])
    _, clip, question = agreement.unseen_clip(0, 64)
    inputs = ask(target, question, clips=[clip])
    settings = dict(max_new_tokens=12, do_sample=False)
    plain = saccade.run(target.backbone, inputs, method="ar", **settings)
    drafted = saccade.run(
        target.backbone, inputs, draft=draft.backbone, method="specvlm", **settings
    )
    assert drafted.ids == plain.ids and not drafted.fallback_reason


@pytest.mark.slow
def test_an_interrupted_run_goes_on_bit_for_bit(
    straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Claim: cut in the middle of its second phase and resumed, a run ends in the same weights."""

    def cut(phase: str, done: int, total: int, loss: float | None) -> None:
        if phase == "instruction" and done >= 4:
            raise KeyboardInterrupt

    out = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        run.train_draft(out, TINY, on_progress=cut, save_every_s=0)
    left = {path.parent.name + "/" + path.name for path in out.glob("checkpoints/*/checkpoint-*")}
    assert left == {"1-pretraining/checkpoint-2", "2-instruction/checkpoint-1"}
    (out / "checkpoints" / "2-instruction" / "checkpoint-9").mkdir()  # cut while it was written

    refused = command("--out", out, *WORDS)
    assert isinstance(refused.exception, OptionError) and "--resume" in str(refused.exception)
    other = command("--out", out, *WORDS, "--seed", 5, "--resume")
    assert isinstance(other.exception, OptionError) and "--seed 0, not 5" in str(other.exception)

    done = command("--out", out, *WORDS, "--resume")
    assert done.exit_code == 0, done.output
    assert f"saccade describe VIDEO --draft {out}" in done.stdout
    assert "instruction" in done.stderr
    one, two = (load(str(f)).backbone.model.state_dict() for f in (straight[0], out))
    assert all(torch.equal(one[name], two[name]) for name in one)

    before = (out / "model.safetensors").stat().st_mtime_ns
    again = run.train_draft(out, TINY, resume=True)
    assert [p["steps"] for p in again["phases"]] == [p["steps"] for p in straight[1]["phases"]]
    assert (out / "model.safetensors").stat().st_mtime_ns == before, "a finished run is left alone"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipe", "llava"], "recipes: llava-1.5-68m, llava-1.5-160m, llava-onevision-68m"),
        (["--phases", "alignment"], "phases: pretraining, instruction"),
        (["--steps", 1], "too few for 2 phases"),
        (["--distill", 1.5], "between 0 and 1"),
        (["--drop-visual", -0.1], "between 0 and 1"),
        (["--lr-scale", 0], "above 0"),
        (["--lr-scale", "nan"], "above 0"),
        (["--draft", "/nowhere/at/all"], "no checkpoint folder"),
    ],
)
def test_every_mistake_gets_one_sentence(tmp_path: Path, words: list[Any], message: str) -> None:
    """Claim: what cannot be run is refused by name, and nothing is written."""
    failed = command("--out", tmp_path / "out", *words)
    assert isinstance(failed.exception, SaccadeError)
    assert message in str(failed.exception) and "\n" not in str(failed.exception)
    assert not (tmp_path / "out").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    """Claim: --resume in a folder that train-draft did not begin is refused."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OptionError, match="no run of train-draft"):
        run.train_draft(tmp_path, TINY, resume=True)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_types_of_tokens_are_as_long_as_the_tokens() -> None:
    """Claim: under either name that processors use, an answer's tokens are of the type of text, and
    a batch pads them. Fails for Gemma 3, whose name is the shorter one."""
    made = []
    for length in (3, 5):
        ids = torch.arange(length)[None]
        inputs = {"input_ids": ids, "token_type_ids": torch.ones_like(ids)}
        made.append(append_answer(inputs, [7, 8], torch.ones_like(ids, dtype=torch.bool)))
    types = collate(made)["token_type_ids"]
    assert types.tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
