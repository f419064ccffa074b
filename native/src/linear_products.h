// How the CPU makes the products of `linear`.
#pragma once

#include <cstdint>
#include <type_traits>

#include "linear_super_blocks.h"
#include "linear_vectors.h"

#if defined(LORAPLEX_ISA_X86_64_V4)
#include "linear_amx.h"
#include "linear_amx_quantized.h"
#include "linear_amx_super.h"
#include "linear_bytes.h"
#include "linear_dots.h"
#elif defined(LORAPLEX_ISA_NEON)
#include "linear_bytes.h"
#include "linear_matrices.h"
#endif

namespace loraplex {

// body(std::type_identity<Products>{}) with how products of inputs of a type and W's are made, in the
// order that the CPU has for them. num_rows: the most of one weight.
template <typename W, typename Body>
auto with_products([[maybe_unused]] std::uint64_t cpu_features,
                   [[maybe_unused]] loraplex_dtype dtype, [[maybe_unused]] std::int64_t num_rows,
                   const Body &body) {
#if defined(LORAPLEX_ISA_X86_64_V4)
    if constexpr (std::is_same_v<W, Bfloat16>) {
        const bool is_bfloat16 = dtype == LORAPLEX_BFLOAT16;
        if (is_bfloat16 && (cpu_features & LORAPLEX_CPU_AMX_BF16) != 0) {
            return num_rows <= PairedProducts::kMaxRows
                       ? body(std::type_identity<PairedProducts>{})
                       : body(std::type_identity<AmxProducts>{});
        }
        if (is_bfloat16 && (cpu_features & LORAPLEX_CPU_AVX512_BF16) != 0) {
            return body(std::type_identity<DotProducts>{});
        }
    } else if constexpr (std::is_same_v<W, Int8> || std::is_same_v<W, Int4>) {
        if ((cpu_features & LORAPLEX_CPU_AMX_INT8) != 0 && num_rows >= kFewestByteRows) {
            return body(std::type_identity<AmxQuantizedProducts<W, SplitInputs<W>>>{});
        }
    } else if constexpr (kHasSuperBlocks<W>) {
        if ((cpu_features & LORAPLEX_CPU_AMX_INT8) != 0 && num_rows >= kFewestSuperRows) {
            return body(std::type_identity<AmxSuperBlockProducts<W>>{});
        }
    }
#elif defined(LORAPLEX_ISA_NEON)
    if constexpr (std::is_same_v<W, Bfloat16>) {
        if (dtype == LORAPLEX_BFLOAT16 && (cpu_features & LORAPLEX_CPU_NEON_BF16) != 0) {
            return body(std::type_identity<MatrixProducts>{});
        }
    }
#endif
    if constexpr (kHasSuperBlocks<W>) {
        return body(std::type_identity<SuperBlockProducts<W>>{});
    } else {
        return body(std::type_identity<VectorProducts<W>>{});
    }
}

// The same for weights whose inputs have 8 bits, too.
template <typename W, typename Body>
auto with_group_products([[maybe_unused]] std::uint64_t cpu_features,
                         [[maybe_unused]] std::int64_t num_rows,
                         [[maybe_unused]] std::int64_t group_size, const Body &body) {
    if constexpr (std::is_same_v<W, Int8> || std::is_same_v<W, Int4>) {
#if defined(LORAPLEX_ISA_X86_64_V4)
        if ((cpu_features & LORAPLEX_CPU_AMX_INT8) != 0 && num_rows >= kFewestByteRows &&
            group_size <= ByteTileInputs<W>::kMaxGroupSize) {
            return body(std::type_identity<AmxQuantizedProducts<W, ByteTileInputs<W>>>{});
        }
        if ((cpu_features & LORAPLEX_CPU_AVX512_VNNI) != 0) {
            return body(std::type_identity<ByteProducts<W>>{});
        }
#elif defined(LORAPLEX_ISA_NEON)
        if ((cpu_features & LORAPLEX_CPU_NEON_DOTPROD) != 0) {
            return body(std::type_identity<ByteProducts<W>>{});
        }
#endif
        return body(std::type_identity<GroupProducts<W>>{});
    } else {
        return LORAPLEX_INVALID_ARGUMENT;
    }
}

}  // namespace loraplex
