#include "packed_weight.h"

#include <algorithm>

#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

// Sizes whose product cannot overflow.
bool valid_sizes(std::int64_t out_features, std::int64_t in_features) {
    constexpr std::int64_t kLargest = std::int64_t{1} << 28;
    return out_features > 0 && in_features > 0 && out_features <= kLargest &&
           in_features <= kLargest;
}

template <typename W>
void pack_panel(const W *weight, std::int64_t weight_stride, std::int64_t num_outputs,
                std::int64_t in_features, W *panel) {
    constexpr std::int64_t kDepth = kInterleaved<W>;
    if (num_outputs < kPanelWidth || in_features % kDepth != 0) {
        std::fill_n(panel, panel_size<W>(in_features), W{});
    }
    for (std::int64_t output = 0; output < num_outputs; ++output) {
        const W *source = weight + output * weight_stride;
        for (std::int64_t input = 0; input < in_features; ++input) {
            const std::int64_t group = input / kDepth * kDepth;
            panel[group * kPanelWidth + output * kDepth + input % kDepth] = source[input];
        }
    }
}

template <typename W>
void pack(loraplex_pool &pool, const W *weight, std::int64_t weight_stride,
          std::int64_t out_features, std::int64_t in_features, W *packed) {
    const Op op(pool);
    pool.parallel_for_tiles(num_panels(out_features), [&](std::int64_t panel, int) {
        const std::int64_t first = panel * kPanelWidth;
        const std::int64_t num_outputs = std::clamp<std::int64_t>(out_features - first, 0, kPanelWidth);
        pack_panel(weight + first * weight_stride, weight_stride, num_outputs, in_features,
                   packed + panel * panel_size<W>(in_features));
    });
}

}  // namespace
}  // namespace loraplex

int64_t loraplex_packed_weight_bytes(loraplex_weight_kind kind, int64_t out_features,
                                     int64_t in_features) {
    using namespace loraplex;
    std::int64_t num_bytes = 0;
    if (valid_sizes(out_features, in_features)) {
        for_weight_kind(kind, [&]<typename W>(W) {
            num_bytes = num_panels(out_features) * panel_size<W>(in_features) *
                        static_cast<std::int64_t>(sizeof(W));
            return LORAPLEX_OK;
        });
    }
    return num_bytes;
}

loraplex_status loraplex_pack_weight(loraplex_pool *pool, loraplex_weight_kind kind,
                                     const void *weight, int64_t weight_stride,
                                     int64_t out_features, int64_t in_features, void *packed) {
    using namespace loraplex;
    if (!valid_sizes(out_features, in_features)) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    return guarded([&] {
        return for_weight_kind(kind, [&]<typename W>(W) {
            pack(*pool, static_cast<const W *>(weight), weight_stride, out_features, in_features,
                 static_cast<W *>(packed));
            return LORAPLEX_OK;
        });
    });
}
