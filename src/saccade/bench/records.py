"""Writes and reads the results of a run of ``saccade bench``: a file of JSON lines.

The first line is about the run, and every other line is one answer. The answers to an item (one
sample of a suite) are written together, once every method has answered it, and a line that says
that the item is done follows them. When a run is resumed, lines after the last such line are
removed, because they belong to an item that was cut short.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from saccade.bench.peers import TimedRun
from saccade.core.errors import OptionError, first_line
from saccade.core.result import Result
from saccade.core.tree import height
from saccade.corpus import json_lines

RESULTS_FILE = "results.jsonl"
PACKED_FILE = "results.jsonl.gz"  # A finished run may be stored like this.
ITEM_DONE_KEY = "done"


@dataclass(frozen=True)
class Answer:
    """One answer of one method to one question of one item. The fields are those of the file.

    ``method`` is one of ours or a peer, which is one of Hugging Face's own ways to decode
    (``peers.PEERS``). A peer has no rounds, and most of its times are 0.

    The fields from ``total`` to ``captures`` are seconds. ``total`` runs from the inputs to the
    last token, ``first`` from the inputs to the first token. ``vision`` and ``prefill`` are the
    target's. ``guide`` is the time for choosing what the draft sees, and ``caption`` the time for
    captions that the draft reads in the place of a video. ``caption_hidden`` is the part of
    ``caption`` that ran beside the target's prefill and so delayed nothing. ``beside_prefill``,
    ``beside_guide`` and ``beside_draft`` are the draft's work in parallel with the target, which
    delays nothing either. ``draft`` and ``verify`` are sums over the rounds.

    ``accepted``, ``drafted``, ``nodes`` and ``own`` are about all rounds but the opening one, which
    emits the prefill's token without a further forward.
    """

    suite: str
    item: str
    turn: int  # Of a conversation, from 0.
    method: str
    ids: tuple[int, ...] = ()
    text: str = ""
    # Whether the ids are those of ``ar`` for the same question; None if either failed.
    identical: bool | None = None
    total: float = 0.0
    first: float = 0.0
    vision: float = 0.0
    prefill: float = 0.0
    guide: float = 0.0
    caption: float = 0.0
    caption_hidden: float = 0.0
    draft_prefill: float = 0.0
    beside_prefill: float = 0.0
    beside_guide: float = 0.0
    beside_draft: float = 0.0
    planning: float = 0.0  # Deciding what to draft, learning included: a part of ``decode``.
    draft: float = 0.0
    verify: float = 0.0
    # All rounds. Of a peer, all that follows its first step, or the whole run if the whole answer
    # came in that step.
    decode: float = 0.0
    # Capturing CUDA graphs between rounds. These seconds are in ``total`` and in no other field,
    # because later answers use the graphs too.
    captures: float = 0.0
    # How many tokens came in the seconds of ``decode``, at least 1. Of our answers these are all
    # but the first, which comes from the prefill. A peer's first step may return several tokens. Of
    # a peer these are all tokens that follow this step, or all tokens if none follow it.
    counted: int = 1
    prompt_tokens: int = 0
    visual_tokens: int = 0
    draft_visual_tokens: int | None = None
    reused_tokens: int = 0
    accepted: tuple[int, ...] = ()  # Per round, the number of accepted tokens.
    drafted: tuple[int, ...] = ()  # Per round, the depth of the draft.
    nodes: tuple[int, ...] = ()  # Per round, all tokens of the draft.
    own: int = 0  # How many of these rounds ended in a token of the target's own.
    # The most bytes in use during the answer, minus those in use before it; None where not
    # measured.
    peak: int | None = None
    fallback: str | None = None
    error: str | None = None
    answers: tuple[str, ...] = ()  # The right answers.
    task: str = ""  # The kind of question, which decides how the answer is scored.
    meta: dict[str, Any] = field(default_factory=dict)  # What else the suite says of the item.

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def rest(self) -> float:
        """Seconds of decoding that are neither drafting nor verifying, such as learning from rounds
        and handing them to the caller."""
        return max(0.0, self.decode - self.draft - self.verify)


STAGES: Mapping[str, Callable[[Answer], float]] = {
    "vision": lambda answer: answer.vision,
    "prefill": lambda answer: answer.prefill,
    "guide": lambda answer: answer.guide + answer.caption - answer.caption_hidden,
    "draft prefill": lambda answer: answer.draft_prefill,
    "draft": lambda answer: answer.draft,
    "verify": lambda answer: answer.verify,
    "rest": lambda answer: answer.rest,
}
"""The stages of an answer, and the seconds of each."""


def result_fields(result: Result) -> dict[str, Any]:
    """Returns the fields of an ``Answer`` that a result of ours determines."""
    timings = asdict(result.timings)
    first_token_seconds = timings.pop("first_token")  # An ``Answer`` calls it ``first``.
    forwards = result.forwards  # All rounds but the opening one.
    return dict(
        ids=result.ids,
        text=result.text or "",
        first=first_token_seconds,
        **timings,
        counted=max(1, len(result.ids) - 1),
        draft=sum(round.draft_seconds for round in result.rounds),
        verify=sum(round.verify_seconds for round in result.rounds),
        prompt_tokens=result.prompt_tokens,
        visual_tokens=result.visual_tokens,
        draft_visual_tokens=result.draft_visual_tokens,
        reused_tokens=result.reused_tokens,
        accepted=tuple(len(round.accepted) for round in forwards),
        drafted=tuple(height(round.parents) for round in forwards),
        nodes=tuple(len(round.tokens) for round in forwards),
        own=sum(round.own is not None for round in forwards),
        fallback=result.fallback_reason,
        peak=result.peak_bytes,
    )


def peer_fields(run: TimedRun) -> dict[str, Any]:
    """Returns the fields of an ``Answer`` that a run of a peer determines."""
    return {
        "ids": run.ids,
        "decode": run.decode_seconds,
        "total": run.total_seconds,
        "counted": run.decoded_tokens,
        "first": run.first_token_seconds,
    }


def append_answers(folder: Path, about: dict[str, Any], answers: Sequence[Answer]) -> None:
    """Appends the answers of whole items; a new file begins with the line about the run."""
    path = folder / RESULTS_FILE
    lines = [] if path.exists() else [about]
    for item, item_answers in groupby(answers, lambda answer: (answer.suite, answer.item)):
        lines += [asdict(answer) for answer in item_answers]
        lines.append({ITEM_DONE_KEY: item})
    json_lines.append_rows(path, lines)


def read_and_repair_run(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """Returns the line about a run and its answers, and removes an incomplete item from the file.

    Raises OptionError where there is no run, one that cannot be read, or a packed one, because that
    is finished.
    """
    path = _run_file(folder)
    if path.name != RESULTS_FILE:
        raise OptionError(f"{folder} holds a finished run, {path.name}: give another --out")
    header, answers, end = _read_items(path)
    json_lines.truncate(path, end)
    return header, answers


def holds_run(folder: Path) -> bool:
    """Returns whether a folder holds the results of a run, as a packed file or a plain one."""
    return any((folder / name).is_file() for name in (RESULTS_FILE, PACKED_FILE))


def _run_file(folder: Path) -> Path:
    """Returns the file of a folder's run. Raises OptionError where there is none."""
    if not holds_run(folder):
        raise OptionError(
            f"{folder} holds no {RESULTS_FILE}; saccade bench --out {folder} makes one"
        )
    path = folder / RESULTS_FILE
    return path if path.is_file() else folder / PACKED_FILE


