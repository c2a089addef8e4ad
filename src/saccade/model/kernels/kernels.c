/* Attention and products of a decoder in fp32, for any number of rows.

   No result of a row is a sum over a vector's lanes, and its sums are computed in one order, whatever
   rows are beside it and however many threads there are. So a row has the same result, bit for bit,
   alone and among others. (The attention mass is an exception: threads add it up in any order.)

   In attention the lanes are queries. A key's numbers are broadcast to all of them, and both products
   and the softmax go lane by lane. Keys are read once, a block at a time, and the softmax's maximum and
   sum are updated with each block (Milakov and Gimelshein 2018, "Online normalizer calculation for
   softmax"). A *tile* is up to MAX_VECTORS vectors of queries of one key head. Threads share the tiles,
   and parts of the keys. In a product the lanes are outputs. */

#include <float.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#define KEYS_AT_ONCE 8  /* Keys scored together; with MAX_VECTORS vectors each they fill the registers. */
#define ROWS_AT_ONCE 12 /* Rows multiplied together, with VECTORS_PER_PANEL vectors each. */
#elif defined(__AVX__)
#define BYTES 32
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE 6
/* Without this, GCC reads the vector from memory again for each sum. */
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define BYTES 16
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE 6
#endif
#ifndef IN_REGISTER
#define IN_REGISTER(x)
#endif
#define LOAD(each, from, count) \
    lanes each[MAX_VECTORS];    \
    EACH(n, count) { each[n] = (from)[n]; IN_REGISTER(each[n]); }
#define LANES ((int)(BYTES / sizeof(float)))
#define MAX_VECTORS 3 /* Of a tile's queries. */
#define TILE (MAX_VECTORS * LANES)
#define DIMS_AT_ONCE 8 /* Numbers of a value added together for one vector; head sizes are multiples of it. */
#define MAX_HEAD_DIM 256
#define KEY_BLOCK 64       /* Keys between two updates of the maximum. */
#define KEYS_PER_PART 1024 /* Keys that one thread goes over; a multiple of KEY_BLOCK. */
#define LOWEST -1e30f
#define LOG2_E 1.4426950408889634 /* Logits are multiplied by it, because weights are powers of two. */
#define VECTORS_PER_PANEL 2       /* Vectors of outputs in a panel of a product. */
#define OUTPUTS_PER_PANEL (VECTORS_PER_PANEL * LANES)
#define PREFETCH_DISTANCE 8     /* Weights are prefetched so many inputs before they are used. */
#define MIN_BLOCKS_PER_PART 8   /* Of a part of the rows, so that all parts are about equally large. */
#define NEAR_CACHE_BYTES 524288 /* So many bytes of rows are multiplied with one panel after another. */
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

typedef float lanes __attribute__((vector_size(BYTES), may_alias));
typedef float anywhere __attribute__((vector_size(BYTES), may_alias, aligned(4)));
typedef int32_t masks __attribute__((vector_size(BYTES), may_alias));

/* The layout is that of `compiled.ATTENTION_ARGUMENTS`. Strides are counted in floats, and the numbers of
   a row are contiguous. `bias` [rows][bias_keys] is added to the logits of the last keys, or it is NULL.
   `visible_keys` has the number of keys that each row sees. Where it is NULL, a row sees all keys if there
   is a bias, and else every key up to itself. The mass of the last `mass_rows` rows on `columns` is added
   to `mass` [kv_heads][2][chosen]. */
typedef struct {
    const float *q, *k, *v, *bias;
    const int64_t *visible_keys, *columns;
    float *out, *mass;
    ptrdiff_t q_head, q_row, k_head, k_row, v_head, v_row, bias_row, out_head, out_row;
    ptrdiff_t kv_heads, groups, rows, keys, width, bias_keys, chosen, mass_rows, threads;
    double scale;
} attention_call;

/* How many keys each query of a tile sees, and the fewest and the most of these numbers. */
typedef struct {
    masks each[MAX_VECTORS];
    ptrdiff_t fewest, most;
} visibility;

/* Queries of one key head: `count` of its rows * groups, from `first` on. The queries of a row are next to
   each other, so that the queries of a tile see about equally many keys. */
