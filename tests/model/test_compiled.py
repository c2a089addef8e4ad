"""Attention compiled from C: what it computes, and what happens where it cannot be had."""

from __future__ import annotations

import copy
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import COMPILED, llama, text_input
from torch.nn.functional import scaled_dot_product_attention, silu

import saccade
from saccade.core.sampling import Sampling
from saccade.core.tree import ROOT, chain
from saccade.model import attention, kernels
from saccade.model.attention import quickest_attention
from saccade.model.backbone import Backbone
from saccade.model.kernels import compiled
from saccade.model.kernels.attention_mass import attention_mass
from saccade.model.session import Session

CPU = [torch.device("cpu")]
PATH = os.environ["PATH"]
CHOOSING = kernels.choose_attention  # before the session's fixture puts a fixed choice there


def _inputs(heads, kv_heads, width, rows, before, seed):
    """q as a layer lays it, and keys and values of a cache with room, which holds anything."""
    generator = torch.Generator().manual_seed(seed)
    q = 3 * torch.randn(rows, heads, width, generator=generator).transpose(0, 1)
    k, v = torch.randn(2, kv_heads, before + rows + 7, width, generator=generator)
    k[:, before + rows :] = v[:, before + rows :] = float("nan")
    return q, k[:, : before + rows], v[:, : before + rows]


def _exact(q, k, v, mask):
    groups = len(q) // len(k)
    k, v = (each.double().repeat_interleave(groups, 0) for each in (k, v))
    return scaled_dot_product_attention(q.double(), k, v, mask)


@pytest.mark.representatives(3)
@COMPILED
@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(6, 2, 32), (7, 1, 80), (4, 4, 256)])
@pytest.mark.parametrize("rows", [1, 2, 5, 17, 40, 131])
def test_it_is_the_softmax_over_what_each_row_sees(rows, heads, kv_heads, width, threads):
    """Claim: equal to double precision's within 2e-5, of every number of vectors and tiles, behind
    no key, a block of them, one more, and as many as several threads share; as a prompt's rows, and
    under a tree's mask that adds to what it shows, too. Fails if padding, a masked key or one
    beyond the last has a share, or if blocks or parts are put together by anything but their
    maxima and sums."""
    torch.set_num_threads(threads)
    try:
        for before in (0, 64, 65, 1111):
            q, k, v = _inputs(heads, kv_heads, width, rows, before, before)
            causal = torch.ones(rows, rows, dtype=torch.bool).tril()
            added = torch.randn(rows, rows, generator=torch.Generator().manual_seed(1))
            tree = causal & (added < 0) | torch.eye(rows, dtype=torch.bool)
            for block, bias in ((causal, torch.zeros(rows, rows)), (tree, added)):
                bias = bias.masked_fill(~block, float("-inf"))
                mask = torch.cat([torch.zeros(rows, before), bias], 1).double()
                kernel_mask = None if block is causal else bias
                out = compiled.attend(q, k, v, kernel_mask, width**-0.5)
                assert (out - _exact(q, k, v, mask)).abs().max() < 2e-5
    finally:
        torch.set_num_threads(1)


@COMPILED
@pytest.mark.parametrize("rows", [1, 5, 17, 40])
@pytest.mark.parametrize("columns", [range(70), range(3, 900, 7), range(990, 1001)])
def test_what_rows_attend_to_is_double_precisions(rows, columns):
    """Claim: the weights on some columns, over all keys a row sees and among these alone, summed
    over rows and a group's heads, are double precision's; columns that some rows or none see have
    nothing of theirs, and a row that sees none has none to share. Fails if padding counts."""
    (q, k, _), columns = _inputs(6, 2, 32, rows, 1000, 3), torch.tensor(columns)
    sees = torch.randperm(1000, generator=torch.Generator().manual_seed(rows))[:rows] + 1
    logits = q.double() @ k.double().repeat_interleave(3, 0).transpose(1, 2)
    logits.masked_fill_(torch.arange(k.shape[1]) >= sees[:, None], float("-inf"))
    whole = logits.softmax(-1)[..., columns]
    alone = (whole / whole.sum(-1, keepdim=True)).nan_to_num()
    exact = torch.stack([each.view(2, -1, len(columns)).sum(1) for each in (whole, alone)], 1)
    (mass,) = attention_mass([k], [q], sees, columns)
    assert torch.allclose(mass.double(), exact, atol=1e-4)


