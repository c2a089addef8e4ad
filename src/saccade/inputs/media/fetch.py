"""Where a server may take media from: data: addresses, files of one folder, hosts it was told of.

A client's address is hostile: it may name the machine itself, its neighbours or a cloud's metadata
service, in any spelling, at once, by redirect or by a name that changes its mind. So a name is
resolved once, every address it has is judged, and the connection goes to one of those; each hop of
a redirect starts over. Bytes are counted as they come. Knows nothing of what the bytes hold.
"""

from __future__ import annotations

import binascii
import http.client
import ipaddress
import queue
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from saccade.core.errors import VideoInputCode, VideoInputError
from saccade.inputs.media.limits import Limits, left, refusal
from saccade.inputs.media.opening import allowed

MAX_FRAMES = 10_000  # of a list in a data: address
MAX_ADDRESS = 8192  # characters of an address that is fetched
MAX_TRIED = 4  # addresses of one name
REDIRECTS = (301, 302, 303, 307, 308)
PORTS = {"http": 80, "https": 443}
PIECE = 1 << 16
UNICAST = ipaddress.ip_network("2000::/3")
# Beyond what `is_global` knows: protocols' and relays' own blocks, tunnels that wrap another
# address, and a cloud's service at an address that looks like anyone's (Azure).
SPECIAL = tuple(
    ipaddress.ip_network(block)
    for block in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "168.63.129.16/32")
)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Fetched:
    """What an address stands for: bytes of a video or an image, encoded frames, or a file."""

    kind: Literal["bytes", "frames", "path"]
    data: bytes = b""
    frames: tuple[bytes, ...] = ()
    path: Path | None = None


