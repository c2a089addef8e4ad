"""Claims about logits processors that a draft process cannot import: the target keeps them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import TemperatureLogitsWarper

from saccade.core.sampling import Sampling
from saccade.drafting.parallel.worker_drafter import _sendable_rule

pytestmark = pytest.mark.usefixtures("unchecked")

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, torch, saccade
sys.path[:0] = {paths!r}
from helpers import qwen25, video_input

class Even:
    def __call__(self, ids, scores):
        scores = scores.clone()
        scores[:, 1::2] = -1e9
        return scores

if __name__ == "__main__":
    asked = dict(draft=qwen25(1), max_new_tokens=12, logits_processor=[Even()])
    plain = saccade.run(qwen25(), video_input(0), method="ar", **asked)
    found = saccade.run(qwen25(), video_input(0), method="hippo", **asked)
    assert found.ids == plain.ids and not any(each % 2 for each in plain.ids)
    print(found.fallback_reason, len(found.rounds))
"""


def test_what_no_other_process_can_import_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim: of a rule's processors those of ``__main__``, which pickle well here, stay with the
    target, and others go. Fails if the draft's process is sent what it cannot read."""
    own = type("Even", (), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Even", own, raising=False)
    other = TemperatureLogitsWarper(2.0)
    assert pickle.dumps(own())
    kept = _sendable_rule(Sampling(True, (own(), other), 1, ()))
    assert kept.processors == (other,)


@pytest.mark.slow
def test_a_processor_of_the_callers_script_stays_with_the_target(tmp_path: Path) -> None:
    """Claim: so in a script, whose answer is plain decoding's, drafted to its end."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(paths=[str(Path(__file__).parents[1]), str(ROOT)]))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split()[0] == "None"
