// Linear recurrences with decay, as one formula for each position (kernels/recurrence.py): the delta
// rule writes what its keys did not find, others write their values as they are.
//
// A tile is a row and some value heads of one key head. It goes through the row's tokens in segments
// that end at borders. Each sum is over keys or positions in ascending order, whatever the segments
// and the tiles are, so a position has the same bits in a prompt and alone. Everything is one
// product: rows of inputs times rows of a matrix, added in the order of those.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "exponential.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"
#include "outer_product.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {

struct RecurrenceSizes {
    std::int64_t num_keys;
    std::int64_t num_values;
    std::int64_t key_size;
    std::int64_t value_size;
    std::int64_t every;
    std::int64_t block_size;

    std::int64_t values_per_key() const { return num_values / num_keys; }
};

// kernels/states.py
struct StateRows {
    std::int64_t num_tokens;
    std::int64_t num_rows;
    const std::int64_t *query_start_loc;
    const std::int64_t *positions;
    const std::int64_t *reads;
    const std::int64_t *writes;
    const std::int64_t *places;
    const std::int64_t *table_starts;
    const std::int64_t *tables;
};

// What is stored of the positions since the last border. Keys lie with the positions of a block side
// by side, so that one vector has several: [blocks, num_keys, key_size, block_size].
struct RecurrenceStorage {
    float *keys;
    float *values;  // [blocks, block_size, num_values, value_size]: what was written
    float *sums;    // [blocks, block_size, num_values]: of the decays
    float *states;  // [blocks, num_values, key_size, value_size]
};

inline constexpr std::int64_t kSegmentTokens = 16;
inline constexpr std::int64_t kMaxTileHeads = 4;
inline constexpr int kProductVectors = 4;
// With as many sums as the registers of the instruction set take.
inline constexpr int kProductRows = kLanes == 16 ? 6 : 2;

constexpr std::int64_t round_up(std::int64_t size, std::int64_t multiple) {
    return (size + multiple - 1) / multiple * multiple;
}

// sums[row][columns] += inputs[row][i] * row_of(i)[columns], for i from 0 on. The last vector has
// kCount lanes, if kVectors is 1; else all are whole.
template <int kRows, int kVectors, typename RowOf>
inline void product_block(const float *inputs, std::int64_t input_stride, std::int64_t depth,
                          const RowOf &row_of, std::int64_t first, int count, float *sums,
                          std::int64_t sum_stride) {
    Floats totals[kRows][kVectors];
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
            totals[row][vector] =
                load_up_to(sums + row * sum_stride + first + vector * kLanes,
                           kVectors == 1 ? count : kLanes);
        }
    }
    for (std::int64_t i = 0; i < depth; ++i) {
        const float *matrix_row = row_of(i) + first;
        outer_product(
            totals, [&](int row) { return broadcast(inputs[row * input_stride + i]); },
            [&](int vector) {
                return load_up_to(matrix_row + vector * kLanes, kVectors == 1 ? count : kLanes);
            },
            [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
    }
#pragma GCC unroll 16
    for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 16
        for (int vector = 0; vector < kVectors; ++vector) {
            store_up_to(sums + row * sum_stride + first + vector * kLanes, totals[row][vector],
                        kVectors == 1 ? count : kLanes);
        }
    }
}

template <int kVectors, typename RowOf>
inline void product_rows(const float *inputs, std::int64_t input_stride, std::int64_t num_rows,
                         std::int64_t depth, const RowOf &row_of, std::int64_t first, int count,
                         float *sums, std::int64_t sum_stride) {
    std::int64_t row = 0;
    const auto run = [&]<int kRows>(std::integral_constant<int, kRows>) {
        for (; row + kRows <= num_rows; row += kRows) {
            product_block<kRows, kVectors>(inputs + row * input_stride, input_stride, depth,
                                           row_of, first, count, sums + row * sum_stride,
                                           sum_stride);
        }
    };
    run(std::integral_constant<int, kProductRows>());
    run(std::integral_constant<int, 2>());
    run(std::integral_constant<int, 1>());
}

