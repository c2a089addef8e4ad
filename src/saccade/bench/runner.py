"""Runs suites: every method answers every item in turns, and an interrupted run can be resumed.

An item is a question about media, perhaps with more questions after it. All methods answer one item
before the next item begins, and they take turns in going first, so that whatever disturbs the
machine for a while disturbs all methods alike. With batches this holds for each batch of items.

A method is one of Saccade's, or a peer (one of Hugging Face's own ways to decode), or the draft
model answering alone. Peers have no recipe, so their recipe is None here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from saccade.bench import draft_only, records
from saccade.bench.comparison import BASELINE, WARM_UP_TOKENS, resolve_methods
from saccade.bench.draft_only import is_draft_only
from saccade.bench.peers import PEERS
from saccade.bench.records import Answer
from saccade.bench.suites.datasets import message_parts
from saccade.bench.suites.types import Item, Suite
from saccade.core.errors import OptionError, SaccadeError, VideoInputError, kind_and_line
from saccade.core.generation_settings import end_ids, merge_settings
from saccade.core.prompt import Inputs
from saccade.drafting.recipe import Recipe
from saccade.engine.conversation import Conversation
from saccade.engine.generate import stream
from saccade.engine.trace import environment
from saccade.inputs import Loaded, Pair
from saccade.inputs.captions import join_captioners
from saccade.inputs.media import Clip
from saccade.inputs.questions import batch_inputs
from saccade.model.memory import PeakMemory

log = logging.getLogger(__name__)

OnProgress = Callable[[str, int, int], None]
"""Called with what is being done, the number of items done, and the number of all items."""


@dataclass(frozen=True)
class Benchmark:
    """The plan of a run: which methods answer which items, and with which settings.

    A run can be resumed by a plan that has the same fingerprint (see ``about``). ``limit`` is not a
    part of that, so a resumed run may go further.
    """

    suites: tuple[Suite, ...]
    methods: tuple[str, ...]
    limit: int | None = None  # How many items of each suite are answered; None for all.
    shard: tuple[int, int] = (0, 1)  # The index of this shard, and the number of shards.
    seed: int = 0
    max_new_tokens: int | None = None  # By default each suite's own.
    exact: bool = False
    temperature: float = 0.0  # 0 is greedy.
    # Items answered in one batch. In a batch only the first question of each item is asked.
    batch: int = 1
    # What else decides which models answer, and is not as by default, such as ("quantize",
    # "bnb-4bit").
    model_options: tuple[tuple[str, str], ...] = ()

    def items(self) -> Iterator[tuple[Suite, Item]]:
        """Yields the items of this shard.

        The first ``limit`` items of each suite are dealt out to the shards in turn.
        """
        shard_index, shard_count = self.shard
        for suite in self.suites:
            for position, item in enumerate(suite.items()):
                if self.limit is not None and position >= self.limit:
                    break
                if position % shard_count == shard_index:
                    yield suite, item

    def about(self, target: Loaded, draft: Loaded | None) -> dict[str, Any]:
        """Returns the first line of a run's file: the plan, its fingerprint, the environment."""
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
        if self.exact:  # Runs from before this option existed keep their fingerprint.
            plan["exact"] = True
        if self.temperature:
            plan["temperature"] = self.temperature
        if self.batch > 1:
            plan["batch"] = self.batch
        if self.model_options:
            plan["model_options"] = dict(self.model_options)
        fingerprint = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:16]
        return {"plan": plan, "fingerprint": fingerprint, "environment": environment()}


