// Products of bfloat16 inputs and weights by AVX-512's own instruction for pairs of them.
//
// Every sum is one chain over the inputs, of each pair the second one first: so all shapes of block
// give the same bits, as those of multiply-adds do.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "linear_inputs.h"
#include "linear_vectors.h"

namespace loraplex {

// Like other vectors' inputs, half as many bytes.
using DotInputs = PairInputs<kMaxDepth<Bfloat16>>;

template <int kRows, int kPanels>
struct DotBlock {
    static void run(const Bfloat16 *x, const BlockWeights<Bfloat16> &weights, int depth,
                    float *sums_in_memory, bool first) {
        Floats sums[kRows][kPanels];
#pragma GCC unroll 32
        for (int i = 0; i < kRows * kPanels; ++i) {
            sums[i / kPanels][i % kPanels] =
                first ? zeros() : load(sums_in_memory + i * kLanes);
        }
        const Bfloat16 *values = weights.values;
        for (int input = 0; input < depth; input += 2) {
            prefetch<kPanels, Bfloat16>(weights.ahead, input / 2, weights.stride);
            outer_product(
                sums, [&](int row) { return pair_at(x + row * DotInputs::kStride + input); },
                [&](int panel) { return _mm512_loadu_si512(values + panel * weights.stride); },
                add_products);
            values += 2 * kPanelWidth;
        }
#pragma GCC unroll 32
        for (int i = 0; i < kRows * kPanels; ++i) {
            store(sums_in_memory + i * kLanes, sums[i / kPanels][i % kPanels]);
        }
    }

private:
    __attribute__((always_inline)) static __m512i pair_at(const Bfloat16 *x) {
        std::int32_t pair = 0;
        std::memcpy(&pair, x, sizeof(pair));
        return _mm512_set1_epi32(pair);
    }

    // In assembly: the library must load without it.
    __attribute__((always_inline)) static Floats add_products(__m512i a, __m512i b, Floats sum) {
        asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
        return sum;
    }
};

class DotProducts : public VectorProducts<Bfloat16, DotInputs> {
public:
    DotProducts(const PanelLayout<Bfloat16> &layout, std::uint64_t cpu_features)
        : VectorProducts(layout, cpu_features, &function) {}

private:
    static Function function(BlockShape shape, std::uint64_t /*cpu_features*/) {
        return block_of<Function, DotBlock>(shape);
    }
};

}  // namespace loraplex
