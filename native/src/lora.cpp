// Multi-LoRA: shrink (x A^T, scaled) for all groups, then expand (times B) into y, wave by wave.
//
// A token's sums run over its own adapter in one order: a chain of multiply_add per lane over
// in_features and the lanes pairwise for the shrink, a chain over the ranks for the expansion. The
// number of tokens that share an adapter only decides how often its pages are read.
#include "loraplex/lora.h"

#include <algorithm>
#include <stdexcept>

#include "block_product.h"
#include "channel_rounds.h"
#include "loraplex/experts.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"
#include "lora_groups.h"
#include "lora_rows.h"
#include "lora_shrink.h"
#include "lora_vectors.h"
#include "packed_weight.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kRanksPerTile = kShrinkRows;  // of all modules together
constexpr std::int64_t kExpandTokens = 24;    // a multiple of kMaxProductRows
constexpr std::int64_t kExpandColumns = 512;  // float32 sums of kMaxProductRows fit the L1 cache
constexpr std::int64_t kExpandDepth = 16;     // rows of B read side by side
constexpr std::int64_t kWholeTiles = 4;  // for each thread: with fewer, threads end apart
// Elements of a module's matrices: more come at full speed by themselves, and do not stay near.
constexpr std::int64_t kMostReadAhead = 32 * 1024;

struct Place {
    std::int64_t rank;
    std::int64_t offset;
    float scale;
};

// Of one module.
struct Columns {
    std::int64_t module;
    std::int64_t first;
    std::int64_t count;
};

// last_expert: what is added to the modules' numbers, at most.
void check(const loraplex_lora_step &step, const loraplex_lora_linear &linear, std::int64_t layer,
           std::int64_t last_expert) {
    if (layer < 0 || layer >= step.num_layers || step.num_groups < 0 || linear.in_features < 1 ||
        !are_blocks(linear.num_blocks, linear.in_features)) {
        throw std::invalid_argument("add_lora");
    }
    for (std::int64_t i = 0; i < linear.num_modules; ++i) {
        if (linear.modules[i] < 0 || linear.modules[i] + last_expert >= step.num_modules) {
            throw std::invalid_argument("add_lora: module");
        }
    }
}

// One call of the op. What depends on the type of the values is in lora_rows.h.
template <typename Page>
class LoraProduct {
public:
    LoraProduct(loraplex_pool &pool, const loraplex_lora_step &step, const LoraGroups &groups,
                const loraplex_lora_linear &linear, std::int64_t layer, InputRows x,
                loraplex_channel *channel, OutputRows y)
        : pool_(pool), step_(step), groups_(groups), linear_(linear), layer_(layer),
          pages_(static_cast<const Page *>(step.pages)), x_(x), channel_(channel), y_(y) {}

    void run() {
        measure();
        if (max_ranks_ == 0) {
            return;
        }
        allocate();
        const bool are_whole =
            channel_ == nullptr && fewest_tiles() >= kWholeTiles * pool_.num_threads();
        if (!are_whole) {
            shrink_all();
        }
        for (std::int64_t wave = 0; wave < groups_.num_waves; ++wave) {
            const std::int64_t first_tile = tiles_before(wave);
            const std::int64_t num_tiles = tiles_before(wave + 1) - first_tile;
            if (are_whole) {
                run_lora_tiles(pool_, work_, num_tiles, [&](std::int64_t i, int worker) {
                    const std::int64_t next = i + pool_.num_threads();
                    add_whole(expand_tiles_[first_tile + i],
                              next < num_tiles ? expand_tiles_[first_tile + next] : LoraTile{},
                              worker);
                });
            } else {
                const auto expand_one = [&](std::int64_t i, int worker) {
                    expand(expand_tiles_[first_tile + i / column_tiles_],
                           columns_of(i % column_tiles_), worker);
                };
                run_lora_tiles(pool_, work_, num_tiles * column_tiles_, expand_one);
            }
        }
    }

private:
    // Number of expand_tiles_ of the waves before this one.
    std::int64_t tiles_before(std::int64_t wave) const {
        const std::int64_t end = groups_.wave_starts[wave];
        return std::partition_point(expand_tiles_, expand_tiles_ + num_expand_tiles_,
                                    [end](const LoraTile &tile) { return tile.group < end; }) -
               expand_tiles_;
    }

