#include "loraplex/linear.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <iterator>
#include <new>
#include <span>
#include <stdexcept>

#include "channel_rounds.h"
#include "linear_products.h"
#include "linear_tiles.h"
#include "loraplex/experts.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"

namespace loraplex {
namespace {

// Below this many multiply-adds, waking another thread takes longer than the work.
constexpr std::int64_t kWorthSharing = 1 << 16;
// Inputs are widened by all threads from this many on.
constexpr std::int64_t kWorthSharingInputs = 1 << 15;

// Pairs whose inputs are widened at a time: for many tokens with many experts, memory has an end.
constexpr std::int64_t kMaxPairs = 2048;
// Groups of rows whose inputs a thread prepares: claiming each row takes as long as preparing a short one.
constexpr std::int64_t kGroupsPerThread = 8;
// Tiles of a product for each thread, at least: a thread that is late then keeps the others waiting less.
constexpr std::int64_t kTilesPerThread = 2;
// Outputs of a row that are added over ranks at a time: in the nearest cache.
constexpr std::int64_t kRankSums = 512;

// The arguments that `linear` and `grouped_linear` have in common.
struct LinearCall {
    loraplex_pool &pool;
    loraplex_weight_kind kind;
    std::int64_t group_size;
    std::int64_t num_blocks;
    loraplex_dtype dtype;  // of x and y
    const void *x;
    std::int64_t x_stride;
    const void *packed;
    std::int64_t out_features;
    std::int64_t in_features;
    const float *bias;
    loraplex_channel *channel;
    void *y;
    std::int64_t y_stride;
};

// The pairs of rows and experts of `grouped_linear`.
struct ExpertPairs {
    std::int64_t num_pairs;
    std::int64_t pairs_per_row;
    const std::int32_t *pairs;   // sorted by expert; the inputs of a call are in this order
    const std::int32_t *starts;  // of an expert's pairs
    std::int64_t num_experts;
};

// What depends on the type of x and y, so that nothing else does: compiling a product for one more
// type takes as long as for the first.
template <typename RowInputs>
struct RowFunctions {
    // RowInputs::set_row with x[first]...; null where they are not made of T
    void (*set_row)(RowInputs &inputs, std::int64_t row, const void *x, std::int64_t first) =
        nullptr;
    // y[first]... = sums + bias
    void (*write)(const RowSums &sums, const float *bias, std::int64_t num_outputs, void *y,
                  std::int64_t first) = nullptr;

    template <typename T>
    static RowFunctions of(T) {
        RowFunctions functions;
        if constexpr (requires(RowInputs inputs, const T *x) { inputs.set_row(0, x); }) {
            functions.set_row = [](RowInputs &inputs, std::int64_t row, const void *x,
                                   std::int64_t first) {
                inputs.set_row(row, static_cast<const T *>(x) + first);
            };
        }
        functions.write = [](const RowSums &sums, const float *bias, std::int64_t num_outputs,
                             void *y, std::int64_t first) {
            write_row(sums, bias, num_outputs, static_cast<T *>(y) + first);
        };
        return functions;
    }
};

template <typename Products>
class Linear {
    using W = typename Products::Weight;
    using RowInputs = typename Products::RowInputs;

public:
    Linear(const LinearCall &call, const RowFunctions<RowInputs> &functions)
        : pool_(call.pool), call_(call), functions_(functions),
          packed_(static_cast<const W *>(call.packed)),
          layout_(call.in_features, call.num_blocks, call.group_size, has_offsets(call.kind)),
          pieces_(layout_, RowInputs::kDepth), block_products_(layout_, pool_.cpu_features()),
          out_features_(call.out_features), channel_(call.channel), inputs_(nullptr, 0, pieces_) {
        if (channel_ != nullptr && channel_->capacity() < out_features_) {
            throw std::invalid_argument("linear: a slot of the channel is less than a row");
        }
    }

    void run(std::int64_t num_rows) {
        const Op op(pool_);
        const std::int64_t most = rows_at_once(num_rows);
        for (first_row_ = 0; first_row_ < num_rows; first_row_ += most) {
            const Range rows = {0, std::min(most, num_rows - first_row_)};
            const Product product(0, rows, cut(rows.size), out_features_, 0);
            multiply({&product, 1}, product.rows.size);
        }
    }

