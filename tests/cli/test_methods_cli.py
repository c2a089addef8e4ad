"""The command line over every named method, in conversations, and with a configuration file."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from saccade.methods import METHODS

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_compare_runs_every_method_and_none_falls_back(call: Call, clip: Path) -> None:
    """Claim: `--methods all` is every named method, once each, all with plain decoding's ids; one
    that needs another draft than this pair's has a row that says so.

    Fails if one is left out, falls back, or emits another token, or if one ends the others.
    """
    words = ["compare", clip, "--methods", "all", "--max-new-tokens", 24, "--threads", 1]
    code, printed, messages = call(*words, "--json")
    assert code == 0, messages
    report = json.loads(printed)
    assert list(report["methods"]) == list(METHODS) and report["repeat"] == 1
    assert "name a head with draft=" in report["methods"].pop("head")["error"]
    for name, row in report["methods"].items():
        assert row["identical_to_ar"] is True and row["fallback_reason"] is None, name
        assert row["tau"] > 1 or name in ("ar", "lookup", "hippo", "pearl", "pearl-specvlm"), name


@pytest.mark.extra
def test_chat_reads_only_what_is_new(
    call: Call,
    clip: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: a question a line; each later answer is `describe`'s kind, over reused caches.

    Fails if the second turn reads the video again.
    """
    questions = "Describe the video in detail.\nName only the colours, in order.\n\nnever read\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(questions))
    code, printed, messages = call("chat", clip, "--max-new-tokens", 60, "--threads", 1, "--json")
    assert code == 0, messages
    first, second = map(json.loads, printed.splitlines())
    assert [first["question"], second["question"]] == questions.splitlines()[:2]
    assert first["reused_tokens"] == 0
    assert second["reused_tokens"] >= first["visual_tokens"] + first["tokens"]
    assert second["timings"]["vision"] == 0 and second["text"]
    code, alone, _ = call(
        "describe", clip, "--prompt", questions.splitlines()[0],
        "--max-new-tokens", 60, "--threads", 1, "--json",
    )  # fmt: skip
    assert json.loads(alone)["token_ids"] == first["token_ids"]


@pytest.mark.extra
def test_a_configuration_file_fills_in_what_is_not_given(
    call: Call,
    clip: Path,
    tmp_path: Path,
) -> None:
    """Claim: --config brings the method; the command line wins; a bad file is one sentence."""
    config = tmp_path / "saccade.yaml"
    config.write_text("method: specvlm/lambda=0.3/keep=0.2/shape=chain-4\n")
    words = ["describe", clip, "--max-new-tokens", 12, "--threads", 1, "--json", "--config", config]
    assert json.loads(call(*words)[1])["method"] == "specvlm/lambda=0.3/keep=0.2/shape=chain-4"
    assert json.loads(call(*words, "--method", "sd")[1])["method"] == "sd"
    config.write_text("methods: sd\n")
    code, printed, messages = call(*words)
    assert code == 2 and printed == "" and "methods" in messages and "Traceback" not in messages
