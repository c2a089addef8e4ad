"""Who does it: the models, held, and called with jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.core.errors import SaccadeError, kind_and_line
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.corpus.answering import answered
from saccade.corpus.keeping import Answer
from saccade.corpus.manifest import UNEXPECTED, ClipJob, Row, Work
from saccade.inputs import Pair, captions, load_pair, media, subjects
from saccade.inputs.loading import use_threads
from saccade.methods import resolve


@dataclass(frozen=True)
class Opened:
    """A job with its frames and texts."""

    job: ClipJob
    seen: subjects.Subject


class CorpusWorker:
    """The models, held; called with jobs, gives their rows. Several jobs are one batch if they can.

    In fp32 a request answers in a batch what it answers alone.
    """

    def __init__(self, work: Work) -> None:
        self.work = work
        use_threads(work.threads)
        self._recipe = resolve(work.method)
        self._pair = Pair(*load_pair(work.target, work.draft, **dict(work.load)))

    def __call__(self, jobs: Sequence[ClipJob]) -> list[Row]:
        return self.answer(self.open(jobs))

    def open(self, jobs: Sequence[ClipJob]) -> list[Opened | Row]:
        """Reads the videos, which needs no model: another thread may do it meanwhile."""
        return [self._open(job) for job in jobs]

    def answer(self, given: Sequence[Opened | Row]) -> list[Row]:
        """A row for each."""
        rows = [each for each in given if isinstance(each, Row)]
        opened = [each for each in given if isinstance(each, Opened)]
        if len(opened) > 1:
            try:
                return rows + self._together(opened)
            except Exception:  # whoever is to blame will fail alone too, and be told so
                pass
        return rows + [self._alone(each) for each in opened]

    def _open(self, job: ClipJob) -> Opened | Row:
        try:
            own = (subjects.read_document(Path(job.text)),) if job.text else ()
            clip = media.read(job.path, self.work.sampling) if job.path else None
            return Opened(job, subjects.Subject(clip, own))
        except Exception as error:
            return self._failed(job, error)

    def _alone(self, opened: Opened) -> Row:
        try:
            (row,) = self._together([opened])
        except Exception as error:
            return self._failed(opened.job, error)
        return row

    def _together(self, many: Sequence[Opened]) -> list[Row]:
        began = time.perf_counter()
        pair = self._pair
        asked = [pair.ask(each.job.prompt, **each.seen.ask_arguments) for each in many]
        results = answered(
            pair,
            pair.batch(asked),
            self._recipe,
            captioner=self._captioner(many),
            exact=self.work.exact,
            max_new_tokens=self.work.max_new_tokens,
            do_sample=False,
        ).finish()
        seconds = time.perf_counter() - began
        return [
            self.work.row(each.job, **_told(each.seen, result), seconds=seconds, together=len(many))
            for each, result in zip(many, results, strict=True)
        ]

    def _captioner(self, many: Sequence[Opened]) -> Callable[[Inputs], list[Any]] | None:
        """Captions of the clips for views that read one, made only if one is asked for."""
        name, target, device = self.work.captioner, self.work.target, dict(self.work.load)
        each = [
            captions.lazy_captioner(name, target, one.seen.frames, device.get("device"))
            for one in many
        ]
        every = [captioner for captioner in each if captioner is not None]
        return (lambda inputs: [text for one in every for text in one(inputs)]) if every else None

    def _failed(self, job: ClipJob, error: Exception) -> Row:
        ours = isinstance(error, SaccadeError)
        return self.work.row(job, error=str(error) if ours else UNEXPECTED + kind_and_line(error))


def _told(seen: subjects.Subject, result: Result) -> dict[str, Any]:
    """What a row says of an answer."""
    return {
        "text": result.text,
        "error": "the target's numbers broke (NaN)" if result.finish_reason == "error" else None,
        "tokens": len(result.ids),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "tau": result.tau,
        "frames": seen.report_fields["frames"],
        "visual_tokens": result.visual_tokens,
        "fallback": result.fallback_reason,
        "warnings": (*seen.report_fields["warnings"], *result.warnings),
    }


def here(work: Work) -> Answer:
    """Answers in this process: the next videos are read while the models are busy."""
    worker = CorpusWorker(work)

    def answers(groups: Iterable[Sequence[ClipJob]]) -> Iterator[Sequence[Row]]:
        with ThreadPoolExecutor(1) as reader:
            coming = None
            for group in groups:
                following = reader.submit(worker.open, group)
                if coming is not None:
                    yield worker.answer(coming.result())
                coming = following
            if coming is not None:
                yield worker.answer(coming.result())

    return answers
