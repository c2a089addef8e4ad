"""Trains an EAGLE-3 head for a target (arXiv:2503.01840, section 3): ``--recipe eagle3``.

A head is a decoder layer that drafts from the target's hidden states. It has a row for each place
of a text: row j reads the target's hidden state at place j and the token at place j + 1, and
predicts the token at place j + 2. While it drafts, it reads its own output of the row before in the
place of the target's hidden state. Training does the same for some steps ("training-time test" in
the paper). The target reads each conversation, and its hidden states are used at once, so nothing
is stored.

Steps are counted from 0. In step s > 0 row j reads what row j - 1 returned in step s - 1. That row
read what row j - 2 returned in step s - 2, and so on, back to row i = j - s of step 0. So row j of
step s is the row that reads the s-th drafted token and predicts the one after it, in a draft whose
first row is row i. It may see only what that row sees in drafting: the keys of step 0 up to row i,
and of each step t = 1 ... s the one key of row i + t. For example, row 7 of step 2 reads the second
drafted token of a draft whose first row is row 5. It sees the keys of rows 0 to 5 of step 0, of row
6 of step 1, and its own.

The loss is the cross-entropy with the target's distribution over the head's own vocabulary, and
each further step counts 0.8 of the one before.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from math import ceil
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PrinterCallback, Trainer
from transformers.models.llama.modeling_llama import LlamaAttention

from saccade.core.errors import OptionError
from saccade.inputs import Loaded
from saccade.model.heads.head import eagle3_config, make_rotary
from saccade.model.heads.layouts import LAYER
from saccade.model.heads.modules import Eagle3Head
from saccade.world.train_draft.conversations import LlavaConversation
from saccade.world.train_draft.recipes import DraftRecipe, Settings
from saccade.world.train_draft.trainer import (
    OnProgress,
    PhaseRun,
    ProgressCallback,
    dataset,
    training_arguments,
)

# The argument by which an attention gets its cache. Transformers 5.24 renamed it.
CACHE_ARGUMENT = (
    "cache"
    if "cache" in inspect.signature(LlamaAttention.forward).parameters
    else "past_key_values"
)
STEP_DECAY = 0.8  # A step's weight in the loss, over that of the step before.
MAX_DRAFT_VOCAB = 32_000  # The most ids that a head can draft, as in published heads.
# Where the target has more ids than ``MAX_DRAFT_VOCAB``, the answers of this many samples show
# which of them are frequent.
COUNTED_SAMPLES = 256
# Published heads read the hidden states of three layers: 2, the middle one and the third from the
# end. Targets with fewer layers than this are read at other layers.
MIN_DEPTH_OF_PUBLISHED_LAYERS = 8


# -- the head ----------------------------------------------------------------------------------


def make_head_config(target: Loaded, draft_vocab: int) -> dict[str, Any]:
    """Returns the config.json of a fresh head, in the form that SpecForge and vLLM read."""
    backbone = target.backbone
    config = backbone.config.to_dict()
    depth = backbone.layer_count
    if depth >= MIN_DEPTH_OF_PUBLISHED_LAYERS:
        layers = (2, depth // 2, depth - 3)
    else:
        layers = (1, depth // 2, depth)
    rope = dict(config.get("rope_parameters") or {"rope_type": "default", "rope_theta": 10000.0})
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_model_type": backbone.model.config.model_type,
        "target_hidden_size": backbone.config.hidden_size,
        "hidden_size": backbone.config.hidden_size,
        "intermediate_size": config.get("intermediate_size") or 4 * backbone.config.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": backbone.heads,
        "num_key_value_heads": backbone.kv_heads,
        "head_dim": backbone.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": config.get("max_position_embeddings"),
        "rope_parameters": rope,
        "vocab_size": backbone.vocab,
        "draft_vocab_size": draft_vocab,
        "tie_word_embeddings": False,
        # Both lists name the same hidden states. In vLLM's form, here, each has the number of the
        # layer that reads it. In SpecForge's form, in ``eagle_config``, it has the number of the
        # layer that returns it, which is one less.
        "eagle_aux_hidden_state_layer_ids": [*layers],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
            "use_aux_hidden_state": True,
        },
    }


class TrainedHead(nn.Module):
    """A head under training, beside the frozen target that it learns from."""

    def __init__(self, target: Loaded, known_ids: Int[Tensor, " draft_vocab"], seed: int) -> None:
        """Makes a fresh head that can draft ``known_ids``; ``seed`` draws its weights."""
        super().__init__()
        backbone = target.backbone
        self.head_config = make_head_config(target, len(known_ids))
        config = eagle3_config(self.head_config)
        torch.manual_seed(seed)
        self.head = Eagle3Head(
            config,
            tuple(self.head_config["eagle_aux_hidden_state_layer_ids"]),
            backbone.config.hidden_size,
            backbone.vocab,
            len(known_ids),
            embedding_count=None,
            has_qk_norm=False,
            norm_before_residual=False,
        )
        for weight in self.head.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 / 2)
        # The head's id i is the target's id i + d2t[i], as in published heads.
        self.head.d2t.copy_(known_ids - torch.arange(len(known_ids)))
        # The head's output matrix begins as the target's rows of the known ids, since the head
        # learns the target's law.
        output = backbone.head_module.weight.detach()
        self.head.lm_head.weight.data.copy_(output[known_ids].to(torch.float32))
        # ``axes`` is how many axes of positions the rotary embedding reads.
        rotary, axes = make_rotary(backbone, config)
        # Modules in a list are not registered as parts of this one. So the target and the rotary
        # embedding are not trained with it.
        self._unregistered: list[Any] = [backbone, rotary, axes]

    def forward(self, inputs: Mapping[str, Tensor], steps: int) -> Float[Tensor, ""]:
        """Returns the mean loss of a batch of conversations, unrolled for ``steps`` steps.

        Conversations without an answer are left out. Raises OptionError if none has an answer.
        """
        backbone, rotary, _ = self._unregistered
        rotary.to(inputs["input_ids"].device)
        conversations = read_target(backbone, self.head.hidden_layers, inputs)
        all_losses = [self._loss(conversation, steps) for conversation in conversations]
        losses = [loss for loss in all_losses if loss is not None]
        if not losses:
            raise OptionError("no sample of this batch has an answer to learn from")
        return torch.stack(losses).mean()

    def _loss(self, conversation: TargetOutputs, steps: int) -> Float[Tensor, ""] | None:
        """Returns one conversation's loss; None where it has no answer that a row predicts."""
        total = conversation.hidden.new_zeros(())
        weights = 0.0
        # Row j predicts the token after token j + 1, which the target predicts at place j + 1.
        answer_rows = conversation.is_answer[1:]
        if not bool(answer_rows.any()):
            return None
        # Only answer rows enter the loss. What the earliest answer row returns in the last step
        # depends on the row that is ``steps - 1`` rows before it. Rows before that one are computed
        # in step 0 only.
        first = max(0, int(answer_rows.nonzero()[0]) - steps + 1)
        unrolled = self.unroll(
            conversation.ids, conversation.positions, conversation.hidden, steps, first
        )
        for step, out in enumerate(unrolled):
            learnt_rows = answer_rows.clone()
            # In step s the outputs of up to s rows, from row ``first`` on, mean nothing (see
            # ``unroll``), so answer rows among them are left out. There are some only if ``first``
            # is 0. Otherwise the first answer row is ``steps - 1`` rows after ``first``, and s is
            # at most ``steps - 1``.
            learnt_rows[:step] = False
            if not bool(learnt_rows.any()):
                break
            # After step 0 ``out`` has only the last rows, from ``first`` on.
            rows_of_out = learnt_rows[len(learnt_rows) - len(out) :]
            logits = self.head.lm_head(self.head.prepare_logits(out))[rows_of_out]
            law = conversation.laws(learnt_rows, self.head.target_ids)
            weight = STEP_DECAY**step
            total = total - weight * (law * logits.log_softmax(-1)).sum(-1).mean()
            weights += weight
        return total / weights if weights else None

    def unroll(
        self,
        ids: Int[Tensor, " len"],
        positions: Int[Tensor, "axes len"],
        target_hidden: Float[Tensor, "len layers_dim"],
        steps: int,
        first: int = 0,
    ) -> Iterator[Float[Tensor, "row dim"]]:
        """Yields the head's outputs step by step, for every token of a text but the last.

        After step 0 only the rows from ``first`` on are computed. Each of them reads what the row
        before it returned in the step before. Where that was not computed, the row reads zeros, and
        what it returns means nothing. A step later the next row reads that, so it means nothing
        either. So in step s up to s rows at the beginning mean nothing.
        """
        backbone, rotary, axes = self._unregistered
        count = len(ids) - 1  # The last token's row has no token after it.
        embeds = backbone.embed(ids[1:]).detach().float()
        own_positions = positions[:axes, :count]
        # The rotary embedding takes [axes, batch, len], or [batch, len] where there is one axis.
        batched_positions = own_positions[:, None] if axes > 1 else own_positions
        rotation = rotary(embeds[None], batched_positions)
        hidden = self.head.project(target_hidden[:count].float())
        keys = _UnrolledKeys()
        for step in range(steps):
            out = self.head(
                embeds,
                hidden,
                rotation,
                own_positions,
                attention_mask=unrolled_mask(count, step, embeds.device, first)[None, None],
                **{CACHE_ARGUMENT: keys},
            )
            yield out
            # In the next step each row reads the output of the row before it, and the first zeros.
            hidden = torch.cat([torch.zeros_like(out[:1]), out[:-1]])
            if step == 0:
                hidden = hidden[first:]
                embeds = embeds[first:]
                own_positions = own_positions[:, first:]
                rotation = tuple(each[..., first:, :] for each in rotation)

    def save(self, folder: Path) -> None:
        """Writes the head as SpecForge does, without the embeddings, which are the target's."""
        tensors = {
            name.replace(LAYER, "midlayer."): weight.contiguous()
            for name, weight in self.head.state_dict().items()
        }
        in_draft = torch.zeros(self.head.target_vocab, dtype=torch.bool)
        tensors["t2d"] = in_draft.index_fill_(0, self.head.target_ids.cpu(), True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.head_config, indent=1) + "\n")