def run_benchmark(
    plan: Benchmark,
    target: Loaded,
    draft: Loaded | None,
    folder: Path,
    *,
    make_captioner: Callable[[Sequence[Sequence[np.ndarray]]], Any] | None = None,
    on_progress: OnProgress = lambda what, done, total: None,
) -> list[Answer]:
    """Returns every answer of the plan, with those of an interrupted run in ``folder``.

    Plain decoding answers every item, even if the plan does not name it. Items whose media cannot
    be read are left out.

    ``make_captioner`` takes the frames of each video and image of an item, and returns a captioner
    for them, which writes captions for views that read any. Raises OptionError where ``folder`` has
    another plan's run.
    """
    recipes = resolve_methods([name for name in plan.methods if not is_draft_only(name)])
    recipes |= {
        name: draft_only.draft_only_recipe(name) for name in plan.methods if is_draft_only(name)
    }
    about = plan.about(target, draft)
    pair = Pair(target, draft)
    # Items that an interrupted run has answered are not answered again.
    folder.mkdir(parents=True, exist_ok=True)
    answers: list[Answer] = []
    if records.holds_run(folder):
        earlier, answers = records.read_and_repair_run(folder)
        if earlier["fingerprint"] != about["fingerprint"]:
            raise OptionError(
                f"{folder} holds a run of another plan: give another --out, or delete it"
            )
    finished = {(answer.suite, answer.item) for answer in answers}
    all_items = list(plan.items())
    total = len(finished | {(suite.name, item.id) for suite, item in all_items})
    settings: dict[str, Any] = {"do_sample": plan.temperature > 0}
    if plan.temperature:
        settings["temperature"] = plan.temperature
    warm_suites: set[str] = set()
    done = len(finished)
    for batch_number, (suite, batch) in enumerate(_batches(all_items, plan.batch)):
        items = [item for item in batch if (suite.name, item.id) not in finished]
        max_new_tokens = plan.max_new_tokens or suite.setting.max_new_tokens
        # The media are read once for all methods.
        item_runs = []
        for item in items:
            try:
                arguments = turn_arguments(item)
            except VideoInputError as error:  # A damaged file must not end the run.
                log.warning("%s: %s is left out: %s", suite.name, item.id, error)
                continue
            item_runs.append(_ItemRun(pair, item, arguments, make_captioner, plan.seed, plan.exact))
        if not item_runs:
            done += len(items)
            continue
        answerer = item_runs[0] if plan.batch == 1 else _BatchRun(item_runs)
        # Before the first item of a suite, every method gives a short answer that is not recorded.
        order = list(recipes)
        if suite.name not in warm_suites:
            for name in order:
                on_progress(f"{suite.name}: warming up {name}", done, total)
                answerer.answer(name, recipes[name], {**settings, "max_new_tokens": WARM_UP_TOKENS})
            warm_suites.add(suite.name)
        # With each batch the next method begins, also where an interrupted run goes on.
        rotation = batch_number % len(order)
        by_method: dict[str, list[Answer]] = {}
        for name in (*order[rotation:], *order[:rotation]):
            on_progress(f"{suite.name}: {name}", done, total)
            method_answers = answerer.answer(
                name, recipes[name], {**settings, "max_new_tokens": max_new_tokens}
            )
            by_method[name] = [replace(answer, suite=suite.name) for answer in method_answers]
        # Only greedy answers are compared: two answers sampled from the same law may differ.
        if not plan.temperature:
            by_method = {
                name: list(_compare_with_baseline(method_answers, by_method[BASELINE]))
                for name, method_answers in by_method.items()
            }
        new_answers = [
            answer
            for item in items
            for name in order
            for answer in by_method[name]
            if answer.item == item.id
        ]
        records.append_answers(folder, about, new_answers)
        answers += new_answers
        done += len(items)
    records.append_answers(folder, about, [])  # A shard without items leaves a file too.
    on_progress("done", total, total)
    return answers


def _batches(
    all_items: Sequence[tuple[Suite, Item]], size: int
) -> Iterator[tuple[Suite, Sequence[Item]]]:
    """Yields the items in batches of ``size``, each of one suite; its last batch may be smaller."""
    for _, group in groupby(all_items, lambda entry: entry[0].name):
        entries = list(group)
        for start in range(0, len(entries), size):
            batch = entries[start : start + size]
            yield batch[0][0], [item for _, item in batch]


def _compare_with_baseline(
    answers: Sequence[Answer], baseline: Sequence[Answer]
) -> Iterator[Answer]:
    """Yields the answers with ``identical`` set to whether plain decoding has the same ids."""
    # A method that failed, and a draft alone, may have fewer answers than plain decoding.
    for answer, plain in zip(answers, baseline, strict=False):
        same = None if answer.error or plain.error else answer.ids == plain.ids
        yield replace(answer, identical=same)


