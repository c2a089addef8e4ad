"""Claims about the kernels of few rows, interpreted on this CPU, against attention in torch."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import random
import subprocess
import sys

import pytest
import torch
from helpers import FAMILIES, backbone, random_tree, text_input

from lab import checkpoints
from saccade import inputs
from saccade.core.sampling import Sampling
from saccade.core.tree import Tree, chain
from saccade.model.cuda_graphs import GATHERED, CudaGraphs, FewRowKernels, capture_new_sizes
from saccade.model.kernels import few_rows
from saccade.model.kernels.few_rows import Kernels, Trial, example_rotation_and_norms
from saccade.model.session import Session

triton = pytest.importorskip(few_rows.TRITON)
pytestmark = pytest.mark.skipif(not triton.INTERPRETED, reason="TRITON_INTERPRET is not set")
CPU = torch.device("cpu")


def _kernels(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype = torch.float32):
    return Kernels(heads, kv_heads, head_dim, dtype, CPU)


def _apart(trial: Trial, soft_cap: float = 0.0) -> float:
    """How far the kernels are from torch on a trial, which must hold no NaN."""
    other, width = trial.copy(), trial.attention.kernels.head_dim
    ours = _attend(trial, soft_cap)
    theirs = other.expected_output(width**-0.5, soft_cap=soft_cap)
    assert bool(ours.isfinite().all())
    return float((ours.float() - theirs.float()).abs().max())


def _attend(trial: Trial, soft_cap: float = 0.0) -> torch.Tensor:
    """The two kernels of attention over a trial's queries, once keys and values are written."""
    own, kernels = trial.attention, trial.attention.kernels
    sizes = kernels.heads, kernels.kv_heads, kernels.kv_heads
    caches = own.keys[0], own.values[0], own.caches
    q = triton.rotate_and_write(*trial.qkv.split(sizes, 1), *caches, own.cache_rows.flatten())
    mask = own.visible.view(torch.uint8).flatten(0, 1)
    splits = kernels.splits(*own.cache_rows.shape)
    scale = kernels.head_dim**-0.5
    return triton.attend(q, *caches, mask, kernels.kv_heads, splits, scale, soft_cap)


@pytest.mark.representatives(2)
@pytest.mark.parametrize(
    ("rows", "keys"),
    [*((rows, keys) for rows in (1, 2, 7, 16) for keys in (0, 1, 63, 64, 65)), (7, 2300), (64, 65)],
)
def test_few_rows_over_any_number_of_keys_equal_torch(rows, keys):
    """Claim: random trees over text of any length see what torch lets them see, to 1e-5, though
    rows of the cache that hold nothing are NaN. Fails if a block of keys is left out or read
    twice, or if a mask is shifted."""
    assert _apart(Trial.of(_kernels(2, 1, 16), [keys], rows)) < 1e-5


@pytest.mark.representatives(1)
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((8, 2), 64), ((3, 3), 72), ((4, 2), 80), ((2, 1), 96), ((7, 1), 128), ((8, 1), 256)],
)
def test_any_heads_of_any_size_equal_torch(heads, head_dim):
    """Claim: groups of any size over heads of the families' sizes, a power of two or not, equal
    torch to 1e-5. Fails if a padded dimension counts, or if a query reads another head's keys."""
    assert _apart(Trial.of(_kernels(*heads, head_dim), [70, 5], 3)) < 1e-5


@pytest.mark.representatives(1)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float16, 3e-3), (torch.bfloat16, 3e-2)])
def test_half_precision_is_rounded_torch(dtype, close):
    """Claim: in half precision, sums are in fp32: over 2,300 keys the kernels are a rounding
    away from torch in fp32."""
    assert _apart(Trial.of(_kernels(4, 2, 64, dtype), [2300], 2)) < close


def test_requests_of_unlike_lengths_do_not_read_each_other():
    """Claim: five requests in one launch, from no key to many, give what each gives alone."""
    assert _apart(Trial.of(_kernels(4, 2, 16), [0, 1, 300, 64, 129], 5)) < 1e-5


@pytest.mark.representatives(1)
@pytest.mark.parametrize("splits", [1, 2, 8, 64])
def test_keys_may_be_split_over_any_number_of_programs(splits, monkeypatch):
    """Claim: any number of splits is the one softmax, splits without a key included."""
    monkeypatch.setattr(triton, "splits_for", lambda programs, processors: splits)
    assert _apart(Trial.of(_kernels(2, 1, 16), [777], 3)) < 1e-5


