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
#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

/* -- products in low precision ----------------------------------------------------------------------

   Weights in bf16 are read where they are, row after row, so that no copy of them is needed. Sums are in
   fp32, and each is computed in one order whatever rows are beside it. */

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_VECTORS 1
#endif
#if defined(HAS_BF16_VECTORS) && defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(SYS_arch_prctl)
#define HAS_BF16_TILES 1
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define HAS_VNNI 1
#endif
#define TILE_ROWS 16       /* Rows of a tile, and the most rows that are multiplied by one tile. */
#define TILE_INPUTS 32     /* Inputs of one output that a row of a tile has in bf16. */
#define OUTPUTS_PER_UNIT 32 /* Outputs that one task computes: those of two tiles. */
#define LINE 64            /* Bytes of a cache line. */
#define BF16_ROWS_AT_ONCE 6     /* With 4 outputs each they fill the registers. */
#define BF16_ROWS_PER_PASS 48   /* Rows whose sums of one unit are kept. */
#define MAX_INPUTS_PER_PART 1536 /* Near caches hold so many inputs of BF16_ROWS_AT_ONCE rows. */
#define CODE_BLOCK 32      /* Inputs that share a scale, in weights of few bits and in rows that meet them. */
#define CODED_ROWS_AT_ONCE 4

/* The layout is that of `compiled.PRODUCT_ARGUMENTS`, as for fp32. Of a `gated` product `w` has twice `out`
   rows. */
typedef struct {
    const uint16_t *x, *w, *base;
    uint16_t *y;
    ptrdiff_t base_row, rows, in, out, gated, threads;
} bf16_product;

/* Returns which instructions there are: 1 for vectors of bf16, 2 for tiles of bf16, 4 for bytes. Tiles need
   the kernel's permission, which is asked for once for the whole process. */
int low_precision_instructions(void) {
    int found = 0;
#if defined(HAS_BF16_VECTORS)
    found |= 1;
#endif
#if defined(HAS_BF16_TILES)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    if (!syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA)) found |= 2;
#endif
#if defined(HAS_VNNI)
    found |= 4;
#endif
    return found;
}

#if defined(HAS_BF16_VECTORS)

INLINE lanes widen(const uint16_t *numbers, __mmask16 some) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, numbers));
    return (lanes)_mm512_slli_epi32(wide, 16);
}

INLINE void store_rounded(uint16_t *numbers, __mmask16 some, lanes values) {
    _mm256_mask_storeu_epi16(numbers, some, (__m256i)_mm512_cvtneps_pbh((__m512)values));
}

/* Writes 16 results of a row, from output `first` on: sums of `w`'s rows, and of those that they gate. */
INLINE void write_bf16(const bf16_product *c, ptrdiff_t row, ptrdiff_t first, lanes sums, lanes gated) {
    const __mmask16 some = 0xffff;
    if (c->gated) sums = silu(sums) * gated;
    if (c->base) sums += widen(c->base + row * c->base_row + first, some);
    store_rounded(c->y + row * c->out + first, some, sums);
}

/* Returns the sum over the lanes of each of 4 vectors. */
INLINE __m128 sum_lanes_of_4(const __m512 *v) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
    const __m512d even = _mm512_unpacklo_pd((__m512d)a, (__m512d)b), odd = _mm512_unpackhi_pd((__m512d)a, (__m512d)b);
    const __m512 quarters = _mm512_add_ps((__m512)even, (__m512)odd);
    const __m256 upper = (__m256)_mm512_extractf64x4_pd((__m512d)quarters, 1);
    const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quarters), upper);
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

/* Some inputs of a block of rows. While they are multiplied, the weights that are needed later are prefetched:
   those `ahead` numbers further on. The `blocks` blocks of rows share this work, so that memory is never idle:
   the one of number `block` prefetches at every `blocks`-th step. */
typedef struct {
    ptrdiff_t from, to, ahead, block, blocks;
} bf16_inputs;

