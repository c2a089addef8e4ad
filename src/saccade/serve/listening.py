"""Where a server listens, and for how long it listens to someone who does not speak."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from saccade.core.errors import OptionError

SILENCE = 20.0  # seconds in which a connection must have sent a request's whole headers


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


class Impatient(AutoHTTPProtocol):
    """Uvicorn's protocol, which has no bound on headers: a connection without a request under way
    is closed ``SILENCE`` seconds after it came or spoke for the first time since the last one."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._rest()

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._rest()
        elif self._late is None:
            self._late = self.loop.call_later(SILENCE, self.transport.close)

    def _rest(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
