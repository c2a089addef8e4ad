"""Claims about ``lab gpu``: arithmetic by hand, and that they run."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from lab.hardware import gpu
from saccade.bench.hardware.published import CONFIGS
from saccade.core.errors import OptionError
from saccade.inputs.footprint import footprint

Call = Callable[..., tuple[int, str, str]]

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.mark.slow
def test_predictions_are_bytes_over_bandwidth() -> None:
    """Claim: T(1) of the 32B is (its decoder + head + keys) / bandwidth, counted here by hand, and
    the speedup tau T(1) / (levels T_q + T(1)): in bytes, 26 rows cost what one does."""
    hidden, layers, heads, kv, mlp, vocab = 5120, 64, 40, 8, 27648, 152064
    width, tokens = hidden // heads, 12288
    layer = 2 * hidden * hidden + 2 * hidden * kv * width + (heads + 2 * kv) * width
    layer += 3 * hidden * mlp + 2 * hidden
    weights = 2 * (layers * layer + hidden * vocab)
    expected = (weights + 2 * 2 * layers * kv * width * tokens) / 4.8e12
    predictions = gpu.predict_speedups("Qwen2.5-VL-32B", "Qwen2.5-VL-7B", tokens, 4.8e12)
    small = footprint(CONFIGS["Qwen2.5-VL-7B"]())
    for each, once, step, gain in predictions:
        assert once == pytest.approx(expected, rel=1e-3)
        assert step == pytest.approx(
            small.bytes_read_per_token(2, int(tokens * each.keep), 2) / 4.8e12
        )
        assert gain == pytest.approx(each.tau * once / (5 * step + once))
    full, pruned = predictions
    assert pruned[2] < full[2] and pruned[3] > full[3]


@pytest.mark.slow
def test_a_tiny_pair_is_timed_and_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: every part of `lab gpu` runs on a CPU, and both kinds of step give the same laws.

    Fails if the captured step differs, or an imposed acceptance is not what was asked for.
    """
    from lab.commands.gpu import gpu as command

    command(
        visual_tokens=64, tiny=True, max_new_tokens=8, repeat=1, as_json=True, device="cpu",
        target="Qwen2.5-VL-32B", draft="Qwen2.5-VL-7B", machine="H200", predict=False,
        threads=None, verbose=False,
    )  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert [s["rows"] for s in report["steps"]] == [*gpu.ROWS, 1, 1]
    assert all(s["difference"] < 1e-4 and s["captured"] > 0 for s in report["steps"])
    assert {each["method"] for each in report["answers"]} == {"ar", "sd-tree", "specvlm", "hf"}
    assert report["projected"].keys() == {"sd-tree", "specvlm"}


def test_a_shape_it_cannot_make_is_refused() -> None:
    """Claim: an unknown shape or machine is one sentence, before any model is made."""
    from lab.commands.gpu import gpu as command

    with pytest.raises(OptionError, match="LLaVA-1.5-7B"):
        command(target="LLaVA-1.5-7B")
    with pytest.raises(OptionError, match="--machine"):
        command(machine="abacus", target="Qwen2.5-VL-7B", draft="Qwen2.5-VL-3B")
