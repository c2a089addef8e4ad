"""Saccade's draft inside vLLM: a small model that sees a pruned video drafts for vLLM's target.

vLLM owns the loop, the paging and the verdict; from here come the tokens to be judged. ``draft`` is
the class that vLLM's ``custom_class`` method asks for, ``features`` and ``watching`` read what its
runner holds, and ``plugin`` has the runner show itself. ``proposing``, ``caches`` and ``pace`` know
no engine: another one could ask them too.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from saccade.vllm.draft import Draft as Draft


def __getattr__(name: str) -> Any:
    """The class when it is asked for: the plug-in, which every process calls, needs none of it."""
    if name == "Draft":
        from saccade.vllm.draft import Draft

        return Draft
    raise AttributeError(f"module 'saccade.vllm' has no attribute {name!r}")
