"""Addresses a client may send: what is loaded, and what is refused before a socket is opened."""

from __future__ import annotations

import base64
import ipaddress
import random
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reels import still, video

from saccade.core.errors import VideoInputError
from saccade.inputs.media import fetch
from saccade.inputs.media.fetch import FetchedMedia, Sources

BYTES = b"\x89PNG" + bytes(range(256)) * 40


class Server(ThreadingHTTPServer):
    """A host of this machine that answers by path, and remembers what it was asked."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, str]] = []
        self.answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.done = threading.Event()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def at(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append((self.path, self.headers["Host"]))
        answer = self.server.answers.get(self.path)
        try:
            (answer or plain(404, b"/etc/passwd"))(self)
        except OSError:
            pass  # the client has hung up

    def log_message(self, *args: object) -> None:
        """Silent."""


def plain(status: int = 200, body: bytes = BYTES, **headers: str):
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in ({"Content_Length": str(len(body))} | headers).items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def leading(to: str):
    return plain(302, b"", Location=to)


@pytest.fixture
def server() -> Iterator[Server]:
    http_server = Server()
    thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    http_server.answers["/ok"] = plain()
    yield http_server
    http_server.done.set()
    http_server.shutdown()
    http_server.server_close()
    thread.join()


def here(server: Server, *hosts: str, **more) -> Sources:
    """What may ask this server, though it is on this machine."""
    listed = [f"{host}:{server.port}" for host in ("127.0.0.1", *hosts)]
    return Sources(hosts=tuple(listed), allows_private_hosts=True, **{"seconds": 10.0, **more})


@pytest.fixture
def names(monkeypatch) -> Callable[..., list[str]]:
    """A resolver of our own: each name to one list of addresses after the other."""

    def use(**lookups: list[list[str]]) -> list[str]:
        hosts: list[str] = []
        real = socket.getaddrinfo

        def resolve(host: str, port: int, *args: int, **more: int):
            with suppress(ValueError):
                return real(str(ipaddress.ip_address(host)), port, *args, **more)
            hosts.append(host)
            turns = lookups.get(host.replace(".", "_"), [[]])
            addresses = turns.pop(0) if len(turns) > 1 else turns[0]
            return [each for one in addresses for each in real(one, port, *args, **more)]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        return hosts

    return use


@pytest.fixture
def dialled(monkeypatch) -> list[tuple[str, int]]:
    """Where connections were attempted; none gets through."""
    attempts: list[tuple[str, int]] = []

    def connect(address, timeout=None):
        attempts.append(address)
        raise OSError("no route")

    monkeypatch.setattr(socket, "create_connection", connect)
    return attempts


def test_addresses_share_the_time_that_is_left(names, monkeypatch) -> None:
    """Claim: a silent address leaves time to the next one. Fails if the first may take it all."""
    timeouts: list[float] = []

    def connect(address, timeout=None):
        timeouts.append(timeout)
        raise OSError("no answer")

    monkeypatch.setattr(socket, "create_connection", connect)
    names(a_test=[["93.184.216.34", "93.184.216.35"]])
    with pytest.raises(VideoInputError):
        Sources(any_host=True, seconds=30.0).load("http://a.test/v.mp4")
    assert len(timeouts) == 2
    assert timeouts[0] == pytest.approx(15, abs=2) and timeouts[1] == pytest.approx(30, abs=3)


def refused(sources: Sources, url: str, code: str) -> VideoInputError:
    """Load what must be refused: one clean sentence that repeats nothing of the address."""
    with pytest.raises(VideoInputError) as caught:
        sources.load(url)
    error = str(caught.value)
    assert caught.value.code == code, error
    assert error.isprintable() and ". " not in error and "Errno" not in error and "0x" not in error
    for part in ("127.0.0.1", "169.254", "localhost", "passwd", "secret", "example", "//"):
        assert part not in error
    assert caught.value.__suppress_context__ or not caught.value.__context__
    assert caught.value.status in (400, 413, 415, 422)
    return caught.value


# data:


def data_url(data: bytes, kind: str = "video/mp4") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def test_data_addresses():
    """Claim: a data: address gives its bytes, whatever the case of its head; `video/jpeg` a list
    of frames in order."""
    clip, image = video(n=2), still("JPEG")
    assert Sources().load(data_url(clip)) == FetchedMedia("bytes", clip)
    assert Sources().load(data_url(image, "image/png")).data == image
    assert Sources().load("DATA:Image/PNG;x=y;Base64," + data_url(b"abc")[22:]).data == b"abc"
    frames = [b"one", b"two", b"three"]
    listed = ",".join(base64.b64encode(frame).decode() for frame in frames)
    assert Sources().load(f"data:video/jpeg;base64,{listed}").frames == tuple(frames)
    assert Sources().load(data_url(b"one", "video/jpeg")) == FetchedMedia(
        "frames", frames=(b"one",)
    )


def test_data_addresses_may_be_escaped():
    """Claim: base64 whose signs are escaped, as browsers and `urllib.parse.quote` write addresses,
    gives its bytes; a broken escape is refused."""
    data = bytes(range(256))
    text = quote(base64.b64encode(data).decode(), safe="")
    assert "%2B" in text and "%3D" in text
    assert Sources().load(f"data:video/mp4;base64,{text}").data == data
    with pytest.raises(VideoInputError, match="broken base64"):
        Sources().load("data:video/mp4;base64,ab%2")


@pytest.mark.parametrize(
    ("url", "code"),
    [
        ("data:", "bad_option"),
        ("data:,", "bad_option"),
        ("data:video/mp4,abcd", "bad_option"),
        ("data:video/mp4;base64", "bad_option"),
        ("data:video/mp4;base32,abcd", "bad_option"),
        ("data:video/mp4;base64;x,abcd", "bad_option"),
        ("data:text/html;base64,abcd", "unsupported"),
        ("data:;base64,abcd", "unsupported"),
        ("data:application/x-pickle;base64,abcd", "unsupported"),
        ("data:videos/mp4;base64,abcd", "unsupported"),
        ("data:video/mp4;base64,", "empty"),
        ("data:video/mp4;base64,abcda", "bad_option"),
        ("data:video/mp4;base64,abc=d", "bad_option"),
        ("data:video/mp4;base64,\n\n", "empty"),
        ("data:video/mp4;base64,ab-_", "bad_option"),
        ("data:video/mp4;base64,ab\x0bcd", "bad_option"),
        ("data:video/mp4;base64,abcd====abcd", "bad_option"),
        ("data:video/mp4;base64,abcd,abcd", "bad_option"),
        ("data:video/mp4;base64,\u00e9bcd", "bad_option"),
        ("data:video/mp4;base64,/etc/passwd!", "bad_option"),
        ("data:video/jpeg;base64,", "empty"),
        ("data:video/jpeg;base64,abcd,,abcd", "empty"),
        ("data:video/jpeg;base64,abcd,?", "bad_option"),
        ("data:video/jpeg;base64," + "," * 10_000, "too_long"),
    ],
)
def test_broken_data_addresses(url, code):
    """Claim: a data: address broken in any way is refused with a fitting code."""
    refused(Sources(), url, code)


@pytest.mark.parametrize("size", [1, 2, 3, 500, 501, 502])
def test_base64_as_encoders_write_it(size):
    """Claim: lines, their ends in either way, and padding that is left out change no byte; nor do
    blanks around an address."""
    data = random.Random(size).randbytes(size)
    coded = base64.encodebytes(data).decode()
    for written in (coded, coded.replace("\n", "\r\n"), coded.replace("=", "")):
        assert Sources().load(f"data:image/png;base64,{written}").data == data
        assert Sources().load(f" \ndata:image/png;base64, {written} ").data == data
    frames = Sources().load(f"data:video/jpeg;base64,{coded},{coded.replace('=', '')}").frames
    assert frames == (data, data)


def test_huge_data_addresses(monkeypatch):
    """Claim: the limit is of the decoded bytes: line breaks and escapes do not count. An address
    that is far over it is refused by its length, before it is decoded."""
    sources = Sources(max_bytes=1000)
    assert sources.load(data_url(bytes(1000))).data == bytes(1000)
    in_lines = base64.encodebytes(bytes(1000)).decode()
    assert sources.load(f"data:video/mp4;base64,{in_lines}").data == bytes(1000)
    escaped = quote(base64.b64encode(random.Random(0).randbytes(1000)), safe="")
    assert len(sources.load(f"data:video/mp4;base64,{escaped}").data) == 1000
    assert refused(sources, data_url(bytes(1004)), "too_large").limit == 1000
    half = base64.b64encode(bytes(501)).decode()
    refused(sources, f"data:video/jpeg;base64,{half},{half}", "too_large")
    monkeypatch.setattr(fetch, "_decode_base64", lambda text: pytest.fail("decoded"))
    assert refused(sources, data_url(bytes(1200)), "too_large").limit == 1000


# file:


def test_file_addresses_stay_inside_the_folder(tmp_path):
    """Claim: a file: address gives a path inside the folder and nothing else: not by .., escapes,
    links, other hosts or zero bytes; without a folder none."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "a clip.mp4").write_bytes(BYTES)
    (tmp_path / "secret.mp4").write_bytes(BYTES)
    (root / "link.mp4").symlink_to(tmp_path / "secret.mp4")
    sources = Sources(root=root)
    good = root / "a clip.mp4"
    for head in ("file://", "file:", "FILE://localhost"):
        assert sources.load(f"{head}{root}/a%20clip.mp4") == FetchedMedia(
            "path", path=good.resolve()
        )
    with pytest.raises(VideoInputError, match="must be inside the allowed folder") as caught:
        sources.load(f"file://{tmp_path}/secret.mp4")
    assert caught.value.code == "not_allowed" and str(tmp_path) not in str(caught.value)
    outside = [
        "file:///etc/passw%64",
        f"file://{root}/../x.mp4",
        f"file://{root}/%2e%2e/x.mp4",
        f"file://{root}/link.mp4",
        f"file://{root}-other/x.mp4",
    ]
    for url in outside:
        with pytest.raises(VideoInputError, match="must be inside the allowed folder") as caught:
            sources.load(url)
        assert str(tmp_path) not in str(caught.value)
    for url in ("file:clip.mp4", "file://example.com/x", f"file://{root}/x?y", "file://", "file:"):
        refused(sources, url, "not_allowed")
    refused(sources, f"file://{root}/no.mp4", "missing")
    refused(sources, f"file://{root}/a%00b", "missing")
    refused(Sources(), f"file://{good}", "not_allowed")