typedef struct {
    ptrdiff_t head, first, count;
} tile;

INLINE lanes maximum(lanes a, lanes b) {
    masks first = a > b;
    return (lanes)(((masks)a & first) | ((masks)b & ~first));
}

INLINE float sum_lanes(lanes x) {
    EACH(half, LANES / 2) x[half] += x[half + LANES / 2];
    EACH(half, LANES / 4) x[half] += x[half + LANES / 4];
    float sum = x[0];
    EACH(rest, LANES / 4 - 1) sum += x[rest + 1];
    return sum;
}

/* Returns 2^x to 2e-7. It is exactly 1 for 0, it is 0 below 2^-126, and NaN stays NaN. The shift rounds x
   to a whole power, which is added to the float's exponent. The polynomial of the rest has the smallest
   largest error with so few terms. */
INLINE lanes power_of_two(lanes x) {
    const float shift = 12582912.0f;
    const masks nothing = x < -126.0f;
    const lanes whole = x + shift;
    x -= whole - shift;
    lanes y = x * 1.32647288e-3f + 9.67151318e-3f;
    y = y * x + 5.55073374e-2f;
    y = y * x + 2.40222421e-1f;
    y = y * x + 6.93146978e-1f;
    y = y * x + 1.0f;
    return (lanes)(((masks)y + ((masks)whole << 23)) & ~nothing);
}

/* Computes the products of some keys with a tile: logits[key][vectors]. */
INLINE void score(int vectors, int keys, const lanes *q, const float *k, ptrdiff_t k_row, ptrdiff_t width,
                  lanes *logits) {
    lanes sum[2 * KEYS_AT_ONCE][MAX_VECTORS];
    EACH(j, keys) EACH(n, vectors) sum[j][n] = (lanes){0};
    for (ptrdiff_t i = 0; i < width; i++) {
        LOAD(each, q + i * vectors, vectors)
        EACH(j, keys) EACH(n, vectors) sum[j][n] += k[j * k_row + i] * each[n];
    }
    EACH(j, keys) EACH(n, vectors) logits[j * vectors + n] = sum[j][n];
}

/* Adds some numbers of each weighted value: mixed[dim][vectors] += weights[key][vectors] * value[dim]. */
INLINE void add_values(int vectors, int dims, int keys, const lanes *weights, const float *v, ptrdiff_t v_row,
                       lanes *mixed) {
    lanes sum[DIMS_AT_ONCE][MAX_VECTORS];
    EACH(i, dims) EACH(n, vectors) sum[i][n] = mixed[i * vectors + n];
    for (int j = 0; j < keys; j++) {
        LOAD(each, weights + j * vectors, vectors)
        EACH(i, dims) EACH(n, vectors) sum[i][n] += v[j * v_row + i] * each[n];
    }
    EACH(i, dims) EACH(n, vectors) mixed[i * vectors + n] = sum[i][n];
}

INLINE void fetch(const float *rows, ptrdiff_t row, int count, ptrdiff_t width) {
    for (int j = 0; j < count; j++)
        for (ptrdiff_t i = 0; i < width; i += 16) __builtin_prefetch(rows + j * row + i);
}

/* Replaces logits by weights, and rescales what was added before to the same maximum. */
INLINE void update_softmax(int vectors, int keys, lanes *logits, lanes *mixed, ptrdiff_t width, lanes *highest,
                           lanes *sum) {
    lanes top[MAX_VECTORS], shrink[MAX_VECTORS];
    masks higher = {0};
    int any = 0, j = 0;
    EACH(n, vectors) top[n] = highest[n];
    for (; j + 4 <= keys; j += 4) /* Maxima of pairs do not wait for each other. */
        EACH(n, vectors) {
            const lanes *key = logits + j * vectors + n;
            const lanes first = maximum(key[0], key[vectors]), second = maximum(key[2 * vectors], key[3 * vectors]);
            top[n] = maximum(top[n], maximum(first, second));
        }
    for (; j < keys; j++) EACH(n, vectors) top[n] = maximum(top[n], logits[j * vectors + n]);
    EACH(n, vectors) higher |= top[n] > highest[n];
    EACH(lane, LANES) any |= higher[lane];
    if (any) {
        EACH(n, vectors) {
            shrink[n] = power_of_two(highest[n] - top[n]);
            highest[n] = top[n];
            sum[n] *= shrink[n];
        }
        for (ptrdiff_t i = 0; i < width; i++) EACH(n, vectors) mixed[i * vectors + n] *= shrink[n];
    }
    for (j = 0; j < keys; j++)
        EACH(n, vectors) {
            lanes weight = power_of_two(logits[j * vectors + n] - top[n]);
            logits[j * vectors + n] = weight;
            sum[n] += weight;
        }
}