/* Adds the products of the inputs that `some` names, 32 at most, to sum[row][output]. */
INLINE void add_products(int rows, __mmask32 some, const uint16_t *x, const uint16_t *w, ptrdiff_t in,
                         __m512 (*sum)[4]) {
    __m512bh each[4];
    EACH(o, 4) each[o] = (__m512bh)_mm512_maskz_loadu_epi16(some, w + o * in);
    EACH(r, rows) {
        const __m512bh own = (__m512bh)_mm512_maskz_loadu_epi16(some, x + r * in);
        EACH(o, 4) sum[r][o] = _mm512_dpbf16_ps(sum[r][o], each[o], own);
    }
}

/* Multiplies rows with the weights of 4 outputs, which begin at w, and adds the results to sums[row][output]
   unless the inputs are the first. */
INLINE void multiply_4_outputs(int rows, const bf16_inputs *inputs, const uint16_t *x, const uint16_t *w,
                               ptrdiff_t in, float *sums) {
    __m512 sum[BF16_ROWS_AT_ONCE][4];
    ptrdiff_t i = inputs->from, next = i + TILE_INPUTS * inputs->block;
    EACH(r, rows) EACH(o, 4) sum[r][o] = _mm512_setzero_ps();
    for (; i + TILE_INPUTS <= inputs->to; i += TILE_INPUTS) {
        if (i == next) {
            EACH(o, 4) _mm_prefetch((const char *)(w + o * in + i + inputs->ahead), _MM_HINT_T0);
            next += TILE_INPUTS * inputs->blocks;
        }
        add_products(rows, ~0u, x + i, w + i, in, sum);
    }
    if (i < inputs->to) add_products(rows, (1u << (inputs->to - i)) - 1, x + i, w + i, in, sum);
    EACH(r, rows) {
        __m128 results = sum_lanes_of_4(sum[r]);
        if (inputs->from) results = _mm_add_ps(_mm_loadu_ps(sums + r * OUTPUTS_PER_UNIT), results);
        _mm_storeu_ps(sums + r * OUTPUTS_PER_UNIT, results);
    }
}

/* Computes the sums[row][output] of some rows and of `outs` outputs, whose weights begin at w. The inputs are
   gone over in parts, of a size that depends on nothing but their number. */
static void multiply_unit(const bf16_product *c, ptrdiff_t row, ptrdiff_t rows, int outs, const uint16_t *w,
                          float *sums) {
    const ptrdiff_t parts = (c->in + MAX_INPUTS_PER_PART - 1) / MAX_INPUTS_PER_PART;
    const ptrdiff_t blocks = (rows + BF16_ROWS_AT_ONCE - 1) / BF16_ROWS_AT_ONCE;
    const ptrdiff_t size = (c->in / parts + TILE_INPUTS - 1) / TILE_INPUTS * TILE_INPUTS;
    for (ptrdiff_t from = 0; from < c->in; from += size) {
        const ptrdiff_t left = c->in - from, to_next_unit = OUTPUTS_PER_UNIT * c->in - from;
        bf16_inputs inputs = {from, left < size ? c->in : from + size, left > size ? size : to_next_unit, 0, blocks};
        for (; inputs.block < blocks; inputs.block++) {
            const ptrdiff_t first = rows * inputs.block / blocks, after = rows * (inputs.block + 1) / blocks;
            const uint16_t *x = c->x + (row + first) * c->in;
            for (int o = 0; o < outs; o += 4) {
                float *own = sums + first * OUTPUTS_PER_UNIT + o;
                switch (after - first) {
#define ROWS_CASE(n) case n: multiply_4_outputs(n, &inputs, x, w + o * c->in, c->in, own); break;
                    ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
                }
            }
        }
    }
}