class _UnrolledKeys:
    """The keys and values of all steps so far, in the place of a cache of transformers: ``update``
    adds those of one step and returns all."""

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *others: Any, **options: Any
    ) -> tuple[Tensor, Tensor]:
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)


def unrolled_mask(
    rows: int, step: int, device: torch.device | str = "cpu", first: int = 0
) -> Bool[Tensor, "rows keys"]:
    """Returns which keys each row of a step sees; the docstring of this module gives the rule.

    The columns are the keys of step 0, then those of step 1, and so on. All steps but step 0 have
    only the rows from ``first`` on. With 3 rows, the last row of step 1 has the mask [1 1 0 | 0 0
    1]: of step 0 it sees rows 0 and 1, and of step 1 itself.
    """
    row = torch.arange(rows, device=device)
    rows_back = row[:, None] - row  # How many rows each key is before the query.
    if step:
        rows_back = rows_back[first:]
    parts = [rows_back >= step]
    parts += [rows_back[:, first:] == step - earlier for earlier in range(1, step + 1)]
    return torch.cat(parts, 1)


# -- the target --------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetOutputs:
    """One conversation as the target read it, with what it computed at each place."""

    ids: Int[Tensor, " len"]
    positions: Int[Tensor, "axes len"]
    hidden: Float[Tensor, "len layers_dim"]  # the hidden states that a head reads, side by side
    normed: Float[Tensor, "len dim"]  # what the output matrix reads
    is_answer: Bool[Tensor, " len"]  # places that predict a token of the answer
    output: nn.Module  # the output matrix

    @torch.no_grad()
    def laws(
        self, rows: Bool[Tensor, " row"], known_ids: Int[Tensor, " draft_vocab"]
    ) -> Float[Tensor, "selected draft_vocab"]:
        """Returns the target's laws over a head's vocabulary at the places after these rows, which
        are what the rows learn to predict."""
        normed = self.normed[1:][rows]
        return self.output(normed).float()[:, known_ids].softmax(-1)


