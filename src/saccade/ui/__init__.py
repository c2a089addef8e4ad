"""The web page: plain decoding and a method side by side, and what the draft did.

``page_run`` makes a whole run, ``duel`` decodes the two answers in turns, and
``kept_visual_tokens`` measures which visual tokens the draft reads. ``pictures`` draws, and
``method_controls`` parses and edits the name of a method. Only ``page`` imports gradio.
"""
