"""The command line on the embedded pair: its JSON contract, one sentence for every bad input."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import av
import numpy as np
import pytest

from saccade.bench.hardware.disturbance import DisturbanceWatch
from saccade.inputs.checkpoints import EMBEDDED
from saccade.inputs.training_domain import read_training_domain

Call = Callable[..., tuple[int, str, str]]

METHOD_FIELDS = {
    "token_ids",
    "tokens",
    "identical_to_ar",
    "tau",
    "acceptance_rate",
    "rounds",
    "decode_seconds",
    "prefill_seconds",
    "total_seconds",
    "tokens_per_second",
    "speedup_decode",
    "speedup_end_to_end",
    "finish_reason",
    "fallback_reason",
}
TOP_FIELDS = {
    "video",
    "visual_tokens",
    "max_new_tokens",
    "device",
    "dtype",
    "threads",
    "methods",
}


def test_make_writes_a_clip_and_its_truth(call: Call, tmp_path: Path) -> None:
    """`shapes make` leaves an MP4 with the frames asked for, and JSON naming every object in it;
    the file's name is printed as it is."""
    path = tmp_path / "made[v2].mp4"
    code, printed, _ = call(
        "shapes", "make", "--seed", 3, "--frames", 10, "--size", 112, "--out", path
    )
    truth = json.loads(path.with_suffix(".json").read_text())
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
    assert code == 0 and "made[v2].mp4" in printed
    assert len(frames) == 10 and (frames[0].height, frames[0].width) == (112, 112)
    assert truth["seed"] == 3 and truth["prompt"] and truth["objects"]
    assert all(thing["color"] in truth["answer"] for thing in truth["objects"])


def test_compare_prints_the_contract(
    call: Call, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One object with the fields promised; every method of ours says the same ids as `ar`. What
    the watch says of the times of plain decoding stands in it."""
    monkeypatch.setattr(
        DisturbanceWatch, "warning", lambda watch, plain: f"{len(plain)} of plain decoding"
    )
    names = "sd,specvlm,specvlm/shape=fit,specvlm-self,hf"
    code, printed, _ = call(
        "compare", clip, "--methods", names, "--max-new-tokens", 12, "--repeat", 1, "--json"
    )
    report = json.loads(printed)
    rows = report["methods"]
    assert code == 0
    assert report.keys() >= TOP_FIELDS and report["warning"] == "1 of plain decoding"
    assert list(rows) == ["ar", *names.split(",")]
    for name, row in rows.items():
        assert row.keys() == METHOD_FIELDS, name
        assert row["identical_to_ar"] is True, name
        assert row["tokens"] == len(row["token_ids"]) == 12, name
    assert rows["ar"]["tau"] == 1.0 and rows["ar"]["acceptance_rate"] is None
    assert rows["sd"]["tau"] > 1.0 and rows["sd"]["rounds"] < 12
    assert rows["hf"]["tau"] is None and rows["hf"]["rounds"] is None
    assert all(rows[name]["fallback_reason"] is None for name in rows)


@pytest.mark.extra
def test_a_failing_peer_is_a_row(call: Call, clip: Path) -> None:
    """Hugging Face's prompt lookup proposes placeholder ids and crashes: a row with `error`.

    If a release mends it, the row must hold the same ids instead.
    """
    code, printed, _ = call(
        "compare", clip, "--methods", "hf-lookup", "--max-new-tokens", 48, "--repeat", 1, "--json"
    )
    rows = json.loads(printed)["methods"]
    assert code == 0 and rows["ar"]["tokens"] > 0
    assert "error" in rows["hf-lookup"] or rows["hf-lookup"]["identical_to_ar"]


@pytest.mark.extra
def test_describe_streams_what_it_reports(call: Call, clip: Path, tmp_path: Path) -> None:
    """The streamed text, the JSON's text and the trace's tokens are one and the same answer."""
    trace = tmp_path / "rounds.jsonl"
    words = ["describe", clip, "--max-new-tokens", 40, "--method", "sd"]
    code, streamed, _ = call(*words)
    again, printed, _ = call(*words, "--json", "--trace", trace)
    report = json.loads(printed)
    first, *rounds = map(json.loads, trace.read_text().splitlines())
    emitted = [t for r in rounds for t in (*r["accepted"], *([r["own"]] if r["kind"] else []))]
    assert code == again == 0
    assert " ".join(streamed.split()) == " ".join(report["text"].split())
    assert emitted == report["token_ids"] == first["token_ids"]
    assert report["method"] == "sd" and report["finish_reason"] in ("stop", "length")


@pytest.mark.extra
def test_sampling_by_seed(call: Call, clip: Path) -> None:
    """A seed fixes a sampled answer; of other seeds some give another (30 tokens at T = 3)."""
    words = ["describe", clip, "--max-new-tokens", 30, "--temperature", 3, "--json", "--seed"]
    texts = [json.loads(call(*words, seed)[1])["text"] for seed in (1, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_methods_and_version(call: Call) -> None:
    """`methods --json` names every system and axis; `--version` prints the package's."""
    from saccade import __version__
    from saccade.methods import AXES, METHODS

    listed = json.loads(call("methods", "--json")[1])
    assert set(listed["methods"]) == set(METHODS) and set(listed["axes"]) == set(AXES)
    assert __version__ in call("--version")[1]


def refused(outcome: tuple[int, str, str], *words: str) -> None:
    """Exit code 2, one sentence on standard error that says these words, no traceback."""
    code, printed, messages = outcome
    assert code == 2, messages
    assert printed == "" and "Traceback" not in messages
    assert len(messages.strip().splitlines()) == 1, messages
    for word in words:
        assert word in messages, messages


def test_missing_file(call: Call) -> None:
    """A path that is not there is refused by name."""
    refused(call("describe", "nowhere.mp4"), "nowhere.mp4", "does not exist")


def test_text_named_mp4(call: Call, tmp_path: Path) -> None:
    """A text file with a video's name is refused as no video."""
    path = tmp_path / "page.mp4"
    path.write_text("<html>404 not found</html>")
    refused(call("describe", path), "page.mp4", "not a video")


def test_truncated_mp4(call: Call, clip: Path, tmp_path: Path) -> None:
    """An MP4 whose index was cut off is refused as truncated."""
    path = tmp_path / "half.mp4"
    path.write_bytes(clip.read_bytes()[: clip.stat().st_size // 2])
    refused(call("describe", path), "half.mp4")


def test_audio_only(call: Call, tmp_path: Path) -> None:
    """A file with sound and no picture is refused for having no video."""
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 44100), np.float32), "fltp", "mono")
        frame.sample_rate = 44100
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    refused(call("describe", path), "sound.mp4", "video")


