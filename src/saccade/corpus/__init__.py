"""Writes captions for a corpus of videos into one file: resumable, one row a video, many workers.

``manifest`` reads the jobs. ``worker`` holds the models and answers a few jobs at a time, and
``cluster`` runs many workers. ``caption_run`` appends each row as soon as it is there, by
``json_lines``. Rows come in any order, one per id; an error with one video is that video's row.
Nothing here imports the command line, and only ``worker`` loads models, so the process that hands
out work starts fast.
"""