// sums [num_rows, num_columns] += inputs [num_rows, depth] times a matrix of `depth` rows.
template <typename RowOf>
inline void add_product(const float *inputs, std::int64_t input_stride, std::int64_t num_rows,
                        std::int64_t depth, const RowOf &row_of, std::int64_t num_columns,
                        float *sums, std::int64_t sum_stride) {
    std::int64_t first = 0;
    const auto run = [&]<int kVectors>(std::integral_constant<int, kVectors>) {
        for (; first + kVectors * kLanes <= num_columns; first += kVectors * kLanes) {
            product_rows<kVectors>(inputs, input_stride, num_rows, depth, row_of, first, kLanes,
                                   sums, sum_stride);
        }
    };
    if constexpr (kLanes == 16) {
        // For one token long rows of the matrix are read at once.
        if (num_rows <= 2) {
            run(std::integral_constant<int, 2 * kProductVectors>());
        }
    }
    run(std::integral_constant<int, kProductVectors>());
    for (; first < num_columns; first += kLanes) {
        const int count = static_cast<int>(std::min<std::int64_t>(kLanes, num_columns - first));
        product_rows<1>(inputs, input_stride, num_rows, depth, row_of, first, count, sums,
                        sum_stride);
    }
}

// Memory of a tile.
struct RecurrenceScratch {
    explicit RecurrenceScratch(const RecurrenceSizes &sizes)
        : key_stride(round_up(sizes.every, kLanes)),
          value_stride(round_up(sizes.value_size, kLanes)),
          state_size(sizes.key_size * sizes.value_size),
          key_count(sizes.key_size * key_stride),
          query_count(2 * kSegmentTokens * sizes.key_size),
          product_count(2 * kSegmentTokens * key_stride),
          value_count(2 * kSegmentTokens * value_stride),
          head_count(sizes.every * value_stride + key_stride + 2 * state_size) {}

    std::size_t num_bytes(std::int64_t num_heads) const {
        return static_cast<std::size_t>(2 * key_count + query_count + 2 * product_count +
                                        value_count + key_stride + num_heads * head_count) *
                   sizeof(float) +
               static_cast<std::size_t>(num_heads * key_stride) * sizeof(const float *);
    }

    std::int64_t key_stride;
    std::int64_t value_stride;
    std::int64_t state_size;
    std::int64_t key_count;
    std::int64_t query_count;
    std::int64_t product_count;
    std::int64_t value_count;
    std::int64_t head_count;
};

// One value head of a tile.
struct RecurrenceHead {
    const float *state;  // nullptr: zero
    float *spare_states[2];
    float *own_written;     // [every, value_stride]
    const float **written;  // [every]: what was written, in the storage or by the row itself
    float *sums;            // [every]
};

// One row and some value heads of a key head. Inputs has, for tokens [first, first + count):
//   read_keys(key head, first, count, keys and queries by turns [2 * count, key_size])
//   read_gates(value head, first, count, decays [count], strengths [count])
//   read_value(value head, token, value [value_size])
//   write_output(value head, token, output [value_size])
// and kHasStrength, without which there are no strengths.
template <typename Inputs>
class RecurrenceTile {
public:
    RecurrenceTile(const RecurrenceSizes &sizes, const StateRows &rows,
                   const RecurrenceStorage &storage, const Inputs &inputs, std::int64_t key_head,
                   std::int64_t first_head, std::int64_t num_heads, void *memory)
        : sizes_(sizes),
          rows_(rows),
          storage_(storage),
          inputs_(inputs),
          layout_(sizes),
          key_head_(key_head),
          first_head_(first_head),
          num_heads_(num_heads) {
        const float **pointers = static_cast<const float **>(memory);
        float *next = reinterpret_cast<float *>(pointers + num_heads * layout_.key_stride);
        const auto take = [&](std::int64_t count) {
            float *taken = next;
            next += count;
            return taken;
        };
        keys_ = take(layout_.key_count);
        scaled_keys_ = take(layout_.key_count);
        queries_ = take(layout_.query_count);
        products_ = take(layout_.product_count);
        factored_ = take(layout_.product_count);
        values_ = take(layout_.value_count);
        factors_ = take(layout_.key_stride);
        for (std::int64_t i = 0; i < num_heads; ++i) {
            heads_[i].written = pointers + i * layout_.key_stride;
            heads_[i].own_written = take(sizes.every * layout_.value_stride);
            heads_[i].sums = take(layout_.key_stride);
            heads_[i].spare_states[0] = take(layout_.state_size);
            heads_[i].spare_states[1] = take(layout_.state_size);
        }
    }

    void run(std::int64_t row) {
        const std::int64_t end = rows_.query_start_loc[row + 1];
        std::int64_t token = rows_.query_start_loc[row];
        begin(row, token);
        while (token < end) {
            const std::int64_t count =
                std::min({kSegmentTokens, end - token, sizes_.every - offset_});
            compute(token, count);
            token += count;
            offset_ += count;
            if (offset_ == sizes_.every) {
                pass_border(rows_.writes[token - 1], token < end);
            }
        }
    }

private:
    // Of keys and queries by turns, those that read: without strengths it is queries alone.
    static constexpr std::int64_t kFirstRow = Inputs::kHasStrength ? 0 : 1;
    static constexpr std::int64_t kRowStep = Inputs::kHasStrength ? 1 : 2;

