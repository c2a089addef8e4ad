"""Saccade's draft inside vLLM: a small model that sees a pruned video drafts for vLLM's target.

vLLM owns the loop, the paging and the verdict; from here come the tokens to be judged. ``draft`` is
the class that vLLM's ``custom_class`` method asks for, ``features`` and ``watching`` read what its
runner holds. ``proposing``, ``caches`` and ``pace`` know no engine: another one could ask them too.
"""

from saccade.vllm.draft import Draft as Draft
