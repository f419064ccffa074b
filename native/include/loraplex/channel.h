/* Channels: shared memory through which the ranks of one model exchange what each computed.
 *
 * The ranks are processes of one machine which run the same code. They exchange in rounds: every
 * rank publishes the same number of bytes and then reads what all published. An op that adds over
 * ranks takes a channel among its arguments and makes its rounds inside (src/channel_rounds.h).
 *
 * A channel is used by one thread at a time; only loraplex_channel_abort and
 * loraplex_channel_wait_ns may be called from any thread at any time. */
#ifndef LORAPLEX_CHANNEL_H
#define LORAPLEX_CHANNEL_H

#include "loraplex/abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define LORAPLEX_CHANNEL_MAX_RANKS 64
#define LORAPLEX_CHANNEL_REASON_BYTES 960 /* with the zero at the end */

/* The bytes of a channel's segment; -1 if the sizes are wrong: ranks from 1 to
 * LORAPLEX_CHANNEL_MAX_RANKS, slots of 64 bytes to 1 GiB in whole multiples of 64. */
LORAPLEX_API int64_t loraplex_channel_bytes(int64_t num_ranks, int64_t slot_bytes);

/* Maps the segment behind fd, which must have exactly loraplex_channel_bytes, all zero before the
 * first rank opens it. NULL if a size or the rank is wrong, or the segment cannot be mapped. The
 * file descriptor may be closed afterwards. */
LORAPLEX_API loraplex_channel *loraplex_channel_open(int32_t fd, int64_t rank, int64_t num_ranks,
                                                     int64_t slot_bytes);

LORAPLEX_API loraplex_status loraplex_channel_close(loraplex_channel *channel);

/* target is [num_ranks][num_bytes]; num_bytes may be larger than a slot, or 0 to only meet. */
LORAPLEX_API loraplex_status loraplex_channel_gather(loraplex_channel *channel, int64_t num_bytes,
                                                     const void *source, void *target);

/* x: this rank's columns of num_rows rows, total * rank / num_ranks to total * (rank + 1) / num_ranks
 * - 1 of `total`; y [num_rows, total]. */
LORAPLEX_API loraplex_status loraplex_gather_columns(loraplex_pool *pool,
                                                     loraplex_channel *channel,
                                                     loraplex_dtype dtype, int64_t num_rows,
                                                     int64_t total, const void *x,
                                                     int64_t x_stride, void *y, int64_t y_stride);

/* Ends every wait of every rank, now and later, with LORAPLEX_ABORTED. The first reason stays. */
LORAPLEX_API loraplex_status loraplex_channel_abort(loraplex_channel *channel, const char *reason);

/* The reason of the abort; empty if there was none. Stays until the channel is closed. */
LORAPLEX_API const char *loraplex_channel_abort_reason(const loraplex_channel *channel);

/* How long this rank has waited for the others since it opened the channel, in nanoseconds. */
LORAPLEX_API int64_t loraplex_channel_wait_ns(const loraplex_channel *channel);

#ifdef __cplusplus
}
#endif

#endif
