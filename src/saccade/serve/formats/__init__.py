"""Formats an answer is held to: JSON and regular expressions (`grammar`), tool calls (`tools`)."""