@dataclass(frozen=True)
class Sources:
    """What may be loaded. As it is: data: addresses only.

    `root` is the folder whose files file: addresses may name. `hosts` are the hosts that may be
    asked over http and https, as "example.com", "*.example.com" (any name below it) or, for a port
    that is not the usual one, "example.com:8000"; with `any_host` every public host may. `private`
    lets those in `hosts`, and no others, be on this machine or its network. `seconds` and
    `max_bytes` bound one load, all redirects together.
    """

    root: Path | None = None
    hosts: tuple[str, ...] = ()
    any_host: bool = False
    private: bool = False
    max_bytes: int = 512 << 20
    seconds: float = 30.0
    redirects: int = 3

    def load(self, url: str) -> Fetched:
        """What the address stands for. Raises VideoInputError, in which it is not repeated."""
        url = url.strip(" \t\r\n")
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self.written(memoryview(url.encode()))
        if scheme == "file":
            return self._file(url)
        if scheme in PORTS:
            return Fetched("bytes", self._fetch(url))
        raise _refused("is of a kind that is not opened: give a data: address")

    def written(self, url: memoryview) -> Fetched:
        """:meth:`load` of the bytes of a data: address, which are read where they lie."""
        head, found, _ = bytes(url[:MAX_ADDRESS]).partition(b",")
        kind, *options = [
            part.strip() for part in head[5:].decode(errors="replace").lower().split(";")
        ]
        if not found or options[-1:] != ["base64"]:
            raise _refused("has no data: write data:video/mp4;base64, and the bytes", "bad_option")
        if kind.partition("/")[0] not in ("video", "image"):
            raise _refused("must say video or image, as data:video/mp4 does", "unsupported")
        body = url[len(head) + 1 :]
        if len(body) * 3 // 4 > self.max_bytes + 2:
            raise self._too_large()
        if kind != "video/jpeg":
            return Fetched("bytes", _decoded(body))
        commas = [match.start() for match in islice(re.finditer(b",", body), MAX_FRAMES)]
        if len(commas) == MAX_FRAMES:
            raise _refused(f"holds over {MAX_FRAMES} frames: send fewer", "too_long", MAX_FRAMES)
        pairs = zip([-1, *commas], [*commas, len(body)], strict=True)
        return Fetched("frames", frames=tuple(_decoded(body[a + 1 : b]) for a, b in pairs))

    def _file(self, url: str) -> Fetched:
        if self.root is None:
            raise _refused("names a file, which this server does not open: send its bytes")
        match = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^?#]*)", url, re.IGNORECASE)
        if match is None:
            raise _refused("is no address of a file: write file: and its whole path")
        return Fetched("path", path=allowed(unquote(match[1]), Limits(root=self.root)))

    def _fetch(self, url: str) -> bytes:
        end = time.monotonic() + self.seconds
        try:
            for _ in range(self.redirects + 1):
                place = _place(url)
                with self._answer(place, end) as answer:
                    if answer.status not in REDIRECTS:
                        return self._body(answer, end)
                    url = _next(place, url, answer.getheader("Location") or "")
        except (OSError, http.client.HTTPException, ValueError):
            # a timeout, a name that is none, a broken certificate, an answer that is not HTTP
            what = "could not be fetched: check it, or send the bytes"
            raise _refused(what, "unreachable") from None
        raise _refused("leads from one address to the next too often", "unreachable")

    @contextmanager
    def _answer(self, place: WebAddress, end: float) -> Iterator[http.client.HTTPResponse]:
        """The head of the answer to a GET, from an address that was judged."""
        addresses = self._judged(place, end)
        with _connected(place, addresses, end) as connection:
            connection.putrequest("GET", place.target, skip_accept_encoding=True)
            connection.putheader("Accept-Encoding", "identity")
            connection.putheader("User-Agent", "saccade")
            connection.putheader("Connection", "close")
            connection.endheaders()
            with connection.getresponse() as answer:
                yield answer

    def _judged(self, place: WebAddress, end: float) -> list[IPAddress]:
        """Every address of a host that may be asked, found once."""
        listed = any(_names(entry, place) for entry in self.hosts)
        if not listed and not (self.any_host and place.port == PORTS[place.scheme]):
            raise _refused("is at a host that this server does not ask: send the bytes")
        found = _resolved(place.host, place.port, left(end))
        if not found:
            raise OSError("no address")
        if not (listed and self.private) and not all(map(public, found)):
            raise _refused("is at a host that this server does not ask: send the bytes")
        return found[:MAX_TRIED]

    def _body(self, answer: http.client.HTTPResponse, end: float) -> bytes:
        if answer.status != 200:
            what = f"was answered with status {answer.status}: check it, or send the bytes"
            raise _refused(what, "unreachable")
        if (answer.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise _refused("was answered in a compressed form, which is not read", "unsupported")
        if (answer.length or 0) > self.max_bytes:
            raise self._too_large()
        body, announced = bytearray(), answer.length
        while piece := answer.read(PIECE):
            body += piece
            if len(body) > self.max_bytes:
                raise self._too_large()
        if left(end) <= 0 or (announced is not None and len(body) < announced):
            raise OSError("cut short")
        return bytes(body)

    def _too_large(self) -> VideoInputError:
        what = f"holds more than {self.max_bytes} bytes: cut it or compress it"
        return _refused(what, "too_large", self.max_bytes)


@dataclass(frozen=True)
class WebAddress:
    """A web address taken apart: what to connect to, and what to ask for there."""

    scheme: str
    host: str
    port: int
    target: str


def public(address: IPAddress) -> bool:
    """Whether an address is anyone's: not this machine's, its network's or a cloud's service.

    Of IPv6 only what is handed out for single hosts, without the blocks that wrap an IPv4 address.
    """
    if address.version == 6 and address not in UNICAST:
        return False
    special = address.is_multicast or any(address in block for block in SPECIAL)
    return address.is_global and not special


def _refused(
    what: str, code: VideoInputCode = "not_allowed", limit: int | None = None
) -> VideoInputError:
    return refusal("the address", what, code, limit)


def _decoded(text: memoryview) -> bytes:
    try:
        data = _base64(text)
    except ValueError:
        raise _refused("holds broken base64: encode the bytes again", "bad_option") from None
    if not data:
        raise _refused("holds no bytes: give a video or an image", "empty")
    return data


def _base64(text: memoryview) -> bytes:
    """The bytes. Encoders may break lines and leave the padding out. Raises ValueError."""
    with suppress(ValueError):
        return binascii.a2b_base64(text, strict_mode=True)
    in_one_line = bytes(text).translate(None, delete=b" \t\r\n")
    missing = b"" if b"=" in in_one_line[-2:] else b"=" * (-len(in_one_line) % 4)
    return binascii.a2b_base64(in_one_line + missing, strict_mode=True)


def _place(url: str) -> WebAddress:
    """A web address in the one spelling that has one meaning; everything else is refused."""
    if len(url) > MAX_ADDRESS or not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        raise _refused("holds characters that must be escaped: write it in plain ASCII")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _refused("cannot be taken apart: check it") from None
    scheme, host = parts.scheme, _host(parts)
    if scheme not in PORTS:
        raise _refused("leads to an address that is not opened: give a data: address")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebAddress(scheme, host, PORTS[scheme] if port is None else port, target)


def _host(parts: SplitResult) -> str:
    if "@" in parts.netloc or "%" in parts.netloc:
        raise _refused("names a user or hides its host: leave that out")
    host = (parts.hostname or "").lower()
    with suppress(ValueError):
        if parts.netloc.startswith("["):
            return str(ipaddress.IPv6Address(host))
        host = host.removesuffix(".")
        labels = host.split(".")
        if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):  # a number: in the usual four parts only
            return str(ipaddress.IPv4Address(host))
        if all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?", label) for label in labels):
            return host
    raise _refused("names no host that can be read: check it")