@pytest.mark.representatives(13)
@COMPILED
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rows", [1, 16, 40, 90, 100])
@pytest.mark.parametrize("columns", [range(70), range(3, 2400, 7)])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (7, 1), (10, 2)])
def test_what_is_noted_on_the_way_is_what_is_attended_to(rows, columns, heads, kv_heads, threads):
    """Claim: attention that notes its last rows gives, bit for bit, what it gives without, and adds
    what those attend to by double precision, over keys of several parts, also where a row's heads
    lie in two tiles. Fails if a part's weights stay relative to its own maximum, a row is noted
    twice or for another, one beside them too, or threads write over each other's sums."""
    (q, k, v), columns = _inputs(heads, kv_heads, 32, 100, 2400, 3), torch.tensor(columns)
    k[:, ::97] *= 2  # the maximum moves on
    mass = torch.ones(kv_heads, 2, len(columns))
    torch.set_num_threads(threads)
    try:
        plain = compiled.attend(q, k, v, None, 0.5)
        out = compiled.attend(q, k, v, None, 0.5, compiled.MassOutput.of(rows, columns, mass))
    finally:
        torch.set_num_threads(1)
    assert torch.equal(out, plain)
    each_heads = k.double().repeat_interleave(heads // kv_heads, 0)
    logits = 0.5 * q[:, -rows:].double() @ each_heads.transpose(1, 2)
    sees = torch.arange(2500 - rows, 2500)[:, None] + 1
    logits.masked_fill_(torch.arange(2500) >= sees, float("-inf"))
    both = logits.softmax(-1)[..., columns], logits[..., columns].softmax(-1)
    exact = torch.stack([each.view(kv_heads, -1, len(columns)).sum(1) for each in both], 1)
    assert torch.allclose(mass.double() - 1, exact, atol=1e-4)


@pytest.mark.representatives(2)
@COMPILED
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("together", [2, 3, 5, 8, 13, 40])
def test_a_row_comes_out_the_same_alone_and_among_others(together, threads):
    """Claim: bit for bit, of a product and of attention, whatever rows are beside it and however
    many threads there are. Fails if a sum is taken in another order there. Control: torch's differ.
    """
    generator = torch.Generator().manual_seed(0)
    rows, (q, k, v) = torch.randn(40, 192, generator=generator), _inputs(6, 2, 32, 40, 2400, 0)
    weight = torch.randn(330, 192, generator=generator)
    laid, gated = compiled.Panels.of(weight), compiled.Panels.of_gated(weight)

    def mixed_of(start, stop):
        seen = slice(2400 + stop)
        return compiled.attend(q[:, start:stop], k[:, seen], v[:, seen], None, 0.2)

    alone = [compiled.multiply(rows[i : i + 1], laid) for i in range(40)]
    gates = [compiled.multiply(rows[i : i + 1], gated) for i in range(40)]
    prompt = rows.repeat(75, 1)  # so many that they are multiplied in parts
    on_its_own = [mixed_of(i, i + 1) for i in range(40)]
    pieces = [(i, min(i + together, 40)) for i in range(0, 40, together)]
    torch.set_num_threads(threads)
    try:
        products = [compiled.multiply(rows[slice(*piece)], laid) for piece in pieces]
        through = [compiled.multiply(rows[slice(*piece)], gated) for piece in pieces]
        whole = compiled.multiply(prompt, laid)
        mixed = [mixed_of(*piece) for piece in pieces]
        theirs = rows[:together] @ weight.t(), rows[:1] @ weight.t()
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat(products), torch.cat(alone))
    assert torch.equal(torch.cat(through), torch.cat(gates))
    assert torch.equal(whole, torch.cat(alone).repeat(75, 1))
    assert torch.equal(torch.cat(mixed, 1), torch.cat(on_its_own, 1))
    assert not torch.equal(theirs[0][:1], theirs[1])