def turn_arguments(item: Item) -> list[dict[str, Any]]:
    """Reads an item's media, and returns for each turn the media arguments of :meth:`Pair.ask`.

    ``item.later_questions`` are about the same media. The question of ``item.next_item`` comes
    last, with that item's media. Each turn encodes the whole conversation, so the last turn has the
    media of both items.
    """
    first = media_arguments(item)
    arguments = [first] * (1 + len(item.later_questions))
    if item.next_item is not None:
        next_media = media_arguments(item.next_item)
        all_media = {kind: [*first[kind], *next_media[kind]] for kind in ("clips", "images")}
        # ``parts`` is the user's first message: the first question with its media. ``last`` is the
        # last message: the next item's question with its media, or None if it has none.
        arguments.append({**first, **all_media, "last": next_media.get("parts")})
    return arguments


def media_arguments(item: Item) -> dict[str, Any]:
    """Reads an item's media, and returns them as arguments of :meth:`Pair.ask`.

    ``parts`` is the question as a chat message, in which media stand where the prompt marks them.
    """
    media = [medium.read() for medium in item.media]
    arguments: dict[str, Any] = {
        "clips": [each for each in media if isinstance(each, Clip)],
        "images": [each for each in media if not isinstance(each, Clip)],
    }
    if media:
        arguments["parts"] = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
            for part in message_parts(item)
        ]
    return arguments


@dataclass(frozen=True)
class _ItemRun:
    """One item, and the models that answer it.

    ``make_captioner`` takes the frames of each medium, and returns a captioner for them.
    """

    pair: Pair
    item: Item
    media_by_turn: list[dict[str, Any]]  # The result of ``turn_arguments``.
    make_captioner: Callable[[Sequence[Sequence[np.ndarray]]], Any] | None
    seed: int
    exact: bool

    def captioner_for(self, turn: int) -> Any:
        media = self.frames(turn)
        return self.make_captioner(media) if self.make_captioner is not None and media else None

    def frames(self, turn: int) -> list[list[np.ndarray]]:
        """Returns the frames of each video and image that a turn has."""
        clips = self.media_by_turn[turn]["clips"]
        images = self.media_by_turn[turn]["images"]
        return [*(list(clip.frames) for clip in clips), *([image] for image in images)]

    def answer(self, name: str, recipe: Recipe | None, settings: dict[str, Any]) -> list[Answer]:
        """Returns one answer per turn of the item. A draft alone answers the first question only.

        If a peer raises, or a method cannot serve this item, the only answer has the error. An
        error of plain decoding is raised.
        """
        count = 1 if is_draft_only(name) else len(self.item.questions)
        answers: list[Answer] = []
        earlier_answers: list[str] = []
        try:
            with self._turn_answerer(name, recipe, settings) as answer:
                for turn in range(count):
                    fields = answer(turn, *self.inputs(turn, earlier_answers))
                    earlier_answers.append(fields["text"])
                    answers.append(replace(self.empty_answer(name, turn), **fields))
        except Exception as error:
            # A peer, which has no recipe, may fail in any way, and one of our methods only by a
            # SaccadeError.
            is_our_bug = recipe is not None and not isinstance(error, SaccadeError)
            if is_our_bug or name == BASELINE:
                raise
            return [self.empty_answer(name, 0, error=kind_and_line(error))]
        return answers

    @contextmanager
    def _turn_answerer(
        self, name: str, recipe: Recipe | None, settings: dict[str, Any]
    ) -> Iterator[Callable[[int, Inputs, Inputs | None], dict[str, Any]]]:
        """Yields a function that answers a turn and returns the answer's fields.

        It is to be called for one turn after another, with the turn's number and its inputs.
        """
        if recipe is None:
            yield partial(self._answer_by_peer, name, settings)
        elif is_draft_only(name):
            yield partial(self._answer_by_draft, name, recipe, settings)
        else:
            with Conversation(
                self.pair.target.backbone,
                draft=self.pair.draft_backbone,
                method=recipe,
                tokenizer=self.pair.target.tokenizer,
                seed=self.seed,
                exact=self.exact,
                **settings,
            ) as conversation:
                yield lambda turn, inputs, draft_inputs: records.result_fields(
                    conversation.run(
                        inputs, draft_inputs=draft_inputs, captioner=self.captioner_for(turn)
                    )
                )

    def _answer_by_draft(
        self,
        name: str,
        recipe: Recipe,
        settings: dict[str, Any],
        turn: int,
        inputs: Inputs,
        draft_inputs: Inputs | None,
    ) -> dict[str, Any]:
        """Returns the fields of the draft's own answer."""
        if self.pair.draft is None:
            raise OptionError(f"{name} needs a draft model: give --draft")
        config = merge_settings(
            self.pair.target.backbone.model, generation_config=None, settings=settings
        )
        start = time.perf_counter()
        ids = draft_only.draft_answer(
            self.pair.target,
            self.pair.draft,
            inputs,
            draft_inputs,
            recipe,
            max_new_tokens=settings["max_new_tokens"],
            end_ids=end_ids(config),
        )
        text = self._text(ids)
        return {"ids": tuple(ids), "text": text, "total": time.perf_counter() - start}

    def _answer_by_peer(
        self,
        name: str,
        settings: dict[str, Any],
        turn: int,
        inputs: Inputs,
        draft_inputs: Inputs | None,
    ) -> dict[str, Any]:
        torch.manual_seed(self.seed)  # A peer samples with torch's own noise.
        peak = PeakMemory(self.pair.target.backbone.devices)
        run = PEERS[name](self.pair.target, self.pair.draft, inputs, dict(settings))
        peak_bytes = peak.bytes()
        return {
            **records.peer_fields(run),
            "text": self._text(run.ids),
            "prompt_tokens": int(inputs["input_ids"].shape[1]),
            "peak": peak_bytes,
        }

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.pair.target.tokenizer.decode(list(ids), skip_special_tokens=True))

    def inputs(self, turn: int, earlier_answers: Sequence[str]) -> tuple[Inputs, Inputs | None]:
        """Returns the inputs of the target, and those of a draft with a processor of its own."""
        questions = self.item.questions
        history = list(zip(questions[:turn], earlier_answers[:turn], strict=True))
        return self.pair.ask(questions[turn], **self.media_by_turn[turn], history=history)

    def empty_answer(self, name: str, turn: int, error: str | None = None) -> Answer:
        """Returns an answer without text, with only what is known before the item is answered."""
        item = self.item
        return Answer(
            suite="",
            item=item.id,
            turn=turn,
            method=name,
            # The reference answers of an item are those to its first question.
            answers=item.answers if turn == 0 else (),
            task=item.task,
            meta=dict(item.meta),
            error=error,
        )


