"""Claims about the attention function, against a softmax written out here, key by key."""

from __future__ import annotations

import random

import pytest
import torch
from helpers import COMPILED, FAMILIES, backbone, input_for, random_tree, text_input

from lab import reference
from saccade.core.sampling import Sampling
from saccade.core.tree import ancestors
from saccade.model import attention
from saccade.model.attention import (
    FOLD_LIMIT,
    Segment,
    Step,
    attend_partially,
    attend_partially_by_products,
    merge,
)
from saccade.model.cache import Cache, HeadShape
from saccade.model.kernels import AttentionChoice, attention_mass, compiled
from saccade.model.kernels.attention_mass import MassRecorder
from saccade.model.session import Session

HEADS, KV, WIDTH = 4, 2, 8
SCALE = 0.3


def _naive(q, keys, values, visible):
    """One row at a time: softmax over the keys a row may see; groups by repeating keys."""
    out = torch.zeros(q.shape[1], HEADS * WIDTH, dtype=torch.double)
    for row in range(q.shape[1]):
        for head in range(HEADS):
            k = keys[head // (HEADS // KV)][visible[row]].double()
            v = values[head // (HEADS // KV)][visible[row]].double()
            weights = (k @ q[head, row].double() * SCALE).softmax(0)
            out[row, head * WIDTH : (head + 1) * WIDTH] = weights @ v
    return out.float()


def _cache(length: int, seed: int) -> Cache:
    generator = torch.Generator().manual_seed(seed)
    cache = Cache([HeadShape(KV, WIDTH, WIDTH)] * 1, length + 2)
    kv = torch.randn(2, KV, length, WIDTH, generator=generator)
    cache.write(0, 0, kv[0], kv[1])
    cache.advance(length)
    return cache


def _fresh(new: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(HEADS, new, WIDTH, generator=generator)
    k, v = (torch.randn(KV, new, WIDTH, generator=generator) for _ in range(2))
    return q, k, v


def _causal(length: int, new: int) -> torch.Tensor:
    return torch.ones(new, length + new, dtype=torch.bool).tril(length)


@pytest.mark.parametrize("length", [0, 1, 9])
@pytest.mark.parametrize("new", [1, 2, 5, FOLD_LIMIT, FOLD_LIMIT + 6])
def test_a_chain_sees_everything_up_to_itself(length, new):
    """Claim: without a block a row sees all keys up to its own, through either kernel.

    Unused rows of the cache are NaN, so seeing one key too many shows as well.
    """
    cache = _cache(length, 0)
    q, k, v = _fresh(new, 1)
    step = Step([Segment(cache, 0, new, length)], HEADS // KV, torch.float32)
    out = step(0, q, k, v, SCALE)
    keys, values = cache.read(0, length + new)
    assert torch.allclose(out, _naive(q, keys, values, _causal(length, new)), atol=1e-5)


@pytest.mark.parametrize("nodes", [2, 7, FOLD_LIMIT + 10])
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_node_sees_the_text_and_its_ancestors_only(nodes, seed):
    """Claim: the block hides other branches. Fails if a sibling or a descendant leaks in."""
    rng = random.Random(seed)
    tree = random_tree(rng, nodes, lambda: 0)
    length = 6
    cache = _cache(length, seed)
    block = ancestors(tree.parents)
    q, k, v = _fresh(nodes, seed)
    segment = Segment(cache, 0, nodes, length, block)
    out = Step([segment], HEADS // KV, torch.float32)(0, q, k, v, SCALE)
    keys, values = cache.read(0, length + nodes)
    visible = torch.cat([torch.ones(nodes, length, dtype=torch.bool), block], 1)
    assert torch.allclose(out, _naive(q, keys, values, visible), atol=1e-5)
    seen_by_all = _naive(q, keys, values, _causal(length, nodes))
    if not bool((block == torch.ones_like(block).tril()).all()):
        assert not torch.allclose(out, seen_by_all, atol=1e-3), "the mask made no difference"


@pytest.mark.parametrize("way", ["unfused", pytest.param("compiled", marks=COMPILED)])
@pytest.mark.parametrize("shape", ["one", "chain", "tree"])
def test_few_rows_over_many_keys_equal_the_naive_softmax(shape, way, monkeypatch):
    """Claim: spelt out or in C, with a mask of the last keys only, each row sees what it saw with
    the fused kernel, which is not called. The row before the threshold still calls it."""
    new = {"one": 1, "chain": 6, "tree": 9}[shape]
    block = None
    if shape == "tree":
        block = ancestors(random_tree(random.Random(4), new, lambda: 0).parents)
    fused = []
    called = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention,
        "scaled_dot_product_attention",
        lambda *given, **named: fused.append(1) or called(*given, **named),
    )
    ways = AttentionChoice((1,), (("fused", way),), (1024 + new,))
    for length in (1023, 1024, 1101):
        cache = _cache(length, 5)
        q, k, v = _fresh(new, 6)
        fused.clear()
        step = Step([Segment(cache, 0, new, length, block)], HEADS // KV, q.dtype, ways)
        out = step(0, q, k, v, SCALE)
        assert bool(fused) is (length < 1024)
        keys, values = cache.read(0, length + new)
        visible = _causal(length, new)
        if block is not None:
            visible = torch.cat([torch.ones(new, length, dtype=torch.bool), block], 1)
        assert torch.allclose(out, _naive(q, keys, values, visible), atol=1e-5)


@COMPILED
@pytest.mark.parametrize("new", [FOLD_LIMIT + 1, 131])
def test_a_prompts_rows_in_c_equal_the_naive_softmax(new, monkeypatch):
    """Claim: whole tiles and a last one of fewer rows, behind nothing and behind keys that are
    there, each row sees up to itself; the fused kernel is not called, and torch's default type
    says nothing. Control: over one key too few for it, it is called."""
    fused = []
    for name in ("scaled_dot_product_attention", "attend_partially"):
        called = getattr(attention, name)
        monkeypatch.setattr(
            attention, name, lambda *a, called=called, **b: fused.append(1) or called(*a, **b)
        )
    for length in (0, 1, 50):
        cache = _cache(length, 7)
        q, k, v = _fresh(new, 8)
        for least in (length + new, length + new + 1):
            fused.clear()
            ways = AttentionChoice((1,), (("fused", "compiled"),), (least,))
            step = Step([Segment(cache, 0, new, length)], HEADS // KV, q.dtype, ways)
            torch.set_default_dtype(torch.bfloat16)
            try:
                out = step(0, q, k, v, SCALE)
            finally:
                torch.set_default_dtype(torch.float32)
            assert bool(fused) is (least > length + new)
            keys, values = cache.read(0, length + new)
            assert torch.allclose(out, _naive(q, keys, values, _causal(length, new)), atol=1e-5)


def test_a_tree_of_many_nodes_is_never_taken_for_a_prompt():
    """Claim: rows whose block hides some do not go where each sees up to itself."""
    nodes, length = FOLD_LIMIT + 10, 6
    cache, (q, k, v) = _cache(length, 1), _fresh(nodes, 1)
    block = ancestors(random_tree(random.Random(1), nodes, lambda: 0).parents)
    ways = AttentionChoice((1,), (("fused", "compiled"),), (1,))
    step = Step([Segment(cache, 0, nodes, length, block)], HEADS // KV, q.dtype, ways)
    out = step(0, q, k, v, SCALE)
    visible = torch.cat([torch.ones(nodes, length, dtype=torch.bool), block], 1)
    assert torch.allclose(out, _naive(q, *cache.read(0, length + nodes), visible), atol=1e-5)


def _masked(q, keys, values, visible):
    """The additive mask over all keys, as long segments were attended to before."""
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    out = torch.nn.functional.scaled_dot_product_attention(
        q[None], keys[None], values[None], bias, scale=SCALE, enable_gqa=True
    )[0]
    return out.transpose(0, 1).reshape(q.shape[1], -1)


CHUNKED = pytest.mark.parametrize("sizes", [(67, 71, 65), (130, 97), (65, 1, 70, 3)])


@pytest.mark.representatives(3)
@CHUNKED
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_chunks_of_a_prompt_equal_the_prompt_at_once(sizes, dtype, close):
    """Claim: prefix and own chunk, merged, are the one softmax over both, whatever the chunks.

    Two requests in one forward, grouped heads; equal to the mask over all keys as well.
    """
    total = sum(sizes)
    inputs = [[t.to(dtype) for t in _fresh(total, seed)] for seed in (8, 9)]
    caches = [Cache([HeadShape(KV, WIDTH, WIDTH)] * 1, total + 3, dtype=dtype) for _ in inputs]
    outputs: list[list[torch.Tensor]] = [[], []]
    at = 0
    for new in sizes:
        q, k, v = (
            torch.cat([mine[at : at + new] for mine in each], 0).transpose(0, 1)
            for each in zip(*([t.transpose(0, 1) for t in row] for row in inputs), strict=True)
        )
        segments = [Segment(cache, i * new, (i + 1) * new, at) for i, cache in enumerate(caches)]
        out = Step(segments, HEADS // KV, dtype)(0, q, k, v, SCALE)
        for i in range(2):
            outputs[i].append(out[i * new : (i + 1) * new])
        at += new
    for (q, k, v), rows in zip(inputs, outputs, strict=True):
        whole = _naive(q, k, v, _causal(0, total))
        assert (torch.cat(rows).float() - whole).abs().max() < close
        before = _masked(q, k, v, _causal(0, total))
        assert (torch.cat(rows) - before).abs().max() < close


def test_control_parts_merged_without_their_sums_are_wrong(monkeypatch):
    """Control: halves of equal weight must differ from the truth, or the test above is blind."""
    length, new = 9, FOLD_LIMIT + 6
    cache = _cache(length, 0)
    q, k, v = _fresh(new, 1)
    monkeypatch.setattr(attention, "merge", lambda a, b: (a[0] + b[0]) / 2)
    out = Step([Segment(cache, 0, new, length)], HEADS // KV, torch.float32)(0, q, k, v, SCALE)
    keys, values = cache.read(0, length + new)
    assert not torch.allclose(out, _naive(q, keys, values, _causal(length, new)), atol=1e-2)


@pytest.mark.parametrize("how", ["all", "causal", "chosen"])
@pytest.mark.parametrize(
    "plain", [attend_partially, attend_partially_by_products], ids=["kernel", "plain"]
)
def test_a_part_is_its_softmax_and_the_log_of_its_sum(how, plain, monkeypatch):
    """Claim: kernel and fallback both give (softmax over these keys, log of its divisor).

    Fails if groups are laid out otherwise or a few queries at a time are put together wrongly.
    """
    monkeypatch.setattr(attention, "MAX_QUERIES_AT_ONCE", 7)
    new = seen = 20
    q, k, v = _fresh(new, 3)
    visible = torch.ones(new, seen, dtype=torch.bool)
    options = {}
    if how == "causal":
        visible, options = visible.tril(), {"causal": True}
    if how == "chosen":
        visible = torch.rand(new, seen, generator=torch.Generator().manual_seed(0)) < 0.5
        visible |= torch.eye(new, dtype=torch.bool)
        options = {"visible": visible}
    out, sums = plain(q, k, v, SCALE, **options)
    logits = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(HEADS // KV, 0)) * SCALE
    logits = logits.masked_fill(~visible, float("-inf"))
    assert torch.allclose(sums, logits.logsumexp(-1), atol=1e-5)
    expected = logits.softmax(-1) @ v.repeat_interleave(HEADS // KV, 0)
    assert torch.allclose(out, expected, atol=1e-5)
    if how == "all":
        halves = [plain(q, k[:, rows], v[:, rows], SCALE) for rows in (slice(13), slice(13, None))]
        assert torch.allclose(merge(*halves), expected, atol=1e-5)


@pytest.mark.representatives(1)
@pytest.mark.parametrize("fused", [None, False], ids=["fused", "modules"])
def test_a_prompt_read_in_odd_chunks_gives_the_laws_of_the_oracle(fused):
    """Claim: root, tree and chain after a chunked prefill equal the cache-free forward to 1e-4."""
    model = backbone(FAMILIES["qwen2_5_vl"](), fused)
    prompts = model.prompts(text_input(0, 230))
    rules = [Sampling()]
    oracle = reference.Oracle(model.model, prompts, rules)
    tree = random_tree(random.Random(0), FOLD_LIMIT + 9, lambda: 7)
    for chunk in (66, 101, 229):
        session = Session(model, rules, chunk=chunk)
        session.prefill(prompts)
        ours, truth = session.score({0: tree})[0], oracle.score({0: tree})[0]
        mine, exact = (torch.stack(list(s.rows)).softmax(-1) for s in (ours, truth))
        assert (mine - exact).abs().max() < 1e-4


def test_one_new_node_does_not_see_its_siblings_scored_before():
    """Claim: a block counts for a single row too. Fails if one row is taken for a chain's end."""
    length = 4
    cache = _cache(length, 0)
    _, k, v = _fresh(2, 2)
    cache.reserve(length + 3)
    cache.write(0, length, k, v)  # two siblings, scored in an earlier forward
    q, k, v = _fresh(1, 3)
    block = torch.tensor([[True, False, True]])  # the new node hangs under the first
    segment = Segment(cache, 0, 1, length + 2, block)
    out = Step([segment], HEADS // KV, torch.float32)(0, q, k, v, SCALE)
    keys, values = cache.read(0, length + 3)
    visible = torch.cat([torch.ones(1, length, dtype=torch.bool), block], 1)
    assert torch.allclose(out, _naive(q, keys, values, visible), atol=1e-5)


def test_requests_of_one_forward_do_not_see_each_other():
    """Claim: every segment equals the same segment alone. Fails if rows or caches mix."""
    sizes = [(5, 3), (0, 4), (11, 1)]
    caches = [_cache(length, i) for i, (length, _) in enumerate(sizes)]
    total = sum(new for _, new in sizes)
    q, k, v = _fresh(total, 4)
    segments, at = [], 0
    for cache, (length, new) in zip(caches, sizes, strict=True):
        segments.append(Segment(cache, at, at + new, length))
        at += new
    out = Step(segments, HEADS // KV, torch.float32)(0, q, k, v, SCALE)
    for segment, (length, new) in zip(segments, sizes, strict=True):
        rows = slice(segment.start, segment.stop)
        keys, values = segment.cache.read(0, length + new)
        assert torch.equal(keys[:, length:], k[:, rows])
        alone = _naive(q[:, rows], keys, values, _causal(length, new))
        assert torch.allclose(out[rows], alone, atol=1e-5)


@pytest.mark.parametrize("numbers", [1, 100, 2**20, pytest.param(0, marks=COMPILED)])
@pytest.mark.parametrize("columns", [[1, 2, 4], [2, 3, 4]])
def test_attended_is_the_weight_on_each_column(numbers, columns, monkeypatch):
    """Claim: what rows attended to is the sum over them and a group's heads of the softmax, over
    all keys and over the columns alone, with rows fed in two chunks; however many rows go together,
    and in C (0). Fails if a chunk is forgotten, weighted wrongly, or sees the future.
    """
    monkeypatch.setattr(attention_mass, "LOGITS_AT_ONCE_ON_CPU", numbers or 1)
    monkeypatch.setattr(compiled, "supports_head_dim", lambda width: not numbers)
    layers, new = 3, 9
    cache = Cache([HeadShape(KV, WIDTH, WIDTH)] * layers, 16)
    fresh = [_fresh(new, seed) for seed in range(layers)]
    rows, chosen = torch.tensor([5, 7, 8]), torch.tensor(columns)
    both = torch.zeros(layers, KV, 2, 3)
    for start, stop in ((0, 7), (7, 9)):
        inside = rows[(rows >= start) & (rows < stop)]
        noted = MassRecorder(inside, stop, chosen, both)
        step = Step([Segment(cache, 0, stop - start, start, recorder=noted)], 2, torch.float32)
        for layer, own in enumerate(fresh):
            step(layer, *(each[:, start:stop] for each in own), SCALE)
        cache.advance(stop - start)
        noted.finish(cache)
    for (q, k, _), mass in zip(fresh, both, strict=True):
        logits = torch.einsum("hqd,hkd->hqk", q, k.repeat_interleave(2, 0)) * SCALE
        logits = logits.masked_fill(~_causal(0, new), float("-inf"))[:, rows]
        weights = logits.softmax(-1)[..., chosen], logits[..., chosen].softmax(-1)
        for mine, each in zip(mass.unbind(1), weights, strict=True):
            assert torch.allclose(mine, each.sum(1).view(KV, 2, 3).sum(1), atol=1e-6)


@COMPILED
@pytest.mark.parametrize("rows", [range(90, 100), [*range(80, 95), 99]], ids=["last", "apart"])
def test_a_note_is_the_same_on_the_way_and_after(rows, monkeypatch):
    """Claim: what a chunk's rows attend to is the same told by the kernel that attends for them or
    from their queries, also where the last layer attends for one row alone. Fails if a layer tells
    nothing or twice. Control: it is told on the way where those rows are the last ones."""
    keywords = []
    attend = compiled.attend

    def counted(*args, **kwargs):
        if "v" not in kwargs:  # Where the mass is computed from queries, there are no values.
            keywords.extend(kwargs)
        return attend(*args, **kwargs)

    monkeypatch.setattr(compiled, "attend", counted)
    monkeypatch.setitem(attention.MANY_ROW_KERNELS, "compiled", counted)
    rows, columns = torch.tensor(rows), torch.arange(3, 70)
    fresh = [_fresh(100, seed) for seed in range(3)]
    masses = []
    for name in ("fused", "compiled"):
        cache = Cache([HeadShape(KV, WIDTH, WIDTH)] * 3, 128)
        both = torch.zeros(3, KV, 2, len(columns))
        note = MassRecorder(rows, 100, columns, both)
        ways = AttentionChoice((1,), ((name, name),), (0,))
        step = Step([Segment(cache, 0, 100, 0, recorder=note)], 2, torch.float32, ways)
        for layer, own in enumerate(fresh):
            step(layer, *own, SCALE, last=layer == 2)
        note.finish(cache)
        masses.append(both)
    assert torch.allclose(*masses, atol=1e-6) and masses[0].sum() > 1
    assert keywords == ["mass_output"] * 3 * (int(rows[0]) == 90)


@pytest.mark.representatives(9)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama"])
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("chunk", [5, 16, 4096])
def test_recorded_mass_equals_the_modules_own_matrices(family, fused, chunk):
    """Claim: a chunked prefill records what eager attention's full matrices say, to 1e-5.

    Text rows, visual columns, heads of a group and chunk borders all have to be right for it.
    """
    model = FAMILIES[family]()
    target = backbone(model, fused)
    prompts = target.prompts(input_for(family))
    session = Session(target, [Sampling()], chunk=chunk)
    (prefill,) = session.prefill(prompts, record=True)
    with torch.no_grad():
        expected = reference.attention_mass(target.model, prefill)
    assert prefill.mass is not None and prefill.mass.shape == expected.shape
    assert (prefill.mass - expected).abs().max() < 1e-5
    assert expected.std() > 1e-3, "flat attention would prove nothing"
