"""Heads: small modules that draft from the target's hidden states.

``layouts`` knows how checkpoints name their tensors, ``modules`` computes, ``head`` makes a draft
model of both, and ``session`` scores trees with it.
"""