# http:


@pytest.mark.parametrize(
    "url",
    [
        *("", "clip.mp4", "/etc/passwd", "ftp://example.com/", "gopher://127.0.0.1/", "concat:a|b"),
        *("http", "javascript:1", "unix:/run/x.sock", " http://example.com/", "blob:x", "rtsp://x"),
        *("http://example.com/a.mp4", "https://example.com/"),
    ],
)
def test_off_unless_allowed(url, dialled, names):
    """Claim: as it is, only data: addresses are opened; no name is looked up for any other."""
    hosts = names()
    refused(Sources(), url, "not_allowed")
    assert not dialled and not hosts


LOOPBACK = [
    *("http://127.0.0.1/", "http://127.1.2.3/", "http://localhost/", "http://localhost./"),
    *("http://2130706433/", "http://0177.0.0.1/", "http://0x7f.0.0.1/", "http://0x7f000001/"),
    *("http://127.1/", "http://0/", "http://0.0.0.0/", "http://017700000001/", "http://127.0.1/"),
    *("http://[::1]/", "http://[::]/", "http://[::ffff:127.0.0.1]/", "http://[::ffff:7f00:1]/"),
    *("http://[::127.0.0.1]/", "http://[64:ff9b::7f00:1]/", "http://[2002:7f00:1::]/"),
    *("http://[2001:0:7f00:1::]/", "http://[fe80::1]/", "http://[fe80::1%25eth0]/"),
    *("http://[fd00:ec2::254]/", "http://[fc00::1]/", "http://[ff02::1]/", "http://[fec0::1]/"),
    *("http://169.254.169.254/latest/meta-data/", "http://[::ffff:169.254.169.254]/"),
    *("http://2852039166/", "http://0xa9fea9fe/", "http://100.100.100.200/", "http://10.0.0.1/"),
    *("http://168.63.129.16/", "http://192.168.1.1/", "http://172.16.0.1/", "http://224.0.0.1/"),
    *("http://255.255.255.255/", "http://240.0.0.1/", "http://198.18.0.1/", "http://192.0.0.192/"),
    *("http://127.0.0.1.:80/", "http://[::1]:80/", "http://0x7f.1/", "http://1.0x7f/"),
]


