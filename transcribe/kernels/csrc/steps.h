/* A list of steps, run by one team of threads in one call. One token's way through a layer is some fifteen operations of
 * a few microseconds; to call each from Python and to start a team for each would take longer than the operations.
 */

enum { PREPARE, MULTIPLY, ADD, TIMES, SILU, RMS_NORM, LAYER_NORM, ROTARY_HALVES, ROTARY_PAIRS, ATTEND, SEPARABLE };

/* `operands` is the structure that the operation's function reads; `next` units are given out, `done` are finished. */
struct step {
    int64_t operation, units, next, done;
    int64_t operands[19];
};

struct list {
    struct step *steps;
    int64_t count;
    int threads;
};

static rows_function step_function(const struct step *s) {
    const struct product *p = (const void *)s->operands;
    if (s->operation == PREPARE) return prepare_function(p);
    if (s->operation == MULTIPLY) return multiply_function(p);
    return chosen->operations[s->operation - ADD];
}

static int64_t step_chunk(const struct step *s, int threads) {
    const struct product *p = (const void *)s->operands;
    if (s->operation == PREPARE) return p->count * p->inputs * 2 < ALONE ? s->units : s->units / (threads * 2) + 1;
    return s->operation == MULTIPLY ? multiply_chunk(p, threads) : 1;
}

/* How many steps from s on are done as one: those of a single chunk, which go to whoever takes the first. */
static int64_t series(const struct list *l, const struct step *s) {
    const struct step *next = s, *end = l->steps + l->count;
    while (next < end && s->units && next->operation != SEPARABLE && step_chunk(next, l->threads) >= next->units) next++;
    return next > s ? next - s : 1;
}

/* Chunks of a step, and the `count` - 1 steps that are done with it. */
static void take_chunks_of(struct step *s, int64_t count, int threads) {
    int64_t chunk = step_chunk(s, threads), first;
    while ((first = __atomic_fetch_add(&s->next, chunk, __ATOMIC_RELAXED)) < s->units) {
        int64_t last = first + chunk < s->units ? first + chunk : s->units;
        step_function(s)(s->operands, first, last);
        for (struct step *o = s + 1; o < s + count; o++) step_function(o)(o->operands, 0, o->units);
        __atomic_fetch_add(&s->done, last - first, __ATOMIC_RELEASE);
    }
}

/* Steps in order: whoever is free takes a chunk, and goes on when all chunks are done. So a thread that comes late, or is
 * kept from running between chunks, holds up nobody. */
static void take_steps(void *shared) {
    const struct list *l = shared;
    int64_t count;
    for (struct step *s = l->steps; s < l->steps + l->count; s += count) {
        count = series(l, s);
        if (s->operation == SEPARABLE) chosen->separable(s->operands, &s->next, &s->done);
        else take_chunks_of(s, count, l->threads);
        wait_for(&s->done, s->units);
    }
}

void transcribe_run(struct step *steps, int64_t count, int threads) {
    struct list l = {steps, count, threads};
    for (struct step *s = steps; s < steps + count; s++) {
        s->next = s->done = 0;
        if (s->operation == SEPARABLE) {
            struct separable *p = (void *)s->operands;
            p->entered = p->convolved = 0;
        }
        if (s->operation == PREPARE) s->units = prepare_units(((const struct product *)s->operands)->inputs);
    }
    if (team && threads > 1) team(take_steps, &l, (unsigned)threads, 0);
    else take_steps(&l);
}
