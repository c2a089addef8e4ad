"""What a large pair should need and cost on several GPUs: arithmetic on published numbers.

Nothing here was timed. A forward takes as long as the slower of reading its bytes (every weight it
passes through and every cached key, once) and doing its products, and under tensor parallelism it
waits for two sums over all GPUs a layer. What is assumed is in ``ASSUMED`` and ``GPUS``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lab.hardware.gpu import REPORTED, Reported
from saccade.bench.hardware.published import CONFIGS
from saccade.inputs import architectures
from saccade.inputs.footprint import Footprint, footprint
from saccade.model.memory import SPARE_SHARE

GB = 1e9
SIZE = 2  # bytes of a number, bfloat16
Way = Literal["TP", "PP"]
"""Every layer on all GPUs (``--tp``), or some layers on each, in turn (``--device-map auto``)."""


@dataclass(frozen=True)
class Gpu:
    """As published, and two guesses: what a small sum over all takes, and what an hour costs."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes a second
    products: float  # dense bf16, a second, a product and a sum counting as two
    link: float  # bytes a second to the others, one way
    wait: float  # seconds of an all-reduce of nothing
    dollars: float  # an hour


GPUS = (
    Gpu("H100 80 GB", 80 * GB, 3.35e12, 989e12, 450e9, 12e-6, 3.00),
    Gpu("H200 141 GB", 141 * GB, 4.8e12, 989e12, 450e9, 12e-6, 3.80),
    Gpu("A100 80 GB", 80 * GB, 2.04e12, 312e12, 300e9, 15e-6, 1.80),
    Gpu("L40S 48 GB", 48 * GB, 0.864e12, 362e12, 32e9, 35e-6, 1.20),
)
COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Assumed:
    """What no data sheet says."""

    answer: int = 256  # tokens
    utilisation: float = 0.5  # of the products a GPU could do, in a prefill
    chunk: int = 2048  # tokens of a prefill's forward
    patches: int = 4  # of the vision tower, a visual token
    reported: Reported = REPORTED[1]  # SpecVLM's acceptance, with a draft that sees a tenth


ASSUMED = Assumed()


@dataclass(frozen=True)
class Shape:
    """What of a model counts here."""

    name: str
    counted: Footprint
    hidden: int
    heads: int
    kv_heads: int
    width: int  # of a head
    vision: int  # weights that are not the language model's

    @property
    def text(self) -> int:
        """Weights that are split under TP: embeddings too."""
        return self.counted.parameters - self.vision

    def products(self, rows: float, context: float) -> float:
        """Of a forward of these rows, each over so many keys on average."""
        attention = 4 * self.counted.layers * self.heads * self.width * context
        return rows * (2 * self.counted.decoder + attention)


@dataclass(frozen=True)
class Plan:
    """One arrangement: what the fullest GPU holds, and the seconds of one batch of videos."""

    gpu: Gpu
    count: int
    way: Way
    tokens: int
    batch: int
    held: float  # bytes on the fullest GPU
    look: float  # seconds of the vision towers
    read: float  # of both prefills
    once: float  # T(1) of the target
    step: float  # of the draft
    verify: float  # T(rows of a tree)

    @property
    def fits(self) -> bool:
        return self.held <= self.gpu.memory * (1 - SPARE_SHARE)

    @property
    def plain(self) -> float:
        """Seconds to decode an answer plainly."""
        return ASSUMED.answer * self.once

    @property
    def drafted(self) -> float:
        """Seconds to decode an answer at the reported acceptance."""
        each = ASSUMED.reported
        return ASSUMED.answer / each.tau * (each.levels * self.step + self.verify)

    @property
    def gain(self) -> float:
        return self.plain / self.drafted

    @property
    def seconds(self) -> float:
        """A batch from its pixels to its last token; not drafted where that does not pay."""
        return self.look + self.read + min(self.plain, self.drafted)

    def dollars(self, videos: int = 1000) -> float:
        return self.seconds / 3600 * self.gpu.dollars * self.count * videos / self.batch


def shape(name: str) -> Shape:
    """Of a published checkpoint."""
    made: Any = CONFIGS[name]()
    text, counted = architectures.text_config(made), footprint(made)
    embedding = text.vocab_size * text.hidden_size
    tied = made.tie_word_embeddings
    return Shape(
        name,
        counted,
        text.hidden_size,
        text.num_attention_heads,
        text.num_key_value_heads,
        text.hidden_size // text.num_attention_heads,
        counted.parameters - counted.decoder - (0 if tied else embedding),
    )


