#include "loraplex/linear.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <new>
#include <span>

#include "linear_float_block.h"
#include "linear_inputs.h"
#include "linear_quantized_block.h"
#include "loraplex/experts.h"
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

// Pairs whose inputs are widened at a time: for many tokens with many experts, memory has an end.
constexpr std::int64_t kMaxPairs = 2048;

// Part i of `total` things in `parts` even parts.
struct Range {
    std::int64_t first;
    std::int64_t size;
};

constexpr Range part(std::int64_t total, std::int64_t parts, std::int64_t i) {
    const std::int64_t first = total * i / parts;
    return {first, total * (i + 1) / parts - first};
}

// Neighbouring rows that are multiplied with one weight, cut into tiles.
struct Product {
    std::int64_t weight;  // its number
    Range rows;           // of the inputs
    BlockShape shape;
    std::int64_t tile_blocks;
    std::int64_t num_row_tiles;
    std::int64_t num_column_tiles;
    std::int64_t first_tile;  // of all products of a call

    Product(std::int64_t weight, Range rows, std::int64_t out_features, std::int64_t first_tile)
        : weight(weight), rows(rows), shape(block_shape(rows.size)),
          tile_blocks(rows.size <= kManyRows.rows ? 1 : std::max(1, kTilePanels / shape.panels)),
          num_row_tiles(divide_up(rows.size, kMaxTileRows)),
          num_column_tiles(divide_up(num_panels(out_features), tile_panels())),
          first_tile(first_tile) {}

    std::int64_t num_tiles() const { return num_row_tiles * num_column_tiles; }
    std::int64_t tile_panels() const { return shape.panels * tile_blocks; }
    std::int64_t block_outputs() const { return shape.panels * kPanelWidth; }

    std::size_t sums_bytes() const {
        const std::int64_t tile_rows = std::min(rows.size, kMaxTileRows);
        return static_cast<std::size_t>(tile_rows * block_outputs() * tile_blocks) * sizeof(float);
    }
};

// The arguments that `linear` and `grouped_linear` have in common, and their work.
template <typename W, typename T>
class Linear {
public:
    Linear(loraplex_pool &pool, const T *x, std::int64_t x_stride, const W *packed,
           std::int64_t group_size, std::int64_t out_features, std::int64_t in_features,
           const float *bias, T *y, std::int64_t y_stride)
        : pool_(pool), x_(x), x_stride_(x_stride), packed_(packed), group_size_(group_size),
          layout_(in_features, group_size), out_features_(out_features),
          in_features_(in_features), bias_(bias), y_(y), y_stride_(y_stride) {}

    void run(std::int64_t num_rows) {
        const Op op(pool_);
        const Product product(0, {0, num_rows}, out_features_, 0);
        multiply({&product, 1}, num_rows);
    }

    // pairs: sorted by expert; the inputs of a call are in this order.
    void run_pairs(std::int64_t num_pairs, std::int64_t pairs_per_row, const std::int32_t *pairs,
                   const std::int32_t *starts, std::int64_t num_experts) {
        const Op op(pool_);
        const std::int64_t most = std::min({num_experts, num_pairs, kMaxPairs});
        auto *products = static_cast<Product *>(
            pool_.list_scratch(static_cast<std::size_t>(most) * sizeof(Product)));
        pairs_per_row_ = pairs_per_row;
        std::int64_t expert = 0;
        for (std::int64_t first = 0; first < num_pairs; first += kMaxPairs) {
            const std::int64_t end = std::min(num_pairs, first + kMaxPairs);
            std::size_t num_products = 0;
            std::int64_t num_tiles = 0;
            for (std::int64_t pair = first; pair < end;) {
                while (starts[expert + 1] <= pair) {
                    ++expert;
                }
                const std::int64_t next = std::min<std::int64_t>(end, starts[expert + 1]);
                const auto *product = new (products + num_products++)
                    Product(expert, {pair - first, next - pair}, out_features_, num_tiles);
                num_tiles += product->num_tiles();
                pair = next;
            }
            pairs_ = pairs + first;
            multiply({products, num_products}, end - first);
        }
    }

private:
    // The products lie one after another, and are of all num_rows inputs.
    void multiply(std::span<const Product> products, std::int64_t num_rows) {
        products_ = products;
        void *memory = pool_.shared_scratch(Inputs<W>::num_bytes(num_rows, in_features_));
        inputs_ = {memory, num_rows, in_features_};
        sums_bytes_ = 0;
        for (const Product &product : products) {
            sums_bytes_ = std::max(sums_bytes_, product.sums_bytes());
        }
        sums_ = static_cast<std::byte *>(pool_.worker_scratch(sums_bytes_));
        share(num_rows, num_rows * in_features_ >= kWorthSharingInputs,
              [this](std::int64_t row, int) {
                  inputs_.set_row(row, x_ + pair_of(row) / pairs_per_row_ * x_stride_);
              });
        share(products.back().first_tile + products.back().num_tiles(),
              num_rows * out_features_ * in_features_ >= kWorthSharing,
              [this](std::int64_t tile, int worker) { compute(tile, worker); });
    }

