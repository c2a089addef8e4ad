"""`saccade doctor` on real folders: before any weight is loaded, and in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from lab import checkpoints
from saccade.core.errors import OptionError
from saccade.inputs import loading

Call = Callable[..., tuple[int, str, str]]
FIELDS = {
    "parts", "free_bytes", "tokens", "ratio", "outlook", "problems", "notes", "needed", "verdict",
    "draft_process_bytes", "suggestion",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _weightless(monkeypatch: pytest.MonkeyPatch) -> None:
    """No weight may be read by any of these."""

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(hf.PreTrainedModel, "from_pretrained", never)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a smaller draft, no weights in either."""
    root = tmp_path_factory.mktemp("pair")
    sizes = {"target": checkpoints.Size(8, 256, 320), "draft": checkpoints.Size(1, 64, 320)}
    made = [checkpoints.make("qwen2.5-vl", root / name, size=size) for name, size in sizes.items()]
    for folder in made:
        (folder / "model.safetensors").unlink()
    return made[0], made[1]


def run_doctor(call: Call, *words: object) -> tuple[int, dict[str, Any]]:
    code, printed, messages = call("doctor", *words, "--device", "cpu", "--json")
    assert code in (0, 1), messages
    report = json.loads(printed)
    assert report.keys() == FIELDS and bool(report["problems"]) is (code == 1)
    return code, report


def test_the_embedded_pair(call: Call) -> None:
    """Claim: without options the pair of the package is looked at: it works, and its tokenizers
    are found to agree. Fails if it needs to be named."""
    code, report = run_doctor(call)
    assert code == 0
    assert [part["name"] for part in report["parts"]] == ["shapes", "shapes-draft"]
    assert "their tokenizers agree, token by token" in report["notes"]
    assert 0 < report["ratio"] < 1
    code, printed, _ = call("doctor", "--device", "cpu")
    assert code == 0
    assert report["verdict"] in printed and "saccade calibrate" in printed


def test_two_folders_without_weights(call: Call, folders: tuple[Path, Path]) -> None:
    """Claim: two folders with configs and tokenizers are enough; a target eight times as deep and
    four times as wide as its draft is worth it. Fails if a weight is asked for."""
    code, report = run_doctor(call, "--target", folders[0], "--draft", folders[1])
    assert code == 0 and report["ratio"] < 0.1
    assert report["verdict"].startswith("worth it")
    code, report = run_doctor(call, "--target", folders[0], "--draft", folders[0], "--keep", 1)
    assert code == 0 and report["ratio"] == 1.0
    assert report["verdict"].startswith("not worth it")


def test_the_target_alone(call: Call, folders: tuple[Path, Path]) -> None:
    """Claim: a target without a draft is looked at for memory alone.
    Fails if the embedded draft is taken for its own."""
    code, report = run_doctor(call, "--target", folders[0])
    assert code == 0 and len(report["parts"]) == 1 and not report["outlook"]
    _, printed, _ = call("doctor", "--target", folders[0], "--device", "cpu")
    assert report["verdict"] in " ".join(printed.split())


def test_a_video_is_counted(call: Call, folders: tuple[Path, Path], clip: Path) -> None:
    """Claim: with a video, the tokens are those of its prompt: more frames, more tokens; without,
    those of --tokens and the answer. Fails if the video is not looked at."""
    words = ["--target", folders[0], "--draft", folders[1]]
    few, many = (
        run_doctor(call, clip, *words, "--num-frames", frames)[1]["tokens"] for frames in (4, 16)
    )
    assert many > few > 256
    assert run_doctor(call, *words, "--tokens", 1000)[1]["tokens"] == 1000 + 256
    code, _, message = call("doctor", clip, "--target", "Qwen2.5-VL-32B", "--device", "cpu")
    assert code == 2 and "--tokens" in message


def test_other_tokenizers(call: Call, swapped: Path) -> None:
    """Claim: a pair whose tokenizers differ exits with 1 and the first difference, and no gain is
    promised. Fails if it is found out only when it is run."""
    code, report = run_doctor(call, "--draft", swapped)
    assert code == 1 and not report["outlook"]
    assert "differ at id 300 (" in report["verdict"] and report["verdict"].startswith("no: ")
    code, printed, messages = call("doctor", "--draft", swapped, "--device", "cpu")
    assert code == 1 and "id 300" in printed and "Traceback" not in messages


def written(config: Any, folder: Path) -> Path:
    """A folder with a config, and the tokenizer of a llama."""
    checkpoints.make("llama", folder)
    (folder / "model.safetensors").unlink()
    config.save_pretrained(folder)
    return folder


def unknown_state() -> Any:
    return hf.JambaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, mamba_d_state=4,
        attn_layer_period=2, attn_layer_offset=1,
    )  # fmt: skip


def no_attention() -> Any:
    return hf.MambaConfig(vocab_size=320, hidden_size=32, state_size=4, num_hidden_layers=2)


def both_ways() -> Any:
    return hf.T5Config(vocab_size=320, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2)


