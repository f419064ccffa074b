// Paged attention: the cut of a step into units of work, and their numbers' way to the output.
//
// A unit is a tile of neighbouring queries of one row, with some key heads and all query heads that
// share these, over a range of splits. Splits and key tiles begin at absolute positions, so a query's
// sums depend on its position only: not on its chunk, nor on who computed which split. A query's
// state within a split is an online softmax over key tiles; splits are then folded together in
// rising order, by one thread or after several.
#include "loraplex/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "attention_tile.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kTileRows = 24;  // queries times heads: a multiple of kMaxProductRows
constexpr std::int64_t kUnitRows = 64;  // queries times heads of a unit that has several key heads
constexpr std::int64_t kUnitsPerThread = 4;

// Queries of one row.
struct QueryTile {
    std::int64_t row;
    std::int64_t first_token;
    std::int64_t first_position;
    std::int64_t num_queries;
    std::int64_t num_sink_splits;  // the splits that it reads: these first ones,
    std::int64_t first_split;      // and those from here
    std::int64_t end_split;        // up to here
    std::int64_t first_partial;  // of its splits' states; -1: one unit computes all splits

    std::int64_t num_splits() const { return num_sink_splits + end_split - first_split; }

    std::int64_t split(std::int64_t index) const {
        return index < num_sink_splits ? index : first_split + index - num_sink_splits;
    }
};

// Some key heads of a tile: the whole tile, or one split of it. Indices count the tile's splits.
struct Unit {
    std::int64_t tile;
    std::int64_t first_index;
    std::int64_t end_index;
    std::int64_t first_head;
    std::int64_t end_head;
};

// The cut of one step.
struct Cut {
    std::int64_t queries_per_tile;
    std::int64_t splits_per_unit = 0;
    std::int64_t heads_per_unit = 0;  // at most
    std::int64_t num_tiles = 0;
    std::int64_t num_units = 0;
    std::int64_t num_partials = 0;
    QueryTile *tiles = nullptr;
    Unit *units = nullptr;

    // The units that a tile's splits become.
    std::int64_t split_units(const QueryTile &tile) const {
        return tile.num_splits() > splits_per_unit ? tile.num_splits() : 1;
    }
};

void check(const loraplex_attention_step &step) {
    if (step.num_rows < 0 || step.num_kv_heads < 1 || step.head_dim < 1 || step.block_size < 1 ||
        step.num_heads < 1 || step.num_heads % step.num_kv_heads != 0 || step.sliding_window < 0 ||
        step.num_sink_tokens < 0 || !std::isfinite(step.scale) || !std::isfinite(step.soft_cap) ||
        step.soft_cap < 0.0f || (step.is_causal != 0 && step.is_causal != 1)) {
        throw std::invalid_argument("attention step");
    }
}

template <typename Body>
void for_each_tile(const loraplex_attention_step &step, std::int64_t queries_per_tile,
                   const Body &body) {
    for (std::int64_t row = 0; row < step.num_rows; ++row) {
        const std::int64_t first_token = step.query_start_loc[row];
        const std::int64_t num_queries = step.query_start_loc[row + 1] - first_token;
        const std::int64_t first_position = step.seq_lens[row] - num_queries;
        // The last queries see most: they come first, so that the end of the op is short.
        const std::int64_t num_tiles = divide_up(num_queries, queries_per_tile);
        for (std::int64_t tile = num_tiles - 1; tile >= 0; --tile) {
            const std::int64_t done = tile * queries_per_tile;
            QueryTile result{row, first_token + done, first_position + done,
                             std::min(queries_per_tile, num_queries - done), 0, 0, 0, -1};
            const std::int64_t last = result.first_position + result.num_queries - 1;
            result.first_split = first_key(step, result.first_position) / kSplitKeys;
            const std::int64_t end = end_key(step, step.seq_lens[row], last);
            result.end_split = (end - 1) / kSplitKeys + 1;
            result.num_sink_splits = std::min(
                result.first_split, (step.num_sink_tokens + kSplitKeys - 1) / kSplitKeys);
            body(result);
        }
    }
}

// Key heads of a block lie next to each other, and memory is read fastest in its order: so a unit
// has all heads where there are enough units and where their states fit in the first cache.
std::int64_t heads_of_a_unit(const loraplex_attention_step &step, const Cut &cut,
                             const QueryTile &tile) {
    const std::int64_t rows_per_head = tile.num_queries * step.num_heads / step.num_kv_heads;
    return std::clamp<std::int64_t>(kUnitRows / rows_per_head, 1, cut.heads_per_unit);
}

