// Latent attention over paged latent vectors.
//
// A unit is a tile of neighbouring queries of one row with all their heads, over all splits of its
// keys or over one. The queries and heads of a tile are the columns of one matrix, and keys its
// rows: so one product gives the scores as vectors lie in the storage, for the cost of turning the
// queries and the scores. As in attention.cpp a query's sums depend on its position alone.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <type_traits>

#include "attention_tile.h"
#include "block_product.h"
#include "loraplex/dtype.h"
#include "loraplex/guard.h"
#include "loraplex/latent.h"
#include "loraplex/pool.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kTileRows = 32;  // queries times heads, unless there are more heads
constexpr std::int64_t kUnitsPerThread = 4;
constexpr std::int64_t kWideKeys = 16;  // keys that are widened at a time

std::int64_t whole_lanes(std::int64_t n) { return divide_up(n, kLanes) * kLanes; }

// Queries of one row.
struct QueryTile {
    std::int64_t row;
    std::int64_t first_token;
    std::int64_t first_position;
    std::int64_t num_queries;
    std::int64_t first_partial;  // of its splits' states; -1: one unit computes all splits

    std::int64_t num_splits() const {
        return (first_position + num_queries - 1) / kSplitKeys + 1;
    }
};

struct Unit {
    std::int64_t tile;
    std::int64_t split;  // or -1: all
};

// What a call reads of its arguments, whose type only these functions know.
struct Queries {
    const void *query;      // [tokens, heads, latent]
    const void *query_key;  // [tokens, heads, key], with strides
    std::int64_t key_stride;
    std::int64_t key_head_stride;
    void *output;
    void (*read)(const void *source, std::int64_t first, std::int64_t count, float *target);
    void (*write)(const float *values, float sum, std::int64_t count, void *output,
                  std::int64_t first);
};

template <typename T>
void read_elements(const void *source, std::int64_t first, std::int64_t count, float *target) {
    const T *from = static_cast<const T *>(source) + first;
    for_each_vector(count, [&](std::int64_t i, int n) {
        store_up_to(target + i, load_up_to(from + i, n), n);
    });
}

template <typename T>
void write_quotients(const float *values, float sum, std::int64_t count, void *output,
                     std::int64_t first) {
    T *target = static_cast<T *>(output) + first;
    for (std::int64_t i = 0; i < count; ++i) {
        target[i] = narrow<T>(values[i] / sum);
    }
}

template <typename KV>
class LatentAttention {
public:
    LatentAttention(loraplex_pool &pool, const loraplex_attention_step &step,
                    std::int64_t latent_size, const KV *stored, const Queries &queries)
        : pool_(pool), step_(step), latent_size_(latent_size), stored_(stored), queries_(queries),
          queries_per_tile_(std::max<std::int64_t>(1, kTileRows / step.num_heads)),
          max_rows_(queries_per_tile_ * step.num_heads), columns_(whole_lanes(max_rows_)) {}

    void run() {
        cut();
        const std::int64_t floats =
            2 * SoftmaxState::num_floats(max_rows_, latent_size_) + 2 * max_rows_ * kTileKeys +
            (step_.head_dim + kWideKeys) * columns_ + (kWideKeys + 1) * step_.head_dim;
        const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
        worker_memory_ = static_cast<std::byte *>(pool_.worker_scratch(bytes));
        worker_stride_ = loraplex_pool::worker_scratch_stride(bytes);
        pool_.parallel_for_tiles(num_units_, [&](std::int64_t i, int worker) {
            run_unit(units_[i], worker);
        });
        if (num_partials_ > 0) {
            pool_.parallel_for_tiles(num_tiles_, [&](std::int64_t i, int worker) {
                fold_partials(tiles_[i], worker);
            });
        }
    }

private:
    // A worker's memory.
    struct Scratch {
        SoftmaxState totals;
        SoftmaxState of_split;
        float *scores;           // [rows, kTileKeys]
        float *weights;          // [rows, kTileKeys]
        Matrix<float> turned;    // [head_dim, columns]: the queries
        Matrix<float> products;  // [kWideKeys, columns]
        float *wide;             // [kWideKeys, head_dim]
        float *query;            // [head_dim]
    };

    Scratch scratch(int worker, std::int64_t num_rows) const {
        auto *next = reinterpret_cast<float *>(worker_memory_ +
                                               static_cast<std::size_t>(worker) * worker_stride_);
        const auto take = [&](std::int64_t count) {
            float *taken = next;
            next += count;
            return taken;
        };
        const std::int64_t state_floats = SoftmaxState::num_floats(max_rows_, latent_size_);
        const SoftmaxState totals(take(state_floats), num_rows, latent_size_);
        const SoftmaxState of_split(take(state_floats), num_rows, latent_size_);
        float *scores = take(max_rows_ * kTileKeys);
        float *weights = take(max_rows_ * kTileKeys);
        const Matrix<float> turned{take(step_.head_dim * columns_), columns_};
        const Matrix<float> products{take(kWideKeys * columns_), columns_};
        float *wide = take(kWideKeys * step_.head_dim);
        return {totals, of_split, scores, weights, turned, products, wide, take(step_.head_dim)};
    }

