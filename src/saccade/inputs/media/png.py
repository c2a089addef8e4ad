"""Removes long texts and colour profiles from PNG files, because Pillow refuses such files.

Tools of image generation write whole prompts and workflows beside the pixels. They are not needed
here.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import PngImagePlugin

SIGNATURE = b"\x89PNG\r\n\x1a\n"
CHUNK_OVERHEAD = 12  # Bytes of a chunk's length, type and checksum.
TEXT_CHUNKS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def strip_long_texts(file: Any) -> Any:
    """Returns the file; for a PNG with texts or profiles that are too long, each or together, a
    copy without those that are too much. The file that is returned is at its beginning."""
    file.seek(0)
    if file.read(len(SIGNATURE)) != SIGNATURE:
        file.seek(0)
        return file
    dropped: list[tuple[int, int]] = []  # Where each chunk to leave out begins and ends.
    total = 0  # Bytes of the texts that stay. Pillow limits each text, and all of them together.
    for kind, start, length in _chunks(file):
        if kind not in TEXT_CHUNKS:
            continue
        size = _text_size(file, kind, length)
        total += size
        if size >= PngImagePlugin.MAX_TEXT_CHUNK or total > PngImagePlugin.MAX_TEXT_MEMORY:
            dropped.append((start, start + length + CHUNK_OVERHEAD))
            total -= size
    file.seek(0)
    return _copy_without(file, dropped) if dropped else file


def _chunks(file: Any) -> Iterator[tuple[bytes, int, int]]:
    """Yields the type of every chunk, where it begins, and the length of its data.

    At each yield the file is positioned at the chunk's data.
    """
    start = len(SIGNATURE)
    while len(head := file.read(8)) == 8:
        length = int.from_bytes(head[:4])
        kind = head[4:]
        yield kind, start, length
        start += length + CHUNK_OVERHEAD
        file.seek(start)


def _text_size(file: Any, kind: bytes, length: int) -> int:
    """Returns how many bytes a text has when decompressed.

    Where these are more than Pillow allows, it returns some number above the limit. No more than
    the limit is decompressed, so that a small chunk cannot fill the memory.
    """
    max_size = PngImagePlugin.MAX_TEXT_CHUNK
    if length > max_size:
        return max_size + 1
    if kind == b"tEXt":
        return length
    _, _, packed = file.read(length).partition(b"\0")  # The chunk begins with a keyword.
    if kind == b"iTXt":
        if packed[:1] != b"\1":  # The flag of compression is not set.
            return length
        # After the flag and the method come the language and the translated keyword.
        packed = packed[2:].split(b"\0", 2)[-1]
    else:
        packed = packed[1:]  # The first byte is the method of compression.
    try:
        return len(zlib.decompressobj().decompress(packed, max_size + 1))
    except zlib.error:
        return 0  # Pillow does not refuse a file for a text that cannot be decompressed.


def _copy_without(file: Any, dropped: list[tuple[int, int]]) -> io.BytesIO:
    copy = io.BytesIO()
    copied_until = 0
    for start, end in dropped:
        copy.write(file.read(start - copied_until))
        file.seek(end)
        copied_until = end
    copy.write(file.read())
    copy.seek(0)
    return copy
