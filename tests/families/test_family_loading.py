"""Loading: types, devices, quantised weights, code of others, and what is said when it fails."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from safetensors import safe_open

import saccade
from lab import checkpoints
from lab.checkpoints import Size
from saccade import inputs as models
from saccade.core.errors import ModelError, OptionError
from saccade.inputs import Loaded, architectures, loading
from saccade.inputs import checkpoints as places
from saccade.model.backbone import Backbone

COUNT = 16
PACKAGE = {name: package for name, (package, _, _) in loading.QUANTIZERS.items()}

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("qwen2.5-vl", tmp_path_factory.mktemp("qwen") / "target")


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return checkpoints.make("llama", tmp_path / "llama")


def sentence(error: BaseException) -> str:
    """What was said; one line it must be."""
    message = str(error)
    assert message and "\n" not in message and "Traceback" not in message, message
    return message


def answer(loaded: Loaded | Backbone, inputs: Any, method: str = "ar", **more: Any) -> list[int]:
    backbone = loaded if isinstance(loaded, Backbone) else loaded.backbone
    result = saccade.run(
        backbone, inputs, method=method, max_new_tokens=COUNT, do_sample=False, **more
    )
    assert result.fallback_reason is None, result.fallback_reason
    return list(result.ids)


# -- types and devices -------------------------------------------------------------------------


def test_the_default_on_a_cpu_is_float32(qwen: Path) -> None:
    """Claim: without --dtype a CPU gets float32, even of a bfloat16 checkpoint.
    Fails if the checkpoint's own type is taken there."""
    config = json.loads((qwen / "config.json").read_text())
    (qwen / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    assert models.load(str(qwen), device="cpu").backbone.dtype == torch.float32
    assert loading.dtype_named(None, torch.device("cuda")) == "auto"


@pytest.mark.representatives(1)
@pytest.mark.parametrize("name", list(loading.DTYPES))
def test_every_dtype_by_name(qwen: Path, name: str) -> None:
    """Claim: each name of DTYPES is the type of all weights, and such a model answers with a draft
    in the same type. Fails if a type loads but cannot compute."""
    target, draft = (models.load(str(qwen), dtype=name, device="cpu") for _ in range(2))
    assert {p.dtype for p in target.backbone.model.parameters()} == {loading.DTYPES[name]}
    ids = answer(target, zoo.make_inputs(target, "image"), "sd", draft=draft.backbone)
    assert len(ids) == COUNT and zoo.varied(ids)


def test_an_unknown_dtype(qwen: Path) -> None:
    """Claim: another name is refused in a sentence that lists those there are.
    Fails if torch is asked for it."""
    with pytest.raises(OptionError, match="int3.*float32, bfloat16, float16") as caught:
        models.load(str(qwen), dtype="int3", device="cpu")
    sentence(caught.value)


def test_device_and_device_map_together(qwen: Path) -> None:
    """Claim: both at once are refused. Fails if one of them silently wins."""
    with pytest.raises(OptionError, match="device map, not both") as caught:
        models.load(str(qwen), device="cpu", device_map="auto")
    sentence(caught.value)


@pytest.mark.representatives(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_device_map_changes_no_token(qwen: Path, kind: str) -> None:
    """Claim: device_map="auto" answers what plain loading answers, with and without a draft.
    Fails if a spread model is driven otherwise."""
    plain = models.load(str(qwen), dtype="float32")
    spread = models.load(str(qwen), dtype="float32", device_map="auto")
    inputs = zoo.make_inputs(plain, kind)
    expected = answer(plain, inputs)
    assert zoo.varied(expected)
    assert answer(spread, inputs) == expected
    assert answer(spread, inputs, "specvlm", draft=plain.backbone) == expected


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fused", [None, False])
def test_a_layer_on_disk(qwen: Path, tmp_path: Path, fused: bool | None) -> None:
    """Claim: a model one layer of which is fetched from disk answers the same with specvlm as
    without, and as when it is in memory. Fails if offloaded (meta) weights are read directly."""
    inside = "model.language_model."
    places = {f"{inside}{part}": "cpu" for part in ("embed_tokens", "layers.0", "norm")}
    places |= {"model.visual": "cpu", f"{inside}rotary_emb": "cpu", "lm_head": "cpu"}
    model = hf.AutoModelForImageTextToText.from_pretrained(
        qwen,
        dtype=torch.float32,
        device_map=places | {f"{inside}layers.1": "disk"},
        offload_folder=str(tmp_path),
    )
    layer = model.get_decoder().layers[1]
    assert all(weight.device.type == "meta" for weight in layer.parameters()), "nothing is on disk"
    backbone = Backbone(model.eval(), fused=fused)
    assert {device.type for device in backbone.devices} == {"cpu"}
    plain, draft = models.load(str(qwen), device="cpu"), zoo.draft_of("qwen2.5-vl")
    inputs = zoo.make_inputs(plain, "video")
    expected = answer(plain, inputs)
    assert zoo.varied(expected)
    assert answer(backbone, inputs) == expected
    assert answer(backbone, inputs, "specvlm", draft=draft.backbone) == expected


# -- quantised ---------------------------------------------------------------------------------

QUANTISED = [
    ("bnb-8bit", "qwen2.5-vl"),
    ("bnb-8bit", "llama"),
    ("bnb-4bit", "llama"),  # its blocks of 64 numbers fit no tiny vision tower
    ("torchao-int8", "qwen2.5-vl"),
    ("torchao-int8", "llama"),
]
WIDE = Size(2, 256, 320)


@cache
def quantised(name: str, family: str, folder: Path) -> Loaded:
    path = checkpoints.make(family, folder / f"{family}-{name}", size=WIDE)
    return models.load(str(path), device="cpu", dtype="float32", quantize=name)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "family"), QUANTISED)