INLINE ptrdiff_t row_of(const attention_call *c, tile t, ptrdiff_t r) { return (t.first + r) / c->groups; }

/* Returns the offset of query `r` of a tile, by the strides of q or out. */
INLINE ptrdiff_t offset_of(const attention_call *c, tile t, ptrdiff_t r, ptrdiff_t head, ptrdiff_t row) {
    return (t.head * c->groups + (t.first + r) % c->groups) * head + row_of(c, t, r) * row;
}

INLINE int vector_count(tile t) { return (int)((t.count + LANES - 1) / LANES); }

/* Loads a tile's queries as lanes [width][vectors], and returns how many keys they see. */
static visibility load(const attention_call *c, tile t, lanes *q) {
    const int across = vector_count(t) * LANES;
    const float scale = (float)(c->scale * LOG2_E);
    visibility visible = {.fewest = c->keys};
    EACH(n, MAX_VECTORS) visible.each[n] += (int32_t)c->keys; /* Padding sees all keys. */
    memset(q, 0, sizeof(float) * c->width * across);
    for (ptrdiff_t r = 0; r < t.count; r++) {
        const float *row = c->q + offset_of(c, t, r, c->q_head, c->q_row);
        const ptrdiff_t number = row_of(c, t, r);
        for (ptrdiff_t i = 0; i < c->width; i++) ((float *)q)[i * across + r] = row[i] * scale;
        ptrdiff_t own = c->keys - c->rows + number + 1;
        if (c->bias) own = c->keys;
        if (c->visible_keys) own = c->visible_keys[number];
        if (own < visible.fewest) visible.fewest = own;
        if (own > visible.most) visible.most = own;
        ((int32_t *)visible.each)[r] = (int32_t)own;
    }
    return visible;
}

/* Computes the logits [count][vectors] of a tile and the keys from `start` on. They are -inf where a query
   does not see the key. Keys before `to` may be prefetched. */
INLINE void compute_logits(int vectors, const attention_call *c, tile t, const lanes *q, const visibility *visible,
                           ptrdiff_t start, int count, ptrdiff_t to, lanes *logits) {
    const int keys = vectors == 1 ? 2 * KEYS_AT_ONCE : KEYS_AT_ONCE;
    const float *k = c->k + t.head * c->k_head + start * c->k_row;
    const float *v = c->v ? c->v + t.head * c->v_head + start * c->v_row : NULL;
    const int many = count < keys ? 0 : count;
    for (int next = 0; next < many; next += keys) {
        /* The last keys are scored together, some of them for the second time. */
        const int j = next + keys <= count ? next : count - keys;
        if (v) fetch(v + j * c->v_row, c->v_row, keys, c->width);
        if (start + j + 2 * keys <= to) fetch(k + (j + keys) * c->k_row, c->k_row, keys, c->width);
        score(vectors, keys, q, k + j * c->k_row, c->k_row, c->width, logits + j * vectors);
    }
    for (int j = many; j < count; j++)
        score(vectors, 1, q, k + j * c->k_row, c->k_row, c->width, logits + j * vectors);
    const lanes nothing = (lanes){0} - __builtin_inff();
    for (ptrdiff_t key = visible->fewest > start ? visible->fewest : start; key < start + count; key++)
        EACH(n, vectors) {
            const masks sees_key = visible->each[n] > (int32_t)key;
            lanes *logit = logits + (key - start) * vectors + n;
            *logit = (lanes)(((masks)*logit & sees_key) | ((masks)nothing & ~sees_key));
        }
}