@torch.no_grad()
def read_target(
    backbone: Any, layers: tuple[int, ...], inputs: Mapping[str, Tensor]
) -> Iterator[TargetOutputs]:
    """Yields what the target computes of each conversation of a batch."""
    inputs = dict(inputs)
    # This mask has the tokens that a pruned draft would read, but a head reads the whole prompt.
    inputs.pop("kept_mask")
    labels = inputs.pop("labels")
    mask = inputs["attention_mask"].bool()
    text = backbone.text
    hidden_states: dict[int, Tensor] = {}
    text_arguments: dict[str, Any] = {}

    def record_input(number: int) -> Any:
        return lambda module, args: hidden_states.__setitem__(number, args[0])

    def record_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        text_arguments["positions"] = kwargs.get("position_ids")

    with ExitStack() as stack:
        # Hidden state n is what layer n reads, and the last one is what the norm reads.
        modules = [*text.layers[: backbone.layer_count], text.norm]
        for number in {*layers}:  # Two of a small target's layers may be the same one.
            hook = modules[number].register_forward_pre_hook(record_input(number))
            stack.callback(hook.remove)
        hook = text.register_forward_pre_hook(record_positions, with_kwargs=True)
        stack.callback(hook.remove)
        normed = backbone.model.base_model(**inputs, use_cache=False).last_hidden_state
    ids = inputs["input_ids"]
    positions = text_arguments["positions"]
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    # They are [batch, len] or [axes, batch, len]. Some models put positions of plain text before
    # those of the axes, so only the last ones are taken. If there is one axis or one row for all,
    # ``expand`` repeats it.
    positions = positions.reshape(-1, positions.shape[-2], positions.shape[-1])
    positions = positions[-backbone.axes :].expand(backbone.axes, *ids.shape)
    for number, is_real in enumerate(mask):  # Tokens that are not real are padding.
        yield TargetOutputs(
            ids[number][is_real],
            positions[:, number][:, is_real],
            torch.cat([hidden_states[layer][number][is_real] for layer in layers], -1),
            normed[number][is_real],
            labels[number][is_real] >= 0,
            backbone.model.get_output_embeddings(),
        )


