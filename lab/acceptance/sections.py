"""Runs the sections of an acceptance, which checks Saccade on a GPU (``python -m lab accept``).

Models have random weights and are made on the spot. A section checks or times one thing, such as
whether every method gives the answer of ``generate``, and writes lines of JSON as it goes. A step
is one forward of a few new tokens, its rows. A captured forward is one that is replayed as a CUDA
graph; an ordinary one is not. The small pair of models has few layers and is for right answers; the
large pair has a published size and is for speed. Where ``Models.small`` is set, both are tiny, to
try the command itself on a CPU.
"""

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
from lab.acceptance.models import (
    LetterTokenizer,
    Models,
    caption,
    set_confidence,
    small_config,
    with_model_dtype,
)
from lab.acceptance.report import Report
from lab.hardware.gpu import noise_video_inputs
from lab.hardware.imposed import ImposedAcceptance, impose_acceptance
from lab.hardware.layers import measure_step_variants
from saccade.bench.peers import hf
from saccade.core.prompt import Inputs
from saccade.core.sampling import Sampling
from saccade.core.timing import Clock
from saccade.core.tree import ROOT, Tree, chain
from saccade.drafting.drafters import HeadDrafter
from saccade.drafting.recipe import Recipe
from saccade.drafting.shapes import cost_measurement
from saccade.inputs import Loaded
from saccade.inputs.footprint import footprint
from saccade.methods import METHODS, resolve
from saccade.model.backbone import Backbone
from saccade.model.capture_choice import is_capturing_worthwhile
from saccade.model.cuda_graphs import capture_new_sizes
from saccade.model.memory import GIB
from saccade.model.session import Session

# Methods that are compared with plain decoding in bfloat16.
EXACT_METHODS = ("sd", "sd/shape=chain-3", "lookup", "auto")
# The chance that a drafted token is accepted if those before it were, imposed on timed answers.
ACCEPTANCE_RATE = 0.8
TIMED_METHODS = ("ar", "sd/shape=chain-4", "specvlm/shape=chain-4", "auto")
KEPT_SHARE = 0.1  # The share of a prompt over which a draft's steps are checked and timed.
STEP_REPEATS = 12  # How often the same work is timed, after warming up.
WARM_UP_STEPS = 4  # Steps of plain decoding before those that are timed.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""How far logits of captured and ordinary forwards may be apart, as a share of the largest one.

