"""A folder or hub id to a loaded model, with a sentence for everything that can go wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    TorchAoConfig,
)

from saccade.core.errors import ModelError, OptionError, SaccadeError, first_line
from saccade.core.options import check_whole
from saccade.inputs import architectures, footprint
from saccade.inputs.checkpoints import cached_only, check_folder, offline, source_of
from saccade.model import families, kernels, memory
from saccade.model.backbone import Backbone

MANY = 16  # threads a processor
MOST_PARTS = 10_000  # layers or experts of a model
COUNTS = re.compile(r"layers$|depth$|num_\w*experts$")
Places = Literal["auto", "library", "trained"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PLAIN = (*DTYPES.values(), torch.float64)


def _torchao() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


QUANTIZERS: dict[str, tuple[str, int, Callable[[], Any]]] = {  # package, bits, settings
    # its outliers are found over all rows of a forward: with them, drafted rows change each other
    "bnb-8bit": (
        "bitsandbytes",
        8,
        lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "bnb-4bit": ("bitsandbytes", 4, lambda: BitsAndBytesConfig(load_in_4bit=True)),
    "torchao-int8": ("torchao", 8, _torchao),
}


@dataclass(frozen=True)
class Loaded:
    """A checkpoint ready to answer."""

    name: str
    backbone: Backbone
    processor: Any  # or a tokenizer, for a text-only model

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids as text, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def load(
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    fused: bool | None = None,
    positions: Places = "auto",
    tp: bool = False,
) -> Loaded:
    """Loads a checkpoint folder, a hub id, or one of the embedded models by ``checkpoints.NAMES``.

    Only safetensors weights are read. Raises ModelError or OptionError, in one sentence, before
    any weight is read where that can be known.

    Args:
        dtype: of ``DTYPES``; defaults to float32 on a CPU and to the checkpoint's own elsewhere.
        device: one device for everything. Defaults to a GPU where there is one.
        device_map: "auto" spreads the layers over what devices there are (and main memory).
        quantize: of ``QUANTIZERS``, for a checkpoint that is not quantised itself.
        trust_remote_code: whether to run code that comes with the checkpoint.
        positions: of text after a Qwen video; see ``Backbone``. "auto": "trained" for checkpoints
            whose config is older than the library's rule.
        tp: split the layers over the processes torchrun started; see ``model/tensor_parallel.py``.
    """
    if device is not None and device_map is not None:
        raise OptionError("give a device or a device map, not both")
    if positions not in get_args(Places):
        known = ", ".join(get_args(Places))
        raise OptionError(f"unknown positions {positions!r}; known: {known}")
    if tp and (device_map is not None or quantize is not None):
        raise OptionError("a target split over processes takes no device map and no quantizer")
    place = pick_device(architectures.local_device(device) if tp else device)
    settings: dict[str, Any] = {"use_safetensors": True, "dtype": precision(dtype, place)}
    if quantize is not None:
        settings["quantization_config"] = _quantizer(quantize)
    if device_map is not None or quantize is not None:
        settings["device_map"] = device_map or {"": place}
    elif place.type != "cpu" and not tp:
        settings["device_map"] = {"": place}  # weights are read to where they are to be
    config = read_config(name, trust_remote_code=trust_remote_code)
    kind = architectures.model_class(config)
    families.refuse(config, architectures.text_config(config))
    if tp:
        settings |= architectures.split(name, architectures.text_config(config))
    packed = None if quantize is None else bits(quantize)
    where = None if device_map or tp else place
    footprint.check(
        name,
        config,
        settings["dtype"],
        where,
        bits=packed,
        trust_remote_code=trust_remote_code,
    )
    processor = read_processor(name, config, trust_remote_code=trust_remote_code)
    try:
        model, found = _read(
            kind,
            name,
            trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be told of all, and to refuse them by name
            **settings,
        )
        _complete(name, model, found)
        if where is not None and quantize is None:
            model = model.to(place)  # what is no weight, too
    except SaccadeError:
        raise
    except Exception as error:  # libraries raise almost anything over files that are spoilt
        if memory.ran_out(error):
            counted = footprint.footprint(config, trust_remote_code=trust_remote_code)
            reason = footprint.advice(name, config, counted, settings["dtype"], place, bits=packed)
            raise ModelError(reason) from error
        raise ModelError(_why(name, error)) from error
    places = families.positions(config) if positions == "auto" else positions
    loaded = Loaded(name, Backbone(model.eval(), fused=fused, positions=places), processor)
    kernels.release_threads()  # whoever answers may be another one
    return loaded


def _complete(name: str, model: Any, found: Mapping[str, Any]) -> None:
    """Raises ModelError unless every weight was read, whole and finite; tied ones are read once."""
    foreign = found["unexpected_keys"]
    if model.config.model_type in architectures.THINKERS:  # such a checkpoint holds a talker too
        foreign = ()
    for weights, what in (
        (found["missing_keys"], "lacks"),
        ([key for key, *_ in found["mismatched_keys"]], "has in another shape"),
        (foreign, "has beyond what its model knows"),
    ):
        if names := sorted(weights):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{name} {what}: {', '.join(names[:3])}{more}; its config.json and its weights do "
                "not belong together, or a file is missing"
            )
    for key, weight in model.named_parameters():
        is_plain = type(weight.data) is torch.Tensor  # Quantised ones cannot be compared so.
        if is_plain and weight.dtype in PLAIN and not weight.is_meta:
            if not all(bool(end.isfinite()) for end in weight.detach().aminmax()):
                raise ModelError(f"{name} holds NaN or infinity in {key}: it would answer noise")


def load_pair(
    target: str, draft: str | None, *, draft_device: str | None = None, **place: Any
) -> tuple[Loaded, Loaded | None]:
    """Both models; ``place`` as :func:`load`. Raises ModelError where they do not fit together, and
    OptionError for a ``draft_device`` without a draft.

    The target may be spread over devices, split or quantised; the draft is on one device, which is
    the target's unless ``draft_device`` names another.
    """
    if draft_device is not None:
        if draft is None and target != "shapes":
            raise OptionError(
                f"draft_device={draft_device} says where the draft is, and there is none: name one "
                "with draft= (--draft), or leave draft_device (--draft-device) out"
            )
        pick_device(draft_device)  # before the target is read
    loaded = load(target, **place)
    if draft is None and target == "shapes":
        draft = "shapes-draft"
    if draft is None:
        return loaded, None
    if place.get("tp"):  # every process has a draft of its own, where its part of the target is
        place["device"] = architectures.local_device(place.get("device"))
    if draft_device is not None:
        place["device"] = draft_device
    drafter = load(draft, **{**place, "device_map": None, "quantize": None, "tp": False})
    check_pair(loaded, drafter)
    return loaded, drafter


def read_config(name: str, *, trust_remote_code: bool = False, weights: bool = True) -> Any:
    """A checkpoint's config, no weight touched; ``weights`` says whether there must be some."""
    check_folder(name, source_of(name), weights=weights)
    try:
        config = _read(AutoConfig, name, trust_remote_code)
        architectures.register(config)
    except SaccadeError:
        raise
    except Exception as error:
        raise ModelError(_why(name, error)) from error
    _check_counts(name, config.to_dict())
    return config


