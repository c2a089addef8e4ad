"""The likeliest tokens of each row, which a forward captured as a CUDA graph computes itself.

A greedy draft needs four numbers of each step: the likeliest token, the runner-up, and the
probabilities of both. The graph writes them to a fixed address, and the host reads them in one
small copy. All sessions of a model, which run the requests of different calls, share its graphs and
may forbid different ids (:class:`Vocabulary`). So the graph reads from a table in the device's
memory which ids are forbidden (:class:`VocabularyTable`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from saccade.core.sampling import NO_TOKEN, TopTokens

MAX_VOCABULARIES = 16  # Rows of a model's table; the sessions of a model need one to three.


@dataclass(frozen=True)
class Vocabulary:
    """The ids that a session chooses among: those below ``size`` that are not ``banned``.

    ``size`` is None for all ids of the model.
    """

    size: int | None = None
    banned: tuple[int, ...] = ()

    def forbidden(self, vocab: int) -> Bool[Tensor, " vocab"]:
        """Returns the mask of a model's ids that may not be chosen, on the CPU."""
        mask = torch.zeros(vocab, dtype=torch.bool)
        if self.size is not None:
            mask[self.size :] = True
        mask[list(self.banned)] = True
        return mask


WHOLE_VOCABULARY = Vocabulary()


class VocabularyTable:
    """A row for each vocabulary that says which ids it forbids, at a fixed address on a device."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._vocab = vocab
        self._forbidden = torch.zeros(MAX_VOCABULARIES, vocab, dtype=torch.bool, device=device)
        self._rows = {WHOLE_VOCABULARY: 0}

    def row_numbers(self, vocabularies: Sequence[Vocabulary]) -> list[int] | None:
        """Returns the number of each vocabulary's row in the table, and fills rows that are new.

        The whole vocabulary always has a row. Returns None where the others are more than the rows
        that are left. A full table is cleared. That is safe, because the device works in order, so
        earlier forwards have read their rows before they are overwritten.
        """
        if len(self._rows.keys() | vocabularies) > MAX_VOCABULARIES:
            self._rows = {WHOLE_VOCABULARY: 0}
            if len(self._rows.keys() | vocabularies) > MAX_VOCABULARIES:
                return None
        for vocabulary in vocabularies:
            if vocabulary not in self._rows:
                row = self._rows[vocabulary] = len(self._rows)
                self._forbidden[row].copy_(vocabulary.forbidden(self._vocab))
        return [self._rows[vocabulary] for vocabulary in vocabularies]

    def forbid_(
        self, logits: Float[Tensor, "row vocab"], numbers: Int[Tensor, " request"]
    ) -> Float[Tensor, "row vocab"]:
        """Sets the logits of ids that each request's vocabulary forbids to -inf, in place.

        ``numbers`` has, for each request, the number of its vocabulary's row in the table
        (:meth:`row_numbers`). All requests have the same number of rows of logits.
        """
        forbidden = self._forbidden.index_select(0, numbers)
        by_request = logits.view(len(numbers), -1, logits.shape[1])
        by_request.masked_fill_(forbidden[:, None], float("-inf"))
        return logits


NUMBERS_PER_ROW = len(TopTokens._fields)  # How many numbers :func:`top_tokens` returns for a row.


def top_tokens(logits: Float[Tensor, "row vocab"]) -> Float64[Tensor, "row 4"]:
    """Returns four numbers for each row: the likeliest token, the runner-up, and the probabilities
    of both.

    They are the fields of :class:`TopTokens`, as doubles, which hold ids exactly. The token is
    NO_TOKEN where a logit is NaN. Over a whole vocabulary two maxima are quicker than
    ``torch.topk``.
    """
    largest, ids = logits.max(-1)
    others = logits.scatter(-1, ids[:, None], float("-inf"))
    next_largest, next_ids = others.max(-1)
    total = logits.float().logsumexp(-1)
    probabilities = [(each.float() - total).exp().double() for each in (largest, next_largest)]
    tokens = ids.masked_fill(largest.isnan(), NO_TOKEN)
    return torch.stack((tokens.double(), next_ids.double(), *probabilities), -1)


class LikeliestTokens:
    """The likeliest tokens of one forward's rows, all fetched when the first of them is read.

    Any thread may read them, also while another one starts the next forward.
    """

    def __init__(self, numbers: Float64[Tensor, "row 4"]) -> None:
        """``numbers`` are those of :func:`top_tokens`.

        They may be in memory that the next forward overwrites, if :meth:`preserve` is called first.
        """
        self._device_numbers = numbers
        self._fetched: list[list[float]] | None = None
        self._lock = threading.Lock()

    def preserve(self) -> None:
        """Copies tokens that were not fetched yet, before the next forward overwrites their memory.

        The host does not wait for the copy.
        """
        with self._lock:
            if self._fetched is None:
                self._device_numbers = self._device_numbers.clone()

    def read(self, row: int) -> TopTokens:
        """Returns the likeliest tokens of a row. The first call waits for the device."""
        token, runner_up, probability, runner_up_probability = self._fetch()[row]
        return TopTokens(int(token), int(runner_up), probability, runner_up_probability)

    def _fetch(self) -> list[list[float]]:
        with self._lock:
            if self._fetched is None:
                self._fetched = self._device_numbers.tolist()
            return self._fetched

    def __getstate__(self) -> list[list[float]]:
        """Returns the tokens, so that results can be copied and sent."""
        return self._fetch()

    def __setstate__(self, fetched: list[list[float]]) -> None:
        self._device_numbers = torch.tensor(fetched, dtype=torch.float64)
        self._fetched = fetched
        self._lock = threading.Lock()