    template <typename Body>
    void for_each_tile(const Body &body) const {
        for (std::int64_t row = 0; row < step_.num_rows; ++row) {
            const std::int64_t first_token = step_.query_start_loc[row];
            const std::int64_t num_queries = step_.query_start_loc[row + 1] - first_token;
            const std::int64_t first_position = step_.seq_lens[row] - num_queries;
            // The last queries see most: they come first, so that the end of the op is short.
            for (std::int64_t tile = divide_up(num_queries, queries_per_tile_); tile-- > 0;) {
                const std::int64_t done = tile * queries_per_tile_;
                body(QueryTile{row, first_token + done, first_position + done,
                               std::min(queries_per_tile_, num_queries - done), -1});
            }
        }
    }

    // Where a step has too few tiles for its threads, their splits are units. This changes no bit.
    void cut() {
        std::int64_t num_splits = 0;
        for_each_tile([&](const QueryTile &tile) {
            ++num_tiles_;
            num_splits += tile.num_splits();
        });
        const int num_threads = pool_.num_threads();
        const bool by_split = num_threads > 1 && num_tiles_ < kUnitsPerThread * num_threads &&
                              num_splits > num_tiles_;
        num_units_ = by_split ? num_splits : num_tiles_;
        num_partials_ = by_split ? num_splits : 0;
        const std::size_t state_bytes =
            static_cast<std::size_t>(num_partials_ *
                                     SoftmaxState::num_floats(max_rows_, latent_size_)) *
            sizeof(float);
        const std::size_t tile_bytes = static_cast<std::size_t>(num_tiles_) * sizeof(QueryTile);
        const std::size_t unit_bytes = static_cast<std::size_t>(num_units_) * sizeof(Unit);
        // States of several vectors come first: floats need no more than their own alignment.
        auto *memory = static_cast<std::byte *>(
            pool_.shared_scratch(tile_bytes + unit_bytes + state_bytes));
        tiles_ = reinterpret_cast<QueryTile *>(memory);
        units_ = reinterpret_cast<Unit *>(memory + tile_bytes);
        partials_ = reinterpret_cast<float *>(memory + tile_bytes + unit_bytes);
        std::int64_t num_tiles = 0, num_units = 0, num_partials = 0;
        for_each_tile([&](QueryTile tile) {
            if (by_split) {
                tile.first_partial = num_partials;
                num_partials += tile.num_splits();
            }
            for (std::int64_t split = 0; split < (by_split ? tile.num_splits() : 1); ++split) {
                units_[num_units++] = {num_tiles, by_split ? split : -1};
            }
            tiles_[num_tiles++] = tile;
        });
    }

    SoftmaxState partial(const QueryTile &tile, std::int64_t split) const {
        const std::int64_t floats = SoftmaxState::num_floats(max_rows_, latent_size_);
        return SoftmaxState(partials_ + (tile.first_partial + split) * floats,
                            tile.num_queries * step_.num_heads, latent_size_);
    }

    void run_unit(const Unit &unit, int worker) const {
        const QueryTile &tile = tiles_[unit.tile];
        Scratch memory = scratch(worker, tile.num_queries * step_.num_heads);
        turn_queries(tile, memory);
        if (unit.split >= 0) {
            SoftmaxState state = partial(tile, unit.split);
            run_split(tile, unit.split, memory, state);
            return;
        }
        memory.totals.clear();
        for (std::int64_t split = 0; split < tile.num_splits(); ++split) {
            run_split(tile, split, memory, memory.of_split);
            memory.totals.fold(memory.of_split);
        }
        write_output(tile, memory.totals);
    }

    void fold_partials(const QueryTile &tile, int worker) const {
        Scratch memory = scratch(worker, tile.num_queries * step_.num_heads);
        memory.totals.clear();
        for (std::int64_t split = 0; split < tile.num_splits(); ++split) {
            memory.totals.fold(partial(tile, split));
        }
        write_output(tile, memory.totals);
    }

