/* Products with packed weights, and their expansion: plain C behind four functions, called through ctypes (native.py).
 *
 *     list.h       the formats
 *     formats.h    how each stores its values
 *     rows.h       what is done with a row's values
 *     avx512.h, avx2.h, generic.h    the vector layer of one instruction set
 *     compile.h    all of it for one instruction set, once for each; which serves is chosen when the program runs
 *     operations.h what decoders compute between products
 *     separable.h  separable convolutions
 *     brain.h      values as bfloat16, for processors that multiply it:
 *     dot.h        on vectors
 *     amx.h        on tiles
 *     lanes.h      a few rows of bfloat16 times whole numbers
 *
 * Must be compiled without contraction of a product and a sum into one rounding (-ffp-contract=off): dequantize.py says
 * where values are rounded.
 */

#include <sched.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the formats are little-endian; PyTorch serves on this machine"
#endif

/* y[m, n] = sum over k of W[n, k] x[m, k], plus bias[n]. Strides of x and y are in values. */
struct product {
    const uint8_t *weight;
    const void *x; /* float32, or bfloat16 if `brain`, as is y */
    const float *bias;
    void *y, *scratch; /* scratch: what `prepare` makes of x, and `multiply` reads */
    int64_t row_bytes, outputs, inputs, count, x_stride, y_stride;
    int format, brain;
};

/* Rows of W as float32, or as bfloat16. The stride is in values. */
struct expansion {
    const uint8_t *weight;
    void *out;
    int64_t row_bytes, inputs, out_stride;
    int brain;
};

typedef void (*rows_function)(const void *task, int64_t first, int64_t last);
typedef void (*shared_function)(void *task, int64_t *next, int64_t *done);

struct kernels {
    rows_function multiply, expand;
};

/* Activations are prepared in units of 32 inputs. */
static int64_t prepare_units(int64_t inputs) { return (inputs + 31) / 32; }

typedef uint8_t BYTES16 __attribute__((vector_size(16))), BYTES32 __attribute__((vector_size(32)));
typedef uint16_t WORDS16 __attribute__((vector_size(16))), WORDS32 __attribute__((vector_size(32)));

/* The rows that come next, while these are worked on. Prefetching never faults. */
#define AHEAD(p, size) \
    for (int64_t line = 0; line < (size); line += 64) __builtin_prefetch((p) + line);

/* Loops with constant ends, meant to vanish. */
#define UNROLL _Pragma("GCC unroll 8")

/* Makes the compiler load what has just been stored: a load into every lane of a vector costs no arithmetic, and it
 * would rather shuffle registers. */
#define IN_MEMORY(p, size) __asm__("" : "+m"(*(char(*)[size])(p)))

/* What a thread does while it waits for another. */
#if defined(__x86_64__)
#define PAUSE() _mm_pause()
#else
#define PAUSE() __asm__ volatile("" ::: "memory")
#endif

/* Until `count` has come to be at least `least`. One that waits long lets others run: they may be whom it waits for. */
static inline void wait_for(const int64_t *count, int64_t least) {
    enum { PATIENCE = 2000 };
    for (int spins = 0; __atomic_load_n(count, __ATOMIC_ACQUIRE) < least; spins++)
        if (spins < PATIENCE) PAUSE();
        else sched_yield();
}

#define MAX_ROWS 4
#define UNUSED __attribute__((unused))
#define ALIGNED __attribute__((aligned(64)))
#define INLINE static inline __attribute__((always_inline)) TARGET

#include "operands.h"

#define INSTRUCTION_SET "generic.h"
#include "compile.h"
#if defined(__x86_64__)
#define INSTRUCTION_SET "avx2.h"
#include "compile.h"
#define INSTRUCTION_SET "avx512.h"
#include "compile.h"
#if __GNUC__ >= 11 || defined(__clang__)
#define HAS_BRAIN
#include "brain.h"
#include "dot.h"
#include "amx.h"
#include "lanes.h"
#endif
#endif

/* Without instructions for bfloat16, activations are widened to float32. */
static int64_t prepared_wide(int64_t count, int64_t inputs) { return count * inputs * 4; }

static void prepare_wide(const void *task, int64_t first, int64_t last) {
    const struct product *p = task;
    int64_t begin = first * 32, end = last * 32 < p->inputs ? last * 32 : p->inputs;
    for (int64_t m = 0; m < p->count; m++) {
        const uint16_t *x = (const uint16_t *)p->x + m * p->x_stride;
        uint32_t *out = (uint32_t *)p->scratch + m * p->inputs;
        for (int64_t k = begin; k < end; k++) out[k] = (uint32_t)x[k] << 16;
    }
}

/* A way to compute: one instruction set for float32 activations, and one for bfloat16. */
struct path {
    const char *name;
    const struct kernels *wide, *brain;
    int64_t (*prepared)(int64_t count, int64_t inputs); /* bytes that `prepare` fills for bfloat16 */
    rows_function prepare;
    const rows_function *operations; /* in the order of steps.h */
    shared_function separable;
    int lanes; /* a few rows of bfloat16 by lanes.h, in the formats it has */
};

static const struct path paths[] = {
#if defined(__x86_64__)
#ifdef HAS_BRAIN
    {"amx", table_avx512, table_amx, prepared_amx, prepare_amx, operations_avx512, separable_avx512, 1},
    {"avx512bf16", table_avx512, table_dot, prepared_dot, prepare_dot, operations_avx512, separable_avx512, 1},
#endif
    {"avx512", table_avx512, table_avx512, prepared_wide, prepare_wide, operations_avx512, separable_avx512, 0},
    {"avx2", table_avx2, table_avx2, prepared_wide, prepare_wide, operations_avx2, separable_avx2, 0},
#endif
#if defined(__aarch64__)
    {"neon", table_generic, table_generic, prepared_wide, prepare_wide, operations_generic, separable_generic, 0},
#else
    {"portable", table_generic, table_generic, prepared_wide, prepare_wide, operations_generic, separable_generic, 0},
#endif
};

