"""PNG files without texts and profiles that Pillow refuses to read for their length.

Tools of image generation write whole prompts and workflows beside the pixels. Nobody here reads
them, and a picture is no worse for them.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import PngImagePlugin

SIGNATURE = b"\x89PNG\r\n\x1a\n"
TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")


def without_long_texts(file: Any) -> Any:
    """The file from its beginning, or, where it is a PNG with texts too long, a copy without."""
    file.seek(0)
    if file.read(len(SIGNATURE)) != SIGNATURE:
        file.seek(0)
        return file
    dropped: list[tuple[int, int]] = []
    total = 0
    for kind, start, length in _chunks(file):
        if kind not in TEXTS:
            continue
        size = _text_size(file, kind, length)
        total += size
        if size >= PngImagePlugin.MAX_TEXT_CHUNK or total > PngImagePlugin.MAX_TEXT_MEMORY:
            dropped.append((start, start + length + 12))
            total -= size
    file.seek(0)
    return _without(file, dropped) if dropped else file


def _chunks(file: Any) -> Iterator[tuple[bytes, int, int]]:
    """The kind of every chunk, where it begins, and the length of what it holds. The file stands at
    what the chunk holds."""
    start = len(SIGNATURE)
    while len(head := file.read(8)) == 8:
        length, kind = int.from_bytes(head[:4]), head[4:]
        yield kind, start, length
        start += length + 12
        file.seek(start)


def _text_size(file: Any, kind: bytes, length: int) -> int:
    """How many bytes a text is, unpacked; no more of it is unpacked than is allowed."""
    most = PngImagePlugin.MAX_TEXT_CHUNK
    if kind == b"tEXt":
        return length if length <= most else most + 1
    _, _, packed = file.read(min(length, most)).partition(b"\0")
    if kind == b"iTXt":
        if packed[:1] != b"\1":  # It is not packed.
            return length if length <= most else most + 1
        packed = packed[2:].split(b"\0", 2)[-1]
    else:
        packed = packed[1:]
    try:
        return len(zlib.decompressobj().decompress(packed, most + 1))
    except zlib.error:
        return 0


def _without(file: Any, dropped: list[tuple[int, int]]) -> io.BytesIO:
    kept = io.BytesIO()
    done = 0
    for start, end in dropped:
        kept.write(file.read(start - done))
        file.seek(end)
        done = end
    kept.write(file.read())
    kept.seek(0)
    return kept
