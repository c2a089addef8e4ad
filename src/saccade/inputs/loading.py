"""Loads models by folder or hub id, for the commands, the server and ``saccade.load``.

:func:`load` loads one model with its processor, and :func:`load_pair` a target with its draft.
Options, configs, tokenizers and the memory that is needed are checked before any weight is read.
Whatever goes wrong is raised as a ModelError or an OptionError of one sentence.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import (
    AutoConfig,
    AutoProcessor,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    TorchAoConfig,
)

from saccade.core.default_device import cpu_by_default
from saccade.core.errors import ModelError, OptionError, SaccadeError, first_line
from saccade.core.free_cores import free_cores
from saccade.core.generation_settings import check_whole
from saccade.core.json_text import parse_json
from saccade.inputs import architectures, footprint, head_checkpoints, packed_checkpoints
from saccade.inputs.checkpoints import (
    EMBEDDED_DRAFT,
    EMBEDDED_TARGET,
    check_folder,
    fetch_folder,
    must_use_cache,
    offline,
    source_of,
)
from saccade.inputs.pair_check import check_tokenizers, tokenizer_of
from saccade.inputs.training_domain import TrainingDomain, read_training_domain
from saccade.model import families, kernels, memory
from saccade.model.backbone import Backbone
from saccade.model.heads import layouts
from saccade.model.kernels import few_bits
from saccade.model.kernels.few_bits import Rounding

MAX_THREADS_PER_CPU = 16
# A config that counts more layers or experts than this is refused as spoilt.
MAX_PARTS = 10_000
# The names of the fields that count them, such as num_hidden_layers.
COUNT_FIELDS = re.compile(r"layers$|depth$|num_\w*experts$")
PositionRule = Literal["auto", "library", "trained"]
# A JSON file of a checkpoint whose name ends in one of these holds an object of named settings.
# Other JSON files may hold anything.
SETTINGS_FILE_ENDINGS = ("config.json", "tokenizer.json", ".index.json")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT_DTYPES = (*DTYPES.values(), torch.float64)


def _torchao_config() -> Any:
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


# By name: the package, the bits of a weight, and the function that makes transformers' config.
QUANTIZERS: dict[str, tuple[str, int, Callable[[], Any]]] = {
    # The threshold is zero, which turns the search for outliers off. It looks at all rows of a
    # forward together, so one drafted token would change the result of another.
    "bnb-8bit": (
        "bitsandbytes",
        8,
        lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    ),
    "bnb-4bit": ("bitsandbytes", 4, lambda: BitsAndBytesConfig(load_in_4bit=True)),
    "torchao-int8": ("torchao", 8, _torchao_config),
}


# By ``draft_quantize``: the quantizer that rounds a draft's weights on a GPU as they are loaded. On
# a CPU, and for a rounding that is not in this table, a rounded copy of loaded weights is made.
DRAFT_QUANTIZERS = {"int8": "torchao-int8", "int4": "bnb-4bit"}


@dataclass(frozen=True)
class Loaded:
    """A loaded model and its processor."""

    name: str
    backbone: Backbone
    processor: Any  # Of a text-only model this is a tokenizer.
    # The narrow domain that the model was trained on. None for a general model, and also for a head
    # and a rounded copy (``round_weights``), of which the domain is not looked up.
    training_domain: TrainingDomain | None = None
    # Whether it is a head in the target's own checkpoint, which is loaded without being named.
    is_own_head: bool = False

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        return tokenizer_of(self.processor)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns ids as text, without special tokens."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


@cpu_by_default()
def load(
    name: str,
    *,
    dtype: str | None = None,
    device: str | None = None,
    device_map: str | None = None,
    quantize: str | None = None,
    trust_remote_code: bool = False,
    fused: bool | None = None,
    positions: PositionRule = "auto",
    tp: bool = False,
    is_draft: bool = False,
    rounding: Rounding | None = None,
    check_processor: Callable[[Any], None] | None = None,
) -> Loaded:
    """Loads a model by its checkpoint folder, its hub id, or an embedded model's name
    (``checkpoints.NAMES``).

    Only safetensors weights are read. Raises ModelError or OptionError, in one sentence, before
    any weight is read where that can be known.

    Args:
        dtype: of ``DTYPES``; defaults to float32 on a CPU and to the checkpoint's own elsewhere.
        device: one device for everything. Defaults to a GPU where there is one.
        device_map: "auto" spreads the layers over what devices there are (and main memory).
        quantize: of ``QUANTIZERS``, for a checkpoint that is not quantised itself.
        trust_remote_code: whether to run code that comes with the checkpoint.
        fused: False for the model's own modules. True or None for Saccade's fused decoder where it
            knows the architecture; True raises where it does not.
        positions: which position ids the text after a video gets in a Qwen model: "library" for
            those of transformers, "trained" for those that Qwen2-VL and Qwen2.5-VL were trained
            with. For these two families transformers 5.3 changed the ids that it gives. A
            checkpoint of these families that an older version saved is assumed to be trained with
            the older ids, so "auto" means "trained" for it. For every other checkpoint "auto" means
            "library".
        tp: whether to split each layer over the processes that torchrun started.
        is_draft: whether its answers are judged by another model. Packed weights are then unpacked
            on a CPU; see ``inputs/packed_checkpoints.py``.
        rounding: how the caller will round a copy of the weights afterwards. Nothing is rounded
            here, but the check of the memory counts that copy.
        check_processor: called with the processor before weights are read; it may raise.
    """
    if device is not None and device_map is not None:
        raise OptionError("give a device or a device map, not both")
    if positions not in get_args(PositionRule):
        rules = ", ".join(get_args(PositionRule))
        raise OptionError(f"unknown positions {positions!r}; known: {rules}")
    if tp and (device_map is not None or quantize is not None):
        raise OptionError("a target split over processes takes no device map and no quantizer")
    # Where the weights go, and as which numbers.
    place = pick_device(architectures.local_device(device) if tp else device)
    settings: dict[str, Any] = {"use_safetensors": True, "dtype": dtype_named(dtype, place)}
    if quantize is not None:
        settings["quantization_config"] = _quantization_config(quantize)
    if device_map is not None or quantize is not None:
        settings["device_map"] = device_map or {"": place}
    elif place.type != "cpu" and not tp:
        settings["device_map"] = {"": place}  # So that weights are read directly into their place.
    # The config alone shows whether the model can be loaded in this way.
    config = read_config(name, trust_remote_code=trust_remote_code)
    domain = read_training_domain(name)
    model_class = architectures.model_class(config)
    families.refuse_unsupported(config, architectures.text_config(config))
    packed_by = packed_checkpoints.settings_of(config).get("quant_method")
    if quantize is not None:
        _refuse_packed(name, packed_by)
    if tp:
        settings |= architectures.tensor_parallel_arguments(name, architectures.text_config(config))
    quantized_bits = None if quantize is None else quantizer_bits(quantize)
    single_device = None if device_map or tp else place
    # ``packing`` says how the weights are stored in few bits, if they are unpacked to plain ones
    # here. Memory is then counted, and the model is made, as for a checkpoint of plain weights.
    packing = packed_checkpoints.packing_to_unpack(config, single_device, is_draft=is_draft)
    stored_config = config
    if packing is not None:
        config = packed_checkpoints.plain_config(config)
    footprint.refuse_if_too_large(
        name,
        config,
        settings["dtype"],
        single_device,
        bits=quantized_bits,
        rounding=rounding,
        is_draft=is_draft,
        is_packed=packed_by is not None,
        trust_remote_code=trust_remote_code,
    )
    processor = read_processor(name, config, trust_remote_code=trust_remote_code)
    if check_processor is not None:
        check_processor(processor)
    try:
        if packing is None:
            model, loading_info = _from_pretrained(
                model_class,
                name,
                trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # They are refused by name in _check_weights.
                **settings,
            )
        else:
            model, loading_info = _read_packed(
                name, config, packing, settings, trust_remote_code=trust_remote_code
            )
        _check_weights(name, model, loading_info)
        if single_device is not None and quantize is None:
            model = model.to(place)  # This also moves buffers, which are not weights.
    except SaccadeError:
        raise
    except Exception as error:  # Libraries raise almost anything over damaged files.
        if memory.is_out_of_memory(error):
            size = footprint.footprint(config, trust_remote_code=trust_remote_code)
            message = footprint.too_large_message(
                name,
                config,
                size,
                settings["dtype"],
                place,
                bits=quantized_bits,
                rounding=rounding,
                is_draft=is_draft,
                is_packed=packed_by is not None,
            )
            raise ModelError(message) from error
        packing_note = packed_checkpoints.explain(stored_config)
        raise ModelError(_loading_message(name, error) + packing_note) from error
    rule = families.position_rule(config) if positions == "auto" else positions
    backbone = Backbone(model.eval(), fused=fused, positions=rule)
    loaded = Loaded(name, backbone, processor, domain)
    # Another thread may run the model. The worker threads that matrix products have started for
    # this thread would keep processors busy meanwhile.
    kernels.release_threads()
    return loaded


def _refuse_packed(name: str, method: str | None) -> None:
    """Raises OptionError for a checkpoint that a quantizer's ``method`` has packed already."""
    if method is not None:
        raise OptionError(
            f"{name} is in few bits already ({method}): leave quantize (--quantize) and "
            "draft_quantize (--draft-quantize) out"
        )


