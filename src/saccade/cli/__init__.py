"""The command line. Parses, calls, shows; everything heavy is imported only when a command runs."""

from saccade.cli.app import main

__all__ = ["main"]
