/* Attention and products of a decoder in fp32, for any number of rows.

   Nothing that a row gives is added up across a vector's lanes, and its sums are taken in one order
   whatever rows are beside it and however many threads there are: a row comes out the same, bit for
   bit, alone and among others. (What rows attend to, told beside, is added up as it comes.)

   In attention the lanes are queries: a key's numbers are broadcast to all of them, and both products
   and the softmax go lane by lane. Keys are read once, a block at a time, with the softmax's maximum
   and sum carried along (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").
   A *tile* is up to WIDE vectors of queries of one key head; tiles, and parts of the keys, are shared
   out among threads. In a product the lanes are outputs. */

#include <float.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define BYTES 64
#define TOGETHER 8 /* keys scored, or numbers mixed, at once: with WIDE vectors each, what registers hold */
#define ROWS 12    /* multiplied at once, with ACROSS vectors each */
#elif defined(__AVX__)
#define BYTES 32
#define TOGETHER 4
#define ROWS 6
#define HELD(x) __asm__("" : "+x"(x)) /* GCC would read it anew for each sum: no register is left over */
#else
#define BYTES 16
#define TOGETHER 4
#define ROWS 6
#endif
#ifndef HELD
#define HELD(x)
#endif
#define HOLD(each, from, count) \
    lanes each[WIDE];           \
    EACH(n, count) { each[n] = (from)[n]; HELD(each[n]); }
#define LANES ((int)(BYTES / sizeof(float)))
#define WIDE 3
#define TILE (WIDE * LANES)
#define DIMS 8      /* of a value mixed at once for one vector; head sizes are multiples of it */
#define WIDEST 256  /* head size */
#define BLOCK 64    /* keys between two looks at the maximum */
#define PART 1024   /* keys that a thread goes over, a multiple of BLOCK */
#define LOWEST -1e30f
#define LOG2_E 1.4426950408889634 /* logits are kept times it, for weights are powers of two */
#define ACROSS 2    /* vectors of outputs of a product in a panel */
#define PANEL (ACROSS * LANES)
#define AHEAD 8     /* inputs whose weights are fetched before they are asked for */
#define TALL 8      /* blocks in a part of the rows, at least: parts are then about as large for threads */
#define NEAR 524288 /* bytes of rows that meet one panel after another, as near caches hold them */
#define INLINE static inline __attribute__((always_inline))
#define EACH(i, count) _Pragma("GCC unroll 16") for (int i = 0; i < (count); i++)

typedef float lanes __attribute__((vector_size(BYTES), may_alias));
typedef float anywhere __attribute__((vector_size(BYTES), may_alias, aligned(4)));
typedef int32_t masks __attribute__((vector_size(BYTES), may_alias));

/* As `compiled.CALL` packs it. Strides are counted in floats; rows lie one after another in width. */
typedef struct {
    const float *q, *k, *v, *bias; /* bias [rows, last] is added over the last keys; or none */
    const int64_t *sees, *columns; /* how many keys each row sees; else up to itself, or all if a bias tells */
    float *out, *mass; /* to mass [kv_heads][2][chosen] is added what the last `noted` rows have there */
    ptrdiff_t q_head, q_row, k_head, k_row, v_head, v_row, bias_row, out_head, out_row;
    ptrdiff_t kv_heads, groups, rows, seen, width, last, chosen, noted, threads;
    double scale;
} call;

/* How many keys each query of a tile sees, and what the fewest and the most of them are. */
typedef struct {
    masks each[WIDE];
    ptrdiff_t fewest, most;
} sight;

/* Queries of one key head: `count` of its rows * groups, from `first` on. Those of a row lie together,
   so a tile's see about as much. */
typedef struct {
    ptrdiff_t head, first, count;
} tile;

INLINE lanes larger(lanes a, lanes b) {
    masks first = a > b;
    return (lanes)(((masks)a & first) | ((masks)b & ~first));
}

INLINE float total(lanes x) {
    EACH(half, LANES / 2) x[half] += x[half + LANES / 2];
    EACH(half, LANES / 4) x[half] += x[half + LANES / 4];
    return LANES == 4 ? x[0] : LANES == 8 ? x[0] + x[1] : x[0] + x[1] + x[2] + x[3];
}