/* Attends with a tile to keys from:to. Writes the weighted values into mixed [width][vectors], if there are
   values, and after them the maximum and the sum [vectors] of each query. If there are `weights`
   [keys][vectors], it stores the weights there, relative to the maximum as it was at each block, and after
   all weights it stores those maxima [block][vectors]. */
INLINE void attend_to_keys(int vectors, const attention_call *c, tile t, const lanes *q, const visibility *visible,
                           ptrdiff_t from, ptrdiff_t to, lanes *mixed, lanes *weights) {
    const float *v = c->v + t.head * c->v_head;
    const int dims = vectors == 1 ? DIMS_AT_ONCE : KEYS_AT_ONCE, has_values = !weights || c->v;
    const ptrdiff_t width = c->width, before = c->keys - c->bias_keys;
    lanes block[KEY_BLOCK * MAX_VECTORS], *highest = mixed + width * vectors, *sum = highest + vectors;
    memset(mixed, 0, sizeof(lanes) * vectors * (width + 2));
    EACH(n, vectors) highest[n] += LOWEST;
    for (ptrdiff_t start = from; start < to; start += KEY_BLOCK) {
        const int count = to - start < KEY_BLOCK ? (int)(to - start) : KEY_BLOCK;
        lanes *logits = weights ? weights + start * vectors : block;
        compute_logits(vectors, c, t, q, visible, start, count, to, logits);
        for (ptrdiff_t r = 0; c->bias && start + count > before && r < t.count; r++) {
            const float *bias = c->bias + row_of(c, t, r) * c->bias_row;
            for (ptrdiff_t key = start > before ? start : before; key < start + count; key++)
                ((float *)logits)[(key - start) * vectors * LANES + r] += bias[key - before] * (float)LOG2_E;
        }
        update_softmax(vectors, count, logits, mixed, has_values ? width : 0, highest, sum);
        EACH(n, vectors) if (weights) weights[(c->keys + start / KEY_BLOCK) * vectors + n] = highest[n];
        for (ptrdiff_t i = 0; has_values && i < width; i += dims)
            add_values(vectors, dims, count, logits, v + start * c->v_row + i, c->v_row, mixed + i * vectors);
    }
}

/* Attends with a tile to the part of the keys that has this number. */
static void attend_to_part(const attention_call *c, tile t, const lanes *q, const visibility *visible,
                           ptrdiff_t number, lanes *mixed, lanes *weights) {
    const ptrdiff_t from = number * KEYS_PER_PART, end = from + KEYS_PER_PART;
    const ptrdiff_t to = end < visible->most ? end : visible->most;
/* The constants let the compiler unroll each case, and leave out what is done for `weights`. */
#define ATTEND(vectors)                                                      \
    if (vector_count(t) == vectors && weights)                               \
        attend_to_keys(vectors, c, t, q, visible, from, to, mixed, weights); \
    else if (vector_count(t) == vectors)                                     \
        attend_to_keys(vectors, c, t, q, visible, from, to, mixed, NULL);
    ATTEND(1) ATTEND(2) ATTEND(3)
}

/* Merges a tile's results over the next keys into its results over the keys before them. */
static void merge(const attention_call *c, tile t, lanes *merged, const lanes *next) {
    const int vectors = vector_count(t);
    const ptrdiff_t tops = c->width * vectors, sums = tops + vectors;
    for (int n = 0; n < vectors; n++) {
        const lanes top = maximum(merged[tops + n], next[tops + n]);
        const lanes first = power_of_two(merged[tops + n] - top), second = power_of_two(next[tops + n] - top);
        for (ptrdiff_t i = n; i < tops; i += vectors) merged[i] = merged[i] * first + next[i] * second;
        merged[tops + n] = top;
        merged[sums + n] = merged[sums + n] * first + next[sums + n] * second;
    }
}

