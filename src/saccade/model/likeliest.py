"""The likeliest tokens of each row of a captured forward, which are computed inside the forward.

A greedy draft needs few numbers of each step: the likeliest token, the next one, and how sure the
draft is of both. They are written into memory that stays where it is, and the host reads them in
one small copy. Sessions may forbid different ids (:class:`Vocabulary`), so a captured forward reads
from a table in the device's memory which ids are forbidden (:class:`VocabularyTable`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from saccade.core.sampling import NO_TOKEN, TopTokens

MAX_VOCABULARIES = 16  # In the table of a model; sessions over a model have one to three.


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a session chooses among: those below ``size`` that are not ``banned``.

    ``size`` is None for all ids of the model.
    """

    size: int | None = None
    banned: tuple[int, ...] = ()

    def forbidden(self, vocab: int) -> Bool[Tensor, " vocab"]:
        """Returns which of a model's ids are not among them, on the CPU."""
        mask = torch.zeros(vocab, dtype=torch.bool)
        if self.size is not None:
            mask[self.size :] = True
        mask[list(self.banned)] = True
        return mask


WHOLE_VOCABULARY = Vocabulary()


class VocabularyTable:
    """Which ids each vocabulary forbids, on a device, at addresses that do not change."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._forbidden = torch.zeros(MAX_VOCABULARIES, vocab, dtype=torch.bool, device=device)
        self._numbers = {WHOLE_VOCABULARY: 0}

    def numbers(self, vocabularies: Sequence[Vocabulary]) -> list[int] | None:
        """Returns the row of each vocabulary, which is filled where it is new.

        Returns None where they are too many for the table. A full table is cleared. That is safe,
        because the device works in order, so earlier forwards have read their rows before they are
        overwritten.
        """
        if len(self._numbers.keys() | vocabularies) > MAX_VOCABULARIES:
            self._numbers = {WHOLE_VOCABULARY: 0}
            if len(self._numbers.keys() | vocabularies) > MAX_VOCABULARIES:
                return None
        for vocabulary in vocabularies:
            if vocabulary not in self._numbers:
                number = self._numbers[vocabulary] = len(self._numbers)
                self._forbidden[number].copy_(vocabulary.forbidden(self._vocab))
        return [self._numbers[vocabulary] for vocabulary in vocabularies]

    def forbid_(
        self, logits: Float[Tensor, "row vocab"], numbers: Int[Tensor, " request"]
    ) -> Float[Tensor, "row vocab"]:
        """Sets the logits of ids that each request's vocabulary forbids to -inf, in place.

        Each request has the same number of rows.
        """
        forbidden = self._forbidden.index_select(0, numbers)
        by_request = logits.view(len(numbers), -1, logits.shape[1])
        by_request.masked_fill_(forbidden[:, None], float("-inf"))
        return logits


NUMBERS = len(TopTokens._fields)


def top_tokens(logits: Float[Tensor, "row vocab"]) -> Float64[Tensor, "row 4"]:
    """Returns the fields of :class:`TopTokens` for each row. The token is NO_TOKEN where a logit is
    NaN. Ids are doubles, which hold them exactly.

    Maxima are quicker than a sort, which ``torch.topk`` does over so many numbers.
    """
    largest, ids = logits.max(-1)
    others = logits.scatter(-1, ids[:, None], float("-inf"))
    next_largest, next_ids = others.max(-1)
    total = logits.float().logsumexp(-1)
    probabilities = [(each.float() - total).exp().double() for each in (largest, next_largest)]
    known = ids.masked_fill(largest.isnan(), NO_TOKEN)
    return torch.stack((known.double(), next_ids.double(), *probabilities), -1)


class LikeliestTokens:
    """The likeliest tokens of one forward's rows, which are fetched when the first is read.

    Any thread may read them, also while another one starts the next forward.
    """

    def __init__(self, numbers: Float64[Tensor, "row 4"]) -> None:
        """``numbers`` are those of :func:`top_tokens`.

        They may be memory that the next forward writes to, if :meth:`preserve` is called before.
        """
        self._numbers = numbers
        self._fetched: list[list[float]] | None = None
        self._lock = threading.Lock()

    def preserve(self) -> None:
        """Copies the tokens that were not fetched yet, because their memory is written to next.

        The host does not wait for it.
        """
        with self._lock:
            if self._fetched is None:
                self._numbers = self._numbers.clone()

    def read(self, row: int) -> TopTokens:
        """Returns the likeliest tokens of a row. The first call waits for the device."""
        token, runner_up, probability, runner_up_probability = self._fetch()[row]
        return TopTokens(int(token), int(runner_up), probability, runner_up_probability)

    def _fetch(self) -> list[list[float]]:
        with self._lock:
            if self._fetched is None:
                self._fetched = self._numbers.tolist()
            return self._fetched

    def __getstate__(self) -> list[list[float]]:
        """Returns the tokens, so that results can be copied and sent."""
        return self._fetch()

    def __setstate__(self, fetched: list[list[float]]) -> None:
        self._numbers, self._fetched = torch.tensor(fetched, dtype=torch.float64), fetched
        self._lock = threading.Lock()
