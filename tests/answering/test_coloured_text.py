"""Claims about text printed while it is decoded: no character is lost, split or doubled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.control import strip_control_codes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saccade.answering.coloured_text import IncrementalDecoder
from saccade.core.answer_text import UNFINISHED, TextDecoder
from saccade.core.result import RoundRecord

pytestmark = pytest.mark.usefixtures("unchecked")


SPOKEN = "Ein Café 🙂 mit 👩‍👩‍👧 und 数学, naïve\n漢字かな交じり文 – done 🏳️‍🌈"


@cache
def by_bytes() -> PreTrainedTokenizerFast:
    """A token a byte, as GPT's and Qwen's fall back to: an emoji takes four."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@cache
def by_fallback() -> PreTrainedTokenizerFast:
    """Letters it knows, and bytes as ``<0x..>`` for those it does not, as Llama's has them."""
    known = sorted(
        {letter for letter in SPOKEN if letter.isascii()} | {"\N{LOWER ONE EIGHTH BLOCK}"}
    )
    vocab = {letter: i for i, letter in enumerate(["<unk>", *known])}
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
        ]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"bytes": by_bytes, "byte fallback": by_fallback}


def typed(
    tokenizer: PreTrainedTokenizerFast,
    ids: Sequence[int],
    block: int,
    stops: tuple[str, ...] = (),
    whole: str | None = None,
) -> list[str]:
    """The pieces a person sees of tokens that come ``block`` at a time, the rest last."""
    decoder = TextDecoder(
        lambda part: tokenizer.decode(list(part), skip_special_tokens=True), stops=stops
    )
    text_decoder = IncrementalDecoder(decoder)
    pieces = []
    for start in range(0, len(ids), block):
        part = tuple(ids[start : start + block])
        record = RoundRecord(part, (), part[:-1], part[-1], "bonus", 0.0, 0.0)
        pieces.append(text_decoder.styled_text(record).plain)
    return [*pieces, text_decoder.rest(whole)]


@pytest.mark.representatives(2)
@pytest.mark.parametrize("block", [1, 2, 3, 4, 5, 7, 16, 1000])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_streamed_text_are_the_whole_text(name, block):
    """Claim: emoji, CJK and accents spelt by several tokens: at every block size, and cut at every
    place, the pieces put together are the decoded text, and no piece holds half a character.

    Byte fallback decodes a run of bytes that ends inside a character as no character at all, even
    those before it: there the pieces are the text up to the cut, which is more than the decoded.
    """
    tokenizer = TOKENIZERS[name]()
    ids = tokenizer.encode(SPOKEN, add_special_tokens=False)
    assert len(ids) > len(SPOKEN) and tokenizer.decode(ids) == SPOKEN
    *pieces, rest = typed(tokenizer, ids, block)
    assert "".join(pieces) == SPOKEN and rest == ""
    for end in range(1, len(ids)):
        *pieces, rest = typed(tokenizer, ids[:end], block)
        whole, text = tokenizer.decode(ids[:end]), "".join(pieces)
        assert SPOKEN.startswith(text) and UNFINISHED not in text
        if name == "bytes" or UNFINISHED not in whole:
            assert text + rest == whole


@given(st.lists(st.integers(0, 255), max_size=24), st.integers(1, 6))
def test_bytes_that_are_no_text_are_neither_lost_nor_doubled(ids, block):
    """Claim: any bytes at all: the pieces and the rest put together are the decoded text, less
    what would ring or move the cursor of a terminal."""
    tokenizer = by_bytes()
    *pieces, rest = typed(tokenizer, ids, block)
    assert "".join([*pieces, strip_control_codes(rest)]) == strip_control_codes(
        tokenizer.decode(ids)
    )


@pytest.mark.representatives(2)
@pytest.mark.parametrize("block", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("stop", ["Café", "🙂 mit", "数学", "done 🏳️‍🌈"])
def test_a_stop_string_is_never_printed(stop, block):
    """Claim: of an answer that ends with a stop string, the text before it is printed, in blocks of
    any size. Where the string only begins, its beginning is printed once the answer is over."""
    tokenizer = by_bytes()
    before = SPOKEN[: SPOKEN.index(stop)]
    ids = tokenizer.encode(before + stop, add_special_tokens=False)
    assert "".join(typed(tokenizer, ids, block, (stop,), before)) == before
    cut = tokenizer.decode(ids[:-1])
    assert "".join(typed(tokenizer, ids[:-1], block, (stop,), cut)) == cut
    *pieces, rest = typed(tokenizer, ids[:-1], 1, (stop,), cut)
    assert "".join(pieces) == before and rest


def test_control_decoding_each_round_by_itself_loses_characters():
    """Control: the usual shortcut, each round's tokens decoded alone, must not give the text."""
    tokenizer = by_bytes()
    ids = tokenizer.encode(SPOKEN)
    parts = [tokenizer.decode(ids[at : at + 5]) for at in range(0, len(ids), 5)]
    assert "".join(parts) != SPOKEN and UNFINISHED in "".join(parts)
