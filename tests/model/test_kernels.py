"""Which kernel computes a product here: chosen by seconds, remembered, the same to rounding."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import COMPILED, llama, text_input
from torch import Tensor
from torch.nn.functional import silu

import saccade
from saccade.core.home import home
from saccade.core.sampling import Sampling
from saccade.model import attention, kernels
from saccade.model.attention import ALWAYS_FUSED, FOLD_LIMIT, quickest_attention
from saccade.model.backbone import Backbone
from saccade.model.kernels import (
    ATTENTION_KEYS,
    ATTENTION_ROWS,
    PRODUCTS,
    AttentionChoice,
    Choice,
    Epilogue,
    Matrix,
    best_choice,
    best_threshold,
    choose_attention,
    choose_products,
    time_calls,
)
from saccade.model.kernels.few_bits import ROUNDINGS
from saccade.model.session import Session

# Microseconds of (plain, transposed, packed) by rows, as two makes of processor have them.
AMD = {1: (194, 121, 59), 4: (290, 265, 78), 16: (325, 369, 119)}
INTEL = {1: (9, 5, 18), 4: (11, 6, 19), 16: (30, 20, 30)}
STEP = {1: (7, 4, 16), 4: (18, 20, 16), 16: (30, 30, 19)}


def _table(rows):
    return {n: dict(zip(PRODUCTS, times, strict=False)) for n, times in rows.items()}


@pytest.mark.parametrize(
    ("times", "names"),
    [
        (AMD, ("packed", "packed", "packed")),
        (INTEL, ("transposed", "transposed", "transposed")),
        (STEP, ("transposed", "packed", "packed")),
    ],
)
def test_the_quickest_product_is_chosen_by_its_seconds(times, names):
    """Claim: on each processor the kernel that its own seconds speak for is taken, and where two
    change places both are kept. Fails if a constant decides: no one choice fits all three."""
    assert best_choice(_table(times)).names == names


def test_a_copy_that_saves_little_is_not_kept():
    """Claim: a copy of the weights that is a little quicker at one number of rows is not worth its
    memory. Control: one that halves the time there is kept."""
    little = {1: (10.0, 9.5, 30.0), 8: (20.0, 21.0, 30.0)}
    much = {1: (10.0, 5.0, 30.0), 8: (20.0, 21.0, 30.0)}
    assert best_choice(_table(little)).names == ("plain", "plain")
    assert best_choice(_table(much)).names == ("transposed", "plain")


def test_between_two_timed_numbers_of_rows_the_larger_holds():
    """Claim: a choice answers for every number of rows, beyond the last one too."""
    choice = Choice((1, 4, 16), ("plain", "transposed", "packed"))
    chosen_kernels = [choice.kernel_for(rows) for rows in (1, 2, 4, 5, 16, 17, 4000)]
    assert chosen_kernels == ["plain", *["transposed"] * 2, *["packed"] * 4]


@pytest.mark.parametrize("rows", [1, 5, 6, 17, 200, 1500])
@pytest.mark.parametrize("use", Epilogue)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=COMPILED if name == "compiled" else ()) for name in PRODUCTS]
)
def test_every_kernel_computes_the_same_product(name, rows, use):
    """Claim: a choice changes how a product is computed, not what: equal to rounding at every
    number of rows, alone, with a bias, on top of a residual and gated. Fails on a wrong layout, a
    bias left out, rows that nobody came to, or the wrong half for a gate."""
    generator = torch.Generator().manual_seed(rows)
    weight, x, below = (torch.randn(n, 96, generator=generator) for n in (152, rows, rows))
    added, below = torch.randn(152, generator=generator), below.repeat(1, 2)[:, :152]
    matrix = Matrix(weight, added if use is Epilogue.BIAS else None, use)
    matrix.choose(Choice((1, 8), (name, name)))
    exact = x.double() @ weight.double().t()
    if use is Epilogue.BIAS:
        exact += added
    elif use is Epilogue.SILU_GATE:
        exact = silu(exact[:, :76]) * exact[:, 76:]
    product = matrix.add_to(below, x) - below if use is Epilogue.ADD else matrix(x)
    bound = 1e-5 if use in (Epilogue.NONE, Epilogue.BIAS) else 2e-5
    assert (product - exact).abs().max() < bound * exact.abs().max()


@pytest.mark.slow
def test_torch_without_onednn_is_imported_too():
    """Claim: a build of torch without oneDNN's products (other processors') is no hindrance before
    anybody asks for one."""
    code = "import torch; torch.ops.mkldnn = None; from saccade.model import kernels; print('in')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "in\n", done.stderr


def test_a_matrix_sent_elsewhere_is_laid_out_there():
    """Claim: packed weights, which nothing can copy, do not keep a matrix from being copied."""
    matrix = Matrix(torch.randn(8, 8))
    matrix.choose(Choice((1,), ("packed",)))
    there, x = pickle.loads(pickle.dumps(matrix)), torch.randn(3, 8)
    assert torch.equal(there(x), x @ matrix.weight.t())


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """A machine on which kernels take the seconds they are told to, and a home of its own."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    kernel_names = []

    def assign_seconds(calls):
        kernel_names.append(tuple(calls))
        return {name: 1.0 + place for place, name in enumerate(reversed(list(calls)))}

    monkeypatch.setattr(kernels, "time_calls", assign_seconds)
    return kernel_names


