"""Opens the socket of a server, and closes connections that send no request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from saccade.core.errors import OptionError

HEADER_TIMEOUT_SECONDS = 20.0  # Within this time a connection must send all headers of a request.


def open_listen_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens on a host and port. Raises OptionError where it cannot."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else None
        reason = (cause or "it is not an address").lower()
        message = f"cannot listen on {host} port {port}: {reason}; choose another --port or --host"
        raise OptionError(message) from None


def socket_url(listen_socket: socket.socket) -> str:
    """Returns the address of a server that listens on a socket, as browsers take it."""
    host, port = listen_socket.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HeaderTimeoutProtocol(AutoHTTPProtocol):
    """Uvicorn's protocol with a timeout for headers, which uvicorn lacks.

    The timer starts when a connection is opened, and again with the first bytes that come after a
    response. It stops once all headers have arrived. If it runs for ``HEADER_TIMEOUT_SECONDS``, the
    connection is closed.
    """

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._update_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timeout()

    def _update_timeout(self) -> None:
        """Starts the timer if no request is under way, and stops it once one is."""
        # Uvicorn makes a ``cycle`` for each request as soon as its headers are complete.
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timeout()
        elif self._timeout is None:
            self._timeout = self.loop.call_later(HEADER_TIMEOUT_SECONDS, self.transport.close)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None