    void begin(std::int64_t row, std::int64_t token) {
        const std::int64_t start = rows_.positions[token];
        const std::int64_t read = rows_.reads[row];
        offset_ = start % sizes_.every;
        for (std::int64_t i = 0; i < num_heads_; ++i) {
            heads_[i].state =
                read < 0 ? nullptr
                         : storage_.states +
                               (read * sizes_.num_values + first_head_ + i) * layout_.state_size;
        }
        // Borders are those of blocks, too.
        const std::int64_t *block = rows_.tables + rows_.table_starts[row] +
                                    (start - offset_) / sizes_.block_size;
        for (std::int64_t first = 0; first < offset_; first += sizes_.block_size) {
            load_block(*block++ * sizes_.block_size, first,
                       std::min(sizes_.block_size, offset_ - first));
        }
    }

    // place: of the position `first` since the border, the first one of its block
    void load_block(std::int64_t place, std::int64_t first, std::int64_t count) {
        const float *from = stored_key(place);
        for (std::int64_t i = 0; i < sizes_.key_size; ++i) {
            std::memcpy(keys_ + i * layout_.key_stride + first, from + i * sizes_.block_size,
                        static_cast<std::size_t>(count) * sizeof(float));
        }
        for (std::int64_t j = 0; j < count; ++j) {
            const float *sums = storage_.sums + (place + j) * sizes_.num_values + first_head_;
            for (std::int64_t i = 0; i < num_heads_; ++i) {
                heads_[i].sums[first + j] = sums[i];
                heads_[i].written[first + j] = stored_value(place + j, i);
            }
        }
    }

    // Of the first position of a block, or within one: element i of its key is i * block_size on.
    float *stored_key(std::int64_t place) const {
        const std::int64_t block = place / sizes_.block_size;
        return storage_.keys +
               (block * sizes_.num_keys + key_head_) * sizes_.key_size * sizes_.block_size +
               place % sizes_.block_size;
    }

    float *stored_value(std::int64_t place, std::int64_t head) const {
        return storage_.values + (place * sizes_.num_values + first_head_ + head) *
                                     sizes_.value_size;
    }

    void compute(std::int64_t token, std::int64_t count) {
        inputs_.read_keys(key_head_, token, count, queries_);
        for (std::int64_t t = 0; t < count; ++t) {
            const float *key = queries_ + 2 * t * sizes_.key_size;
            const std::int64_t place = rows_.places[token + t];
            // One of the key head's tiles stores it; each has its own copy.
            const bool is_stored = place >= 0 && first_head_ % sizes_.values_per_key() == 0;
            float *stored = is_stored ? stored_key(place) : nullptr;
            for (std::int64_t i = 0; i < sizes_.key_size; ++i) {
                keys_[i * layout_.key_stride + offset_ + t] = key[i];
                if (is_stored) {
                    stored[i * sizes_.block_size] = key[i];
                }
            }
        }
        // In whole vectors: what the lanes behind the last key give is not read.
        const std::int64_t num_known = round_up(offset_ + count, kLanes);
        for (std::int64_t row = 0; row < 2 * count; ++row) {
            std::memset(products_ + row * layout_.key_stride, 0,
                        static_cast<std::size_t>(num_known) * sizeof(float));
        }
        add_product(
            queries_ + kFirstRow * sizes_.key_size, kRowStep * sizes_.key_size,
            2 * count / kRowStep, sizes_.key_size,
            [&](std::int64_t i) { return keys_ + i * layout_.key_stride; }, num_known,
            products_ + kFirstRow * layout_.key_stride, kRowStep * layout_.key_stride);
        for (std::int64_t head = 0; head < num_heads_; ++head) {
            compute_head(head, token, count);
        }
    }

