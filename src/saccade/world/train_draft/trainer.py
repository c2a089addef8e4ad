"""Trains a draft for one phase of ``saccade train-draft``, with the Hugging Face Trainer.

The draft learns to answer as the target does, although it sees only a part of the visual tokens.
The phase's loss, learning rates, progress and checkpoints are here. ``run`` runs the phases one
after another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from saccade.core.errors import OptionError
from saccade.inputs import Loaded
from saccade.world.train_draft.conversations import Conversations, LlavaConversation
from saccade.world.train_draft.recipes import Part, Phase, Settings, trained_parameters
from saccade.world.train_draft.samples import Samples, readable_kinds

MAX_SAMPLES_PER_FORWARD = 4

OnProgress = Callable[[str, int, int, float | None], None]
"""Called after each forward of a phase, and once more at its end, with (name of the phase, samples
done in it, all its samples, the last loss or None before the first update)."""


@dataclass(frozen=True)
class PhaseRun:
    """One phase of a run, and where its checkpoints go."""

    phase: Phase
    steps: int  # Updates of the weights, each by the gradient of ``batch_size`` samples.
    settings: Settings  # The options of the command, the same for all phases.
    number: int  # The phase's number in the run, from which its samples are seeded.
    checkpoints: Path  # The folder of this phase's checkpoints.
    save_every_s: float  # A checkpoint is saved whenever so many seconds have passed.
    conversations: Sequence[LlavaConversation] = ()  # If empty, the world's samples are used.

    @property
    def batch_size(self) -> int:
        return self.settings.batch_size or self.phase.batch_size

    @property
    def samples_per_forward(self) -> int:
        """The largest divisor of the batch size up to ``MAX_SAMPLES_PER_FORWARD``."""
        return max(n for n in range(1, MAX_SAMPLES_PER_FORWARD + 1) if self.batch_size % n == 0)


# -- loss --------------------------------------------------------------------------------------


def answer_logits(
    model: Any, inputs: Mapping[str, Tensor], *, whole_prompt: bool
) -> tuple[Float[Tensor, "answers vocab"], Int[Tensor, " answers"]]:
    """Returns the logits at every position that predicts a token of an answer, and these tokens.

    ``inputs`` are a batch of ``samples``. Their ``labels`` have the token to predict at each
    position, or -100 where none is learnt. Their ``kept_mask`` is False for padding, and for the
    visual tokens that the draft does not see. If ``whole_prompt`` is False, the rows of these
    tokens are removed between the vision tower and the language model, and the other rows keep
    their positions. If it is True, only padding is removed.
    """
    inputs = dict(inputs)
    kept_mask = inputs.pop("kept_mask")
    labels = inputs.pop("labels")
    if whole_prompt:
        kept_mask = inputs["attention_mask"].bool()
    kept_counts = kept_mask.sum(1, keepdim=True)
    # The kept rows come first, in their order. Samples that keep fewer are padded at the end with
    # rows that were not kept. No real row attends to these, because attention is causal.
    order = (~kept_mask).long().argsort(dim=1, stable=True)[:, : int(kept_counts.max())]
    is_real = torch.arange(order.shape[1], device=order.device) < kept_counts

    def select_rows(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, _select_rows(kwargs, order, is_real, kept_mask)

    handle = model.get_decoder().register_forward_pre_hook(select_rows, with_kwargs=True)
    try:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    labels = labels.gather(1, order).masked_fill(~is_real, -100)
    is_answer = labels >= 0
    return model.get_output_embeddings()(hidden[is_answer]), labels[is_answer]


def _select_rows(
    kwargs: dict[str, Any],
    order: Int[Tensor, "batch kept"],
    is_real: Bool[Tensor, "batch kept"],
    kept_mask: Bool[Tensor, "batch len"],
) -> dict[str, Any]:
    """Returns the arguments of a language model's forward, ``kwargs``, for the rows in ``order``.

    ``order`` has the indices of each sample's rows, and ``is_real`` is False where such a row only
    pads. ``kept_mask`` marks the real rows among all.
    """
    embeds = kwargs["inputs_embeds"]
    positions = kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    # Positions are [batch, len] or [axes, batch, len], where the batch may be given as 1.
    positions = positions.expand(*positions.shape[:-2], *kept_mask.shape)
    index = order.expand(*positions.shape[:-2], *order.shape)
    selected = {
        **kwargs,
        "inputs_embeds": embeds.gather(1, order[..., None].expand(-1, -1, embeds.shape[2])),
        "position_ids": positions.gather(-1, index),
        # Without a mask, gaps in the positions would read as several texts packed into one row.
        "attention_mask": torch.ones_like(order),
    }
    visual = kwargs.get("visual_pos_masks")
    layers = kwargs.get("deepstack_visual_embeds")
    if visual is not None and layers is not None:
        # Deepstack: some models add the output of vision to the visual rows of their first layers.
        # Each tensor in ``layers`` is added in one layer. It has one row for every visual token of
        # the batch, in the batch's order.
        is_kept = kept_mask[visual]  # One entry for every visual token of the batch.
        selected["visual_pos_masks"] = visual.gather(1, order) & is_real
        selected["deepstack_visual_embeds"] = [layer[is_kept] for layer in layers]
    return selected


def distillation_loss(
    logits: Float[Tensor, "answers vocab"],
    labels: Int[Tensor, " answers"],
    target_logits: Float[Tensor, "answers target_vocab"] | None,
    weight: float,
) -> Float[Tensor, ""]:
    """Returns (1 - weight) x cross-entropy + weight x KL(p || q), means over answer positions.

    p is the target's law, from ``target_logits``, and q the draft's. Without ``target_logits`` the
    loss is the cross-entropy alone. The divergence is taken over the ids that both vocabularies
    have, because the vocabularies may be padded differently.
    """
    cross_entropy = F.cross_entropy(logits, labels)
    if target_logits is None:
        return cross_entropy
    shared_vocab = min(logits.shape[1], target_logits.shape[1])
    q = logits[:, :shared_vocab].log_softmax(-1)
    p = target_logits[:, :shared_vocab].log_softmax(-1)
    divergence = F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()
    return (1 - weight) * cross_entropy + weight * divergence


# -- the Trainer -------------------------------------------------------------------------------


class DraftTrainer(Trainer):
    """The Trainer with our loss, :func:`distillation_loss`.

    ``teacher`` is the target. If it is None, the draft learns from the labels alone.
    """

    def __init__(self, phase_run: PhaseRun, teacher: Any | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phase_run, self.teacher = phase_run, teacher
        # Our loss is a mean, so the Trainer has to divide it when it accumulates gradients.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        logits, labels = answer_logits(model, inputs, whole_prompt=False)
        target_logits = None
        if self.teacher is not None:
            with torch.no_grad():
                target_logits, _ = answer_logits(self.teacher, inputs, whole_prompt=True)
        loss = distillation_loss(logits, labels, target_logits, self.phase_run.settings.distill)
        if not torch.isfinite(loss.detach()):
            raise OptionError(
                f"the loss of {self.phase_run.phase.name} is no longer a number at step "
                f"{self.state.global_step}; try a smaller --lr-scale"
            )
        return loss

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # save_pretrained may write weights under other names than the modules have. The Trainer's
        # own way of loading would leave these out with only a warning.
        kind: Any = type(self.model)
        checkpoint = kind.from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        cast(Any, self.model).load_state_dict(checkpoint.state_dict())


class ProgressCallback(TrainerCallback):
    """Reports the progress of a phase, and saves checkpoints by the clock."""

    def __init__(self, phase_run: PhaseRun, on_progress: OnProgress) -> None:
        self._phase_run, self._on_progress = phase_run, on_progress
        self._last_save = time.monotonic()
        self._samples_of_step = 0  # samples of the current step so far

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._samples_of_step += self._phase_run.samples_per_forward
        self._report(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._samples_of_step = 0
        if time.monotonic() - self._last_save >= self._phase_run.save_every_s:
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._report(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last_save = time.monotonic()

    def _report(self, state: Any) -> None:
        done = state.global_step * self._phase_run.batch_size + self._samples_of_step
        # The last entry of a whole run is the Trainer's summary, which has no loss.
        losses = [entry["loss"] for entry in state.log_history[-2:] if "loss" in entry]
        total = self._phase_run.steps * self._phase_run.batch_size
        self._on_progress(self._phase_run.phase.name, done, total, losses[-1] if losses else None)


def make_trainer(
    phase_run: PhaseRun, draft: Loaded, target: Loaded, on_progress: OnProgress
) -> DraftTrainer:
    """Makes a Trainer for one phase; freezes all parameters that the phase does not train."""
    model: Any = draft.backbone.model
    phase, settings = phase_run.phase, phase_run.settings
    trained = trained_parameters(model, phase)
    for name, p in model.named_parameters():
        p.requires_grad_(name in trained)
    args = training_arguments(phase_run)
    teacher: Any = target.backbone.model.to(args.device) if settings.distill else None
    trainer = DraftTrainer(
        phase_run,
        teacher,
        model=model.to(args.device),
        args=args,
        train_dataset=dataset(phase_run, draft),
        data_collator=lambda items: items[0],
        callbacks=[ProgressCallback(phase_run, on_progress)],
        optimizers=(_optimizer(model, trained, phase, args), None),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def training_arguments(phase_run: PhaseRun) -> Any:
    """Returns the Trainer's arguments for a phase."""
    phase, settings = phase_run.phase, phase_run.settings
    args: Any = TrainingArguments(
        output_dir=str(phase_run.checkpoints),
        max_steps=phase_run.steps,
        per_device_train_batch_size=1,  # An item is a batch already.
        gradient_accumulation_steps=phase_run.batch_size // phase_run.samples_per_forward,
        train_sampling_strategy="sequential",
        learning_rate=phase.learning_rate * settings.lr_scale,
        lr_scheduler_type=phase.schedule,
        warmup_steps=math.ceil(phase.warmup * phase_run.steps),
        weight_decay=phase.weight_decay,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="steps",
        save_steps=phase_run.steps,  # Checkpoints are also saved by the clock.
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # Copies of a model in threads would lose the hook that drops tokens.
    return args


def dataset(phase_run: PhaseRun, draft: Loaded) -> Dataset[Any]:
    """Returns the batches of a phase, one for each forward: of the run's conversations, or of the
    world's samples if there are none."""
    seed = (phase_run.settings.seed, phase_run.number)
    max_drop = phase_run.settings.drop_visual
    count = phase_run.steps * phase_run.batch_size // phase_run.samples_per_forward
    if phase_run.conversations:
        return Conversations(
            draft,
            phase_run.conversations,
            seed,
            count=count,
            batch=phase_run.samples_per_forward,
            max_drop=max_drop,
        )
    media = readable_kinds(draft, phase_run.phase.media)
    return Samples(
        draft, media, seed, count=count, batch=phase_run.samples_per_forward, max_drop=max_drop
    )


def _optimizer(model: nn.Module, trained: Mapping[str, Part], phase: Phase, args: Any) -> Any:
    """Returns the Trainer's optimizer for the trained parameters. Those of vision have a learning
    rate of their own."""
    parameters = dict(model.named_parameters())
    groups = []
    for part in sorted(set(trained.values())):
        scale = phase.vision_rate if part == "vision" else 1.0
        chosen = [parameters[name] for name, own_part in trained.items() if own_part == part]
        groups.append({"params": chosen, "lr": args.learning_rate * scale})
    optimizer_class, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    return optimizer_class(groups, **{**settings, "weight_decay": args.weight_decay})