def _read_packed(
    name: str,
    config: Any,
    packing: packed_checkpoints.Packing,
    settings: Mapping[str, Any],
    *,
    trust_remote_code: bool,
) -> tuple[Any, Mapping[str, Any]]:
    """Returns the model of a packed checkpoint with its weights unpacked, and the loading info of
    ``from_pretrained``: which weights were missing, unexpected or of another shape.

    ``config`` is the checkpoint's own, changed to that of plain weights. The model's weights are
    the very tensors that were unpacked, so there are no two copies of them at once.
    """
    folder = fetch_folder(name, ("*.safetensors", "generation_config.json"))
    tensors = packed_checkpoints.unpack_folder(folder, packing, settings["dtype"])
    kind = architectures.concrete_class(config, trust_remote_code=trust_remote_code)
    model, loading_info = kind.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=settings["dtype"],
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model, loading_info


def _check_weights(name: str, model: Any, loading_info: Mapping[str, Any]) -> None:
    """Raises ModelError unless the checkpoint has the model's weights, in the right shapes and
    finite, and no others.

    Draft heads, and the weights for the speech of a model that also speaks, may be there too.
    """
    depth = architectures.text_config(model.config).num_hidden_layers
    # The checkpoint may hold draft heads of its own, which transformers does not load.
    unexpected = [
        key for key in loading_info["unexpected_keys"] if not layouts.is_mtp_tensor(key, depth)
    ]
    # The checkpoint of a model that also speaks (Qwen's Omni) has the weights of its speech as
    # well, of which none are loaded.
    if model.config.model_type in architectures.TEXT_PARTS:
        unexpected = []
    for weights, problem in (
        (loading_info["missing_keys"], "lacks"),
        ([key for key, *_ in loading_info["mismatched_keys"]], "has in another shape"),
        (unexpected, "has beyond what its model knows"),
    ):
        if names := sorted(weights):
            omitted_note = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(
                f"{name} {problem}: {', '.join(names[:3])}{omitted_note}; its config.json and its "
                "weights do not belong together, or a file is missing"
            )
    for key, weight in model.named_parameters():
        # Quantised weights have other tensor classes or dtypes, and are not checked.
        is_plain_tensor = type(weight.data) is torch.Tensor
        if is_plain_tensor and weight.dtype in FLOAT_DTYPES and not weight.is_meta:
            # If any number is NaN or infinite, so is the least or the greatest.
            if not all(bool(extreme.isfinite()) for extreme in weight.detach().aminmax()):
                raise ModelError(f"{name} holds NaN or infinity in {key}: it would answer noise")


