"""Numbers printed in the papers, as data. A setting is a column of theirs."""

from __future__ import annotations

SPECVLM_SELF: dict[str, tuple[tuple[float, float], ...]] = {
    "Table 1": ((4.50, 0.85), (4.52, 0.86), (4.54, 0.87), (4.50, 0.89)),
    "Table 2": ((4.38, 0.83), (4.31, 0.82), (4.17, 0.81)),
}
"""SpecVLM, self-SD with the whole video in its tree of five levels: (tau, speedup), a setting each.

The draft is the target itself, so a round is five of its steps and one verification.
"""
SPECVLM_LEVELS = 5

SPECVLM_ONEVISION: dict[str, dict[str, tuple[float, float]]] = {
    "SD-tree": {"VDC": (3.68, 2.08), "MVBench": (3.63, 2.02), "MLVU": (3.30, 1.90)},
    "SpecVLM": {"VDC": (3.48, 2.68), "MVBench": (3.40, 2.35), "MLVU": (2.97, 2.00)},
}
"""SpecVLM, Table 1, Std.-SD 72B-7B: (tau, speedup)."""

HIPPO_ONEVISION: dict[str, dict[str, tuple[float, float]]] = {
    "SD-tree": {"VDC": (3.68, 2.08), "MVBench": (3.63, 2.02), "MLVU": (3.30, 1.90)},
    "SpecVLM": {"VDC": (3.48, 2.68), "MVBench": (3.40, 2.35), "MLVU": (2.96, 2.00)},
}
"""HIPPO, Table 1, LLaVA-OneVision 7&72B: (MAT, speedup) of its baselines."""

HIPPO_OWN: dict[str, tuple[float, ...]] = {"LLaVA-OneVision": (8.93, 8.05, 7.93, 8.97, 7.96, 8.39)}
"""HIPPO, Table 1: its own MAT; gamma is 7 for this family (Sec. 6.1)."""
HIPPO_GAMMA = 7

HIPPO_SECONDS = {"vanilla": (33.71, 131.13, 164.84), "hippo": (33.71, 25.11, 58.82)}
"""HIPPO, Table 2: target prefill, target decoding, total."""
HIPPO_SALMONN = (2.31, 2.89)
"""HIPPO, Table 1: least and largest speedup of that pair over the six benchmarks."""

SPECVLM_32B = {"SD-Tree": (3.27, 1.40), "SpecVLM": (3.23, 2.05)}
"""SpecVLM, Table 2, Std.-SD 32B-7B on VideoDetailCaption: (tau, speedup)."""

TABED_BLOCK = {"first turn": 2.31, "second turn": 2.27}
"""TABED, Table 1, LLaVA-1.5 68M: average block efficiency of MT*."""
TABED_SPEEDUP, TABED_RATIO, TABED_GAMMA = 1.74, 0.063, 5
"""TABED, Sec. 1: the expected speedup; Table 6: T_q / T_p of 68M beside 7B."""