def test_what_was_measured_is_remembered_for_these_threads(timed, monkeypatch):
    """Claim: a fourth model of these shapes is ready without timing anything; with another number
    of threads, or other kernels of ours, it is timed again. Fails if what is remembered names too
    little."""
    matrices = [Matrix(torch.randn(8, 8)), Matrix(torch.randn(4, 8)), Matrix(torch.randn(8, 8))]
    first = choose_products(matrices)
    assert len(first) == 3 and first[0] == first[2] and timed
    assert {*first[0].names} == {kernels.product_names()[-1]}
    assert choose_products(matrices) == choose_products(matrices) == first
    timed.clear()
    assert choose_products(matrices) == first and not timed
    assert json.loads((home() / "kernels.json").read_text())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert (
        choose_products(matrices) == choose_products(matrices) == choose_products(matrices) == first
        and timed
    )
    timed.clear()
    assert choose_products(matrices) == first and not timed
    monkeypatch.setattr(kernels.compiled, "version", lambda: "another")
    assert choose_products(matrices) == first and timed


def test_what_found_no_time_is_timed_by_the_next(timed, monkeypatch):
    """Claim: on a machine too busy for more the rows that matter most are timed all the same, and
    later measurements, which have time, add the others. Fails if what a busy moment left out stays
    unknown for good."""
    matrices, measured = [Matrix(torch.randn(8, 8))], kernels.time_products
    monkeypatch.setattr(kernels, "time_products", lambda alike, empty: measured(alike, empty, 0.0))
    (few,) = choose_products(matrices)
    assert few.rows == tuple(sorted(kernels.ROWS_TIMED_FIRST)) and len(timed) == len(few.rows)
    monkeypatch.setattr(kernels, "time_products", lambda alike, empty: measured(alike, empty, 60.0))
    (more,) = choose_products(matrices)
    assert more.rows == kernels.TIMED_ROWS


@pytest.mark.parametrize("outputs", [96, 192, 131])
def test_what_is_timed_of_a_part_may_be_chosen_for_the_whole(outputs, monkeypatch):
    """Claim: where a part of a matrix is timed, exactly the products are that the whole matrix can
    have. Fails if one is chosen that cannot prepare the whole weight, or none is timed because the
    part has an odd size."""
    weight = torch.randn(outputs, 256)
    monkeypatch.setattr(kernels, "TIMED_CALL_BYTES", 100 * weight[0].nbytes)  # Of 100 outputs.
    monkeypatch.setattr(kernels, "ROWS_TIMED_FIRST", (1,))
    for rounding in (None, ROUNDINGS["int4"]):
        matrix = Matrix(weight, rounding=rounding)
        times = kernels.time_products({matrix.problem_size: [matrix]}, 0, 0.0)
        assert {name for timed in times.values() for name in timed} == set(matrix.candidates)
        for name in matrix.candidates:
            matrix.products[name].prepare(weight)


def test_a_busy_moment_does_not_decide_for_good_how_to_multiply(timed, monkeypatch):
    """Claim: of each product at each number of rows the least of three measurements counts."""
    plain, other = kernels.product_names()[0], kernels.product_names()[-1]
    quiet = dict.fromkeys(kernels.product_names(), 9.0) | {plain: 2.0, other: 1.0}
    seconds, matrices = {**quiet, other: 9.0}, [Matrix(torch.randn(8, 8))]
    monkeypatch.setattr(kernels, "time_calls", lambda calls: dict(seconds))
    assert {*choose_products(matrices)[0].names} == {plain}
    seconds.update(quiet)
    assert {*choose_products(matrices)[0].names} == {other}
    seconds.update({other: 9.0})
    assert {*choose_products(matrices)[0].names} == {*choose_products(matrices)[0].names} == {other}