In bfloat16 the logits of any two kernels are apart by about .05 of the largest logit after 28
layers, by rounding alone.
"""
# Steps of rivals are timed over this many of the target's layers, because compiling all of them
# takes too long, and with these numbers of rows.
COMPILED_LAYERS = 4
COMPILED_ROWS = (1, 16)
# Sections that time what others made: transformers' ``generate``, and layers by ``torch.compile``.
RIVALS = frozenset({"compiled peer", "step variants"})
MAX_COST_ERROR = 1.25  # The largest factor between a step's assumed cost and its real one.
MAX_WEIGHT_OVERHEAD = 1.15  # The most memory a model may hold, as a factor of its weights' bytes.


@dataclass(frozen=True)
class Sizes:
    """The sizes of the work that an acceptance does."""

    contexts: tuple[int, ...]  # Visual tokens of prompts whose work is timed, or keys in a cache.
    rows: tuple[int, ...]  # Tokens that a step scores.
    tokens: int  # Of an answer that is compared.
    long_tokens: int  # Of an answer that is timed.
    prompt: int  # Visual tokens of the prompt whose answers are compared.


FULL = Sizes(
    contexts=(2048, 12288, 20480),
    rows=(1, 2, 4, 8, 16, 26, 32, 64),
    tokens=48,
    long_tokens=192,
    prompt=512,
)
SMALL = Sizes(
    contexts=(64, 192, 320), rows=(1, 2, 4, 8, 16, 26, 32, 64), tokens=16, long_tokens=12, prompt=64
)


class Acceptance:
    """The sections of one acceptance on one device.

    ``methods`` are those whose answers are checked, by default all.
    """

    def __init__(
        self, report: Report, models: Models, sizes: Sizes, methods: Sequence[str] = ()
    ) -> None:
        self.report, self.models, self.sizes = report, models, sizes
        chosen = tuple(methods) or tuple(METHODS)
        # Methods that draft in another process come last, because it may take long to start.
        self.methods = sorted(chosen, key=lambda name: resolve(name).drafts_beside_target)
        self.device = models.device
        self.is_gpu = self.device.type == "cuda"

    # -- the machine ---------------------------------------------------------------------------

    def report_facts(self) -> None:
        """Writes versions, the device, and the bandwidth of its memory."""
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
        seconds = self._median_seconds(lambda: target.copy_(source))
        self.report.note(copied_bytes_per_second=2 * count / seconds)

    # -- right answers -------------------------------------------------------------------------

    def check_answers(self) -> None:
        """Compares the answer of every method with that of ``generate`` in float32."""
        target, draft = self.models.small_pair(torch.float32)
        prompt = self._short_prompt()
        expected = self._generate(target, prompt)
        different = len(set(expected))
        self.report.note(generated=len(expected), different=different)
        # A random model may write one token over and over, and wrong code might do so too.
        varies = different > len(expected) // 4
        self.report.check(varies, "the text repeats itself and proves little")
        for method in self.report.cases(self.methods):
            with self.report.errors_as_failures(method):
                own_draft = draft
                if resolve(method).drafter is HeadDrafter:
                    own_draft = self.models.head(target)
                self._compare(method, target, own_draft, prompt, expected)
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
        """Answers by a method twice, and checks that both answers are ``generate``'s, ``expected``.

        The first answer captures the sizes of its forwards. The second must capture nothing
        (:meth:`_check_captures`). ``facts`` are added to the line that is written.
        """
        captures = []
        for _ in range(2):
            with count_graphs() as graphs:
                result = self._decode(target, prompt, draft, method, self.sizes.tokens)
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

    def check_exact_answers(self) -> None:
        """Compares drafted answers with plain decoding in bfloat16, both with ``exact``."""
        target, draft = self.models.small_pair(torch.bfloat16)
        prompt = self._short_prompt()
        count = self.sizes.tokens
        plain = self._decode(target, prompt, None, "ar", count, exact=True)
        self.report.note(method="ar", tokens=len(plain.ids), decode_s=plain.timings.decode)
        for method in self.report.cases(EXACT_METHODS):
            with count_graphs() as graphs:
                result = self._decode(target, prompt, draft, method, count, exact=True)
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

    def check_steps(self) -> None:
        """Compares captured forwards with ordinary ones, by rows and by context length."""
        for name, share in (("target", 1.0), ("draft", KEPT_SHARE)):
            model = self._model(name)
            cases = [
                (max(16, int(context * share)), rows)
                for context in self.sizes.contexts
                for rows in self.sizes.rows
                if name == "target" or rows <= 8  # A draft's steps have few rows.
            ]
            # Only the sessions of the current context are kept, because their caches are large.
            sessions: dict[int, tuple[Session, Session]] = {}
            for context, rows in self.report.cases(cases, name):
                if context not in sessions:
                    sessions = {
                        context: _captured_and_ordinary_sessions(
                            model, context, 4 * max(self.sizes.rows)
                        )
                    }
                self._check_step(name, model, context, rows, *sessions[context])

    def _check_step(
        self,
        name: str,
        model: Backbone,
        context: int,
        rows: int,
        captured: Session,
        ordinary: Session,
    ) -> None:
        """Checks a captured step's logits against an ordinary step's, and times both.

        For each of three inputs the two must be close. The captured ones must change when the input
        changes.
        """
        with count_graphs() as graphs:
            capture_clock = Clock(self.device)
            _score_chain(captured, context, rows, turn=0)
            capture_new_sizes()
            first_ms = capture_clock.elapsed() * 1e3
            # The largest of each over all turns: the difference of captured and ordinary logits,
            # the ordinary logits, and the change of captured logits from one turn to the next.
            difference, largest, change = 0.0, 0.0, 0.0
            before: Tensor | None = None
            for turn in range(3):
                captured_logits = _score_chain(captured, context, rows, turn)
                ordinary_logits = _score_chain(ordinary, context, rows, turn)
                apart = float((captured_logits - ordinary_logits).abs().max())
                difference = max(difference, apart)
                largest = max(largest, float(ordinary_logits.abs().max()))
                if before is not None:
                    change = max(change, float((captured_logits - before).abs().max()))
                before = captured_logits
        share = difference / max(largest, 1e-9)
        what = f"{rows} rows of the {name} over {context} keys"
        tolerance = TOLERANCE[model.dtype]
        self.report.check(share <= tolerance, f"{what}: captured logits are {share:.2g} apart")
        self.report.check(change > 0, f"{what}: captured logits do not follow their input")
        if self.is_gpu:
            self.report.check(graphs["replays"] > 0, f"{what}: no captured step ran")
        times = {
            kind: self._median_seconds(
                lambda session=session: _score_chain(session, context, rows, turn=5)
            )
            for kind, session in (("captured", captured), ("ordinary", ordinary))
        }

        size = model.dtype.itemsize
        self.report.note(
            model=name,
            context=context,
            rows=rows,
            captured_ms=times["captured"] * 1e3,
            ordinary_ms=times["ordinary"] * 1e3,
            first_ms=first_ms,
            bytes=footprint(model.model.config).bytes_read_per_token(size, context, size),
            apart=share,
            captures=graphs["captures"],
        )
        self.report.check_time(
            times["captured"] <= times["ordinary"], f"{what}: captured is slower than ordinary"
        )

    def count_kernels(self) -> None:
        """Counts kernels, waits and copies of a step with torch's profiler, on a real GPU only."""
        if not self.is_gpu or self.models.small:
            self.report.note(skipped=["kernels"], why="kernels are counted on a real GPU")
            return
        from torch.profiler import ProfilerActivity, profile

        for name, share in self.report.cases((("target", 1.0), ("draft", KEPT_SHARE))):
            model = self._model(name)
            context = int(self.sizes.contexts[0] * share)
            for kind, session in zip(
                ("captured", "ordinary"),
                _captured_and_ordinary_sessions(model, context, room=64),
                strict=True,
            ):
                _score_chain(session, context, rows=1, turn=0)
                capture_new_sizes()
                with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                    _score_chain(session, context, rows=1, turn=1)
                self.report.note(model=name, kind=kind, **_profile_facts(profiled))

    def check_costs(self) -> None:
        """Compares the costs by which ``auto`` decides how far to draft with times of real steps.

        A real step is one of plain decoding by the model in question, target or draft.
        """
        target = self._model("target")
        draft = self._model("draft")
        for context in self.report.cases(self.sizes.contexts[:2]):
            began = time.perf_counter()
            # Costs are measured at a power of two near the context.
            bucket = cost_measurement.context_bucket(context)
            draft_bucket = cost_measurement.context_bucket(int(KEPT_SHARE * bucket))
            with count_graphs() as graphs:
                costs = cost_measurement.measure_costs(
                    target, draft, context=bucket, draft_context=draft_bucket
                )
            measuring_seconds = time.perf_counter() - began
            steps = {
                name: self._decode_step(model, length)
                for name, model, length in (
                    ("target", target, bucket),
                    ("draft", draft, draft_bucket),
                )
            }
            assumed = {"target": costs.verify(1), "draft": costs.draft}
            self.report.note(
                context=bucket,
                rows=list(costs.rows),
                target_ms=[seconds * 1e3 for seconds in costs.target],
                draft_ms=costs.draft * 1e3,
                real_target_ms=steps["target"] * 1e3,
                real_draft_ms=steps["draft"] * 1e3,
                measured_in_s=measuring_seconds,
                **graphs,
            )
            for name, seconds in steps.items():
                ratio = assumed[name] / seconds
                self.report.check_time(
                    1 / MAX_COST_ERROR <= ratio <= MAX_COST_ERROR,
                    f"the assumed cost of a step of the {name} is {ratio:.2f} times the real one",
                )

    def _decode_step(self, model: Backbone, context: int) -> float:
        """Returns the seconds of a captured step of plain decoding over about ``context`` keys.

        It is the quickest of several steps, because costs are the quickest of several too.
        """
        # The first session is an ordinary one, and is not used.
        _, captured = _captured_and_ordinary_sessions(model, context, room=128, kinds=(False, True))
        captured.requests[0].pending = [1]
        captured.requests[0].tree = Tree()
        seconds = []
        for _ in range(STEP_REPEATS + WARM_UP_STEPS):
            clock = Clock(self.device)
            (scores,) = captured.score({0: Tree()}).values()
            (token,) = scores.top(ROOT, 1)
            captured.commit({0: [token]})
            seconds.append(clock.elapsed())
            capture_new_sizes()
        return min(seconds[WARM_UP_STEPS:])

    # -- prefill and whole answers -------------------------------------------------------------

    def measure_prefill(self) -> None:
        """Measures the seconds of each stage of a prefill, and the memory it takes."""
        target = self._model("target")
        for context in self.report.cases(self.sizes.contexts):
            prompt = with_model_dtype(
                noise_video_inputs(self.models.target_config(), context), target
            )
            # The last turn counts. The one before it is a warm-up, which shrunken models do not
            # need, because their speed is not judged.
            for _ in range(1 if self.models.small else 2):
                self._reset_peak_memory()
                clock = Clock(self.device)
                (encoded,) = target.prompts(prompt)
                vision_seconds = clock.lap()
                Session(target, [Sampling()]).prefill([encoded])
                decoder_seconds = clock.lap()
                Session(target, [Sampling()]).prefill([encoded], record=True)
                recording_seconds = clock.lap()
            self.report.note(
                tokens=len(encoded),
                vision_s=vision_seconds,
                decoder_s=decoder_seconds,
                decoder_with_attention_recorded_s=recording_seconds,
                **self._memory_gib(),
            )

    def time_answers(self) -> None:
        """Times answers of the large pair with imposed acceptance, beside ``generate``."""
        target = self._model("target")
        draft = self._model("draft")
        self.report.note(draft_confidence=set_confidence(draft, ACCEPTANCE_RATE))
        for context in self.report.cases(self.sizes.contexts):
            prompt = with_model_dtype(
                noise_video_inputs(self.models.target_config(), context), target
            )
            speeds: dict[str, float] = {}
            for method in self.report.cases(TIMED_METHODS, f"{context} tokens"):
                speeds[method] = self._time_method(target, draft, prompt, method, context)
            for _ in self.report.cases(["transformers"], f"{context} tokens"):
                speeds["transformers"] = self._time_generate(
                    target, prompt, "transformers", context
                )
            plain = speeds.get("ar")
            if plain:
                over = {name: round(speed / plain, 3) for name, speed in speeds.items()}
                self.report.note(context=context, acceptance=ACCEPTANCE_RATE, over_ar=over)

    def _time_method(
        self, target: Backbone, draft: Backbone, prompt: Inputs, method: str, context: int
    ) -> float:
        """Answers by a method twice, and returns the second answer's tokens a second of decoding.

        Acceptance is imposed where the method allows it. The first answer warms up, and captures
        the sizes of its forwards.
        """
        recipe = _with_imposed_acceptance(resolve(method))
        captures = []
        for _ in range(2):
            self._reset_peak_memory()
            with count_graphs() as graphs:
                result = self._decode(
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
            **self._memory_gib(),
        )
        why = result.fallback_reason
        self.report.check(why is None, f"{method} fell back: {why}")
        self._check_captures(recipe, captures[1], f"{method} at {context} tokens")
        return speed

    def _check_captures(self, recipe: Recipe, captures: int, what: str) -> None:
        """Checks that a method's second answer captured nothing. ``captures`` is what it captured.

        A method that decides by the costs of forwards is exempt, because it also learns from
        answers and may use a new size later.
        """
        learns = recipe.drafts and recipe.needs_costs
        self.report.check(learns or captures == 0, f"{what} captured {captures} in a second answer")

    def _time_generate(
        self, target: Backbone, prompt: Inputs, name: str, context: int, **settings: Any
    ) -> float:
        """Returns the tokens a second of decoding by ``generate`` on the target's weights.

        ``name`` is what the line calls it. With further ``settings`` it answers twice, because the
        first answer may compile, and the second counts. Otherwise it answers once.
        """
        options: dict[str, Any] = {"max_new_tokens": self.sizes.long_tokens, "do_sample": False}
        options |= {"eos_token_id": None, **settings}
        loaded = Loaded("random", target, processor=None)
        runs = [
            hf(loaded, draft=None, inputs=prompt, settings=options)
            for _ in range(2 if settings else 1)
        ]
        speed = runs[-1].decoded_tokens / runs[-1].decode_seconds
        self.report.note(
            context=context,
            method=name,
            tokens_per_second=speed,
            first_token_s=runs[-1].first_token_seconds,
            first_run_s=runs[0].total_seconds,
        )
        return speed

    def time_compiled_generate(self) -> None:
        """Times ``generate`` with its static cache, which transformers compiles on a GPU.

        This section is one of the last, because compiling may take long.
        """
        target = self._model("target")
        settings = {"cache_implementation": "static", "disable_compile": not self._compiles}
        for context in self.report.cases(self.sizes.contexts[1:2]):
            prompt = with_model_dtype(
                noise_video_inputs(self.models.target_config(), context), target
            )
            self._time_generate(target, prompt, "transformers, static cache", context, **settings)

    def time_step_variants(self) -> None:
        """Times a captured step with our kernels, with torch's attention, and with layers that
        ``torch.compile`` compiles.

        The step is that of the target's first ``COMPILED_LAYERS`` layers and its head. Where
        :attr:`_compiles` is false, nothing is compiled, and the line says so.
        """
        target = self._model("target")
        layers = target.first_layers(min(COMPILED_LAYERS, target.layer_count))
        compiler = torch.compile if self._compiles else _leave_as_it_is
        for context in self.report.cases(self.sizes.contexts[1:2]):
            for variant in measure_step_variants(
                layers,
                context,
                COMPILED_ROWS,
                repeat=3 if self.models.small else STEP_REPEATS,
                compiler=compiler,
            ):
                self.report.note(
                    variant=variant.kind,
                    layers=layers.layer_count,
                    context=variant.context,
                    rows=variant.rows,
                    ms=variant.milliseconds,
                    apart=variant.difference,
                    is_compiled=self._compiles and variant.kind == "compiled",
                )

    # -- parts of the above --------------------------------------------------------------------

    @property
    def _compiles(self) -> bool:
        """Whether rivals are compiled: on a GPU, with models of full size."""
        return self.is_gpu and not self.models.small

    def _model(self, name: str) -> Backbone:
        """Returns the target or the draft of the large pair; writes a line when it is made."""
        # ``target`` and ``draft`` are cached properties. Such a property is among the variables of
        # its object only after it was made.
        is_made = name in vars(self.models)
        self._reset_peak_memory()
        before = self._allocated_bytes()
        clock = Clock(self.device)
        model: Backbone = getattr(self.models, name)
        if is_made:
            return model
        seconds = clock.elapsed()
        held_bytes = self._allocated_bytes() - before
        weights = footprint(model.model.config).weight_bytes(model.dtype.itemsize)
        self.report.note(
            built=name,
            seconds=seconds,
            weights_gib=weights / GIB,
            held_gib=held_bytes / GIB,
            captures_steps=is_capturing_worthwhile(model),
            **self._memory_gib(),
        )
        if self.is_gpu and not self.models.small:
            ratio = held_bytes / weights
            self.report.check(
                ratio <= MAX_WEIGHT_OVERHEAD,
                f"the {name} holds {ratio:.2f} times the bytes of its weights",
            )
        return model

    def _short_prompt(self) -> Inputs:
        return noise_video_inputs(small_config(self.models.small), self.sizes.prompt)

    def _generate(self, target: Backbone, prompt: Inputs) -> tuple[int, ...]:
        options = {"max_new_tokens": self.sizes.tokens, "do_sample": False}
        return hf(
            Loaded("random", target, processor=None), draft=None, inputs=prompt, settings=options
        ).ids

    def _decode(
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
            with_model_dtype(prompt, target),
            draft=draft,
            method=method,
            tokenizer=LetterTokenizer(),
            captioner=caption,
            max_new_tokens=tokens,
            do_sample=False,
            **settings,
        )

    def _median_seconds(self, work: Callable[[], object]) -> float:
        """Returns the median seconds of several calls of ``work``, after two that warm up."""
        repeats = 3 if self.models.small else STEP_REPEATS
        warm_ups = 2
        seconds = []
        for _ in range(warm_ups + repeats):
            clock = Clock(self.device)
            work()
            seconds.append(clock.elapsed())
        return median(seconds[warm_ups:])

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.is_gpu else 0

    def _reset_peak_memory(self) -> None:
        if self.is_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def _memory_gib(self) -> dict[str, float]:
        """Returns GiB of a GPU's memory: in use, at the peak since the last reset, and reserved.

        On a CPU the result is empty.
        """
        if not self.is_gpu:
            return {}
        return {
            "allocated_gib": torch.cuda.memory_allocated(self.device) / GIB,
            "peak_gib": torch.cuda.max_memory_allocated(self.device) / GIB,
            "reserved_gib": torch.cuda.memory_reserved(self.device) / GIB,
        }

    def sections(self) -> dict[str, tuple[float, Callable[[], None]]]:
        """Returns (its share of the time, its work) of every section by name, in running order."""
        return {
            # The shares of the time sum to 1.
            "facts": (0.02, self.report_facts),
            "right answers": (0.22, self.check_answers),
            "exact answers": (0.06, self.check_exact_answers),
            "steps": (0.20, self.check_steps),
            "kernels": (0.04, self.count_kernels),
            "believed costs": (0.08, self.check_costs),
            "prefill": (0.08, self.measure_prefill),
            "whole answers": (0.18, self.time_answers),
            "compiled peer": (0.07, self.time_compiled_generate),
            "step variants": (0.05, self.time_step_variants),
        }

    def run(self, sections: Sequence[str] = ()) -> None:
        """Runs the sections with these names, or all. Unused time of one goes to those after it."""
        chosen = {
            name: own for name, own in self.sections().items() if not sections or name in sections
        }
        total = sum(share for share, _ in chosen.values())
        share_so_far = 0.0
        for name, (share, work) in chosen.items():
            share_so_far += share
            with torch.no_grad():
                # A section has to end when the shares of all sections so far are over.
                self.report.run(name, share_so_far / total, work)