/* 2^x to 2e-7, of 0 exactly 1; nothing below 2^-126, and what is no number stays none. The shift rounds
   to a whole power, which a float's bits are moved by; of the rest the largest error is the least there
   is with so few terms. */
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

/* Some keys' products with a tile: logits[key][wide]. */
INLINE void score(int wide, int keys, const lanes *q, const float *k, ptrdiff_t k_row, ptrdiff_t width,
                  lanes *logits) {
    lanes sum[2 * TOGETHER][WIDE];
    EACH(j, keys) EACH(n, wide) sum[j][n] = (lanes){0};
    for (ptrdiff_t i = 0; i < width; i++) {
        HOLD(each, q + i * wide, wide)
        EACH(j, keys) EACH(n, wide) sum[j][n] += k[j * k_row + i] * each[n];
    }
    EACH(j, keys) EACH(n, wide) logits[j * wide + n] = sum[j][n];
}

/* mixed[dim][wide] += weights[key][wide] of some numbers of each value. */
INLINE void mix(int wide, int dims, int keys, const lanes *weights, const float *v, ptrdiff_t v_row, lanes *mixed) {
    lanes sum[DIMS][WIDE];
    EACH(i, dims) EACH(n, wide) sum[i][n] = mixed[i * wide + n];
    for (int j = 0; j < keys; j++) {
        HOLD(each, weights + j * wide, wide)
        EACH(i, dims) EACH(n, wide) sum[i][n] += v[j * v_row + i] * each[n];
    }
    EACH(i, dims) EACH(n, wide) mixed[i * wide + n] = sum[i][n];
}

INLINE void fetch(const float *rows, ptrdiff_t row, int count, ptrdiff_t width) {
    for (int j = 0; j < count; j++)
        for (ptrdiff_t i = 0; i < width; i += 16) __builtin_prefetch(rows + j * row + i);
}

/* Makes logits weights, and what was mixed before relative to the same maximum. */
INLINE void weigh(int wide, int keys, lanes *logits, lanes *mixed, ptrdiff_t width, lanes *highest, lanes *sum) {
    lanes top[WIDE], less[WIDE];
    masks higher = {0};
    int any = 0, j = 0;
    EACH(n, wide) top[n] = highest[n];
    for (; j + 4 <= keys; j += 4) /* one after another they would wait for each other */
        EACH(n, wide) {
            const lanes *key = logits + j * wide + n;
            top[n] = larger(top[n], larger(larger(key[0], key[wide]), larger(key[2 * wide], key[3 * wide])));
        }
    for (; j < keys; j++) EACH(n, wide) top[n] = larger(top[n], logits[j * wide + n]);
    EACH(n, wide) higher |= top[n] > highest[n];
    EACH(lane, LANES) any |= higher[lane];
    if (any) {
        EACH(n, wide) {
            less[n] = power_of_two(highest[n] - top[n]);
            highest[n] = top[n];
            sum[n] *= less[n];
        }
        for (ptrdiff_t i = 0; i < width; i++) EACH(n, wide) mixed[i * wide + n] *= less[n];
    }
    for (j = 0; j < keys; j++)
        EACH(n, wide) {
            lanes weight = power_of_two(logits[j * wide + n] - top[n]);
            logits[j * wide + n] = weight;
            sum[n] += weight;
        }
}

INLINE ptrdiff_t row_of(const call *c, tile t, ptrdiff_t r) { return (t.first + r) / c->groups; }

/* Where query `r` of a tile lies, by the strides of q or out. */
INLINE ptrdiff_t place(const call *c, tile t, ptrdiff_t r, ptrdiff_t by_head, ptrdiff_t by_row) {
    return (t.head * c->groups + (t.first + r) % c->groups) * by_head + row_of(c, t, r) * by_row;
}

INLINE int vectors(tile t) { return (int)((t.count + LANES - 1) / LANES); }