/* Multiplies by vectors of bf16; there are at least 16 outputs. Returns 0. */
int multiply_bf16_by_vectors(const bf16_product *c) {
    const int outs = c->out < OUTPUTS_PER_UNIT ? TILE_ROWS : OUTPUTS_PER_UNIT;
    const ptrdiff_t units = (c->out + outs - 1) / outs;
#pragma omp parallel for schedule(static) num_threads(c->threads)
    for (ptrdiff_t unit = 0; unit < units; unit++) {
        float sums[2][BF16_ROWS_PER_PASS * OUTPUTS_PER_UNIT];
        /* The last outputs are computed together with some of those before them. */
        const ptrdiff_t first = (unit + 1) * outs <= c->out ? unit * outs : c->out - outs;
        for (ptrdiff_t row = 0; row < c->rows; row += BF16_ROWS_PER_PASS) {
            const ptrdiff_t rows = c->rows - row < BF16_ROWS_PER_PASS ? c->rows - row : BF16_ROWS_PER_PASS;
            multiply_unit(c, row, rows, outs, c->w + first * c->in, sums[0]);
            if (c->gated) multiply_unit(c, row, rows, outs, c->w + (c->out + first) * c->in, sums[1]);
            for (ptrdiff_t r = 0; r < rows; r++)
                for (int o = 0; o < outs; o += TILE_ROWS) {
                    const ptrdiff_t at = r * OUTPUTS_PER_UNIT + o;
                    const lanes gated = c->gated ? *(const anywhere *)(sums[1] + at) : (lanes){0};
                    write_bf16(c, row + r, first + o, *(const anywhere *)(sums[0] + at), gated);
                }
        }
    }
    return 0;
}

