"""Claims about a target split over two processes (gloo): the tokens are those of one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import zoo

from lab import checkpoints
from saccade import inputs
from saccade.core.errors import MethodError, ModelError, OptionError
from saccade.core.tree import Tree
from saccade.drafting import recipe
from saccade.methods import resolve
from saccade.model import tensor_parallel

pytestmark = pytest.mark.usefixtures("unchecked")

HERE = Path(__file__).parent
METHODS = ("ar", "specvlm", "std", "sage")
MORE = (*METHODS, "sd/shape=chain-4", "specvlm-self", "streaming", "layerskip", "lookup", "tabed")
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def launched(*words: object, processes: int = 2) -> subprocess.CompletedProcess[str]:
    """A command under torchrun."""
    command = [sys.executable, *LAUNCH, str(processes), *map(str, words)]
    paths = os.pathsep.join(
        [*map(str, HERE.parents[:2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)


def made(family: str, folder: Path) -> tuple[Path, Path]:
    """A target and a draft that is right more often than not."""
    target = checkpoints.make(family, str(folder / "target"), seed=0)
    draft = checkpoints.make(family, str(folder / "draft"), seed=0, noise=zoo.NOISE)
    return Path(target), Path(draft)


def split(
    family: str, methods: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What one process alone finds, and what each of two does."""
    import split as worker

    target, draft = made(family, folder)
    worker.main(str(folder / "alone"), str(target), str(draft), *methods)
    done = launched(HERE / "split.py", folder / "two", target, draft, *methods)
    assert done.returncode == 0, done.stderr[-3000:]
    read = [json.loads((folder / name).read_text()) for name in ("alone.0.json", "two.0.json")]
    return read[0], [read[1], json.loads((folder / "two.1.json").read_text())]


def check(alone: dict[str, Any], both: list[dict[str, Any]], methods: tuple[str, ...]) -> None:
    for mine in both:
        for name in (*methods, "sampled"):
            assert mine[name] == alone[name], name
            assert name == "sampled" or mine[name]["ids"] == alone["ar"]["ids"], name
        assert mine["heads"] == alone["heads"] // 2 and not mine["fused"]
        noted = torch.tensor(mine["mass"])
        assert torch.allclose(noted, torch.tensor(alone["mass"]), rtol=1e-4, atol=1e-7)
        assert mine["odd draft"]["ids"] == alone["ar"]["ids"]
    assert zoo.varied(alone["ar"]["ids"])
    assert len({alone[name]["rounds"] for name in methods}) > 1
    assert both[0]["mass"] == both[1]["mass"]  # to the bit: views may not differ


@pytest.mark.slow
def test_two_processes_say_what_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: plain, SpecVLM, Sparse-to-Dense and SAGE give one process's tokens, round for round.

    So does sampling with a seed. Each process holds half of the heads, and views see the attention
    of all of them. Fails if a head's attention or choice of keys went to another head: with the
    wrong keys rounds would be more. Where ranks draft otherwise, rank 0's draft stands; where they
    would emit otherwise, they say so.
    """
    alone, both = split("qwen2.5-vl", METHODS, tmp_path, monkeypatch)
    check(alone, both, METHODS)
    assert both[0]["odd verdict"] is None
    for mine in both:
        # a draft of its own; the target's self-draft before its first proposal, and after it
        for name in ("failed draft", "failed view", "failed commit"):
            ids, reason = mine[name]
            assert ids == alone["ar"]["ids"] and "out of order" in reason, name
    assert "rank 1 and rank 0 do not agree" in both[1]["odd verdict"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2.5-vl", "llava-onevision", "qwen2-vl"])
def test_more_families_and_methods(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: the same of every serial method that does not time its forwards, in other families."""
    check(*split(family, MORE, tmp_path, monkeypatch), MORE)


@pytest.mark.slow
def test_a_process_whose_draft_fails_alone_does_not_hang_the_others(
    tmp_path: Path,
) -> None:
    """Claim: where the others wait inside forwards that they share, a sentence ends all of them.

    A draft that fails between its forwards, or has a model of its own, is given up in all: see
    ``check``'s caller above.
    """
    target, draft = made("qwen2.5-vl", tmp_path)
    began = time.monotonic()
    done = launched(HERE / "split.py", "stuck", target, draft)
    assert done.returncode != 0 and time.monotonic() - began < 200
    assert "rank 1 waited 5 s" in done.stderr


