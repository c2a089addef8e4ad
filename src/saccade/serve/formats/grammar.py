"""Constrains answers to a JSON schema or a regular expression, by llguidance.

A grammar says which tokens may follow an answer's beginning. It is evaluated at every node of a
draft's tree as well as at the end of the text, so that drafts obey it too. There is one parser for
all nodes: it is rolled back to where a node's branch begins, and then reads that branch. The last
masks are cached, because the target needs those that the draft has just used.
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
from saccade.core.json_text import parse_json
from saccade.core.sampling import BrokenLaw
from saccade.core.tree import common_length

MAX_CACHED_MASKS = 32  # of one answer's grammar, which has one mask for each prefix
# The space that JSON printers put between parts. It is bounded, because a model could otherwise go
# on writing space for ever.
JSON_WHITESPACE = "( ?|\\n {0,16})"
# Within these limits a step of a hostile grammar takes only milliseconds of the engine's thread
# before the parser gives up.
PARSER_LIMITS = LLParserLimits(
    step_lexer_fuel=50_000, step_max_items=20_000, max_lexer_states=20_000
)


def json_schema_grammar(schema: Any) -> str:
    """Returns the grammar of a JSON schema. Raises OptionError for one nested too deeply."""
    overrides: Any = {"whitespace_pattern": JSON_WHITESPACE}
    try:
        return str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides))
    except (ValueError, RecursionError):
        raise OptionError("a JSON schema is nested too deeply: make it flatter") from None


def regex_grammar(pattern: str) -> str:
    """Returns the grammar of texts that match a regular expression as a whole."""
    return str(LLMatcher.grammar_from_regex(pattern))


NO_FORCING = '%llguidance {"no_forcing": true}\n'


def without_forcing(source: str) -> str:
    """Returns the same grammar with llguidance's forcing switched off.

    By default, where the grammar permits only one text, a mask allows only the tokens into which
    the tokenizer splits it. Without forcing, a mask allows every split of the text into tokens.
    """
    try:
        (grammar,) = parse_json(source)["grammars"]
    except ValueError:  # The source is in Lark already.
        return NO_FORCING + source
    if grammar["lark_grammar"] is not None:
        return NO_FORCING + str(grammar["lark_grammar"])
    return f"{NO_FORCING}start: json\njson: %json {json.dumps(grammar['json_schema'])}"


class GrammarVocabulary:
    """A tokenizer's tokens in llguidance's form, which is made at the first use in any thread."""

    def __init__(self, tokenizer: Any, vocab: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer, self._vocab = tokenizer, vocab
        # Where the config names no token that ends an answer, that of the tokenizer is used, if
        # there is one.
        self.eos_ids = frozenset(eos_ids) or frozenset({tokenizer.eos_token_id} - {None})
        self._ll_tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> Any:
        """Pickles the tokenizer as JSON for the draft's process, which rebuilds the vocabulary once
        and caches it."""
        tokenizer_json = self._tokenizer.backend_tokenizer.to_str()
        return _unpickle_vocabulary, (tokenizer_json, self._vocab, self.eos_ids)

    @property
    def tokens(self) -> LLTokenizer:
        with self._lock:
            self._ll_tokenizer = self._ll_tokenizer or self._make_ll_tokenizer()
        return self._ll_tokenizer

    def must_be_named(self, text: str) -> bool:
        """Returns whether a grammar must write this text as the name of a token, without quotes.

        llguidance matches a quoted text with ordinary tokens only. It treats an added token such as
        ``<tool_call>`` as a special one, whether the tokenizer marks it as special or not.
        """
        token = self._tokenizer.get_added_vocab().get(text)
        return token is not None and bool(self.tokens.is_special_token(token))

    def grammar(self, source: str, field: str) -> Grammar:
        """Returns a grammar for one answer.

        Raises OptionError, which names ``field``, where the source is no usable grammar.
        """
        problem = LLMatcher.validate_grammar(source, self.tokens)
        if problem:
            # A message of llguidance may have several lines. The first says what is wrong, and the
            # last often where or why. Lines of blanks and "^" only point at the line above.
            lines = [" ".join(line.split()) for line in problem.splitlines() if line.strip(" ^\n")]
            reason = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
            reason = reason.replace(". ", ", ")[:300].rstrip(".")
            raise OptionError(f"{field} cannot be followed: {reason}")
        grammar = Grammar(self, source)
        try:
            grammar(())  # The parser gives up here if the grammar is too large to follow.
        except BrokenLaw:
            reason = "it is too large, or there is nothing that it takes"
            raise OptionError(f"{field} cannot be followed: {reason}") from None
        return grammar

    def _make_ll_tokenizer(self) -> LLTokenizer:
        if not self.eos_ids:
            reason = "this model names no token that ends an answer, so no format can end"
            raise OptionError(f"{reason}: ask for plain text")
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab, eos_token=[*self.eos_ids])
        except ValueError:
            message = "this model's tokenizer does not work with formats: ask for plain text"
            raise OptionError(message) from None


@lru_cache(maxsize=4)
def _unpickle_vocabulary(
    tokenizer_json: str, vocab: int, eos_ids: frozenset[int]
) -> GrammarVocabulary:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(tokenizer_json))
    return GrammarVocabulary(tokenizer, vocab, eos_ids)


class Grammar:
    """Says which tokens may follow an answer's beginning.

    Only one thread may use it. A copy that is pickled to another process starts afresh.

    Where only one text can follow, llguidance's mask allows only the first of the tokens into which
    the tokenizer splits that text (see ``without_forcing``). If the text is ``<tool_call>``, say,
    that first token is an added token, which llguidance's own parser then refuses. In that case the
    mask is computed again without forcing, so that ordinary tokens spell the text.
    """

    def __init__(self, vocabulary: GrammarVocabulary, source: str) -> None:
        self._matcher = _matcher(vocabulary, source)
        self._arguments = vocabulary, source
        self._eos_ids = vocabulary.eos_ids
        self._parsed_ids: list[int] = []  # The answer as far as the parser has read it.
        self._masks: OrderedDict[tuple[int, ...], Bool[Tensor, " vocab"] | None] = OrderedDict()

    def __reduce__(self) -> Any:
        return Grammar, self._arguments

    def __call__(self, answer: Sequence[int]) -> Bool[Tensor, " vocab"] | None:
        """Returns the tokens allowed next; None, which allows any token, after an answer that has
        ended or does not match.

        Raises BrokenLaw where the parser gives up because the grammar is too large.
        """
        key = tuple(answer)
        if key in self._masks:
            self._masks.move_to_end(key)
            return self._masks[key]
        mask = self._masks[key] = self._mask(key)
        if len(self._masks) > MAX_CACHED_MASKS:
            self._masks.popitem(last=False)
        return mask

    def _mask(self, answer: tuple[int, ...]) -> Bool[Tensor, " vocab"] | None:
        if not self._eos_ids.isdisjoint(answer) or not self._move_parser(answer):
            return None
        bias = _compute_bias(self._matcher)
        # A single allowed token may be one that the parser itself refuses (see the class).
        allowed_tokens = len(bias) - bias.count(0)
        if allowed_tokens == 1:
            # The token is the place of the only byte that is not 0.
            token = len(bias) - len(bias.lstrip(b"\0"))
            if self._is_refused(token):
                bias = self._unforced_bias(answer)
        return torch.frombuffer(bias, dtype=torch.uint8).bool()

    def _is_refused(self, token: int) -> bool:
        """Returns whether the parser refuses a token that its own mask allows."""
        if token in self._eos_ids:
            return not self._matcher.is_accepting()
        return self._matcher.validate_tokens([token]) == 0

    def _unforced_bias(self, answer: tuple[int, ...]) -> bytearray:
        """Returns the bias after an answer by the same grammar without forcing."""
        vocabulary, source = self._arguments
        matcher = _matcher(vocabulary, without_forcing(source))
        if answer:
            matcher.try_consume_tokens([*answer])
        return _compute_bias(matcher)

    def _move_parser(self, answer: tuple[int, ...]) -> bool:
        """Moves the parser to the end of an answer; returns whether the answer matches so far.

        A parser that has had an error stays in that state. The error may have come from another
        text, such as a draft's, so a new parser replaces it. Raises BrokenLaw where the parser
        gives up on this answer.
        """
        if self._matcher.is_error():
            self._matcher = _matcher(*self._arguments)
            self._parsed_ids = []
        same = common_length(self._parsed_ids, answer)
        if same < len(self._parsed_ids):
            self._matcher.rollback(len(self._parsed_ids) - same)
        consumed = self._matcher.try_consume_tokens(list(answer[same:])) if answer[same:] else 0
        self._parsed_ids = list(answer[: same + consumed])
        _check_parser(self._matcher)
        return same + consumed == len(answer)


def _matcher(vocabulary: GrammarVocabulary, source: str) -> LLMatcher:
    return LLMatcher(vocabulary.tokens, source, log_level=0, limits=PARSER_LIMITS)


def _compute_bias(matcher: LLMatcher) -> bytearray:
    """Returns a byte for each token, 0 where it is not allowed. Raises BrokenLaw."""
    bias = bytearray(matcher.compute_logit_bias())
    _check_parser(matcher)
    return bias


def _check_parser(matcher: LLMatcher) -> None:
    """Raises BrokenLaw where a parser has given up."""
    if matcher.is_error():
        reason = (matcher.get_error() or "").partition("\n")[0]
        raise BrokenLaw(f"the answer's format is too large: {reason}")
