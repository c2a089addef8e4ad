"""Saccade's draft inside vLLM: a small model that sees a pruned video drafts for vLLM's target.

vLLM owns the loop, the paging and the verification; this package proposes the tokens to verify.
``draft`` is the class that vLLM's ``custom_class`` method asks for. ``mm_features`` and
``attention_watch`` read what its runner holds, and ``plugin`` gives the draft that runner.
``proposer``, ``request_drafts`` and ``draft_length`` know no engine, so another one could use them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.vllm.draft import Draft as Draft


def __getattr__(name: str) -> Any:
    """Imports the class when it is used, because every process imports this package."""
    if name == "Draft":
        from saccade.vllm.draft import Draft

        return Draft
    raise AttributeError(f"module 'saccade.vllm' has no attribute {name!r}")
