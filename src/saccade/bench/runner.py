"""Runs suites: every method on every item, interleaved, resumable, the answers compared.

Methods take turns on one item before the next item begins, and who goes first rotates, so that what
disturbs the machine for a while disturbs all of them alike.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.bench import draft_only, records
from saccade.bench.compare import BASELINE, WARM_UP_TOKENS, named
from saccade.bench.draft_only import is_draft_only
from saccade.bench.peers import PEERS
from saccade.bench.records import Answer
from saccade.bench.suites.datasets import message_parts
from saccade.bench.suites.types import Item, Suite
from saccade.core.errors import OptionError, SaccadeError, kind_and_line
from saccade.core.options import ends, settle
from saccade.core.prompt import Inputs
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.trace import environment
from saccade.inputs import Loaded, Pair
from saccade.inputs.media import Clip
from saccade.model.memory import Peak

Tell = Callable[[str, int, int], None]
"""(what is being done, items done, items in all)"""


@dataclass(frozen=True)
class Benchmark:
    """What to run. Its fingerprint decides whether an interrupted run may be gone on with."""

    suites: tuple[Suite, ...]
    methods: tuple[str, ...]
    limit: int | None = None
    shard: tuple[int, int] = (0, 1)  # this one, of so many
    seed: int = 0
    max_new_tokens: int | None = None  # else each suite's own
    exact: bool = False
    temperature: float = 0.0  # 0: greedy

    def items(self) -> Iterator[tuple[Suite, Item]]:
        """This shard's items: every ``n``-th of each suite's first ``limit``."""
        number, count = self.shard
        for suite in self.suites:
            for place, item in enumerate(suite.items()):
                if self.limit is not None and place >= self.limit:
                    break
                if place % count == number:
                    yield suite, item

    def about(self, target: Loaded, draft: Loaded | None) -> dict[str, Any]:
        """The first line of a run's file."""
        plan = {
            "methods": list(self.methods),
            "suites": [suite.name for suite in self.suites],
            "shard": list(self.shard),
            "seed": self.seed,
            "max_new_tokens": self.max_new_tokens,
            "target": target.name,
            "draft": None if draft is None else draft.name,
            "dtype": str(target.backbone.dtype).removeprefix("torch."),
            "device": str(target.backbone.device),
        }
        if self.exact:  # runs made before there was a choice keep their fingerprint
            plan["exact"] = True
        if self.temperature:
            plan["temperature"] = self.temperature
        key = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
        return {"plan": plan, "fingerprint": key, "environment": environment()}


def run(
    plan: Benchmark,
    target: Loaded,
    draft: Loaded | None,
    folder: Path,
    *,
    captioner: Callable[[Sequence[Sequence[np.ndarray]]], Any] | None = None,
    tell: Tell = lambda what, done, whole: None,
) -> list[Answer]:
    """Every answer of the plan, those of an earlier, interrupted run in ``folder`` included.

    ``captioner`` makes a captioner of the frames of each video and image, for views that read one.
    Raises OptionError where ``folder`` holds another plan's run.
    """
    recipes = {
        **named([name for name in plan.methods if not is_draft_only(name)]),
        **{name: draft_only.recipe(name) for name in plan.methods if is_draft_only(name)},
    }
    about, pair = plan.about(target, draft), Pair(target, draft)
    folder.mkdir(parents=True, exist_ok=True)
    known: list[Answer] = []
    if (folder / records.RESULTS).exists():
        earlier, known = records.read(folder)
        if earlier["fingerprint"] != about["fingerprint"]:
            raise OptionError(
                f"{folder} holds a run of another plan: give another --out, or delete it"
            )
    finished = {(answer.suite, answer.item) for answer in known}
    todo = [(suite, item) for suite, item in plan.items() if (suite.name, item.id) not in finished]
    whole = len(finished) + len(todo)
    settings: dict[str, Any] = {"do_sample": plan.temperature > 0}
    if plan.temperature:
        settings["temperature"] = plan.temperature
    warmed: set[str] = set()
    for number, (suite, item) in enumerate(todo):
        longest = plan.max_new_tokens or suite.setting.max_new_tokens
        bench = _Bench(pair, item, turns(item), captioner, plan.seed, plan.exact)
        order = list(recipes)
        if suite.name not in warmed:
            for name in order:
                tell(f"{suite.name}: warming up {name}", len(finished) + number, whole)
                bench.answer(name, recipes[name], {**settings, "max_new_tokens": WARM_UP_TOKENS})
            warmed.add(suite.name)
        turn = (len(finished) + number) % len(order)
        found: dict[str, list[Answer]] = {}
        for name in (*order[turn:], *order[:turn]):
            tell(f"{suite.name}: {name}", len(finished) + number, whole)
            own = bench.answer(name, recipes[name], {**settings, "max_new_tokens": longest})
            found[name] = [replace(answer, suite=suite.name) for answer in own]
        if not plan.temperature:  # sampled answers share a law, and need not be equal
            found = {name: list(_judged(own, found[BASELINE])) for name, own in found.items()}
        fresh = [answer for name in order for answer in found[name]]
        records.write(folder, about, fresh)
        known += fresh
    records.write(folder, about, [])  # a shard without items leaves a run too
    tell("done", whole, whole)
    return known


