"""``python -m lab accept``: whether Saccade is right and quick on a GPU, in one command.

``report`` writes what is found and keeps the time, ``models`` makes random models on the device,
``sections`` are the parts of the acceptance in their order.
"""