def test_quantised_targets(
    name: str, family: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Claim: a target in fewer bits answers as its own generate does, plainly and (where rows of a
    forward do not meet) with an unquantised draft, which is accepted now and then.
    Fails if full weights are read somewhere."""
    pytest.importorskip(PACKAGE[name])
    loaded = quantised(name, family, tmp_path_factory.getbasetemp())
    weight = loaded.backbone.text.layers[0].mlp.down_proj.weight
    assert type(weight.data) is not torch.Tensor or weight.dtype in (torch.int8, torch.uint8)
    assert loaded.backbone.fused is None
    draft = zoo.member(family, size=WIDE)
    inputs = zoo.make_inputs(loaded, zoo.kinds(family)[0])
    expected = zoo.hf_greedy(loaded, inputs, COUNT)
    assert zoo.varied(expected)
    assert answer(loaded, inputs) == expected
    for method in ("sd", "specvlm"):
        result = saccade.run(
            loaded.backbone,
            inputs,
            draft=draft.backbone,
            method=method,
            max_new_tokens=COUNT,
            do_sample=False,
        )
        assert result.fallback_reason is None, method
        assert list(result.ids) == expected, method
        assert zoo.tally(result)["accepted"], method


def test_a_quantizer_that_is_not_installed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a missing package is one sentence with the pip command, before the checkpoint is
    looked at. Fails if an ImportError of transformers comes through."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    for name, package in PACKAGE.items():
        with pytest.raises(OptionError, match=f"pip install {package}") as caught:
            models.load(str(llama), device="cpu", quantize=name)
        assert name in sentence(caught.value)


def test_an_unknown_quantizer(llama: Path) -> None:
    """Claim: another name is refused with the list of known ones. Fails if it is ignored."""
    with pytest.raises(OptionError, match="gguf.*bnb-8bit, bnb-4bit, torchao-int8") as caught:
        models.load(str(llama), device="cpu", quantize="gguf")
    sentence(caught.value)


# -- folders -----------------------------------------------------------------------------------


def test_pickled_weights_are_not_read(llama: Path) -> None:
    """Claim: a folder with pytorch_model.bin alone is refused, saying what is missing; with the
    safetensors file back it loads. Fails if a pickle, which can run anything, is opened."""
    (weights,) = llama.glob("*.safetensors")
    with safe_open(str(weights), "pt") as stored:
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    torch.save(tensors, llama / "pytorch_model.bin")
    kept = weights.read_bytes()
    weights.unlink()
    with pytest.raises(ModelError, match="safetensors") as caught:
        models.load(str(llama), device="cpu")
    assert str(llama) in sentence(caught.value)
    weights.write_bytes(kept)
    assert models.load(str(llama), device="cpu").backbone.key_layer_count == 2


CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own"
"""
MODEL = """
from transformers import LlamaForCausalLM

class OwnForCausalLM(LlamaForCausalLM):
    origin = "by its own code"
"""


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def owned(folder: Path) -> Path:
    """A checkpoint whose config is known to nobody else."""
    (folder / "own.py").write_text(CONFIG + MODEL + "    config_class = OwnConfig\n")
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(folder, model_type="own", auto_map=names, architectures=["OwnForCausalLM"])
    return folder


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where code of checkpoints is copied to, for one test."""
    before = set(sys.modules)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "m"))
    monkeypatch.setattr("sys.path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


@pytest.mark.usefixtures("modules")
def test_code_that_comes_with_a_checkpoint_is_not_run(llama: Path, tmp_path: Path) -> None:
    """Claim: without trust, a checkpoint with code of its own is refused in a sentence that names
    --trust-remote-code, and nothing of it ran. Fails if it runs, or the option is not named."""
    owned(llama)
    ran = tmp_path / "ran"
    (llama / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\n" + CONFIG + MODEL)
    with pytest.raises(ModelError, match="--trust-remote-code") as caught:
        models.load(str(llama), device="cpu")
    assert str(llama) in sentence(caught.value)
    assert not ran.exists()


@pytest.mark.usefixtures("modules")
def test_code_that_is_trusted_is_run(llama: Path) -> None:
    """Claim: with trust, the model is of the class in the folder, and answers as that class's
    generate does; without trust, transformers' own class of that name is taken.
    Fails if the option is not handed on."""
    (llama / "own.py").write_text(MODEL)
    change(llama, auto_map={"AutoModelForCausalLM": "own.OwnForCausalLM"})
    trusted = models.load(str(llama), device="cpu", trust_remote_code=True)
    assert trusted.backbone.model.origin == "by its own code"
    inputs = zoo.make_inputs(trusted, "text")
    assert answer(trusted, inputs) == zoo.hf_greedy(trusted, inputs, COUNT)
    plain = models.load(str(llama), device="cpu")
    assert not hasattr(plain.backbone.model, "origin")


@pytest.mark.usefixtures("modules")
def test_a_trusted_config_of_its_own(llama: Path) -> None:
    """Claim: with trust, a checkpoint whose config class is its own loads too.
    Fails if only classes that transformers knows are looked up."""
    loaded = models.load(str(owned(llama)), device="cpu", trust_remote_code=True)
    assert loaded.backbone.model.origin == "by its own code"


# -- elsewhere ---------------------------------------------------------------------------------


@pytest.mark.parametrize("offline", [True, False])
def test_an_unknown_hub_id(offline: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Claim: an id that cannot be had is refused saying where it was looked for: the local cache
    alone where HF_HUB_OFFLINE is set, the hub too where not. Fails if the hub is blamed wrongly."""
    monkeypatch.setenv("HF_HUB_OFFLINE", str(int(offline)))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no network in tests
    monkeypatch.setattr(places, "_reachable", lambda address: True)
    with pytest.raises(ModelError, match="nobody/nothing-here") as caught:
        models.load("nobody/nothing-here", device="cpu")
    message = sentence(caught.value)
    assert ("HF_HUB_OFFLINE" in message) is offline and ("the hub and" in message) is not offline
    assert str(loading.HF_HUB_CACHE) in message and os.path.isabs(loading.HF_HUB_CACHE)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for qwenvl.model, on the path and imported by nobody yet."""
    root = tmp_path / "site"
    (root / "qwenvl").mkdir(parents=True)
    (root / "qwenvl" / "__init__.py").touch()
    (root / "qwenvl" / "model.py").write_text(
        "calls = []\n\ndef register_transformers():\n    calls.append('registered')\n"
    )
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.delitem(sys.modules, "qwenvl", raising=False)
    monkeypatch.delitem(sys.modules, "qwenvl.model", raising=False)
    return root


@pytest.mark.parametrize("name", list(architectures.PACKAGES))
def test_a_package_of_the_authors_is_asked_first(
    name: str, llama: Path, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: for an architecture of PACKAGES its package's function is called once, before a class
    is looked up; for others it is not. Fails if a class is sought before it was made known."""
    change(llama, architectures=[name])
    look, seen = architectures.model_class, []

    def watched(config: Any) -> Any:
        seen.append(list(getattr(sys.modules.get("qwenvl.model"), "calls", [])))
        return look(config)

    monkeypatch.setattr(architectures, "model_class", watched)
    assert models.load(str(llama), device="cpu").backbone.key_layer_count == 2
    assert seen and all(calls == ["registered"] for calls in seen)
    change(llama, architectures=["LlamaForCausalLM"])
    models.load(str(llama), device="cpu")
    module = sys.modules["qwenvl.model"]
    assert isinstance(module, types.ModuleType) and module.calls == ["registered"]
    del sys.modules["qwenvl.model"], sys.modules["qwenvl"]


def test_without_that_package(llama: Path) -> None:
    """Claim: where it is not installed, the sentence names architecture and package.
    Fails if transformers' complaint about an unknown class comes instead."""
    name = next(iter(architectures.PACKAGES))
    change(llama, architectures=[name])
    with pytest.raises(ModelError, match=f"{name}.*qwenvl.model") as caught:
        models.load(str(llama), device="cpu")
    sentence(caught.value)