@pytest.mark.parametrize("url", LOOPBACK)
def test_addresses_of_this_machine_and_its_network_are_refused(url, dialled):
    """Claim: with every public host allowed, no spelling of an address of this machine, its
    network, a group or a cloud's own service is connected to, over http or https."""
    sources = Sources(any_host=True)
    # A private name looks as one that does not exist; see below.
    code = "unreachable" if url.startswith("http://localhost") else "not_allowed"
    refused(sources, url, code)
    refused(sources, url.replace("http:", "https:"), code)
    host = url.split("/")[2]
    refused(Sources(hosts=(host, "localhost")), url, "not_allowed")
    assert not dialled


TRICKS = [
    *("http://allowed.example\\@127.0.0.1/", "http://allowed.example\\.127.0.0.1/"),
    *("http://allowed.example@127.0.0.1/", "http://a:b@allowed.example/", "http://@127.0.0.1/"),
    *("http://allowed.example%40127.0.0.1/", "http://allowed.example%00.evil.example/"),
    *("http://127.0.0.1\t/", "http://allowed.example\r\nHost: x/", "ht\ntp://allowed.example/"),
    *("http:///allowed.example/", "http:allowed.example", "http:/allowed.example", "http://"),
    *("http://allowed.example:99999/", "http://allowed.example:x/", "http://allowed..example/"),
    *("http://\uff11\uff12\uff17.0.0.1/", "http://allow\u00e9d.example/", "http://[::1/", "http://[x]/"),
    *("http://-allowed.example/", "http://allowed.example:-80/", "http://[127.0.0.1]/"),
    *("http://allowed.example/" + "a" * 9000, "http://allowed.example /", "http://allowed.example/\u2028"),
    *("http://evil.example#allowed.example/", "http://evil.example/?allowed.example"),
    *("http://evilallowed.example/", "http://allowed.example.evil.example/", "http://x.allowed.example/"),
    *("http://allowed.example:8080/", "http://allowed.example:0/", "http://allowed.example:22/"),
]  # fmt: skip