@COMPILED
def test_gates_of_any_size_let_through_what_silu_does():
    """Claim: a gate of thousands lets all through or nothing, one of no number gives none. Fails
    where exp(-x) leaves what a float holds. Control: that power does."""
    sizes = torch.tensor([-5000.0, -200.0, -89.0, -9.0, 0.0, 9.0, 200.0, 5000.0, float("nan")])
    weight = torch.eye(1).repeat(2, 1)
    product = compiled.multiply(sizes[:, None], compiled.Panels.of_gated(weight))[:, 0]
    exact = silu(sizes.double()) * sizes
    assert torch.allclose(product.double(), exact, rtol=1e-5, atol=1e-30, equal_nan=True)
    assert torch.exp(-sizes).isinf().any()


@COMPILED
def test_logits_of_any_size_are_weighed():
    """Claim: logits of thousands, the largest of them first or last, give weights and nothing
    infinite; keys forty below it count for nothing."""
    q = torch.full((1, 3, 8), 1000.0)
    v = torch.arange(200.0)[None, :, None].repeat(1, 1, 8)
    for k, most in ((v / 200, 199.0), (v.flip(1) / 200, 0.0)):
        out = compiled.attend(q, k, v, torch.zeros(3, 1), 1.0)
        assert torch.allclose(out, torch.full_like(out, most))


@COMPILED
def test_what_is_no_number_is_not_hidden():
    """Claim: a row whose query, or a key or value that it sees, is NaN comes out so; one that sees
    no such key is as ever (nothing times a value of NaN is NaN, here as in torch). Fails where a
    maximum or a clamp takes it for a number."""
    q, k, v = _inputs(4, 2, 16, 6, 9, 0)
    whole = compiled.attend(q, k, v, None, 0.2)
    for each, at in ((k, 11), (v, 11), (q, 2)):
        spoilt = each.clone()
        spoilt[:, at, 3] = float("nan")
        out = compiled.attend(*(spoilt if one is each else one for one in (q, k, v)), None, 0.2)
        assert out[:, 2].isnan().any(-1).all()
        assert each is v or torch.equal(out[:, :2], whole[:, :2])
    sees, columns = torch.arange(10, 16), torch.arange(5)
    spoilt = k.clone()
    spoilt[:, 14, 3] = float("nan")
    assert attention_mass([spoilt], [q], sees, columns).isnan().all()
    few = sees.clamp(max=14)
    assert not attention_mass([spoilt], [q], few, columns).isnan().any()


@COMPILED
def test_rows_of_any_strides_are_read():
    """Claim: queries and keys whose numbers do not lie side by side, and a mask that is part of
    another, are read where they are."""
    q, k, v = _inputs(4, 2, 16, 3, 9, 0)
    mask = torch.randn(6, 8)
    plain = compiled.attend(q, k, v, mask[:, 2:5].contiguous(), 0.2)
    apart = [torch.stack([each, each], -1)[..., 0] for each in (q, k, v)]
    assert apart[0].stride(2) == 2
    assert torch.equal(compiled.attend(*apart, mask[:, 2:5], 0.2), plain)


def forget():
    """As a process that has compiled nothing yet."""
    for each in (compiled._library, compiled.is_available, compiled.version):
        each.cache_clear()


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """Nothing is compiled yet, and a home of its own."""
    monkeypatch.setenv("SACCADE_CACHE", str(tmp_path))
    forget()
    yield monkeypatch
    forget()


@pytest.fixture
def anew_and_soon(anew):
    """The same, and what is compiled is not optimised, which takes a sixth of the time."""
    slow = [flag for flag in compiled.FLAGS if not flag.startswith("-O")]
    anew.setattr(compiled, "FLAGS", (*slow, "-O0"))
    return anew


