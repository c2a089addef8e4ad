"""Shapes: a seeded world of short videos, and the tiny model pair that learns to describe it."""