def test_logits_may_be_capped():
    """Claim: a soft cap is cap * tanh(logit / cap). Control: it makes a difference."""
    kernels = _kernels(2, 1, 64)
    assert _apart(Trial.of(kernels, [90], 3), soft_cap=1.5) < 1e-5
    trial = Trial.of(kernels, [90], 3)
    assert (_attend(trial, 1.5) - _attend(trial)).abs().max() > 1e-2


def test_control_another_mask_gives_other_numbers():
    """Control: with one key of one row's mask the other way round, that row alone differs."""
    trial = Trial.of(_kernels(2, 1, 16), [40], 5)
    right = _attend(trial)
    wrong = trial.copy()
    wrong.attention.visible[0, 3, 1] ^= True
    changed = (_attend(wrong) - right).abs().amax(-1) > 1e-3
    assert changed.tolist() == [False, False, False, True, False]


def test_a_captured_launch_follows_numbers_that_change_in_place():
    """Claim: lengths, places and masks are read when the kernels run, from the memory they were
    in: the same attention object serves a longer text. Fails if a length is compiled in."""
    trial = Trial.of(_kernels(2, 1, 16), [33, 80], 4)
    own = trial.attention
    before = _attend(trial)
    own.caches[2].sub_(20)
    own.cache_rows.sub_(20)
    other = trial.copy()
    assert (_attend(trial) - other.expected_output(16**-0.5)).abs().max() < 1e-5
    assert (_attend(trial) - before).abs().max() > 1e-2


@pytest.mark.representatives(1)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("head_dim", [16, 72])
def test_rotation_norms_and_writing_are_torchs(normed, head_dim):
    """Claim: what is written to the caches, and what is attended with, is normed and rotated as
    torch does, to 1e-5; no other row of the buffers changes (they are NaN). Fails if queries and
    keys swap norms, or halves are turned the wrong way."""
    trial = Trial.of(_kernels(4, 2, head_dim), [3, 66], 3)
    other = trial.copy()
    rotation, norms = example_rotation_and_norms(trial)
    given = 0.3, rotation, norms if normed else None, 1e-6
    ours = trial.attention.rotate_and_attend(0, trial.qkv, *given)
    theirs = other.expected_output(*given)
    assert torch.allclose(ours, theirs, atol=1e-5)
    for mine, expected in zip(
        (*trial.attention.keys, *trial.attention.values),
        (*other.attention.keys, *other.attention.values),
        strict=True,
    ):
        assert torch.allclose(mine, expected, atol=1e-5, equal_nan=True)
        assert bool(mine.isnan().any())
    unrotated = trial.copy().expected_output(0.3, None, norms if normed else None, 1e-6)
    assert (theirs - unrotated).abs().max() > 1e-2


# -- in a model's captured forwards ------------------------------------------------------------


def test_kernels_can_be_copied_and_sent_with_a_model():
    """Claim: what a model remembers of its kernels is data. Fails if a module is among it."""
    kernels = _kernels(4, 2, 16)
    assert copy.deepcopy(kernels) == pickle.loads(pickle.dumps(kernels)) == kernels


@pytest.fixture
def on_cpu(monkeypatch):
    """The kernels serve on CPUs too; models made before are not asked again."""
    monkeypatch.setattr(few_rows, "DEVICE_TYPES", ("cpu",))


