#include "loraplex/weight_rows.h"

#include <bit>
#include <cstring>

#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"
#include "packed_weight.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

float number_at(const void *numbers, std::int64_t index) {
    float number;
    std::memcpy(&number, static_cast<const std::byte *>(numbers) + index * 4, sizeof(number));
    return number;
}

// The value of one input of one output; values: those of a block, or of a super-block.
template <typename W>
int value_at(const W *values, std::int64_t output, std::int64_t input) {
    constexpr std::int64_t kDepth = kInterleaved<W>;
    const auto *bytes = reinterpret_cast<const std::uint8_t *>(
        values + input / kDepth * kDepth * kInputSize<W>);
    const auto within = static_cast<int>(input % kDepth);
    if constexpr (std::is_same_v<W, Int8>) {
        return static_cast<std::int8_t>(bytes[output * kDepth + within]);
    } else if constexpr (std::is_same_v<W, Int4>) {
        const int bits = within / 2 * 4;
        const int nibble = bytes[(output * 2 + within % 2) * 2 + bits / 8] >> bits % 8 & 0xf;
        return nibble < 8 ? nibble : nibble - 16;
    } else if constexpr (std::is_same_v<W, Table4>) {
        const std::int64_t place = output % 8 / 4 * 16 + output / 8 * 8 + output % 4 * 2;
        return bytes[place + within % 2] >> within / 2 * 4 & 0xf;
    } else {
        constexpr std::int64_t kLine = 4 * kPanelWidth;
        const std::int64_t place = output * 4 + within % 4;
        const int low = bytes[within / 8 * kLine + place] >> within % 8 / 4 * 4 & 0xf;
        if constexpr (std::is_same_v<W, Super4>) {
            return low;
        } else {
            return (low | (bytes[2 * kLine + place] >> within / 4 * 2 & 3) << 4) - 32;
        }
    }
}

// body(input, number) for the inputs of one output of one block.
template <typename W, typename Body>
void for_each_number(const PanelLayout<W> &layout, const W *panel, std::int64_t block,
                     std::int64_t output, const Body &body) {
    if constexpr (kHasSuperBlocks<W>) {
        const SuperBlockLayout<W> parts = layout.super_block();
        const std::int64_t size = layout.group_size();
        for (std::int64_t first = 0; first < layout.block_inputs(); first += kSuperInputs) {
            const W *values = layout.values(panel, block, first);
            const auto *bytes = reinterpret_cast<const std::int8_t *>(values);
            const float scale = number_at(bytes + parts.kScales, output);
            for (std::int64_t group = 0; group < parts.num_groups; ++group) {
                const std::int8_t factor = bytes[parts.factors() + group * kPanelWidth + output];
                const float of_group = static_cast<float>(factor) * scale;
                float offset = 0.0f;
                if (parts.has_minima) {
                    const std::int8_t minimum =
                        bytes[parts.minima() + group / 2 * 2 * kPanelWidth + output * 2 +
                              group % 2];
                    offset = static_cast<float>(minimum) *
                             number_at(bytes + parts.minimum_scales(), output);
                }
                for (std::int64_t i = group * size; i < (group + 1) * size; ++i) {
                    body(first + i,
                         static_cast<float>(value_at(values, output, i)) * of_group - offset);
                }
            }
        }
    } else if constexpr (kIsQuantized<W>) {
        const W *values = layout.values(panel, block, 0);
        const std::int64_t size = layout.group_size();
        for (std::int64_t first = 0; first < layout.block_inputs(); first += size) {
            const float scale = number_at(layout.scales(panel, block, first), output);
            const float offset = layout.has_offsets()
                                     ? number_at(layout.offsets(panel, block, first), output)
                                     : 0.0f;
            const std::int64_t end = std::min(first + size, layout.block_inputs());
            for (std::int64_t input = first; input < end; ++input) {
                int value = value_at(values, output, input);
                if constexpr (std::is_same_v<W, Table4>) {
                    const std::uint8_t *table = layout.table(panel, block);
                    value = static_cast<std::int16_t>(table[value] |
                                                      table[kTableEntries + value] << 8);
                }
                body(input, static_cast<float>(value) * scale - offset);
            }
        }
    } else {
        constexpr std::int64_t kDepth = kInterleaved<W>;
        const W *values = layout.values(panel, block, 0);
        for (std::int64_t input = 0; input < layout.block_inputs(); ++input) {
            body(input, widen(values[input / kDepth * kDepth * kPanelWidth + output * kDepth +
                                     input % kDepth]));
        }
    }
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_weight_rows(loraplex_pool *pool, loraplex_weight_kind kind,
                                     int64_t group_size, int64_t num_blocks, const void *packed,
                                     int64_t out_features, int64_t in_features,
                                     const int64_t *rows, int64_t num_rows, loraplex_dtype dtype,
                                     void *y, int64_t y_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && loraplex_packed_weight_bytes(kind, group_size, num_blocks,
                                                            out_features, in_features) > 0,
              "weight_rows");
        return for_weight_kind(kind, [&]<typename W>(W) {
            const PanelLayout<W> layout(in_features, num_blocks, group_size, has_offsets(kind));
            return for_dtype(dtype, [&]<typename T>(T) {
                for_each_row(*pool, num_rows, in_features, [&](std::int64_t index) {
                    const std::int64_t row = rows[index];
                    const W *panel =
                        static_cast<const W *>(packed) + row / kPanelWidth * layout.stride();
                    for (std::int64_t block = 0; block < num_blocks; ++block) {
                        T *target = static_cast<T *>(y) + index * y_stride +
                                    block * layout.block_inputs();
                        for_each_number(layout, panel, block, row % kPanelWidth,
                                        [target](std::int64_t input, float number) {
                                            target[input] = narrow<T>(number);
                                        });
                    }
                });
                return LORAPLEX_OK;
            });
        });
    });
}
