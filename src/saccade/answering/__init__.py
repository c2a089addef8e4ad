"""Answers questions about files: a loaded model with its processor (``saccade.load``), a
conversation with it, and a live video.

``chat_model`` has the classes of the first two, and ``live_video`` that of the third.
"""