    // Of the wave that has the fewest.
    std::int64_t fewest_tiles() const {
        std::int64_t fewest = num_expand_tiles_;
        for (std::int64_t wave = 0; wave < groups_.num_waves; ++wave) {
            fewest = std::min(fewest, tiles_before(wave + 1) - tiles_before(wave));
        }
        return fewest;
    }

    // Of all waves.
    void shrink_all() {
        const std::int64_t rank_tiles = (max_ranks_ + kRanksPerTile - 1) / kRanksPerTile;
        const auto shrink_one = [&](std::int64_t i, int worker) {
            shrink(shrink_tiles_[i / rank_tiles], i % rank_tiles * kRanksPerTile, worker);
        };
        run_lora_tiles(pool_, work_, num_shrink_tiles_ * rank_tiles, shrink_one);
        if (channel_ != nullptr) {
            add_ranks();
        }
        run_lora_tiles(pool_, groups_.num_rows() * max_ranks_, num_shrink_tiles_,
                       [&](std::int64_t i, int) { scale(shrink_tiles_[i]); });
    }

    // Both products of a tile by one thread, so that none waits for others between them. Meanwhile
    // what `next`, which this thread is likely to take then, reads comes near: memory serves small
    // pieces in any order at half its speed, unless they are asked for early.
    void add_whole(const LoraTile &tile, const LoraTile &next, int worker) const {
        for (std::int64_t t = 0; t < tile.count; t += kShrinkTokens) {
            const LoraTile part{tile.group, tile.first + t, std::min(kShrinkTokens, tile.count - t)};
            for (std::int64_t i = t; i < std::min(next.count, t + kShrinkTokens); ++i) {
                x_.read_ahead(input_row(next.first + i), 0, linear_.in_features);
            }
            for (std::int64_t rank = 0; rank < max_ranks_; rank += kRanksPerTile) {
                shrink(part, rank, worker);
            }
        }
        scale(tile);
        for (std::int64_t column_tile = 0; column_tile < column_tiles_; ++column_tile) {
            const Columns columns = columns_of(column_tile);
            if (next.count > 0 && next.group != tile.group && columns.first == 0) {
                read_pages_ahead(next.group, columns.module);
            }
            for (std::int64_t i = 0; i < next.count; ++i) {
                y_.read_ahead(groups_.rows[next.first + i], output(columns), columns.count);
            }
            expand(tile, columns, worker);
        }
    }

    Place place(std::int64_t group, std::int64_t module) const {
        const std::int64_t cell =
            (groups_.entries[group] * step_.num_layers + layer_) * step_.num_modules +
            linear_.modules[module] + (groups_.experts == nullptr ? 0 : groups_.experts[group]);
        return {step_.ranks[cell], step_.offsets[cell], step_.scales[cell]};
    }

    __attribute__((always_inline)) void read_pages_ahead(std::int64_t group,
                                                         std::int64_t module) const {
        const Place at = place(group, module);
        const std::int64_t size =
            at.rank * (linear_.in_features + linear_.out_features[module]);
        if (size <= kMostReadAhead) {
            read_ahead(pages_ + at.offset, size);
        }
    }

    Columns columns_of(std::int64_t column_tile) const {
        std::int64_t module = 0, first = column_tile * kExpandColumns;
        for (; first >= linear_.out_features[module]; ++module) {
            first -= divide_up(linear_.out_features[module], kExpandColumns) * kExpandColumns;
        }
        return {module, first, std::min(kExpandColumns, linear_.out_features[module] - first)};
    }

    // Of y, the first one.
    std::int64_t output(const Columns &columns) const {
        return linear_.out_offsets[columns.module] + columns.first;
    }

    // Columns of B transposed.
    Matrix<const Page> expansion(std::int64_t group, const Columns &columns) const {
        const Place at = place(group, columns.module);
        return {pages_ + at.offset + at.rank * linear_.in_features + columns.first,
                linear_.out_features[columns.module]};
    }

    std::int64_t input_row(std::int64_t index) const {
        return groups_.rows[index] / groups_.rows_per_input;
    }

    void measure() {
        std::int64_t out_features = 0;
        for (std::int64_t module = 0; module < linear_.num_modules; ++module) {
            out_features += linear_.out_features[module];
            column_tiles_ += divide_up(linear_.out_features[module], kExpandColumns);
        }
        for (std::int64_t group = 0; group < groups_.num_groups; ++group) {
            std::int64_t ranks = 0;
            for (std::int64_t module = 0; module < linear_.num_modules; ++module) {
                ranks += place(group, module).rank;
            }
            max_ranks_ = std::max(max_ranks_, ranks);
            const std::int64_t rows = groups_.starts[group + 1] - groups_.starts[group];
            work_ += rows * ranks * (linear_.in_features + out_features / linear_.num_modules);
        }
    }