    void compute_head(std::int64_t head, std::int64_t token, std::int64_t count) {
        RecurrenceHead &own = heads_[head];
        float decays[kSegmentTokens];
        float strengths[kSegmentTokens];
        inputs_.read_gates(first_head_ + head, token, count, decays, strengths);
        float sum = offset_ > 0 ? own.sums[offset_ - 1] : 0.0f;
        for (std::int64_t t = 0; t < count; ++t) {
            sum += decays[t];
            own.sums[offset_ + t] = sum;
        }
        read_state(own, count);
        factor_products(own, count);
        add_written(own, kFirstRow, 2 * count / kRowStep, 0, offset_);
        for (std::int64_t t = 0; t < count; ++t) {
            write_value(head, token, t, strengths[t]);
            add_written(own, 2 * t + 1, 1, offset_, t + 1);
            inputs_.write_output(first_head_ + head, token + t,
                                 values_ + (2 * t + 1) * layout_.value_stride);
        }
    }

    // values = e^sum times what keys and queries read of the state
    void read_state(const RecurrenceHead &own, std::int64_t count) {
        const std::int64_t num_values = 2 * count * layout_.value_stride;
        std::memset(values_, 0, static_cast<std::size_t>(num_values) * sizeof(float));
        if (own.state == nullptr) {
            return;
        }
        add_product(
            queries_ + kFirstRow * sizes_.key_size, kRowStep * sizes_.key_size,
            2 * count / kRowStep, sizes_.key_size,
            [&](std::int64_t i) { return own.state + i * sizes_.value_size; }, sizes_.value_size,
            values_ + kFirstRow * layout_.value_stride, kRowStep * layout_.value_stride);
        for (std::int64_t t = 0; t < count; ++t) {
            const Floats factor = broadcast(exp2(own.sums[offset_ + t] * kLog2E));
            float *pair = values_ + 2 * t * layout_.value_stride;
            for (std::int64_t i = 0; i < 2 * layout_.value_stride; i += kLanes) {
                store(pair + i, multiply(factor, load(pair + i)));
            }
        }
    }

    // factored = products, times the decay from the position that was written to the one that reads
    void factor_products(const RecurrenceHead &own, std::int64_t count) {
        for (std::int64_t t = 0; t < count; ++t) {
            const Floats sum = broadcast(own.sums[offset_ + t]);
            const float *pair = products_ + 2 * t * layout_.key_stride;
            float *to = factored_ + 2 * t * layout_.key_stride;
            for (std::int64_t j = 0; j <= offset_ + t; j += kLanes) {
                const Floats factor =
                    exp2(multiply(subtract(sum, load(own.sums + j)), broadcast(kLog2E)));
                if constexpr (Inputs::kHasStrength) {
                    store(to + j, multiply(load(pair + j), factor));
                }
                const std::int64_t of_query = layout_.key_stride + j;
                store(to + of_query, multiply(load(pair + of_query), factor));
            }
        }
    }

    // Adds, to some rows of values that read, what was written at positions [first, first + depth).
    void add_written(const RecurrenceHead &own, std::int64_t row, std::int64_t num_rows,
                     std::int64_t first, std::int64_t depth) {
        add_product(
            factored_ + row * layout_.key_stride + first, kRowStep * layout_.key_stride, num_rows,
            depth, [&](std::int64_t j) { return own.written[first + j]; }, sizes_.value_size,
            values_ + row * layout_.value_stride, kRowStep * layout_.value_stride);
    }

    void write_value(std::int64_t head, std::int64_t token, std::int64_t t, float own_strength) {
        RecurrenceHead &own = heads_[head];
        float *to = own.own_written + (offset_ + t) * layout_.value_stride;
        own.written[offset_ + t] = to;
        inputs_.read_value(first_head_ + head, token + t, to);
        if constexpr (Inputs::kHasStrength) {
            add_written(own, 2 * t, 1, offset_, t);
            const float *found = values_ + 2 * t * layout_.value_stride;
            const Floats strength = broadcast(own_strength);
            for (std::int64_t i = 0; i < layout_.value_stride; i += kLanes) {
                store(to + i, multiply(strength, subtract(load(to + i), load(found + i))));
            }
        }
        const std::int64_t place = rows_.places[token + t];
        if (place >= 0) {
            std::memcpy(stored_value(place, head), to,
                        static_cast<std::size_t>(sizes_.value_size) * sizeof(float));
            storage_.sums[place * sizes_.num_values + first_head_ + head] = own.sums[offset_ + t];
        }
    }

    // target: block of the state; -1: none is written.
    void pass_border(std::int64_t target, bool is_read_again) {
        for (std::int64_t head = 0; head < num_heads_ && (target >= 0 || is_read_again); ++head) {
            RecurrenceHead &own = heads_[head];
            float *to = own.spare_states[0];
            std::swap(own.spare_states[0], own.spare_states[1]);
            if (target >= 0) {
                to = storage_.states +
                     (target * sizes_.num_values + first_head_ + head) * layout_.state_size;
            }
            update_state(head, to);
            own.state = to;
        }
        offset_ = 0;
    }