    void run(const ExpertPairs &pairs) {
        const Op op(pool_);
        const std::int64_t most_pairs = rows_at_once(kMaxPairs);
        const std::int64_t most = std::min({pairs.num_experts, pairs.num_pairs, most_pairs});
        auto *products = static_cast<Product *>(
            pool_.list_scratch(static_cast<std::size_t>(most) * sizeof(Product)));
        pairs_per_row_ = pairs.pairs_per_row;
        std::int64_t expert = 0;
        for (std::int64_t first = 0; first < pairs.num_pairs; first += most_pairs) {
            const std::int64_t end = std::min(pairs.num_pairs, first + most_pairs);
            std::size_t num_products = 0;
            std::int64_t num_tiles = 0;
            for (std::int64_t pair = first; pair < end;) {
                while (pairs.starts[expert + 1] <= pair) {
                    ++expert;
                }
                const std::int64_t next = std::min<std::int64_t>(end, pairs.starts[expert + 1]);
                const Range rows = {pair - first, next - pair};
                const auto *product = new (products + num_products++)
                    Product(expert, rows, cut(rows.size), out_features_, num_tiles);
                num_tiles += product->num_tiles();
                pair = next;
            }
            pairs_ = pairs.pairs + first;
            multiply({products, num_products}, end - first);
        }
    }

private:
    // A round of the channel takes so many.
    std::int64_t rows_at_once(std::int64_t num_rows) const {
        return channel_ == nullptr ? num_rows
                                   : std::min(num_rows, channel_->capacity() / out_features_);
    }

    // Tiles have fewer blocks where some threads would be left without work.
    Cut cut(std::int64_t num_rows) const {
        Cut cut = Products::cut(num_rows);
        const std::int64_t num_blocks = num_panels(out_features_) / cut.shape.panels;
        const std::int64_t fewest_tiles = kTilesPerThread * pool_.num_threads();
        cut.tile_blocks = std::clamp<std::int64_t>(num_blocks / fewest_tiles, 1, cut.tile_blocks);
        const std::int64_t rounds = divide_up(num_blocks, cut.tile_blocks * pool_.num_threads());
        cut.tile_blocks = divide_up(num_blocks, rounds * pool_.num_threads());
        return cut;
    }

    // The products lie one after another, and are of all num_rows inputs.
    void multiply(std::span<const Product> products, std::int64_t num_rows) {
        products_ = products;
        slot_ = channel_ == nullptr ? nullptr : channel_->begin();
        void *memory = pool_.shared_scratch(RowInputs::num_bytes(num_rows, pieces_));
        inputs_ = {memory, num_rows, pieces_};
        sums_bytes_ = 0;
        for (const Product &product : products) {
            sums_bytes_ = std::max(sums_bytes_, product.sums_bytes());
        }
        // Those of a block, and those that wait for their neighbours.
        sums_bytes_ *= std::bit_width(static_cast<std::size_t>(pieces_.num_blocks()));
        sums_ = static_cast<std::byte *>(pool_.worker_scratch(sums_bytes_));
        const std::int64_t num_groups =
            std::min<std::int64_t>(num_rows, kGroupsPerThread * pool_.num_threads());
        share(num_groups, num_rows * call_.in_features >= kWorthSharingInputs,
              [&](std::int64_t group, int) {
                  const Range rows = part(num_rows, num_groups, group);
                  for (std::int64_t row = rows.first; row < rows.first + rows.size; ++row) {
                      functions_.set_row(inputs_, row, call_.x,
                                         pair_of(row) / pairs_per_row_ * call_.x_stride);
                  }
              });
        share(products.back().first_tile + products.back().num_tiles(),
              num_rows * out_features_ * call_.in_features >= kWorthSharing,
              [this](std::int64_t tile, int worker) { compute(tile, worker); });
        if (channel_ != nullptr) {
            const std::int64_t num_sums = num_rows * out_features_;
            channel_->exchange(num_sums * static_cast<std::int64_t>(sizeof(float)));
            share(num_rows, num_sums >= kWorthSharing,
                  [this](std::int64_t row, int) { add_ranks(row); });
        }
    }

    // Row of y that an input's result is for.
    std::int64_t pair_of(std::int64_t row) const {
        return pairs_ == nullptr ? first_row_ + row : pairs_[row];
    }