def _read_items(path: Path) -> tuple[dict[str, Any], list[Answer], int]:
    """Returns the header of a run, the answers of its complete items, and the offset in bytes at
    which the last complete item ends.

    Raises OptionError for a run that cannot be read.
    """
    content = path.read_bytes()
    if path.name == PACKED_FILE:
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise OptionError(f"{path} cannot be unpacked: {first_line(error)}") from error
    if b"\n" not in content:
        raise OptionError(f"{path} is empty: delete it to start anew")
    (header, end), *others = json_lines.complete_lines(content)
    answers: list[Answer] = []
    item_answers: list[Answer] = []
    for number, (line, line_end) in enumerate(others, start=2):
        fields = json_lines.parse_object(path, number, line)
        if ITEM_DONE_KEY not in fields:
            item_answers.append(_parse_answer(path, fields))
            continue
        answers += item_answers
        item_answers = []
        end = line_end
    return json_lines.parse_object(path, 1, header), answers, end


def read_run(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """Returns the line about a run and the answers of its complete items, without changing the
    file, which may be packed (``results.jsonl.gz``).

    Raises OptionError where there is none, or one that cannot be read.
    """
    return _read_items(_run_file(folder))[:2]


def _parse_answer(path: Path, fields: dict[str, Any]) -> Answer:
    """Returns the answer of one row, whose lists become tuples. Raises OptionError for a row that
    another version wrote."""
    try:
        for name in ("ids", "accepted", "drafted", "nodes", "answers"):
            fields[name] = tuple(fields[name])
        return Answer(**fields)
    except (KeyError, TypeError) as error:
        raise OptionError(
            f"{path} was written by another version of Saccade ({first_line(error)}): give another "
            "--out, or delete it"
        ) from error
