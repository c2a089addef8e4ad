"""Loads a server's media: data: addresses, files of one folder, and the hosts that it allows.

A client's address may be hostile. It may name this machine, its neighbours or a cloud's metadata
service, in any spelling, directly, by a redirect or by a name that resolves differently each time.
So a name is resolved once, each of its addresses is checked, and the connection goes to one of
those. Every redirect starts over. Bytes are counted as they arrive. This module does not know what
the bytes contain.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from saccade.core.errors import VideoInputCode, VideoInputError
from saccade.inputs.media.limits import Limits, refusal, seconds_left
from saccade.inputs.media.media_file import check_path

MAX_FRAMES = 10_000  # Frames in one data: address.
MAX_URL_CHARACTERS = 8192  # Of an address that is fetched, and of the head of a data: address.
# The base64 of a data: address may be this many times as long as bare base64 of the same bytes. It
# may have a line break after every 76 characters. It may also have "+", "/" and "=", about one
# character in 32, as escapes of three characters. Together these make it about 8 % longer.
MAX_BASE64_OVERHEAD = 1.1
MAX_CONNECT_ATTEMPTS = 4  # So many addresses of one name are tried.
REDIRECT_STATUSES = (301, 302, 303, 307, 308)
DEFAULT_PORTS = {"http": 80, "https": 443}
PIECE_BYTES = 1 << 16  # How much of a response is read before its size is checked again.
GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")
# `is_global` does not exclude these: blocks of protocols and relays, tunnels that wrap another
# address, and Azure's metadata service, whose address looks like a public one.
SPECIAL_NETWORKS = tuple(
    ipaddress.ip_network(block)
    for block in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "168.63.129.16/32")
)

# It is the same sentence for every reason, so that nobody learns which names are private here.
HOST_NOT_ALLOWED = (
    "is at a host that this server does not ask: send the bytes, or start the server with "
    "--media-host HOST, and with --private-media-hosts for hosts of its own network"
)

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class FetchedMedia:
    """The media at an address. ``kind`` says which of the other fields has them."""

    kind: Literal["bytes", "frames", "path"]
    data: bytes = b""  # The file of a video or an image.
    frames: tuple[bytes, ...] = ()  # The encoded image of each frame of a video.
    path: Path | None = None  # A file of the server.


@dataclass(frozen=True)
class Sources:
    """Where media may be loaded from; by default from data: addresses only.

    `root` is the folder whose files file: addresses may name. `hosts` are the hosts from which
    media may be fetched over http and https: "example.com", "*.example.com" (any name below it) or,
    for a port that is not the usual one, "example.com:8000". With `any_host` every public host is
    allowed, at the usual port. With `allows_private_hosts` the hosts in `hosts`, and no others, may
    be on this machine or its network. At most `max_redirects` redirects are followed. `seconds` and
    `max_bytes` bound one load, including all its redirects.
    """

    root: Path | None = None
    hosts: tuple[str, ...] = ()
    any_host: bool = False
    allows_private_hosts: bool = False
    max_bytes: int = 512 << 20
    seconds: float = 30.0
    max_redirects: int = 3

    def load(self, url: str) -> FetchedMedia:
        """Loads the media at an address. Raises VideoInputError, whose message does not contain the
        address."""
        url = url.strip(" \t\r\n")
        scheme = url[:16].partition(":")[0].lower()
        if scheme == "data":
            return self.decode_data_url(memoryview(url.encode(errors="replace")))
        if scheme == "file":
            return self._file(url)
        if scheme in DEFAULT_PORTS:
            return FetchedMedia("bytes", self._fetch(url))
        raise _address_refusal("begins with none of data:, file:, http: and https:")

    def decode_data_url(self, url: memoryview) -> FetchedMedia:
        """Decodes a data: address. Raises VideoInputError.

        Its text is copied only where the base64 has line breaks, escapes or no padding. The data of
        the type video/jpeg are frames: the base64 of each, joined by commas.
        """
        # The address data:video/mp4;base64,AAAA has the kind video/mp4 and the option base64.
        head, comma, _ = bytes(url[:MAX_URL_CHARACTERS]).partition(b",")
        kind_and_options = head[len("data:") :].decode(errors="replace").lower()
        kind, *options = [part.strip() for part in kind_and_options.split(";")]
        if not comma or options[-1:] != ["base64"]:
            raise _address_refusal(
                "has no data: write data:video/mp4;base64, and the bytes", "bad_option"
            )
        if kind.partition("/")[0] not in ("video", "image"):
            raise _address_refusal("must say video or image, as data:video/mp4 does", "unsupported")
        body = url[len(head) + 1 :]
        # Data that are clearly too large are refused before they are decoded. Four characters of
        # base64 are three bytes, of which up to two may be only padding. Line breaks and escapes
        # may take more characters, so the limit is a little higher here, and ``_decode_all``
        # measures the bytes themselves.
        if len(body) * 3 // 4 > MAX_BASE64_OVERHEAD * self.max_bytes + 2:
            raise self._too_large()
        if kind != "video/jpeg":
            return FetchedMedia("bytes", self._decode_all([body])[0])
        # There is one frame more than commas, so ``MAX_FRAMES`` commas are one frame too many.
        commas = [match.start() for match in islice(re.finditer(b",", body), MAX_FRAMES)]
        if len(commas) == MAX_FRAMES:
            raise _address_refusal(
                f"holds over {MAX_FRAMES} frames: send fewer", "too_long", MAX_FRAMES
            )
        starts = [0, *(comma_place + 1 for comma_place in commas)]
        ends = [*commas, len(body)]
        frames = [body[start:end] for start, end in zip(starts, ends, strict=True)]
        return FetchedMedia("frames", frames=self._decode_all(frames))

    def _decode_all(self, texts: Sequence[memoryview]) -> tuple[bytes, ...]:
        """Decodes base64. Raises VideoInputError where it is broken or empty, and where the bytes
        are together more than ``max_bytes``."""
        decoded = tuple(map(_decode_base64, texts))
        if sum(map(len, decoded)) > self.max_bytes:
            raise self._too_large()
        return decoded

    def _file(self, url: str) -> FetchedMedia:
        if self.root is None:
            raise _address_refusal(
                "names a file, which this server does not open: send its bytes, or start it "
                "with --media-root FOLDER"
            )
        match = re.fullmatch(r"file:(?://(?:localhost)?)?(/[^?#]*)", url, re.IGNORECASE)
        if match is None:
            raise _address_refusal("is no address of a file: write file: and its whole path")
        return FetchedMedia("path", path=check_path(unquote(match[1]), Limits(root=self.root)))

    def _fetch(self, url: str) -> bytes:
        deadline = time.monotonic() + self.seconds
        try:
            for _ in range(self.max_redirects + 1):
                place = _parse_url(url)
                with self._get(place, deadline) as response:
                    if response.status not in REDIRECT_STATUSES:
                        return self._read_body(response, deadline)
                    url = _redirect_url(place, url, response.getheader("Location") or "")
        except (OSError, http.client.HTTPException, ValueError):
            # These are timeouts, unknown names, broken certificates and responses that are no HTTP.
            what = "could not be fetched: check it, or send the bytes"
            raise _address_refusal(what, "unreachable") from None
        raise _address_refusal("leads from one address to the next too often", "unreachable")

    @contextmanager
    def _get(self, place: WebAddress, deadline: float) -> Iterator[http.client.HTTPResponse]:
        """Yields the response to a GET, of which only the head has been read."""
        addresses = self._allowed_addresses(place, deadline)
        with _connect(place, addresses, deadline) as connection:
            connection.putrequest("GET", place.target, skip_accept_encoding=True)
            connection.putheader("Accept-Encoding", "identity")
            connection.putheader("User-Agent", "saccade")
            connection.putheader("Connection", "close")
            connection.endheaders()
            with connection.getresponse() as response:
                yield response

    def _allowed_addresses(self, place: WebAddress, deadline: float) -> list[IPAddress]:
        """Resolves a host once and returns at most ``MAX_CONNECT_ATTEMPTS`` of its addresses.

        Raises VideoInputError if the host or one of its addresses is not allowed. Raises OSError
        for a name without an address, and for one that ``any_host`` alone allows and that has a
        private address.
        """
        is_listed = any(_matches_host(entry, place) for entry in self.hosts)
        if not is_listed and not (self.any_host and place.port == DEFAULT_PORTS[place.scheme]):
            raise _address_refusal(HOST_NOT_ALLOWED)
        addresses = _resolve(place.host, place.port, seconds_left(deadline))
        if not addresses:
            raise OSError("no address")
        may_be_private = is_listed and self.allows_private_hosts
        if not may_be_private and not all(map(is_public, addresses)):
            if not is_listed and not _is_ip_address(place.host):
                # With ``any_host`` a client may name any host. The error for a private host is the
                # same as for a name that does not exist, so that nobody learns which names there
                # are on this network.
                raise OSError("not on the public internet")
            raise _address_refusal(HOST_NOT_ALLOWED)
        return addresses[:MAX_CONNECT_ATTEMPTS]

    def _read_body(self, response: http.client.HTTPResponse, deadline: float) -> bytes:
        if response.status != 200:
            what = f"was answered with status {response.status}: check it, or send the bytes"
            raise _address_refusal(what, "unreachable")
        if (response.getheader("Content-Encoding") or "identity").lower() != "identity":
            raise _address_refusal(
                "was answered in a compressed form, which is not read", "unsupported"
            )
        # None where the header does not say. Reading lowers ``response.length``.
        announced = response.length
        if (announced or 0) > self.max_bytes:
            raise self._too_large()
        body = bytearray()
        while piece := response.read(PIECE_BYTES):
            body += piece
            if len(body) > self.max_bytes:
                raise self._too_large()
        # The timer of `_connect` may have cut the body short. Then this raises TimeoutError.
        seconds_left(deadline)
        if announced is not None and len(body) < announced:
            raise OSError("cut short")
        return bytes(body)

    def _too_large(self) -> VideoInputError:
        what = f"holds more than {self.max_bytes} bytes: cut it or compress it"
        return _address_refusal(what, "too_large", self.max_bytes)


@dataclass(frozen=True)
class WebAddress:
    """The parts of a web address: what to connect to, and the path to request there."""

    scheme: str
    host: str
    port: int
    target: str  # The path with the query, as in the first line of a request.


def is_public(address: IPAddress) -> bool:
    """Whether an address is on the public internet.

    Addresses of this machine, of its network and of a cloud's services are not, and neither are
    those in ``SPECIAL_NETWORKS``. An IPv6 address has to be a global unicast one.
    """
    if address.version == 6 and address not in GLOBAL_UNICAST:
        return False
    is_special = address.is_multicast or any(address in block for block in SPECIAL_NETWORKS)
    return address.is_global and not is_special


def _is_ip_address(host: str) -> bool:
    """Returns whether a host is written as an address rather than as a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _address_refusal(
    what: str, code: VideoInputCode = "not_allowed", limit: int | None = None
) -> VideoInputError:
    return refusal("the address", what, code, limit)


