// The arithmetic of attention: one tile of queries over one split of the keys, tile by tile.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

#include "attention_storage.h"
#include "block_product.h"
#include "exponential.h"
#include "loraplex/attention.h"
#include "loraplex/simd.h"

namespace loraplex {

inline constexpr std::int64_t kTileKeys = 64;
inline constexpr std::int64_t kSplitKeys = 512;  // a multiple of kTileKeys

// 0, 1, ...
inline constexpr auto kTileOffsets = [] {
    std::array<float, kTileKeys> offsets{};
    for (std::size_t i = 0; i < offsets.size(); ++i) {
        offsets[i] = static_cast<float>(i);
    }
    return offsets;
}();

// Where the keys that end at the position itself begin: behind the sinks, or 0 if these touch them.
inline std::int64_t first_key(const loraplex_attention_step &step, std::int64_t position) {
    const std::int64_t first = position - step.sliding_window + 1;
    return step.sliding_window == 0 || first <= step.num_sink_tokens ? 0 : first;
}

// Where the keys end that the position sees, in a row of seq_len positions.
inline std::int64_t end_key(const loraplex_attention_step &step, std::int64_t seq_len,
                            std::int64_t position) {
    if (step.is_causal != 0) {
        return position + 1;
    }
    return step.sliding_window == 0 ? seq_len : std::min(seq_len, position + step.sliding_window);
}

// Numbers that are added to scores by the distance of key and query, [num_heads, 2 * max_distance +
// 1]. Beyond the maximum they are those of the maximum.
struct PositionBias {
    const float *numbers;  // or null
    std::int64_t max_distance;

    // target[i] += factor * the number of distance + i
    void add(std::int64_t head, std::int64_t distance, float factor, float *target) const {
        const float *row = numbers + head * (2 * max_distance + 1) + max_distance;
        float own[kTileKeys];
        const float *source = own;
        if (distance >= -max_distance && distance + kTileKeys - 1 <= max_distance) {
            source = row + distance;
        } else {
            for (std::int64_t i = 0; i < kTileKeys; ++i) {
                own[i] = row[std::clamp(distance + i, -max_distance, max_distance)];
            }
        }
        for (std::int64_t i = 0; i < kTileKeys; i += kLanes) {
            store(target + i, multiply_add(broadcast(factor), load(source + i), load(target + i)));
        }
    }
};

// The chains of a sum of weights: as many on every instruction set, so that all give its bits.
inline constexpr int kSumChains = 16;

// What an online softmax keeps per row: the largest score, and sums with weights 2^(score - it).
struct SoftmaxState {
    SoftmaxState(float *memory, std::int64_t num_rows, std::int64_t head_dim)
        : num_rows(num_rows), maxima(memory), sums{maxima + num_rows, kSumChains + head_dim} {}

    static std::int64_t num_floats(std::int64_t num_rows, std::int64_t head_dim) {
        return num_rows * (1 + kSumChains + head_dim);
    }

    void clear() {
        std::fill_n(maxima, num_rows, -std::numeric_limits<float>::infinity());
        std::fill_n(sums.data, num_rows * sums.stride, 0.0f);
    }

    Matrix<float> values() const { return sums.at(0, kSumChains); }

    float sum_of_weights(std::int64_t row) const {
        float chains[kSumChains];
        std::copy_n(sums.row(row), kSumChains, chains);
        for (int width = kSumChains / 2; width > 0; width /= 2) {
            for (int i = 0; i < width; ++i) {
                chains[i] += chains[i + width];
            }
        }
        return chains[0];
    }

    // Not below the row's largest score so far.
    void set_maximum(std::int64_t row, float largest) {
        if (maxima[row] == largest) {
            return;
        }
        const float factor = exp2(maxima[row] - largest);
        float *target = sums.row(row);
        for (std::int64_t i = 0; i < sums.stride; ++i) {
            target[i] *= factor;
        }
        maxima[row] = largest;
    }