    template <typename Fn>
    void share(std::int64_t num_tiles, bool is_worth_it, const Fn &fn) {
        if (is_worth_it) {
            pool_.parallel_for_tiles(num_tiles, fn);
        } else {
            loraplex_pool::serial_for_tiles(num_tiles, fn);
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
        const std::int64_t panels = product.cut.shape.panels;
        const std::int64_t num_blocks = std::min<std::int64_t>(
            product.cut.tile_blocks, divide_up(num_panels(out_features_) - first_panel, panels));
        const std::int64_t block_sums = padded_rows(rows.size) * product.block_outputs();
        [[maybe_unused]] const auto registers = block_products_.registers();
        const std::int64_t first_of_all = product.weight * num_panels(out_features_) + first_panel;
        const W *first_weights = packed_ + first_of_all * layout_.stride();
        for (InputPiece piece = pieces_.start(0); piece.block < pieces_.num_blocks();) {
            const InputPiece after = pieces_.after(piece);
            // After those of the blocks that wait for their neighbours.
            float *own_sums = sums + std::popcount(static_cast<std::uint64_t>(piece.block)) *
                                         num_blocks * block_sums;
            block_products_.add(inputs_, product.cut.shape, rows, {first_weights, num_blocks}, piece,
                                after, own_sums);
            if (after.block != piece.block) {
                finish_block(product, piece.block, rows, own_sums, num_blocks * block_sums);
            }
            piece = after;
        }
        const std::int64_t sums_panels = product.cut.has_panel_sums ? 1 : panels;
        write(product, rows, {first_panel, num_blocks * panels}, sums_panels, sums);
    }

    // sums: those of a tile, of one block of inputs. Before them are those that wait.
    void finish_block([[maybe_unused]] const Product &product, std::int64_t input_block,
                      [[maybe_unused]] Range rows, float *sums, std::int64_t size) {
        if constexpr (RowInputs::kScalesBlocks) {
            const std::int64_t row_size = product.block_outputs();
            const std::int64_t block_size = padded_rows(rows.size) * row_size;
            for (float *block = sums; block < sums + size; block += block_size) {
                for (std::int64_t row = 0; row < rows.size; ++row) {
                    const Floats scale = broadcast(inputs_.scale(rows.first + row, input_block));
                    for (float *at = block + row * row_size; at < block + (row + 1) * row_size;
                         at += kLanes) {
                        store(at, loraplex::multiply(load(at), scale));
                    }
                }
            }
        }
        for (std::int64_t done = input_block + 1; done % 2 == 0; done /= 2) {
            sums -= size;
            for (std::int64_t i = 0; i < size; i += kLanes) {
                store(sums + i, add(load(sums + i), load(sums + size + i)));
            }
        }
    }

    // sums: [panels / row_panels][rows, padded][outputs of row_panels]
    void write(const Product &product, Range rows, Range panels, std::int64_t row_panels,
               const float *sums) {
        const std::int64_t width = row_panels * kPanelWidth;
        const std::int64_t first = panels.first * kPanelWidth;
        const std::int64_t num_outputs =
            std::min(panels.size * kPanelWidth, out_features_ - first);
        const float *bias = bias_of(product, first);
        for (std::int64_t row = 0; row < rows.size; ++row) {
            const RowSums source = {sums + row * width, width, padded_rows(rows.size) * width};
            if (slot_ != nullptr) {
                write_row(source, nullptr, num_outputs,
                          slot_ + (rows.first + row) * out_features_ + first);
            } else {
                functions_.write(source, bias, num_outputs, call_.y,
                                 pair_of(rows.first + row) * call_.y_stride + first);
            }
        }
    }

    const float *bias_of(const Product &product, std::int64_t output) const {
        return call_.bias == nullptr ? nullptr
                                     : call_.bias + product.weight * out_features_ + output;
    }

    // The sum of all ranks' slots, of one row.
    void add_ranks(std::int64_t row) {
        const auto starts_later = [](std::int64_t row, const Product &product) {
            return row < product.rows.first;
        };
        const auto product =
            std::prev(std::upper_bound(products_.begin(), products_.end(), row, starts_later));
        float sums[kRankSums];
        for (std::int64_t first = 0; first < out_features_; first += kRankSums) {
            const std::int64_t count = std::min(kRankSums, out_features_ - first);
            channel_->tree_sum(row * out_features_ + first, count, sums);
            functions_.write({sums, count, 0}, bias_of(*product, first), count, call_.y,
                             pair_of(row) * call_.y_stride + first);
        }
    }

    loraplex_pool &pool_;
    const LinearCall &call_;
    RowFunctions<RowInputs> functions_;
    const W *packed_;
    PanelLayout<W> layout_;
    InputPieces<W> pieces_;
    Products block_products_;
    std::int64_t out_features_;
    loraplex_channel *channel_;
    std::int64_t first_row_ = 0;
    const std::int32_t *pairs_ = nullptr;  // null: the rows of x are those of y
    std::int64_t pairs_per_row_ = 1;
    std::span<const Product> products_;
    float *slot_ = nullptr;
    RowInputs inputs_;
    std::byte *sums_ = nullptr;
    std::size_t sums_bytes_ = 0;
};

// All rows of x with one weight; where there are pairs, these. num_rows: the most of one weight.
loraplex_status run_linear(const LinearCall &call, std::int64_t num_rows,
                           const ExpertPairs *pairs) {
    const std::uint64_t features = call.pool.cpu_features();
    return for_weight_kind(call.kind, [&]<typename W>(W) {
        const auto run = [&]<typename Products>(
                             std::type_identity<Products>) -> loraplex_status {
            RowFunctions<typename Products::RowInputs> functions;
            const loraplex_status status = for_dtype(call.dtype, [&](auto element) {
                functions = functions.of(element);
                return LORAPLEX_OK;
            });
            if (status != LORAPLEX_OK) {
                return status;
            }
            Linear<Products> linear(call, functions);
            pairs == nullptr ? linear.run(num_rows) : linear.run(*pairs);
            return LORAPLEX_OK;
        };
        return has_byte_inputs(call.kind)
                   ? with_group_products<W>(features, num_rows, call.group_size, run)
                   : with_products<W>(features, call.dtype, num_rows, run);
    });
}

// The most rows that one expert has.
std::int64_t most_rows(const std::int32_t *starts, std::int64_t num_experts) {
    std::int32_t most = 0;
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        most = std::max(most, starts[expert + 1] - starts[expert]);
    }
    return most;
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                int64_t group_size, int64_t num_blocks, loraplex_dtype dtype,
                                const void *x, int64_t x_stride, int64_t num_rows,
                                const void *packed, int64_t out_features, int64_t in_features,
                                const float *bias, loraplex_channel *channel, void *y,
                                int64_t y_stride) {
    using namespace loraplex;
    if (num_rows < 0 || loraplex_packed_weight_bytes(kind, group_size, num_blocks, out_features,
                                                     in_features) == 0) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    if (num_rows == 0) {
        return LORAPLEX_OK;
    }
    return guarded([&] {
        const LinearCall call = {*pool, kind, group_size, num_blocks, dtype, x, x_stride,
                                 packed, out_features, in_features, bias, channel, y, y_stride};
        return run_linear(call, num_rows, nullptr);
    });
}

loraplex_status loraplex_grouped_linear(loraplex_pool *pool, loraplex_weight_kind kind,
                                        int64_t group_size, int64_t num_blocks,
                                        loraplex_dtype dtype, const void *x, int64_t x_stride,
                                        int64_t num_pairs, int64_t pairs_per_row,
                                        const int32_t *pairs, const int32_t *starts,
                                        int64_t num_experts, const void *packed,
                                        int64_t out_features, int64_t in_features,
                                        const float *bias, loraplex_channel *channel, void *y,
                                        int64_t y_stride) {
    using namespace loraplex;
    if (num_pairs < 0 || pairs_per_row < 1 || num_experts < 1 ||
        loraplex_packed_weight_bytes(kind, group_size, num_blocks, out_features, in_features) ==
            0 ||
        starts[0] != 0 || starts[num_experts] != num_pairs) {
        return LORAPLEX_INVALID_ARGUMENT;
    }
    if (num_pairs == 0) {
        return LORAPLEX_OK;
    }
    return guarded([&] {
        const LinearCall call = {*pool, kind, group_size, num_blocks, dtype, x, x_stride,
                                 packed, out_features, in_features, bias, channel, y, y_stride};
        const ExpertPairs all = {num_pairs, pairs_per_row, pairs, starts, num_experts};
        return run_linear(call, most_rows(starts, num_experts), &all);
    });
}