@pytest.mark.parametrize("use", Epilogue)
def test_a_large_weight_is_timed_by_a_part_of_it(timed, monkeypatch, use):
    """Claim: of a weight that no cache holds a few rows are timed, with as much of its bias or
    residual, or of both halves; the numbers of rows that matter most all the same. Fails where a
    part and what is added to it differ in size."""
    calls = []
    monkeypatch.setattr(
        kernels, "time_calls", lambda own: calls.append(own) or dict.fromkeys(own, 1)
    )
    monkeypatch.setattr(kernels, "TIMED_CALL_BYTES", 70 * 4 * 8)  # 70 rows, of which 64 are timed
    bias = torch.randn(192) if use is Epilogue.BIAS else None
    choose_products([Matrix(torch.randn(192, 8), bias, use)])
    outputs = [call() for own in calls for call in own.values()]
    assert {each.shape[1] for (each,) in outputs} == {32 if use is Epilogue.SILU_GATE else 64}


def _timed(**seconds):
    return [dict(zip(seconds, each, strict=True)) for each in zip(*seconds.values(), strict=True)]


def test_weights_that_no_cache_holds_are_timed_from_memory(timed, monkeypatch):
    """Claim: where a model's weights do not fit into the caches, these are emptied before each
    timed product of few rows, and not before one of many; a small model's weights are timed as they
    lie in the caches. Fails where a kernel is chosen by how it reads from a cache alone."""
    monkeypatch.setattr(kernels, "largest_cache_bytes", lambda: 4096)
    warm: list[int] = []
    cold: list[int] = []

    def watched(calls: Any, prepare: Any = None) -> dict[str, float]:
        (product, *_) = next(iter(calls.values()))()
        (warm if prepare is None else cold).append(len(product))
        return dict.fromkeys(calls, 1.0)

    monkeypatch.setattr(kernels, "time_calls", watched)
    choose_products([Matrix(torch.randn(8, 8))])
    assert {1, 8, 256} <= set(warm) and not cold
    warm.clear()
    choose_products([Matrix(torch.randn(64, 64))])
    assert {1, 2, 4, 8, 16} <= set(cold) and max(cold) <= 16 and {64, 256} <= set(warm)