# -- the Trainer -------------------------------------------------------------------------------


class HeadTrainer(Trainer):
    """The Trainer with the unrolled loss."""

    def __init__(self, phase_run: PhaseRun, unroll_steps: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.phase_run, self.unroll_steps = phase_run, unroll_steps
        # Our loss is a mean over a batch, so the Trainer has to divide it when it accumulates.
        self.model_accepts_loss_kwargs = False

    def compute_loss(
        self,
        model: Any,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Tensor:
        loss: Tensor = model(inputs, self.unroll_steps)
        if not torch.isfinite(loss.detach()):
            raise OptionError(
                f"the loss is no longer a number at step {self.state.global_step}; try a smaller "
                "--lr-scale"
            )
        return loss


def make_head_trainer(
    phase_run: PhaseRun,
    head: TrainedHead,
    target: Loaded,
    unroll_steps: int,
    on_progress: OnProgress,
) -> Trainer:
    """Makes a Trainer for a head, and freezes the target."""
    args = training_arguments(phase_run)
    target.backbone.model.to(args.device).requires_grad_(False)
    trainer = HeadTrainer(
        phase_run,
        unroll_steps,
        model=head.to(args.device),
        args=args,
        train_dataset=dataset(phase_run, target),
        data_collator=lambda items: items[0],  # Each item of the data set is a batch already.
        callbacks=[ProgressCallback(phase_run, on_progress)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def known_ids(
    target: Loaded,
    settings: Settings,
    recipe: DraftRecipe,
    conversations: Sequence[LlavaConversation],
) -> Int[Tensor, " draft_vocab"]:
    """Returns the target's ids that a head can draft, in ascending order.

    A vocabulary of up to ``MAX_DRAFT_VOCAB`` ids is taken whole. Of a larger one that many ids are
    taken: those that are most frequent in the answers of ``COUNTED_SAMPLES`` samples. If fewer ids
    occur there, the lowest of the other ids are added.
    """
    vocab = target.backbone.vocab
    if vocab <= MAX_DRAFT_VOCAB:
        return torch.arange(vocab)
    # This phase is never trained, so its checkpoints do not matter. It only supplies samples, of
    # which each step has at least one.
    phase_run = PhaseRun(
        recipe.phases[0],
        steps=COUNTED_SAMPLES,
        settings=settings,
        number=0,
        checkpoints=Path(),
        save_every_s=0.0,
        conversations=tuple(conversations),
    )
    samples: Any = dataset(phase_run, target)
    counts: Counter[int] = Counter()
    for index in range(ceil(COUNTED_SAMPLES / phase_run.samples_per_forward)):
        labels = samples[index]["labels"]
        counts.update(labels[labels >= 0].tolist())
    ids = [token for token, _ in counts.most_common(MAX_DRAFT_VOCAB)]
    others = (token for token in range(vocab) if token not in counts)
    ids += islice(others, MAX_DRAFT_VOCAB - len(ids))
    return torch.tensor(sorted(ids))


def check_settings(settings: Settings) -> None:
    """Raises OptionError for settings that mean nothing to a head."""
    for name in ("draft", "language", "tower", "distill", "drop_visual"):
        if vars(settings)[name]:
            option = f"--{name.replace('_', '-')}"
            raise OptionError(f"{option} is for drafts that are models: leave it out with eagle3")