def load_pair(
    target: str,
    draft: str | None,
    *,
    draft_device: str | None = None,
    draft_quantize: str | None = None,
    **options: Any,
) -> tuple[Loaded, Loaded | None]:
    """Returns a target and what drafts for it, both loaded; ``options`` are those of :func:`load`.

    ``draft`` names a model, or an EAGLE-3 or DFlash head. If it is None, the second value is the
    first of these that applies:

    - the embedded draft, for the embedded target;
    - with ``draft_quantize``, a copy of the target with rounded weights;
    - the draft head in the target's own checkpoint, if the target is neither split nor quantised;
    - None.

    ``options`` may spread the target over devices, split it or quantise it. The draft is on one
    device, the target's unless ``draft_device`` names another. ``draft_quantize`` ("int8", "int4",
    "fp8") rounds the draft's weights, which never changes an answer. Raises ModelError where the
    two models do not fit together, and OptionError for a ``draft_device`` without a draft and for a
    rounding that is not available on the device.
    """
    if draft is None and target == EMBEDDED_TARGET:
        draft = EMBEDDED_DRAFT
    rounding = None if draft_quantize is None else few_bits.rounding_named(draft_quantize)
    draft_is_head = (
        draft is not None
        and head_checkpoints.find_kind(head_checkpoints.read_settings(draft)) is not None
    )
    place = check_draft_options(
        draft, options.get("device"), draft_device, draft_quantize, is_head=draft_is_head
    )
    # Without a named draft, a rounded copy of the target drafts. It needs memory beside the target.
    own_rounding = rounding if draft is None else None
    check_processor = None
    if draft is not None and not draft_is_head:
        trusted = bool(options.get("trust_remote_code"))
        check_processor = partial(_check_draft_fits, target, draft, trusted)
    loaded = load(target, rounding=own_rounding, check_processor=check_processor, **options)
    if draft is None:
        if rounding is not None:
            return loaded, round_weights(loaded, rounding.name)
        own_head = None
        if not options.get("tp") and options.get("quantize") is None:
            own_head = head_checkpoints.load_own_head(target, loaded.backbone)
        if own_head is None:
            return loaded, None
        head = Loaded(f"{target}'s head", own_head, loaded.tokenizer, is_own_head=True)
        return loaded, head
    if draft_is_head:
        return loaded, Loaded(
            draft, head_checkpoints.load_head(draft, loaded.backbone), loaded.tokenizer
        )
    if options.get("tp"):  # Every process has a draft of its own beside its part of the target.
        options["device"] = architectures.local_device(options.get("device"))
    if draft_device is not None:
        options["device"] = draft_device
    # The draft's weights are rounded in one of two ways: for our own kernels after they are loaded,
    # or by a quantizer while they are loaded.
    is_rounded_after = rounding is not None and rounding.is_available_on(place)
    quantizer = None
    if rounding is not None and not is_rounded_after:
        quantizer = DRAFT_QUANTIZERS[rounding.name]
    draft_options = {**options, "device_map": None, "quantize": quantizer, "tp": False}
    if is_rounded_after:
        draft_options["rounding"] = rounding
    loaded_draft = load(draft, is_draft=True, **draft_options)
    if rounding is not None and is_rounded_after:
        loaded_draft = round_weights(loaded_draft, rounding.name)
    return loaded, loaded_draft


