"""Timing, comparing and tracing. Measures; decides nothing."""