/* Transposes 16 vectors of 16 numbers of 32 bits. */
INLINE void transpose(__m512i *v) {
    __m512i t[16];
    EACH(i, 8) {
        t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
    }
    EACH(i, 4) {
        v[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        v[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        v[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    EACH(i, 4) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    EACH(i, 4) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#endif

#if defined(HAS_BF16_TILES)

/* The layout that the processor reads. */
typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16]; /* Of a row of each tile. */
    uint8_t rows[16];
} __attribute__((packed)) tile_configuration;

/* A tile of weights has 16 outputs as its rows, as they are in memory. A tile of the rows x has pairs of
   inputs as its rows, so x is transposed in pairs: [block][input pair][x row]. Tiles 0 and 1 are the sums of
   two tiles of weights (4 and 5) and a block of rows (6), and tiles 2 and 3 those with the next block (7). */
static void configure_tiles(int columns) {
    tile_configuration tiles = {.palette = 1};
    for (int number = 0; number < 8; number++) {
        tiles.rows[number] = TILE_ROWS;
        tiles.bytes[number] = (uint16_t)(4 * columns);
    }
    tiles.bytes[4] = tiles.bytes[5] = 2 * TILE_INPUTS;
    _tile_loadconfig(&tiles);
}

/* Lays out inputs from `from` on, as many as a tile has, of up to 16 rows from `row` on, as [pair][columns]. */
INLINE void lay_out_rows(const bf16_product *c, ptrdiff_t row, ptrdiff_t from, int columns, uint32_t *laid) {
    const ptrdiff_t left = c->rows - row;
    __m512i v[TILE_ROWS];
    EACH(r, TILE_ROWS) v[r] = r < left ? _mm512_loadu_si512(c->x + (row + r) * c->in + from) : _mm512_setzero_si512();
    transpose(v);
    const __mmask16 some = (__mmask16)((1u << columns) - 1);
    EACH(pair, TILE_ROWS) _mm512_mask_storeu_epi32(laid + pair * columns, some, v[pair]);
}

/* Writes the sums [output][row] of 16 outputs, and of those that they gate, for the rows from `row` on. */
static void write_tile(const bf16_product *c, ptrdiff_t row, ptrdiff_t first, __m512i *sums, __m512i *gated) {
    const ptrdiff_t left = c->rows - row;
    transpose(sums);
    if (c->gated) transpose(gated);
    for (int r = 0; r < TILE_ROWS && r < left; r++)
        write_bf16(c, row + r, first, (lanes)sums[r], (lanes)gated[r]);
}

/* Multiplies one or two blocks of rows with two tiles' outputs, whose weights begin at a and b. Meanwhile it
   prefetches as many weights from `next_a` and `next_b` on. */
INLINE void multiply_tiles(int blocks, const bf16_product *c, const uint16_t *a, const uint16_t *b,
                           const uint32_t *laid, int columns, const char *next_a, const char *next_b) {
    const ptrdiff_t stride = 2 * c->in, steps = c->in / TILE_INPUTS, block = steps * TILE_ROWS * columns;
    _tile_zero(0);
    _tile_zero(1);
    if (blocks == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (ptrdiff_t step = 0; step < steps; step++) {
        const uint32_t *rows = laid + step * TILE_ROWS * columns;
        if (next_a)
            EACH(line, TILE_ROWS) {
                _mm_prefetch(next_a + (step * TILE_ROWS + line) * LINE, _MM_HINT_T1);
                _mm_prefetch(next_b + (step * TILE_ROWS + line) * LINE, _MM_HINT_T1);
            }
        _tile_loadd(6, rows, 4 * columns);
        _tile_loadd(4, a + step * TILE_INPUTS, stride);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, b + step * TILE_INPUTS, stride);
        _tile_dpbf16ps(1, 5, 6);
        if (blocks == 2) {
            _tile_loadd(7, rows + block, 4 * columns);
            _tile_dpbf16ps(2, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
}

/* Multiplies by tiles of bf16; there are at least 16 outputs, and the inputs fill tiles. Returns 1 where there
   is no memory. */
int multiply_bf16_by_tiles(const bf16_product *c) {
    const ptrdiff_t steps = c->in / TILE_INPUTS, blocks = (c->rows + TILE_ROWS - 1) / TILE_ROWS;
    const ptrdiff_t per_unit = c->gated ? TILE_ROWS : OUTPUTS_PER_UNIT;
    const ptrdiff_t units = (c->out + per_unit - 1) / per_unit;
    const int columns = blocks == 1 ? (int)c->rows : TILE_ROWS;
    const ptrdiff_t block_size = steps * TILE_ROWS * columns;
    uint32_t *laid = aligned_alloc(LINE, (size_t)(4 * blocks * block_size + LINE) / LINE * LINE);
    if (!laid) return 1;
#pragma omp parallel num_threads(c->threads)
    {
        configure_tiles(columns);
#pragma omp for schedule(static)
        for (ptrdiff_t task = 0; task < blocks * steps; task++)
            lay_out_rows(c, task / steps * TILE_ROWS, task % steps * TILE_INPUTS, columns,
                         laid + task * TILE_ROWS * columns);
#pragma omp for schedule(static) nowait
        for (ptrdiff_t unit = 0; unit < units; unit++) {
            /* The last outputs are computed together with some of those before them. */
            const ptrdiff_t last = c->out - TILE_ROWS, start = unit * per_unit;
            const ptrdiff_t first = start < last ? start : last;
            const ptrdiff_t after = first + TILE_ROWS < last ? first + TILE_ROWS : last;
            const ptrdiff_t second = c->gated ? c->out + first : after;
            const uint16_t *a = c->w + first * c->in, *b = c->w + second * c->in;
            const int more = start + 2 * per_unit <= c->out;
            for (ptrdiff_t block = 0; block < blocks; block += 2) {
                const ptrdiff_t row = block * TILE_ROWS;
                const uint32_t *rows = laid + block * block_size;
                const char *next_a = more && !block ? (const char *)(a + per_unit * c->in) : NULL;
                const char *next_b = next_a ? (const char *)(b + per_unit * c->in) : NULL;
                __m512i sums[4][TILE_ROWS];
                if (block + 1 < blocks) {
                    multiply_tiles(2, c, a, b, rows, columns, next_a, next_b);
                    _tile_stored(2, sums[2], LINE);
                    _tile_stored(3, sums[3], LINE);
                } else {
                    multiply_tiles(1, c, a, b, rows, columns, next_a, next_b);
                }
                _tile_stored(0, sums[0], LINE);
                _tile_stored(1, sums[1], LINE);
                for (int each = 0; each < 2 && block + each < blocks; each++) {
                    __m512i *own = sums[2 * each], *other = sums[2 * each + 1];
                    write_tile(c, row + each * TILE_ROWS, first, own, other);
                    if (!c->gated) write_tile(c, row + each * TILE_ROWS, second, other, other);
                }
            }
        }
        _tile_release();
    }
    free(laid);
    return 0;
}

#endif

/* -- products with weights of few bits ---------------------------------------------------------------

   A weight is code * scale, and CODE_BLOCK inputs of an output share a scale. The rows are rounded to bytes
   in the same blocks, so a block's products are sums of whole numbers. Such products are for drafts. */

/* The layout is that of `compiled.CODED_ARGUMENTS`. `w` is laid out as panels of OUTPUTS_PER_UNIT outputs, and
   a panel as blocks: scales in fp16 [output], then codes. A code is unsigned; `zero` is the code of 0. Of bytes
   a block has [input / 4][output][input % 4], and of half bytes those of the inputs from CODE_BLOCK / 2 on
   are the upper halves of those before. Rows of x, y and base are in bf16 or in fp32 (`wide`). */
typedef struct {
    const void *x;
    const uint8_t *w;
    const void *base;
    void *y;
    ptrdiff_t base_row, rows, in, out, gated, threads, bits, wide;
} coded_product;

#if defined(HAS_VNNI)

/* A row of x in bytes: its numbers are `codes` * `scales`, and `shifts` are to be subtracted from each
   block's sum of products, because the weights' codes are unsigned. */
typedef struct {
    int8_t *codes;
    float *scales;
    int32_t *shifts;
} coded_rows;

INLINE lanes load_number(const void *from, ptrdiff_t at, __mmask16 some, int wide) {
    if (wide) return (lanes)_mm512_maskz_loadu_ps(some, (const float *)from + at);
    const __m512i numbers = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, (const uint16_t *)from + at));
    return (lanes)_mm512_slli_epi32(numbers, 16);
}

INLINE void store_number(void *to, ptrdiff_t at, __mmask16 some, lanes values, int wide) {
    if (wide) {
        _mm512_mask_storeu_ps((float *)to + at, some, (__m512)values);
        return;
    }
    /* Rounds to the nearest, and to even between two. NaN stays NaN. */
    const __m512i bits = (__m512i)values, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    const __mmask16 unordered = _mm512_cmp_ps_mask((__m512)values, (__m512)values, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, unordered, _mm512_set1_epi32(0x7fc0));
    _mm256_mask_storeu_epi16((uint16_t *)to + at, some, _mm512_cvtepi32_epi16(rounded));
}

/* Rounds a block of a row to bytes. */
static void round_block(const coded_product *c, const coded_rows *rows, ptrdiff_t block, int zero) {
    const lanes first = load_number(c->x, block * CODE_BLOCK, 0xffff, (int)c->wide);
    const lanes second = load_number(c->x, block * CODE_BLOCK + 16, 0xffff, (int)c->wide);
    const __m512 largest = _mm512_max_ps(_mm512_abs_ps((__m512)first), _mm512_abs_ps((__m512)second));
    const float most = _mm512_reduce_max_ps(largest), scale = most / 127;
    const __m512 inverse = _mm512_set1_ps(most > FLT_MIN ? 127 / most : 0);
    const __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)first, inverse));
    const __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps((__m512)second, inverse));
    _mm_storeu_si128((__m128i *)(rows->codes + block * CODE_BLOCK), _mm512_cvtsepi32_epi8(a));
    _mm_storeu_si128((__m128i *)(rows->codes + block * CODE_BLOCK + 16), _mm512_cvtsepi32_epi8(b));
    rows->scales[block] = scale;
    rows->shifts[block] = -zero * _mm512_reduce_add_epi32(_mm512_add_epi32(a, b));
}

