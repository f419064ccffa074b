/* Blocks of GGUF files, as they lie there, packed for loraplex_linear. */
#ifndef LORAPLEX_GGUF_H
#define LORAPLEX_GGUF_H

#include "loraplex/abi.h"
#include "loraplex/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers that files have for the types, each with blocks of LORAPLEX_SUPER_BLOCK_INPUTS values. */
typedef int32_t loraplex_gguf_type;
enum {
    LORAPLEX_GGUF_Q4_K = 12,
    LORAPLEX_GGUF_Q5_K = 13,
    LORAPLEX_GGUF_Q6_K = 14,
};

/* The panels that loraplex_pack_weight makes of the same numbers. rows [out_features]: the first
 * block of each row; types likewise. A kind without minima takes Q6_K only, SUPER4 Q4_K only, and a
 * group_size of 32 no Q6_K. all_finite: 0 if a scale is infinite or NaN. */
LORAPLEX_API loraplex_status loraplex_pack_gguf(loraplex_pool *pool, loraplex_weight_kind kind,
                                                int64_t group_size, int64_t num_blocks,
                                                const void *const *rows, const uint8_t *types,
                                                int64_t out_features, int64_t in_features,
                                                void *packed, int32_t *all_finite);

#ifdef __cplusplus
}
#endif

#endif
