"""How much memory a model needs is counted right, and said in time."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from helpers import backbone, qwen25

import saccade
from lab import checkpoints
from saccade import inputs as models
from saccade.bench.hardware.published import CONFIGS
from saccade.core.errors import ModelError
from saccade.core.sampling import Sampling
from saccade.inputs import Loaded, loading
from saccade.inputs import footprint as footprints
from saccade.inputs.footprint import footprint
from saccade.model import memory
from saccade.model.backbone import Backbone
from saccade.model.cache import Cache, HeadShape
from saccade.model.memory import GIB, SPARE_SHARE
from saccade.model.session import Session

CPU = torch.device("cpu")
FAMILIES = ("qwen2.5-vl", "qwen3-vl-moe", "llava-1.5", "llava-onevision", "qwen2.5-omni", "llama")
MIB = 2**20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Loaded]:
    by_family: dict[str, Loaded] = {}

    def load(family: str) -> Loaded:
        if family not in by_family:
            folder = tmp_path_factory.mktemp("made") / family
            by_family[family] = models.load(str(checkpoints.make(family, folder)), device="cpu")
        return by_family[family]

    return load


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets how many bytes are free."""
    return lambda there: monkeypatch.setattr(memory, "available_bytes", lambda device: int(there))


def sentence(error: BaseException) -> str:
    message = str(error)
    assert message and "\n" not in message, message
    return message


# -- counting ----------------------------------------------------------------------------------


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_counted_exactly(loaded: Callable[[str], Loaded], family: str) -> None:
    """Claim: a footprint's parameters are those of the model that is loaded, its decoder's those of
    its layers and head, of the experts the share a token passes through.
    Fails if a tower, a head or an expert is left out or counted twice."""
    model = loaded(family).backbone.model
    config = loading.read_config(loaded(family).name)
    model_size = footprint(config)
    assert model_size.parameters == sum(weight.numel() for weight in model.parameters())
    expected = model.get_output_embeddings().weight.numel()
    for name, weight in model.get_decoder().layers.named_parameters():
        chosen = 2 / 4 if ".experts." in name else 1
        expected += int(weight.numel() * chosen)
    assert model_size.weights_per_token == expected
    assert loaded(family).backbone.weight_bytes_per_step == expected * 4
    assert model_size.layers == len(model.get_decoder().layers)
    assert model_size.vocab == model.get_input_embeddings().weight.shape[0]
    if family == "qwen3-vl-moe":
        every = sum(weight.numel() for weight in model.get_decoder().layers.parameters())
        assert model_size.weights_per_token < every, "all experts were counted"


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    """Claim: a head that is the embedding is one matrix in memory, and still read at every step.
    Fails if small models, whose heads are tied, seem larger than they are."""
    config = hf.LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = hf.LlamaForCausalLM(config)
    model_size = footprint(config)
    assert model_size.parameters == sum(weight.numel() for weight in model.parameters())
    untied = footprint(hf.LlamaConfig(**{**config.to_dict(), "tie_word_embeddings": False}))
    assert untied.parameters - model_size.parameters == 320 * 32
    assert untied.weights_per_token == model_size.weights_per_token


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_says_whether_a_copy_can_be_rounded(
    loaded: Callable[[str], Loaded], family: str
) -> None:
    """Claim: by its config alone a model can be rounded if and only if the loaded model can.

    Fails if ``doctor`` suggests ``--draft-quantize`` for a decoder that runs by its own modules.
    """
    model = loaded(family)
    can_be_rounded = footprint(loading.read_config(model.name)).can_be_rounded
    assert can_be_rounded == (model.backbone.fused is not None)


@pytest.mark.representatives(2)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_token_leaves_is_what_a_cache_takes(
    loaded: Callable[[str], Loaded], family: str, dtype: torch.dtype
) -> None:
    """Claim: keys and values a token by config, by backbone, and as a session's cache has them a
    row, are the same number of bytes. Fails if heads, layers or the type are taken wrongly."""
    backbone = loaded(family).backbone
    if dtype != backbone.dtype:
        kind = type(backbone.model)
        backbone = Backbone(kind(backbone.model.config).to(dtype).eval())
    cache = Session(backbone, [Sampling()]).backbone.new_cache(100)
    assert cache.bytes % 100 == 0
    row = cache.bytes // 100
    assert row == backbone.token_bytes
    assert (
        row
        == footprint(loading.read_config(loaded(family).name)).kv_numbers_per_token * dtype.itemsize
    )


