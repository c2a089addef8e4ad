"""Claims about which files are taken for texts, wherever a user may bring any file."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from saccade.inputs.subjects import FIRST_BYTES, is_text_file


def picture(kind: str) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file, kind)
    return file.getvalue()


CUT_CHARACTER = b"a" * (FIRST_BYTES - 1) + "é".encode()
FILES = [
    ("notes.txt", "Grüße".encode("latin-1"), True),  # The reader of texts says what is wrong.
    ("rows.csv", b"a,b\n1,2\n", True),
    ("facts.json", b"{}", True),
    ("notes", b"plain words", True),
    ("notes.xyz", CUT_CHARACTER, True),
    ("module.ts", b"const a = 1;\n", True),
    ("stream.ts", b"\x47\x40\x11\x10\x00\x42\xf0" * 20, False),
    ("page.mp4", b"<html>not found</html>", False),
    ("picture.png", b"no picture", False),
    ("notes.txt.gz", gzip.compress(b"words"), False),
    ("picture", picture("PNG"), False),
    ("photo", picture("JPEG"), False),
    ("drawing", picture("GIF"), False),
    ("clip", b"\0\0\0\x18ftypmp42" + bytes(8), False),
    ("empty", b"", False),
]


@pytest.mark.parametrize(("name", "content", "is_text"), FILES, ids=[name for name, *_ in FILES])
def test_a_file_is_a_text_by_its_name_or_else_by_its_bytes(tmp_path, name, content, is_text):
    """Claim: a name of a text, a picture or a video decides; otherwise the first bytes do, also
    where they end within a character. Fails if a failed download of a video is read as a text, or
    a picture without a suffix."""
    file = tmp_path / name
    file.write_bytes(content)
    assert is_text_file(file) is is_text


def test_what_cannot_be_opened_is_no_text(tmp_path: Path) -> None:
    """Claim: a folder and a missing file are left to the reader of videos, which says why."""
    assert not is_text_file(tmp_path) and not is_text_file(tmp_path / "nowhere")
