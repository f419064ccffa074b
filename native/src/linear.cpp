#include "loraplex/linear.h"

#include <algorithm>
#include <cstddef>

#include "linear_float_block.h"
#include "linear_inputs.h"
#include "linear_quantized_block.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

// Rows of one tile: their inputs of one depth stay in the second cache.
constexpr std::int64_t kMaxTileRows = 128;
// Outputs of one tile with many rows: so often the inputs are used when they are there.
constexpr int kTilePanels = 4;
// Below this many multiply-adds, waking another thread takes longer than the work.
constexpr std::int64_t kWorthSharing = 1 << 16;
// Inputs are widened by all threads from this many on.
constexpr std::int64_t kWorthSharingInputs = 1 << 15;

// Part i of `total` things in `parts` even parts.
struct Range {
    std::int64_t first;
    std::int64_t size;
};

constexpr Range part(std::int64_t total, std::int64_t parts, std::int64_t i) {
    const std::int64_t first = total * i / parts;
    return {first, total * (i + 1) / parts - first};
}

// One op's arguments, and how they are cut into tiles.
template <typename W, typename T>
class Linear {
public:
    Linear(loraplex_pool &pool, const T *x, std::int64_t x_stride, std::int64_t num_rows,
           const W *packed, std::int64_t group_size, std::int64_t out_features,
           std::int64_t in_features, const float *bias, T *y, std::int64_t y_stride)
        : pool_(pool), x_(x), x_stride_(x_stride), num_rows_(num_rows), packed_(packed),
          group_size_(group_size), layout_(in_features, group_size), out_features_(out_features),
          in_features_(in_features), bias_(bias), y_(y), y_stride_(y_stride) {
        shape_ = block_shape(num_rows);
        tile_blocks_ = num_rows <= kManyRows.rows ? 1 : std::max(1, kTilePanels / shape_.panels);
        num_row_tiles_ = divide_up(num_rows, kMaxTileRows);
        num_column_tiles_ = divide_up(num_panels(out_features), tile_panels());
    }

    void run() {
        const Op op(pool_);
        void *memory = pool_.shared_scratch(Inputs<W>::num_bytes(num_rows_, in_features_));
        inputs_ = {memory, num_rows_, in_features_};
        sums_ = static_cast<std::byte *>(pool_.worker_scratch(sums_bytes()));
        share(num_rows_, num_rows_ * in_features_ >= kWorthSharingInputs,
              [this](std::int64_t row, int) {
                  inputs_.set_row(row, x_ + row * x_stride_);
              });
        share(num_row_tiles_ * num_column_tiles_,
              num_rows_ * out_features_ * in_features_ >= kWorthSharing,
              [this](std::int64_t tile, int worker) { compute(tile, worker); });
    }

private:
    template <typename Fn>
    void share(std::int64_t num_tiles, bool is_worth_it, const Fn &fn) {
        if (is_worth_it) {
            pool_.parallel_for_tiles(num_tiles, fn);
            return;
        }
        for (std::int64_t tile = 0; tile < num_tiles; ++tile) {
            fn(tile, 0);
        }
    }

    std::int64_t block_outputs() const { return shape_.panels * kPanelWidth; }
    std::int64_t tile_panels() const { return shape_.panels * tile_blocks_; }

    std::size_t sums_bytes() const {
        const std::int64_t rows = std::min(num_rows_, kMaxTileRows);
        return static_cast<std::size_t>(rows * block_outputs() * tile_blocks_) * sizeof(float);
    }