@pytest.mark.extra
@pytest.mark.representatives(1)
@COMPILED
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("tuned", ["generic", "znver3"])
@pytest.mark.parametrize("level", ["x86-64-v3", "x86-64-v2"])
def test_other_processors_vectors_compute_the_same(anew, level, tuned):
    """Claim: compiled for AVX2 and for SSE, whose vectors have half and a quarter of the lanes, it
    is the same attention and product, and a row bit for bit the same among others. Fails where a
    number of lanes was taken for granted; or, tuned for Zen 3, if the compiler may round a product
    before it is added in one loop and not in its twin."""
    native = compiled.FLAGS.index("-march=native")
    others = compiled.FLAGS[:native] + compiled.FLAGS[native + 1 :]
    anew.setattr(compiled, "FLAGS", (*others, f"-march={level}", f"-mtune={tuned}"))
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 192, generator=generator) for n in (330, 40))
    laid = compiled.Panels.of(weight)
    assert laid.numbers.shape[2] == {"x86-64-v3": 16, "x86-64-v2": 8}[level]
    product = compiled.multiply(x, laid)
    assert torch.allclose(product, x @ weight.t(), atol=1e-4)
    assert torch.equal(product[7:8], compiled.multiply(x[7:8], laid))
    through = compiled.multiply(x, compiled.Panels.of_gated(weight))
    gate, gated = (x @ weight.t()).chunk(2, -1)
    assert torch.allclose(through, silu(gate) * gated, atol=1e-4)
    for rows, before in ((1, 1111), (5, 1084), (40, 1049), (40, 1051)):  # a few keys are left over
        q, k, v = _inputs(6, 2, 32, rows, before, rows)
        visible = torch.ones(rows, before + rows, dtype=torch.bool).tril(before)
        out = compiled.attend(q, k, v, None, 32**-0.5)
        assert (out - _exact(q, k, v, visible)).abs().max() < 2e-5
        alone = compiled.attend(q[:, -1:], k, v, None, 32**-0.5)
        assert torch.equal(out[:, -1:], alone)
        sees, columns = visible.sum(1), torch.arange(40, 1050)
        logits = q.double() @ k.double().repeat_interleave(3, 0).transpose(1, 2)
        whole = logits.masked_fill(~visible, float("-inf")).softmax(-1)[..., columns]
        mass = attention_mass([k], [q], sees, columns)[0, :, 0].double()
        assert torch.allclose(mass, whole.view(2, -1, len(columns)).sum(1), atol=1e-4)


@pytest.mark.parametrize("compiler", ["", "/no/such/compiler", "false"])
def test_without_a_compiler_attention_is_torchs(anew, compiler, caplog):
    """Claim: where none is found, or it fails, models are made ready without it, and the log says
    why. What was remembered beside a compiler is not asked for."""
    anew.setenv("CC", compiler)
    timed = []
    anew.setattr(kernels, "choose_attention", CHOOSING)
    anew.setattr(
        kernels, "time_calls", lambda calls: timed.append(calls) or dict.fromkeys(calls, 1)
    )
    with caplog.at_level(logging.INFO, compiled.__name__):
        assert not compiled.supports_head_dim(32)
        quickest_attention(4, 2, 32, CPU, torch.float32)
    assert "could not be compiled" in caplog.text
    assert timed and not any("compiled" in each for each in timed)


def test_an_upgraded_compiler_compiles_anew(anew, tmp_path):
    """Claim: kernels and timings are of one state of the compiler, so one that is replaced in place
    has its own. Control: the same compiler keeps them."""
    compiler = tmp_path / "compiler"
    versions = []
    for content in ("#!/bin/sh\n", "#!/bin/sh\n", "#!/bin/sh\n# a newer one\n"):
        if not compiler.exists() or compiler.read_text() != content:
            compiler.write_text(content)
            compiler.chmod(0o700)
        anew.setenv("CC", str(compiler))
        forget()
        versions.append(compiled.version())
    assert versions[0] == versions[1] != versions[2]


@COMPILED
def test_beside_a_compiler_it_is_timed_like_the_others(monkeypatch):
    """Claim: it is a candidate for few rows and for a prompt's, for heads that it serves. Control:
    for others it is none."""
    timed = []
    monkeypatch.setattr(kernels, "choose_attention", CHOOSING)
    monkeypatch.setattr(
        kernels, "time_calls", lambda calls: timed.append(calls) or dict.fromkeys(calls, 1)
    )
    for width, there in ((32, True), (20, False), (264, False)):
        timed.clear()
        quickest_attention(4, 2, width, CPU, torch.float32)
        assert timed and all(("compiled" in each) is there for each in timed)


@pytest.mark.extra
@COMPILED
def test_it_is_compiled_once(anew_and_soon):
    """Claim: the next process finds what was compiled, one cut short is made again, and a home that
    cannot be written to is only slower."""
    anew = anew_and_soon
    place = compiled._library_path()
    place.parent.mkdir()
    place.write_bytes(b"cut short")
    for path, there in (("", False), (PATH, True), ("", True)):  # "": no compiler is found
        anew.setenv("PATH", path)
        forget()
        assert compiled.supports_head_dim(32) is there
    assert place.stat().st_size > 10_000
    anew.setenv("SACCADE_CACHE", "/dev/null")
    anew.setenv("PATH", PATH)
    forget()
    assert compiled.supports_head_dim(32)


