"""Benchmarks: suites run by every method side by side, and the tables and figures of the papers."""