def _next(place: WebAddress, url: str, location: str) -> str:
    """Where a redirect leads; not from a protected connection to an open one."""
    url = urljoin(url, location)
    if not location or (place.scheme == "https" and not url.lower().startswith("https:")):
        raise _refused("leads to an address that is not opened: send the bytes")
    return url


def _names(entry: str, place: WebAddress) -> bool:
    """Whether an entry of the operator's list stands for a place."""
    host, _, port = entry.lower().rpartition(":")
    if not port.isdecimal() or (host.count(":") and not host.endswith("]")):
        host, port = entry.lower(), ""
    host = host.removeprefix("[").removesuffix("]")
    if place.port != (int(port) if port else PORTS[place.scheme]):
        return False
    return place.host == host or (host.startswith("*.") and place.host.endswith(host[1:]))


def _resolved(host: str, port: int, seconds: float) -> list[IPAddress]:
    """The addresses of a name; the system's own search for them knows no deadline."""
    found: queue.Queue[list[IPAddress]] = queue.Queue()

    def search() -> None:
        answers = []
        with suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found.put([ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in answers])

    threading.Thread(target=search, daemon=True).start()
    with suppress(queue.Empty):
        return list(dict.fromkeys(found.get(timeout=max(seconds, 0))))
    return []


@contextmanager
def _connected(
    place: WebAddress, addresses: list[IPAddress], end: float
) -> Iterator[http.client.HTTPConnection]:
    """A connection to the first of these addresses that answers, cut at the deadline.

    The address is the host's name only in what is said: the TLS greeting and the Host header.
    """
    line = None
    for address in addresses:
        with suppress(OSError):
            line = socket.create_connection((str(address), place.port), timeout=left(end))
            break
    if line is None:
        raise OSError("no connection")
    with ExitStack() as stack:
        stack.callback(line.close)
        if place.scheme == "https":
            line = ssl.create_default_context().wrap_socket(
                line, server_hostname=place.host, do_handshake_on_connect=False
            )
            stack.callback(line.close)
        # A timeout of the socket starts over with every byte; this one does not.
        watch = threading.Timer(left(end), _cut, [line])
        watch.daemon = True
        watch.start()
        stack.callback(watch.cancel)
        if isinstance(line, ssl.SSLSocket):
            line.do_handshake()
        connection = http.client.HTTPConnection(place.host, place.port)
        connection.default_port = PORTS[place.scheme]
        connection.sock = line
        stack.callback(connection.close)
        yield connection


def _cut(line: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(line, socket.SHUT_RDWR)  # under TLS too, and nothing else touched
