"""Compares this library with its peers on one clip, for ``python -m lab peers``.

Every engine runs in a process with an environment of its own; ``saccade``, ``vllm``, ``openvino``
and ``flashspec`` are the modules that run there. ``turns`` asks the engines one after the other,
and ``rows`` makes the table of their results.
"""