def _check_draft_fits(target: str, draft: str, trust_remote_code: bool, processor: Any) -> None:
    """Raises ModelError where a draft's tokenizer is not that of the target's processor.

    Nothing but the draft's config and tokenizer is read.
    """
    config = read_config(draft, trust_remote_code=trust_remote_code)
    draft_processor = read_processor(draft, config, trust_remote_code=trust_remote_code)
    check_tokenizers(target, tokenizer_of(processor), draft, tokenizer_of(draft_processor))


def check_draft_options(
    draft: str | None,
    device: str | None,
    draft_device: str | None,
    draft_quantize: str | None,
    *,
    is_head: bool,
) -> torch.device:
    """Returns the device of a draft: the target's ``device`` unless ``draft_device`` names another.

    Nothing is loaded for this. Raises OptionError for a ``draft_device`` without a draft, for
    either option where the draft is a head, and for a rounding that is not available on the device.
    """
    if draft_device is not None and draft is None:
        raise OptionError(
            f"draft_device={draft_device} says where the draft is, and there is none: name one "
            "with draft= (--draft), or leave draft_device (--draft-device) out"
        )
    if is_head and draft_device is not None:
        raise OptionError(
            f"{draft} is a head, which is where its target is: leave draft_device "
            "(--draft-device) out"
        )
    if is_head and draft_quantize is not None:
        raise OptionError(
            f"{draft} is a head, whose weights are not rounded: leave draft_quantize "
            "(--draft-quantize) out"
        )
    place = pick_device(device if draft_device is None else draft_device)
    check_draft_quantize(draft_quantize, place, is_own=draft is None)
    return place