    // Adds what another state saw. A row that saw nothing changes nothing.
    void fold(const SoftmaxState &other) {
        for (std::int64_t row = 0; row < num_rows; ++row) {
            if (other.sum_of_weights(row) == 0.0f) {
                continue;
            }
            set_maximum(row, std::max(maxima[row], other.maxima[row]));
            const float factor = exp2(other.maxima[row] - maxima[row]);
            float *target = sums.row(row);
            const float *source = other.sums.row(row);
            for (std::int64_t i = 0; i < sums.stride; ++i) {
                target[i] += source[i] * factor;
            }
        }
    }

    std::int64_t num_rows;
    float *maxima;       // [num_rows]
    Matrix<float> sums;  // [num_rows, kSumChains + head_dim]: of weights, and of weighted values
};

// Makes the weights of a row's scores, which have log2(e), and prepares the state for their values.
// Weights are summed as they are rounded, so that the shares of values are 1 together.
template <typename A>
inline void weigh(const float *scores, std::int64_t row, A *weights, SoftmaxState &state) {
    Floats maxima = load(scores);
    for (std::int64_t i = kLanes; i < kTileKeys; i += kLanes) {
        maxima = maximum(maxima, load(scores + i));
    }
    state.set_maximum(row, std::max(state.maxima[row], max_lane(maxima)));
    const Floats largest = broadcast(state.maxima[row]);
    float *sums = state.sums.row(row);
    Floats chains[kSumChains / kLanes];
    for (int i = 0; i < kSumChains / kLanes; ++i) {
        chains[i] = load(sums + i * kLanes);
    }
    for (std::int64_t i = 0; i < kTileKeys; i += kLanes) {
        Arithmetic<A>::store_factor(weights + i, exp2(subtract(load(scores + i), largest)));
        Floats &chain = chains[i / kLanes % (kSumChains / kLanes)];
        chain = add(chain, load(weights + i));
    }
    for (int i = 0; i < kSumChains / kLanes; ++i) {
        store(sums + i * kLanes, chains[i]);
    }
}

// Neighbouring keys of a split, from `start` on. [first, end) are the keys but sinks that any of the
// queries sees in the split.
struct KeyTile {
    std::int64_t start;
    std::int64_t first;
    std::int64_t end;
};

// Neighbouring queries of one sequence with all heads that share one key head. A is what meets keys
// and values (block_product.h): queries and weights are of it.
template <typename KV, typename A>
struct TileAttention {
    const loraplex_attention_step &step;
    PagedKeys<KV> storage;
    const std::int64_t *block_table;
    std::int64_t kv_head;
    std::int64_t seq_len;
    PositionBias position_bias;
    std::int64_t first_position;
    std::int64_t num_queries;
    std::int64_t heads_per_kv;
    Matrix<const A> queries;  // [num_queries * heads_per_kv, head_dim]
    float *scores;            // [num_queries * heads_per_kv, kTileKeys]
    A *weights;               // the same, 2^(score - the largest)

    // Tiles of the keys that any of the queries sees in the split, for all heads the same:
    // body(KeyTile).
    template <typename Body>
    void for_each_key_tile(std::int64_t split, const Body &body) const {
        const std::int64_t last_position = first_position + num_queries - 1;
        const std::int64_t first = std::max(split * kSplitKeys, first_key(step, first_position));
        const std::int64_t end =
            std::min((split + 1) * kSplitKeys, end_key(step, seq_len, last_position));
        std::int64_t next = split * kSplitKeys;
        for (; next < std::min(end, step.num_sink_tokens); next += kTileKeys) {
            body(KeyTile{next, first, end});
        }
        for (next = std::max(next, first / kTileKeys * kTileKeys); next < end; next += kTileKeys) {
            body(KeyTile{next, first, end});
        }
    }

