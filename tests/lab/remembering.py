"""A small experiment that runs nothing twice, since answers are the same whenever they are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lab.studies import Experiment
from lab.studies.experiment import AnsweredClip
from saccade.core.prompt import Inputs
from saccade.core.result import Result
from saccade.inputs.media import Clip


@dataclass
class Remembering(Experiment):
    clips: int = 2
    size: int = 64
    tokens: int = 24
    known_inputs: dict[Any, Any] = field(default_factory=dict)
    answers: dict[Any, Result] = field(default_factory=dict)
    shots: dict[int, AnsweredClip] = field(default_factory=dict)

    def inputs(self, number: int, size: int | None = None) -> tuple[Clip, Inputs]:
        if (number, size) not in self.known_inputs:
            self.known_inputs[number, size] = super().inputs(number, size)
        return self.known_inputs[number, size]

    def answer(self, method: str, clip: Clip, inputs: Inputs, **given: Any) -> Result:
        settings = {"max_new_tokens": self.tokens, **given}
        draft = settings.pop("draft", None) or self.draft
        text, seen = tuple(inputs["input_ids"][0].tolist()), float(clip.frames.mean())
        key = (method, draft.name, text, seen, *sorted(settings.items()))
        if key not in self.answers:
            self.answers[key] = super().answer(method, clip, inputs, **given)
        return self.answers[key]

    def answered_clip(self, number: int) -> AnsweredClip:
        if number not in self.shots:
            self.shots[number] = super().answered_clip(number)
        return self.shots[number]
