"""A draft for the language model that sees (`seeing.py`): the embedded pair's, in other words.

It is the pair's draft, grown to four layers of 192, behind the tower that both have, over the
language model's vocabulary: words that both know by one token keep the row the draft has for them,
all others begin at zero.

early   it learns the world's labels from all tokens
draft   it learns the law of the model that sees, from views with tokens dropped
"""

import logging
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.training import build, shell
from lab.training.batch import Batch
from lab.training.model import grow, see
from lab.training.seeing import round_once
from lab.training.stages import SEEING_DRAFT, Stage
from lab.training.train import BF16, Pair, answers, state_of, steps
from saccade.inputs.checkpoints import EMBEDDED
from saccade.world.train_draft.run import make_untrained_model

log = logging.getLogger(__name__)


def begin(whole: Any, tok: Any, layers: int) -> Any:
    """The pair's draft over the vocabulary of `whole`, saying what it said in words both know."""
    pair = grow(build.load(EMBEDDED / "draft"), layers)
    told = deepcopy(pair.config)
    for name in ("image", "video", "vision_start", "vision_end"):
        setattr(told, f"{name}_token_id", getattr(whole.config, f"{name}_token_id"))
    for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(told.text_config, name, getattr(whole.config.text_config, name))
    model = make_untrained_model(told, 0)
    state, old = model.state_dict(), pair.state_dict()
    for name, value in state.items():
        if value.shape == old[name].shape:
            value.copy_(old[name])
    known = build.saved_processor(EMBEDDED / "draft").tokenizer.get_vocab()
    rows = model.model.language_model.embed_tokens.weight.data.zero_()
    for word, place in tok.get_vocab().items():
        if word in known:
            rows[place] = pair.model.language_model.embed_tokens.weight.data[known[word]]
    model.generation_config = whole.generation_config
    return model


class Follows(Pair):
    """A stage in which another model teaches, which has a merger of its own."""

    def law(self, batch: Batch, visual: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, BF16):
            own = see(self.teacher, batch.frames).float()
        return answers(self.teacher, batch, own)


def train(run_dir: Path, stages: tuple[Stage, ...] = SEEING_DRAFT, text: Path | None = None) -> Any:
    """Train what has not been; returns the draft, and its tokenizer. The model that teaches is that
    of `run_dir`'s adapter."""
    whole, tok = shell.seeing(run_dir / shell.FILE, text)
    round_once(whole)
    draft = begin(whole, tok, stages[0].layers)
    for stage in stages:
        run = Follows(stage, draft, whole if stage.drops else None, tok)
        if not (run_dir / f"{stage.name}.pt").exists():
            log.info("%s: %.0f CPU seconds", stage.name, stage.cpu_s)
            steps(run, run_dir)
        run.mean.load_state_dict(state_of(run_dir, stage.name)["mean"])
        draft = run.mean.module
    return draft, tok