    // Column q * num_heads + h is query q's head h; columns behind the last are zeros.
    void turn_queries(const QueryTile &tile, const Scratch &memory) const {
        const std::int64_t num_heads = step_.num_heads, dim = step_.head_dim;
        for (std::int64_t column = 0; column < columns_; ++column) {
            if (column < tile.num_queries * num_heads) {
                const std::int64_t token = tile.first_token + column / num_heads;
                const std::int64_t head = column % num_heads;
                queries_.read(queries_.query, (token * num_heads + head) * latent_size_,
                              latent_size_, memory.query);
                queries_.read(queries_.query_key,
                              token * queries_.key_stride + head * queries_.key_head_stride,
                              dim - latent_size_, memory.query + latent_size_);
            } else {
                std::fill_n(memory.query, dim, 0.0f);
            }
            for (std::int64_t d = 0; d < dim; ++d) {
                memory.turned.row(d)[column] = memory.query[d];
            }
        }
    }

    void run_split(const QueryTile &tile, std::int64_t split, const Scratch &memory,
                   SoftmaxState &state) const {
        const std::int64_t last = tile.first_position + tile.num_queries - 1;
        const std::int64_t end = std::min((split + 1) * kSplitKeys, last + 1);
        state.clear();
        for (std::int64_t start = split * kSplitKeys; start < end; start += kTileKeys) {
            run_keys(tile, start, std::min(end, start + kTileKeys), memory, state);
        }
    }

    void run_keys(const QueryTile &tile, std::int64_t start, std::int64_t end,
                  const Scratch &memory, SoftmaxState &state) const {
        const std::int64_t num_heads = step_.num_heads;
        const std::int64_t num_rows = tile.num_queries * num_heads;
        typename RowPieces<KV>::Piece pieces[kTileKeys];
        std::size_t num_pieces = 0;
        const std::int64_t *table = step_.block_tables + tile.row * step_.block_table_stride;
        for (std::int64_t key = start; key < end;) {
            const std::int64_t offset = key % step_.block_size;
            const std::int64_t count = std::min(step_.block_size - offset, end - key);
            const std::int64_t slot = table[key / step_.block_size] * step_.block_size + offset;
            pieces[num_pieces++] = {stored_ + slot * step_.head_dim, count};
            score(pieces[num_pieces - 1], key - start, num_rows, memory);
            key += count;
        }
        // Queries that see the same keys share the loads of values.
        for (std::int64_t query = 0; query < tile.num_queries;) {
            const std::int64_t seen = num_seen(tile, query, start, end);
            std::int64_t end_query = query + 1;
            while (end_query < tile.num_queries &&
                   num_seen(tile, end_query, start, end) == seen) {
                ++end_query;
            }
            if (seen > 0) {
                add_values(query * num_heads, end_query * num_heads, seen, pieces, memory, state);
            }
            query = end_query;
        }
    }

    static std::int64_t num_seen(const QueryTile &tile, std::int64_t query, std::int64_t start,
                                 std::int64_t end) {
        return std::clamp<std::int64_t>(tile.first_position + query + 1 - start, 0, end - start);
    }

    // The scores of one piece of keys, with log2(e) for exp2.
    void score(const typename RowPieces<KV>::Piece &piece, std::int64_t first_column,
               std::int64_t num_rows, const Scratch &memory) const {
        const std::int64_t dim = step_.head_dim;
        const float scale = step_.scale * kLog2E;
        for (std::int64_t done = 0; done < piece.count; done += kWideKeys) {
            const std::int64_t count = std::min(kWideKeys, piece.count - done);
            multiply(count, columns_, dim, widened(piece.rows + done * dim, count, memory.wide),
                     Matrix<const float>{memory.turned.data, columns_}, memory.products, true);
            for (std::int64_t row = 0; row < num_rows; ++row) {
                float *target = memory.scores + row * kTileKeys + first_column + done;
                for (std::int64_t key = 0; key < count; ++key) {
                    target[key] = memory.products.row(key)[row] * scale;
                }
            }
        }
    }

    Matrix<const float> widened(const KV *rows, std::int64_t count, float *wide) const {
        if constexpr (std::is_same_v<KV, float>) {
            return {rows, step_.head_dim};
        } else {
            for_each_vector(count * step_.head_dim, [&](std::int64_t i, int n) {
                store_up_to(wide + i, load_up_to(rows + i, n), n);
            });
            return {wide, step_.head_dim};
        }
    }