/* A tile's queries as lanes [width][wide], and what they see. */
static sight load(const call *c, tile t, lanes *q) {
    const int across = vectors(t) * LANES;
    const float scale = (float)(c->scale * LOG2_E);
    sight sees = {.fewest = c->seen};
    EACH(n, WIDE) sees.each[n] += (int32_t)c->seen; /* so does padding */
    memset(q, 0, sizeof(float) * c->width * across);
    for (ptrdiff_t r = 0; r < t.count; r++) {
        const float *row = c->q + place(c, t, r, c->q_head, c->q_row);
        const ptrdiff_t number = row_of(c, t, r);
        for (ptrdiff_t i = 0; i < c->width; i++) ((float *)q)[i * across + r] = row[i] * scale;
        const ptrdiff_t own = c->sees ? c->sees[number] : c->bias ? c->seen : c->seen - c->rows + number + 1;
        if (own < sees.fewest) sees.fewest = own;
        if (own > sees.most) sees.most = own;
        ((int32_t *)sees.each)[r] = (int32_t)own;
    }
    return sees;
}

/* Logits [count][wide] of a tile and the keys from `start` on, of those up to `to`; -inf where a
   query does not see one. */
INLINE void logits_of(int wide, const call *c, tile t, const lanes *q, const sight *sees,
                      ptrdiff_t start, int count, ptrdiff_t to, lanes *logits) {
    const int keys = wide == 1 ? 2 * TOGETHER : TOGETHER;
    const float *k = c->k + t.head * c->k_head + start * c->k_row;
    const float *v = c->v ? c->v + t.head * c->v_head + start * c->v_row : NULL;
    const int many = count < keys ? 0 : count;
    for (int next = 0; next < many; next += keys) {
        const int j = next + keys <= count ? next : count - keys; /* once more rather than one by one */
        if (v) fetch(v + j * c->v_row, c->v_row, keys, c->width);
        if (start + j + 2 * keys <= to) fetch(k + (j + keys) * c->k_row, c->k_row, keys, c->width);
        score(wide, keys, q, k + j * c->k_row, c->k_row, c->width, logits + j * wide);
    }
    for (int j = many; j < count; j++) score(wide, 1, q, k + j * c->k_row, c->k_row, c->width, logits + j * wide);
    const lanes nothing = (lanes){0} - __builtin_inff();
    for (ptrdiff_t key = sees->fewest > start ? sees->fewest : start; key < start + count; key++)
        EACH(n, wide) {
            const masks seen = sees->each[n] > (int32_t)key;
            lanes *logit = logits + (key - start) * wide + n;
            *logit = (lanes)(((masks)*logit & seen) | ((masks)nothing & ~seen));
        }
}

/* A tile over keys from:to, into mixed [width][wide] where there are values, then the maximum and the
   sum [wide] of each. The weights are kept where there is `room`: [seen][wide], relative to the
   maximum [wide] as it was at each block, which all follow. */
INLINE void over(int wide, const call *c, tile t, const lanes *q, const sight *sees, ptrdiff_t from,
                 ptrdiff_t to, lanes *mixed, lanes *room) {
    const float *v = c->v + t.head * c->v_head;
    const int dims = wide == 1 ? DIMS : TOGETHER, valued = !room || c->v;
    const ptrdiff_t width = c->width, before = c->seen - c->last;
    lanes block[BLOCK * WIDE], *highest = mixed + width * wide, *sum = highest + wide;
    memset(mixed, 0, sizeof(lanes) * wide * (width + 2));
    EACH(n, wide) highest[n] += LOWEST;
    for (ptrdiff_t start = from; start < to; start += BLOCK) {
        const int count = to - start < BLOCK ? (int)(to - start) : BLOCK;
        lanes *logits = room ? room + start * wide : block;
        logits_of(wide, c, t, q, sees, start, count, to, logits);
        for (ptrdiff_t r = 0; c->bias && start + count > before && r < t.count; r++) {
            const float *bias = c->bias + row_of(c, t, r) * c->bias_row;
            for (ptrdiff_t key = start > before ? start : before; key < start + count; key++)
                ((float *)logits)[(key - start) * wide * LANES + r] += bias[key - before] * (float)LOG2_E;
        }
        weigh(wide, count, logits, mixed, valued ? width : 0, highest, sum);
        EACH(n, wide) if (room) room[(c->seen + start / BLOCK) * wide + n] = highest[n];
        for (ptrdiff_t i = 0; valued && i < width; i += dims)
            mix(wide, dims, count, logits, v + start * c->v_row + i, c->v_row, mixed + i * wide);
    }
}