    // to = e^sum state + the sum over j of e^(sum - sum_j) key_j written_j^T
    void update_state(std::int64_t head, float *to) {
        const RecurrenceHead &own = heads_[head];
        const float last = own.sums[sizes_.every - 1];
        for (std::int64_t j = 0; j < sizes_.every; j += kLanes) {
            const Floats since = subtract(broadcast(last), load(own.sums + j));
            store(factors_ + j, exp2(multiply(since, broadcast(kLog2E))));
        }
        for (std::int64_t i = 0; i < sizes_.key_size; ++i) {
            const std::int64_t first = i * layout_.key_stride;
            for (std::int64_t j = 0; j < sizes_.every; j += kLanes) {
                store(scaled_keys_ + first + j,
                      multiply(load(keys_ + first + j), load(factors_ + j)));
            }
        }
        const Floats factor = broadcast(exp2(last * kLog2E));
        for_each_vector(layout_.state_size, [&](std::int64_t first, int count) {
            store_up_to(to + first,
                        own.state == nullptr
                            ? zeros()
                            : multiply(factor, load_up_to(own.state + first, count)),
                        count);
        });
        add_product(
            scaled_keys_, layout_.key_stride, sizes_.key_size, sizes_.every,
            [&](std::int64_t j) { return own.written[j]; }, sizes_.value_size, to,
            sizes_.value_size);
    }

    const RecurrenceSizes &sizes_;
    const StateRows &rows_;
    const RecurrenceStorage &storage_;
    const Inputs &inputs_;
    const RecurrenceScratch layout_;
    const std::int64_t key_head_;
    const std::int64_t first_head_;
    const std::int64_t num_heads_;

    float *keys_;         // [key_size, key_stride]: those since the border, side by side
    float *scaled_keys_;  // the same, times the decay to the border
    float *queries_;      // [2 * tokens, key_size]: key and query of each token of the segment
    float *products_;     // [2 * tokens, key_stride]: theirs with the keys
    float *factored_;     // the same, times the decay since the key
    float *values_;       // [2 * tokens, value_stride]: what keys and queries read
    float *factors_;      // [key_stride]
    RecurrenceHead heads_[kMaxTileHeads];
    std::int64_t offset_ = 0;  // of the next token since the border
};

// Runs all tiles.
template <typename Inputs>
void run_recurrence(loraplex_pool &pool, const RecurrenceSizes &sizes, const StateRows &rows,
                    const RecurrenceStorage &storage, const Inputs &inputs) {
    const std::int64_t per_key = sizes.values_per_key();
    // Value heads that share a key share its products, as long as all threads have tiles.
    std::int64_t tile_heads = std::min(kMaxTileHeads, per_key);
    while (tile_heads > 1 &&
           rows.num_rows * sizes.num_keys * divide_up(per_key, tile_heads) < pool.num_threads()) {
        tile_heads = divide_up(tile_heads, 2);
    }
    const std::int64_t tiles_per_key = divide_up(per_key, tile_heads);
    const std::int64_t tiles_per_row = sizes.num_keys * tiles_per_key;
    const std::size_t num_bytes = RecurrenceScratch(sizes).num_bytes(tile_heads);
    const Op op(pool);
    char *memory = static_cast<char *>(pool.worker_scratch(num_bytes));
    const std::size_t stride = loraplex_pool::worker_scratch_stride(num_bytes);
    pool.parallel_for_tiles(rows.num_rows * tiles_per_row, [&](std::int64_t tile, int worker) {
        const std::int64_t row = tile / tiles_per_row;
        if (rows.query_start_loc[row] == rows.query_start_loc[row + 1]) {
            return;
        }
        const std::int64_t key_head = tile % tiles_per_row / tiles_per_key;
        const std::int64_t first = tile % tiles_per_key * tile_heads;
        RecurrenceTile<Inputs>(sizes, rows, storage, inputs, key_head, key_head * per_key + first,
                               std::min(tile_heads, per_key - first),
                               memory + static_cast<std::size_t>(worker) * stride)
            .run(row);
    });
}

// Tokens behind the last row are padding: their outputs are 0.
template <typename T>
void clear_padding(const StateRows &rows, std::int64_t size, T *output) {
    const std::int64_t first = rows.query_start_loc[rows.num_rows];
    std::fill(output + first * size, output + rows.num_tokens * size, T{});
}

}  // namespace loraplex
