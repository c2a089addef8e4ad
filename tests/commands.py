"""A command line called in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from saccade.cli.terminal import PIPED_WIDTH, console

Call = Callable[..., tuple[int, str, str]]


def caller(
    main: Callable[[], None],
    commands: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    """Calls ``main`` with words, its modules below ``commands``: (exit code, standard output,
    standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["saccade", *map(str, words)])
        consoles = {
            "out": console(width=PIPED_WIDTH),
            "err": console(stderr=True, width=400),
        }
        own = (f"{commands}.", "saccade.cli.")
        for name in [name for name in sys.modules if name.startswith(own)]:
            for word, made in consoles.items():
                if hasattr(sys.modules[name], word) and name != "saccade.cli.terminal":
                    monkeypatch.setattr(sys.modules[name], word, made)
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capfd.readouterr()
        code = stopped.value.code
        return (code if isinstance(code, int) else int(code is not None)), *captured

    return run
