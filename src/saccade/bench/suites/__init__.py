"""Benchmarks as suites: the public datasets of the papers, and the synthetic world's own."""