def _check_counts(name: str, settings: Mapping[Any, Any]) -> None:
    """Refuses more parts than any model has, which would be built one by one, without end."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_counts(name, value)
        elif COUNTS.search(str(key)) and isinstance(value, int) and value > MOST_PARTS:
            raise ModelError(f"the config.json of {name} asks for {key}={value}: it is spoilt")


def _read(kind: Any, name: str, trust: bool, **how: Any) -> Any:
    """What a class of transformers makes of a checkpoint; from the local cache where it must."""
    source = source_of(name)
    local = cached_only(name, source)
    return kind.from_pretrained(source, trust_remote_code=trust, local_files_only=local, **how)


def read_processor(name: str, config: Any, *, trust_remote_code: bool = False) -> Any:
    """What turns text and pixels into a model's inputs: a tokenizer, for a text-only model."""
    reader = AutoTokenizer if architectures.reads_text_only(config) else AutoProcessor
    try:
        return _read(reader, name, trust_remote_code)
    except Exception as error:
        raise ModelError(_why(name, error)) from error


def pick_device(device: str | None) -> torch.device:
    """The device asked for, or a GPU where there is one, else the CPU."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "meta":
            raise ValueError("a device without numbers")
    except (RuntimeError, AssertionError, ValueError) as error:
        raise OptionError(f"device {device!r} is not available here; try --device cpu") from error
    return place


def use_threads(threads: int | None) -> None:
    """Has PyTorch use so many of the CPU. Raises OptionError for more than a machine bears."""
    check_whole("threads", threads)
    if threads is None:
        return
    most = MANY * (os.cpu_count() or 1)
    if not 1 <= threads <= most:
        what = "more than this machine bears" if threads > most else "too few"
        raise OptionError(f"--threads {threads} is {what}: 1 to {most}")
    torch.set_num_threads(threads)


def check_pair(target: Loaded, draft: Loaded) -> None:
    """Raises ModelError, naming the first difference, unless both read and write the same ids."""
    check_tokenizers(target.name, target.tokenizer, draft.name, draft.tokenizer)


def check_tokenizers(target: str, mine: Any, draft: str, theirs: Any) -> None:
    """Raises ModelError, naming the first difference, unless tokens agree one by one.

    Vocabularies may be padded differently, and one may end in special tokens the other lacks.
    """
    ours, others = _tokens(mine), _tokens(theirs)
    extra = {*mine.added_tokens_decoder, *theirs.added_tokens_decoder}
    common = min(max(ours), max(others))
    for number in sorted(ours.keys() | others.keys()):
        if number > common and number in extra:
            continue
        if ours.get(number) != others.get(number):
            raise ModelError(
                f"{draft} cannot draft for {target}: their tokenizers differ at id "
                f"{number} ({others.get(number)!r} against {ours.get(number)!r}); "
                "choose a draft of the same family"
            )


def precision(dtype: str | None, place: torch.device) -> Any:
    """The torch type of that name; by default float32 on a CPU, else "auto", the checkpoint's."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if dtype is not None:
        return DTYPES[dtype]
    return "auto" if place.type != "cpu" else torch.float32


