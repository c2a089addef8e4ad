"""Pages: every step of the draft chooses the keys that it reads. Saccade's own method.

The target drafts for itself: a draft step is a forward of the target over a part of its KV cache.
Other methods choose the draft's keys at prefill or after a round, so the choice may not suit the
queries of a later draft step. Quest (Tang et al., 2024) and MoBA (Lu et al., 2025) decode over the
few pages of a long text that match each query, and lose a little quality. Here only the draft
decodes in this way, and the target verifies over all keys, so nothing is lost. A page P is a run of
consecutive visual keys, and m_P is their mean. At each draft step, KV head h of layer l reads the
pages that suit the queries q of its group best:

    pages_{l,h} = the n pages P with the largest  sum over q of softmax_P(q . m_P / sqrt(d))
    n = max(1, round((K - r) / page))

A page has ``page`` keys, or fewer where no such page fits. K is the number of visual keys that a
step is to read; because whole pages are read, it may be exceeded by a page at most. The r last
visual keys, too few to fill a page, are always read and count towards K. All text keys are always
read.
K and the length of a draft are those of Sparse-to-Dense (``methods/std.py``). Unlike that method,
this one does not need the target's attention at prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from saccade.core.capabilities import Capabilities, Capability
from saccade.core.prompt import Paged, Prefill, Prompt, Reading
from saccade.drafting.provides import Provides, Setting, parse_whole
from saccade.methods.std import STD, Budgeted

PAGE_KEYS = 4  # Keys in a page.


@dataclass(frozen=True)
class ByPage(Budgeted):
    """A view of all text keys and, at each step and for each KV head, of the pages of visual keys
    that match the head's queries best."""

    name: str = "pages"
    page: int = PAGE_KEYS  # Keys in a page.

    @property
    def needs(self) -> Capabilities:
        return frozenset({Capability.TARGET_KEYS})

    def __call__(self, prefill: Prefill, prompt: Prompt) -> Prompt:
        budget = self.budget(prompt)  # K, the visual keys that a step may read.
        # The prompt is whole, so a row's place in the whole prompt is also its index in ``prompt``.
        rows = prompt.places[prompt.visual]
        # Pages are smaller than ``page`` where they have to be: one page at least has to fit into
        # the budget, and one at least has to be left out.
        size = max(1, min(self.page, budget, len(rows) - budget))
        page_count = len(rows) // size
        leftover_rows = len(rows) % size
        pages_per_step = max(1, round((budget - leftover_rows) / size))
        if pages_per_step >= page_count:
            return prompt  # Every page would be read.
        rows_in_pages = page_count * size
        # The text and the last visual rows, too few for a page, are read at every step.
        always_read = ~prompt.visual
        always_read[rows[rows_in_pages:]] = True
        paged = Paged(rows[:rows_in_pages].view(page_count, size), pages_per_step)
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
