"""Trains the embedded pair, a small Qwen2.5-VL target with its drafts, on one CPU core.

Each of these stages writes its weights. The first four train the target, the others the drafts:

probe    The vision tower alone learns what each visual token shows. Linear classifiers on its
         output, the probes, are trained with it and discarded at the end.
small    Two decoder layers learn to speak, and the tower still trains. The drafts begin here.
medium   The model grows to six layers, with clips of up to thousands of visual tokens.
large    It grows to the target's depth, with clips as long; the tower still trains.
early    The decoder of the stage `small` learns the probabilities of the model of the stage
         `medium`, behind that model's tower. It may run beside `large`, which it does not need.
naive    This decoder learns the target's probabilities from all visual tokens.
draft    It learns them from views with visual tokens dropped: at random, around objects, or by
         whole frames.

Budgets are seconds of CPU time, and the learning rate follows the share of them that is used. An
interrupted stage is continued from its last checkpoint with new clips. What a stage leaves are the
mean weights of its last steps. A run may start at `medium` from an existing pair. Progress goes to
`logging` and to one JSONL file for each stage.
"""

import ctypes
import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from transformers import Qwen2_5_VLProcessor

from lab.training import build
from lab.training.batch import (
    QWEN25,
    Batch,
    PromptForm,
    Source,
    drop_visual_tokens,
    visual_tokens,
)
from lab.training.labels import PROBES
from lab.training.model import HIDDEN, PAIR, Forward, create, embed, grow, shrink
from lab.training.stages import (
    DRAFT_LAYERS,
    MEDIUM_LAYERS,
    STAGES,
    TARGET_LAYERS,
    Stage,
    shorten,
)

log = logging.getLogger(__name__)

PROBE_CLASSES = 16  # Outputs of each probe, at least as many as any label has classes.
# Weights whose names end so are left to AdamW though they are matrices: embeddings, classifiers and
# convolutions of single channels.
NOT_BY_MUON = ("model.language_model.embed_tokens.weight", "head", "conv1d.weight")
WARM_UP_SHARE = 0.03  # Of a stage's seconds.
SAVE_EVERY_S = 60.0  # Seconds between two checkpoints of a stage.
# Batches have many shapes, and without this the allocator holds 8 GB after an hour.
RELEASE_MEMORY_EVERY_STEPS = 8
# A draft's stage -> the folder of a pair that has its draft.
DRAFT_FOLDERS = {"naive": "draft-naive", "draft": "draft"}
SKIPPED_WITH_PAIR = ("probe", "small", "early")  # Not run if training starts from a pair.
# bfloat16 halves the time on processors with units for it, and takes fifty times as long on others.
HAS_BF16 = torch.cpu._is_avx512_bf16_supported()