def check_draft_quantize(name: str | None, place: torch.device, *, is_own: bool) -> None:
    """Raises OptionError for a ``draft_quantize`` that is unknown or not available on this device.

    ``is_own`` says whether the target drafts for itself, which needs a rounded copy of its weights.
    """
    if name is None:
        return
    rounding = few_bits.rounding_named(name)
    can_round_copy = rounding.is_available_on(place)
    can_round_while_loading = not is_own and draft_quantizer_bits(rounding, place) is not None
    if can_round_copy or can_round_while_loading:
        return
    reason = few_bits.why_unavailable(rounding, place)
    raise OptionError(f"draft_quantize={name} is not available on {place}: {reason}")


def draft_quantizer_bits(rounding: Rounding, place: torch.device) -> int | None:
    """Returns the bits of a draft's weights if one of ``DRAFT_QUANTIZERS`` rounds them as they are
    loaded.

    Returns None on a CPU, and for a rounding without such a quantizer. In both cases weights can
    only be rounded in a copy, beside the loaded ones.
    """
    if place.type == "cpu" or rounding.name not in DRAFT_QUANTIZERS:
        return None
    return quantizer_bits(DRAFT_QUANTIZERS[rounding.name])


def round_weights(loaded: Loaded, rounding: str) -> Loaded:
    """Returns a draft that multiplies with rounded copies of a model's weights. The model itself
    stays as it is."""
    backbone = loaded.backbone.rounded(few_bits.rounding_named(rounding))
    rounded = Loaded(f"{loaded.name} ({rounding})", backbone, loaded.processor)
    kernels.release_threads()
    return rounded


def read_config(name: str, *, trust_remote_code: bool = False, weights: bool = True) -> Any:
    """Reads a checkpoint's config alone; ``weights`` says whether a folder must have weights."""
    check_folder(name, source_of(name), weights=weights)
    try:
        config = _from_pretrained(AutoConfig, name, trust_remote_code)
        architectures.register(config)
    except SaccadeError:
        raise
    except Exception as error:
        raise ModelError(_loading_message(name, error)) from error
    _check_counts(name, config.to_dict())
    return config


def _check_counts(name: str, settings: Mapping[Any, Any]) -> None:
    """Raises ModelError for more layers or experts than any model has, since building so many would
    take for ever."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            _check_counts(name, value)
        elif COUNT_FIELDS.search(str(key)) and isinstance(value, int) and value > MAX_PARTS:
            raise ModelError(f"the config.json of {name} asks for {key}={value}: it is spoilt")


def _from_pretrained(loader: Any, name: str, trust_remote_code: bool, **options: Any) -> Any:
    """Calls ``from_pretrained`` of a class. It reads the local cache alone where the hub cannot be
    reached."""
    source = source_of(name)
    return loader.from_pretrained(
        source,
        trust_remote_code=trust_remote_code,
        local_files_only=must_use_cache(name, source),
        **options,
    )


def read_processor(name: str, config: Any, *, trust_remote_code: bool = False) -> Any:
    """Reads a model's processor, which is a tokenizer for a text-only model."""
    loader = AutoTokenizer if architectures.reads_text_only(config) else AutoProcessor
    try:
        return _from_pretrained(loader, name, trust_remote_code)
    except Exception as error:
        raise ModelError(_loading_message(name, error)) from error