def _decode_base64(text: memoryview) -> bytes:
    """Decodes base64. Raises VideoInputError where it is broken or empty."""
    try:
        data = _lenient_base64(text)
    except ValueError:
        raise _address_refusal(
            "holds broken base64: encode the bytes again", "bad_option"
        ) from None
    if not data:
        raise _address_refusal("holds no bytes: give a video or an image", "empty")
    return data


def _lenient_base64(text: memoryview) -> bytes:
    """Decodes base64 that may have line breaks, lack its padding, or be escaped as addresses are.
    Raises ValueError."""
    with suppress(ValueError):
        return binascii.a2b_base64(text, strict_mode=True)
    in_one_line = unquote_to_bytes(bytes(text)).translate(None, delete=b" \t\r\n")
    missing = b""
    if b"=" not in in_one_line[-2:]:
        missing = b"=" * (-len(in_one_line) % 4)  # Padding makes the length a multiple of four.
    return binascii.a2b_base64(in_one_line + missing, strict_mode=True)


def _parse_url(url: str) -> WebAddress:
    """Parses a web address. Raises VideoInputError for one that is malformed, ambiguous, or neither
    http nor https."""
    if len(url) > MAX_URL_CHARACTERS:
        raise _address_refusal(
            f"has {len(url)} characters, and at most {MAX_URL_CHARACTERS} are read"
        )
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        raise _address_refusal("holds characters that must be escaped: write it in plain ASCII")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise _address_refusal("cannot be taken apart: check it") from None
    scheme = parts.scheme
    host = _host(parts)
    if scheme not in DEFAULT_PORTS:
        raise _address_refusal("leads to an address that is not opened: give a data: address")
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebAddress(scheme, host, DEFAULT_PORTS[scheme] if port is None else port, target)


