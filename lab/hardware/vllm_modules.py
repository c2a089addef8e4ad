"""Imports the modules that an engine of vLLM needs, once for all engines forked from here."""

from importlib import import_module

for name in (
    "vllm.model_executor.models.llava_onevision",
    "vllm.model_executor.models.qwen2_5_vl",
    "vllm.model_executor.models.qwen3_vl",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "saccade.vllm.draft",
    "saccade.world.drawing",
):
    import_module(name)