    // Of rows that see `seen` keys of the tile.
    void add_values(std::int64_t first_row, std::int64_t end_row, std::int64_t seen,
                    typename RowPieces<KV>::Piece *pieces, const Scratch &memory,
                    SoftmaxState &state) const {
        for (std::int64_t row = first_row; row < end_row; ++row) {
            float *scores = memory.scores + row * kTileKeys;
            std::fill(scores + seen, scores + kTileKeys, -std::numeric_limits<float>::infinity());
            weigh(scores, row, memory.weights + row * kTileKeys, state);
        }
        // Only values that these queries see are read: the others may be NaN, and 0 * NaN is NaN.
        typename RowPieces<KV>::Piece seen_pieces[kTileKeys];
        std::size_t num_pieces = 0;
        for (std::int64_t left = seen; left > 0; ++num_pieces) {
            seen_pieces[num_pieces] = pieces[num_pieces];
            seen_pieces[num_pieces].count = std::min(left, pieces[num_pieces].count);
            left -= seen_pieces[num_pieces].count;
        }
        multiply(end_row - first_row, latent_size_,
                 Matrix<const float>{memory.weights + first_row * kTileKeys, kTileKeys},
                 RowPieces<KV>{{seen_pieces, num_pieces}, step_.head_dim},
                 state.values().at(first_row, 0), false);
    }

    void write_output(const QueryTile &tile, const SoftmaxState &total) const {
        const std::int64_t first = tile.first_token * step_.num_heads;
        for (std::int64_t row = 0; row < tile.num_queries * step_.num_heads; ++row) {
            queries_.write(total.values().row(row), total.sum_of_weights(row), latent_size_,
                           queries_.output, (first + row) * latent_size_);
        }
    }

    loraplex_pool &pool_;
    const loraplex_attention_step &step_;
    std::int64_t latent_size_;
    const KV *stored_;
    const Queries &queries_;
    std::int64_t queries_per_tile_;
    std::int64_t max_rows_;  // queries times heads of a whole tile
    std::int64_t columns_;   // the same, filled up to whole vectors
    std::int64_t num_tiles_ = 0;
    std::int64_t num_units_ = 0;
    std::int64_t num_partials_ = 0;
    QueryTile *tiles_ = nullptr;
    Unit *units_ = nullptr;
    float *partials_ = nullptr;
    std::byte *worker_memory_ = nullptr;
    std::size_t worker_stride_ = 0;
};

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_write_latent(loraplex_pool *pool, int64_t num_tokens,
                                      int64_t latent_size, int64_t key_size,
                                      const int64_t *slot_mapping, loraplex_dtype dtype,
                                      const void *latent, int64_t latent_stride, const void *key,
                                      int64_t key_stride, loraplex_dtype stored_dtype,
                                      void *stored) {
    using namespace loraplex;
    return guarded([&] {
        check(num_tokens >= 0 && latent_size >= 1 && key_size >= 1, "write_latent");
        const std::int64_t size = latent_size + key_size;
        return for_dtype(dtype, [&]<typename T>(T) {
            return for_dtype(stored_dtype, [&]<typename KV>(KV) {
                const auto copy = [](const T *source, std::int64_t count, KV *target) {
                    for_each_vector(count, [&](std::int64_t i, int n) {
                        store_up_to(target + i, load_up_to(source + i, n), n);
                    });
                };
                for_each_row(*pool, num_tokens, size, [&](std::int64_t token) {
                    KV *target = static_cast<KV *>(stored) + slot_mapping[token] * size;
                    copy(static_cast<const T *>(latent) + token * latent_stride, latent_size,
                         target);
                    copy(static_cast<const T *>(key) + token * key_stride, key_size,
                         target + latent_size);
                });
                return loraplex_status{LORAPLEX_OK};
            });
        });
    });
}

loraplex_status loraplex_latent_attention(loraplex_pool *pool, const loraplex_attention_step *step,
                                          int64_t latent_size, loraplex_dtype stored_dtype,
                                          const void *stored, loraplex_dtype dtype,
                                          const void *query, const void *query_key,
                                          int64_t query_key_stride,
                                          int64_t query_key_head_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(step->num_rows >= 0 && step->num_heads >= 1 && step->num_kv_heads == 1 &&
                  step->block_size >= 1 && latent_size >= 1 && latent_size < step->head_dim &&
                  step->sliding_window == 0 && step->soft_cap == 0.0f &&
                  step->alibi_slopes == nullptr && std::isfinite(step->scale),
              "latent attention step");
        Queries queries = {query, query_key, query_key_stride, query_key_head_stride, output,
                           nullptr, nullptr};
        const loraplex_status status = for_dtype(dtype, [&]<typename T>(T) {
            queries.read = &read_elements<T>;
            queries.write = &write_quotients<T>;
            return LORAPLEX_OK;
        });
        if (status != LORAPLEX_OK) {
            return status;
        }
        return for_dtype(stored_dtype, [&]<typename KV>(KV) {
            const Op op(*pool);
            LatentAttention<KV>(*pool, *step, latent_size, static_cast<const KV *>(stored), queries)
                .run();
            return loraplex_status{LORAPLEX_OK};
        });
    });
}
