/* Weights and their planes in panels, as the formats read them. */
#ifndef DIPTYCH_PACK_H
#define DIPTYCH_PACK_H

#include "matmul.h"

/* Value k of an output's codes. Four inputs that follow each other are the bytes of a word, or four bits of each: then the low ones
 * are the first of eight inputs. Of five and six bits the upper ones lie in the last word of a step, those of each four inputs at one
 * place of its bytes. */
INLINE void pack_code(char *panel, long lane, long k, long bits, uint32_t value) {
    if (bits >= 8) {
        long in_word = 32 / bits;
        ((uint32_t *)panel)[k / in_word * PANEL + lane] |= value << (k % in_word * bits);
        return;
    }
    long step = bits == 5 ? 32 : bits == 6 ? 16 : 8, words = step * bits / 32, i = k % step, upper = bits - 4;
    uint32_t *to = (uint32_t *)panel + k / step * words * PANEL + lane;
    to[i / 8 * PANEL] |= (value & 15) << (i % 4 * 8 + i / 4 % 2 * 4);
    if (upper) to[(words - 1) * PANEL] |= (value >> 4) << (i % 4 * 8 + i / 4 * upper);
}

INLINE uint32_t code_of(const void *codes, long size, long at) {
    if (size == 4) return ((const uint32_t *)codes)[at];
    return size == 2 ? ((const uint16_t *)codes)[at] : ((const uint8_t *)codes)[at];
}

#define PACKED_AT_ONCE 64 /* of an output: whole cache lines are read, and what is written stays in the first cache */

/* Panel by panel; `bits` and `size` are constants of the caller, so that places in words are shifts. */
INLINE void pack_panels(const void *codes, long size, long bits, long outputs, long inputs, long all, uint32_t flip, long panel_bytes, char *out) {
    uint32_t mask = bits == 32 ? UINT32_MAX : (1u << bits) - 1;
    for (long first = 0; first < outputs; first += PANEL, out += panel_bytes)
        for (long begin = 0; begin < all; begin += PACKED_AT_ONCE)
            for (long lane = 0; lane < PANEL; lane++) {
                long end = min_long(begin + PACKED_AT_ONCE, all), column = first + lane, there = column < outputs ? min_long(end, inputs) : begin, k = begin;
                for (; k < there; k++) pack_code(out, lane, k, bits, (code_of(codes, size, column * inputs + k) ^ flip) & mask);
                for (; k < end; k++) pack_code(out, lane, k, bits, flip & mask);
            }
}

/* codes: [outputs][inputs], of whole bytes; `flip` is added to each without a carry, and so it is for inputs that there are not. */
static void pack_codes(const struct format *format, const void *codes, long outputs, long inputs, long group, uint32_t flip, char *out) {
    long planes[MAX_PLANES], panel_bytes = lay_out_panel(format, inputs, group, planes);
    long all = ceil_div(inputs, format->whole) * format->whole;
    memset(out, 0, num_panels(outputs) * panel_bytes);
#define OF_BITS(BITS, SIZE) \
    case BITS: pack_panels(codes, SIZE, BITS, outputs, inputs, all, flip, panel_bytes, out); break
    switch (format->bits) {
        OF_BITS(4, 1);
        OF_BITS(5, 1);
        OF_BITS(6, 1);
        OF_BITS(8, 1);
        OF_BITS(16, 2);
        OF_BITS(32, 4);
    }
#undef OF_BITS
}

/* values: [outputs][as many as an output has]. */
static void pack_plane(const struct format *format, int index, const char *values, long outputs, long inputs, long group, char *out) {
    long planes[MAX_PLANES], panel_bytes = lay_out_panel(format, inputs, group, planes);
    long size = format->planes[index].bytes, count = plane_size(&format->planes[index], inputs, group);
    for (long column = 0; column < outputs; column++)
        for (long i = 0; i < count; i++) {
            char *to = out + column / PANEL * panel_bytes + planes[index] + (i * PANEL + column % PANEL) * size;
            memcpy(to, values + (column * count + i) * size, size);
        }
}

#endif
