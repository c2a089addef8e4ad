"""Trains a draft for the language model that learnt to see (`seeing.py`), which is its teacher.

The draft begins as the embedded pair's draft, grown to four layers of width 192. It gets the
teacher's vocabulary: tokens that its own vocabulary has too keep their embeddings, and all others
begin at zero. Both models have the vision tower of the embedded pair, but the teacher's has another
merger.

early   The draft learns true answers from all visual tokens.
draft   It learns the teacher's probabilities from views with visual tokens dropped.
"""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.training import adapted_llama, build
from lab.training.batch import Batch
from lab.training.model import encode_frames, grow
from lab.training.seeing import round_frozen_weights
from lab.training.stages import SEEING_DRAFT, Stage
from lab.training.train import HAS_BF16, PairRun, answer_logits, load_state, run_steps
from saccade.inputs.checkpoints import EMBEDDED
from saccade.world.train_draft.run import make_untrained_model

log = logging.getLogger(__name__)


def make_draft(teacher: Any, tok: Any, layers: int) -> Any:
    """Returns the embedded pair's draft with `layers` layers and the teacher's vocabulary.

    `tok` is the teacher's tokenizer. For a token of both vocabularies the logit is that of the
    pair's draft.
    """
    pair = grow(build.load(EMBEDDED / "draft"), layers)
    config = deepcopy(pair.config)
    for name in ("image", "video", "vision_start", "vision_end"):
        setattr(config, f"{name}_token_id", getattr(teacher.config, f"{name}_token_id"))
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.text_config, name, getattr(teacher.config.text_config, name))
    model = make_untrained_model(config, 0)
    # Everything but the embeddings, whose vocabularies differ, is copied as it is.
    state = model.state_dict()
    old = pair.state_dict()
    for name, value in state.items():
        if value.shape == old[name].shape:
            value.copy_(old[name])
    pair_vocabulary = build.load_processor(EMBEDDED / "draft").tokenizer.get_vocab()
    rows = model.model.language_model.embed_tokens.weight.data.zero_()
    for word, place in tok.get_vocab().items():
        if word in pair_vocabulary:
            rows[place] = pair.model.language_model.embed_tokens.weight.data[pair_vocabulary[word]]
    model.generation_config = teacher.generation_config
    return model


class DistillationRun(PairRun):
    """A stage whose teacher has visual tokens of its own.

    In the pair's training, draft and teacher read the same visual tokens. This teacher has another
    merger, which is the last part of a vision tower. So it makes its own tokens of the frames, and
    does not read the draft's (`visual`).
    """

    def teacher_logits(self, batch: Batch, visual: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, HAS_BF16):
            own = encode_frames(self.teacher, batch.frames).float()
        return answer_logits(self.teacher, batch, own)


def train(run_dir: Path, stages: tuple[Stage, ...] = SEEING_DRAFT, text: Path | None = None) -> Any:
    """Trains the stages that are not finished, and returns the draft and the teacher's tokenizer.

    The teacher is the language model with the adapter in `run_dir`. `text` is the folder of the
    language model, or None for its usual one.
    """
    teacher, tok = adapted_llama.load_adapted(run_dir / adapted_llama.ADAPTER_FILE, text)
    round_frozen_weights(teacher)
    draft = make_draft(teacher, tok, stages[0].layers)
    for stage in stages:
        # Without a teacher, a stage learns the true answers.
        run = DistillationRun(stage, draft, teacher if stage.drops else None, tok)
        if not (run_dir / f"{stage.name}.pt").exists():
            log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
            run_steps(run, run_dir)
        # The next stage begins with the mean of the last steps' weights.
        run.mean.load_state_dict(load_state(run_dir, stage.name)["mean"])
        draft = run.mean.module
    return draft, tok
