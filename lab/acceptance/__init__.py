"""Checks in one command, ``python -m lab accept``, whether Saccade is right and fast on a GPU.

``report`` writes the results and limits the time, ``models`` makes random models on the device, and
``sections`` has the parts of the acceptance in their order.
"""