def plan(
    target: Shape, draft: Shape, gpu: Gpu, count: int, way: Way, tokens: int, batch: int = 1
) -> Plan:
    """The pair on so many GPUs. The draft is whole on each under TP, and on the first under PP."""
    kept = int(tokens * ASSUMED.reported.keep)
    split = count if way == "TP" else 1  # GPUs that work on one forward at the same time
    keys = target.counted.kv * (tokens + ASSUMED.answer) * batch * SIZE
    drafting = (
        draft.counted.parameters + draft.counted.kv * (kept + ASSUMED.answer) * batch
    ) * SIZE
    working = 2 * ASSUMED.chunk * 8 * target.hidden * SIZE  # a chunk's activations, roughly
    held = (target.text * SIZE + keys) / count + target.vision * SIZE + drafting + working

    def forward(model: Shape, rows: int, context: int, over: int) -> float:
        """Seconds of decoding ``rows`` tokens of every request at once."""
        read = model.counted.step(SIZE, context * batch, SIZE) / over
        done = model.products(rows * batch, context) / over
        alone = max(read / gpu.bandwidth, done / gpu.products)
        return alone + _sums(model, gpu, over, rows * batch)

    def prefill(model: Shape, length: int, over: int) -> float:
        done = model.products(length * batch, length / 2) / over
        chunks = -(-length * batch // ASSUMED.chunk)
        waits = _sums(model, gpu, over, ASSUMED.chunk) * chunks
        return done / (gpu.products * ASSUMED.utilisation) + waits

    def look(model: Shape) -> float:
        """The vision tower is not split: every GPU looks at the whole video."""
        done = 2 * model.vision * ASSUMED.patches * tokens * batch
        return done / (gpu.products * ASSUMED.utilisation)

    return Plan(
        gpu,
        count,
        way,
        tokens,
        batch,
        held,
        look(target) + look(draft),
        prefill(target, tokens, split) + prefill(draft, kept, 1),
        forward(target, 1, tokens, split),
        forward(draft, 1, kept, 1),
        forward(target, ASSUMED.reported.nodes + 1, tokens, split),
    )


def _sums(model: Shape, gpu: Gpu, over: int, rows: int) -> float:
    """Seconds of two all-reduces a layer, after attention and after the MLP."""
    if over == 1:
        return 0.0
    sent = 2 * (over - 1) / over * rows * model.hidden * SIZE
    return 2 * model.counted.layers * (gpu.wait + sent / gpu.link)


def plans(
    target: Shape, draft: Shape, tokens: int, batch: int = 1, ways: Sequence[Way] = ("TP", "PP")
) -> Iterator[Plan]:
    """What fits: of each GPU the fewest that do, and under TP, which gains by it, more too."""
    for gpu in GPUS:
        for way in ways:
            fitting = [
                found
                for count in COUNTS
                if target.kv_heads % count == 0 and not (way == "PP" and count == 1)
                if (found := plan(target, draft, gpu, count, way, tokens, batch)).fits
            ]
            yield from fitting if way == "TP" else fitting[:1]


# -- the page ----------------------------------------------------------------------------------

TARGET, DRAFT = "Qwen2.5-VL-72B", "Qwen2.5-VL-7B"
DRAFTS = (DRAFT, "Qwen2.5-VL-3B")  # of the same acceptance, which nobody reported of the second
LENGTHS = (12_288, 100_000)
BATCHES = (1, 8)
HEADS = (
    *("GPUs", "way", "held by the fullest", "vision + prefill", "T(1)", "T(26)", "draft's step"),
    *("decoding, plain", "drafted", "a video", "1,000 videos"),
)


def page() -> str:
    """The tables of docs/results/scaling.md, in Markdown."""
    target, draft = shape(TARGET), shape(DRAFT)
    parts = [_weights((target, draft)), _gpus()]
    for tokens in LENGTHS:
        for batch in BATCHES:
            together = "one video at a time" if batch == 1 else f"{batch} videos together"
            found = list(plans(target, draft, tokens, batch))
            parts.append(
                f"### {tokens:,} visual tokens, {together}\n\n"
                + _table(HEADS, [_row(each) for each in found])
                + _none([gpu.name for gpu in GPUS if all(gpu != each.gpu for each in found)])
            )
    parts.append(_drafts(target, [shape(name) for name in DRAFTS]))
    return "\n\n".join(parts)


def _drafts(target: Shape, drafts: Sequence[Shape]) -> str:
    """What drafting gains where GPUs share the target and each has the whole draft."""
    gpu, tokens, counts = GPUS[1], LENGTHS[0], COUNTS[1:]
    gains = {
        draft.name: [plan(target, draft, gpu, count, "TP", tokens).gain for count in counts]
        for draft in drafts
    }
    return (
        f"### Decoding against plain decoding, {tokens:,} visual tokens, {gpu.name} under TP\n\n"
    ) + _table(
        ("draft", *(f"{count} GPUs" for count in counts)),
        [(name, *(f"{each:.2f}x" for each in own)) for name, own in gains.items()],
    )


def _weights(shapes: Sequence[Shape]) -> str:
    heads = (
        "model",
        "weights",
        "of these the vision tower's",
        *(f"keys at {n:,}" for n in LENGTHS),
    )
    return _table(
        heads,
        [
            (
                each.name,
                _gb(each.counted.parameters * SIZE),
                _gb(each.vision * SIZE),
                *(_gb(each.counted.kv * tokens * SIZE) for tokens in LENGTHS),
            )
            for each in shapes
        ],
    )


def _gpus() -> str:
    heads = ("GPU", "memory", "TB/s", "bf16 TFLOP/s", "link GB/s", "*wait*", "*$ an hour*")
    return _table(
        heads,
        [
            (
                gpu.name,
                _gb(gpu.memory, 0),
                f"{gpu.bandwidth / 1e12:.2f}",
                f"{gpu.products / 1e12:.0f}",
                f"{gpu.link / GB:.0f}",
                f"{gpu.wait * 1e6:.0f} us",
                f"{gpu.dollars:.2f}",
            )
            for gpu in GPUS
        ],
    )


def _row(each: Plan) -> tuple[str, ...]:
    return (
        f"{each.count} x {each.gpu.name}",
        each.way,
        _gb(each.held),
        f"{each.look + each.read:.1f} s",
        f"{each.once * 1e3:.1f} ms",
        f"{each.verify * 1e3:.1f} ms",
        f"{each.step * 1e3:.1f} ms",
        f"{each.plain:.1f} s",
        f"{each.drafted:.1f} s ({each.gain:.2f}x)",
        f"{each.seconds / each.batch:.1f} s",
        f"${each.dollars():.2f}",
    )


def _none(names: Sequence[str]) -> str:
    return f"\n\nDoes not fit on up to {COUNTS[-1]}: {', '.join(names)}." if names else ""


def _gb(count: float, digits: int = 1) -> str:
    return f"{count / GB:.{digits}f} GB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["-"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