/* A tile over the part of the keys that has this number. */
static void part(const call *c, tile t, const lanes *q, const sight *sees, ptrdiff_t number, lanes *mixed,
                 lanes *room) {
    const ptrdiff_t from = number * PART, to = from + PART < sees->most ? from + PART : sees->most;
#define OVER(wide) if (vectors(t) == wide && room) over(wide, c, t, q, sees, from, to, mixed, room); \
                   else if (vectors(t) == wide) over(wide, c, t, q, sees, from, to, mixed, NULL);
    OVER(1) OVER(2) OVER(3)
}

/* What a tile mixed of some keys, `mine`, and of the next ones, as one. */
static void join(const call *c, tile t, lanes *mine, const lanes *next) {
    const int wide = vectors(t);
    const ptrdiff_t tops = c->width * wide, sums = tops + wide;
    for (int n = 0; n < wide; n++) {
        const lanes top = larger(mine[tops + n], next[tops + n]);
        const lanes first = power_of_two(mine[tops + n] - top), second = power_of_two(next[tops + n] - top);
        for (ptrdiff_t i = n; i < tops; i += wide) mine[i] = mine[i] * first + next[i] * second;
        mine[tops + n] = top;
        mine[sums + n] = mine[sums + n] * first + next[sums + n] * second;
    }
}

static void finish(const call *c, tile t, lanes *mixed) {
    const int wide = vectors(t);
    const ptrdiff_t tops = c->width * wide, sums = tops + wide;
    for (int n = 0; n < wide; n++)
        for (ptrdiff_t i = n; i < tops; i += wide) mixed[i] /= mixed[sums + n];
    for (ptrdiff_t r = 0; r < t.count; r++) {
        float *out = c->out + place(c, t, r, c->out_head, c->out_row);
        for (ptrdiff_t i = 0; i < c->width; i++) out[i] = ((float *)mixed)[i * wide * LANES + r];
    }
}

INLINE ptrdiff_t parts_of(const call *c) { return (c->seen + PART - 1) / PART; }

INLINE ptrdiff_t tiles(const call *c, ptrdiff_t rows) { return (c->groups * rows + TILE - 1) / TILE; }

/* The last rows, as many as fill the tiles of those that are noted. */
INLINE ptrdiff_t beside(const call *c) {
    const ptrdiff_t rows = tiles(c, c->noted) * TILE / c->groups;
    return rows < c->rows ? rows : c->rows;
}

/* Of so many rows after the ones `before`. */
INLINE tile tile_of(const call *c, ptrdiff_t task, ptrdiff_t before, ptrdiff_t rows) {
    const ptrdiff_t first = task / c->kv_heads * TILE, left = c->groups * rows - first;
    return (tile){task % c->kv_heads, c->groups * before + first, left < TILE ? left : TILE};
}

/* A tile over all keys it sees, of which it gives the number. */
static ptrdiff_t whole(const call *c, tile t, lanes own[2][(WIDEST + 2) * WIDE], lanes *room) {
    lanes q[WIDEST * WIDE];
    const sight sees = load(c, t, q);
    part(c, t, q, &sees, 0, own[0], room);
    for (ptrdiff_t number = 1; number * PART < sees.most; number++) {
        part(c, t, q, &sees, number, own[1], room);
        join(c, t, own[0], own[1]);
    }
    if (c->v) finish(c, t, own[0]);
    return sees.most;
}

/* From kept weights of a tile, its maximum and its sum: what it weighs the chosen columns by, among all
   keys and among them alone, added to mass [2][chosen]. */