/* Multiplies `count` rows, from `row` on, with a panel. `rows` are all rows in bytes. */
INLINE void multiply_coded_panel(int count, int bits, const coded_product *c, const coded_rows *rows, ptrdiff_t row,
                                 ptrdiff_t number) {
    const ptrdiff_t blocks = c->in / CODE_BLOCK, scale_bytes = 2 * OUTPUTS_PER_UNIT;
    const ptrdiff_t block_bytes = scale_bytes + OUTPUTS_PER_UNIT * CODE_BLOCK * bits / 8;
    const uint8_t *w = c->w + number * blocks * block_bytes;
    const __m512i low_halves = _mm512_set1_epi8(0x0f);
    __m512 sum[CODED_ROWS_AT_ONCE][2];
    EACH(r, count) EACH(v, 2) sum[r][v] = _mm512_setzero_ps();
    for (ptrdiff_t block = 0; block < blocks; block++, w += block_bytes) {
        __m512i whole[CODED_ROWS_AT_ONCE][2];
        const uint8_t *codes = w + scale_bytes;
        EACH(line, (int)(block_bytes / LINE)) _mm_prefetch((const char *)w + 4 * block_bytes + line * LINE, _MM_HINT_T0);
        EACH(r, count) EACH(v, 2) whole[r][v] = _mm512_set1_epi32(rows->shifts[(row + r) * blocks + block]);
        EACH(quad, 4 * bits / 4) EACH(v, 2) {
            __m512i own = _mm512_loadu_si512(codes + (quad * 2 + v) * LINE);
            const int32_t *x = (const int32_t *)(rows->codes + row * c->in + block * CODE_BLOCK) + quad;
            if (bits == 4) {
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(own, 4), low_halves);
                EACH(r, count)
                whole[r][v] = _mm512_dpbusd_epi32(whole[r][v], high, _mm512_set1_epi32(x[r * (c->in / 4) + 4]));
                own = _mm512_and_si512(own, low_halves);
            }
            EACH(r, count)
            whole[r][v] = _mm512_dpbusd_epi32(whole[r][v], own, _mm512_set1_epi32(x[r * (c->in / 4)]));
        }
        EACH(v, 2) {
            const __m512 scales = _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)w + v));
            EACH(r, count) {
                const __m512 scale = _mm512_mul_ps(scales, _mm512_set1_ps(rows->scales[(row + r) * blocks + block]));
                sum[r][v] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(whole[r][v]), scale, sum[r][v]);
            }
        }
    }
    const int per_vector = LINE / 4, vectors = c->gated ? 1 : 2;
    EACH(r, count) EACH(v, 2) {
        const ptrdiff_t first = number * vectors * per_vector + v * per_vector, left = c->out - first;
        if (v >= vectors || left <= 0) break;
        const __mmask16 some = left >= per_vector ? 0xffff : (__mmask16)((1u << left) - 1);
        lanes result = (lanes)sum[r][v];
        if (c->gated) result = silu(result) * (lanes)sum[r][1];
        if (c->base) result += load_number(c->base, (row + r) * c->base_row + first, some, (int)c->wide);
        store_number(c->y, (row + r) * c->out + first, some, result, (int)c->wide);
    }
}