def pick_device(device: str | None) -> torch.device:
    """Returns a device by its name; without a name, a GPU where there is one, else the CPU.

    Raises OptionError for a device that this machine does not have.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
        if place.type == "meta":
            raise ValueError("a device without numbers")
    except (RuntimeError, AssertionError, ImportError, ValueError) as error:
        raise OptionError(f"device {device!r} is not available here; try --device cpu") from error
    return place


def use_threads(threads: int | None) -> None:
    """Sets the number of PyTorch's threads, which None leaves as it is. Raises OptionError for too
    many, too few, or a number that is not whole."""
    check_whole("threads", threads)
    if threads is None:
        return
    max_threads = MAX_THREADS_PER_CPU * (os.cpu_count() or 1)
    if not 1 <= threads <= max_threads:
        problem = "more than this machine bears" if threads > max_threads else "too few"
        raise OptionError(f"--threads {threads} is {problem}: 1 to {max_threads}")
    torch.set_num_threads(threads)
    # Otherwise fewer threads would be used while other programs keep cores busy.
    free_cores.threads_are_fixed = True


def dtype_named(dtype: str | None, place: torch.device) -> Any:
    """Returns the torch dtype of this name.

    Without a name it is float32 on a CPU. On other devices it is "auto", the checkpoint's own.
    """
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"unknown dtype {dtype!r}; known: {', '.join(DTYPES)}")
    if dtype is not None:
        return DTYPES[dtype]
    return "auto" if place.type != "cpu" else torch.float32


def quantizer_bits(quantizer: str) -> int:
    """Returns the bits of a weight with one of ``QUANTIZERS``. Raises OptionError for another."""
    if quantizer not in QUANTIZERS:
        raise OptionError(f"unknown quantizer {quantizer!r}; known: {', '.join(QUANTIZERS)}")
    return QUANTIZERS[quantizer][1]


def _quantization_config(name: str) -> Any:
    quantizer_bits(name)  # Raises OptionError for an unknown name.
    package, _, make_config = QUANTIZERS[name]
    if importlib.util.find_spec(package) is None:
        raise OptionError(f"{name} needs the package {package}: pip install {package}")
    return make_config()


def _find_broken_file(folder: Path) -> str | None:
    """Returns a message about the first broken JSON file of a checkpoint; None if all are sound."""
    for file in sorted(folder.glob("*.json")):
        try:
            content = parse_json(file.read_bytes())
        except (ValueError, OSError):
            return f"its {file.name} is no JSON file that can be read"
        if not file.name.endswith(SETTINGS_FILE_ENDINGS):
            continue
        required = {"added_tokens", "model"} if file.name == "tokenizer.json" else set()
        if not isinstance(content, dict) or required - content.keys():
            problem = "holds no settings"
            if required:
                problem = f"lacks {', '.join(sorted(required))}"
            return f"its {file.name} {problem}: copy it again"
    return None


def _loading_message(name: str, error: Exception) -> str:
    """Returns the message about a checkpoint that a library could not read."""
    source = source_of(name)
    if "trust_remote_code" in str(error):
        return f"{name} comes with code of its own; --trust-remote-code runs it, if you trust it"
    # A folder has been found, and an ImportError is about a package. So neither is reported as a
    # checkpoint that cannot be found.
    if isinstance(error, ImportError) or os.path.isdir(source):
        reason = first_line(error)
        if isinstance(error, KeyError):
            reason = f"a file of it lacks the entry {error}"
        reason = _find_broken_file(Path(source)) or reason
        return f"the checkpoint in {name} cannot be loaded: {reason}"
    if "safetensors" in str(error):
        return f"{name} holds no safetensors weights; only those are read"
    cache = f"the local cache ({HF_HUB_CACHE})"
    places = f"the hub and {cache}"
    if offline():
        places = f"{cache} alone, since HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
    return f"cannot find or load model {name!r}: looked in {places}; a checkpoint folder works too"