// Where all the units of a step, spread over the threads, would wait for one tile, its splits
// become units, and where these are too few, so do their heads. This changes no bit.
Cut count(const loraplex_attention_step &step, int num_threads) {
    Cut cut{std::max<std::int64_t>(1, kTileRows * step.num_kv_heads / step.num_heads)};
    const std::int64_t enough_units = num_threads == 1 ? 1 : kUnitsPerThread * num_threads;
    std::int64_t num_splits = 0, num_units = 0;
    for_each_tile(step, cut.queries_per_tile, [&](const QueryTile &tile) {
        ++cut.num_tiles;
        num_splits += tile.num_splits();
    });
    cut.splits_per_unit = divide_up(num_splits, enough_units);
    for_each_tile(step, cut.queries_per_tile, [&](const QueryTile &tile) {
        num_units += cut.split_units(tile);
    });
    const std::int64_t head_units = divide_up(enough_units, std::max<std::int64_t>(1, num_units));
    cut.heads_per_unit = std::max<std::int64_t>(1, step.num_kv_heads / head_units);
    for_each_tile(step, cut.queries_per_tile, [&](const QueryTile &tile) {
        const std::int64_t units = cut.split_units(tile);
        cut.num_units += units * divide_up(step.num_kv_heads, heads_of_a_unit(step, cut, tile));
        cut.num_partials += units > 1 ? units : 0;
    });
    return cut;
}

void fill(const loraplex_attention_step &step, Cut &cut) {
    std::int64_t num_tiles = 0, num_units = 0, num_partials = 0;
    for_each_tile(step, cut.queries_per_tile, [&](QueryTile tile) {
        const std::int64_t split_units = cut.split_units(tile);
        const std::int64_t splits_per_unit = tile.num_splits() / split_units;
        if (split_units > 1) {
            tile.first_partial = num_partials;
            num_partials += split_units;
        }
        const std::int64_t num_heads = heads_of_a_unit(step, cut, tile);
        for (std::int64_t index = 0; index < split_units; ++index) {
            for (std::int64_t head = 0; head < step.num_kv_heads; head += num_heads) {
                cut.units[num_units++] = {num_tiles, index * splits_per_unit,
                                          (index + 1) * splits_per_unit, head,
                                          std::min(head + num_heads, step.num_kv_heads)};
            }
        }
        cut.tiles[num_tiles++] = tile;
    });
}

// Queries and outputs [tokens, heads * head_dim], whose type only these functions know: the rest of
// the op is compiled once for all types.
template <typename A>
struct QueryRows {
    const void *query;
    std::int64_t query_stride;
    void *output;
    std::int64_t output_stride;
    // target[0 : count] = the query's elements from `first` on
    void (*read)(const void *query, std::int64_t first, std::int64_t count, A *target);
    // output[first : first + count] = values * factor / sum
    void (*write)(const float *values, float factor, float sum, std::int64_t count, void *output,
                  std::int64_t first);
};

template <typename T, typename A>
void read_query(const void *query, std::int64_t first, std::int64_t count, A *target) {
    const T *source = static_cast<const T *>(query) + first;
    for (std::int64_t i = 0; i < count; ++i) {
        target[i] = narrow<A>(widen(source[i]));
    }
}

template <typename T>
void write_quotients(const float *values, float factor, float sum, std::int64_t count,
                     void *output, std::int64_t first) {
    T *target = static_cast<T *>(output) + first;
    for (std::int64_t i = 0; i < count; ++i) {
        target[i] = narrow<T>(values[i] * factor / sum);
    }
}

// One call of the op. A is what meets keys and values (attention_tile.h).
template <typename KV, typename A>
class PagedAttention {
public:
    PagedAttention(loraplex_pool &pool, const loraplex_attention_step &step, PagedKeys<KV> keys,
                   const float *sink_logits, PositionBias position_bias, const QueryRows<A> &rows)
        : pool_(pool), step_(step), keys_(keys), sink_logits_(sink_logits),
          position_bias_(position_bias), rows_(rows), heads_per_kv_(step.num_heads / step.num_kv_heads) {}

