"""The Triton kernels of :mod:`few_rows`: the attention of decoding and verifying on a GPU.

A forward has the same few rows (tokens) for each request. For each layer :func:`rotate_and_write`
norms and rotates their queries and keys, and writes keys and values to the requests' caches. Then
:func:`attend` attends. The attention follows Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023).
Few rows do not fill a GPU, so the keys are split over many programs, and a second kernel adds up
the results of the splits.

The keys of all requests are in one buffer, and so are the values. A row of a buffer (a "pool row")
is the key or value of one token for one key head. A request's cache is a part of each buffer:
``capacity`` places for the first key head, then as many for the next one, and so on. All rows of a
request see its first keys (``seen_by_all`` of them), and ``mask`` says which rows see each of the
``tail`` keys after those.

Only ``few_rows`` imports this file, and only where there is a GPU, because Triton is optional.
Under ``TRITON_INTERPRET=1`` the same code runs on CPUs.
"""

# Arguments of kernels have no types for mypy, because Triton's compiler gives them their types.
# mypy: disallow-untyped-defs=False

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int, UInt8
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)

INTERPRETED = triton.knobs.runtime.interpret  # Whether Triton's interpreter runs the kernels.
MAX_SPLITS = 64
BLOCK_BYTES = 16384  # The bytes of keys that a program reads at once. It reads as many of values.
MAX_STAGES = 3  # The most blocks of keys and values that a program reads ahead.
MAX_ROW_BLOCK = 64  # The most queries of one program.
SPLITS_AT_ONCE = 16  # How many splits are added up together.


def row_block(queries: int) -> int:
    """Returns how many of a request's queries one program attends for.

    It is a power of two that tensor cores allow. A query is one head of one row, and a group's
    heads share their keys. ``queries`` is how many queries one key head has in the request: its
    rows times the heads of a group.
    """
    return min(MAX_ROW_BLOCK, max(16, triton.next_power_of_2(queries)))