/* Divides a tile's weighted values by the softmax's sums, and writes the outputs. */
static void write_outputs(const attention_call *c, tile t, lanes *mixed) {
    const int vectors = vector_count(t);
    const ptrdiff_t tops = c->width * vectors, sums = tops + vectors;
    for (int n = 0; n < vectors; n++)
        for (ptrdiff_t i = n; i < tops; i += vectors) mixed[i] /= mixed[sums + n];
    for (ptrdiff_t r = 0; r < t.count; r++) {
        float *out = c->out + offset_of(c, t, r, c->out_head, c->out_row);
        for (ptrdiff_t i = 0; i < c->width; i++) out[i] = ((float *)mixed)[i * vectors * LANES + r];
    }
}

INLINE ptrdiff_t parts_of(const attention_call *c) { return (c->keys + KEYS_PER_PART - 1) / KEYS_PER_PART; }

INLINE ptrdiff_t tiles(const attention_call *c, ptrdiff_t rows) { return (c->groups * rows + TILE - 1) / TILE; }

/* Returns how many of the last rows are in the tiles of the rows whose mass is added up. */
INLINE ptrdiff_t rows_of_mass_tiles(const attention_call *c) {
    const ptrdiff_t rows = tiles(c, c->mass_rows) * TILE / c->groups;
    return rows < c->rows ? rows : c->rows;
}

/* Returns the tile of this number, among the tiles of `rows` rows that come after `before` others. */
INLINE tile tile_of(const attention_call *c, ptrdiff_t task, ptrdiff_t before, ptrdiff_t rows) {
    const ptrdiff_t first = task / c->kv_heads * TILE, left = c->groups * rows - first;
    return (tile){task % c->kv_heads, c->groups * before + first, left < TILE ? left : TILE};
}

/* Attends with a tile to all keys that it sees, and returns their number. */
static ptrdiff_t attend_to_all_keys(const attention_call *c, tile t, lanes own[2][(MAX_HEAD_DIM + 2) * MAX_VECTORS],
                                    lanes *weights) {
    lanes q[MAX_HEAD_DIM * MAX_VECTORS];
    const visibility visible = load(c, t, q);
    attend_to_part(c, t, q, &visible, 0, own[0], weights);
    for (ptrdiff_t number = 1; number * KEYS_PER_PART < visible.most; number++) {
        attend_to_part(c, t, q, &visible, number, own[1], weights);
        merge(c, t, own[0], own[1]);
    }
    if (c->v) write_outputs(c, t, own[0]);
    return visible.most;
}

/* Adds to mass [2][chosen] what a tile attends to on the chosen columns: its share of all keys, and its
   share of the chosen columns. `weights` are those that attend_to_keys stored, and `highest` is followed by
   the sums. */
INLINE void add_mass(int vectors, const attention_call *c, tile t, ptrdiff_t most, lanes *weights,
                     const lanes *highest, float *mass) {
    const lanes *sum = highest + vectors;
    lanes *shrink = weights + c->keys * vectors, all[MAX_VECTORS], among[MAX_VECTORS];
    EACH(n, vectors) among[n] = (lanes){0};
    for (ptrdiff_t block = 0; block * KEY_BLOCK < most; block++)
        EACH(n, vectors) shrink[block * vectors + n] = power_of_two(shrink[block * vectors + n] - highest[n]);
    for (ptrdiff_t i = 0; i < c->chosen; i++) {
        const ptrdiff_t key = c->columns[i];
        EACH(n, vectors)
        if (key < most) among[n] += weights[key * vectors + n] * shrink[key / KEY_BLOCK * vectors + n];
    }
    EACH(n, vectors) {
        /* Padding, other rows, and rows without weight on these columns are left out. */
        for (int lane = 0; lane < LANES; lane++) {
            const ptrdiff_t r = n * LANES + lane;
            const int counts = r < t.count && row_of(c, t, r) >= c->rows - c->mass_rows;
            all[n][lane] = counts ? 1 / sum[n][lane] : 0;
            among[n][lane] = counts && among[n][lane] >= FLT_MIN ? 1 / among[n][lane] : 0;
        }
    }
    for (ptrdiff_t i = 0; i < c->chosen; i++) {
        const ptrdiff_t key = c->columns[i];
        lanes share_of_all = {0}, share_of_chosen = {0};
        if (key >= most) continue;
        EACH(n, vectors) {
            const lanes weight = weights[key * vectors + n] * shrink[key / KEY_BLOCK * vectors + n];
            share_of_all += weight * all[n];
            share_of_chosen += weight * among[n];
        }
        mass[i] += sum_lanes(share_of_all);
        mass[c->chosen + i] += sum_lanes(share_of_chosen);
    }
}