def otherwise() -> Any:
    return hf.GPT2Config(vocab_size=320, n_embd=32, n_layer=2, n_head=2)


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (unknown_state, "recurrent layers whose state Saccade does not know"),
        (no_attention, "recurrent layers whose state Saccade does not know"),
        (both_ways, "encoder-decoder"),
        (otherwise, "no decoder of layers"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_cannot_work(
    config: Callable[[], Any], reason: str, call: Call, tmp_path: Path
) -> None:
    """Claim: a model Saccade cannot drive exits with 1 and the reason, as a target and as a draft.
    Fails if it is praised, or ends in a traceback."""
    bad = written(config(), tmp_path / "bad")
    good = checkpoints.make("llama", tmp_path / "good")
    for pair in ((bad, good), (good, bad)):
        code, report = run_doctor(call, "--target", pair[0], "--draft", pair[1])
        assert code == 1 and reason in report["verdict"], report
        assert str(bad) in report["verdict"]


def test_memory_planned_for(call: Call, folders: tuple[Path, Path]) -> None:
    """Claim: --memory is what is thought to be free: too little exits with 1, naming need and
    room; enough does not. Fails if this machine's memory decides."""
    words = ["--target", folders[0], "--draft", folders[1], "--dtype", "bfloat16"]
    code, report = run_doctor(call, *words, "--memory", 0.001)
    assert code == 1 and "need" in report["verdict"]
    assert report["free_bytes"] == int(0.001 * 2**30)
    code, report = run_doctor(call, *words, "--memory", 80)
    assert code == 0 and report["free_bytes"] == 80 * 2**30
    big = ["--target", "Qwen2.5-VL-72B", "--draft", "Qwen2.5-VL-7B", "--dtype", "bfloat16"]
    assert run_doctor(call, *big, "--memory", 100)[0] == 1
    assert run_doctor(call, *big, "--memory", 192)[0] == 0
    assert run_doctor(call, *big, "--memory", 100, "--quantize", "bnb-4bit")[0] == 0


def test_different_kinds_are_noted(call: Call, folders: tuple[Path, Path], tmp_path: Path) -> None:
    """Claim: other families, padded vocabularies and drafts that read text only are said to be so.
    Fails if a user finds out from how slow it is."""
    llava = checkpoints.make("llava-1.5", tmp_path / "llava")
    llama = checkpoints.make("llama", tmp_path / "llama", size=checkpoints.Size(1, 64, 384))
    code, report = run_doctor(call, "--target", llava, "--draft", llama)
    notes = "; ".join(report["notes"])
    assert code == 0 and "reads text only" in notes
    assert "padded to 320 and 384" in notes and "llava, llama" in notes


@pytest.mark.extra
def test_a_draft_in_fewer_bits_is_examined(call: Call, folders: tuple[Path, Path]) -> None:
    """Claim: ``--draft-quantize`` counts a rounded copy of the draft, or of the target as its own
    draft; an unknown rounding is refused."""
    both = "--target", folders[0], "--draft", folders[1]
    plain = run_doctor(call, *both)[1]
    rounded = run_doctor(call, *both, "--draft-quantize", "int8")[1]
    assert rounded["ratio"] < plain["ratio"]
    assert rounded["parts"][1]["weights"] > plain["parts"][1]["weights"]
    own = run_doctor(call, "--target", folders[0], "--draft-quantize", "int4")[1]
    assert own["parts"][1]["name"].endswith("(int4)") and own["outlook"]
    code, _, messages = call("doctor", *both, "--draft-quantize", "int3")
    assert code not in (0, 1) and "int3" in messages


def test_a_draft_device_needs_a_draft(call: Call, folders: tuple[Path, Path]) -> None:
    """Claim: what the loader refuses about a draft is refused here by the same sentence: a device
    for a draft that there is not. Control: with a draft it is taken."""
    alone = "--target", folders[0], "--device", "cpu", "--draft-device", "cpu"
    code, printed, message = call("doctor", *alone)
    assert code == 2 and not printed
    with pytest.raises(OptionError) as refusal:
        loading.load_pair(str(folders[0]), None, draft_device="cpu")
    assert " ".join(str(refusal.value).split()) in " ".join(message.split())
    assert call("doctor", *alone, "--draft", folders[1])[0] == 0


def test_one_gpu_under_two_names_is_one(
    call: Call, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: "cuda" and "cuda:0" are one GPU, whose memory both models share. Control: "cuda:1" is
    another."""
    free_bytes: list[int | None] = []

    def stop(*parts: Any, **facts: Any) -> Any:
        free_bytes.append(facts["draft_free_bytes"])
        raise OptionError("this is enough")

    monkeypatch.setattr(loading, "pick_device", torch.device)
    monkeypatch.setattr("saccade.model.memory.available_bytes", lambda place: 1 << 30)
    monkeypatch.setattr("saccade.bench.hardware.pair_fit.examine", stop)
    target, draft = folders
    for place in ("cuda:0", "cuda:1"):
        devices = "--device", "cuda", "--draft-device", place
        assert call("doctor", "--target", target, "--draft", draft, *devices)[0] == 2
    assert free_bytes == [None, 1 << 30]


def test_a_folder_with_nothing(call: Call, tmp_path: Path) -> None:
    """Claim: a folder without a config, and an option nobody knows, are one sentence and exit
    code 2. Fails if transformers' own errors come through."""
    for words in (["--target", tmp_path], ["--dtype", "int3"], ["--quantize", "gguf"]):
        code, printed, messages = call("doctor", *words, "--device", "cpu")
        assert code == 2 and not printed, messages
        assert len(messages.strip().splitlines()) == 1 and "Traceback" not in messages