    void run_tile(const KeyTile &keys, SoftmaxState state) const {
        const std::int64_t tile_start = keys.start;
        const std::int64_t tile_end = std::min(keys.end, tile_start + kTileKeys);
        const std::int64_t tile_first = std::max(keys.first, tile_start);
        const std::int64_t end_sinks = std::min(step.num_sink_tokens, tile_end);
        if (tile_start < end_sinks && tile_start < keys.first) {
            score(tile_start, tile_start, end_sinks);
        }
        score(tile_start, tile_first, tile_end);
        for (std::int64_t query = 0; query < num_queries; ++query) {
            const Visible visible_keys = visible(tile_start, query);
            if (visible_keys.end_sinks > 0 || visible_keys.first < visible_keys.end) {
                finish_scores(tile_start, query);
                exponentiate(query, visible_keys, state);
            }
        }
        // Queries that see the same keys share the loads of values.
        for (std::int64_t query = 0; query < num_queries;) {
            const Visible visible_keys = visible(tile_start, query);
            std::int64_t end_query = query + 1;
            while (end_query < num_queries && visible(tile_start, end_query) == visible_keys) {
                ++end_query;
            }
            add_values(tile_start, visible_keys, query, end_query, state);
            query = end_query;
        }
    }

private:
    // Keys of one tile that a query sees, counted from the tile's first: [0, end_sinks), and
    // [first, end) behind them. Of the first there are none where the second begin at key 0.
    struct Visible {
        std::int64_t end_sinks;
        std::int64_t first;
        std::int64_t end;

        bool operator==(const Visible &) const = default;
    };

    Visible visible(std::int64_t tile_start, std::int64_t query) const {
        const std::int64_t position = first_position + query;
        const std::int64_t first = first_key(step, position);
        const std::int64_t end_sinks = first == 0 ? 0 : step.num_sink_tokens - tile_start;
        return {std::clamp<std::int64_t>(end_sinks, 0, kTileKeys),
                std::clamp<std::int64_t>(first - tile_start, 0, kTileKeys),
                std::clamp<std::int64_t>(end_key(step, seq_len, position) - tile_start, 0,
                                         kTileKeys)};
    }

    // Pieces of [first, end) that lie in one block: body(block, offset in it, first, count).
    template <typename Body>
    void for_each_piece(std::int64_t first, std::int64_t end, const Body &body) const {
        while (first < end) {
            const std::int64_t offset = first % step.block_size;
            const std::int64_t count = std::min(step.block_size - offset, end - first);
            body(block_table[first / step.block_size] * step.num_kv_heads + kv_head, offset, first,
                 count);
            first += count;
        }
    }

    HeadPart<KV> part() const { return {step.head_dim, step.block_size}; }

    // While the block's keys are multiplied. Values are read a few columns of many positions at a
    // time, which the hardware does not foresee; keys are read from end to end, which it does (a
    // prefetch of the next tile's keys gained nothing).
    void prefetch_values(std::int64_t block) const {
        const auto *bytes =
            reinterpret_cast<const char *>(storage.values + block * part().num_elements());
        const auto num_bytes = part().num_elements() * static_cast<std::int64_t>(sizeof(KV));
        for (std::int64_t i = 0; i < num_bytes; i += 64) {
            __builtin_prefetch(bytes + i);
        }
    }

    // Whole blocks, as far as they lie in the tile: what is not written there gives scores that
    // nobody reads.
    void score(std::int64_t tile_start, std::int64_t first, std::int64_t end) const {
        if (first >= end) {
            return;
        }
        const std::int64_t block_size = step.block_size;
        first = std::max(tile_start, first / block_size * block_size);
        end = std::min(tile_start + kTileKeys, (end + block_size - 1) / block_size * block_size);
        if (block_size == kLanes) {
            score_vectors(tile_start, first, end);
            return;
        }
        for_each_piece(first, end, [&](auto block, auto offset, auto key, auto count) {
            prefetch_values(block);
            const KV *stored = storage.keys + block * part().num_elements();
            const Matrix<float> products{scores + key - tile_start, kTileKeys};
            multiply(num_queries * heads_per_kv, count, step.head_dim, queries,
                     Matrix<const KV>{stored + offset, block_size}, products, true);
            part().scale_columns(stored, offset, count, num_queries * heads_per_kv, products);
        });
    }

    // Blocks of one vector: several are multiplied together.
    void score_vectors(std::int64_t tile_start, std::int64_t first, std::int64_t end) const {
        const KV *blocks[kTileKeys / kLanes];
        int num_blocks = 0;
        for_each_piece(first, end, [&](auto block, auto, auto, auto) {
            prefetch_values(block);
            blocks[num_blocks++] = storage.keys + block * part().num_elements();
        });
        const std::int64_t num_rows = num_queries * heads_per_kv;
        const Matrix<float> products{scores + first - tile_start, kTileKeys};
        multiply_apart(num_rows, num_blocks, step.head_dim, queries, blocks, kLanes, products);
        for (int i = 0; i < num_blocks; ++i) {
            part().scale_columns(blocks[i], 0, kLanes, num_rows, products.at(0, i * kLanes));
        }
    }

