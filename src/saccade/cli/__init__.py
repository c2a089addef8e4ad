"""The command line.

Commands parse their options, call the library and print results. Large libraries are imported only
when a command runs.
"""

from saccade.cli.application import main

__all__ = ["main"]