INLINE void share(int wide, const call *c, tile t, ptrdiff_t most, lanes *weights, const lanes *highest, float *mass) {
    const lanes *sum = highest + wide;
    lanes *less = weights + c->seen * wide, all[WIDE], among[WIDE];
    EACH(n, wide) among[n] = (lanes){0};
    for (ptrdiff_t block = 0; block * BLOCK < most; block++)
        EACH(n, wide) less[block * wide + n] = power_of_two(less[block * wide + n] - highest[n]);
    for (ptrdiff_t i = 0; i < c->chosen; i++) {
        const ptrdiff_t key = c->columns[i];
        EACH(n, wide) if (key < most) among[n] += weights[key * wide + n] * less[key / BLOCK * wide + n];
    }
    EACH(n, wide) {
        for (int lane = 0; lane < LANES; lane++) { /* no padding, nor other rows, nor one of no weight here */
            const ptrdiff_t r = n * LANES + lane;
            const int counts = r < t.count && row_of(c, t, r) >= c->rows - c->noted;
            all[n][lane] = counts ? 1 / sum[n][lane] : 0;
            among[n][lane] = counts && among[n][lane] >= FLT_MIN ? 1 / among[n][lane] : 0;
        }
    }
    for (ptrdiff_t i = 0; i < c->chosen; i++) {
        const ptrdiff_t key = c->columns[i];
        lanes of_all = {0}, of_these = {0};
        if (key >= most) continue;
        EACH(n, wide) {
            const lanes weight = weights[key * wide + n] * less[key / BLOCK * wide + n];
            of_all += weight * all[n];
            of_these += weight * among[n];
        }
        mass[i] += total(of_all);
        mass[c->chosen + i] += total(of_these);
    }
}

/* A tile that holds noted rows, told to mass [kv_heads][2][chosen]. */
static void note(const call *c, tile t, lanes *room, float *mass) {
    lanes own[2][(WIDEST + 2) * WIDE];
    const ptrdiff_t most = whole(c, t, own, room);
    const lanes *highest = own[0] + c->width * vectors(t);
    mass += t.head * 2 * c->chosen;
    if (vectors(t) == 1) share(1, c, t, most, room, highest, mass);
    if (vectors(t) == 2) share(2, c, t, most, room, highest, mass);
    if (vectors(t) == 3) share(3, c, t, most, room, highest, mass);
}

static lanes *room_of(const call *c) {
    return aligned_alloc(BYTES, sizeof(lanes) * WIDE * (c->seen + c->seen / BLOCK + 1));
}

/* 1 where there is no memory for what is noted. */
int attend(const call *c) {
    const ptrdiff_t last = beside(c), rest = c->rows - last, told = 2 * c->kv_heads * c->chosen;
    const ptrdiff_t tasks = c->kv_heads * tiles(c, rest), parts = parts_of(c), size = (c->width + 2) * TILE;
    /* Threads share a tile's keys where there are more of them than tiles. */
    const int shared = tasks && tasks < c->threads && parts > 1;
    lanes *mixed = shared ? aligned_alloc(BYTES, sizeof(float) * tasks * parts * size) : NULL;
    const ptrdiff_t units = mixed ? tasks * parts : tasks;
    float *masses = last ? calloc(c->threads * told + 1, sizeof(float)) : NULL; /* each thread's own */
    int failed = last && !masses;
#pragma omp parallel num_threads(c->threads) reduction(| : failed)
    {
        lanes q[WIDEST * WIDE], own[2][(WIDEST + 2) * WIDE], *room = masses ? room_of(c) : NULL;
        failed |= masses && !room;
#pragma omp for schedule(static) nowait
        for (ptrdiff_t task = 0; task < c->kv_heads * tiles(c, last); task++)
            if (room) note(c, tile_of(c, task, rest, last), room, masses + omp_get_thread_num() * told);
#pragma omp for schedule(dynamic)
        for (ptrdiff_t task = 0; task < units; task++) {
            const ptrdiff_t unit = units - 1 - task; /* the longest first, for the others even out */
            const tile t = tile_of(c, mixed ? unit / parts : unit, 0, rest);
            if (mixed) {
                const sight sees = load(c, t, q);
                part(c, t, q, &sees, unit % parts, mixed + unit * size / LANES, NULL);
            } else {
                whole(c, t, own, NULL);
            }
        }
        free(room);
    }
    for (ptrdiff_t thread = 0; masses && thread < c->threads; thread++)
        for (ptrdiff_t i = 0; i < told; i++) c->mass[i] += masses[thread * told + i];
    free(masses);
    for (ptrdiff_t task = 0; mixed && task < tasks; task++) {
        const tile t = tile_of(c, task, 0, rest);
        lanes *first = mixed + task * parts * size / LANES;
        for (ptrdiff_t number = 1; number < parts; number++) join(c, t, first, first + number * size / LANES);
        finish(c, t, first);
    }
    free(mixed);
    return failed;
}