    // Row of y that an input's result is for.
    std::int64_t pair_of(std::int64_t row) const { return pairs_ == nullptr ? row : pairs_[row]; }

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

    const Product &product_of(std::int64_t tile) const {
        const auto starts_later = [](std::int64_t tile, const Product &product) {
            return tile < product.first_tile;
        };
        return *std::prev(
            std::upper_bound(products_.begin(), products_.end(), tile, starts_later));
    }

    void compute(std::int64_t tile, int worker) {
        const Product &product = product_of(tile);
        tile -= product.first_tile;
        Range rows =
            part(product.rows.size, product.num_row_tiles, tile / product.num_column_tiles);
        rows.first += product.rows.first;
        const std::int64_t first_panel = tile % product.num_column_tiles * product.tile_panels();
        const auto stride = loraplex_pool::worker_scratch_stride(sums_bytes_);
        auto *sums = reinterpret_cast<float *>(sums_ + stride * static_cast<std::size_t>(worker));
        const std::int64_t panels = product.shape.panels;
        const std::int64_t num_blocks = std::min<std::int64_t>(
            product.tile_blocks, divide_up(num_panels(out_features_) - first_panel, panels));
        const std::int64_t block_sums = rows.size * product.block_outputs();
        const std::int64_t first_of_all = product.weight * num_panels(out_features_) + first_panel;
        const W *first_weights = packed_ + first_of_all * layout_.stride();
        for (std::int64_t first = 0; first < in_features_; first += kMaxDepth<W>) {
            const bool is_last = first + kMaxDepth<W> >= in_features_;
            const W *panel = first_weights;
            for (std::int64_t block = 0; block < num_blocks; ++block) {
                const W *next_panel = panel + panels * layout_.stride();
                // The tile's next call, or the next tile's first.
                const W *next = block + 1 < num_blocks ? layout_.values(next_panel, first)
                                : is_last              ? layout_.values(next_panel, 0)
                                    : layout_.values(first_weights, first + kMaxDepth<W>);
                add_products(product.shape, rows, panel, first, next, sums + block * block_sums);
                panel = next_panel;
            }
        }
        for (std::int64_t block = 0; block < num_blocks; ++block) {
            write(product, rows, first_panel + block * panels, sums + block * block_sums);
        }
    }