def test_unknown_method(call: Call, clip: Path) -> None:
    """Unknown methods, axes and choices are refused, naming those that exist."""
    refused(call("describe", clip, "--method", "magic"), "magic", "specvlm")
    refused(call("compare", clip, "--methods", "ar,magic"), "magic", "hf-lookup")
    refused(call("describe", clip, "--method", "sd/shape=blob"), "blob", "chain-N")
    refused(call("describe", clip, "--method", "sd/colour=red"), "colour", "view")
    refused(call("describe", clip, "--method", "sd/keep=0.1"), "keep", "specvlm")
    refused(call("describe", clip, "--method", "specvlm-self/positions=repacked"), "re-packed")


def test_draft_with_another_tokenizer(call: Call, clip: Path, swapped: Path) -> None:
    """A draft whose ids mean other tokens is refused with the first difference."""
    refused(call("describe", clip, "--draft", swapped), "id 300", "tokenizers differ")


def test_checkpoint_without_weights(call: Call, clip: Path, tmp_path: Path) -> None:
    """A folder without safetensors, or without a config, is refused before anything is loaded."""
    folder = tmp_path / "bare"
    shutil.copytree(EMBEDDED / "target", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    refused(call("describe", clip, "--target", folder), "safetensors")
    (folder / "config.json").unlink()
    refused(call("describe", clip, "--target", folder), "config.json")


def test_impossible_options(call: Call, clip: Path) -> None:
    """Options that contradict each other or name nothing are refused in a sentence."""
    refused(call("describe", clip, "--top-p", 0.5), "--temperature")
    refused(call("describe", clip, "--device", "abacus"), "abacus")
    refused(call("describe", clip, "--dtype", "int3"), "int3")
    refused(call("describe", clip, "--fps", 2, "--num-frames", 4), "fps")


@pytest.mark.slow
def test_exact_in_low_precision(call: Call, clip: Path) -> None:
    """`--exact` in bf16: every method of chains says the ids of `ar`, `describe` says them too."""
    words = ["--dtype", "bfloat16", "--exact", "--max-new-tokens", 8, "--json"]
    names = "sd/shape=chain-7,specvlm/shape=fit,lookup"
    code, printed, messages = call("compare", clip, "--methods", names, "--repeat", 1, *words)
    assert code == 0, messages
    rows = json.loads(printed)["methods"]
    assert all(row["identical_to_ar"] for row in rows.values())
    report = json.loads(call("describe", clip, "--method", "sd/shape=chain-3", *words)[1])
    assert report["token_ids"] == rows["ar"]["token_ids"]


@pytest.mark.extra
def test_a_question_about_a_document_alone(call: Call, tmp_path: Path) -> None:
    """Claim: beside --document a question needs no -p. Fails if it is opened as a video."""
    notes = tmp_path / "notes.txt"
    notes.write_text("A red circle moves left. " * 20)
    words = ["--document", notes, "--max-new-tokens", 4, "--json"]
    code, printed, messages = call("describe", *words, "What moves?")
    assert code == 0, messages
    report, other_report = (
        json.loads(each) for each in (printed, call("describe", *words, "-p", "What moves?")[1])
    )
    assert report["token_ids"] == other_report["token_ids"] and report["frames"] == 0
    refused(call("describe", *words, "nope.mp4"), "nope.mp4")


def test_exact_refuses_trees(call: Call, clip: Path) -> None:
    """`--exact` with a method of trees is refused in a sentence, before a video is read."""
    words = ("sd-tree", "shape=chain-N")
    refused(call("describe", clip, "--method", "sd-tree", "--exact"), *words)
    refused(call("chat", clip, "--method", "sd-tree", "--exact"), *words)
    refused(call("compare", clip, "--methods", "ar,sd-tree", "--exact"), *words)


@pytest.mark.extra
def test_the_embedded_pair_says_what_it_does_not_know(
    call: Call, clip: Path, tmp_path: Path
) -> None:
    """Claim: asked about frames that are not drawn, the embedded pair's ignorance is said in one
    line, and among the JSON's warnings; about a drawn clip, and with --quiet, it is not."""
    from PIL import Image

    domain = read_training_domain("shapes")
    assert domain is not None
    warning = domain.warning

    noise = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    picture = tmp_path / "photo.png"
    Image.fromarray(noise).save(picture)
    words = ["--max-new-tokens", 4, "--method", "ar"]
    _, printed, messages = call("describe", picture, *words, "--json")
    assert warning in messages.splitlines() and warning in json.loads(printed)["warnings"]
    assert warning not in call("describe", picture, *words, "--quiet")[2]
    assert warning not in call("describe", clip, *words)[2]
