"""Answers held to a JSON schema or a regular expression, by llguidance.

A grammar says which tokens may follow an answer's beginning. It is asked at every node of a draft's
tree as at the end of the text, so drafts obey it too. What it says depends on the answer's ids
alone: the parser goes back and forth between prefixes, and the last masks are kept, since the
target asks again about what the draft has asked.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from saccade.core.errors import OptionError
from saccade.core.sampling import BrokenLaw
from saccade.core.tree import common_length

MASKS = 32  # prefixes whose masks are kept
# Between a JSON's parts, as printers put it; not endless, since a model may write nothing else.
SPACES = "( ?|\\n {0,16})"
# A step of a hostile one takes milliseconds of the engine's thread before it is given up.
LIMITS = LLParserLimits(step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000)


def json_schema(schema: Any) -> str:
    """The grammar of what a JSON schema takes. Raises OptionError for one nested too deeply."""
    spaces: Any = {"whitespace_pattern": SPACES}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=spaces))
    except (ValueError, RecursionError):
        raise OptionError("a JSON schema is nested too deeply: make it flatter") from None


def regex(pattern: str) -> str:
    """The grammar of what matches a regular expression from end to end."""
    return str(LLMatcher.grammar_from_regex(pattern))


class Vocabulary:
    """A tokenizer's tokens as grammars read them; made at the first use, by whichever thread."""

    def __init__(self, tokenizer: Any, vocab: int, ends: Iterable[int]) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        # a checkpoint's config may name none; of a tokenizer without one nothing is left
        self.ends = frozenset(ends) or frozenset({tokenizer.eos_token_id} - {None})
        self._made: LLTokenizer | None = None
        self._making = threading.Lock()

    def __reduce__(self) -> Any:
        """As a draft's process takes it, which makes one of each tokenizer."""
        written = self._tokenizer.backend_tokenizer.to_str()
        return _received, (written, self._vocab, self.ends)

    @property
    def tokens(self) -> LLTokenizer:
        with self._making:
            self._made = self._made or self._make()
        return self._made

    def grammar(self, source: str, field: str) -> Grammar:
        """A grammar for one answer. Raises OptionError about ``field`` where it is none."""
        wrong = LLMatcher.validate_grammar(source, self.tokens)
        if wrong:
            lines = [" ".join(line.split()) for line in wrong.splitlines() if line.strip(" ^\n")]
            said = (lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}").replace(". ", ", ")
            raise OptionError(f"{field} cannot be followed: {said[:300].rstrip('.')}")
        found = Grammar(self, source)
        try:
            found(())
        except BrokenLaw:
            said = "it is too large, or there is nothing that it takes"
            raise OptionError(f"{field} cannot be followed: {said}") from None
        return found

    def _make(self) -> LLTokenizer:
        if not self.ends:
            said = "this model names no token that ends an answer, so no format can end"
            raise OptionError(f"{said}: ask for plain text")
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab, eos_token=[*self.ends])
        except ValueError:
            said = "this model's tokenizer is none that formats can be held to: ask for plain text"
            raise OptionError(said) from None


@lru_cache(maxsize=4)
def _received(tokenizer: str, vocab: int, ends: frozenset[int]) -> Vocabulary:
    fast = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer))
    return Vocabulary(fast, vocab, ends)


class Grammar:
    """Which tokens may follow an answer's beginning; one thread uses it. One that is sent to
    another process begins there."""

    def __init__(self, vocabulary: Vocabulary, source: str) -> None:
        self._matcher = LLMatcher(vocabulary.tokens, source, log_level=0, limits=LIMITS)
        self._made_of = vocabulary, source
        self._ends = vocabulary.ends
        self._at: list[int] = []  # what the parser has read
        self._masks: OrderedDict[tuple[int, ...], Bool[Tensor, " vocab"] | None] = OrderedDict()

    def __reduce__(self) -> Any:
        return Grammar, self._made_of

    def __call__(self, answer: Sequence[int]) -> Bool[Tensor, " vocab"] | None:
        """The tokens allowed next; None after what is no beginning, or has ended.

        Raises BrokenLaw where the parser gives up: a grammar too large to follow.
        """
        key = tuple(answer)
        if key in self._masks:
            self._masks.move_to_end(key)
            return self._masks[key]
        mask = self._masks[key] = self._mask(key)
        if len(self._masks) > MASKS:
            self._masks.popitem(last=False)
        return mask

    def _mask(self, answer: tuple[int, ...]) -> Bool[Tensor, " vocab"] | None:
        if not self._ends.isdisjoint(answer) or not self._read(answer):
            return None
        bias = bytearray(self._matcher.compute_logit_bias())
        if self._matcher.is_error():
            said = (self._matcher.get_error() or "").partition("\n")[0]
            raise BrokenLaw(f"the answer's format is too large: {said}")
        return torch.frombuffer(bias, dtype=torch.uint8).bool()

    def _read(self, answer: tuple[int, ...]) -> bool:
        """Brings the parser there; False where it takes no such answer."""
        same = common_length(self._at, answer)
        if same < len(self._at):
            self._matcher.rollback(len(self._at) - same)
        taken = self._matcher.try_consume_tokens(list(answer[same:])) if answer[same:] else 0
        self._at = list(answer[: same + taken])
        return same + taken == len(answer)
