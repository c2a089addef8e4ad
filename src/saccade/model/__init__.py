"""A model at work: backbones, caches, sessions, and how to run them quickly."""