@pytest.mark.parametrize("url", TRICKS)
def test_no_spelling_makes_another_host_pass(url, dialled, names):
    """Claim: no spelling makes another host, port or user pass for the one allowed."""
    hosts = names()
    refused(Sources(hosts=("allowed.example",)), url, "not_allowed")
    assert not dialled and not hosts


def test_the_allowed_host_is_connected_to_by_its_address(dialled, names):
    """Control: the allowed host does get through to its one public address, so what is refused
    above is refused for its spelling; and names below a host need their own entry."""
    names(allowed_example=[["93.184.216.34"]], x_sub_example=[["2606:2800:220:1::1"]])
    sources = Sources(hosts=("Allowed.example", "*.sub.example", "[2606:2800:220:1::2]:8080"))
    for url in (
        "http://allowed.example/",
        "https://ALLOWED.example./x?y=z#f",
        "http://x.sub.example/",
        "http://[2606:2800:220:1:0::2]:8080/",
    ):
        refused(sources, url, "unreachable")
    assert dialled == [
        ("93.184.216.34", 80),
        ("93.184.216.34", 443),
        ("2606:2800:220:1::1", 80),
        ("2606:2800:220:1::2", 8080),
    ]
    refused(sources, "http://sub.example/", "not_allowed")
    refused(Sources(any_host=True), "http://allowed.example:8080/", "not_allowed")
    assert len(dialled) == 4


def test_a_name_with_one_private_address_is_refused(dialled, names):
    """Claim: a name with a public and a private address is refused: which of them would be used
    is not left to chance."""
    names(two_example=[["93.184.216.34", "127.0.0.1"]])
    refused(Sources(any_host=True), "http://two.example/", "unreachable")
    refused(Sources(hosts=("two.example",)), "http://two.example/", "not_allowed")
    assert not dialled


def test_a_private_name_looks_as_one_that_does_not_exist(dialled, names):
    """Claim: where every public host may be asked, a name of this network is answered word for
    word as one that nobody has, so that nobody can list them. Fails if the two differ."""
    names(inside_example=[["10.0.0.7"]], nobody_example=[[]])
    texts = []
    for name in ("inside", "nobody"):
        with pytest.raises(VideoInputError) as caught:
            Sources(any_host=True).load(f"http://{name}.example/v.mp4")
        texts.append((str(caught.value), caught.value.code))
    assert texts[0] == texts[1] and not dialled


