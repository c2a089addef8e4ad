"""Bugs in the draft inside another engine."""

from __future__ import annotations

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "only vLLM's own runner meets its draft",
        "vllm/plugin.py",
        within="_runner_classes",
        find="$pattern.fullmatch($name)",
        plant="$name == 'GPUModelRunner'",
        tests=("vllm/test_plugin.py::test_runners_of_other_packages_meet_their_drafts",),
    ),
    PlantedBug(
        "text beside a pruned video is counted from zero",
        "vllm/draft.py",
        within="Draft._read_text",
        find="$state.mrope_position_delta",
        plant="0",
        tests=(
            "vllm/test_draft.py::test_under_vllms_own_pruning_the_text_is_read_at_its_positions",
        ),
    ),
)