@pytest.mark.extra
@pytest.mark.representatives(1)
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3-vl"])
def test_captured_forwards_by_the_kernels_give_the_laws_of_ordinary_ones(
    family, tmp_path, monkeypatch
):
    """Claim: plain steps, chains and trees of two requests, replayed with the kernels, give the
    logits of ordinary forwards to 1e-4, for a decoder that norms its queries and for one that
    does not. Control: the kernels ran, once a layer."""
    folder = checkpoints.make(family, tmp_path / family)
    model = inputs.load(str(folder), device="cpu").backbone
    kernels = _kernels(model.heads, model.kv_heads, model.head_dim)
    launches = []
    plain = few_rows.FewRowAttention.rotate_and_attend

    def counted(self, layer, *given):
        launches.append(layer)
        return plain(self, layer, *given)

    monkeypatch.setattr(few_rows.FewRowAttention, "rotate_and_attend", counted)
    monkeypatch.setattr(model, "few_row_kernels", kernels)
    graphs = CudaGraphs(model)
    assert isinstance(graphs._kind, FewRowKernels)
    prompts = [model.prompts(text_input(n, 20 + 9 * n))[0] for n in range(2)]
    ordinary = Session(model, [Sampling()] * 2, cuda_graphs=False)
    fixed = Session(model, [Sampling()] * 2, cuda_graphs=True)
    fixed.cuda_graphs = graphs
    for session in (ordinary, fixed):
        session.prefill(prompts)
    rng = random.Random(0)
    trees = [Tree(), chain([5, 6, 7]), random_tree(rng, 5, lambda: rng.randrange(200))]
    for tree in [*trees, *trees]:
        batch = {0: tree, 1: tree}
        a, b = (
            torch.stack([row for each in session.score(batch).values() for row in each.rows])
            for session in (ordinary, fixed)
        )
        assert (a - b).abs().max() < 1e-4
        capture_new_sizes()
        for session in (ordinary, fixed):
            session.commit({0: [3, 4], 1: [9]})
    assert not graphs._refused and len(graphs._captured) >= 2
    assert launches and len(launches) % model.key_layer_count == 0
    assert launches[: model.key_layer_count] == [*range(model.key_layer_count)]


@pytest.mark.parametrize("failure", ["raises", "differs"])
def test_kernels_that_fail_later_are_given_up_before_captures(failure, caplog, monkeypatch):
    """Claim: where kernels that passed their trial raise while a step is captured, or give other
    logits, one warning names them, torch's attention is captured instead at once, for this model
    and for those made later, and captures go on. Fails if captures are turned off, if ordinary
    forwards go on, or if each size warns anew."""
    model = backbone(FAMILIES["qwen2_5_vl"]())
    kernels = _kernels(model.heads, model.kv_heads, model.head_dim)
    monkeypatch.setattr(few_rows, "_abandoned", set())
    monkeypatch.setattr(few_rows, "_kernels_if_correct", lambda *given: kernels)
    monkeypatch.setattr(few_rows, "DEVICE_TYPES", ("cpu",))
    plain = few_rows.FewRowAttention.rotate_and_attend

    class OutOfResources(Exception):
        """Triton's errors are no RuntimeErrors."""

    def fails(self, *given):
        if failure == "raises":
            raise OutOfResources("shared memory, Required: 300000")
        return plain(self, *given) + 1

    monkeypatch.setattr(few_rows.FewRowAttention, "rotate_and_attend", fails)
    monkeypatch.setattr(model, "few_row_kernels", kernels)
    monkeypatch.setattr(model, "graphs", {})
    ordinary, fixed = (Session(model, [Sampling()], cuda_graphs=on) for on in (False, True))
    graphs = fixed.cuda_graphs
    assert isinstance(graphs._kind, FewRowKernels)
    prompts = model.prompts(text_input(0, 20))
    for session in (ordinary, fixed):
        session.prefill(prompts)
    with caplog.at_level(logging.WARNING):
        for tree in (Tree(), chain([5, 6, 7]), Tree(), chain([5, 6, 7])):
            a, b = (torch.stack([*each.score({0: tree})[0].rows]) for each in (ordinary, fixed))
            assert (a - b).abs().max() < 1e-4
            capture_new_sizes()
            for session in (ordinary, fixed):
                session.commit({0: [3]})
    assert len(caplog.messages) == 1, caplog.messages
    assert "Triton" in caplog.messages[0] and "torch's attention" in caplog.messages[0]
    assert "Required" in caplog.messages[0] or "differ" in caplog.messages[0]
    assert graphs._capture is not None
    assert len(graphs._captured) >= 2 and {kind for kind, _ in graphs._captured} == {GATHERED}
    arguments = model.heads, model.kv_heads, model.head_dim, [model.device], model.dtype
    assert few_rows.kernels_for(*arguments) is None


