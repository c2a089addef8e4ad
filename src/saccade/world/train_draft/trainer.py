"""One phase of draft training over the Hugging Face Trainer: its loss, rates and checkpoints."""

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
from saccade.world.train_draft.conversations import Conversations, Told
from saccade.world.train_draft.recipes import Part, Phase, Settings, trained
from saccade.world.train_draft.samples import Samples, readable

TOGETHER = 4  # samples in one forward, at most

Tell = Callable[[str, int, int, float | None], None]


@dataclass(frozen=True)
class Training:
    """A phase as it is run."""

    phase: Phase
    steps: int
    settings: Settings
    number: int  # of the phase
    place: Path  # of its checkpoints
    save_every_s: float
    told: Sequence[Told] = ()  # conversations to learn from; none: the world's

    @property
    def batch_size(self) -> int:
        return self.settings.batch_size or self.phase.batch_size

    @property
    def together(self) -> int:
        """Samples in one forward: the largest divisor of the batch up to ``TOGETHER``."""
        return max(n for n in range(1, TOGETHER + 1) if self.batch_size % n == 0)


# -- loss --------------------------------------------------------------------------------------


def answers(
    model: Any, inputs: Mapping[str, Tensor], *, whole: bool
) -> tuple[Float[Tensor, "answers vocab"], Int[Tensor, " answers"]]:
    """Logits at every answer position and the tokens that belong there.

    Unless ``whole``, rows outside ``stay`` are taken out where the language model begins: what is
    left keeps the positions it had.
    """
    inputs = dict(inputs)
    stay, labels = inputs.pop("stay"), inputs.pop("labels")
    if whole:
        stay = inputs["attention_mask"].bool()
    counts = stay.sum(1, keepdim=True)
    # the rows that stay in their order, then others, as filler behind every answer
    order = (~stay).long().argsort(dim=1, stable=True)[:, : int(counts.max())]
    real = torch.arange(order.shape[1], device=order.device) < counts

    def cut(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, _cut(kwargs, order, real, stay)

    handle = model.get_decoder().register_forward_pre_hook(cut, with_kwargs=True)
    try:
        hidden = model.base_model(**inputs, use_cache=False).last_hidden_state
    finally:
        handle.remove()
    labels = labels.gather(1, order).masked_fill(~real, -100)
    at = labels >= 0
    return model.get_output_embeddings()(hidden[at]), labels[at]


def _cut(
    kwargs: dict[str, Any],
    order: Int[Tensor, "batch kept"],
    real: Bool[Tensor, "batch kept"],
    stay: Bool[Tensor, "batch len"],
) -> dict[str, Any]:
    """What a language model is called with, of the rows in ``order``."""
    embeds, positions = kwargs["inputs_embeds"], kwargs.get("position_ids")
    if positions is None:
        positions = torch.arange(embeds.shape[1], device=embeds.device)[None]
    positions = positions.expand(*positions.shape[:-2], *stay.shape)
    index = order.expand(*positions.shape[:-2], *order.shape)
    found = {
        **kwargs,
        "inputs_embeds": embeds.gather(1, order[..., None].expand(-1, -1, embeds.shape[2])),
        "position_ids": positions.gather(-1, index),
        # without one, gaps in the positions would read as several texts packed into one row
        "attention_mask": torch.ones_like(order),
    }
    visual, layers = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds")
    if visual is not None and layers is not None:
        found["visual_pos_masks"] = visual.gather(1, order) & real
        found["deepstack_visual_embeds"] = [layer[stay[visual]] for layer in layers]
    return found


def loss_of(
    logits: Float[Tensor, "answers vocab"],
    wanted: Int[Tensor, " answers"],
    law: Float[Tensor, "answers target_vocab"] | None,
    weight: float,
) -> Float[Tensor, ""]:
    """(1 - weight) x cross-entropy + weight x KL(p || q), both means over answer positions.

    p is the target's law, of the logits ``law``, and q the draft's. Only ids both have are compared
    (vocabularies may be padded differently).
    """
    truth = F.cross_entropy(logits, wanted)
    if law is None:
        return truth
    both = min(logits.shape[1], law.shape[1])
    q, p = logits[:, :both].log_softmax(-1), law[:, :both].log_softmax(-1)
    away = F.kl_div(q, p, reduction="none", log_target=True).sum(-1).mean()
    return (1 - weight) * truth + weight * away


# -- the Trainer -------------------------------------------------------------------------------


class DraftTrainer(Trainer):
    """The Trainer with our loss."""

    def __init__(self, work: Training, teacher: Any | None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.work, self.teacher = work, teacher
        self.model_accepts_loss_kwargs = False  # ours is a mean: to be divided when accumulating

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        logits, wanted = answers(model, inputs, whole=False)
        law = None
        if self.teacher is not None:
            with torch.no_grad():
                law, _ = answers(self.teacher, inputs, whole=True)
        loss = loss_of(logits, wanted, law, self.work.settings.distill)
        if not torch.isfinite(loss.detach()):
            raise OptionError(
                f"the loss of {self.work.phase.name} is no longer a number at step "
                f"{self.state.global_step}; try a smaller --lr-scale"
            )
        return loss

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        # save_pretrained may write other names than the modules have, which the Trainer's own way
        # of loading passes over with a warning
        kind: Any = type(self.model)
        kept = kind.from_pretrained(resume_from_checkpoint, dtype=torch.float32)
        cast(Any, self.model).load_state_dict(kept.state_dict())


class _Watch(TrainerCallback):
    """Tells how far a phase is, and asks for checkpoints by the clock."""

    def __init__(self, work: Training, tell: Tell) -> None:
        self._work, self._tell = work, tell
        self._saved, self._part = time.monotonic(), 0

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._part += self._work.together
        self._say(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._part = 0
        if time.monotonic() - self._saved >= self._work.save_every_s:
            control.should_save = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._say(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saved = time.monotonic()

    def _say(self, state: Any) -> None:
        done = state.global_step * self._work.batch_size + self._part
        losses = [entry["loss"] for entry in state.log_history[-2:] if "loss" in entry]
        total = self._work.steps * self._work.batch_size
        self._tell(self._work.phase.name, done, total, losses[-1] if losses else None)


def trainer(work: Training, draft: Loaded, target: Loaded, tell: Tell) -> DraftTrainer:
    """A Trainer for one phase; freezes everything of the draft that does not train in it."""
    model: Any = draft.backbone.model
    phase, settings = work.phase, work.settings
    trains = trained(model, phase)
    for name, p in model.named_parameters():
        p.requires_grad_(name in trains)
    args: Any = TrainingArguments(
        output_dir=str(work.place),
        max_steps=work.steps,
        per_device_train_batch_size=1,  # an item is a batch already
        gradient_accumulation_steps=work.batch_size // work.together,
        train_sampling_strategy="sequential",
        learning_rate=phase.learning_rate * settings.lr_scale,
        lr_scheduler_type=phase.schedule,
        warmup_steps=math.ceil(phase.warmup * work.steps),
        weight_decay=phase.weight_decay,
        seed=settings.seed,
        logging_steps=1,
        save_strategy="steps",
        save_steps=work.steps,  # and by the clock
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # copies of a model in threads would lose the hook that drops tokens
    teacher: Any = target.backbone.model.to(args.device) if settings.distill else None
    made = DraftTrainer(
        work,
        teacher,
        model=model.to(args.device),
        args=args,
        train_dataset=_dataset(work, draft),
        data_collator=lambda items: items[0],
        callbacks=[_Watch(work, tell)],
        optimizers=(_optimizer(model, trains, phase, args), None),
    )
    made.remove_callback(PrinterCallback)
    return made


def _dataset(work: Training, draft: Loaded) -> Dataset[Any]:
    seed, drop = (work.settings.seed, work.number), work.settings.drop_visual
    count = work.steps * work.batch_size // work.together
    if work.told:
        return Conversations(draft, work.told, seed, count=count, batch=work.together, drop=drop)
    media = readable(draft, work.phase.media)
    return Samples(draft, media, seed, count=count, batch=work.together, drop=drop)


def _optimizer(model: nn.Module, trains: Mapping[str, Part], phase: Phase, args: Any) -> Any:
    """The Trainer's own, over what trains, with a rate of its own for the vision tower."""
    parameters = dict(model.named_parameters())
    groups = []
    for part in sorted(set(trains.values())):
        scale = phase.vision_rate if part == "vision" else 1.0
        chosen = [parameters[name] for name, mine in trains.items() if mine == part]
        groups.append({"params": chosen, "lr": args.learning_rate * scale})
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(args)
    return kind(groups, **{**settings, "weight_decay": args.weight_decay})