@pytest.mark.representatives(1)
@COMPILED
@pytest.mark.parametrize("right", ["6.93146978e-1f", "x[r * c->in + i]"])
def test_what_computes_something_else_is_left_alone(anew_and_soon, tmp_path, caplog, right):
    """Claim: what a compiler gets wrong is found out before anything is answered with it."""
    wrong = tmp_path / "kernels.c"
    wrong.write_text(compiled.SOURCE.read_text().replace(right, "0.4f"))
    anew_and_soon.setattr(compiled, "SOURCE", wrong)
    assert not compiled.is_available()
    assert "wrong on this processor" in caplog.text


THREADS = """
import torch
from pathlib import Path
from saccade.model.kernels import compiled
q = torch.ones(4, 200, 32)
torch.set_num_threads(2)
torch.ones(512, 512) @ torch.ones(512, 512)
print(compiled.supports_head_dim(32))
for call in (lambda: None, lambda: compiled.attend(q, q[:2], q[:2], None, 1.0)):
    call()
    print(len(list(Path("/proc/self/task").iterdir())))
"""


@pytest.mark.extra
@COMPILED
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux tells threads")
def test_its_threads_are_torchs():
    """Claim: it shares the threads that torch multiplies with, which would else wait for work on
    the same processors. In a process of its own: others' threads end when they like."""
    printed = subprocess.check_output((sys.executable, "-c", THREADS), text=True).split()
    assert printed[0] == "True" and printed[1] == printed[2]


@pytest.fixture
def everywhere(monkeypatch):
    """Every product and every row's attention by these kernels; what calls attention."""
    calls = []
    ways = kernels.AttentionChoice((768,), (("compiled", "compiled"),), (0,))
    choice = kernels.Choice((1,), ("compiled",))
    monkeypatch.setattr(kernels, "choose_attention", lambda facts, timed, *of: ways)
    monkeypatch.setattr(kernels, "choose_products", lambda matrices: [choice] * len(matrices))
    for table in (attention.FEW_ROW_KERNELS, attention.MANY_ROW_KERNELS):
        counted = lambda *given: calls.append(1) or compiled.attend(*given)  # noqa: E731
        monkeypatch.setitem(table, "compiled", counted)
    return calls


@COMPILED
def test_an_answer_by_them_is_generates(everywhere):
    """Claim: where everything goes by them, a drafted answer is ``generate()``'s."""
    model, draft = copy.deepcopy(llama()), copy.deepcopy(llama(1))  # what is shared has chosen
    ids = saccade.run(model, text_input(1), draft=draft, method="sd", max_new_tokens=24).ids
    with torch.no_grad():
        expected = model.generate(**text_input(1), max_new_tokens=24, do_sample=False)
    assert list(ids) == expected[0, text_input(1)["input_ids"].shape[1] :].tolist() and everywhere


@COMPILED
@pytest.mark.parametrize("threads", [1, 2])
def test_a_verification_is_plain_decoding_bit_for_bit(everywhere, threads):
    """Claim: the laws of a chain's tokens, judged at once by whatever number of threads, are those
    of the tokens one after the other. Fails where anything on the way rounds by its neighbours."""
    model, ids = Backbone(copy.deepcopy(llama())), [5, 9, 11, 100, 7, 42, 3, 8, 60]
    all_laws = []
    for pieces in ([ids], [ids[:1], ids[1:5], ids[5:]], [[token] for token in ids]):
        torch.set_num_threads(threads if len(pieces) == 1 else 1)
        try:
            session, laws = Session(model, [Sampling()]), []
            session.prefill(model.prompts(text_input(1)))
            for piece in pieces:
                session.commit({0: [piece[0]]})
                scores = session.score({0: chain(piece[1:])})[0]
                laws += [scores.logits(node) for node in range(ROOT, len(piece) - 1)]
                session.commit({0: piece[1:]})
        finally:
            torch.set_num_threads(1)
        all_laws.append(torch.stack(laws))
    assert torch.equal(all_laws[0], all_laws[2]) and torch.equal(all_laws[1], all_laws[2])