def _host(parts: SplitResult) -> str:
    """Returns the host of an address in its one usual spelling, so that it can be compared with the
    allowed hosts. Raises VideoInputError for anything but a plain name or IP address."""
    if "@" in parts.netloc or "%" in parts.netloc:
        raise _address_refusal("names a user or hides its host: leave that out")
    host = (parts.hostname or "").lower()
    # ``ipaddress`` raises ValueError for a malformed address, which the last line then refuses.
    with suppress(ValueError):
        if parts.netloc.startswith("["):
            return str(ipaddress.IPv6Address(host))
        host = host.removesuffix(".")
        labels = host.split(".")
        if re.fullmatch(r"\d+|0x[0-9a-f]*", labels[-1]):
            # Of the spellings of an IPv4 address only four decimal numbers are accepted.
            return str(ipaddress.IPv4Address(host))
        if all(re.fullmatch(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?", label) for label in labels):
            return host
    raise _address_refusal("names no host that can be read: check it")


def _redirect_url(place: WebAddress, url: str, location: str) -> str:
    """Returns where a redirect from ``url`` leads. Raises VideoInputError for one from https to
    http, and for one without a Location header."""
    url = urljoin(url, location)
    if not location or (place.scheme == "https" and not url.lower().startswith("https:")):
        raise _address_refusal("leads to an address that is not opened: send the bytes")
    return url


def _matches_host(entry: str, place: WebAddress) -> bool:
    """Whether an entry of the operator's list of hosts allows an address.

    An entry is "example.com", "example.com:8000", "*.example.com", "[::1]:8000" or "::1".
    """
    host, _, port = entry.lower().rpartition(":")
    # A number after the last colon is a port, except in an IPv6 address without brackets.
    is_bare_ipv6 = ":" in host and not host.endswith("]")
    if not port.isdecimal() or is_bare_ipv6:
        host = entry.lower()
        port = ""
    host = host.removeprefix("[").removesuffix("]")
    if place.port != (int(port) if port else DEFAULT_PORTS[place.scheme]):
        return False
    # "*.example.com" matches what ends in ".example.com".
    is_below = host.startswith("*.") and place.host.endswith(host[1:])
    return place.host == host or is_below


def _resolve(host: str, port: int, seconds: float) -> list[IPAddress]:
    """Returns the addresses of a name, or none if it does not resolve within ``seconds``.

    The search has a thread of its own, because ``getaddrinfo`` has no timeout.
    """
    results: queue.Queue[list[IPAddress]] = queue.Queue()

    def search() -> None:
        answers = []
        with suppress(OSError, UnicodeError):
            answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        results.put([ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in answers])

    threading.Thread(target=search, daemon=True).start()
    with suppress(queue.Empty):
        return list(dict.fromkeys(results.get(timeout=max(seconds, 0))))
    return []


@contextmanager
def _connect(
    place: WebAddress, addresses: list[IPAddress], deadline: float
) -> Iterator[http.client.HTTPConnection]:
    """Yields a connection to the first address that answers. A timer closes it at the deadline.

    Raises OSError if none answers. The host's name is used only inside the connection: in TLS and
    in the Host header.
    """
    connected_socket = None
    for number, address in enumerate(addresses):
        # The addresses share the time that is left, so that a silent one leaves some to the next.
        seconds = seconds_left(deadline) / (len(addresses) - number)
        with suppress(OSError):
            connected_socket = socket.create_connection((str(address), place.port), seconds)
            break
    if connected_socket is None:
        raise OSError("no connection")
    with ExitStack() as stack:
        stack.callback(connected_socket.close)
        if place.scheme == "https":
            connected_socket = ssl.create_default_context().wrap_socket(
                connected_socket, server_hostname=place.host, do_handshake_on_connect=False
            )
            stack.callback(connected_socket.close)
        # A timeout of the socket starts over with every byte, so a timer enforces the deadline.
        timer = threading.Timer(seconds_left(deadline), _shut_down, [connected_socket])
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        if isinstance(connected_socket, ssl.SSLSocket):
            connected_socket.do_handshake()
        # The socket speaks TLS already where it has to. With ``default_port`` the header "Host"
        # leaves the usual port out.
        connection = http.client.HTTPConnection(place.host, place.port)
        connection.default_port = DEFAULT_PORTS[place.scheme]
        connection.sock = connected_socket
        stack.callback(connection.close)
        yield connection


def _shut_down(connected_socket: socket.socket) -> None:
    with suppress(OSError):
        # ``SSLSocket.shutdown`` would drop the TLS object that another thread is reading from.
        socket.socket.shutdown(connected_socket, socket.SHUT_RDWR)
