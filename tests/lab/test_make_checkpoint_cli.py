"""`lab make-checkpoint`: every family, in the format of the real ones, from a seed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lab.checkpoints import FAMILIES, families
from saccade import inputs as models

Call = Callable[..., tuple[int, str, str]]
NEEDS = {"smolvlm": "num2words"}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_family_is_written_and_read(family: str, call: Call, tmp_path: Path) -> None:
    """Claim: each family's checkpoint loads as it is, with a processor that answers for it, and
    --json says where it is. Fails if a family is listed that cannot be made. The newer families
    are made and read in ``tests/families/test_newer_families.py``."""
    if family in NEEDS and importlib.util.find_spec(NEEDS[family]) is None:
        pytest.skip(f"needs {NEEDS[family]}")
    folder = tmp_path / family
    code, printed, error = call("make-checkpoint", family, folder, "--layers", 3, "--json")
    assert code == 0, error
    assert json.loads(printed) == {"family": family, "folder": str(folder), "seed": 0}
    loaded = models.load(str(folder), device="cpu")
    assert loaded.backbone.key_layer_count == 3 and loaded.backbone.vocab == 320
    inputs = models.ask(loaded, "what is this?")
    assert "what is this?" in loaded.tokenizer.decode(inputs["input_ids"][0])


def test_the_list_of_families(call: Call) -> None:
    """Claim: `list` names every family, one a line or as JSON. Fails if one is left out."""
    assert call("make-checkpoint", "list")[1].split() == list(FAMILIES)
    assert json.loads(call("make-checkpoint", "list", "--json")[1]) == list(FAMILIES)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", ["llama", "qwen2.5-vl", "llava-onevision"])
def test_a_seed_is_a_checkpoint(family: str, call: Call, tmp_path: Path) -> None:
    """Claim: the same seed gives the same bytes in every file, another one other weights in the
    same shapes. Fails if anything but the seed decides."""
    folders = [tmp_path / name for name in ("one", "again", "other")]
    for folder, seed in zip(folders, (5, 5, 6), strict=True):
        assert call("make-checkpoint", family, folder, "--seed", seed)[0] == 0
    one, again, other = folders
    assert bytes_of(one) == bytes_of(again)
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    assert all(mine[name].shape == theirs[name].shape for name in mine)
    same = [name for name in mine if torch.equal(mine[name], theirs[name])]
    assert all(not mine[name].any() for name in same), same


def test_noise_disturbs_the_decoder_a_little(call: Call, tmp_path: Path) -> None:
    """Claim: --noise moves the decoder's weights by that share of their spread, and nothing else:
    the draft sees as the target does. Fails if towers move, or the amount is another."""
    noise = 0.05
    folders = [tmp_path / name for name in ("target", "draft", "again")]
    for folder, share in zip(folders, (0, noise, noise), strict=True):
        assert call("make-checkpoint", "qwen2.5-vl", folder, "--noise", share)[0] == 0
    assert bytes_of(folders[1]) == bytes_of(folders[2])
    plain, noisy = weights(folders[0]), weights(folders[1])
    for name, weight in plain.items():
        moved = noisy[name] - weight
        if "visual" in name or "lm_head" in name:
            assert not moved.any(), name
        elif weight.numel() > 1000:
            assert float(moved.std() / weight.std()) == pytest.approx(noise, rel=0.2), name
    target, draft = (models.load(str(folder), device="cpu").backbone for folder in folders[:2])
    assert draft.shares_rows_with(target)


def refused(outcome: tuple[int, str, str], *words: str) -> None:
    code, printed, error = outcome
    assert code == 2 and printed == "" and "Traceback" not in error, error
    assert len(error.strip().splitlines()) == 1, error
    assert all(word in error for word in words), error


def test_what_is_refused(call: Call, tmp_path: Path) -> None:
    """Claim: an unknown family, a folder that holds something, a file, no folder, a width that
    heads do not fit and a vocabulary too small are each one sentence, and nothing is written.
    Fails if a user's files are overwritten."""
    new, full = tmp_path / "new", tmp_path / "full"
    full.mkdir()
    (full / "precious").write_text("mine")
    refused(call("make-checkpoint", "gpt-9", new), "gpt-9", "qwen2.5-vl")
    refused(call("make-checkpoint", "llama", full), str(full), "empty folder")
    refused(call("make-checkpoint", "llama", full / "precious"), "precious")
    refused(call("make-checkpoint", "llama"), "folder")
    refused(call("make-checkpoint", "llama", new, "--hidden", 100), "100", "64")
    refused(call("make-checkpoint", "llama", new, "--vocab", 100), "259")
    assert [path.name for path in full.iterdir()] == ["precious"]
    assert (full / "precious").read_text() == "mine" and not new.exists()


def test_an_empty_folder_will_do(call: Call, tmp_path: Path) -> None:
    """Claim: a folder that is there but empty is written to. Fails if it must not exist."""
    assert call("make-checkpoint", "llama", tmp_path)[0] == 0
    assert (tmp_path / "config.json").exists()