class Optimizer:
    """Muon (orthogonalised momentum, in float32) for matrices and AdamW for the rest."""

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        self.lr = lr
        matrices = [p for n, p in params if not n.endswith(NOT_BY_MUON) and p.ndim > 1]
        by_muon = {id(p) for p in matrices}
        # Matrices of the same shape are updated together.
        self._groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for p in matrices:
            self._groups.setdefault((p.shape[0], p.numel() // p.shape[0]), []).append(p)
        self.momentum = {s: torch.zeros(len(g), *s) for s, g in self._groups.items()}
        rest = [p for _, p in params if id(p) not in by_muon]
        self.adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """Makes one update at `scale` times the learning rate, and clears the gradients."""
        for shape, group in self._groups.items():
            grad = torch.stack(
                [torch.zeros(shape) if p.grad is None else p.grad.view(shape) for p in group]
            )
            # Nesterov momentum of 0.95.
            momentum = self.momentum[shape]
            momentum.lerp_(grad, 0.05)
            update = _orthogonal(grad.lerp(momentum, 0.95))
            # An orthogonal matrix has entries of about 1 / sqrt(longer side). With this factor each
            # entry changes by about a fifth of the learning rate, whatever the shape.
            step_size = 0.2 * max(shape) ** 0.5 * self.lr * scale
            weight_decay = 0.02 * self.lr * scale
            for p, u in zip(group, update, strict=True):
                p.mul_(1 - weight_decay).add_(u.view(p.shape), alpha=-step_size)
                p.grad = None
        for part in self.adam.param_groups:
            part["lr"] = self.lr * scale
        self.adam.step()
        self.adam.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "adam": self.adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.momentum = state["momentum"]
        self.adam.load_state_dict(state["adam"])


def _orthogonal(x: Tensor) -> Tensor:
    """Makes five Newton-Schulz steps towards U V^T of each matrix U S V^T of a batch."""
    a, b, c = 3.4445, -4.7750, 2.0315  # Muon's published coefficients.
    tall = x.shape[1] > x.shape[2]
    x = x.transpose(1, 2) if tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-12)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.transpose(1, 2) if tall else x


def _learning_rate_scale(progress: float) -> float:
    """Returns the scale of the learning rate where the share `progress` of a stage is over.

    It warms up for 3 % of the stage, is 1 up to the middle, and then falls linearly to 3 %.
    """
    rising = 0.02 + progress / WARM_UP_SHARE
    falling = 1.0 - 0.97 * max(0.0, progress - 0.5) / 0.5
    return min(1.0, rising, falling)


def _probe_loss(head: nn.Linear, visual: Tensor, want: Tensor) -> tuple[Tensor, list[float]]:
    """Returns the mean cross-entropy of the seven probes, and the accuracy of each.

    `head` has all probes side by side. `visual` has the tower's output, [visual tokens, HIDDEN].
    `want` is [visual tokens, 7], a class for each of PROBES. The probes of shape, color, size and
    motion have the class 0, background. It counts a fifth in the loss, and nothing in their
    accuracies.
    """
    logits = head(visual).view(len(visual), len(PROBES), PROBE_CLASSES)
    even_weights = torch.ones(PROBE_CLASSES)
    object_weights = torch.tensor([0.2, *[1.0] * (PROBE_CLASSES - 1)])
    losses, right = [], []
    for i, name in enumerate(PROBES):
        is_place = name in ("row", "col", "time")
        weight = even_weights if is_place else object_weights
        losses.append(F.cross_entropy(logits[:, i], want[:, i], weight=weight))
        at = torch.ones(len(want), dtype=torch.bool) if is_place else want[:, i] > 0
        right.append(float((logits[at, i].argmax(-1) == want[at, i]).float().mean()))
    return torch.stack(losses).mean(), right


def random_view(batch: Batch, ratio: float) -> Tensor:
    """Returns a random view, bool [b, visual tokens], that keeps a share `ratio` of the tokens.

    At least one token of a sample is kept, unless `ratio` is 0. For the whole batch one of four
    ways to choose is drawn: evenly over all tokens, more objects than background, more tokens of
    some frames than of others, or half of the objects' tokens before all others.
    """
    b = len(batch.ids)
    n = visual_tokens(batch.canvas)
    # The tokens with the highest scores are kept. Scores are random for the first of four ways.
    scores = torch.rand(b, n)
    way = int(torch.randint(4, ()))
    is_object = batch.probes[:, PROBES.index("shape")].view(b, n) > 0
    if way == 1:  # Prefers objects, in each sample by another amount.
        scores = scores + is_object * torch.rand(b, 1) * 1.5
    elif way == 2:  # Prefers some pairs of frames.
        frame_pairs = batch.frames.shape[0] // b
        scores = scores + 2 * torch.rand(b, frame_pairs).repeat_interleave(n // frame_pairs, 1)
    elif way == 3:  # Prefers about half of the tokens of objects.
        scores = scores + is_object * (torch.rand(b, n) < 0.5)
    count = max(1, round(ratio * n)) if ratio else 0
    return torch.zeros(b, n, dtype=torch.bool).scatter(1, scores.topk(count).indices, True)


def _random_keep_ratio() -> float:
    """Draws the share of visual tokens to keep.

    It is 1 for 20 % of the draws, 0 for 5 %, and else between 0.05 and 1, more often small.
    """
    u = float(torch.rand(()))
    if u < 0.2:
        return 1.0
    return 0.0 if u < 0.25 else float(0.05 * 20 ** (torch.rand(()) ** 1.5))


def answer_logits(
    model: Any, batch: Batch, visual: Tensor | None, forward: Forward = PAIR
) -> Tensor:
    """Returns a batch's logits [answer tokens, vocabulary].

    `visual` has the rows of its visual tokens, [visual tokens of all samples, HIDDEN]. It is None
    for a batch without any.
    """
    with torch.autocast("cpu", torch.bfloat16, HAS_BF16):
        hidden = forward.decode(model, embed(model, batch.ids, visual), batch.positions)
    return F.linear(hidden[batch.labels >= 0].float(), model.lm_head.weight)


@torch.no_grad()
def accuracies(logits: Tensor, batch: Batch) -> dict[str, float]:
    """Returns the accuracies on all answer tokens and on those of content words."""
    labels = batch.labels[batch.labels >= 0]
    content = batch.kinds[batch.labels >= 0] > 0
    right = (logits.argmax(-1) == labels).float()
    return {"all": float(right.mean()), "content": float(right[content].mean())}


def update_running_mean(means: Any, weights: Any, steps: Any) -> None:
    """Updates running means over about the last quarter of the steps, and at most 200 steps.

    torch's `AveragedModel` calls this with two lists of tensors, and with the number of steps that
    are in the means so far.
    """
    torch._foreach_lerp_(means, weights, max(0.005, 4 / (4 + int(steps))))


class Run:
    """The state of one stage, which is stored in `<run_dir>/<stage>.part.pt` while it trains.

    `tok` is the tokenizer, and `mean` has the mean weights of the last steps.
    """

    prompt_form: PromptForm = QWEN25
    forward: Forward = PAIR

    def __init__(
        self, stage: Stage, model: nn.Module, tok: Any, optimizer: Any, mean: AveragedModel
    ) -> None:
        self.stage, self.model, self.tok = stage, model, tok
        self.optimizer, self.mean = optimizer, mean
        # What the stage has used so far: steps, CPU seconds, samples of batches, and their tokens.
        self.steps, self.cpu_s, self.samples, self.tokens = 0, 0.0, 0, 0

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "mean": self.mean.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "counts": (self.steps, self.cpu_s, self.samples, self.tokens),
        }

    def resume(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps, self.cpu_s, self.samples, self.tokens = state["counts"]

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Returns the stage's loss of a batch, and the scores to log."""
        raise NotImplementedError


class PairRun(Run):
    """A stage of the pair's training."""

    def __init__(self, stage: Stage, model: Any, teacher: Any | None, tok: Any) -> None:
        self.teacher = teacher  # Whose probabilities a draft learns; None in the target's stages.
        self.head = nn.Linear(HIDDEN, len(PROBES) * PROBE_CLASSES)  # The probes, side by side.
        model.model.visual.requires_grad_(stage.vision)
        params = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        if stage.probe:
            params += [("head", self.head.weight), ("head.bias", self.head.bias)]
        mean = AveragedModel(model, multi_avg_fn=update_running_mean)
        super().__init__(stage, model, tok, Optimizer(params, stage.lr), mean)
        # Whether the probes begin untrained on a trained tower. They then learn alone at first,
        # before their loss trains the tower too.
        self.trains_head_first = False

    def state(self) -> dict[str, Any]:
        return {**super().state(), "head": self.head.state_dict()}

    def resume(self, state: Mapping[str, Any]) -> None:
        super().resume(state)
        self.head.load_state_dict(state["head"])

    def teacher_logits(self, batch: Batch, visual: Tensor) -> Tensor:
        """Returns the teacher's logits [answer tokens, vocabulary] of a batch.

        `visual` has the rows of all its visual tokens, also of those that the model does not see.
        """
        return answer_logits(self.teacher, batch, visual, self.forward)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        stage, scores = self.stage, {}
        with torch.set_grad_enabled(stage.vision), torch.autocast("cpu", torch.bfloat16, HAS_BF16):
            visual = self.forward.encode(self.model, batch.frames).float()
        total = torch.zeros(())
        # The loss of the probes.
        if stage.probe:
            trains_head_alone = self.trains_head_first and self.cpu_s < WARM_UP_SHARE * stage.cpu_s
            probed = visual.detach() if trains_head_alone else visual
            probe, right = _probe_loss(self.head, probed, batch.probes)
            total = stage.probe * probe
            scores = {"probe": float(probe.detach()), "right": [round(r, 3) for r in right]}
        if stage.name == "probe":
            return total, scores
        # The loss of the answers' tokens. A stage that drops visual tokens shows the model a view.
        whole_batch = batch
        seen_visual = visual
        if stage.drops and (ratio := _random_keep_ratio()) < 1:
            view = random_view(batch, ratio)
            batch = drop_visual_tokens(batch, view)
            seen_visual = visual.view(len(view), -1, HIDDEN)[view]
        logits = answer_logits(self.model, batch, seen_visual, self.forward)
        ce = F.cross_entropy(logits, batch.labels[batch.labels >= 0])
        scores |= {"ce": float(ce.detach()), **accuracies(logits, batch)}
        if self.teacher is None:
            return total + ce, scores
        # The distance from the teacher's probabilities. The teacher sees all visual tokens.
        with torch.no_grad():
            teacher_logits = self.teacher_logits(whole_batch, visual)
        kl = (
            F.kl_div(logits.log_softmax(-1), teacher_logits.softmax(-1), reduction="none")
            .sum(-1)
            .mean()
        )
        agree = (teacher_logits.argmax(-1) == logits.argmax(-1)).float().mean()
        scores |= {"kl": float(kl.detach()), "agree": float(agree)}
        return total + 0.8 * kl + 0.2 * ce, scores


def run_steps(run: Run, run_dir: Path) -> None:
    """Trains a stage until its CPU seconds are used, and writes its state and learning curve.

    A stage that was interrupted goes on from its last checkpoint, `<stage>.part.pt`.
    Raises RuntimeError if the loss is not finite.
    """
    stage = run.stage
    part = run_dir / f"{stage.name}.part.pt"
    curve_path = run_dir / f"{stage.name}.jsonl"
    if part.exists():
        run.resume(torch.load(part, weights_only=True))
        lines = curve_path.read_text().splitlines(keepends=True)[: run.steps]
        curve_path.write_text("".join(lines))  # Steps after the checkpoint will be repeated.
    torch.manual_seed(run.steps)  # A continued stage draws other clips than before.
    source = Source(
        run.tok,
        stage.canvases,
        stage.tokens,
        seed=1000 + run.steps,
        max_objects=stage.objects,
        tasks=stage.tasks,
        probes=bool(stage.probe) or stage.drops,
        form=run.prompt_form,
    )
    saved = time.monotonic()
    with curve_path.open("a") as curve:
        while run.cpu_s < stage.cpu_s:
            began = time.process_time()
            progress = run.cpu_s / stage.cpu_s
            batch = source.next(progress)
            loss, scores = run.loss(batch)
            torch.autograd.backward(loss)
            if not torch.isfinite(loss.detach()):
                raise RuntimeError(
                    f"{stage.name}: the loss is {float(loss.detach())} at step {run.steps}"
                )
            run.optimizer.step(_learning_rate_scale(progress))
            run.mean.update_parameters(run.model)
            run.steps += 1
            run.samples += len(batch.ids)
            run.tokens += batch.ids.numel()
            if run.steps % RELEASE_MEMORY_EVERY_STEPS == 0:
                release_memory()
            run.cpu_s += time.process_time() - began
            line = {
                "step": run.steps,
                "cpu_s": round(run.cpu_s, 2),
                "samples": run.samples,
                "tokens": run.tokens,
                "canvas": [batch.canvas.kind, *batch.ids.shape, visual_tokens(batch.canvas)],
                "loss": round(float(loss.detach()), 4),
            }
            line |= {k: round(v, 4) if isinstance(v, float) else v for k, v in scores.items()}
            curve.write(json.dumps(line) + "\n")
            if time.monotonic() - saved > SAVE_EVERY_S:
                curve.flush()
                log.info("%s", line)
                _write(run.state(), part)
                saved = time.monotonic()
    _write(run.state(), run_dir / f"{stage.name}.pt")
    part.unlink(missing_ok=True)


def release_memory() -> None:
    """Gives freed memory back to the system, if the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _write(state: Mapping[str, Any], path: Path) -> None:
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    temporary.rename(path)


def load_state(run_dir: Path, name: str) -> dict[str, Any]:
    """Loads the state of a stage, whether it is finished or not."""
    whole = run_dir / f"{name}.pt"
    part = run_dir / f"{name}.part.pt"
    state: dict[str, Any] = torch.load(whole if whole.exists() else part, weights_only=True)
    return state


def _load_mean_model(run_dir: Path, name: str, layers: int) -> Any:
    mean = AveragedModel(create(layers))
    mean.load_state_dict(load_state(run_dir, name)["mean"])
    return mean.module


def _with_tower_of(tower: Any, decoder: Any) -> Any:
    """Copies the vision tower of `tower` into `decoder`, bit for bit, and returns `decoder`."""
    decoder.model.visual.load_state_dict(tower.model.visual.state_dict())
    return decoder


def _starting_models(stage: Stage, run_dir: Path, pair: Path | None) -> tuple[Any, Any | None]:
    """Returns the model that a stage starts from, and its teacher or None.

    With the folder of a `pair`, `medium` starts from the pair's target without the layers that
    `large` added, and `naive` and `draft` start from the pair's drafts.
    """
    if stage.name == "probe":
        return create(stage.layers), None
    if stage.name == "small":
        return _load_mean_model(run_dir, "probe", DRAFT_LAYERS), None
    if stage.name == "medium":
        if pair is not None:
            return shrink(build.load(pair / "target"), stage.layers), None
        return grow(_load_mean_model(run_dir, "small", DRAFT_LAYERS), stage.layers), None
    if stage.name == "large":
        return grow(_load_mean_model(run_dir, "medium", MEDIUM_LAYERS), stage.layers), None
    # What follows are the stages of the drafts, which have a teacher and its tower.
    teacher_stage, layers = ("large", TARGET_LAYERS)
    if stage.name == "early":
        teacher_stage, layers = ("medium", MEDIUM_LAYERS)
    teacher = _load_mean_model(run_dir, teacher_stage, layers)
    # The pair's files have bfloat16, so the draft learns from a target that was rounded to it.
    teacher = teacher.bfloat16().float().requires_grad_(False)
    if pair is not None:
        return _with_tower_of(teacher, build.load(pair / DRAFT_FOLDERS[stage.name])), teacher
    before = {"early": "small", "naive": "early", "draft": "naive"}[stage.name]
    return _with_tower_of(teacher, _load_mean_model(run_dir, before, DRAFT_LAYERS)), teacher


def train(
    run_dir: Path,
    stages: Sequence[str] = tuple(s.name for s in STAGES),
    budget: Mapping[str, float] | None = None,
    *,
    pair: Path | None = None,
    smoke: bool = False,
) -> None:
    """Trains these stages in the order of STAGES; `budget` replaces CPU seconds, by a stage's name.

    With the folder of a `pair`, `medium` and the drafts' stages start from its models, and
    SKIPPED_WITH_PAIR are skipped. With `smoke`, two minutes on one-object clips show that training
    works. Each stage writes `<stage>.pt` and `<stage>.jsonl` in `run_dir`; a finished stage is not
    repeated.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    proc = load_or_make_processor(run_dir, pair)
    for stage in STAGES:
        if stage.name not in stages or (run_dir / f"{stage.name}.pt").exists():
            continue
        if pair is not None and stage.name in SKIPPED_WITH_PAIR:
            continue
        stage = shorten(stage) if smoke else stage
        stage = replace(stage, cpu_s=(budget or {}).get(stage.name, stage.cpu_s))
        log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
        model, teacher = _starting_models(stage, run_dir, pair)
        run = PairRun(stage, model, teacher, proc.tokenizer)
        # The probes go on from the stage before, unless that was skipped.
        before = {"small": "probe", "medium": "small", "large": "medium"}.get(stage.name)
        run.trains_head_first = stage.name == "medium" and pair is not None
        if before is not None and not run.trains_head_first:
            run.head.load_state_dict(load_state(run_dir, before)["head"])
        run_steps(run, run_dir)


def load_or_make_processor(run_dir: Path, pair: Path | None = None) -> Qwen2_5_VLProcessor:
    """Loads the run's processor; at first use it is made, or copied from the `pair`."""
    folder = run_dir / "processor"
    if not folder.exists():
        first = build.make_processor() if pair is None else build.load_processor(pair / "target")
        first.save_pretrained(folder)
    return build.load_processor(folder)


def export(run_dir: Path, out: Path) -> None:
    """Writes the folders of `target`, `draft-naive` and `draft` from the latest stages of the run.

    A model whose own stage has not begun gets the weights of the latest stage before it that has.
    Raises FileNotFoundError where there is none either.
    """
    proc = load_or_make_processor(run_dir)

    def load_first_reached(*stages: tuple[str, int]) -> Any:
        """Returns the model of the first of these stages that the run has begun: (name, layers)."""
        for name, layers in stages:
            if any((run_dir / f"{name}{end}").exists() for end in (".pt", ".part.pt")):
                return _load_mean_model(run_dir, name, layers)
        raise FileNotFoundError(f"no weights of {[name for name, _ in stages]} in {run_dir}")

    small = ("small", DRAFT_LAYERS)
    target = load_first_reached(("large", TARGET_LAYERS), ("medium", MEDIUM_LAYERS), small)
    if target.config.text_config.num_hidden_layers < TARGET_LAYERS:
        target = grow(target, TARGET_LAYERS)
    draft_stages = (("naive", DRAFT_LAYERS), ("early", DRAFT_LAYERS), small)
    naive = load_first_reached(*draft_stages)
    draft = load_first_reached(("draft", DRAFT_LAYERS), *draft_stages)
    build.save(target, proc, out / "target")
    build.save(_with_tower_of(target, naive), proc, out / "draft-naive")
    build.save(_with_tower_of(target, draft), proc, out / "draft")
