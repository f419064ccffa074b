// Products of bfloat16 inputs and weights by AVX-512's own instruction for pairs of them.
//
// Every sum is one chain over the inputs, of each pair the second one first: so all shapes of block
// give the same bits, as those of multiply-adds do.
#pragma once

#include <cstdint>

#include "bfloat16_pairs.h"
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
                sums, [&](int row) { return broadcast_pair(x + row * DotInputs::kStride + input); },
                [&](int panel) { return _mm512_loadu_si512(values + panel * weights.stride); },
                add_products);
            values += 2 * kPanelWidth;
        }
#pragma GCC unroll 32
        for (int i = 0; i < kRows * kPanels; ++i) {
            store(sums_in_memory + i * kLanes, sums[i / kPanels][i % kPanels]);
        }
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
