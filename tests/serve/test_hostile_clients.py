"""Claims about clients that send nonsense, too much, or nothing: a sentence, in time."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from beside import fork
from serve.live import Live, made, request, serving, text_part, video_part

from saccade.inputs import Pair
from saccade.inputs.media import decoder_pool
from saccade.inputs.media.decoder_pool import DecoderPool, StopSignal
from saccade.inputs.media.fetch import Sources
from saccade.serve import listen_socket, request_bodies
from saccade.serve.api_errors import ApiError
from saccade.serve.request_bodies import cut_data_urls
from saccade.serve.request_schema import ChatRequest
from saccade.serve.routes import make_app
from saccade.serve.server_settings import ServerSettings
from saccade.serve.service import Service

TESTS = Path(__file__).parents[1]
HEADERS = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def _send_pieces(live: Live, *pieces: bytes, pause: float = 0.2) -> tuple[bytes, float]:
    """What comes back of a connection that sends these pieces, and after how many seconds."""
    place = urlsplit(live.url)
    began = time.monotonic()
    with socket.create_connection((place.hostname, place.port), timeout=15) as line:
        reply = b""
        try:
            for piece in pieces:
                line.sendall(piece)
                time.sleep(pause)
            while piece := line.recv(1 << 16):
                reply += piece
        except ConnectionError:
            pass
    return reply, time.monotonic() - began


@pytest.mark.extra
def test_a_connection_that_sends_no_whole_headers_is_closed(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: silence, half a header, headers a byte at a time and half a second request are cut off
    in their time. Control: a body that comes slowly is waited for."""
    monkeypatch.setattr(listen_socket, "HEADER_TIMEOUT_SECONDS", 1.0)
    first = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
    for pieces in ((), (HEADERS,), tuple(bytes([byte]) for byte in HEADERS), (first, HEADERS)):
        answered, took = _send_pieces(server, *pieces)
        assert answered.count(b"HTTP/1.1") == pieces.count(first) and 0.5 < took < 5
    body = b'{"model": "shapes", "messages": []}'
    slow = [HEADERS + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body)]
    slow += [body[at : at + 5] for at in range(0, len(body), 5)]
    answered, took = _send_pieces(server, *slow, pause=0.3)
    assert b"400 Bad Request" in answered and took > 2


def test_too_many_stops_are_reported_as_such(server: Live) -> None:
    """Claim: of the two forms of stop, the error is about the one that was sent."""
    error = server.ask(stop=["x"] * 17).json()["error"]
    assert error["param"] == "stop" and "at most 16 items" in error["message"]
    error = server.ask(messages=[{"role": "user", "content": [{"type": "text"}]}]).json()["error"]
    assert error["param"] == "messages.0.content.0.text" and "required" in error["message"]


def test_a_client_is_not_shown_the_words_of_a_file(server: Live, tmp_path: Path) -> None:
    """Claim: a text sent as a video is refused without its words."""
    (tmp_path / "a.mp4").write_text("hunter2 is the password\n" * 5)
    reply = server.ask([video_part(tmp_path / "a.mp4"), text_part("hi")])
    assert reply.status_code == 400 and "hunter2" not in reply.text and "not a video" in reply.text


