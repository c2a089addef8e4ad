"""A stand-in for vLLM's model runner: what a draft reads of it, and its greedy loop.

Its interface is vLLM 0.32's as recorded there. Its target is a list: the answer of each request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers import VIDEO, backbone, prompt_of
from torch import Tensor

from saccade.inputs.loading import Loaded
from saccade.vllm import draft as module
from saccade.vllm import mm_features
from saccade.vllm.draft import Draft

LONGEST = 512


class Runner:
    """Requests in rows of a batch; ``step`` judges the drafts of the step before."""

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(
            req_ids=[],
            num_tokens_no_spec=np.zeros(0, dtype=np.int32),
            token_ids_cpu=np.zeros((0, LONGEST), dtype=np.int32),
            num_computed_tokens_cpu=np.zeros(0, dtype=np.int32),
        )
        self.requests: dict[str, Any] = {}
        self.encoder_cache: dict[str, Tensor] = {}
        self.answers: dict[str, Sequence[int]] = {}
        self.written: dict[str, list[int]] = {}
        self.flying: dict[str, list[int]] = {}
        self.drafted = self.accepted = 0

    def add(
        self, name: str, model: Any, inputs: Mapping[str, Tensor], answer: Sequence[int]
    ) -> None:
        """A request over a processor's output, with its pixels and what the tower gave."""
        prompt = prompt_of(model, inputs)
        media = {key: value for key, value in inputs.items() if key.startswith(("pixel", "video"))}
        carried = []
        if media:
            carried = [SimpleNamespace(data=media, modality="video", identifier=name)]
            self.encoder_cache[name] = prompt.embeds[prompt.full_ids == VIDEO]
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=inputs["input_ids"][0].tolist(),
            num_prompt_tokens=inputs["input_ids"].shape[1],
            mm_features=carried,
            mrope_positions=prompt.positions if prompt.positions.shape[0] == 3 else None,
            mrope_position_delta=prompt.next_position - len(prompt),
        )
        self.answers[name], self.written[name] = list(answer), []

    def step(self, draft: Draft, reading: Sequence[str] = ()) -> None:
        """One forward: who is ``reading`` has a chunk of its prompt read and writes nothing."""
        names = list(self.requests)
        sampled = [[] if name in reading else self._judged(name) for name in names]
        for name, new in zip(names, sampled, strict=True):
            self.written[name] += new
        rows = np.zeros((len(names), LONGEST), dtype=np.int32)
        ends = np.zeros(len(names), dtype=np.int32)
        for row, name in enumerate(names):
            ids = [*self.requests[name].prompt_token_ids, *self.written[name]]
            rows[row, : len(ids)], ends[row] = ids, len(ids)
        self.input_batch.req_ids = names
        self.input_batch.num_tokens_no_spec, self.input_batch.token_ids_cpu = ends, rows
        proposed = draft.propose(sampled, ends, rows, None)
        assert len(proposed) == len(names)
        self.flying = dict(zip(names, proposed, strict=True))
        for name in names:
            if len(self.written[name]) >= len(self.answers[name]):
                del self.requests[name]

    def _judged(self, name: str) -> list[int]:
        left = self.answers[name][len(self.written[name]) :]
        drafted = self.flying.pop(name, [])
        right = 0
        for mine, real in zip(drafted, left, strict=False):
            if mine != real:
                break
            right += 1
        self.drafted += min(len(drafted), len(left))
        self.accepted += right
        return left[: right + 1]


def config(most: int = 5, **options: Any) -> Any:
    """vLLM's config, as far as a draft reads it."""
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        additional_config={"saccade": {"draft": "tiny", "length": most, **options}},
        model_config=SimpleNamespace(
            model="tiny",
            tokenizer="tiny",
            trust_remote_code=False,
            dtype="torch.float32",
            max_model_len=LONGEST,
            multimodal_config=None,
            get_vocab_size=lambda: 256,
            hf_config=SimpleNamespace(
                model_type="qwen2_5_vl", to_dict=lambda: {"video_token_id": VIDEO}
            ),
        ),
        device_config=SimpleNamespace(device="cpu"),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


def loaded(patch: pytest.MonkeyPatch, model: Any, runner: Any, **options: Any) -> Draft:
    """A draft over a tiny model, as vLLM would make and load it."""
    patch.setattr(module, "load", lambda name, **_: Loaded(name, backbone(model), None))
    patch.setattr(module, "check_tokenizers", lambda *_: None)
    patch.setattr(module.AutoTokenizer, "from_pretrained", lambda *_, **__: None)
    patch.setattr(mm_features, "group_batches", lambda carried: [one.data for one in carried])
    memory = options.pop("memory", 0.01)
    made = Draft(config(memory=memory, **options), runner)
    made.load_model(None)
    return made