@dataclass(frozen=True)
class _BatchRun:
    """Several items whose first questions are answered in one batch.

    The seconds of each answer are those of the whole batch.
    """

    item_runs: Sequence[_ItemRun]

    def answer(self, name: str, recipe: Recipe | None, settings: dict[str, Any]) -> list[Answer]:
        """Returns one answer per item. If a method cannot serve the batch, each of these answers
        has the error. An error of plain decoding is raised."""
        try:
            fields = self._fields(name, recipe, settings)
        except Exception as error:
            if name == BASELINE or not isinstance(error, SaccadeError):
                raise
            message = kind_and_line(error)
            return [run.empty_answer(name, turn=0, error=message) for run in self.item_runs]
        return [
            replace(run.empty_answer(name, turn=0), **answer_fields)
            for run, answer_fields in zip(self.item_runs, fields, strict=True)
        ]

    def _fields(
        self, name: str, recipe: Recipe | None, settings: dict[str, Any]
    ) -> list[dict[str, Any]]:
        """Returns the fields of each item's answer."""
        if recipe is None or is_draft_only(name):
            raise OptionError(f"{name} answers no batches: leave --batch out")
        first = self.item_runs[0]
        pair = first.pair
        inputs_of_items = [run.inputs(turn=0, earlier_answers=()) for run in self.item_runs]
        target_inputs = [inputs for inputs, _ in inputs_of_items]
        # Empty where the draft has no processor of its own.
        draft_inputs = [inputs for _, inputs in inputs_of_items if inputs is not None]
        results = stream(
            pair.target.backbone,
            batch_inputs(pair.target, target_inputs),
            draft=pair.draft_backbone,
            draft_inputs=(
                batch_inputs(pair.draft or pair.target, draft_inputs) if draft_inputs else None
            ),
            method=recipe,
            tokenizer=pair.target.tokenizer,
            captioner=self._captioner(),
            seed=first.seed,
            exact=first.exact,
            **settings,
        ).finish()
        return [records.result_fields(result) for result in results]

    def _captioner(self) -> Any:
        """Returns one captioner for all items; None where none of them has one."""
        return join_captioners([run.captioner_for(turn=0) for run in self.item_runs])