@pytest.mark.extra
def test_slow_files_leave_the_server_to_others(
    models: Pair, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: with both decoders held, an innocent request is answered; where they stay held, it is
    told with 503 and when to come again that it waited for a decoder."""
    ask = request([video_part(clips[0]), text_part("hi")], max_tokens=2)
    with serving(lambda: made(models)) as live, ThreadPoolExecutor(4) as pool:
        assert live.service.engine is not None
        reader = live.service.engine.reader
        with monkeypatch.context() as patch, DecoderPool(50, processes=2, share=1.0) as own:
            slow = "import saccade.inputs.media.decoder_pool as g, time\n"
            slow += "g.read = lambda *_: time.sleep(60)\ng.serve_requests()"
            patch.setattr(reader, "_decoders", own)
            patch.setattr(decoder_pool, "CHILD_COMMAND", slow)
            futures = [pool.submit(live.post, ask) for _ in range(2)]
            while len(own._busy) < 2:
                time.sleep(0.01)
            patch.undo()
            patch.setattr(reader, "_decoders", own)
            patch.setattr(decoder_pool, "WAIT_SECONDS", 0.3)
            own.share = 1000.0
            reply = live.post(ask)
            assert reply.status_code == 503 and reply.headers["Retry-After"] == "10"
            assert "waited for a decoder" in reply.json()["error"]["message"]
            own.share = 0.2
            patch.setattr(decoder_pool, "WAIT_SECONDS", 20.0)
            assert live.post(ask).status_code == 200
            own.close()
            assert {each.result(20).status_code for each in futures} <= {503, 400, 413}


def _status(name: str) -> int:
    """Bytes of this process's memory, now (VmRSS) or at its peak (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(each for each in lines if each.startswith(name))
    return int(line.split()[1]) << 10


def taken() -> float:
    """How much more memory this process takes to read a body of 64 MB, in its sizes."""

    def read(chat_request: ChatRequest, stop: StopSignal, data_urls: dict[str, memoryview]) -> None:
        (url,) = chat_request.media_urls
        assert len(Sources().decode_data_url(data_urls.pop(url)).data) > 1 << 19
        raise ApiError(400, "loaded")

    def free(*_: object) -> None:
        pass

    queue = SimpleNamespace(
        max_running=8, max_waiting=8, slots=0, is_alive=True, reserve=free, release=free
    )
    service = Service(ServerSettings())
    service.engine = SimpleNamespace(  # type: ignore[assignment]
        queue=queue,
        reader=SimpleNamespace(check=free, read=read, log_ignored=free),
    )

    async def body(size: int) -> AsyncIterator[bytes]:
        yield b'{"model": "shapes", "messages": [{"role": "user", "content": [{"type": "video_url",'
        yield b'"video_url": {"url": "data:video/mp4;base64,'
        for _ in range(size >> 16):
            yield b"A" * (1 << 16)
        yield b'"}}]}]}'

    async def ask(size: int) -> None:
        headers = {"Content-Type": "application/json"}
        transport = httpx.ASGITransport(make_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            path = "/v1/chat/completions"
            answer = await client.post(path, content=body(size), headers=headers)
        assert answer.json()["error"]["message"] == "loaded", answer.text

    asyncio.run(ask(1 << 20))
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from here on
    asyncio.run(ask(64 << 20))
    return (_status("VmHWM") - before) / (64 << 20)


def _tell_taken(into: Path) -> None:
    taken()  # fills holes in the memory that was forked
    into.write_text(str(taken()))


@pytest.mark.extra
def test_a_large_body_takes_a_small_multiple_of_itself(tmp_path: Path) -> None:
    """Claim: from its first byte to the loaded media, a body of 64 MB takes at most twice as
    much memory in the server's process: itself, and the bytes it stands for (1.75; what else the
    process does has a half more). Fails if another copy is kept on the way: 2.75. In a process of
    its own that has read one before: holes in its memory are filled first, or grown around."""
    process = fork(_tell_taken, tmp_path / "taken")
    process.join()
    assert 1.5 < float((tmp_path / "taken").read_text()) < 2.25


LARGE = base64.b64encode(bytes(range(256)) * 400).decode()  # with every sign there is


def _request(*urls: str) -> dict[str, Any]:
    media = [{"type": "video_url", "video_url": {"url": url}} for url in urls]
    return request([*media, text_part('"url": "data:no')])


@pytest.mark.parametrize(
    "spelt",
    [
        lambda text: text,
        lambda text: text.replace("/", "\\/"),
        lambda text: text.replace("+", "\\u002B").replace("=", "\\u003d").replace("/", "\\u002F"),
        lambda text: text.replace('"url": ', '"url"\n:\t'),
    ],
    ids=["plain", "slashes", "unicode", "spaces"],
)
def test_what_is_cut_out_of_a_body_can_be_put_back(spelt: Callable[[str], str]) -> None:
    """Claim: however base64 is spelt, a body's text and what stands apart are together what it
    said, to the byte, and the text is short. Short addresses stay, so does text that looks like
    one."""
    body = _request(f"data:video/mp4;base64,{LARGE}", "data:x", f"DATA:video/jpeg;base64,{LARGE}=")
    text, data_urls = cut_data_urls(bytearray(spelt(json.dumps(body)).encode()))
    assert len(text) < 1000 and list(data_urls) == ["data:0", "data:1"]
    for name, address in data_urls.items():
        text = text.replace(b'"%s"' % name.encode(), json.dumps(str(address, "ascii")).encode())
    assert json.loads(text) == body


def test_a_body_that_is_no_base64_is_left_as_it_is() -> None:
    """Claim: a long address with other escapes stays in the text and says the same, wherever they
    begin; one that does not end is not touched."""
    for url in ("é" * (1 << 16), LARGE + "\\", LARGE[:-1] + '/"'):
        body = _request("data:" + url)
        text, data_urls = cut_data_urls(bytearray(json.dumps(body).replace("/", "\\/").encode()))
        assert json.loads(text) == body and not data_urls
    text = b'{"url": "data:' + LARGE.encode()
    assert cut_data_urls(bytearray(text)) == (text, {})
    # An escaped backslash is no beginning of the escape of the letter behind it.
    text = b'{"url": "data:%s\\\\r/%s"}' % (LARGE.encode(), LARGE.encode())
    assert cut_data_urls(bytearray(text)) == (text, {})


def test_long_addresses_elsewhere_and_long_texts_are_reported(
    server: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: a long address where no media are read, its short name beside it, and more text than
    may be parsed are 4xx with a sentence."""
    url = f"data:video/mp4;base64,{LARGE}"
    for fields in ({"metadata": {"url": url}}, _request(url, "data:0")):
        reply = server.post({**request(), **fields})
        assert reply.status_code == 400 and "data: address" in reply.json()["error"]["message"]
    monkeypatch.setattr(request_bodies, "MAX_TEXT_BYTES", 1 << 20)
    reply = server.ask("x" * (1 << 20))
    assert reply.status_code == 413 and "1048576 bytes of text" in reply.json()["error"]["message"]


@pytest.mark.extra
def test_bodies_that_wait_to_be_read_count(models: Pair, tmp_path: Path) -> None:
    """Claim: what is here of bodies is bounded until their media are read: beyond four of full size
    the next is told to come again, and their room is free afterwards."""
    with (
        serving(lambda: made(models), max_body_bytes=1 << 20) as live,
        ThreadPoolExecutor(8) as pool,
    ):
        assert live.service.engine is not None
        reader, before = live.service.engine.reader, live.service.engine.reader.read
        waits = [True]

        def slow(*arguments: object) -> object:
            while waits:
                time.sleep(0.01)
            return before(*arguments)  # type: ignore[arg-type]

        reader.read = slow  # type: ignore[method-assign, assignment]
        (tmp_path / "a.mp4").write_bytes(bytes(700_000))
        ask = request([video_part(tmp_path / "a.mp4")])
        futures = [pool.submit(live.post, ask) for _ in range(6)]
        time.sleep(1.5)
        waits.clear()
        statuses = sorted(each.result(30).status_code for each in futures)
        assert statuses == [400] * 4 + [429] * 2
        assert live.ask().status_code == 200
