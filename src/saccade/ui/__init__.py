"""The web page: plain decoding and a method side by side, and what the method did.

``asking`` is a whole run: ``duel`` the two answers, ``kept`` finds what the draft saw. ``pictures``
draws, ``spelling`` reads methods. Only ``page`` knows gradio.
"""
