"""Trains the embedded pair and a language model that learns to see, and measures both."""