def _judged(answers: Sequence[Answer], baseline: Sequence[Answer]) -> Iterator[Answer]:
    """With the word on whether each says what plain decoding says."""
    for answer, plain in zip(answers, baseline, strict=False):
        same = None if answer.error or plain.error else answer.ids == plain.ids
        yield replace(answer, identical=same)


def turns(item: Item) -> list[dict[str, Any]]:
    """What `ask` takes of media at each turn, read now."""
    first = shown(item)
    found = [first] * (1 + len(item.then))
    if item.next is not None:
        more = shown(item.next)
        both = {kind: [*first[kind], *more[kind]] for kind in ("clips", "images")}
        found.append({**first, **both, "last": more.get("parts")})
    return found


def shown(item: Item) -> dict[str, Any]:
    """An item's media as what `ask` takes, read now."""
    media = [medium.read() for medium in item.media]
    found: dict[str, Any] = {
        "clips": [each for each in media if isinstance(each, Clip)],
        "images": [each for each in media if not isinstance(each, Clip)],
    }
    if media:
        found["parts"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
            for part in message_parts(item)
        ]
    return found


@dataclass(frozen=True)
class _Bench:
    """One item and the models that answer it."""

    pair: Pair
    item: Item
    shown: list[dict[str, Any]]  # at each turn
    captioner: Callable[[Sequence[Sequence[np.ndarray]]], Any] | None  # of each medium's frames
    seed: int
    exact: bool

    def caption(self, turn: int) -> Any:
        clips, images = self.shown[turn]["clips"], self.shown[turn]["images"]
        media = [*(list(clip.frames) for clip in clips), *([image] for image in images)]
        return self.captioner(media) if self.captioner is not None and media else None

    def answer(self, name: str, recipe: Recipe | None, settings: dict[str, Any]) -> list[Answer]:
        """One answer per turn of the item; of the draft by itself, to the first question. What a
        peer gets wrong, or a method that cannot serve this item, is a finding and not an end."""
        count = 1 if is_draft_only(name) else len(self.item.asked)
        found: list[Answer] = []
        said: list[str] = []
        try:
            with self._answering(name, recipe, settings) as answer:
                for turn in range(count):
                    fields = answer(turn, *self._inputs(turn, said))
                    said.append(fields["text"])
                    found.append(replace(self._blank(name, turn), **fields))
        except Exception as error:
            ours = recipe is not None and not isinstance(error, SaccadeError)
            if ours or name == BASELINE:
                raise
            return [self._blank(name, 0, error=kind_and_line(error))]
        return found

    @contextmanager
    def _answering(
        self, name: str, recipe: Recipe | None, settings: dict[str, Any]
    ) -> Iterator[Callable[[int, Inputs, Inputs | None], dict[str, Any]]]:
        """What answers one turn after the other, with the fields of an answer."""
        if recipe is None:
            yield partial(self._by_peer, name, settings)
        elif is_draft_only(name):
            yield partial(self._by_draft, name, recipe, settings)
        else:
            with Conversation(
                self.pair.target.backbone,
                draft=self.pair.draft_backbone,
                method=recipe,
                tokenizer=self.pair.target.tokenizer,
                seed=self.seed,
                exact=self.exact,
                **settings,
            ) as talk:
                yield lambda turn, inputs, own: records.of(
                    talk.run(inputs, draft_inputs=own, captioner=self.caption(turn))
                )

    def _by_draft(
        self,
        name: str,
        recipe: Recipe,
        settings: dict[str, Any],
        turn: int,
        inputs: Inputs,
        own: Inputs | None,
    ) -> dict[str, Any]:
        """What the draft says by itself."""
        if self.pair.draft is None:
            raise OptionError(f"{name} needs a draft model: give --draft")
        config = settle(self.pair.target.backbone.model, None, settings)
        began = time.perf_counter()
        ids = draft_only.answer(
            self.pair.target,
            self.pair.draft,
            inputs,
            own,
            recipe,
            tokens=settings["max_new_tokens"],
            ends=ends(config),
        )
        text = self._text(ids)
        return {"ids": tuple(ids), "text": text, "total": time.perf_counter() - began}

    def _by_peer(
        self, name: str, settings: dict[str, Any], turn: int, inputs: Inputs, own: Inputs | None
    ) -> dict[str, Any]:
        torch.manual_seed(self.seed)  # a peer samples with torch's own noise
        peak = Peak(self.pair.target.backbone.devices)
        timed = PEERS[name](self.pair.target, self.pair.draft, inputs, dict(settings))
        taken = peak.bytes()
        return {
            **records.of_peer(timed),
            "text": self._text(timed.ids),
            "prompt_tokens": int(inputs["input_ids"].shape[1]),
            "peak": taken,
        }

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.pair.target.tokenizer.decode(list(ids), skip_special_tokens=True))

    def _inputs(self, turn: int, said: Sequence[str]) -> tuple[Inputs, Inputs | None]:
        """Of the target, and of the draft where it looks with its own eyes."""
        asked = self.item.asked
        history = list(zip(asked[:turn], said[:turn], strict=True))
        return self.pair.ask(asked[turn], **self.shown[turn], history=history)

    def _blank(self, name: str, turn: int, error: str | None = None) -> Answer:
        item = self.item
        return Answer(
            suite="",
            item=item.id,
            turn=turn,
            method=name,
            answers=item.answers if not turn else (),
            task=item.task,
            meta=dict(item.meta),
            error=error,
        )