@contextmanager
def count_graphs() -> Iterator[Counter[str]]:
    """Counts captures and replays of CUDA graphs in this process while it is entered."""
    counts: Counter[str] = Counter(captures=0, replays=0)
    with ExitStack() as stack:
        if torch.cuda.is_available():
            for name, kind in (("capture_begin", "captures"), ("replay", "replays")):
                method = getattr(torch.cuda.CUDAGraph, name)

                def count(*args: Any, method: Any = method, kind: str = kind, **kwargs: Any) -> Any:
                    counts[kind] += 1
                    return method(*args, **kwargs)

                stack.enter_context(patch.object(torch.cuda.CUDAGraph, name, count))
        yield counts


def _leave_as_it_is(work: Callable[..., Any]) -> Callable[..., Any]:
    """Stands in for ``torch.compile`` where nothing is compiled: returns its argument."""
    return work


def _with_imposed_acceptance(recipe: Recipe) -> Recipe:
    """Returns the recipe with acceptance imposed; one that cannot have it is returned unchanged."""
    if not recipe.drafts or recipe.drafts_beside_target:
        return recipe
    return impose_acceptance(recipe, ImposedAcceptance(rates=(ACCEPTANCE_RATE,)))


def _captured_and_ordinary_sessions(
    model: Backbone, context: int, room: int, kinds: tuple[bool, bool] = (True, False)
) -> tuple[Session, Session]:
    """Returns two sessions with the same ``context`` random keys, and room for ``room`` more.

    ``kinds`` says for each whether it uses CUDA graphs; by default the first alone does.
    """
    sessions = [
        cost_measurement.filled_session(model, context, requests=1, room=room, cuda_graphs=kind)
        for kind in kinds
    ]
    first, second = (session.requests[0].cache for session in sessions)
    for mine, theirs in zip(
        (*first.keys, *first.values), (*second.keys, *second.values), strict=True
    ):
        mine[:, :context].normal_()
        theirs[:, :context].copy_(mine[:, :context])
    return sessions[0], sessions[1]


def _score_chain(session: Session, context: int, rows: int, turn: int) -> Tensor:
    """Scores a chain of ``rows`` tokens that depend on ``turn``, always over the same keys.

    Returns the logits after each of its tokens in float32, [rows, vocab].
    """
    request = session.requests[0]
    # The multipliers and moduli are arbitrary. They only give every turn other token ids below 100.
    request.pending = [(turn * 31 + 1) % 97]
    request.tree = Tree()
    request.node_logits = []
    request.cache.length = context
    session.score({0: chain([(turn * 7 + place) % 89 for place in range(rows - 1)])})
    assert request.root_logits is not None
    return torch.stack([request.root_logits, *request.node_logits]).float()


def _profile_facts(profile: Any) -> dict[str, Any]:
    """Returns what torch's profile says of the work on the GPU and of the calls by the CPU.

    "kernels" counts everything that ran on the GPU, copies within its memory included, and
    "kernel_ms" are the milliseconds of all that. "longest" has the ten names that took longest,
    each with how often it ran and its microseconds. "waits" and "copies" count calls by the CPU:
    those that wait for the GPU, and those of ``cudaMemcpyAsync``.
    """
    events = profile.key_averages()
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