def test_a_model_is_given_kernels_that_were_tried(on_cpu, caplog, monkeypatch):
    """Claim: kernels are given where the trial comes out right; where it is apart, raises, or there
    is no Triton, there are none and one warning says why, once. Other types and several devices
    have none either."""
    arguments = 4, 2, 16, [CPU, CPU]
    few_rows._kernels_if_correct.cache_clear()
    for difference, words in ((1e-6, None), (0.1, "differs"), (float("nan"), "differs")):
        few_rows._kernels_if_correct.cache_clear()
        caplog.clear()
        monkeypatch.setattr(few_rows, "difference_from_torch", lambda kernels, it=difference: it)
        with caplog.at_level(logging.WARNING):
            kernel_sets = [few_rows.kernels_for(*arguments, torch.float32) for _ in range(2)]
        assert (kernel_sets[0] is None) is (words is not None) and kernel_sets[0] is kernel_sets[1]
        assert len(caplog.messages) == (words is not None)
        assert words is None or words in caplog.messages[0]
    few_rows._kernels_if_correct.cache_clear()

    def broken(kernels):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(few_rows, "difference_from_torch", broken)
    assert few_rows.kernels_for(*arguments, torch.float32) is None
    few_rows._kernels_if_correct.cache_clear()
    monkeypatch.setattr(few_rows, "TRITON", "saccade.no_such_module")
    assert few_rows.kernels_for(*arguments, torch.float32) is None
    assert few_rows.kernels_for(*arguments, torch.float64) is None
    assert few_rows.kernels_for(4, 2, 16, [CPU, torch.device("meta")], torch.float32) is None
    few_rows._kernels_if_correct.cache_clear()


@pytest.mark.extra
def test_the_trial_notices_a_kernel_that_is_wrong(monkeypatch):
    """Claim: right kernels pass the trial, of three sizes with norms and rotations. Control: those
    that attend with another scale do not."""
    monkeypatch.setattr(few_rows, "MAX_ROWS", 5)
    kernels = _kernels(2, 1, 8)
    assert few_rows.difference_from_torch(kernels) < few_rows.TOLERANCE[torch.float32]
    right = triton.attend

    def wrong(*tensors_and_sizes, **named):
        *others, scale = tensors_and_sizes
        return right(*others, scale * 1.1, **named)

    monkeypatch.setattr(triton, "attend", wrong)
    assert few_rows.difference_from_torch(kernels) > few_rows.TOLERANCE[torch.float32]


COMPILE = """
import sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from saccade.model.kernels import few_rows_triton as kernels

def compiled(architecture, head_dim, rows, aligned):
    kernel = kernels._attend_to_split
    pointers = {"query": "*bf16", "key_buffer": "*bf16", "value_buffer": "*bf16", "caches": "*i64",
                "mask": "*u8", "mixed_out": "*fp32", "sums_out": "*fp32"}
    numbers = {"rows": "i32", "tail": "i32", "scale": "fp32", "soft_cap": "fp32"}
    padded = 1 << (head_dim - 1).bit_length()
    constants = {"HEADS": 28, "KV_HEADS": 4, "HEAD_DIM": head_dim, "PADDED": padded,
                 "ROW_BLOCK": rows, "KEY_BLOCK": kernels.key_block(head_dim, 2),
                 "SOFT_CAP": False, "WIDE": False}
    names = kernel.arg_names
    types = {**pointers, **numbers}
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers if aligned},
    )
    options = dict(num_warps=4, num_stages=2, enable_fp_fusion=True)
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options)

for architecture, head_dim, rows, aligned in [(80, 128, 16, 1), (90, 72, 16, 1), (90, 72, 16, 0)]:
    found = compiled(architecture, head_dim, rows, aligned)
    wide = found.asm["ptx"].count("cp.async.cg.shared.global")
    print(wide, found.metadata.shared, len(found.asm["cubin"]))
"""


@pytest.mark.slow
def test_the_kernel_compiles_for_gpus_and_reads_sixteen_bytes_at_once(tmp_path):
    """Claim: compiled for the architectures of A100 and H100 (no GPU is needed for that), the
    kernel's shared memory fits and keys are copied 16 bytes at a time, for heads of 72 too.
    Control: where the compiler does not know that buffers are aligned, they are not."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", COMPILE]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=250)
    if "ptxas" in ran.stderr and ran.returncode:
        pytest.skip("no assembler for GPUs here")
    assert ran.returncode == 0, ran.stderr[-2000:]
    kernel_stats = [[int(number) for number in line.split()] for line in ran.stdout.splitlines()]
    first, second, unaligned = kernel_stats
    assert first[0] > 0 and second[0] > 0 and unaligned[0] == 0
    assert all(shared < 100 * 1024 and size > 0 for _, shared, size in kernel_stats)


@pytest.mark.extra
def test_nothing_imports_triton_by_itself():
    """Claim: reading the package does not import the kernels, which need Triton."""
    code = (
        "import sys, saccade.engine.generate, saccade.model.backbone\n"
        "print('saccade.model.kernels.few_rows_triton' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