/* x W^T + base, of rows side by side. `w` is laid out as `panels` [in][PANEL]; row `r` of the base is
   `base_row` from the last, so that a bias is one of no distance. Where it is `gated` there is no base,
   and a panel's first half of outputs gates the second: silu(gate) times them, half as many. As
   `compiled.PRODUCT` packs it. */
typedef struct {
    const float *x, *w, *base;
    float *y;
    ptrdiff_t base_row, rows, in, out, gated, threads;
} product;

/* x / (1 + exp(-x)), by a power that is 1 at most. */
INLINE lanes silu(lanes x) {
    const lanes one = (lanes){0} + 1.0f, power = power_of_two((lanes)((masks)x | INT32_MIN) * (float)LOG2_E);
    const masks negative = x < 0.0f;
    return x * (lanes)(((masks)power & negative) | ((masks)one & ~negative)) / (one + power);
}

INLINE int outputs(const product *c) { return c->gated ? PANEL / 2 : PANEL; }

INLINE void panel(int rows, const product *c, ptrdiff_t row, ptrdiff_t number) {
    const float *x = c->x + row * c->in;
    const lanes *w = (const lanes *)(c->w + number * PANEL * c->in);
    const ptrdiff_t first = number * outputs(c), left = c->out - first;
    lanes sum[ROWS][ACROSS];
    EACH(r, rows) EACH(n, ACROSS) sum[r][n] = (lanes){0};
    for (ptrdiff_t i = 0; i < c->in; i++) {
        EACH(n, ACROSS) __builtin_prefetch(w + (i + AHEAD) * ACROSS + n);
        HOLD(each, w + i * ACROSS, ACROSS)
        EACH(r, rows) EACH(n, ACROSS) sum[r][n] += x[r * c->in + i] * each[n];
    }
    if (c->gated)
        EACH(r, rows) EACH(n, ACROSS / 2) sum[r][n] = silu(sum[r][n]) * sum[r][n + ACROSS / 2];
    EACH(r, rows) {
        float *y = c->y + (row + r) * c->out + first;
        const float *base = c->base ? c->base + (row + r) * c->base_row + first : NULL;
        EACH(n, ACROSS) {
            if (n * LANES >= outputs(c)) break;
            if ((n + 1) * LANES <= left) {
                if (base) sum[r][n] += *(const anywhere *)(base + n * LANES);
                *(anywhere *)(y + n * LANES) = sum[r][n];
            } else {
                for (int i = n * LANES; i < left; i++) y[i] = sum[r][n][i % LANES] + (base ? base[i] : 0);
            }
        }
    }
}

int outputs_of_a_panel(void) { return PANEL; }

void multiply(const product *c) {
    const ptrdiff_t panels = (c->out + outputs(c) - 1) / outputs(c), blocks = (c->rows + ROWS - 1) / ROWS;
    ptrdiff_t parts = c->rows * c->in * (ptrdiff_t)sizeof(float) / NEAR + 1; /* of the rows */
    if (parts > blocks / TALL) parts = blocks < TALL ? 1 : blocks / TALL;
#pragma omp parallel for schedule(static) num_threads(c->threads)
    for (ptrdiff_t unit = 0; unit < parts * panels; unit++) {
        const ptrdiff_t start = blocks * (unit / panels) / parts, stop = blocks * (unit / panels + 1) / parts;
        for (ptrdiff_t block = start; block < stop; block++) {
            const ptrdiff_t row = c->rows * block / blocks; /* blocks as alike as can be */
            switch (c->rows * (block + 1) / blocks - row) {
#define CASE(n) case n: panel(n, c, row, unit % panels); break;
                CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS == 12
                CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
            }
        }
    }
}
