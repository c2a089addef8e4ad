"""Claims about text in pieces: no half characters, nothing of a stop string, nothing lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.serve.detokenizer import DECODE_WINDOW_TOKENS, UNFINISHED, StreamingDetokenizer

TEXTS = [
    "plain words",
    "日本語のテキスト",
    "a 👩‍👩‍👧‍👦 family 🎬🎞️",
    "café naïve",
    "🙂" * 90,
    "x" * 400,
]


def _bytes(ids: Sequence[int]) -> str:
    """A tokenizer of one byte a token."""
    return bytes(ids).decode("utf-8", errors="replace")


def _stripping(ids: Sequence[int]) -> str:
    """One that, like sentencepiece, drops a blank at the beginning of whatever it is given."""
    return _bytes(ids).removeprefix(" ")


def _blocks(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    blocks, at = [], 0
    while at < len(ids):
        size = sizes[len(blocks) % len(sizes)]
        blocks.append(list(ids[at : at + size]))
        at += size
    return blocks


@pytest.mark.parametrize("decode", [_bytes, _stripping])
@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:8])
@pytest.mark.parametrize("size", range(1, 10))
def test_pieces_of_any_size_are_the_text(text, size, decode):
    """Claim: their sum is the text and no piece holds half a character, for every block size."""
    writer, pieces = StreamingDetokenizer(decode, []), []
    for block in _blocks(text.encode(), [size]):
        pieces.append(writer.write(block))
    pieces.append(writer.finish(text))
    assert "".join(pieces) == text
    assert not any(UNFINISHED in piece for piece in pieces)
    assert len([piece for piece in pieces if piece]) > 1, "it is told piece by piece"


@given(
    st.lists(st.integers(0, 255), min_size=1, max_size=300),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
@settings(max_examples=300)
def test_whatever_the_bytes_nothing_is_lost(ids, sizes):
    """Claim: also where the answer is no text at all, the pieces are what it decodes to."""
    writer = StreamingDetokenizer(_bytes, [])
    output = "".join(map(writer.write, _blocks(ids, sizes)))
    assert output + writer.finish(_bytes(ids)) == _bytes(ids)


def _given_stops(alphabet: str, longest: int) -> Any:
    """Gives a test a text of these letters, a few stop strings, and the sizes of its pieces."""
    stop = st.text(alphabet=alphabet, min_size=1, max_size=4)
    return given(
        st.text(alphabet=alphabet, min_size=1, max_size=longest),
        st.lists(stop, min_size=1, max_size=3),
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
    )


@_given_stops("ab#é🙂", 120)
@settings(max_examples=300)
def test_nothing_of_a_stop_string_is_shown(text, stops, sizes):
    """Claim: up to the first stop everything is shown, of it nothing, in whatever pieces."""
    cut_data_urls = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    writer, output = StreamingDetokenizer(_bytes, stops), ""
    for block in _blocks(text.encode(), sizes):
        output += writer.write(block)
        assert text[:cut_data_urls].startswith(output)
    assert output + writer.finish(text[:cut_data_urls]) == text[:cut_data_urls]


@_given_stops("ab#", 40)
@settings(max_examples=300)
def test_nothing_of_a_stop_string_with_special_tokens_is_shown(text, stops, sizes):
    """Claim: the same where the text leaves out special tokens (here #) that stops may have."""

    def decode(ids: Sequence[int]) -> str:
        return _bytes(ids).replace("#", "")

    end = min((text.index(stop) for stop in stops if stop in text), default=len(text))
    shown = text[:end].replace("#", "")
    writer, output, read = StreamingDetokenizer(decode, stops, _bytes), "", 0
    for block in _blocks(text.encode(), sizes):
        output += writer.write(block)
        assert shown.startswith(output)
        read += len(block)
        if any(stop in text[:read] for stop in stops):
            break  # The answer ends here.
    assert output + writer.finish(shown) == shown


def test_a_long_answer_is_not_decoded_over_and_over():
    """Claim: what is decoded for a piece does not grow with the answer."""
    lengths: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        lengths.append(len(ids))
        return _bytes(ids)

    writer, text = StreamingDetokenizer(decode, ["never"]), "some words " * 500
    output = "".join(map(writer.write, _blocks(text.encode(), [3])))
    assert output + writer.finish(text) == text
    assert max(lengths) <= 3 * DECODE_WINDOW_TOKENS
