"""``python -m lab peers``: this library and its peers on one clip, in turns, in one table.

Every engine is a process in an environment of its own (``saccade``, ``vllm``, ``openvino`` and
``flashspec`` here are what runs in each); ``turns`` asks them one after the other, ``rows`` makes
the table of what they said.
"""