/* Attends with a tile, and adds the mass of its rows to mass [kv_heads][2][chosen]. */
static void attend_with_mass(const attention_call *c, tile t, lanes *weights, float *mass) {
    lanes own[2][(MAX_HEAD_DIM + 2) * MAX_VECTORS];
    const ptrdiff_t most = attend_to_all_keys(c, t, own, weights);
    const lanes *highest = own[0] + c->width * vector_count(t);
    mass += t.head * 2 * c->chosen;
    if (vector_count(t) == 1) add_mass(1, c, t, most, weights, highest, mass);
    if (vector_count(t) == 2) add_mass(2, c, t, most, weights, highest, mass);
    if (vector_count(t) == 3) add_mass(3, c, t, most, weights, highest, mass);
}

static lanes *allocate_weights(const attention_call *c) {
    return aligned_alloc(BYTES, sizeof(lanes) * MAX_VECTORS * (c->keys + c->keys / KEY_BLOCK + 1));
}

/* Returns 1 where there is no memory for the mass, else 0. */
int attend(const attention_call *c) {
    const ptrdiff_t last = rows_of_mass_tiles(c), rest = c->rows - last;
    const ptrdiff_t mass_size = 2 * c->kv_heads * c->chosen;
    const ptrdiff_t tasks = c->kv_heads * tiles(c, rest), parts = parts_of(c), size = (c->width + 2) * TILE;
    /* Threads share a tile's keys where there are more of them than tiles. */
    const int shared = tasks && tasks < c->threads && parts > 1;
    lanes *mixed = shared ? aligned_alloc(BYTES, sizeof(float) * tasks * parts * size) : NULL;
    const ptrdiff_t units = mixed ? tasks * parts : tasks;
    float *masses = last ? calloc(c->threads * mass_size + 1, sizeof(float)) : NULL; /* One for each thread. */
    int failed = last && !masses;
#pragma omp parallel num_threads(c->threads) reduction(| : failed)
    {
        lanes q[MAX_HEAD_DIM * MAX_VECTORS], own[2][(MAX_HEAD_DIM + 2) * MAX_VECTORS];
        lanes *weights = masses ? allocate_weights(c) : NULL;
        failed |= masses && !weights;
#pragma omp for schedule(static) nowait
        for (ptrdiff_t task = 0; task < c->kv_heads * tiles(c, last); task++) {
            float *mass = masses + omp_get_thread_num() * mass_size;
            if (weights) attend_with_mass(c, tile_of(c, task, rest, last), weights, mass);
        }
#pragma omp for schedule(dynamic)
        for (ptrdiff_t task = 0; task < units; task++) {
            const ptrdiff_t unit = units - 1 - task; /* The longest come first, so that threads end together. */
            const tile t = tile_of(c, mixed ? unit / parts : unit, 0, rest);
            if (mixed) {
                const visibility visible = load(c, t, q);
                attend_to_part(c, t, q, &visible, unit % parts, mixed + unit * size / LANES, NULL);
            } else {
                attend_to_all_keys(c, t, own, NULL);
            }
        }
        free(weights);
    }
    for (ptrdiff_t thread = 0; masses && thread < c->threads; thread++)
        for (ptrdiff_t i = 0; i < mass_size; i++) c->mass[i] += masses[thread * mass_size + i];
    free(masses);
    for (ptrdiff_t task = 0; mixed && task < tasks; task++) {
        const tile t = tile_of(c, task, 0, rest);
        lanes *first = mixed + task * parts * size / LANES;
        for (ptrdiff_t number = 1; number < parts; number++) merge(c, t, first, first + number * size / LANES);
        write_outputs(c, t, first);
    }
    free(mixed);
    return failed;
}

/* A product x W^T + base of contiguous rows. The layout is that of `compiled.PRODUCT_ARGUMENTS`. `w` is laid
   out as panels [in][OUTPUTS_PER_PANEL]. Rows of the base are `base_row` floats apart, which is 0 for a bias.
   A `gated` product has no base: the first half of a panel's outputs gates the second half, so that the
   results are silu(gate) times the second half. */