    void run() {
        cut_ = count(step_, pool_.num_threads());
        tile_rows_ = cut_.queries_per_tile * heads_per_kv_;
        allocate();
        fill(step_, cut_);
        pool_.parallel_for_tiles(cut_.num_units, [&](std::int64_t i, int worker) {
            run_unit(cut_.units[i], worker);
        });
        if (cut_.num_partials > 0) {
            const std::int64_t num_heads = step_.num_kv_heads;
            pool_.parallel_for_tiles(cut_.num_tiles * num_heads, [&](std::int64_t i, int worker) {
                fold_partials(cut_.tiles[i / num_heads], i % num_heads, worker);
            });
        }
    }

private:
    void allocate() {
        const std::int64_t partial_rows = cut_.num_partials * step_.num_kv_heads * tile_rows_;
        const std::size_t state_bytes = static_cast<std::size_t>(state_floats(partial_rows)) * 4;
        const std::size_t tile_bytes = static_cast<std::size_t>(cut_.num_tiles) * sizeof(QueryTile);
        const std::size_t unit_bytes = static_cast<std::size_t>(cut_.num_units) * sizeof(Unit);
        auto *memory =
            static_cast<std::byte *>(pool_.shared_scratch(state_bytes + tile_bytes + unit_bytes));
        partials_ = reinterpret_cast<float *>(memory);
        cut_.tiles = reinterpret_cast<QueryTile *>(memory + state_bytes);
        cut_.units = reinterpret_cast<Unit *>(memory + state_bytes + tile_bytes);
        const std::int64_t unit_rows = std::max(tile_rows_, kUnitRows);
        const std::int64_t floats = state_floats(2 * unit_rows) + tile_rows_ * kTileKeys;
        const std::int64_t factors = tile_rows_ * kTileKeys + unit_rows * step_.head_dim;
        const std::size_t worker_bytes = static_cast<std::size_t>(floats) * sizeof(float) +
                                         static_cast<std::size_t>(factors) * sizeof(A);
        worker_memory_ = static_cast<std::byte *>(pool_.worker_scratch(worker_bytes));
        worker_stride_ = loraplex_pool::worker_scratch_stride(worker_bytes);
    }

    float *worker_floats(int worker) const {
        return reinterpret_cast<float *>(worker_memory_ +
                                         static_cast<std::size_t>(worker) * worker_stride_);
    }

    std::int64_t state_floats(std::int64_t num_rows) const {
        return SoftmaxState::num_floats(num_rows, step_.head_dim);
    }

    // Of one of several heads whose states begin at `memory`.
    SoftmaxState state(float *memory, const QueryTile &tile, std::int64_t head) const {
        const std::int64_t num_rows = tile.num_queries * heads_per_kv_;
        return SoftmaxState(memory + head * state_floats(num_rows), num_rows, step_.head_dim);
    }

    SoftmaxState partial(const QueryTile &tile, std::int64_t index, std::int64_t head) const {
        const std::int64_t first_row =
            (tile.first_partial + index) * step_.num_kv_heads * tile_rows_;
        return state(partials_ + state_floats(first_row), tile, head);
    }

    void run_unit(const Unit &unit, int worker) const {
        const QueryTile &tile = cut_.tiles[unit.tile];
        const std::int64_t num_heads = unit.end_head - unit.first_head;
        const std::int64_t num_rows = tile.num_queries * heads_per_kv_;
        float *totals = worker_floats(worker);
        float *of_split = totals + state_floats(num_heads * num_rows);
        float *scores = of_split + state_floats(num_heads * num_rows);
        A *weights = reinterpret_cast<A *>(scores + num_rows * kTileKeys);
        const Matrix<A> queries{weights + num_rows * kTileKeys, step_.head_dim};
        for (std::int64_t head = 0; head < num_heads; ++head) {
            read_queries(tile, unit.first_head + head, queries.at(head * num_rows, 0));
        }
        const auto attention = [&](std::int64_t head) {
            return TileAttention<KV, A>{
                step_, keys_, step_.block_tables + tile.row * step_.block_table_stride,
                unit.first_head + head, step_.seq_lens[tile.row], position_bias_,
                tile.first_position, tile.num_queries, heads_per_kv_,
                {queries.row(head * num_rows), queries.stride}, scores, weights};
        };
        const auto run_split = [&](std::int64_t split, const auto &state_of) {
            for (std::int64_t head = 0; head < num_heads; ++head) {
                state_of(head).clear();
            }
            attention(0).for_each_key_tile(split, [&](const KeyTile &keys) {
                for (std::int64_t head = 0; head < num_heads; ++head) {
                    attention(head).run_tile(keys, state_of(head));
                }
            });
        };
        if (tile.first_partial >= 0) {
            run_split(tile.split(unit.first_index), [&](std::int64_t head) {
                return partial(tile, unit.first_index, unit.first_head + head);
            });
            return;
        }
        for (std::int64_t head = 0; head < num_heads; ++head) {
            state(totals, tile, head).clear();
        }
        for (std::int64_t index = unit.first_index; index < unit.end_index; ++index) {
            run_split(tile.split(index),
                      [&](std::int64_t head) { return state(of_split, tile, head); });
            for (std::int64_t head = 0; head < num_heads; ++head) {
                state(totals, tile, head).fold(state(of_split, tile, head));
            }
        }
        for (std::int64_t head = 0; head < num_heads; ++head) {
            write_output(tile, unit.first_head + head, state(totals, tile, head));
        }
    }

