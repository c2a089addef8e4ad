"""``saccade ui`` in a process that writes down every other host it tries to reach, and refuses."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")


def watch(said: Path) -> None:
    """From now on looking up or connecting to a host that is not this machine is an error."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        places = {
            "socket.getaddrinfo": lambda: arguments[0],
            "socket.connect": lambda: _host(arguments[1]),
        }
        if event in places:
            host = places[event]()
            if host and not str(host).startswith(LOOPBACK):
                with said.open("a") as file:
                    file.write(f"{event} {host}\\n")
                raise OSError(f"nothing but this machine may be asked, not {host}")

    sys.addaudithook(hook)


def _host(address: Any) -> Any:
    return address[0] if isinstance(address, tuple) else None  # a path is a local socket


if __name__ == "__main__":
    watch(Path(sys.argv.pop(1)))
    from saccade.cli import main

    main()
