"""Fuzzing for hours: seeds of ``corpus/`` are changed at random, and whatever comes must be a
result or one of our sentences.

    python tests/fuzz/fuzz.py --hours 4 [--only media] [--seed 1] [--out runs/fuzz]

The targets: ``media`` (through the guarded process of the server), ``bodies`` of HTTP requests,
``names`` of methods, ``configs`` of checkpoints. A finding is a file in the folder, named by
target, error and a digest of its bytes; ``last-TARGET`` is what was being tried, should the process
die. Exits with 1 where there is a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from saccade.core.errors import SaccadeError
from saccade.inputs import footprint
from saccade.inputs.loading import read_config
from saccade.inputs.media import Limits
from saccade.inputs.media.decoder_pool import DecoderPool
from saccade.methods import resolve
from saccade.serve.request_bodies import cut_data_urls
from saccade.serve.request_schema import ChatRequest
from saccade.serve.routes import parse_request

CORPUS = Path(__file__).parent / "corpus"
SLOW = 20.0  # seconds after which a case is a finding too
SMALL = Limits(max_pixels=1 << 22, max_memory=1 << 27)
NUMBERS = (b"0", b"-1", b"1e999", b"99999999999999999999", b"0.5", b"null", b'""', b"[]", b"{}")
Act = Callable[[bytes], object]


def mutated(seeds: list[bytes], draw: random.Random) -> bytes:
    """A seed after one to eight changes: bytes, blocks, numbers, pieces of other seeds."""
    data = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at, size = draw.randrange(len(data) + 1), draw.choice((1, 1, 4, 16, 64))
        match draw.randrange(7):
            case 0:
                data[at : at + size] = draw.randbytes(size)
            case 1:
                data[at : at + size] = b""
            case 2:
                data[at:at] = data[at : at + size] * draw.choice((1, 2, 50))
            case 3:
                other = draw.choice(seeds)
                start = draw.randrange(len(other) + 1)
                data[at : at + size] = other[start : start + 4 * size]
            case 4:
                matches = list(re.finditer(rb"-?\d+(\.\d+)?", bytes(data)))
                if matches:
                    data[slice(*draw.choice(matches).span())] = draw.choice(NUMBERS)
            case 5:
                data[at : at + 4] = draw.choice((0, 1, 2**31 - 1, 2**32 - 1)).to_bytes(4)
            case 6 if draw.random() < 0.2:
                del data[at:]
    return bytes(data)


def _media(decoder_pool: DecoderPool) -> Act:
    def read(data: bytes) -> object:
        clip = decoder_pool.read(data, limits=SMALL)
        assert len(clip.frames) == len(clip.timestamps) > 0 and clip.metadata["fps"] > 0
        return clip

    return read


def _config(folder: Path) -> Act:
    def read(data: bytes) -> object:
        (folder / "config.json").write_bytes(data)
        return footprint.footprint(read_config(str(folder), weights=False))

    return read


def _body(data: bytes) -> object:
    text, apart = cut_data_urls(bytearray(data))
    return parse_request(ChatRequest, text, apart)


@contextmanager
def targets(only: str | None) -> Iterator[dict[str, Act]]:
    """What is tried, by name."""
    with ExitStack() as stack:
        decoder_pool = stack.enter_context(DecoderPool(seconds=10.0))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        acts: dict[str, Act] = {
            "media": _media(decoder_pool),
            "bodies": _body,
            "names": lambda data: resolve(data[:200].decode(errors="replace")),
            "configs": _config(folder),
        }
        yield acts if only is None else {only: acts[only]}


def tell(error: BaseException) -> str:
    """What is wrong with how a case ended, or nothing."""
    message = str(error)
    if not isinstance(error, SaccadeError):
        return type(error).__name__
    return "" if 0 < len(message) < 2000 and "Traceback" not in message else "no-sentence"


def _too_late(*_: object) -> None:
    raise TimeoutError("this case did not end")


def tried(act: Act, data: bytes) -> tuple[str, str]:
    """How a case ended, and what is wrong with it."""
    began = time.monotonic()
    signal.signal(signal.SIGALRM, _too_late)
    signal.alarm(int(2 * SLOW))
    try:
        act(data)
        ended, wrong = "answered", ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        ended, wrong = "refused", tell(error)
        if wrong:
            wrong += "-" + "".join(traceback.format_exc())[-2000:]
    finally:
        signal.alarm(0)
    if not wrong and time.monotonic() - began > SLOW:
        wrong = f"slow-{time.monotonic() - began:.0f}"
    return ended, wrong


def fuzz(seconds: float, out: Path, seed: int, only: str | None = None) -> Counter[str]:
    """Tries for so long, writes what it finds, and counts how the cases ended."""
    out.mkdir(parents=True, exist_ok=True)
    draw, counts, places = random.Random(seed), Counter[str](), set[str]()
    end = time.monotonic() + seconds
    with targets(only) as acts:
        seeds = {
            name: [file.read_bytes() for file in sorted((CORPUS / name).iterdir())] for name in acts
        }
        if "names" in seeds:
            seeds["names"] = [line for text in seeds["names"] for line in text.splitlines()]
        while time.monotonic() < end:
            for name, act in acts.items():
                data = mutated(seeds[name], draw)
                (out / f"last-{name}").write_bytes(data)
                ended, wrong = tried(act, data)
                if wrong.startswith(("slow", "TimeoutError")):  # or the machine stood still
                    ended, wrong = tried(act, data)
                counts[f"{name} {ended}"] += 1
                if not wrong:
                    continue
                kind, _, where = wrong.partition("-")
                counts[f"{name} finding"] += 1
                # the same line of code is told once
                line = "".join(re.findall(r'File "[^"]+", line \d+', where)[-1:])
                if f"{name}{kind}{line}" not in places:
                    places.add(f"{name}{kind}{line}")
                    stem = f"{name}-{kind}-{hashlib.sha256(data).hexdigest()[:12]}"
                    (out / stem).write_bytes(data)
                    (out / f"{stem}.txt").write_text(where)
    return counts


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"))
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--only", choices=("media", "bodies", "names", "configs"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    counts = fuzz(options.hours * 3600, options.out, options.seed, options.only)
    findings = {name: count for name, count in counts.items() if name.endswith("finding")}
    summary = {"hours": options.hours, "seed": options.seed, "folder": str(options.out), **counts}
    sys.stdout.write(json.dumps(summary, indent=1) + "\n")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
