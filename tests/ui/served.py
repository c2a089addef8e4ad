"""``saccade ui`` in a process that writes down every other host it tries to reach, and refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def watch(hosts_file: Path) -> None:
    """From now on looking up or connecting to a host that is not this machine is an error."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        places = {
            "socket.getaddrinfo": lambda: arguments[0],
            "socket.connect": lambda: _host(arguments[1]),
        }
        if event in places:
            host = places[event]()
            if host and not str(host).startswith(LOOPBACK):
                with hosts_file.open("a") as file:
                    file.write(f"{event} {host}\\n")
                raise OSError(f"nothing but this machine may be asked, not {host}")

    sys.addaudithook(hook)


def _host(address: Any) -> Any:
    return address[0] if isinstance(address, tuple) else None  # a path is a local socket


def main() -> None:
    """``-c OUT ERRORS HOSTS COMMAND...``: the command, its output to an open file and a new one."""
    import os
    import warnings

    out, errors, hosts_file = sys.argv[1:4]
    os.dup2(int(out), 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    warnings.resetwarnings()
    sys.argv = ["saccade", *sys.argv[4:]]
    watch(Path(hosts_file))
    from saccade.cli import main as command

    command()
