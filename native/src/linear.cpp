#include "loraplex/linear.h"

#include <algorithm>
#include <cstddef>

#include "linear_block.h"
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

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Part i of `total` things in `parts` even parts.
struct Range {
    std::int64_t first;
    std::int64_t size;
};

constexpr Range part(std::int64_t total, std::int64_t parts, std::int64_t i) {
    const std::int64_t first = total * i / parts;
    return {first, total * (i + 1) / parts - first};
}

// The inputs as float32: [depth block][row][kRowStride].
struct Inputs {
    float *data;
    std::int64_t num_rows;

    float *at(std::int64_t depth_block, std::int64_t row) const {
        return data + (depth_block * num_rows + row) * kRowStride;
    }

    static std::size_t num_bytes(std::int64_t num_rows, std::int64_t in_features) {
        return static_cast<std::size_t>(divide_up(in_features, kMaxDepth) * num_rows) * kRowStride *
               sizeof(float);
    }
};

template <typename T>
void widen_row(const T *x, std::int64_t in_features, const Inputs &inputs, std::int64_t row) {
    for (std::int64_t first = 0; first < in_features; first += kMaxDepth) {
        float *target = inputs.at(first / kMaxDepth, row);
        const auto depth = static_cast<int>(std::min<std::int64_t>(kMaxDepth, in_features - first));
        int input = 0;
        for (; input + kLanes <= depth; input += kLanes) {
            store(target + input, load(x + first + input));
        }
        for (; input < depth; ++input) {
            target[input] = widen(x[first + input]);
        }
    }
}

// One op's arguments, and how they are cut into tiles.
template <typename W, typename T>
class Linear {
public:
    Linear(loraplex_pool &pool, const T *x, std::int64_t x_stride, std::int64_t num_rows,
           const W *packed, std::int64_t out_features, std::int64_t in_features, const float *bias,
           T *y, std::int64_t y_stride)
        : pool_(pool), x_(x), x_stride_(x_stride), num_rows_(num_rows), packed_(packed),
          out_features_(out_features), in_features_(in_features), bias_(bias), y_(y),
          y_stride_(y_stride) {
        shape_ = block_shape(num_rows);
        tile_blocks_ = num_rows <= kManyRows.rows ? 1 : std::max(1, kTilePanels / shape_.panels);
        num_row_tiles_ = divide_up(num_rows, kMaxTileRows);
        num_column_tiles_ = divide_up(num_panels(out_features), tile_panels());
    }

    void run() {
        const Op op(pool_);
        void *widened = pool_.shared_scratch(Inputs::num_bytes(num_rows_, in_features_));
        inputs_ = {static_cast<float *>(widened), num_rows_};
        sums_ = static_cast<std::byte *>(pool_.worker_scratch(sums_bytes()));
        share(num_rows_, num_rows_ * in_features_ >= kWorthSharingInputs,
              [this](std::int64_t row, int) {
                  widen_row(x_ + row * x_stride_, in_features_, inputs_, row);
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
        for (std::int64_t first = 0; first < in_features_; first += kMaxDepth) {
            for (std::int64_t block = 0; block < num_blocks; ++block) {
                add_products(rows, first_panel + block * shape_.panels, first,
                             sums + block * block_sums);
            }
        }
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            write(rows, first_panel + block * shape_.panels, sums + block * block_sums);
        }
    }

    // sums [rows][outputs of a block] += the share of the inputs from `first` on, kMaxDepth at most.
    void add_products(Range rows, std::int64_t panel, std::int64_t first, float *sums) {
        const std::int64_t stride = panel_size<W>(in_features_);
        const W *panels = packed_ + panel * stride + first * kPanelWidth;
        const auto depth =
            static_cast<int>(std::min<std::int64_t>(kMaxDepth, in_features_ - first));
        const std::int64_t num_row_blocks = divide_up(rows.size, shape_.rows);
        for (std::int64_t i = 0; i < num_row_blocks; ++i) {
            const Range block = part(rows.size, num_row_blocks, i);
            const W *ahead = panels + i % shape_.panels * stride + kMaxDepth * kPanelWidth;
            block_function<W>(static_cast<int>(block.size), shape_.panels)(
                inputs_.at(first / kMaxDepth, rows.first + block.first), panels, stride, depth,
                ahead, sums + block.first * block_outputs(), first == 0);
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
                write_vector(load(source + output), first + output, target + output, count);
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
    std::int64_t out_features_;
    std::int64_t in_features_;
    const float *bias_;
    T *y_;
    std::int64_t y_stride_;
    BlockShape shape_;
    int tile_blocks_;
    std::int64_t num_row_tiles_;
    std::int64_t num_column_tiles_;
    Inputs inputs_{};
    std::byte *sums_ = nullptr;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                loraplex_dtype dtype, const void *x, int64_t x_stride,
                                int64_t num_rows, const void *packed, int64_t out_features,
                                int64_t in_features, const float *bias, void *y,
                                int64_t y_stride) {
    using namespace loraplex;
    if (num_rows < 0 || loraplex_packed_weight_bytes(kind, out_features, in_features) == 0) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    if (num_rows == 0) {
        return LORAPLEX_OK;
    }
    return guarded([&] {
        return for_weight_kind(kind, [&]<typename W>(W) {
            return for_dtype(dtype, [&]<typename T>(T) {
                Linear<W, T>(*pool, static_cast<const T *>(x), x_stride, num_rows,
                             static_cast<const W *>(packed), out_features, in_features, bias,
                             static_cast<T *>(y), y_stride)
                    .run();
                return LORAPLEX_OK;
            });
        });
    });
}