    void allocate() {
        num_shrink_tiles_ = count_tiles(groups_, kShrinkTokens);
        num_expand_tiles_ = count_tiles(groups_, kExpandTokens);
        const std::size_t tile_bytes =
            static_cast<std::size_t>(num_shrink_tiles_ + num_expand_tiles_) * sizeof(LoraTile);
        const std::size_t reduced_bytes =
            static_cast<std::size_t>(groups_.num_rows() * max_ranks_) * sizeof(float);
        auto *memory = static_cast<std::byte *>(pool_.shared_scratch(tile_bytes + reduced_bytes));
        shrink_tiles_ = reinterpret_cast<LoraTile *>(memory);
        expand_tiles_ = shrink_tiles_ + num_shrink_tiles_;
        reduced_ = {reinterpret_cast<float *>(memory + tile_bytes), max_ranks_};
        fill_tiles(groups_, kShrinkTokens, shrink_tiles_);
        fill_tiles(groups_, kExpandTokens, expand_tiles_);
        const std::int64_t worker_floats = std::max(kShrinkTokens * linear_.in_features,
                                                    kMaxProductRows * kExpandColumns);
        const std::size_t worker_bytes = static_cast<std::size_t>(worker_floats) * sizeof(float);
        worker_memory_ = static_cast<std::byte *>(pool_.worker_scratch(worker_bytes));
        worker_stride_ = loraplex_pool::worker_scratch_stride(worker_bytes);
    }

    float *worker_floats(int worker) const {
        return reinterpret_cast<float *>(worker_memory_ +
                                         static_cast<std::size_t>(worker) * worker_stride_);
    }

    // Each sum of this rank becomes that of all.
    void add_ranks() {
        const std::int64_t num_sums = groups_.num_rows() * max_ranks_;
        for (std::int64_t first = 0; first < num_sums; first += channel_->capacity()) {
            const std::int64_t count = std::min(channel_->capacity(), num_sums - first);
            std::copy_n(reduced_.data + first, count, channel_->begin());
            channel_->exchange(count * static_cast<std::int64_t>(sizeof(float)));
            channel_->tree_sum(0, count, reduced_.data + first);
        }
    }

    void scale(const LoraTile &tile) const {
        std::int64_t before = 0;
        for (std::int64_t module = 0; module < linear_.num_modules; ++module) {
            const Place at = place(tile.group, module);
            for (std::int64_t t = 0; t < tile.count; ++t) {
                const float factor = groups_.scales[tile.first + t] * at.scale;
                float *sums = reduced_.row(tile.first + t) + before;
                std::for_each_n(sums, at.rank, [factor](float &sum) { sum *= factor; });
            }
            before += at.rank;
        }
    }

    // kRanksPerTile of the modules' ranks, counted one module behind another.
    void shrink(const LoraTile &tile, std::int64_t first_rank, int worker) const {
        const Page *rows[kRanksPerTile];
        int num_rows = 0;
        std::int64_t before = 0;
        for (std::int64_t module = 0; module < linear_.num_modules; ++module) {
            const Place at = place(tile.group, module);
            const std::int64_t end = std::min(before + at.rank, first_rank + kRanksPerTile);
            for (std::int64_t r = std::max(first_rank, before); r < end; ++r) {
                rows[num_rows++] = pages_ + at.offset + (r - before) * linear_.in_features;
            }
            before += at.rank;
        }
        if (num_rows == 0) {
            return;
        }
        const float *inputs[kShrinkTokens];
        float *wide = worker_floats(worker);
        for (std::int64_t t = 0; t < tile.count; ++t) {
            inputs[t] = x_.widened(input_row(tile.first + t), 0, linear_.in_features,
                                   wide + t * linear_.in_features);
        }
        dot_blocks(inputs, static_cast<int>(tile.count), rows, num_rows,
                   {0, linear_.in_features}, linear_.num_blocks,
                   reduced_.at(tile.first, first_rank));
    }