def bits(quantizer: str) -> int:
    """Bits a weight takes with one of ``QUANTIZERS``."""
    if quantizer not in QUANTIZERS:
        raise OptionError(f"unknown quantizer {quantizer!r}; known: {', '.join(QUANTIZERS)}")
    return QUANTIZERS[quantizer][1]


def _quantizer(name: str) -> Any:
    bits(name)
    package, _, settings = QUANTIZERS[name]
    if importlib.util.find_spec(package) is None:
        raise OptionError(f"{name} needs the package {package}: pip install {package}")
    return settings()


def _tokens(tokenizer: Any) -> dict[int, str]:
    return {number: token for token, number in tokenizer.get_vocab().items()}


def _broken(folder: Path) -> str | None:
    """Which file of a checkpoint is not what it should be, where that can be told."""
    for file in sorted(folder.glob("*.json")):
        try:
            held = json.loads(file.read_bytes())
        except (ValueError, OSError, RecursionError):
            return f"its {file.name} is no JSON file that can be read"
        needed = {"added_tokens", "model"} if file.name == "tokenizer.json" else set()
        if not isinstance(held, dict) or needed - held.keys():
            lacks = f"lacks {', '.join(sorted(needed))}" if needed else "holds no settings"
            return f"its {file.name} {lacks}: copy it again"
    return None


def _why(name: str, error: Exception) -> str:
    source = source_of(name)
    if "trust_remote_code" in str(error):
        return f"{name} comes with code of its own; --trust-remote-code runs it, if you trust it"
    if isinstance(error, ImportError) or Path(source).is_dir():
        lacks = f"a file of it lacks the entry {error}" if isinstance(error, KeyError) else None
        said = _broken(Path(source)) or lacks or first_line(error)
        return f"the checkpoint in {name} cannot be loaded: {said}"
    if "safetensors" in str(error):
        return f"{name} holds no safetensors weights; only those are read"
    cached = f"the local cache ({HF_HUB_CACHE})"
    where = f"{cached} alone, since HF_HUB_OFFLINE is set" if offline() else f"the hub and {cached}"
    return f"cannot find or load model {name!r}: looked in {where}; a checkpoint folder works too"