    // sums [rows][outputs of a block] += the share of the inputs from `first` on, kMaxDepth at most.
    // next: the weights of the call after this one.
    void add_products(BlockShape shape, Range rows, const W *panel, std::int64_t first,
                      const W *next, float *sums) {
        const std::int64_t num_row_blocks = divide_up(rows.size, shape.rows);
        BlockWeights<W> block = {layout_.values(panel, first), layout_.stride(),
                                 layout_.scales(panel, first), group_size_, {}};
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
            const BlockShape part_shape = {static_cast<int>(part_rows.size), shape.panels};
            block_function<W>(part_shape, pool_.cpu_features())(
                inputs_.at(first, rows.first + part_rows.first), block, depth,
                sums + part_rows.first * shape.panels * kPanelWidth, first == 0);
        }
    }

    void write(const Product &product, Range rows, std::int64_t panel, const float *sums) {
        const std::int64_t first = panel * kPanelWidth;
        const std::int64_t num_outputs = std::min(product.block_outputs(), out_features_ - first);
        const float *bias =
            bias_ == nullptr ? nullptr : bias_ + product.weight * out_features_ + first;
        for (std::int64_t row = 0; row < rows.size; ++row) {
            T *target = y_ + pair_of(rows.first + row) * y_stride_ + first;
            const float *source = sums + row * product.block_outputs();
            for (std::int64_t output = 0; output < num_outputs; output += kLanes) {
                const auto count =
                    static_cast<int>(std::min<std::int64_t>(kLanes, num_outputs - output));
                Floats sum = load(source + output);
                if constexpr (kIsQuantized<W>) {
                    sum = loraplex::multiply(sum, broadcast(inputs_.scale(rows.first + row)));
                }
                write_vector(sum, bias == nullptr ? nullptr : bias + output, target + output, count);
            }
        }
    }

    static void write_vector(Floats sum, const float *bias, T *target, int count) {
        if (count == kLanes) {
            store(target, bias == nullptr ? sum : add(sum, load(bias)));
        } else {
            store_first(target, add(sum, bias == nullptr ? zeros() : load_first(bias, count)),
                        count);
        }
    }

    loraplex_pool &pool_;
    const T *x_;
    std::int64_t x_stride_;
    const W *packed_;
    std::int64_t group_size_;
    PanelLayout<W> layout_;
    std::int64_t out_features_;
    std::int64_t in_features_;
    const float *bias_;
    T *y_;
    std::int64_t y_stride_;
    const std::int32_t *pairs_ = nullptr;  // null: the rows of x are those of y
    std::int64_t pairs_per_row_ = 1;
    std::span<const Product> products_;
    Inputs<W> inputs_;
    std::byte *sums_ = nullptr;
    std::size_t sums_bytes_ = 0;
};

// body(W{}, T{}) with the element types
template <typename Body>
loraplex_status for_types(loraplex_weight_kind kind, loraplex_dtype dtype, const Body &body) {
    return for_weight_kind(kind, [&]<typename W>(W weight) {
        return for_dtype(dtype, [&]<typename T>(T element) {
            body(weight, element);
            return LORAPLEX_OK;
        });
    });
}

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
        return for_types(kind, dtype, [&]<typename W, typename T>(W, T) {
            Linear<W, T>(*pool, static_cast<const T *>(x), x_stride,
                         static_cast<const W *>(packed), group_size, out_features, in_features,
                         bias, static_cast<T *>(y), y_stride)
                .run(num_rows);
        });
    });
}

loraplex_status loraplex_grouped_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                        int64_t group_size, loraplex_dtype dtype, const void *x,
                                        int64_t x_stride, int64_t num_pairs,
                                        int64_t pairs_per_row, const int32_t *pairs,
                                        const int32_t *starts, int64_t num_experts,
                                        const void *packed, int64_t out_features,
                                        int64_t in_features, const float *bias, void *y,
                                        int64_t y_stride) {
    using namespace loraplex;
    if (num_pairs < 0 || pairs_per_row < 1 || num_experts < 1 ||
        loraplex_packed_weight_bytes(kind, group_size, out_features, in_features) == 0 ||
        starts[0] != 0 || starts[num_experts] != num_pairs) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    if (num_pairs == 0) {
        return LORAPLEX_OK;
    }
    return guarded([&] {
        return for_types(kind, dtype, [&]<typename W, typename T>(W, T) {
            Linear<W, T>(*pool, static_cast<const T *>(x), x_stride,
                         static_cast<const W *>(packed), group_size, out_features, in_features,
                         bias, static_cast<T *>(y), y_stride)
                .run_pairs(num_pairs, pairs_per_row, pairs, starts, num_experts);
        });
    });
}