    void expand(const LoraTile &tile, const Columns &columns, int worker) const {
        const std::int64_t rank = place(tile.group, columns.module).rank;
        if (rank == 0) {
            return;
        }
        std::int64_t ranks_before = 0;
        for (std::int64_t module = 0; module < columns.module; ++module) {
            ranks_before += place(tile.group, module).rank;
        }
        const Matrix<const Page> b = expansion(tile.group, columns);
        const Matrix<float> sums{worker_floats(worker), kExpandColumns};
        for (std::int64_t t = 0; t < tile.count; t += kMaxProductRows) {
            const std::int64_t count = std::min<std::int64_t>(kMaxProductRows, tile.count - t);
            const Matrix<float> reduced = reduced_.at(tile.first + t, ranks_before);
            multiply_ranks(count, columns.count, rank, {reduced.data, reduced.stride}, b, sums);
            for (std::int64_t i = 0; i < count; ++i) {
                y_.add(groups_.rows[tile.first + t + i], output(columns), columns.count,
                       sums.row(i));
            }
        }
    }

    static void multiply_ranks(std::int64_t count, std::int64_t columns, std::int64_t rank,
                               Matrix<const float> reduced, Matrix<const Page> b,
                               Matrix<float> sums) {
        for (std::int64_t r = 0; r < rank; r += kExpandDepth) {
            multiply(count, columns, std::min(rank - r, kExpandDepth), reduced.at(0, r), b.at(r, 0),
                     sums, r == 0);
        }
    }

    loraplex_pool &pool_;
    const loraplex_lora_step &step_;
    const LoraGroups &groups_;
    const loraplex_lora_linear &linear_;
    std::int64_t layer_;
    const Page *pages_;
    InputRows x_;
    loraplex_channel *channel_;  // null: there is one rank
    OutputRows y_;
    std::int64_t max_ranks_ = 0;  // of all modules together
    std::int64_t work_ = 0;
    std::int64_t column_tiles_ = 0;
    std::int64_t num_shrink_tiles_ = 0;
    std::int64_t num_expand_tiles_ = 0;
    LoraTile *shrink_tiles_ = nullptr;
    LoraTile *expand_tiles_ = nullptr;
    Matrix<float> reduced_{};  // [rows of all groups, max_ranks_]
    std::byte *worker_memory_ = nullptr;
    std::size_t worker_stride_ = 0;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_add_lora(loraplex_pool *pool, const loraplex_lora_step *step,
                                  const loraplex_lora_linear *linear, int64_t layer,
                                  loraplex_dtype dtype, const void *x, int64_t x_stride,
                                  loraplex_channel *channel, void *y, int64_t y_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(*step, *linear, layer, 0);
        const InputRows inputs(dtype, x, x_stride);
        const OutputRows outputs(dtype, y, y_stride);
        return for_dtype(step->pages_dtype, [&]<typename Page>(Page) {
            const LoraOp op(*pool);
            const LoraGroups groups = groups_of(*step);
            LoraVectors<Page>(*pool, *step, *linear, layer, outputs).run();
            LoraProduct<Page>(*pool, *step, groups, *linear, layer, inputs, channel, outputs).run();
            return LORAPLEX_OK;
        });
    });
}

loraplex_status loraplex_add_expert_lora(loraplex_pool *pool, const loraplex_lora_step *step,
                                         const loraplex_lora_linear *linear, int64_t layer,
                                         int64_t num_experts, int64_t num_chosen,
                                         const int32_t *experts, loraplex_dtype dtype,
                                         const void *x, int64_t x_stride, int64_t pairs_per_row,
                                         loraplex_channel *channel, void *y, int64_t y_stride) {
    using namespace loraplex;
    return guarded([&] {
        if (num_experts < 1 || num_chosen < 1 || pairs_per_row < 1) {
            throw std::invalid_argument("add_expert_lora");
        }
        check(*step, *linear, layer, num_experts - 1);
        const InputRows inputs(dtype, x, x_stride);
        const OutputRows outputs(dtype, y, y_stride);
        return for_dtype(step->pages_dtype, [&]<typename Page>(Page) {
            const LoraOp op(*pool);
            const ExpertGroups by_expert(*pool, *step, *linear, layer,
                                         {num_experts, num_chosen, experts});
            const LoraGroups groups = by_expert.groups(pairs_per_row);
            LoraProduct<Page>(*pool, *step, groups, *linear, layer, inputs, channel, outputs).run();
            return LORAPLEX_OK;
        });
    });
}
