"""`saccade describe` on pairs whose processors differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lab import checkpoints
from saccade.inputs import questions

Call = Callable[..., tuple[int, str, str]]

PAIRS = [("qwen2.5-vl", "qwen2-vl", "clip"), ("llava-next", "llava-1.5", "picture")]


@pytest.fixture
def picture(clip: Path, tmp_path: Path) -> Path:
    from PIL import Image

    from saccade.inputs import media

    path = tmp_path / "picture.png"
    Image.fromarray(media.read(str(clip)).frames[0]).save(path)
    return path


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("target", "draft", "shows"), PAIRS)
def test_describe_gives_the_draft_inputs_of_its_own(
    target: str,
    draft: str,
    shows: str,
    call: Call,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: for two folders whose processors differ, `describe` prepares inputs with the draft's
    own, drafts to the end, and says what plain decoding says.
    Fails if the draft is handed the target's inputs, or drafting ends early."""
    folders = [tmp_path / "target", tmp_path / "draft"]
    for family, folder, seed in zip((target, draft), folders, (0, 1), strict=True):
        checkpoints.make(family, folder, seed=seed)
    prepared: list[Any] = []
    ask_draft = questions.ask_draft

    def watched(*args: Any, **kwargs: Any) -> Any:
        prepared.append(ask_draft(*args, **kwargs))
        return prepared[-1]

    monkeypatch.setattr(questions, "ask_draft", watched)
    words = ["describe", request.getfixturevalue(shows), "--prompt", "what?", "--json"]
    words += ["--max-new-tokens", 16, "--device", "cpu", "--target", folders[0]]
    code, printed, messages = call(*words, "--draft", folders[1], "--method", "sd")
    assert code == 0, messages
    report = json.loads(printed)
    assert len(prepared) == 1 and prepared[0] is not None
    assert report["fallback_reason"] is None
    plain = json.loads(call(*words, "--method", "ar")[1])
    assert report["token_ids"] == plain["token_ids"] and report["rounds"] <= plain["rounds"]
    own = call(*words, "--draft", folders[0], "--method", "sd")
    assert own[0] == 0 and prepared[-1] is None, "a draft with the same processor needs none"
