"""The sections of an acceptance, in their order. Each writes its lines as it goes."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor

import saccade
from lab.acceptance.models import Letters, Models, caption, prepared, small_config
from lab.acceptance.report import Report
from lab.hardware.gpu import inputs
from lab.hardware.imposed import ImposedAcceptance, imposed
from saccade.bench.peers import hf
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import Tree, chain
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes import cost_measurement
from saccade.inputs import Loaded
from saccade.inputs.footprint import footprint
from saccade.methods import SYSTEMS, resolve
from saccade.model.backbone import Backbone
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.memory import GIB
from saccade.model.session import Session

EXACT_METHODS = ("sd", "sd/shape=chain-3", "lookup", "auto")
ACCEPTANCE = 0.8  # the rate imposed on every drafted token
WHOLE_METHODS = ("ar", "sd/shape=chain-4", "specvlm/shape=chain-4", "auto")
KEPT_SHARE = 0.1  # of a prompt, which a small draft reads
REPEATS = 12  # of a timed step
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
"""How far logits of captured and ordinary forwards may be apart, as a share of the largest."""
BELIEF = 1.25  # how far a believed price may be from a real step, as a factor
WEIGHTS = 1.15  # how much of its weights' bytes a model may hold, as a factor


@dataclass(frozen=True)
class Sizes:
    """How much is asked of a machine."""

    contexts: tuple[int, ...]  # visual tokens
    rows: tuple[int, ...]
    tokens: int  # of an answer that is compared
    long_tokens: int  # of an answer that is timed
    prompt: int  # visual tokens of the prompt of answers that are compared


FULL = Sizes((2048, 12288, 20480), (1, 2, 4, 8, 16, 26, 32, 64), 48, 192, 512)
SMALL = Sizes((64, 192, 320), (1, 2, 4, 8, 16, 26, 32, 64), 16, 12, 64)


class Acceptance:
    """One run over one device."""

    def __init__(
        self, report: Report, models: Models, sizes: Sizes, methods: Sequence[str] = ()
    ) -> None:
        self.report, self.models, self.sizes = report, models, sizes
        chosen = tuple(methods) or tuple(SYSTEMS)
        # Methods with a process of their own come last: it may take long to start.
        self.methods = sorted(chosen, key=lambda name: resolve(name).drafts_beside_target)
        self.device = models.device
        self.is_gpu = self.device.type == "cuda"
        self._steps: dict[tuple[str, int, int], float] = {}  # milliseconds of captured ones

    # -- the machine ---------------------------------------------------------------------------

    def facts(self) -> None:
        """Versions, the device, and the bandwidth of its memory."""
        name = torch.cuda.get_device_name(self.device) if self.is_gpu else platform.processor()
        self.report.note(
            saccade=saccade.__version__,
            torch=torch.__version__,
            transformers=transformers.__version__,
            python=platform.python_version(),
            device=str(self.device),
            name=name,
            devices=torch.cuda.device_count() if self.is_gpu else 0,
            small=self.models.small,
        )
        count = 2**20 if self.models.small else 2**31
        source = torch.zeros(count, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        took = self._median(lambda: target.copy_(source))
        self.report.note(copied_bytes_per_second=2 * count / took)

    # -- right answers -------------------------------------------------------------------------

    def right_answers(self) -> None:
        """Every method against ``generate`` in float32."""
        target, draft = self.models.correct(torch.float32)
        prompt = self._short_prompt()
        expected = self._generated(target, prompt)
        varied = len(set(expected))
        self.report.note(generated=len(expected), different=varied)
        self.report.check(varied > len(expected) // 4, "the text repeats itself and proves little")
        for method in self.report.cases(self.methods):
            self._compare(method, target, draft, prompt, expected)
        if torch.cuda.is_available() and torch.cuda.device_count() > 1:
            other = Backbone(draft.model.to("cuda:1"))
            for method in self.report.cases(("ar", "sd"), "two GPUs"):
                self._compare(method, target, other, prompt, expected, on="two GPUs")
            draft.model.to(self.device)

    def _compare(
        self,
        method: str,
        target: Backbone,
        draft: Backbone,
        prompt: Inputs,
        expected: tuple[int, ...],
        **facts: Any,
    ) -> None:
        """Two answers by a method, of which the second must capture nothing."""
        captures = []
        for _ in range(2):
            with counted_graphs() as graphs:
                result = self._run(target, prompt, draft, method, self.sizes.tokens)
            captures.append(graphs["captures"])
            same = result.ids == expected
            self.report.check(same, f"{method} differs from generate in float32")
            why = result.fallback_reason
            self.report.check(why is None, f"{method} fell back: {why}")
        self.report.note(
            method=method,
            same=same,
            tokens=len(result.ids),
            rounds=len(result.rounds),
            captures=captures,
            replays=graphs["replays"],
            decode_s=result.timings.decode,
            warnings=list(result.warnings),
            **facts,
        )
        self._check_captures(resolve(method), captures[1], method)
        if self.is_gpu:
            self.report.check(graphs["replays"] > 0, f"{method} ran no captured step")

    def exact_answers(self) -> None:
        """``exact`` in bfloat16: drafted answers are plain decoding's, bit for bit."""
        target, draft = self.models.correct(torch.bfloat16)
        prompt = self._short_prompt()
        count = self.sizes.tokens
        plain = self._run(target, prompt, None, "ar", count, exact=True)
        self.report.note(method="ar", tokens=len(plain.ids), decode_s=plain.timings.decode)
        for method in self.report.cases(EXACT_METHODS):
            with counted_graphs() as graphs:
                result = self._run(target, prompt, draft, method, count, exact=True)
            same = result.ids == plain.ids
            self.report.check(same, f"exact {method} differs from exact plain decoding")
            self.report.note(
                method=method,
                same=same,
                decode_s=result.timings.decode,
                plain_decode_s=plain.timings.decode,
                **graphs,
            )

    # -- steps ---------------------------------------------------------------------------------

    def steps(self) -> None:
        """Captured forwards against ordinary ones, by rows and by length."""
        for name, share in (("target", 1.0), ("draft", KEPT_SHARE)):
            model = self._built(name)
            cases = [
                (max(16, int(context * share)), rows)
                for context in self.sizes.contexts
                for rows in self.sizes.rows
                if name == "target" or rows <= 8
            ]
            lengths: dict[int, tuple[Session, Session]] = {}
            for context, rows in self.report.cases(cases, name):
                if context not in lengths:
                    lengths = {context: _two_sessions(model, context, 4 * max(self.sizes.rows))}
                self._step(name, model, context, rows, *lengths[context])

    def _step(
        self,
        name: str,
        model: Backbone,
        context: int,
        rows: int,
        captured: Session,
        ordinary: Session,
    ) -> None:
        """One size: whether its logits are right, and what it takes."""
        with counted_graphs() as graphs:
            first = Clock(self.device)
            _score(captured, context, rows, 0)
            capture_new_sizes()
            first_ms = first.since() * 1e3
            apart, largest, changes = 0.0, 0.0, 0.0
            before: Tensor | None = None
            for turn in range(3):
                mine, theirs = (
                    _score(session, context, rows, turn) for session in (captured, ordinary)
                )
                apart = max(apart, float((mine - theirs).abs().max()))
                largest = max(largest, float(theirs.abs().max()))
                if before is not None:
                    changes = max(changes, float((mine - before).abs().max()))
                before = mine
        share = apart / max(largest, 1e-9)
        what = f"{rows} rows of the {name} over {context} keys"
        allowed = TOLERANCE[model.dtype]
        self.report.check(share <= allowed, f"{what}: captured logits are {share:.2g} apart")
        self.report.check(changes > 0, f"{what}: captured logits do not follow their input")
        if self.is_gpu:
            self.report.check(graphs["replays"] > 0, f"{what}: no captured step ran")
        times = {
            kind: self._median(lambda session=session: _score(session, context, rows, 5))
            for kind, session in (("captured", captured), ("ordinary", ordinary))
        }
        self._steps[name, context, rows] = times["captured"] * 1e3
        size = model.dtype.itemsize
        self.report.note(
            model=name,
            context=context,
            rows=rows,
            captured_ms=times["captured"] * 1e3,
            ordinary_ms=times["ordinary"] * 1e3,
            first_ms=first_ms,
            bytes=footprint(model.model.config).step(size, context, size),
            apart=share,
            captures=graphs["captures"],
        )
        self.report.check_time(
            times["captured"] <= times["ordinary"], f"{what}: captured is slower than ordinary"
        )

    def kernels(self) -> None:
        """Kernels, waits and copies of a step, by torch's profiler; real GPUs only."""
        if not self.is_gpu or self.models.small:
            self.report.note(skipped=["kernels"], why="kernels are counted on a real GPU")
            return
        from torch.profiler import ProfilerActivity, profile

        for name, share in self.report.cases((("target", 1.0), ("draft", KEPT_SHARE))):
            model, context = self._built(name), int(self.sizes.contexts[0] * share)
            for kind, session in zip(
                ("captured", "ordinary"), _two_sessions(model, context, 64), strict=True
            ):
                _score(session, context, 1, 0)
                capture_new_sizes()
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                    _score(session, context, 1, 1)
                self.report.note(model=name, kind=kind, **_kernels(profiled))

    def believed_costs(self) -> None:
        """What ``auto`` decides by, against steps as they are."""
        target, draft = self._built("target"), self._built("draft")
        for context in self.report.cases(self.sizes.contexts[:2]):
            began, bucket = time.perf_counter(), cost_measurement.context_bucket(context)
            kept = cost_measurement.context_bucket(int(KEPT_SHARE * bucket))
            with counted_graphs() as graphs:
                found = cost_measurement.measure_costs(
                    target, draft, context=bucket, draft_context=kept
                )
            took = time.perf_counter() - began
            steps = {
                name: self._decode_step(model, length)
                for name, model, length in (("target", target, bucket), ("draft", draft, kept))
            }
            believed = {"target": found.verify(1), "draft": found.draft}
            self.report.note(
                context=bucket,
                rows=list(found.rows),
                target_ms=[seconds * 1e3 for seconds in found.target],
                draft_ms=found.draft * 1e3,
                real_target_ms=steps["target"] * 1e3,
                real_draft_ms=steps["draft"] * 1e3,
                measured_in_s=took,
                **graphs,
            )
            for name, seconds in steps.items():
                ratio = believed[name] / seconds
                self.report.check_time(
                    1 / BELIEF <= ratio <= BELIEF,
                    f"a step of the {name} is believed to cost {ratio:.2f} times what it does",
                )

    def _decode_step(self, model: Backbone, context: int) -> float:
        """Seconds of a step of plain decoding, token after token, as a method takes it."""
        _, first = _two_sessions(model, context, 128, kinds=(False, True))
        first.requests[0].pending, first.requests[0].tree = [1], Tree()
        took = []
        for _ in range(REPEATS + 4):
            clock = Clock(self.device)
            (scores,) = first.score({0: Tree()}).values()
            (token,) = scores.top(-1, 1)
            first.commit({0: [token]})
            took.append(clock.since())
            capture_new_sizes()
        return median(took[4:])

    # -- reading and whole answers -------------------------------------------------------------

    def prefill(self) -> None:
        """Seconds of each stage of reading a prompt, and the memory it takes."""
        target = self._built("target")
        for context in self.report.cases(self.sizes.contexts):
            prompt = prepared(inputs(self.models.target_config(), context), target)
            for turn in range(2):
                self._forget_peak()
                clock = Clock(self.device)
                (read,) = target.prompts(prompt)
                vision = clock.lap()
                Session(target, [Sampling()]).prefill([read])
                plain = clock.lap()
                Session(target, [Sampling()]).prefill([read], record=True)
                recorded = clock.lap()
                if self.models.small and turn == 0:
                    break
            self.report.note(
                tokens=len(read),
                vision_s=vision,
                decoder_s=plain,
                decoder_with_attention_recorded_s=recorded,
                **self._memory(),
            )

    def whole_answers(self) -> None:
        """Answers of the large pair at imposed acceptance, beside ``generate``."""
        target, draft = self._built("target"), self._built("draft")
        for context in self.report.cases(self.sizes.contexts):
            prompt = prepared(inputs(self.models.target_config(), context), target)
            speeds: dict[str, float] = {}
            for method in self.report.cases(WHOLE_METHODS, f"{context} tokens"):
                speeds[method] = self._whole(target, draft, prompt, method, context)
            for _ in self.report.cases(["transformers"], f"{context} tokens"):
                speeds["transformers"] = self._peer(target, prompt, "transformers", context)
            plain = speeds.get("ar")
            if plain:
                over = {name: round(speed / plain, 3) for name, speed in speeds.items()}
                self.report.note(context=context, acceptance=ACCEPTANCE, over_ar=over)

    def _whole(
        self, target: Backbone, draft: Backbone, prompt: Inputs, method: str, context: int
    ) -> float:
        """Tokens a second of the second of two answers."""
        recipe = _with_imposed_acceptance(resolve(method))
        captures = []
        for _ in range(2):
            self._forget_peak()
            with counted_graphs() as graphs:
                result = self._run(
                    target, prompt, draft, recipe, self.sizes.long_tokens, eos_token_id=-1
                )
            captures.append(graphs["captures"])
        speed = (len(result.ids) - 1) / result.timings.decode
        self.report.note(
            context=context,
            method=method,
            tokens_per_second=speed,
            tokens=len(result.ids),
            rounds=len(result.rounds),
            first_token_s=result.timings.first_token,
            total_s=result.timings.total,
            captures=captures,
            replays=graphs["replays"],
            **self._memory(),
        )
        why = result.fallback_reason
        self.report.check(why is None, f"{method} fell back: {why}")
        self._check_captures(recipe, captures[1], f"{method} at {context} tokens")
        return speed

    def _check_captures(self, recipe: Recipe, captures: int, what: str) -> None:
        """A second answer like the first captures nothing. A shape that learns from answers may
        come to a size it had not used."""
        learns = recipe.drafts and recipe.needs_costs
        self.report.check(learns or captures == 0, f"{what} captured {captures} in a second answer")

    def _peer(
        self, target: Backbone, prompt: Inputs, name: str, context: int, **settings: Any
    ) -> float:
        """Tokens a second of transformers' ``generate`` on the same weights."""
        asked: dict[str, Any] = {"max_new_tokens": self.sizes.long_tokens, "do_sample": False}
        asked |= {"eos_token_id": None, **settings}
        loaded = Loaded("random", target, None)
        runs = [hf(loaded, None, prompt, asked) for _ in range(2 if settings else 1)]
        speed = runs[-1].counted / runs[-1].decode
        self.report.note(
            context=context,
            method=name,
            tokens_per_second=speed,
            first_token_s=runs[-1].first,
            first_run_s=runs[0].total,
        )
        return speed

    def compiled_peer(self) -> None:
        """``generate`` with its static cache, which transformers compiles on a GPU. The last part:
        compiling may take long."""
        target = self._built("target")
        compiles = self.is_gpu and not self.models.small
        settings = {"cache_implementation": "static", "disable_compile": not compiles}
        for context in self.report.cases(self.sizes.contexts[1:2]):
            prompt = prepared(inputs(self.models.target_config(), context), target)
            self._peer(target, prompt, "transformers, static cache", context, **settings)

    # -- parts of the above --------------------------------------------------------------------

    def _built(self, name: str) -> Backbone:
        """The target or the draft of the large pair; says what making it took."""
        already = name in vars(self.models)
        self._forget_peak()
        before = self._allocated()
        clock = Clock(self.device)
        model: Backbone = getattr(self.models, name)
        if already:
            return model
        took = clock.since()
        held = self._allocated() - before
        weights = footprint(model.model.config).weights(model.dtype.itemsize)
        self.report.note(
            built=name,
            seconds=took,
            weights_gib=weights / GIB,
            held_gib=held / GIB,
            captures_steps=model.fused is not None,
            **self._memory(),
        )
        if self.is_gpu and not self.models.small:
            ratio = held / weights
            self.report.check(
                ratio <= WEIGHTS, f"the {name} holds {ratio:.2f} times the bytes of its weights"
            )
        return model

    def _short_prompt(self) -> Inputs:
        return inputs(small_config(self.models.small), self.sizes.prompt)

    def _generated(self, target: Backbone, prompt: Inputs) -> tuple[int, ...]:
        asked = {"max_new_tokens": self.sizes.tokens, "do_sample": False}
        return hf(Loaded("random", target, None), None, prompt, asked).ids

    def _run(
        self,
        target: Backbone,
        prompt: Inputs,
        draft: Backbone | None,
        method: str | Recipe,
        tokens: int,
        **settings: Any,
    ) -> saccade.Result:
        return saccade.run(
            target,
            prepared(prompt, target),
            draft=draft,
            method=method,
            tokenizer=Letters(),
            captioner=caption,
            max_new_tokens=tokens,
            do_sample=False,
            **settings,
        )

    def _median(self, work: Callable[[], object]) -> float:
        """Seconds of work, the middle of several after two that warm up."""
        repeats = 3 if self.models.small else REPEATS
        took = []
        for _ in range(repeats + 2):
            clock = Clock(self.device)
            work()
            took.append(clock.since())
        return median(took[2:])

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    def _forget_peak(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _memory(self) -> dict[str, float]:
        """GiB of the device's memory: in use, at most since the peak was forgotten, reserved."""
        if not self.is_gpu:
            return {}
        return {
            "allocated_gib": torch.cuda.memory_allocated(self.device) / GIB,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            "reserved_gib": torch.cuda.memory_reserved(self.device) / GIB,
        }

    def all(self) -> dict[str, tuple[float, Callable[[], None]]]:
        """Every section by name: its share of the time, and its work."""
        return {
            "facts": (0.02, self.facts),
            "right answers": (0.22, self.right_answers),
            "exact answers": (0.06, self.exact_answers),
            "steps": (0.20, self.steps),
            "kernels": (0.04, self.kernels),
            "believed costs": (0.08, self.believed_costs),
            "prefill": (0.08, self.prefill),
            "whole answers": (0.20, self.whole_answers),
            "compiled peer": (0.10, self.compiled_peer),
        }

    def run(self, sections: Sequence[str] = ()) -> None:
        """Runs the sections; time that one leaves over goes to those after it."""
        chosen = {name: own for name, own in self.all().items() if not sections or name in sections}
        total, used = sum(share for share, _ in chosen.values()), 0.0
        for name, (share, work) in chosen.items():
            used += share
            with torch.no_grad():
                self.report.run(name, used / total, work)


@contextmanager
def counted_graphs() -> Iterator[Counter[str]]:
    """Counts captures and replays of CUDA graphs in this process."""
    counts: Counter[str] = Counter(captures=0, replays=0)
    with ExitStack() as stack:
        if torch.cuda.is_available():
            for name, kind in (("capture_begin", "captures"), ("replay", "replays")):
                own = getattr(torch.cuda.CUDAGraph, name)

                def count(*args: Any, own: Any = own, kind: str = kind, **kwargs: Any) -> Any:
                    counts[kind] += 1
                    return own(*args, **kwargs)

                stack.enter_context(patch.object(torch.cuda.CUDAGraph, name, count))
        yield counts


def _with_imposed_acceptance(recipe: Recipe) -> Recipe:
    """The recipe with verdicts as asked; one without drafts as it is."""
    if not recipe.drafts or recipe.drafts_beside_target:
        return recipe
    return imposed(recipe, ImposedAcceptance(rates=(ACCEPTANCE,)))


def _two_sessions(
    model: Backbone, context: int, room: int, kinds: tuple[bool, bool] = (True, False)
) -> tuple[Session, Session]:
    """Sessions of a captured and an ordinary kind over the same random keys."""
    sessions = [
        cost_measurement.filled_session(model, context, 1, room, cuda_graphs=kind) for kind in kinds
    ]
    first, second = (session.requests[0].cache for session in sessions)
    for mine, theirs in zip(
        (*first.keys, *first.values), (*second.keys, *second.values), strict=True
    ):
        mine[:, :context].normal_()
        theirs[:, :context].copy_(mine[:, :context])
    return sessions[0], sessions[1]


def _score(session: Session, context: int, rows: int, turn: int) -> Tensor:
    """Logits of a chain of tokens that depend on ``turn``, over the same keys each time."""
    request = session.requests[0]
    request.pending, request.tree, request.rows = [(turn * 31 + 1) % 97], Tree(), []
    request.cache.length = context
    session.score({0: chain([(turn * 7 + place) % 89 for place in range(rows - 1)])})
    assert request.root is not None
    return torch.stack([request.root, *request.rows]).float()


def _kernels(profiled: Any) -> dict[str, Any]:
    """What a profile says of kernels, waits and copies."""
    events = profiled.key_averages()
    kernels = [each for each in events if str(each.device_type).endswith("CUDA")]
    kernels.sort(key=lambda each: -each.self_device_time_total)
    return {
        "kernels": sum(each.count for each in kernels),
        "kernel_ms": sum(each.self_device_time_total for each in kernels) / 1e3,
        "waits": sum(each.count for each in events if "Synchronize" in each.key),
        "copies": sum(each.count for each in events if each.key == "cudaMemcpyAsync"),
        "longest": [
            f"{each.key[:60]} x{each.count}: {each.self_device_time_total:.0f} us"
            for each in kernels[:10]
        ],
    }
