"""Predicts what a large pair needs and costs on several GPUs, by arithmetic on published numbers.

``python -m lab scaling`` prints the tables of docs/results/scaling.md. Nothing here was timed. A
forward of decoding takes as long as the slower of two things: reading its bytes (every weight it
passes through and every cached key, once) and doing its operations. A prefill and a vision tower
take as long as their operations, at an assumed utilisation. Under tensor parallelism a forward of
the target also waits for two all-reduces in every layer. ``ASSUMED`` and ``GPUS`` have what is
assumed.

T(n) is the seconds of a forward of the target that decodes n tokens of a request at once: 1 in
plain decoding, and the nodes of a tree with the token before them in verification.
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

BYTES_PER_GB = 1e9
BYTES_PER_NUMBER = 2  # In bfloat16.
Way = Literal["TP", "PP"]
"""TP splits every layer over all GPUs (``--tp``). PP gives each GPU some of the layers, which then
work in turn (``--device-map auto``)."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet, with two guesses: a small all-reduce's time, and the price."""

    name: str
    memory: float  # Bytes.
    bandwidth: float  # Bytes per second.
    operations: float  # Dense bf16 operations per second; a product with its sum counts as two.
    link: float  # Bytes per second to the other GPUs, one way.
    all_reduce_seconds: float  # Of an all-reduce without data.
    dollars_per_hour: float


GPUS = (
    Gpu("H100 80 GB", 80 * BYTES_PER_GB, 3.35e12, 989e12, 450e9, 12e-6, 3.00),
    Gpu("H200 141 GB", 141 * BYTES_PER_GB, 4.8e12, 989e12, 450e9, 12e-6, 3.80),
    Gpu("A100 80 GB", 80 * BYTES_PER_GB, 2.04e12, 312e12, 300e9, 15e-6, 1.80),
    Gpu("L40S 48 GB", 48 * BYTES_PER_GB, 0.864e12, 362e12, 32e9, 35e-6, 1.20),
)
GPU_COUNTS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Assumed:
    """What this arithmetic needs and no data sheet has."""

    answer_tokens: int = 256
    prefill_utilisation: float = 0.5  # The share of a GPU's operations that a prefill achieves.
    prefill_chunk: int = 2048  # Tokens of one forward of a prefill.
    patches_per_visual_token: int = 4  # In the vision tower.
    reported: Reported = REPORTED[1]  # SpecVLM's acceptance, of a draft that sees a tenth.