/* Multiplies with weights of 4 or 8 bits, whose inputs fill blocks. Returns 1 where there is no memory. */
int multiply_coded(const coded_product *c) {
    const ptrdiff_t blocks = c->in / CODE_BLOCK, per_panel = c->gated ? OUTPUTS_PER_UNIT / 2 : OUTPUTS_PER_UNIT;
    const ptrdiff_t panels = (c->out + per_panel - 1) / per_panel, all = c->rows * blocks;
    char *memory = aligned_alloc(LINE, (size_t)(all * (CODE_BLOCK + 8) + LINE) / LINE * LINE);
    if (!memory) return 1;
    const coded_rows rows = {(int8_t *)memory, (float *)(memory + all * CODE_BLOCK),
                             (int32_t *)(memory + all * (CODE_BLOCK + 4))};
#pragma omp parallel num_threads(c->threads)
    {
#pragma omp for schedule(static)
        for (ptrdiff_t block = 0; block < all; block++) round_block(c, &rows, block, c->bits == 4 ? 8 : 128);
#pragma omp for schedule(static)
        for (ptrdiff_t panel = 0; panel < panels; panel++)
            for (ptrdiff_t row = 0; row < c->rows; row += CODED_ROWS_AT_ONCE) {
                const ptrdiff_t left = c->rows - row;
                switch (left < CODED_ROWS_AT_ONCE ? left : CODED_ROWS_AT_ONCE) {
#define CODED_CASE(n)                                                                   \
    case n:                                                                             \
        if (c->bits == 4) multiply_coded_panel(n, 4, c, &rows, row, panel);             \
        if (c->bits == 8) multiply_coded_panel(n, 8, c, &rows, row, panel);             \
        break;
                    CODED_CASE(1) CODED_CASE(2) CODED_CASE(3) CODED_CASE(4)
                }
            }
    }
    free(memory);
    return 0;
}

#endif
