"""Claims about what training knows of the world: labels that match pixels, words that name them."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
from reels import nearest

from lab.training.labels import content_words, token_labels
from saccade.world import descriptions, drawing, scenes

SCENES = [scenes.scene(seed) for seed in range(100)]


def test_labels_agree_with_pixels():
    """Claim: a token labelled colour c shows palette[c] where a large object fills it."""
    checked = right = 0
    for scene in SCENES[:60]:
        clip = drawing.render(scene, 8, 168)
        labels = token_labels(scene, 8, 168)
        assert {a.shape for a in labels.values()} == {(4, 6, 6)}
        blocks = clip.reshape(4, 2, 6, 28, 6, 28, 3).transpose(0, 2, 4, 1, 3, 5, 6)
        large = (labels["size"] == 2) & (labels["shape"] == 1)
        for where in zip(*np.nonzero(large), strict=True):
            checked += 1
            right += nearest(blocks[where].reshape(-1, 3)) == labels["color"][where] - 1
        none = labels["shape"] == 0
        for name in ("color", "size", "motion"):
            assert np.array_equal(labels[name] == 0, none)
    assert checked > 100
    # A neighbour of another colour may share a token; the most covered object decides.
    assert right / checked > 0.97


def test_labels_of_place_and_time():
    """Claim: row, col and time are those of the token's middle, at any grid and for one frame."""
    labels = token_labels(SCENES[0], 8, 84, 168)
    assert labels["row"][0, :, 0].tolist() == [0, 1, 2]
    assert labels["col"][0, 0].tolist() == [0, 0, 1, 1, 2, 2]
    assert labels["time"][:, 0, 0].tolist() == [0, 1, 2, 3]
    assert token_labels(SCENES[0], 1, 56)["shape"].shape == (1, 2, 2)


def test_content_words_find_what_pixels_decide():
    """Claim: spans never overlap, hold whole words, and cover every colour, shape and texture."""
    for scene in SCENES[:100]:
        text = descriptions.describe(scene)
        spans = content_words(text)
        for (_, end, _), (start, _, _) in pairwise(spans):
            assert end <= start
        for start, end, _ in spans:
            assert re.fullmatch(r"[A-Za-z]+( [a-z]+)*", text[start:end])
            assert not text[start - 1 : start].isalpha() and not text[end : end + 1].isalpha()
        marked = [text[a:b] for a, b, kind in spans if kind == "colour"]
        assert marked == re.findall(rf"\b(?:{'|'.join(scenes.COLORS)})\b", text)
        kinds = {kind for _, _, kind in spans}
        assert {"texture", "shape", "size", "where", "count"} <= kinds
        assert 0.2 < len(spans) / len(text.split()) < 0.8
        for event in scene.events:
            time = descriptions.VOICES[scene.voice].when[event.time_index].split()
            marks = " ".join(text[a:b] for a, b, kind in spans if kind == "time").lower()
            assert any(word in marks for word in time)
