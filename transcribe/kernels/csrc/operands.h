/* The operands of the operations in operations.h, as they lie in a step: eight bytes each. Strides are in values. */

/* Element by element. Each row has its own stride, the others none. */
struct pairs {
    const void *a, *b;
    void *out;
    int64_t width, a_stride, b_stride, out_stride, brain;
};

/* Normalised rows of `parts` stretches of `width` values: x is strided, the result is contiguous. */
struct norm {
    const void *x, *weight, *bias;
    void *out;
    int64_t parts, width, row_stride, part_stride, brain;
    double eps;
};

/* Turned heads. x [rows, heads, width] is strided, the result contiguous. */
struct turn {
    const void *x, *rotation;
    void *out;
    int64_t heads, width, row_stride, head_stride, turned, brain;
};

/* One query a sequence against its keys and values, rows of `width` for each group of heads. Where `fresh`, the query's own key
 * and value are first copied to the last row. A unit is a group of heads of a sequence; they share keys and values. */
struct attend {
    const void *q, *k, *v;
    void *out;
    const int64_t *table; /* of each sequence: keys, values, length, stride of rows, stride of groups */
    int64_t heads, groups, width, q_stride, k_stride, v_stride, fresh, brain;
    double scale;
};

/* Of one query's attention: keys at a time, and how many keys ahead memory is asked for; then the most it takes, values of
 * a head and heads that share keys. */
enum { KEYS = 64, SOON = 16, WIDEST = 256, MOST_HEADS = 16 };

/* Rows of x [rows, inputs], each channel convolved by `depthwise` [kernel, inputs rounded up to 16], or as it is without
 * one; times `weight` [inputs, outputs], whose rows are `pitch` values apart, plus `bias`. Zeros stand around x, as many
 * as keep its length. Weight and bias are filled up with zeros to a multiple of 32 outputs. A unit is `tile` rows of the
 * result, a multiple of 12, no fewer than the zeros on one side. `scratch` has `share` values for each of `threads`. */
struct separable {
    const float *x, *depthwise, *weight, *bias;
    float *out, *scratch;
    int64_t rows, inputs, outputs, pitch, kernel, stride, dilation, rectified, tile, share, threads;
    int64_t entered, convolved; /* threads, and units in their order */
};
