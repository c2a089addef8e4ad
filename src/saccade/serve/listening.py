"""Where a server listens."""

from __future__ import annotations

import socket

from saccade.core.errors import OptionError


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens there. Raises OptionError."""
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(place[:2], family=family, backlog=2048)
    except OSError as error:
        why = error.strerror or "it is no address"
        said = (
            f"cannot listen on {host} port {port}: {why.lower()}; choose another --port or --host"
        )
        raise OptionError(said) from None
