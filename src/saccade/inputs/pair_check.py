"""Checks that a draft reads and writes the same token ids as its target."""

from __future__ import annotations

from typing import Any, Protocol

from saccade.core.errors import ModelError


class HasTokenizer(Protocol):
    """What the check needs of a loaded model."""

    @property
    def name(self) -> str: ...

    @property
    def tokenizer(self) -> Any: ...


def check_pair(target: HasTokenizer, draft: HasTokenizer) -> None:
    """Raises ModelError, naming the first difference, unless both read and write the same ids."""
    check_tokenizers(target.name, target.tokenizer, draft.name, draft.tokenizer)


def check_tokenizers(target: str, target_tokenizer: Any, draft: str, draft_tokenizer: Any) -> None:
    """Raises ModelError, naming the first difference, unless the tokens of both agree.

    ``target`` and ``draft`` are the models' names for the message. The models' vocabularies may be
    padded differently, and one tokenizer may end in added tokens that the other lacks.
    """
    target_tokens = _tokens(target_tokenizer)
    draft_tokens = _tokens(draft_tokenizer)
    added = {*target_tokenizer.added_tokens_decoder, *draft_tokenizer.added_tokens_decoder}
    last_common = min(max(target_tokens), max(draft_tokens))
    for number in sorted(target_tokens.keys() | draft_tokens.keys()):
        if number > last_common and number in added:
            continue
        if target_tokens.get(number) != draft_tokens.get(number):
            raise ModelError(
                f"{draft} cannot draft for {target}: their tokenizers differ at id "
                f"{number} ({draft_tokens.get(number)!r} against {target_tokens.get(number)!r}); "
                "choose a draft of the same family"
            )


def tokenizer_of(processor: Any) -> Any:
    """Returns a processor's tokenizer. A text-only model has its tokenizer as its processor."""
    return getattr(processor, "tokenizer", processor)


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}