def test_a_name_is_resolved_once(server, names, monkeypatch):
    """Claim: a name that is public when judged and this machine when connected to never gets
    here: it is looked up once, and that address is dialled. Control: a second look-up would have
    led to our server."""
    hosts = names(rebind_example=[["93.184.216.34"], ["127.0.0.1"]])
    dialled = []
    monkeypatch.setattr(
        socket, "create_connection", lambda to, timeout: dialled.append(to) or _no()
    )
    refused(Sources(any_host=True), "http://rebind.example/", "unreachable")
    assert hosts == ["rebind.example"] and dialled == [("93.184.216.34", 80)]
    assert not server.requests
    assert socket.getaddrinfo("rebind.example", 80)[0][4] == ("127.0.0.1", 80)


def _no():
    raise OSError("no route")


@pytest.mark.parametrize(
    "to",
    [
        "http://127.0.0.1:{port}/secret",
        "//127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "http://2130706433:{port}/secret",
        "http://start.example:{other}/secret",
        "http://[::ffff:127.0.0.1]:{port}/secret",
        "file:///etc/passwd",
        "data:video/mp4;base64,abcd",
        "ftp://example.com/",
        "http://start.example\\@127.0.0.1:{port}/secret",
        "",
    ],
)
def test_every_redirection_is_judged(to, server, names):
    """Claim: an allowed host cannot lead on to one that is not, nor to another kind of address."""
    names(start_example=[["127.0.0.1"]])
    target = to.format(port=server.port, other=server.port + 1)
    server.answers |= {"/go": leading(target), "/secret": plain()}
    sources = Sources(
        hosts=(f"start.example:{server.port}",), allows_private_hosts=True, seconds=10.0
    )
    refused(sources, server.at("/go", "start.example"), "not_allowed")
    assert [path for path, _ in server.requests] == ["/go"]


def test_hops_are_followed_and_counted(server, names):
    """Claim: redirects inside the allowed hosts are followed, relative ones too, up to the limit;
    the host is named by its own name each time, and resolved for each hop."""
    hosts = names(start_example=[["127.0.0.1"]], next_example=[["127.0.0.1"]])
    server.answers |= {
        "/a": leading(server.at("/b", "next.example")),
        "/b": leading("ok"),
        "/loop": leading("/loop"),
    }
    sources = here(server, "start.example", "next.example")
    assert sources.load(server.at("/a", "start.example")) == FetchedMedia("bytes", BYTES)
    port = server.port
    assert server.requests == [
        ("/a", f"start.example:{port}"),
        ("/b", f"next.example:{port}"),
        ("/ok", f"next.example:{port}"),
    ]
    assert hosts == ["start.example", "next.example", "next.example"]
    server.requests.clear()
    refused(here(server, max_redirects=2), server.at("/loop"), "unreachable")
    assert len(server.requests) == 3


def test_private_needs_a_listed_host(server):
    """Claim: `private` opens this machine to the hosts listed and to no others."""
    assert here(server).load(server.at("/ok")).data == BYTES
    listed = (f"127.0.0.1:{server.port}",)
    refused(Sources(hosts=listed), server.at("/ok"), "not_allowed")
    refused(Sources(any_host=True, allows_private_hosts=True), server.at("/ok"), "not_allowed")
    refused(Sources(any_host=True, allows_private_hosts=True), "http://127.0.0.1/", "not_allowed")


def test_answers_that_are_not_the_media(server):
    """Claim: other statuses, compressed answers, cut ones and noise are refused in our words."""
    server.answers |= {
        "/gzip": plain(Content_Encoding="gzip"),
        "/cut": plain(Content_Length=str(len(BYTES) + 5)),
        "/noise": lambda handler: handler.wfile.write(b"\x00\xffsecret\r\n" * 9),
        "/lines": lambda handler: handler.wfile.write(b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 999),
        "/silent": lambda handler: None,
        "/lies": plain(Content_Length="-5"),
    }
    sources = here(server)
    assert "404" in str(refused(sources, server.at("/none"), "unreachable"))
    refused(sources, server.at("/gzip"), "unsupported")
    for path in ("/cut", "/noise", "/lines", "/silent"):
        refused(sources, server.at(path), "unreachable")
    refused(sources, f"https://127.0.0.1:{server.port}/ok", "unreachable")  # not TLS


