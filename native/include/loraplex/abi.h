/* The border between Python and the kernels: plain C, nothing of torch, nothing of C++.
 *
 * Conventions that every function of the library keeps:
 *
 * - Tensors are a pointer to the first element, sizes and strides. Sizes and strides are int64_t and
 *   count elements, never bytes. The innermost axis is contiguous; every other axis has a stride.
 *   Pointers need only the alignment of their element, unless the function says more.
 * - An element type is a `loraplex_dtype` beside the pointer, which is then `void *`.
 * - The result is a `loraplex_status`; outputs come last among the arguments. An argument that can
 *   be checked at no cost per element is checked; a pointer into nowhere cannot be.
 * - No C++ exception leaves a function (guard.h).
 * - Work goes to the `loraplex_pool` that is passed in, one op at a time. A caller without the GIL
 *   may call from any thread. Once an op was run with some sizes, running it again with these or
 *   smaller ones allocates nothing.
 * - Results do not depend on the number of threads, nor a row's bits on the other rows.
 *
 * Each family of ops declares its functions in a header of its own beside this one.
 */
#ifndef LORAPLEX_ABI_H
#define LORAPLEX_ABI_H

#include <stdint.h>

/* Raised when a declared function changes or comes; Python refuses a library with another number. */
#define LORAPLEX_ABI_VERSION 21

#define LORAPLEX_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t loraplex_status;
enum {
    LORAPLEX_OK = 0,
    LORAPLEX_INVALID_ARGUMENT = 1,
    LORAPLEX_UNSUPPORTED = 2, /* well-formed, but this library has no kernel for it */
    LORAPLEX_OUT_OF_MEMORY = 3,
    LORAPLEX_INTERNAL = 4, /* the operating system refused, or a defect of ours */
    LORAPLEX_ABORTED = 5,      /* another rank ended the exchange (channel.h) */
    LORAPLEX_RANKS_DIFFER = 6, /* the ranks exchange different numbers of bytes: a defect of ours */
};

typedef int32_t loraplex_dtype;
enum {
    LORAPLEX_FLOAT32 = 0,
    LORAPLEX_BFLOAT16 = 1,
    LORAPLEX_FLOAT16 = 2,
    LORAPLEX_INT8 = 3, /* of stored keys and values only (attention.h) */
};

/* What a CPU can run, as bits. */
enum {
    LORAPLEX_CPU_X86_64_V3 = 1, /* AVX2, FMA, F16C */
    LORAPLEX_CPU_X86_64_V4 = 2, /* the above and AVX-512 F, BW, VL, DQ */
    LORAPLEX_CPU_NEON = 4,      /* aarch64 with NEON */
    LORAPLEX_CPU_AVX512_VNNI = 8,
    LORAPLEX_CPU_AVX_VNNI = 16,
    LORAPLEX_CPU_AMX_INT8 = 32,
    LORAPLEX_CPU_AMX_BF16 = 64, /* changes the bits of bfloat16 weights (linear.h) */
    LORAPLEX_CPU_AVX512_BF16 = 128, /* at full speed; likewise, without the above, and the bits of
                                     * attention in bfloat16 (attention.h) */
    LORAPLEX_CPU_NEON_DOTPROD = 256,
    LORAPLEX_CPU_NEON_BF16 = 512, /* changes the bits of bfloat16 weights (linear.h) */
    LORAPLEX_CPU_READS_AHEAD = 1024, /* far enough that a program's own reading ahead costs time */
};

typedef struct loraplex_pool loraplex_pool;
typedef struct loraplex_channel loraplex_channel; /* channel.h */

LORAPLEX_API int32_t loraplex_abi_version(void);

/* The instruction set this library was compiled for: "generic", "x86-64-v3", ... */
LORAPLEX_API const char *loraplex_instruction_set(void);

/* LORAPLEX_CPU_* of the CPU that runs this, as far as the operating system lets them be used. */
LORAPLEX_API uint64_t loraplex_cpu_features(void);

/* num_threads counts the caller, who works too. The pool is made with num_threads - 1 threads. */
LORAPLEX_API loraplex_status loraplex_pool_create(int32_t num_threads, loraplex_pool **pool);

/* Not while an op runs. */
LORAPLEX_API loraplex_status loraplex_pool_destroy(loraplex_pool *pool);

LORAPLEX_API loraplex_status loraplex_pool_set_num_threads(loraplex_pool *pool,
                                                           int32_t num_threads);

LORAPLEX_API int64_t loraplex_pool_num_threads(const loraplex_pool *pool);

/* The time that ops of LoRA have taken so far, in a program or not; the time for which they waited
 * for the pool is not counted. */
LORAPLEX_API int64_t loraplex_pool_lora_ns(const loraplex_pool *pool);

/* From now on an op uses, of what a CPU may have beyond the instruction set, at most this
 * (LORAPLEX_CPU_*). At first it uses all that the CPU has. */
LORAPLEX_API loraplex_status loraplex_pool_limit_cpu_features(loraplex_pool *pool,
                                                              uint64_t features);

#ifdef __cplusplus
}
#endif

#endif
