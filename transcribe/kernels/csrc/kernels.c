/* Products with packed weights, and their expansion: plain C behind four functions, called through ctypes (native.py).
 *
 *     list.h       the formats
 *     formats.h    how each stores its values
 *     rows.h       what is done with a row's values
 *     avx512.h, avx2.h, generic.h    the vector layer of one instruction set
 *     compile.h    all of it for one instruction set, once for each; which serves is chosen when the program runs
 *
 * Must be compiled without contraction of a product and a sum into one rounding (-ffp-contract=off): dequantize.py says
 * where values are rounded.
 */

#include <sched.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
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
    const float *x, *bias;
    void *y;
    int64_t row_bytes, outputs, inputs, count, x_stride, y_stride;
    int brain; /* y is bfloat16 */
};

/* Rows of W as float32, or as bfloat16. The stride is in values. */
struct expansion {
    const uint8_t *weight;
    void *out;
    int64_t row_bytes, inputs, out_stride;
    int brain;
};

typedef void (*rows_function)(const void *task, int64_t first, int64_t last);

struct kernels {
    rows_function multiply, expand;
};

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
#endif

static const struct kernels *chosen;
static const rows_function *chosen_operations; /* in the order of steps.h */

/* Use the named path, or the best one for "". Returns the name of the path now in use, or NULL if this processor or this
 * build does not have the one that was asked for. */
const char *transcribe_choose(const char *wanted) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
               __builtin_cpu_supports("f16c");
    int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && (!*wanted || !strcmp(wanted, "avx512"))) return chosen = table_avx512, chosen_operations = operations_avx512, "avx512";
    if (avx2 && (!*wanted || !strcmp(wanted, "avx2"))) return chosen = table_avx2, chosen_operations = operations_avx2, "avx2";
#endif
#if defined(__aarch64__)
    const char *generic = "neon";
#else
    const char *generic = "portable";
#endif
    if (!*wanted || !strcmp(wanted, generic)) return chosen = table_generic, chosen_operations = operations_generic, generic;
    return NULL;
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

/* Rows in chunks for whoever is free: a thread that is kept from running holds up one chunk, not its share. What takes
 * less time than waking a thread (in bytes moved) is done by the caller alone. */
static void split(rows_function run, const void *task, int64_t rows, int64_t bytes, int threads) {
    enum { ALONE = 1 << 16, CHUNK = 1 << 14 };
    if (threads < 2 || bytes < ALONE || !team) {
        run(task, 0, rows);
        return;
    }
    int64_t chunk = rows / (threads * 8), least = CHUNK * rows / bytes;
    chunk = ((chunk > least ? chunk : least) + 3) / 4 * 4;
    struct split s = {run, task, rows, chunk ? chunk : 4, 0};
    team(take_chunks, &s, (unsigned)threads, 0);
}

/* SHIM */
struct product2 { const uint8_t *weight; const void *x; const float *bias; void *y; void *scratch; int64_t row_bytes, outputs, inputs, count, x_stride, y_stride; int format, brain; };
#define product product2
static int64_t prepared_bytes(int brain, int64_t count, int64_t inputs) { return brain ? count * inputs * 4 : 0; }
int64_t transcribe_prepared_bytes(int brain, int64_t count, int64_t inputs) { return prepared_bytes(brain, count, inputs); }
static int64_t prepare_units(int64_t inputs) { return (inputs + 31) / 32; }
static void shim_prepare(const void *task, int64_t first, int64_t last) { const struct product2 *p = task; for (int64_t m = 0; m < p->count; m++) for (int64_t i = first * 32; i < last * 32 && i < p->inputs; i++) { uint32_t w = (uint32_t)((const uint16_t *)p->x)[m * p->x_stride + i] << 16; memcpy((float *)p->scratch + m * p->inputs + i, &w, 4); } }
static rows_function prepare_function(int brain) { return brain ? shim_prepare : 0; }
#undef product
static void shim_multiply(const void *task, int64_t first, int64_t last) { const struct product2 *q = task; struct product p = {q->weight, q->brain ? q->scratch : q->x, q->bias, q->y, q->row_bytes, q->outputs, q->inputs, q->count, q->brain ? q->inputs : q->x_stride, q->y_stride, q->brain}; chosen[q->format].multiply(&p, first, last); }
#define product product2
static rows_function multiply_function(int format, int brain) { (void)format, (void)brain; return shim_multiply; }
static int64_t multiply_chunk(const struct product *p, int threads) { int64_t c = p->outputs / (threads * 8) / 16 * 16; return c < 16 ? 16 : c; }
#include "steps.h"
#undef product
/* SHIM END */

void transcribe_multiply(const uint8_t *weight, const float *x, const float *bias, void *y, int64_t row_bytes,
                         int64_t outputs, int64_t inputs, int64_t count, int64_t x_stride, int64_t y_stride, int format,
                         int brain, int threads) {
    struct product p = {weight, x, bias, y, row_bytes, outputs, inputs, count, x_stride, y_stride, brain};
    split(chosen[format].multiply, &p, outputs, outputs * row_bytes * (1 + count / 4), threads);
}

void transcribe_expand(const uint8_t *weight, void *out, int64_t row_bytes, int64_t rows, int64_t inputs,
                       int64_t out_stride, int format, int brain, int threads) {
    struct expansion e = {weight, out, row_bytes, inputs, out_stride, brain};
    split(chosen[format].expand, &e, rows, rows * inputs * (brain ? 2 : 4), threads);
}