    void compute(std::int64_t tile, int worker) {
        const Range rows = part(num_rows_, num_row_tiles_, tile / num_column_tiles_);
        const std::int64_t first_panel = tile % num_column_tiles_ * tile_panels();
        const auto stride = loraplex_pool::worker_scratch_stride(sums_bytes());
        auto *sums = reinterpret_cast<float *>(sums_ + stride * static_cast<std::size_t>(worker));
        const std::int64_t num_blocks = std::min<std::int64_t>(
            tile_blocks_, divide_up(num_panels(out_features_) - first_panel, shape_.panels));
        const std::int64_t block_sums = rows.size * block_outputs();
        for (std::int64_t first = 0; first < in_features_; first += kMaxDepth<W>) {
            const bool is_last = first + kMaxDepth<W> >= in_features_;
            for (std::int64_t block = 0; block < num_blocks; ++block) {
                const std::int64_t panel = first_panel + block * shape_.panels;
                // The tile's next call, or the next tile's first.
                const W *next = block + 1 < num_blocks
                                    ? weights(panel + shape_.panels, first)
                                : is_last ? weights(panel + shape_.panels, 0)
                                          : weights(first_panel, first + kMaxDepth<W>);
                add_products(rows, panel, first, next, sums + block * block_sums);
            }
        }
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            write(rows, first_panel + block * shape_.panels, sums + block * block_sums);
        }
    }

    const W *weights(std::int64_t panel, std::int64_t first_input) const {
        return layout_.values(packed_ + panel * layout_.stride(), first_input);
    }

    // sums [rows][outputs of a block] += the share of the inputs from `first` on, kMaxDepth at most.
    // next: the weights of the call after this one.
    void add_products(Range rows, std::int64_t panel, std::int64_t first, const W *next,
                      float *sums) {
        const std::int64_t num_row_blocks = divide_up(rows.size, shape_.rows);
        BlockWeights<W> block = {weights(panel, first), layout_.stride(),
                                 layout_.scales(packed_ + panel * layout_.stride(), first),
                                 group_size_, {}};
        const auto depth =
            static_cast<int>(std::min<std::int64_t>(kMaxDepth<W>, in_features_ - first));
        for (std::int64_t i = 0; i < num_row_blocks; ++i) {
            const Range part_rows = part(rows.size, num_row_blocks, i);
            const Range next_rows = part(rows.size, num_row_blocks, (i + 1) % num_row_blocks);
            block.ahead = num_row_blocks == 1
                              ? ReadAhead::whole(block.values + kReadAheadBytes / sizeof(W))
                              : ReadAhead::part(next, depth, num_row_blocks, i);
            block.ahead.inputs = reinterpret_cast<const std::byte *>(
                inputs_.at(first, rows.first + next_rows.first));
            const BlockShape shape = {static_cast<int>(part_rows.size), shape_.panels};
            block_function<W>(shape, pool_.cpu_features())(
                inputs_.at(first, rows.first + part_rows.first), block, depth,
                sums + part_rows.first * block_outputs(), first == 0);
        }
    }

    void write(Range rows, std::int64_t panel, const float *sums) {
        const std::int64_t first = panel * kPanelWidth;
        const std::int64_t num_outputs = std::min(block_outputs(), out_features_ - first);
        for (std::int64_t row = 0; row < rows.size; ++row) {
            T *target = y_ + (rows.first + row) * y_stride_ + first;
            const float *source = sums + row * block_outputs();
            for (std::int64_t output = 0; output < num_outputs; output += kLanes) {
                const auto count =
                    static_cast<int>(std::min<std::int64_t>(kLanes, num_outputs - output));
                Floats sum = load(source + output);
                if constexpr (kIsQuantized<W>) {
                    sum = multiply(sum, broadcast(inputs_.scale(rows.first + row)));
                }
                write_vector(sum, first + output, target + output, count);
            }
        }
    }

    void write_vector(Floats sum, std::int64_t output, T *target, int count) {
        if (count == kLanes) {
            store(target, bias_ == nullptr ? sum : add(sum, load(bias_ + output)));
        } else {
            const Floats bias = bias_ == nullptr ? zeros() : load_first(bias_ + output, count);
            store_first(target, add(sum, bias), count);
        }
    }

    loraplex_pool &pool_;
    const T *x_;
    std::int64_t x_stride_;
    std::int64_t num_rows_;
    const W *packed_;
    std::int64_t group_size_;
    PanelLayout<W> layout_;
    std::int64_t out_features_;
    std::int64_t in_features_;
    const float *bias_;
    T *y_;
    std::int64_t y_stride_;
    BlockShape shape_;
    int tile_blocks_;
    std::int64_t num_row_tiles_;
    std::int64_t num_column_tiles_;
    Inputs<W> inputs_;
    std::byte *sums_ = nullptr;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                int64_t group_size, loraplex_dtype dtype, const void *x,
                                int64_t x_stride, int64_t num_rows, const void *packed,
                                int64_t out_features, int64_t in_features, const float *bias,
                                void *y, int64_t y_stride) {
    using namespace loraplex;
    if (num_rows < 0 ||
        loraplex_packed_weight_bytes(kind, group_size, out_features, in_features) == 0) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    if (num_rows == 0) {
        return LORAPLEX_OK;
    }
    return guarded([&] {
        return for_weight_kind(kind, [&]<typename W>(W) {
            return for_dtype(dtype, [&]<typename T>(T) {
                Linear<W, T>(*pool, static_cast<const T *>(x), x_stride, num_rows,
                             static_cast<const W *>(packed), group_size, out_features, in_features,
                             bias, static_cast<T *>(y), y_stride)
                    .run();
                return LORAPLEX_OK;
            });
        });
    });
}
