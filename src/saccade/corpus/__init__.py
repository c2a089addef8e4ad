"""A corpus of videos to one file of captions: resumable, one row a video, a worker a shard.

A manifest names the jobs (``manifest``), a worker holds the models and answers a few at a time
(``worker``, or many of them in ``cluster``), and ``keeping`` appends each answer the moment it is
there. Rows come in any order, one per id; what goes wrong with a video is its own row. Nothing here
knows the command line, and only ``worker`` models, so that whoever hands out work starts fast.
"""
