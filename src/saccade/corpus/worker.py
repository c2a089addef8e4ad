"""Answers the jobs of ``saccade caption`` with models that are loaded once.

A job is one entry of a manifest: a prompt about a video, a document or both. Each job becomes a row
of the file of answers, which has the answer or the reason why there is none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from saccade.answering.chat_model import stream_answer
from saccade.core.errors import INVALID_LOGITS_MESSAGE, SaccadeError, kind_and_line
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.corpus.caption_run import AnswerJobs
from saccade.corpus.manifest import UNEXPECTED_PREFIX, CaptionSettings, ClipJob, Row
from saccade.inputs import Pair, captions, load_pair, media, subjects
from saccade.inputs.loading import use_threads
from saccade.methods import resolve


@dataclass(frozen=True)
class OpenedJob:
    """A job whose video and document have been read."""

    job: ClipJob
    subject: subjects.Subject  # what the prompt is about: the frames and the document's text


class CorpusWorker:
    """Loads the models, and returns the rows of the jobs that it is called with.

    Jobs that are passed together are answered in one batch if possible. In fp32 the answers are the
    same as without a batch.
    """

    def __init__(self, settings: CaptionSettings) -> None:
        self.settings = settings
        use_threads(settings.threads)
        self._recipe = resolve(settings.method)
        self._pair = Pair(*load_pair(settings.target, settings.draft, **dict(settings.load)))

    def __call__(self, jobs: Sequence[ClipJob]) -> list[Row]:
        return self.answer(self.open(jobs))

    def open(self, jobs: Sequence[ClipJob]) -> list[OpenedJob | Row]:
        """Reads the jobs' videos and documents; a job that cannot be read becomes an error row.

        This needs no model, so one thread may do it while another one answers.
        """
        return [self._open(job) for job in jobs]

    def answer(self, jobs_or_rows: Sequence[OpenedJob | Row]) -> list[Row]:
        """Returns a row for each job. The error rows that :meth:`open` made come first."""
        rows = [each for each in jobs_or_rows if isinstance(each, Row)]
        opened = [each for each in jobs_or_rows if isinstance(each, OpenedJob)]
        if len(opened) > 1:
            try:
                return rows + self._answer_together(opened)
            except Exception:
                pass  # Each job is answered alone below, so only the one that fails has an error.
        return rows + [self._answer_alone(each) for each in opened]

    def _open(self, job: ClipJob) -> OpenedJob | Row:
        try:
            documents = (
                (subjects.read_document(Path(job.document_path)),) if job.document_path else ()
            )
            clip = media.read(job.video_path, self.settings.sampling) if job.video_path else None
            return OpenedJob(job, subjects.Subject(clip, documents))
        except Exception as error:
            return self._error_row(job, error)

    def _answer_alone(self, opened: OpenedJob) -> Row:
        try:
            (row,) = self._answer_together([opened])
        except Exception as error:
            return self._error_row(opened.job, error)
        return row

    def _answer_together(self, jobs: Sequence[OpenedJob]) -> list[Row]:
        start = time.perf_counter()
        pair = self._pair
        questions = [pair.ask(each.job.prompt, **each.subject.ask_arguments) for each in jobs]
        results = stream_answer(
            pair,
            pair.batch(questions),
            self._recipe,
            captioner=self._combined_captioner(jobs),
            exact=self.settings.exact,
            max_new_tokens=self.settings.max_new_tokens,
            do_sample=False,
        ).finish()
        seconds = time.perf_counter() - start
        rows = []
        for each, result in zip(jobs, results, strict=True):
            fields = _answer_fields(each.subject, result)
            rows.append(self.settings.row(each.job, **fields, seconds=seconds, together=len(jobs)))
        return rows

    def _combined_captioner(
        self, jobs: Sequence[OpenedJob]
    ) -> Callable[[Inputs], list[Sequence[str]]] | None:
        """Returns a function from the inputs of a batch to the captions of each job's clip; None
        where there is no captioner.

        Views that read captions call it; other views do not, so no caption is made in vain.
        """
        name, target = self.settings.captioner, self.settings.target
        device = dict(self.settings.load).get("device")
        return captions.join_captioners(
            [captions.lazy_captioner(name, target, job.subject.frames, device) for job in jobs]
        )

    def _error_row(self, job: ClipJob, error: Exception) -> Row:
        if isinstance(error, SaccadeError):
            return self.settings.row(job, error=str(error))
        return self.settings.row(job, error=UNEXPECTED_PREFIX + kind_and_line(error))


def _answer_fields(subject: subjects.Subject, result: Result) -> dict[str, Any]:
    """Returns the fields of a row that come from an answer and what it was about."""
    return {
        "text": result.text,
        "error": INVALID_LOGITS_MESSAGE if result.finish_reason == "error" else None,
        "tokens": len(result.ids),
        "finish_reason": result.finish_reason,
        "method": result.method,
        "tau": result.tau,
        "frames": subject.frame_count,
        "visual_tokens": result.visual_tokens,
        "fallback": result.fallback_reason,
        "warnings": (*subject.warnings, *result.warnings),
    }


def answer_locally(settings: CaptionSettings) -> AnswerJobs:
    """Returns a function that answers groups of jobs in this process and yields each group's rows.
    While it answers a group, a thread reads the videos and documents of the next one."""
    worker = CorpusWorker(settings)

    def answers(groups: Iterable[Sequence[ClipJob]]) -> Iterator[Sequence[Row]]:
        with ThreadPoolExecutor(1) as reader:
            reading = None
            for group in groups:
                next_reading = reader.submit(worker.open, group)
                if reading is not None:
                    yield worker.answer(reading.result())
                reading = next_reading
            if reading is not None:
                yield worker.answer(reading.result())

    return answers