typedef struct {
    const float *x, *w, *base;
    float *y;
    ptrdiff_t base_row, rows, in, out, gated, threads;
} product;

/* Returns x / (1 + exp(-x)), by the power exp(-|x|), which cannot overflow. */
INLINE lanes silu(lanes x) {
    const lanes one = (lanes){0} + 1.0f;
    const lanes power = power_of_two((lanes)((masks)x | INT32_MIN) * (float)LOG2_E);
    const masks negative = x < 0.0f;
    return x * (lanes)(((masks)power & negative) | ((masks)one & ~negative)) / (one + power);
}

/* Returns how many results a panel has. */
INLINE int panel_results(const product *c) { return c->gated ? OUTPUTS_PER_PANEL / 2 : OUTPUTS_PER_PANEL; }

/* Multiplies some rows, from `row` on, with the panel of this number. */
INLINE void multiply_panel(int rows, const product *c, ptrdiff_t row, ptrdiff_t number) {
    const float *x = c->x + row * c->in;
    const lanes *w = (const lanes *)(c->w + number * OUTPUTS_PER_PANEL * c->in);
    const ptrdiff_t first = number * panel_results(c), left = c->out - first;
    lanes sum[ROWS_AT_ONCE][VECTORS_PER_PANEL];
    EACH(r, rows) EACH(n, VECTORS_PER_PANEL) sum[r][n] = (lanes){0};
    for (ptrdiff_t i = 0; i < c->in; i++) {
        EACH(n, VECTORS_PER_PANEL) __builtin_prefetch(w + (i + PREFETCH_DISTANCE) * VECTORS_PER_PANEL + n);
        LOAD(each, w + i * VECTORS_PER_PANEL, VECTORS_PER_PANEL)
        EACH(r, rows) EACH(n, VECTORS_PER_PANEL) sum[r][n] += x[r * c->in + i] * each[n];
    }
    if (c->gated)
        EACH(r, rows) EACH(n, VECTORS_PER_PANEL / 2)
            sum[r][n] = silu(sum[r][n]) * sum[r][n + VECTORS_PER_PANEL / 2];
    EACH(r, rows) {
        float *y = c->y + (row + r) * c->out + first;
        const float *base = c->base ? c->base + (row + r) * c->base_row + first : NULL;
        EACH(n, VECTORS_PER_PANEL) {
            if (n * LANES >= panel_results(c)) break;
            if ((n + 1) * LANES <= left) {
                if (base) sum[r][n] += *(const anywhere *)(base + n * LANES);
                *(anywhere *)(y + n * LANES) = sum[r][n];
            } else {
                for (int i = n * LANES; i < left; i++) y[i] = sum[r][n][i % LANES] + (base ? base[i] : 0);
            }
        }
    }
}

int outputs_of_a_panel(void) { return OUTPUTS_PER_PANEL; }

void multiply(const product *c) {
    const ptrdiff_t panels = (c->out + panel_results(c) - 1) / panel_results(c);
    const ptrdiff_t blocks = (c->rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, most_parts = blocks / MIN_BLOCKS_PER_PART;
    /* The rows are multiplied in parts that near caches hold. */
    ptrdiff_t parts = c->rows * c->in * (ptrdiff_t)sizeof(float) / NEAR_CACHE_BYTES + 1;
    if (parts > most_parts) parts = most_parts < 1 ? 1 : most_parts;
#pragma omp parallel for schedule(static) num_threads(c->threads)
    for (ptrdiff_t unit = 0; unit < parts * panels; unit++) {
        const ptrdiff_t start = blocks * (unit / panels) / parts, stop = blocks * (unit / panels + 1) / parts;
        for (ptrdiff_t block = start; block < stop; block++) {
            const ptrdiff_t row = c->rows * block / blocks; /* Blocks differ by at most one row. */
            switch (c->rows * (block + 1) / blocks - row) {
#define CASE(n) case n: multiply_panel(n, c, row, unit % panels); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS_AT_ONCE == 12
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}