def test_bytes_are_counted(server):
    """Claim: an answer over the limit is refused, by its announced length before a byte is read
    and by count where none is announced; one of exactly the limit is taken."""

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while not handler.server.done.is_set():
            handler.wfile.write(bytes(1 << 16))

    def chunked(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(4):
            handler.wfile.write(b"1000\r\n" + bytes(0x1000) + b"\r\n")
        handler.wfile.write(b"0\r\n\r\n")

    server.answers |= {
        "/announced": plain(Content_Length=str(1 << 40)),
        "/endless": endless,
        "/chunked": chunked,
    }
    for path in ("/announced", "/endless"):
        error = refused(here(server, max_bytes=1 << 20), server.at(path), "too_large")
        assert error.status == 413 and error.limit == 1 << 20
    assert here(server, max_bytes=4 << 12).load(server.at("/chunked")).data == bytes(4 << 12)
    refused(here(server, max_bytes=(4 << 12) - 1), server.at("/chunked"), "too_large")


@pytest.mark.parametrize("what", ["head", "body"])
def test_a_slow_host_meets_the_deadline(what, server):
    """Claim: a byte now and then does not keep a load alive: the deadline is for all of it (0.5 s;
    the host would go on for 60)."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        head = b"HTTP/1.1 200 OK\r\n" + (b"\r\n" if what == "body" else b"x: ")
        handler.wfile.write(head)
        for _ in range(600):
            if handler.server.done.wait(0.1):
                break
            handler.wfile.write(b"a")

    server.answers["/drip"] = drip
    began = time.monotonic()
    refused(here(server, seconds=0.5), server.at("/drip"), "unreachable")
    assert time.monotonic() - began < 20


def test_a_slow_resolver_meets_the_deadline(monkeypatch):
    """Claim: looking up a name cannot take longer than the load may."""
    release = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *a, **k: release.wait(30) and [])
    began = time.monotonic()
    refused(Sources(any_host=True, seconds=0.5), "http://slow.example/", "unreachable")
    release.set()
    assert time.monotonic() - began < 20


def test_https_checks_the_name(tmp_path, names, monkeypatch):
    """Claim: over https the certificate must be for the name asked, though the connection goes to
    an address; and a protected hop is not followed to an open one."""
    openssl = shutil.which("openssl") or pytest.skip("no openssl to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    words = f"req -x509 -newkey rsa:2048 -nodes -days 2 -keyout {key} -out {certificate}"
    named = ["-subj", "/CN=video.example", "-addext", "subjectAltName=DNS:video.example"]
    subprocess.run([openssl, *words.split(), *named], check=True, capture_output=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    names(video_example=[["127.0.0.1"]], other_example=[["127.0.0.1"]])
    server = Server()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.answers |= {"/ok": plain(), "/down": leading(server.at("/ok", "video.example"))}
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        sources = here(server, "video.example", "other.example")
        secure = server.at("/ok", "video.example").replace("http", "https")
        assert sources.load(secure).data == BYTES
        refused(sources, secure.replace("video.", "other."), "unreachable")
        refused(sources, secure.replace("/ok", "/down"), "not_allowed")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_public_addresses():
    """Claim: of a few well-known public addresses none is taken for a private one."""
    for address in ("8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "2a00:1450::1"):
        assert fetch.is_public(ipaddress.ip_address(address))


@given(url=st.text(max_size=60) | st.builds("{}{}".format,
       st.sampled_from(["http://", "https://", "data:", "data:video/mp4;base64,", "file://"]),
       st.text(max_size=60)))  # fmt: skip
@settings(max_examples=250)
def test_any_text_is_loaded_or_refused(url):
    """Claim: any text whatever is loaded or refused in one sentence without any of it: 250 draws,
    with no connection made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", lambda *a, **k: pytest.fail("looked up"))
        try:
            source = Sources(root=Path("/nonexistent"), hosts=("allowed.example",)).load(url)
        except VideoInputError as error:
            message = str(error)
            assert message.isprintable() and "/nonexistent" not in message and "0x" not in message
        else:
            assert source.data or source.frames