    // Applies scale, cap, slopes and bias to the scores of a query, those that nobody reads included, and
    // log2(e), so that exp2 gives the softmax's exponentials.
    void finish_scores(std::int64_t tile_start, std::int64_t query) const {
        const bool has_cap = step.soft_cap > 0.0f;
        const Floats scale = broadcast(has_cap ? step.scale / step.soft_cap : step.scale * kLog2E);
        const Floats cap = broadcast(step.soft_cap * kLog2E);
        const Floats distance = broadcast(static_cast<float>(tile_start - first_position - query));
        for (std::int64_t head = 0; head < heads_per_kv; ++head) {
            float *row = scores + (query * heads_per_kv + head) * kTileKeys;
            for (std::int64_t i = 0; i < kTileKeys; i += kLanes) {
                const Floats score = multiply(scale, load(row + i));
                store(row + i, has_cap ? multiply(cap, tanh(score)) : score);
            }
            if (step.alibi_slopes != nullptr) {
                const float slope = step.alibi_slopes[kv_head * heads_per_kv + head] * kLog2E;
                for (std::int64_t i = 0; i < kTileKeys; i += kLanes) {
                    const Floats key = add(distance, load(kTileOffsets.data() + i));
                    store(row + i, multiply_add(broadcast(slope), key, load(row + i)));
                }
            }
            if (position_bias.numbers != nullptr) {
                position_bias.add(kv_head * heads_per_kv + head,
                                  tile_start - first_position - query, kLog2E, row);
            }
        }
    }

    // Scores give weights, and the state is prepared for their values.
    void exponentiate(std::int64_t query, Visible keys, SoftmaxState &state) const {
        for (std::int64_t row = query * heads_per_kv; row < (query + 1) * heads_per_kv; ++row) {
            float *of_row = scores + row * kTileKeys;
            std::fill(of_row + keys.end_sinks, of_row + keys.first,
                      -std::numeric_limits<float>::infinity());
            std::fill(of_row + keys.end, of_row + kTileKeys,
                      -std::numeric_limits<float>::infinity());
            weigh(of_row, row, weights + row * kTileKeys, state);
        }
    }

    // Only values that these queries see are read: the others may be NaN, and 0 * NaN is NaN.
    void add_values(std::int64_t tile_start, Visible keys, std::int64_t first_query,
                    std::int64_t end_query, SoftmaxState &state) const {
        add_values(tile_start, 0, keys.end_sinks, first_query, end_query, state);
        add_values(tile_start, keys.first, keys.end, first_query, end_query, state);
    }

    void add_values(std::int64_t tile_start, std::int64_t first, std::int64_t end,
                    std::int64_t first_query, std::int64_t end_query, SoftmaxState &state) const {
        if (first >= end) {
            return;
        }
        const std::int64_t first_row = first_query * heads_per_kv;
        const std::int64_t num_rows = end_query * heads_per_kv - first_row;
        const std::int64_t dim = step.head_dim;
        const Matrix<A> of_rows{weights + first_row * kTileKeys, kTileKeys};
        typename RowPieces<KV>::Piece pieces[kTileKeys];
        std::size_t num_pieces = 0;
        for_each_piece(tile_start + first, tile_start + end,
                       [&](auto block, auto offset, auto key, auto count) {
                           const KV *stored = storage.values + block * part().num_elements();
                           part().scale_columns(stored, offset, count, num_rows,
                                                of_rows.at(0, key - tile_start));
                           pieces[num_pieces++] = {stored + offset * dim, count};
                       });
        multiply(num_rows, dim, Matrix<const A>{of_rows.row(0) + first, kTileKeys},
                 RowPieces<KV>{{pieces, num_pieces}, dim}, state.values().at(first_row, 0), false);
    }
};

}  // namespace loraplex