def test_caches_are_emptied_before_each_timed_call(monkeypatch):
    """Claim: what empties the caches runs before every timed call and is not timed; a model larger
    than the caches gets one, and it reads more than they hold."""
    order: list[str] = []
    calls = {name: partial(order.append, name) for name in ("a", "b")}
    time_calls(calls, lambda: order.append("emptied"))
    assert order[::2] == ["emptied"] * (len(order) // 2) and set(order[1::2]) == {"a", "b"}
    monkeypatch.setattr(kernels, "largest_cache_bytes", lambda: 2**12)
    assert kernels.cache_emptier(2**13) is None
    empty: Any = kernels.cache_emptier(2**13 + 1)
    assert empty.__self__.nbytes > 2**12


def test_attention_changes_over_where_the_seconds_cross():
    """Claim: of two or three ways those two and that turn are taken that lose least, one alone
    where no second is better, and one slow moment moves nothing."""
    fused = (1.0, 2.0, 4.0, 8.0)
    crossing = _timed(fused=fused, unfused=(2.0, 2.1, 3.0, 5.0))
    assert best_threshold(crossing) == (("fused", "unfused"), ATTENTION_KEYS[2])
    for slower, alone in ((2.0, "fused"), (0.5, "unfused")):
        threshold = best_threshold(_timed(fused=fused, unfused=[each * slower for each in fused]))
        assert threshold == ((alone, alone), ATTENTION_KEYS[0])
    jolted = _timed(fused=(1.0, 2.0, 4.0, 5.0), unfused=(2.0, 2.1, 3.0, 5.1))
    assert best_threshold(jolted) == (("fused", "unfused"), ATTENTION_KEYS[2])
    three = _timed(fused=fused, unfused=(0.5, 1.5, 4.0, 9.0), heads=(3.0, 3.0, 3.0, 3.0))
    assert best_threshold(three) == (("unfused", "heads"), ATTENTION_KEYS[2])


def test_a_busy_moment_does_not_decide_for_good_how_to_attend(timed, monkeypatch):
    """Claim: of each way over each number of keys the least of three measurements counts, and no
    fourth is made. Fails if the first alone is remembered: one that a busy moment spoilt made
    prompts of 2,048 tokens half as slow again on that machine, for good."""
    quiet, busy = {"fused": 2.0, "compiled": 1.0}, {"fused": 2.1, "compiled": 9.0}
    moments = iter([quiet, busy, quiet, quiet, busy, quiet])
    monkeypatch.setattr(kernels, "time_calls", lambda calls: dict(next(moments)))

    def choose():
        return choose_attention(("these",), lambda rows, keys: {}, (768,), (1024, 2048))

    assert choose().kernel_for(768, 2048) == "fused"
    assert [choose().kernel_for(768, keys) for keys in (1024, 2048)] == ["compiled", "compiled"]
    assert choose() == choose() and next(moments, None) is None


def test_ways_are_found_by_rows_and_keys():
    """Claim: the entry of the next larger number of rows holds, the last one beyond it too."""
    there = AttentionChoice((1, 4), (("fused", "fused"), ("fused", "unfused")), (0, 512))
    assert there.kernel_for(1, 10**6) == there.kernel_for(2, 511) == "fused"
    assert there.kernel_for(2, 512) == there.kernel_for(40, 512) == "unfused"


def test_what_few_rows_prefer_ends_where_they_end(monkeypatch):
    """Claim: rows that are folded go by few rows' seconds, the others by a prompt's."""
    few = AttentionChoice((1, 16), (("unfused", "unfused"),) * 2, (0, 0))
    many = AttentionChoice((768,), (("fused", "fused"),), (0,))
    choices = iter((few, many))
    monkeypatch.setattr(kernels, "choose_attention", lambda *arguments: next(choices))
    choice = quickest_attention(4, 2, 8, [torch.device("cpu")], torch.float32)
    assert [choice.kernel_for(rows, 9) for rows in (1, 16, FOLD_LIMIT)] == ["unfused"] * 3
    assert choice.kernel_for(FOLD_LIMIT + 1, 9) == "fused"


def test_only_fp32_and_bf16_on_a_cpu_with_memory_are_chosen_for(monkeypatch):
    """Claim: fp16, and models for whose copies there is no memory, are left alone; of bf16 those
    kernels stay that read the weights where they are. Control: the same model in fp32 is not."""

    def used(model):
        return Backbone(model).fused.head.prepared_kernels

    assert used(copy.deepcopy(llama())) - {"plain"}
    assert used(copy.deepcopy(llama()).half()) == {"plain"}
    monkeypatch.setattr(kernels.memory, "available_bytes", lambda device: 1000)
    assert used(copy.deepcopy(llama())) == {"plain"}
    in_place = {unit.value for unit in kernels.compiled.bf16_units()}
    assert used(copy.deepcopy(llama()).bfloat16()) <= {"plain", "packed"} | in_place
    place = torch.device("cpu")
    assert quickest_attention(4, 2, 16, [place], torch.bfloat16) == ALWAYS_FUSED
    assert (
        quickest_attention(4, 2, 16, [place, torch.device("meta")], torch.float32) == ALWAYS_FUSED
    )
    assert quickest_attention(4, 2, 16, [place], torch.float32) != ALWAYS_FUSED


def test_a_row_attends_over_the_keys_of_as_many_layers_as_the_model_has(monkeypatch):
    """Claim: where ways to attend are timed by one row, each call reads other keys than the last,
    of all layers or of as many as are far away; of many rows, which compute more than they read,
    fewer. Fails where one layer's keys, near by the second time, choose for twenty."""
    read: dict[tuple[int, int], set[int]] = defaultdict(set)
    size = 0

    def watched(q: Tensor, k: Tensor, *given: Any) -> Tensor:
        nonlocal size
        size = 2 * k.nbytes // k.shape[1]  # of a key and its value
        read[q.shape[1], k.shape[1]].add(k.data_ptr())
        return q

    def called(facts: Any, calls: Any, *of: Any) -> AttentionChoice:
        for each in (
            [] if of else [calls(rows, keys) for rows in ATTENTION_ROWS for keys in ATTENTION_KEYS]
        ):
            for call in each.values():
                call()
        return ALWAYS_FUSED

    monkeypatch.setattr(kernels, "choose_attention", called)
    monkeypatch.setattr(
        attention, "FEW_ROW_KERNELS", dict.fromkeys(attention.FEW_ROW_KERNELS, watched)
    )
    quickest_attention(4, 2, 32, [torch.device("cpu")] * 20, torch.float32)
    assert len(read) == len(ATTENTION_ROWS) * len(ATTENTION_KEYS)
    for (rows, keys), places in read.items():
        assert len(places) == max(1, min(20, attention.TIMED_BYTES // rows // (keys * size)))
    assert len(read[1, 512]) == 20 and len(read[16, 4096]) < 3


def test_weights_changed_behind_our_back_are_laid_out_anew():
    """Claim: a change that no version counter sees (``.data``, as when adapters are merged) counts
    from the next prompt on. Control: without a prompt between, copies are of the old ones."""
    model = copy.deepcopy(llama())
    ours = Backbone.of(model)
    (prompt,) = ours.prompts(text_input(1))
    session = Session(ours, [Sampling()])
    (before,) = session.prefill([prompt])
    model.get_decoder().layers[0].mlp.down_proj.weight.data += 0.05
    down = ours.fused.layers[0].down
    x = torch.ones(12, down.weight.shape[1])
    assert (down(x) - x @ down.weight.t()).abs().max() > 1e-2, "no copy: nothing to test"
    (after,) = session.prefill([prompt])
    assert (down(x) - x @ down.weight.t()).abs().max() < 1e-3
    with torch.no_grad():
        exact = model(**text_input(1)).logits[0, -1]
    assert (after.logits - exact).abs().max() < 1e-4 < (before.logits - exact).abs().max()


@pytest.mark.parametrize(
    ("rows", "into"),
    [(192, 192), (896, 192), (192, 448), (4608, 3584), (1536, 8960), (20000, 256)],
)
def test_a_weight_tells_of_a_change_to_any_part(rows, into):
    """Claim: every row of a weight and every one of its columns holds an entry by which a change is
    noticed, and there are no more than about as many as its longer side. Fails for entries of the
    same columns of every row, as in a grid."""
    numbers = torch.arange(rows * into, dtype=torch.float64).view(rows, into)
    for weight in (numbers, numbers.t()):
        seen = kernels.fingerprint_entries(weight)
        assert len(seen) <= 1.1 * max(rows, into) + 2
        assert len((seen // into).unique()) == rows and len((seen % into).unique()) == into


@pytest.mark.parametrize("where", [(slice(None), 3), (5,), (slice(8, 12), slice(None))])
def test_a_changed_row_or_column_is_noticed(where):
    """Claim: writing to a row, a column or a head of ``weight.data`` is noticed, in memory that is
    laid out either way. Control: nothing is noticed before."""
    for weight in (torch.randn(300, 700), torch.randn(700, 300).t()):
        before = kernels.fingerprint_entries(weight).numpy().tobytes()
        assert kernels.fingerprint_entries(weight).numpy().tobytes() == before
        weight.data[where] = 0.5
        assert kernels.fingerprint_entries(weight).numpy().tobytes() != before


TASKS = Path("/proc/self/task")


@pytest.mark.representatives(1)
@pytest.mark.skipif(not TASKS.exists(), reason="only Linux tells a process's threads")
@pytest.mark.parametrize("released", [True, False])
def test_an_answer_keeps_no_threads_of_its_thread(monkeypatch, released):
    """Claim: whoever answers gives back the threads that shared the products, so that another one
    who answers after it has all processors. Control: it is by :func:`release_threads` alone."""
    if not released:
        monkeypatch.setattr(kernels, "release_threads", lambda: None)

    def answer():
        torch.set_num_threads(2)
        wide = torch.ones(512, 512)
        wide @ wide
        saccade.run(llama(), text_input(1), method="ar", max_new_tokens=2)
        return set(TASKS.iterdir())

    with ThreadPoolExecutor(1) as one:
        one.submit(int).result()  # it has a thread from here on
        before = set(TASKS.iterdir())
        try:
            assert len(one.submit(answer).result() - before) == (not released)
        finally:
            torch.set_num_threads(1)


FAULTS = """
import resource, torch
from saccade.model import memory
memory.reuse_freed_memory()
for _ in range(16):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(6 * 2**20), torch.ones(6 * 2**20)]
    del held
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
def test_freed_memory_stays():
    """Claim: after a few times, two tensors of 24 MiB in the places of others are there without
    their 12,288 pages from the system. In a process of its own: what it has freed else matters."""
    printed = subprocess.check_output((sys.executable, "-c", FAULTS), text=True)
    assert sum(map(int, printed.split()[10:])) < 100, printed