    void fold_partials(const QueryTile &tile, std::int64_t head, int worker) const {
        if (tile.first_partial < 0) {
            return;
        }
        SoftmaxState total = state(worker_floats(worker), tile, 0);
        total.clear();
        for (std::int64_t index = 0; index < tile.num_splits(); ++index) {
            total.fold(partial(tile, index, head));
        }
        write_output(tile, head, total);
    }

    // Row q * heads_per_kv + h is query q's head h of those that share the key head.
    void read_queries(const QueryTile &tile, std::int64_t head, Matrix<A> queries) const {
        const std::int64_t row_size = heads_per_kv_ * step_.head_dim;
        for (std::int64_t q = 0; q < tile.num_queries; ++q) {
            rows_.read(rows_.query, (tile.first_token + q) * rows_.query_stride + head * row_size,
                       row_size, queries.row(q * heads_per_kv_));
        }
    }

    // A sink's logit is one more score in the sum, without a value.
    void write_output(const QueryTile &tile, std::int64_t kv_head,
                      const SoftmaxState &total) const {
        const std::int64_t dim = step_.head_dim;
        const std::int64_t first_head = kv_head * heads_per_kv_;
        for (std::int64_t q = 0; q < tile.num_queries; ++q) {
            const std::int64_t first =
                (tile.first_token + q) * rows_.output_stride + first_head * dim;
            for (std::int64_t h = 0; h < heads_per_kv_; ++h) {
                const std::int64_t row = q * heads_per_kv_ + h;
                float sum = total.sum_of_weights(row), factor = 1.0f;
                if (sink_logits_ != nullptr) {
                    const float sink = sink_logits_[first_head + h] * kLog2E;
                    const float largest = std::max(total.maxima[row], sink);
                    factor = exp2(total.maxima[row] - largest);
                    sum = sum * factor + exp2(sink - largest);
                }
                rows_.write(total.values().row(row), factor, sum, dim, rows_.output,
                            first + h * dim);
            }
        }
    }

    loraplex_pool &pool_;
    const loraplex_attention_step &step_;
    PagedKeys<KV> keys_;
    const float *sink_logits_;
    PositionBias position_bias_;
    QueryRows<A> rows_;
    std::int64_t heads_per_kv_;
    std::int64_t tile_rows_ = 0;  // of a whole tile and one key head
    float *partials_ = nullptr;
    std::byte *worker_memory_ = nullptr;
    std::size_t worker_stride_ = 0;
    Cut cut_{};
};

// body(A{}) with products by pairs of bfloat16 where the CPU has fast ones.
template <typename KV, typename Body>
loraplex_status with_arithmetic([[maybe_unused]] std::uint64_t cpu_features,
                                [[maybe_unused]] loraplex_dtype dtype, const Body &body) {
#if defined(LORAPLEX_ISA_X86_64_V4)
    if constexpr (std::is_same_v<KV, Bfloat16>) {
        if (dtype == LORAPLEX_BFLOAT16 && (cpu_features & LORAPLEX_CPU_AVX512_BF16) != 0) {
            return body(Bfloat16{});
        }
    }
#endif
    return body(float{});
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_paged_attention(loraplex_pool *pool, const loraplex_attention_step *step,
                                         loraplex_dtype kv_dtype, const void *keys,
                                         const void *values, const float *sink_logits,
                                         const float *position_bias, int64_t max_distance,
                                         loraplex_dtype dtype, const void *query,
                                         int64_t query_stride, void *output,
                                         int64_t output_stride) {
    using namespace loraplex;
    return guarded([&] {
        check(*step);
        if (max_distance < 0) {
            throw std::invalid_argument("attention bias");
        }
        const PositionBias bias = {position_bias, max_distance};
        return for_kv_dtype(kv_dtype, [&]<typename KV>(KV) {
            const PagedKeys<KV> paged = {static_cast<const KV *>(keys),
                                         static_cast<const KV *>(values)};
            return with_arithmetic<KV>(pool->cpu_features(), dtype, [&]<typename A>(A) {
                QueryRows<A> rows = {query, query_stride, output, output_stride, {}, {}};
                const loraplex_status status = for_dtype(dtype, [&]<typename T>(T) {
                    rows.read = &read_query<T, A>;
                    rows.write = &write_quotients<T>;
                    return LORAPLEX_OK;
                });
                if (status == LORAPLEX_OK) {
                    const Op op(*pool);
                    PagedAttention<KV, A>(*pool, *step, paged, sink_logits, bias, rows).run();
                }
                return status;
            });
        });
    });
}