/* Whether this processor has a path. */
static int has(const char *name) {
#if defined(__x86_64__)
    unsigned a = 0, b = 0, c = 0, d = 0, a1 = 0;
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && a) __get_cpuid_count(7, 1, &a1, &b, &b, &b);
    int brain = avx512 && c >> 11 & 1 && a1 >> 5 & 1, tiles = brain && d >> 22 & d >> 24 & 1;
#ifdef HAS_BRAIN
    if (!strcmp(name, "amx")) return tiles && tiles_granted();
    if (!strcmp(name, "avx512bf16")) return brain;
#endif
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx2")) return avx2;
#endif
    (void)name;
    return 1;
}

static const struct path *chosen;

/* Use the named path, or the best one for "". Returns the name of the path now in use, or NULL if this processor or this
 * build does not have the one that was asked for. */
const char *transcribe_choose(const char *wanted) {
    for (size_t i = 0; i < sizeof(paths) / sizeof(*paths); i++)
        if ((!*wanted || !strcmp(wanted, paths[i].name)) && has(paths[i].name)) {
            chosen = &paths[i];
            return chosen->name;
        }
    return NULL;
}

/* What a product is done with. Both functions take it as their task: `prepare` a range of units, `multiply`, when all of
 * them are done, a range of outputs. float32 activations need no preparation. The prepared form depends on the activations
 * and on the format, so products of one format can share it. */
static rows_function in_lanes(int format, int brain, int64_t count) {
#ifdef HAS_BRAIN
    if (brain && chosen->lanes && count <= LANES_ROWS) return table_lanes[format];
#endif
    (void)format, (void)brain, (void)count;
    return NULL;
}

int64_t transcribe_prepared_bytes(int format, int brain, int64_t count, int64_t inputs) {
    if (!brain) return 0;
#ifdef HAS_BRAIN
    if (in_lanes(format, brain, count)) return prepared_lanes(count, inputs);
#endif
    return chosen->prepared(count, inputs);
}

static rows_function prepare_function(const struct product *p) {
#ifdef HAS_BRAIN
    if (in_lanes(p->format, p->brain, p->count)) return prepare_lanes;
#endif
    return p->brain ? chosen->prepare : NULL;
}

static rows_function multiply_function(const struct product *p) {
    rows_function lanes = in_lanes(p->format, p->brain, p->count);
    return lanes ? lanes : (p->brain ? chosen->brain : chosen->wide)[p->format].multiply;
}

/* Outputs for a thread to take at a time. For many rows of x these are strips of 32: four of them and more share what is
 * read of x. */
static int64_t multiply_chunk(const struct product *p, int threads) {
    int64_t chunk = p->outputs / (threads * 4), least = (1 << 14) * p->outputs / (p->outputs * p->row_bytes + 1);
    if (p->count > 32) {
        int64_t chunks = threads * (p->outputs < threads * 4 * 128 ? 2 : 4);
        return ((p->outputs + chunks - 1) / chunks + 31) / 32 * 32;
    }
    return ((chunk > least ? chunk : least) + 15) / 16 * 16;
}

/* OpenMP's way to run a function on a team, GNU's name for it: the address is that of the library torch has loaded, so
 * that there is one pool of threads. */
typedef void (*team_function)(void (*)(void *), void *, unsigned, unsigned);
static team_function team;

void transcribe_set_team(team_function function) { team = function; }

struct split {
    rows_function run;
    const void *task;
    int64_t rows, chunk, next;
};

static void take_chunks(void *shared) {
    struct split *s = shared;
    for (;;) {
        int64_t first = __atomic_fetch_add(&s->next, s->chunk, __ATOMIC_RELAXED);
        if (first >= s->rows) return;
        s->run(s->task, first, first + s->chunk < s->rows ? first + s->chunk : s->rows);
    }
}

/* Bytes that one thread moves before another would be awake. */
enum { ALONE = 1 << 16 };

/* Rows in chunks for whoever is free: a thread that is kept from running holds up one chunk, not its share. */
static void split(rows_function run, const void *task, int64_t rows, int64_t bytes, int64_t chunk, int threads) {
    if (threads < 2 || bytes < ALONE || !team) {
        run(task, 0, rows);
        return;
    }
    struct split s = {run, task, rows, chunk, 0};
    team(take_chunks, &s, (unsigned)threads, 0);
}

#include "steps.h"

void transcribe_multiply(const struct product *p, int threads) {
    struct step steps[2] = {{.operation = PREPARE}, {.operation = MULTIPLY, .units = p->outputs}};
    int64_t count = prepare_function(p) ? 2 : 1;
    for (int i = 0; i < 2; i++) memcpy(steps[i].operands, p, sizeof(*p));
    transcribe_run(steps + 2 - count, count, p->outputs * p->row_bytes < ALONE ? 1 : threads);
}

void transcribe_expand(const uint8_t *weight, void *out, int64_t row_bytes, int64_t rows, int64_t inputs,
                       int64_t out_stride, int format, int brain, int threads) {
    struct expansion e = {weight, out, row_bytes, inputs, out_stride, brain};
    int64_t bytes = rows * inputs * (brain ? 2 : 4), chunk = rows / (threads * 8), least = (1 << 14) * rows / (bytes + 1);
    split(chosen->wide[format].expand, &e, rows, bytes, (chunk > least ? chunk : least) / 4 * 4 + 4, threads);
}
