"""Pages: every step of the draft chooses the keys that it reads. Saccade's own method.

Other methods choose the draft's keys at prefill or after a round, so the choice may not suit the
queries of a later draft step. Quest (Tang et al., 2024) and MoBA (Lu et al., 2025) decode over the
few pages of a long text that match each query, and lose a little quality. Here the target drafts in
this way and verifies over all keys, so nothing is lost. A page P is a run of consecutive visual
keys, and m_P is their mean. At each draft step, KV head h of layer l reads the pages that suit the
queries q of its group best:

    pages_{l,h} = the n pages P with the largest  sum over q of softmax_P(q . m_P / sqrt(d))
    n = max(1, round((K - r) / page))

A page has ``page`` keys. K is the number of visual keys that a step may read. The r last visual
keys, too few to fill a page, are always read and count towards K. All text keys are always read.
K and the length of a draft are those of Sparse-to-Dense (``methods/std.py``). Unlike that method,
this one does not need the target's attention at prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.prompt import Paged, Prefill, Prompt, Reading
from saccade.drafting.provides import Provides, Setting, parse_whole
from saccade.methods.std import STD, Budgeted

PAGE_KEYS = 4


@dataclass(frozen=True)
class ByPage(Budgeted):
    """At each step and for each KV head, the pages of visual keys that match its queries best."""

    name: str = "pages"
    page: int = PAGE_KEYS

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.TARGET_KEYS})

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        count = self.budget(prompt)
        rows = prompt.index[prompt.visual]
        # A page is no larger than the budget, so that one fits, and no larger than what is left
        # out, so that some page is left out.
        size = max(1, min(self.page, count, len(rows) - count))
        page_count, leftover_rows = len(rows) // size, len(rows) % size
        pages_per_step = max(1, round((count - leftover_rows) / size))
        if pages_per_step >= page_count:
            return prompt  # Every page would be read.
        in_pages = page_count * size
        always_read = ~prompt.visual
        always_read[rows[in_pages:]] = True
        paged = Paged(rows[:in_pages].view(page_count, size), pages_per_step)
        return replace(prompt.keep_rows(always_read), reading=Reading(paged=paged))


PAGES = replace(
    STD,
    name="pages",
    about="std, but every draft step chooses each head's visual keys by that step's own queries",
    view=ByPage(),
    study="each draft step reads all of the target's weights",
)


PAGE = Setting(
    axis="page",
    owner=ByPage,
    field="page",
    parse=parse_whole,
    choices="keys a page, as in 4",
    unmet_message="needs view=pages: it is the number of keys in a page",
    default=PAGE_KEYS,
)

PROVIDES = Provides(recipes=(PAGES,), views=(ByPage(),), axes={"page": PAGE})
