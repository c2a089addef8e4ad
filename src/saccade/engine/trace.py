"""Writes traces: one answer's rounds as JSON lines, for example for a bug report.

A trace does not have the laws of target and draft, which are as long as the vocabulary.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from saccade.core.home import processor
from saccade.core.result import Result


def environment() -> dict[str, Any]:
    """Returns what timings depend on: processor, GPU, threads and versions."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {
        "machine": platform.machine(),
        "processor": processor(),
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def write_trace(path: Path, result: Result) -> None:
    """Writes a trace: first a line about the whole answer, then a line per round."""
    about = {
        "method": result.method,
        "finish_reason": result.finish_reason,
        "fallback_reason": result.fallback_reason,
        "prompt_tokens": result.prompt_tokens,
        "visual_tokens": result.visual_tokens,
        "draft_visual_tokens": result.draft_visual_tokens,
        "token_ids": result.ids,
        "peak_bytes": result.peak_bytes,
        "timings": asdict(result.timings),
        "environment": environment(),
    }
    lines = [json.dumps(about), *(json.dumps(asdict(round)) for round in result.rounds)]
    path.write_text("\n".join(lines) + "\n")
