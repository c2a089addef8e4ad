"""Measures forwards: what they cost and whether their logits depend on how rows are batched."""
