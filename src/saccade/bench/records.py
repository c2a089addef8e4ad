"""What a run leaves: one line of JSON about the run, then one per answer, to be gone on with.

Answers are written when every method is done with an item, and a line that says so ends them: what
follows the last such line was cut short, and is cut off.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from saccade.bench.peers import Run
from saccade.core.errors import OptionError
from saccade.core.result import Result
from saccade.core.tree import height
from saccade.corpus import json_lines

RESULTS = "results.jsonl"
DONE = "done"


@dataclass(frozen=True)
class Answer:
    """One answer of one method to one question of one item."""

    suite: str
    item: str
    turn: int  # of a conversation, from 0
    method: str
    ids: tuple[int, ...] = ()
    text: str = ""
    identical: bool | None = None  # to ``ar`` of the same item
    total: float = 0.0  # seconds, from inputs to the last token
    first: float = 0.0  # to the first token
    vision: float = 0.0
    prefill: float = 0.0
    guide: float = 0.0  # choosing what the draft sees
    caption: float = 0.0  # the captioner's seconds, and
    caption_hidden: float = 0.0  # those of them that nobody waited for
    draft_prefill: float = 0.0
    beside_prefill: float = 0.0  # the draft's beside the target, which holds nobody up
    beside_draft: float = 0.0
    draft: float = 0.0  # of the rounds
    verify: float = 0.0
    decode: float = 0.0  # from the end of what comes before the rounds
    counted: int = 1  # tokens that came of decoding
    prompt_tokens: int = 0
    visual_tokens: int = 0
    draft_visual_tokens: int | None = None
    reused_tokens: int = 0
    accepted: tuple[int, ...] = ()  # per round
    drafted: tuple[int, ...] = ()  # per round, the deepest path of it
    nodes: tuple[int, ...] = ()  # per round, all of it
    own: int = 0  # rounds that ended in a token of the target's
    peak: int | None = None  # bytes above what there was before, where it can be measured
    fallback: str | None = None
    error: str | None = None
    answers: tuple[str, ...] = ()  # what would have been right
    task: str = ""
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds(self) -> int:
        return len(self.accepted)

    @property
    def rest(self) -> float:
        """Seconds of decoding beside drafting and verifying: committing, learning, stopping."""
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
"""Where an answer's seconds go."""


def of(result: Result) -> dict[str, Any]:
    """The fields of an answer that a result of ours knows."""
    timings = asdict(result.timings)
    return dict(
        ids=result.ids,
        text=result.text or "",
        first=timings.pop("first_token"),
        **timings,
        counted=max(1, len(result.ids) - 1),
        draft=sum(round.draft_seconds for round in result.rounds),
        verify=sum(round.verify_seconds for round in result.rounds),
        prompt_tokens=result.prompt_tokens,
        visual_tokens=result.visual_tokens,
        draft_visual_tokens=result.draft_visual_tokens,
        reused_tokens=result.reused_tokens,
        accepted=tuple(len(round.accepted) for round in result.forwards),
        drafted=tuple(height(round.parents) for round in result.forwards),
        nodes=tuple(len(round.tokens) for round in result.forwards),
        own=sum(round.own is not None for round in result.forwards),
        fallback=result.fallback_reason,
        peak=result.peak_bytes,
    )


def of_peer(run: Run) -> dict[str, Any]:
    """The fields of an answer that a peer's run knows."""
    return {name: value for name, value in vars(run).items() if name != "result"}


def write(folder: Path, about: dict[str, Any], fresh: Sequence[Answer]) -> None:
    """Appends the answers of whole items; the line about the run comes first in a new file."""
    path = folder / RESULTS
    lines = [] if path.exists() else [about]
    for item, own in groupby(fresh, lambda answer: (answer.suite, answer.item)):
        lines += [asdict(answer) for answer in own]
        lines.append({DONE: item})
    json_lines.append_rows(path, lines)


def read(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """The line about a run and its answers. An item cut short is cut off the file.

    Raises OptionError where there is no run.
    """
    path = folder / RESULTS
    if not path.is_file():
        raise OptionError(f"{folder} holds no {RESULTS}; saccade bench --out {folder} makes one")
    whole = path.read_bytes()
    if b"\n" not in whole:
        raise OptionError(f"{path} is empty: delete it to start anew")
    (header, end), *others = json_lines.complete_lines(whole)
    found: list[Answer] = []
    fresh: list[Answer] = []
    for line, size in others:
        fields = json.loads(line)
        if DONE not in fields:
            fresh.append(_answer(fields))
            continue
        found, fresh, end = found + fresh, [], size
    json_lines.truncate(path, end)
    return json.loads(header), found


def stored(folder: Path) -> tuple[dict[str, Any], list[Answer]]:
    """A finished run, as it is or packed (``results.jsonl.gz``); nothing is mended.

    Raises OptionError where there is none.
    """
    packed = folder / f"{RESULTS}.gz"
    if not packed.is_file():
        return read(folder)
    first, *rest = gzip.decompress(packed.read_bytes()).decode().splitlines()
    fields = map(json.loads, rest)
    return json.loads(first), [_answer(each) for each in fields if DONE not in each]


def _answer(fields: dict[str, Any]) -> Answer:
    for name in ("ids", "accepted", "drafted", "nodes", "answers"):
        fields[name] = tuple(fields[name])
    return Answer(**fields)
