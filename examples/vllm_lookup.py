"""Saccade's prompt lookup as a draft inside vLLM, through its experimental proposer classes.

    PYTHONPATH=examples vllm serve MODEL --speculative-config \
        '{"custom_proposer_backend": "vllm_lookup.Lookup", "num_speculative_tokens": 8}'

Written to the interface as vLLM documents it and tested against that; it has not run inside vLLM.
Unlike vLLM's own "ngram" method it never proposes the placeholders of images and videos.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from saccade.drafting.drafters import MATCH, lookup
from saccade.model import families


class Lookup:
    """What followed the last occurrence of each request's last few tokens; nothing where none did.

    vLLM verifies it, so what it answers is the target's own.
    """

    def __init__(self, vllm_config: Any) -> None:
        self._count: int = vllm_config.speculative_config.num_speculative_tokens
        self._longest: int = vllm_config.model_config.max_model_len
        self._banned = families.placeholders(vllm_config.model_config.hf_config.to_dict())

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request: its row of ``token_ids_cpu`` is its text so far, up to
        ``num_tokens_no_spec`` of it; who has sampled nothing yet gets none."""
        return [
            self._after(token_ids_cpu[row, : int(num_tokens_no_spec[row])].tolist())
            if sampled
            else []
            for row, sampled in enumerate(sampled_token_ids)
        ]

    def _after(self, text: list[int]) -> list[int]:
        room = max(0, min(self._count, self._longest - len(text)))
        return list(takewhile(lambda t: t not in self._banned, lookup(text, MATCH, room)))