@pytest.mark.representatives(3)
@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen2.5-VL-3B", 3.75),
        ("Qwen2.5-VL-7B", 8.29),
        ("Qwen2.5-VL-32B", 33.45),
        ("Qwen2.5-VL-72B", 73.4),
        ("Qwen2-VL-2B", 2.21),
        ("Qwen3-VL-8B", 8.77),
        ("LLaVA-1.5-7B", 7.06),
    ],
)
def test_published_sizes(name: str, billions: float) -> None:
    """Claim: a published model has as many parameters as its hub page says, within 2 %.
    Fails if a config here has another shape than the checkpoint."""
    assert footprint(CONFIGS[name]()).parameters / 1e9 == pytest.approx(billions, rel=0.02)


# -- before loading ----------------------------------------------------------------------------


@pytest.fixture
def unread(loaded: Callable[[str], Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read any more."""
    loaded("llama")

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf.PreTrainedModel, "from_pretrained", never)


@pytest.mark.usefixtures("unread")
@pytest.mark.parametrize(
    ("share", "way"),
    [
        (0.75, "--dtype bfloat16"),
        (0.4, "--quantize bnb-8bit"),
        (0.2, "--quantize bnb-4bit"),
        (0.05, "a smaller model"),
    ],
)
def test_a_model_that_cannot_fit_is_refused_unread(
    share: float,
    way: str,
    loaded: Callable[[str], Loaded],
    room: Callable[[float], None],
) -> None:
    """Claim: with room for a share of its weights, a model is refused before one is read, naming
    the first way that would fit. Fails if it is loaded anyway, or the advice would not fit."""
    name = loaded("llama").name
    room(share * footprint(loading.read_config(name)).weight_bytes(4))
    with pytest.raises(ModelError, match=f"does not fit.*{way}") as caught:
        models.load(name, dtype="float32", device="cpu")
    sentence(caught.value)


@pytest.mark.parametrize("options", [{"is_draft": True}, {"is_packed": True}])
def test_advice_for_a_model_that_cannot_fit_can_be_followed(
    options: dict[str, bool], loaded: Callable[[str], Loaded], room: Callable[[float], None]
) -> None:
    """Claim: a quantizer is only named where it can be used: not for a draft, nor for a checkpoint
    that is in few bits already."""
    config = loading.read_config(loaded("llama").name)
    room(0.3 * footprint(config).weight_bytes(4))
    with pytest.raises(ModelError, match=r"--quantize bnb-8bit .* would fit"):
        footprints.refuse_if_too_large("x", config, torch.float32, CPU)
    with pytest.raises(ModelError, match="does not fit.* might fit") as caught:
        footprints.refuse_if_too_large("x", config, torch.float32, CPU, **options)
    assert "--quantize" not in sentence(caught.value)
    assert ("--device-map" in str(caught.value)) is not options.get("is_draft", False)


def test_what_fits_is_loaded(
    loaded: Callable[[str], Loaded], room: Callable[[float], None]
) -> None:
    """Claim: with just enough room nothing is said, and the advice, taken, is let through.
    Fails if more is asked for than is needed."""
    name = loaded("llama").name
    config = loading.read_config(name)
    needed = footprint(config).weight_bytes(4)
    room(needed / (1 - SPARE_SHARE) + 2)
    assert models.load(name, dtype="float32", device="cpu").backbone.key_layer_count == 2
    room(0.75 * needed)
    assert models.load(name, dtype="bfloat16", device="cpu").backbone.key_layer_count == 2
    room(0.4 * needed)
    footprints.refuse_if_too_large(name, config, torch.float32, CPU, bits=8)
    room(1)
    footprints.refuse_if_too_large(
        name, config, torch.float32, None
    )  # spread over devices: nothing is known


def test_a_checkpoint_that_is_quantised_counts_in_its_own_bits(
    room: Callable[[float], None],
) -> None:
    """Claim: a config's own quantisation sets the bits of a weight. Fails if a 4-bit checkpoint
    is refused for what it would take unpacked."""
    config = CONFIGS["Qwen2.5-VL-7B"]()
    room(5 * GIB)
    with pytest.raises(ModelError):
        footprints.refuse_if_too_large("Qwen/some", config, torch.bfloat16, CPU)
    for settings, stored in (
        ({"quant_method": "awq", "bits": 4}, 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "mxfp4"}, 4),
    ):
        config.quantization_config = settings
        assert footprints.stored_bits(config) == stored
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    footprints.refuse_if_too_large("Qwen/some", config, torch.bfloat16, CPU)


# -- while answering ---------------------------------------------------------------------------


def caches() -> int:
    gc.collect()
    return sum(type(thing) is Cache for thing in gc.get_objects())


def test_a_prompt_that_cannot_fit_is_refused(
    loaded: Callable[[str], Loaded], room: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where keys and values cannot fit, an answer is a ModelError in one sentence that says
    how long a prompt would, before a cache is made; with room again the model answers as before.
    Fails if memory runs out midway, or something is left behind."""
    target = loaded("llama")
    inputs = models.ask(target, "what is this?")
    settings = dict(method="specvlm", draft=target.backbone, max_new_tokens=8, do_sample=False)
    expected = saccade.run(target.backbone, inputs, **settings).ids
    before = caches()
    with monkeypatch.context():
        room(100 * target.backbone.token_bytes)
        with pytest.raises(ModelError, match="keys and values.*about 95 would fit") as caught:
            saccade.run(target.backbone, inputs, **settings)
        assert "--num-frames" in sentence(caught.value)
        del caught
    assert caches() == before
    room(GIB)
    assert saccade.run(target.backbone, inputs, **settings).ids == expected


def test_a_conversation_goes_on_after_a_refusal(
    loaded: Callable[[str], Loaded], room: Callable[[float], None]
) -> None:
    """Claim: after a prompt that was too long a conversation can be asked again.
    Fails if one refusal ends it."""
    target = loaded("llama")
    inputs = models.ask(target, "what is this?")
    with saccade.Conversation(target.backbone, method="ar", max_new_tokens=4) as talk:
        room(100 * target.backbone.token_bytes)
        with pytest.raises(ModelError, match="keys and values"):
            talk.run(inputs)
        room(GIB)
        assert len(talk.run(inputs).ids) == 4


def test_a_prompt_that_just_fits(room: Callable[[float], None]) -> None:
    """Claim: the border is where the sentence says it is. Fails if what "would fit" is refused."""
    each, there = 1000, 10 * MIB
    room(there)
    fits = int(there * (1 - SPARE_SHARE)) // each
    assert memory.has_room(fits, each, CPU) and not memory.has_room(fits + 1, each, CPU)
    assert f"about {fits} would fit" in str(memory.too_long_error(fits + 1, each, CPU))


def allocate() -> None:
    torch.empty(2**60)


def refuse_cuda() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def refuse_python() -> None:
    raise MemoryError


@pytest.mark.parametrize("fail", [allocate, refuse_cuda, refuse_python])
def test_errors_that_say_memory_ran_out(fail: Callable[[], None]) -> None:
    """Claim: a GPU's, the CPU allocator's and Python's own errors are recognised.
    Fails if one of them reaches a user as a traceback."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        fail()
    assert memory.is_out_of_memory(caught.value)


def test_control_other_errors_do_not() -> None:
    """Claim: any other error is not taken for one of memory. Fails if bugs are hidden as such."""
    with pytest.raises(RuntimeError) as caught:
        torch.ones(2) @ torch.ones(3)
    assert not memory.is_out_of_memory(caught.value)
    assert not memory.is_out_of_memory(ValueError("can't allocate memory"))


@pytest.fixture
def breaking(loaded: Callable[[str], Loaded]) -> Iterator[Callable[[Backbone, Any], None]]:
    """Makes the last layer of a model fail when it runs."""
    hooks: list[Any] = []

    def fail(backbone: Backbone, act: Callable[[], None]) -> None:
        hooks.append(backbone.text.layers[-1].register_forward_pre_hook(lambda *_: act()))

    yield fail
    for hook in hooks:
        hook.remove()


@pytest.mark.slow
@pytest.mark.parametrize("fail", [allocate, refuse_cuda, refuse_python])
def test_the_target_runs_out(
    fail: Callable[[], None],
    loaded: Callable[[str], Loaded],
    breaking: Callable[[Backbone, Any], None],
) -> None:
    """Claim: memory that runs out in the target's forward is a ModelError in one sentence; another
    error there stays what it is. Fails if torch's own text reaches the user."""
    target = loaded("llama")
    inputs = models.ask(target, "what is this?")
    backbone = Backbone(target.backbone.model, fused=False)
    breaking(backbone, fail)
    before = caches()
    with pytest.raises(ModelError, match="keys and values") as caught:
        saccade.run(backbone, inputs, method="ar", max_new_tokens=8)
    sentence(caught.value)
    del caught
    assert caches() == before


def test_control_another_error_of_the_target(
    loaded: Callable[[str], Loaded], breaking: Callable[[Backbone, Any], None]
) -> None:
    """Claim: an error that is not of memory comes through as it is. Fails if it is renamed."""
    target = loaded("llama")

    def broken() -> None:
        raise RuntimeError("a bug")

    backbone = Backbone(target.backbone.model, fused=False)
    breaking(backbone, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        saccade.run(backbone, models.ask(target, "what?"), method="ar", max_new_tokens=8)


@pytest.mark.parametrize("fail", [allocate, refuse_cuda, refuse_python])
def test_the_draft_runs_out(
    fail: Callable[[], None],
    loaded: Callable[[str], Loaded],
    breaking: Callable[[Backbone, Any], None],
    tmp_path: Path,
) -> None:
    """Claim: memory that runs out in the draft ends drafting with the reason, and the answer is
    plain decoding's. Fails if the draft takes the answer down."""
    target = loaded("llama")
    folder = checkpoints.make("llama", tmp_path / "draft", seed=1)
    draft = Backbone(models.load(str(folder), device="cpu").backbone.model, fused=False)
    inputs = models.ask(target, "what is this?")
    settings = dict(max_new_tokens=8, do_sample=False)
    plain = saccade.run(target.backbone, inputs, method="ar", **settings)
    breaking(draft, fail)
    result = saccade.run(target.backbone, inputs, draft=draft, method="sd", **settings)
    assert result.ids == plain.ids
    assert "drafting failed" in str(result.fallback_reason)


# -- how much there is -------------------------------------------------------------------------


def test_a_container_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: within a container what is free is its limit less what this process has; "max", no
    file, or a limit above the machine's memory change nothing, and a limit passed leaves nothing.
    Fails if a container's own limit is found out by being killed."""
    own = memory.psutil.Process().memory_info().rss
    file = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "CGROUP_LIMIT", file)
    near = dict(rel=0.1)
    free = memory.available_bytes(CPU)
    assert free == pytest.approx(memory.psutil.virtual_memory().available, **near)
    file.write_text(f"{own + 64 * MIB}\n")
    assert memory.available_bytes(CPU) == pytest.approx(64 * MIB, abs=16 * MIB)
    file.write_text(f"{own // 2}\n")
    assert memory.available_bytes(CPU) == 0
    # Other processes of the container count too, and the pages of files do not.
    file.write_text(f"{own + 64 * MIB}\n")
    file.with_name("memory.current").write_text(f"{own + 140 * MIB}\n")
    file.with_name("memory.stat").write_text(f"anon 1\nfile {120 * MIB}\nshmem {20 * MIB}\n")
    assert memory.available_bytes(CPU) == pytest.approx(24 * MIB, abs=16 * MIB)
    for unlimited in ("max\n", f"{2**62}\n"):
        file.write_text(unlimited)
        assert memory.available_bytes(CPU) == pytest.approx(free, **near)


def test_sizes_as_they_are_shown() -> None:
    """Claim: bytes are shown in GiB from a tenth on, and in MiB below. Fails if a unit is off."""
    assert memory.format_bytes(3 * GIB / 2) == "1.5 GiB"
    assert memory.format_bytes(0.1 * GIB) == "0.1 GiB"
    assert memory.format_bytes(3 * MIB) == "3.0 MiB"


def test_a_peak_is_what_was_taken_above_what_was_there():
    """Claim: memory given back again still counts, and what was there before does not (Linux).

    Fails if the high-water mark of an earlier, larger moment is reported.
    """
    earlier = torch.ones(256 * MIB // 4)
    del earlier
    peak = memory.PeakMemory([CPU])
    if peak.bytes() is None:
        pytest.skip("nothing measures it here")
    torch.ones(96 * MIB // 4)  # above 32 MiB glibc asks the system anew, whatever was freed before
    taken = peak.bytes()
    assert taken is not None and 80 * MIB < taken < 120 * MIB


def test_a_peak_is_unknown_where_nothing_measures_it(monkeypatch, tmp_path):
    """Claim: without Linux's files the peak is None, not zero."""
    monkeypatch.setattr(memory, "CLEAR_REFS", tmp_path / "missing" / "file")
    assert memory.PeakMemory([CPU]).bytes() is None


@pytest.mark.slow
def test_reading_a_long_clip_takes_its_keys_and_one_chunk():
    """Claim: `lab prefill` reads about the tokens asked for, and its peak holds no mask.

    The mask over all keys alone would be 2,048 rows x 5,000 keys x 4 bytes = 40 MB; what a chunk
    of rows needs is about its own width of numbers. Keys and values count too.
    """
    from lab.hardware.prefill import measure_reading

    target = models.load("shapes", device="cpu")
    measurement = measure_reading(target, 5_000, rows=4, record=True)
    assert abs(measurement.visual_tokens - 5_000) < 256
    assert measurement.kv >= measurement.prompt_tokens * target.backbone.token_bytes
    assert measurement.prefill_peak is None or measurement.prefill_peak < measurement.kv + 64 * MIB


def test_the_bytes_of_a_token_follow_the_shapes_of_each_layer() -> None:
    """Claim: where layers have other heads than the config says, as with latent attention, a token
    is counted by what the cache takes for it. Fails if the config's heads are multiplied."""
    model = copy(backbone(qwen25()))
    model.head_shapes = [HeadShape(2, 192, 128), HeadShape(1, 64, 32)]
    model.key_layer_count, model.windows = 2, []
    size = model.dtype.itemsize
    assert model.token_bytes == (2 * (192 + 128) + 64 + 32) * size == model.unbounded_token_bytes
    cache = model.new_cache(8)
    assert cache.bytes == 8 * model.token_bytes