def key_block(head_dim: int, itemsize: int) -> int:
    """Returns how many keys a program reads at once."""
    padded = max(16, triton.next_power_of_2(head_dim))
    return min(64, max(16, BLOCK_BYTES // (padded * itemsize)))


def splits_for(programs: int, processors: int) -> int:
    """Returns into how many splits each request's keys are cut.

    ``programs`` is how many programs all requests together would have if keys were not cut. The
    number of splits gives each of the GPU's ``processors`` (SMs) about one program. More programs
    read keys no faster on an H100, and more splits take longer to add up. The number is a power of
    two, as ``tl.arange`` needs.
    """
    splits = max(1, processors // max(1, programs))
    return min(MAX_SPLITS, 1 << (splits.bit_length() - 1))


def stages_for(shared_memory: int) -> int:
    """Returns how many blocks of keys and values a program reads ahead.

    It reads ``MAX_STAGES`` blocks ahead if ``shared_memory``, the bytes that a program may have, is
    at least one and a half times what so many blocks take. Otherwise it reads one block less.
    """
    needed = MAX_STAGES * 2 * BLOCK_BYTES
    return MAX_STAGES if shared_memory >= 1.5 * needed else MAX_STAGES - 1


@triton.jit
def _add_keys(
    mixed, top, total, query, keys, values, mask_rows, start, seen_by_all, end, scale, soft_cap,
    is_real, is_inside, dims,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, HEAD_DIM: tl.constexpr,
    KEY_BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to the running softmax of a block of queries, and returns the new
    state of the softmax.

    The state of each query is ``mixed``, the weighted sum of the values, ``top``, the largest logit
    in base 2, and ``total``, the sum of the weights. The block has the keys from
    ``start`` on, but none from ``end`` on. ``mask_rows`` points to each query's row of the mask.
    ``is_real`` is false for queries that only pad their block, and ``is_inside`` for dimensions
    that only pad a head. Without ``MASKED`` the block must be whole, and every query sees all of
    it. With ``WIDE`` products are in float32, because the interpreter multiplies bfloat16 wrongly.
    """
    key = start + tl.arange(0, KEY_BLOCK)
    key_at = key[:, None] * HEAD_DIM + dims[None, :]
    if MASKED:
        is_key = key < end
        readable = is_key[:, None] & is_inside[None, :]
    else:
        readable = is_inside[None, :]
    read_keys = tl.load(keys + key_at, mask=readable, other=0.0)
    read_values = tl.load(values + key_at, mask=readable, other=0.0)
    if WIDE:
        read_keys = read_keys.to(tl.float32)
    logits = tl.dot(query, tl.trans(read_keys), input_precision="ieee") * scale
    if SOFT_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        logits = soft_cap * (2 * tl.sigmoid(2 * logits / soft_cap) - 1)
    logits *= LOG2_E
    if MASKED:
        has_mask_column = is_key & (key >= seen_by_all)  # The keys that have a column in the mask.
        allowed = tl.load(
            mask_rows[:, None] + (key - seen_by_all)[None, :],
            mask=is_real[:, None] & has_mask_column[None, :],
            other=0,
        )
        visible = (allowed != 0) | (key < seen_by_all)[None, :]
        visible = visible & is_key[None, :] & is_real[:, None]
        logits = tl.where(visible, logits, float("-inf"))
        # The value of a key that no row sees may be NaN, and 0 x NaN is NaN.
        is_used = tl.max(visible.to(tl.int32), 0) > 0
        read_values = tl.where(is_used[:, None], read_values, 0.0)
    new_top = tl.maximum(top, tl.max(logits, 1))
    # Weights are relative to the largest logit so far. That logit is -inf for a row that has seen
    # no key yet, and -inf minus -inf is NaN.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - base[:, None])
    shrink = tl.exp2(top - base)  # Earlier weights were relative to the earlier maximum.
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    weights = weights.to(read_values.dtype)
    if WIDE:
        weights = weights.to(tl.float32)
        read_values = read_values.to(tl.float32)
    mixed = tl.dot(weights, read_values, mixed, input_precision="ieee")
    return mixed, new_top, total


@triton.jit
def _attend_to_split(
    query, key_buffer, value_buffer, caches, mask, mixed_out, sums_out,
    rows_per_request, tail, scale, soft_cap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    ROW_BLOCK: tl.constexpr, KEY_BLOCK: tl.constexpr, SOFT_CAP: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Computes softmax attention of a block of one request's queries over one split of its keys.

    The programs are (split, block of queries and key head, request). Each stores the state that
    ``_add_keys`` describes: ``mixed`` in ``mixed_out``, not yet divided by the softmax's sum, and
    ``top`` and ``total`` in ``sums_out``. ``caches`` is that of :func:`attend`.
    """
    GROUP_SIZE: tl.constexpr = HEADS // KV_HEADS  # Query heads that share a key head.
    split = tl.program_id(0)
    splits = tl.num_programs(0)
    kv_head = tl.program_id(1) % KV_HEADS
    block = tl.program_id(1) // KV_HEADS
    request = tl.program_id(2)
    requests = tl.num_programs(2)
    first_pool_row = tl.load(caches + request)  # Where the request's keys begin.
    capacity = tl.load(caches + requests + request)
    seen_by_all = tl.load(caches + 2 * requests + request).to(tl.int32)
    # The mask is equally wide for all requests, so it may go on beyond a cache.
    all_keys = tl.minimum(seen_by_all + tail, capacity.to(tl.int32))
    # The offset is a multiple of a constant, so the compiler knows its alignment and reads 16 bytes
    # at once. It would not know the alignment of a pointer that is loaded.
    start_at = (first_pool_row + kv_head * capacity) * HEAD_DIM
    keys = key_buffer + start_at
    values = value_buffer + start_at

    # The heads of a group share their keys, so they are further queries of the same program. With
    # groups of 4 heads, queries 0 to 3 are the first row's, and 4 to 7 the second row's.
    number = block * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
    is_real = number < rows_per_request * GROUP_SIZE
    row = request * rows_per_request + number // GROUP_SIZE
    head = kv_head * GROUP_SIZE + number % GROUP_SIZE
    dims = tl.arange(0, PADDED)
    is_inside = dims < HEAD_DIM
    queries = tl.load(
        query + ((row * HEADS + head) * HEAD_DIM)[:, None] + dims[None, :],
        mask=is_real[:, None] & is_inside[None, :],
        other=0.0,
    )
    if WIDE:
        queries = queries.to(tl.float32)
    mask_rows = mask + row * tail

    # Each split has equally many keys, in whole blocks. The last splits may have fewer, or none.
    split_keys = tl.cdiv(tl.cdiv(all_keys, KEY_BLOCK), splits) * KEY_BLOCK
    begin = split * split_keys
    end = tl.minimum(begin + split_keys, all_keys)
    # Whole blocks that every row sees need no mask.
    plain_end = tl.minimum(end // KEY_BLOCK * KEY_BLOCK, seen_by_all // KEY_BLOCK * KEY_BLOCK)
    mixed = tl.zeros([ROW_BLOCK, PADDED], dtype=tl.float32)
    top = tl.full([ROW_BLOCK], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROW_BLOCK], dtype=tl.float32)
    for start in range(begin, plain_end, KEY_BLOCK):
        mixed, top, total = _add_keys(
            mixed, top, total, queries, keys, values, mask_rows, start, seen_by_all, end, scale,
            soft_cap, is_real, is_inside, dims, False, SOFT_CAP, HEAD_DIM, KEY_BLOCK, WIDE,
        )  # fmt: skip
    for start in range(tl.maximum(begin, plain_end), end, KEY_BLOCK):
        mixed, top, total = _add_keys(
            mixed, top, total, queries, keys, values, mask_rows, start, seen_by_all, end, scale,
            soft_cap, is_real, is_inside, dims, True, SOFT_CAP, HEAD_DIM, KEY_BLOCK, WIDE,
        )  # fmt: skip

    # Where the state of each query for this split is stored.
    state_at = (row * HEADS + head) * splits + split
    tl.store(
        mixed_out + state_at[:, None] * HEAD_DIM + dims[None, :],
        mixed,
        mask=is_real[:, None] & is_inside[None, :],
    )
    tl.store(sums_out + 2 * state_at, top, mask=is_real)
    tl.store(sums_out + 2 * state_at + 1, total, mask=is_real)


@triton.jit
def _add_splits(
    mixed, sums, out,
    HEAD_DIM: tl.constexpr, PADDED: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds up the splits of one head of one row, and divides by the softmax's sum.

    ``mixed`` and ``sums`` are what ``_attend_to_split`` has stored. Up to ``CHUNK`` splits are read
    at once.
    """
    output = tl.program_id(0)  # One head of one row.
    all_splits = output * SPLITS + tl.arange(0, SPLITS)
    tops = tl.load(sums + 2 * all_splits)
    totals = tl.load(sums + 2 * all_splits + 1)
    top = tl.max(tops, 0)
    # The weights of every split are made relative to the largest logit of all splits.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp2(tops - base), 0)
    dims = tl.arange(0, PADDED)
    is_inside = dims < HEAD_DIM
    summed = tl.zeros([PADDED], dtype=tl.float32)
    for first in range(0, SPLITS, CHUNK):
        some_splits = output * SPLITS + first + tl.arange(0, CHUNK)
        weight = tl.exp2(tl.load(sums + 2 * some_splits) - base)
        read = tl.load(
            mixed + some_splits[:, None] * HEAD_DIM + dims[None, :],
            mask=is_inside[None, :],
            other=0.0,
        )
        summed += tl.sum(read * weight[:, None], 0)
    # The result of a row that sees no key at all is zeros.
    summed = summed / tl.where(total == 0.0, 1.0, total)
    tl.store(out + output * HEAD_DIM + dims, summed.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _rotate_and_write(
    query, key, value, query_norm, key_norm, cos, sin, key_buffer, value_buffer, caches, places,
    query_out, rows_per_request, requests, query_row_stride, query_head_stride,
    key_row_stride, key_head_stride, value_row_stride, value_head_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED: tl.constexpr,
    NORMED: tl.constexpr, ROTATED: tl.constexpr,
):  # fmt: skip
    """Writes one head of one row: a query to ``query_out``, a key or value to its request's cache.

    The programs are (row, head), where the heads are those of queries, then of keys, then of
    values. Queries and keys are normed and rotated before they are written. ``sin`` includes the
    sign of rotate-half.
    """
    row = tl.program_id(0)
    head = tl.program_id(1)
    dims = tl.arange(0, PADDED)
    is_inside = dims < HEAD_DIM
    HALF: tl.constexpr = HEAD_DIM // 2
    # A rotation turns each number together with the one half a head away, its partner.
    swapped = tl.where(dims < HALF, dims + HALF, dims - HALF)
    is_query = head < HEADS
    is_value = head >= HEADS + KV_HEADS
    dtype = query.dtype.element_ty
    if is_query:
        source = query + row * query_row_stride + head * query_head_stride
    elif is_value:
        source = value + row * value_row_stride + (head - HEADS - KV_HEADS) * value_head_stride
    else:
        source = key + row * key_row_stride + (head - HEADS) * key_head_stride
    numbers = tl.load(source + dims, mask=is_inside, other=0.0)
    if not is_value:
        if NORMED or ROTATED:
            exact = numbers.to(tl.float32)
            partner = tl.load(source + swapped, mask=is_inside, other=0.0).to(tl.float32)
            if NORMED:
                norm = query_norm
                if not is_query:
                    norm = key_norm
                scale = tl.rsqrt(tl.sum(exact * exact, 0) / HEAD_DIM + eps)
                # What is normed is rounded to ``dtype``, as the result of torch's ``rms_norm`` is.
                weight = tl.load(norm + dims, mask=is_inside, other=0.0).to(tl.float32)
                exact = (exact * scale * weight).to(dtype).to(tl.float32)
                weight = tl.load(norm + swapped, mask=is_inside, other=0.0).to(tl.float32)
                partner = (partner * scale * weight).to(dtype).to(tl.float32)
            if ROTATED:
                at = row * HEAD_DIM + dims
                exact = exact * tl.load(cos + at, mask=is_inside, other=0.0).to(tl.float32)
                exact += partner * tl.load(sin + at, mask=is_inside, other=0.0).to(tl.float32)
            numbers = exact.to(dtype)
    if is_query:
        tl.store(query_out + (row * HEADS + head) * HEAD_DIM + dims, numbers, mask=is_inside)
    else:
        request = row // rows_per_request
        first_pool_row = tl.load(caches + request)  # Where the request's keys begin.
        capacity = tl.load(caches + requests + request)
        place = tl.load(places + row)
        kv_head = (head - HEADS) % KV_HEADS
        buffer = key_buffer
        if is_value:
            buffer = value_buffer
        at = (first_pool_row + kv_head * capacity + place) * HEAD_DIM
        tl.store(buffer + at + dims, numbers, mask=is_inside)


def attend(
    q: Float[Tensor, "row head head_dim"],
    keys: Float[Tensor, "pool_row head_dim"],
    values: Float[Tensor, "pool_row head_dim"],
    caches: Int[Tensor, "3 request"],
    mask: UInt8[Tensor, "row tail"],
    kv_heads: int,
    splits: int,
    scale: float,
    soft_cap: float = 0.0,
    stages: int = 2,
) -> Float[Tensor, "row out"]:
    """Returns the attention of every row over its request's keys, heads side by side.

    ``caches`` has three numbers for each request: where its keys begin in the buffers, how many
    places each key head has there (``capacity``), and how many of its keys all its rows see
    (``seen_by_all``). ``mask`` says which rows see each of the ``tail`` keys after those. The keys
    are cut into ``splits`` parts. ``stages`` is how many blocks of keys a program reads ahead. A
    logit is the product of query and key times ``scale``. With a ``soft_cap`` above 0, tanh keeps
    it between -``soft_cap`` and ``soft_cap``; 0 stands for no cap.

    It launches two kernels and waits for neither. All that differs between steps of one size is
    read on the GPU, so a captured launch serves every step of that size.
    """
    rows, heads, head_dim = q.shape  # The rows of all requests.
    requests = caches.shape[1]
    mixed = q.new_empty(rows, heads, splits, head_dim, dtype=torch.float32)
    sums = q.new_empty(rows, heads, splits, 2, dtype=torch.float32)
    out = q.new_empty(rows, heads * head_dim)
    padded = max(16, triton.next_power_of_2(head_dim))
    queries = rows // requests * (heads // kv_heads)
    block = row_block(queries)
    _attend_to_split[(splits, kv_heads * triton.cdiv(queries, block), requests)](
        q, keys, values, caches, mask, mixed, sums,
        rows // requests, mask.shape[1], scale, soft_cap,
        HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=head_dim, PADDED=padded, ROW_BLOCK=block,
        KEY_BLOCK=key_block(head_dim, q.element_size()), SOFT_CAP=soft_cap > 0,
        WIDE=INTERPRETED and q.dtype == torch.bfloat16, num_warps=4, num_stages=stages,
        enable_fp_fusion=True,
    )  # fmt: skip
    _add_splits[(rows * heads,)](
        mixed, sums, out, HEAD_DIM=head_dim, PADDED=padded, SPLITS=splits,
        CHUNK=min(splits, SPLITS_AT_ONCE), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out


def rotate_and_write(
    q: Float[Tensor, "row head head_dim"],
    k: Float[Tensor, "row kv_head head_dim"],
    v: Float[Tensor, "row kv_head head_dim"],
    keys: Float[Tensor, "pool_row head_dim"],
    values: Float[Tensor, "pool_row head_dim"],
    caches: Int[Tensor, "3 request"],
    places: Int[Tensor, " row"],
    rotation: tuple[Float[Tensor, "row head_dim"], Float[Tensor, "row head_dim"]] | None = None,
    norms: tuple[Float[Tensor, " head_dim"], Float[Tensor, " head_dim"]] | None = None,
    eps: float = 0.0,
) -> Float[Tensor, "row head head_dim"]:
    """Norms and rotates queries and keys. Returns the queries, and writes keys and values into the
    buffers.

    ``caches`` is that of :func:`attend`, and ``places`` has the position of each row's key in its
    request's cache. ``rotation`` is (cos, sin), where sin includes the sign of rotate-half, and
    ``norms`` are the weights of the RMS norms of queries and of keys, with ``eps``. Without
    ``rotation`` or ``norms``, that step is left out. Launches one kernel.
    """
    rows, heads, head_dim = q.shape
    out = q.new_empty(rows, heads, head_dim)
    # Where a step is left out, its pointers are not read, and any tensor will do.
    cos, sin = (q, q) if rotation is None else rotation
    query_norm, key_norm = (q, q) if norms is None else norms
    requests = caches.shape[1]
    _rotate_and_write[(rows, heads + 2 * k.shape[1])](
        q, k, v, query_norm, key_norm, cos, sin, keys, values, caches, places,
        out, rows // requests, requests, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), eps,
        HEADS=heads, KV_HEADS=k.shape[1], HEAD_DIM=head_dim,
        PADDED=max(16, triton.next_power_of_2(head_dim)), NORMED=norms is not None,
        ROTATED=rotation is not None, num_warps=1, enable_fp_fusion=True,
    )  # fmt: skip
    return out