ASSUMED = Assumed()


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that this arithmetic uses."""

    name: str
    footprint: Footprint
    hidden: int
    heads: int
    kv_heads: int
    head_width: int
    vision_parameters: int  # Weights that are not the language model's.

    @property
    def split_parameters(self) -> int:
        """Weights that tensor parallelism splits, embeddings included."""
        return self.footprint.parameters - self.vision_parameters

    def operations(self, rows: float, context: float) -> float:
        """Returns the operations of a forward of ``rows`` tokens over ``context`` keys each."""
        # Queries times keys, and weights times values: each is a product and a sum per number.
        attention = 4 * self.footprint.layers * self.heads * self.head_width * context
        return rows * (2 * self.footprint.weights_per_token + attention)


@dataclass(frozen=True)
class Plan:
    """One arrangement of a pair: what the fullest GPU holds, and the seconds of one batch."""

    gpu: Gpu
    count: int  # Of GPUs.
    way: Way
    tokens: int  # Visual tokens of each video.
    batch: int  # Videos that are answered together.
    fullest_gpu_bytes: float
    vision_seconds: float  # Of both vision towers.
    prefill_seconds: float  # Of both prefills.
    single_row_seconds: float  # T(1) of the target.
    draft_step_seconds: float
    verify_seconds: float  # T(n) of the target, for the n rows of a tree.

    @property
    def fits(self) -> bool:
        return self.fullest_gpu_bytes <= self.gpu.memory * (1 - SPARE_SHARE)

    @property
    def plain_seconds(self) -> float:
        """Seconds of decoding an answer plainly."""
        return ASSUMED.answer_tokens * self.single_row_seconds

    @property
    def drafted_seconds(self) -> float:
        """Seconds of decoding an answer with drafts, at the reported acceptance.

        A level of the draft's tree counts as one draft step of a single token.
        """
        reported = ASSUMED.reported
        round_seconds = reported.levels * self.draft_step_seconds + self.verify_seconds
        return ASSUMED.answer_tokens / reported.tau * round_seconds

    @property
    def decoding_speedup(self) -> float:
        return self.plain_seconds / self.drafted_seconds

    @property
    def batch_seconds(self) -> float:
        """Seconds of a batch from its pixels to its last token.

        Answers are decoded with drafts only where that is faster. The draft's vision tower and
        prefill count in any case.
        """
        decoding = min(self.plain_seconds, self.drafted_seconds)
        return self.vision_seconds + self.prefill_seconds + decoding

    def dollars(self, videos: int = 1000) -> float:
        """Returns what so many videos cost."""
        batch_hours = self.batch_seconds / 3600
        return batch_hours * self.gpu.dollars_per_hour * self.count * videos / self.batch


def published_shape(name: str) -> Shape:
    """Returns the sizes of a published checkpoint, from its config alone."""
    config: Any = CONFIGS[name]()
    text = architectures.text_config(config)
    size = footprint(config)
    embedding = text.vocab_size * text.hidden_size
    tied = config.tie_word_embeddings
    return Shape(
        name,
        size,
        text.hidden_size,
        text.num_attention_heads,
        text.num_key_value_heads,
        text.hidden_size // text.num_attention_heads,
        size.parameters - size.weights_per_token - (0 if tied else embedding),
    )


def predict_plan(
    target: Shape, draft: Shape, gpu: Gpu, count: int, way: Way, tokens: int, batch: int = 1
) -> Plan:
    """Predicts what a pair needs and costs on ``count`` GPUs, for ``batch`` videos together.

    A video has ``tokens`` visual tokens. The whole draft is on every GPU under TP, and on the first
    one under PP.
    """
    draft_tokens = int(tokens * ASSUMED.reported.keep)
    split = count if way == "TP" else 1  # GPUs that work on one forward at the same time.
    answer_tokens = ASSUMED.answer_tokens
    target_keys = target.footprint.kv_numbers_per_token * (tokens + answer_tokens) * batch
    draft_keys = draft.footprint.kv_numbers_per_token * (draft_tokens + answer_tokens) * batch
    # The numbers that a chunk of the prefill holds meanwhile: a rough guess.
    activations = 2 * ASSUMED.prefill_chunk * 8 * target.hidden
    numbers_on_fullest_gpu = (
        (target.split_parameters + target_keys) / count
        + target.vision_parameters
        + draft.footprint.parameters
        + draft_keys
        + activations
    )

    def forward(model: Shape, rows: int, context: int, gpus: int) -> float:
        """Returns the seconds of decoding ``rows`` tokens of every request at once.

        ``gpus`` is the number of GPUs that work on the forward at the same time.
        """
        read_bytes = (
            model.footprint.bytes_read_per_token(
                BYTES_PER_NUMBER, context * batch, BYTES_PER_NUMBER
            )
            / gpus
        )
        operations = model.operations(rows * batch, context) / gpus
        without_waits = max(read_bytes / gpu.bandwidth, operations / gpu.operations)
        return without_waits + _all_reduce_seconds(model, gpu, gpus, rows * batch)

    def prefill(model: Shape, length: int, gpus: int) -> float:
        """Returns the seconds of the prefill of ``length`` tokens of every request."""
        # A token attends to those before it, which are half of all tokens on average.
        operations = model.operations(length * batch, length / 2) / gpus
        chunks = -(-length * batch // ASSUMED.prefill_chunk)  # Rounded up.
        waits = _all_reduce_seconds(model, gpu, gpus, ASSUMED.prefill_chunk) * chunks
        return operations / (gpu.operations * ASSUMED.prefill_utilisation) + waits

    def vision(model: Shape) -> float:
        """Returns the seconds of the vision tower, which is not split: every GPU runs all of it."""
        patches = ASSUMED.patches_per_visual_token * tokens * batch
        operations = 2 * model.vision_parameters * patches
        return operations / (gpu.operations * ASSUMED.prefill_utilisation)

    return Plan(
        gpu,
        count,
        way,
        tokens,
        batch,
        numbers_on_fullest_gpu * BYTES_PER_NUMBER,
        vision(target) + vision(draft),
        prefill(target, tokens, split) + prefill(draft, draft_tokens, 1),
        forward(target, 1, tokens, split),
        forward(draft, 1, draft_tokens, 1),
        forward(target, ASSUMED.reported.nodes + 1, tokens, split),
    )


def _all_reduce_seconds(model: Shape, gpu: Gpu, gpus: int, rows: int) -> float:
    """Returns the seconds of two all-reduces in every layer: after attention and after the MLP.

    A forward of ``rows`` tokens is split over ``gpus`` GPUs.
    """
    if gpus == 1:
        return 0.0
    # In a ring, a GPU sends its part of the data to the others, once to add and once to share.
    sent = 2 * (gpus - 1) / gpus * rows * model.hidden * BYTES_PER_NUMBER
    return 2 * model.footprint.layers * (gpu.all_reduce_seconds + sent / gpu.link)


def fitting_plans(
    target: Shape, draft: Shape, tokens: int, batch: int = 1, ways: Sequence[Way] = ("TP", "PP")
) -> Iterator[Plan]:
    """Yields the plans that fit into memory, for every kind of GPU.

    Under PP that is the smallest number of GPUs that fits. Under TP these are all numbers that fit,
    because a forward gets faster with more GPUs.
    """
    for gpu in GPUS:
        for way in ways:
            # TP cannot split a KV head over GPUs, and PP is given the same numbers of GPUs. On one
            # GPU, PP would be the same as TP.
            counts = [
                count
                for count in GPU_COUNTS
                if target.kv_heads % count == 0 and not (way == "PP" and count == 1)
            ]
            plans = [
                predict_plan(target, draft, gpu, count, way, tokens, batch) for count in counts
            ]
            fitting = [plan for plan in plans if plan.fits]
            yield from fitting if way == "TP" else fitting[:1]


# -- The page ------------------------------------------------------------------------------------

TARGET, DRAFT = "Qwen2.5-VL-72B", "Qwen2.5-VL-7B"
# No acceptance of the second draft is published, so it is given that of the first one.
DRAFTS = (DRAFT, "Qwen2.5-VL-3B")
LENGTHS = (12_288, 100_000)  # Visual tokens of a video.
BATCHES = (1, 8)
# The heads of the tables' columns.
HEADS = (
    *("GPUs", "way", "held by the fullest", "vision + prefill", "T(1)", "T(26)", "draft's step"),
    *("decoding, plain", "drafted", "a video", "1,000 videos"),
)


def page() -> str:
    """Returns the tables of docs/results/scaling.md, in Markdown."""
    target = published_shape(TARGET)
    draft = published_shape(DRAFT)
    parts = [_weights_table((target, draft)), _gpu_table()]
    for tokens in LENGTHS:
        for batch in BATCHES:
            together = "one video at a time" if batch == 1 else f"{batch} videos together"
            plans = list(fitting_plans(target, draft, tokens, batch))
            too_small = [gpu.name for gpu in GPUS if all(gpu != plan.gpu for plan in plans)]
            parts.append(
                f"### {tokens:,} visual tokens, {together}\n\n"
                + _table(HEADS, [_plan_row(plan) for plan in plans])
                + _too_small_line(too_small)
            )
    parts.append(_draft_table(target, [published_shape(name) for name in DRAFTS]))
    return "\n\n".join(parts)


def _draft_table(target: Shape, drafts: Sequence[Shape]) -> str:
    """Returns what each draft gains where GPUs share the target and each has the whole draft."""
    gpu = GPUS[1]
    tokens = LENGTHS[0]
    counts = GPU_COUNTS[1:]
    speedups = {
        draft.name: [
            predict_plan(target, draft, gpu, count, "TP", tokens).decoding_speedup
            for count in counts
        ]
        for draft in drafts
    }
    return (
        f"### Decoding against plain decoding, {tokens:,} visual tokens, {gpu.name} under TP\n\n"
    ) + _table(
        ("draft", *(f"{count} GPUs" for count in counts)),
        [(name, *(f"{each:.2f}x" for each in own)) for name, own in speedups.items()],
    )


def _weights_table(shapes: Sequence[Shape]) -> str:
    heads = (
        "model",
        "weights",
        "of these the vision tower's",
        *(f"keys at {tokens:,}" for tokens in LENGTHS),
    )
    return _table(
        heads,
        [
            (
                shape.name,
                _in_gb(shape.footprint.parameters * BYTES_PER_NUMBER),
                _in_gb(shape.vision_parameters * BYTES_PER_NUMBER),
                *(
                    _in_gb(shape.footprint.kv_numbers_per_token * tokens * BYTES_PER_NUMBER)
                    for tokens in LENGTHS
                ),
            )
            for shape in shapes
        ],
    )


def _gpu_table() -> str:
    heads = ("GPU", "memory", "TB/s", "bf16 TFLOP/s", "link GB/s", "*wait*", "*$ an hour*")
    return _table(
        heads,
        [
            (
                gpu.name,
                _in_gb(gpu.memory, 0),
                f"{gpu.bandwidth / 1e12:.2f}",
                f"{gpu.operations / 1e12:.0f}",
                f"{gpu.link / BYTES_PER_GB:.0f}",
                f"{gpu.all_reduce_seconds * 1e6:.0f} us",
                f"{gpu.dollars_per_hour:.2f}",
            )
            for gpu in GPUS
        ],
    )


def _plan_row(plan: Plan) -> tuple[str, ...]:
    return (
        f"{plan.count} x {plan.gpu.name}",
        plan.way,
        _in_gb(plan.fullest_gpu_bytes),
        f"{plan.vision_seconds + plan.prefill_seconds:.1f} s",
        f"{plan.single_row_seconds * 1e3:.1f} ms",
        f"{plan.verify_seconds * 1e3:.1f} ms",
        f"{plan.draft_step_seconds * 1e3:.1f} ms",
        f"{plan.plain_seconds:.1f} s",
        f"{plan.drafted_seconds:.1f} s ({plan.decoding_speedup:.2f}x)",
        f"{plan.batch_seconds / plan.batch:.1f} s",
        f"${plan.dollars():.2f}",
    )


def _too_small_line(names: Sequence[str]) -> str:
    """Returns a line about the GPUs that no plan fits on, or nothing where there are none."""
    return f"\n\nDoes not fit on up to {GPU_COUNTS[-1]}: {', '.join(names)}." if names else ""


def _in_gb(count: float, digits: int = 1) -> str:
    return f"{count / BYTES_PER_GB:.{digits}f} GB"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [heads, ["-"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