class Counting:
    """A draft that counts how often it is asked to propose."""

    def __init__(self) -> None:
        self.proposals, self.reason = 0, None

    def propose(self, states: Any) -> dict[int, Tree]:
        self.proposals += 1
        return dict.fromkeys(states, Tree((7,), (-1,), (None,)))

    def give_up(self, reason: str, error: Exception) -> None:
        self.reason = reason


def test_what_failed_elsewhere_proposes_nothing_here(monkeypatch) -> None:
    """Claim: a draft that failed in another process, be it before the first proposal, is not asked
    for one here, where its forwards would wait for the other's. Control: without, it is asked."""
    drafts = Counting(), Counting()
    failed = {id(drafts[0]): "broken", id(drafts[1]): None}
    for draft in drafts:

        def everyones(mine: Any, elsewhere: str | None = failed[id(draft)]) -> list[Any]:
            return [mine, (elsewhere, None) if isinstance(mine, tuple) else elsewhere]

        monkeypatch.setattr(tensor_parallel, "gather_from_all", everyones)
        trees = tensor_parallel._AgreedDraft(draft).propose({0: None})
        assert len(trees[0]) == draft.proposals
    assert [draft.proposals for draft in drafts] == [0, 1]
    assert drafts[0].reason == "rank 1: broken" and drafts[1].reason is None


@pytest.mark.slow
def test_only_rank_0_speaks(tmp_path: Path) -> None:
    """Claim: the command line prints one answer, the one of one process."""
    from saccade.world import drawing, scenes

    target, draft = made("qwen2.5-vl", tmp_path)
    video = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20_000_001), video, 8, 56)
    words = ["-m", "saccade", "describe", video, "--target", target, "--draft", draft]
    words += ["--max-new-tokens", 12, "--num-frames", 4, "--json"]
    alone = [sys.executable, *map(str, words), "--method", "ar"]
    truth = json.loads(subprocess.run(alone, capture_output=True, timeout=200).stdout)
    done = launched(*words, "--tp")
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)  # fails if there are two of them
    assert answer["token_ids"] == truth["token_ids"] and answer["method"] == "specvlm"
    refused = launched(*words, "--tp", "--method", "auto")
    lines = [line for line in refused.stderr.splitlines() if line.startswith("saccade: ")]
    assert len(lines) == 1 and "--method specvlm or std" in lines[0]


def test_what_cannot_be_split_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: one process, odd heads, a family without a plan: a sentence, before any weight."""
    folder = checkpoints.make("qwen2.5-vl", str(tmp_path / "qwen"), seed=0)
    with pytest.raises(OptionError, match="torchrun --nproc-per-node 2"):
        inputs.load(str(folder), tp=True)
    with pytest.raises(OptionError, match="no device map"):
        inputs.load(str(folder), tp=True, device_map="auto")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ModelError, match="4 attention heads.* to 3 processes"):
        inputs.load(str(folder), tp=True)
    for family in ("qwen3-vl", "qwen3-vl-moe"):
        other = checkpoints.make(family, str(tmp_path / family), seed=0)
        with pytest.raises(
            ModelError, match="mixture of experts.*--device-map auto|no plan.*--device-map auto"
        ):
            inputs.load(str(other), tp=True)


@pytest.mark.parametrize(
    ("method", "why"),
    [("auto", "times its forwards"), ("specvlm/shape=fit", "times its forwards"),
     ("hippo", "schedule=serial")],
)  # fmt: skip
def test_methods_that_go_by_the_clock_are_refused(method: str, why: str) -> None:
    """Claim: what each process would decide by its own clock is refused. Control: sage is not."""
    with pytest.raises(MethodError, match=why):
        recipe.for_split_target(resolve(method))
    assert recipe.for_split_target(resolve("sage")).name == "sage"
    assert tensor_parallel.world_size() == 1
