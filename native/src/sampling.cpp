// Sampling: rows are tiles, each of them the work of one thread.
#include "loraplex/sampling.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

#include "exponential.h"
#include "largest_values.h"
#include "loraplex/dtype.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"
#include "sampling_draw.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kNormalizerPiece = 1024;  // a multiple of kNormalizerChains
constexpr int kNormalizerChains = 16;            // as many on every instruction set

void check(bool is_valid, const char *op) {
    if (!is_valid) {
        throw std::invalid_argument(op);
    }
}

bool is_valid(const loraplex_logits &logits) {
    return logits.num_rows >= 0 && logits.n >= 1 &&
           logits.n <= std::numeric_limits<std::int32_t>::max();
}

const float *row_of(const loraplex_logits &logits, std::int64_t i) {
    return logits.values + logits.rows[i] * logits.stride;
}

// body(row, memory of num_bytes) for each row.
template <typename Body>
void for_each_row_with_memory(loraplex_pool &pool, std::int64_t num_rows, std::size_t num_bytes,
                              const Body &body) {
    const Op op(pool);
    auto *memory = static_cast<std::byte *>(pool.worker_scratch(num_bytes));
    const std::size_t stride = loraplex_pool::worker_scratch_stride(num_bytes);
    pool.parallel_for_tiles(num_rows, [&](std::int64_t row, int worker) {
        body(row, memory + static_cast<std::size_t>(worker) * stride);
    });
}

// kGroupSize values from `first` on as float32; what is behind the row's end is -infinity.
template <typename T>
void widen_group(const T *row, std::int64_t n, std::int64_t first, float *group) {
    const std::int64_t size = std::min(kGroupSize, n - first);
    std::int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        store(group + i, load(row + first + i));
    }
    if (i < kGroupSize) {
        const auto count = static_cast<int>(size - i);
        if (count > 0) {
            store_first(group + i, load_first(row + first + i, count), count);
        }
        std::fill(group + size, group + kGroupSize, -std::numeric_limits<float>::infinity());
    }
}

struct Largest {
    float value;
    std::int64_t index;
};

// The largest value and the first place where it is; NaN if the row has one.
template <typename T>
Largest find_largest(const T *row, std::int64_t n) {
    alignas(64) float group[kGroupSize];
    std::uint32_t magnitude = 0;  // as bits: a NaN is above infinity
    OrderedBits largest = std::numeric_limits<OrderedBits>::min();
    std::int64_t best = 0;
    for (std::int64_t first = 0; first < n; first += kGroupSize) {
        widen_group(row, n, first, group);
        OrderedBits of_group = std::numeric_limits<OrderedBits>::min();
        for (const float value : group) {
            of_group = std::max(of_group, ordered_bits(value));
            magnitude = std::max(magnitude, std::bit_cast<std::uint32_t>(value) & 0x7fffffffu);
        }
        if (of_group > largest) {
            largest = of_group;
            best = first;
        }
    }
    if (magnitude > 0x7f800000u) {
        return {std::numeric_limits<float>::quiet_NaN(), 0};
    }
    widen_group(row, n, best, group);
    const float *found = std::find_if(group, group + kGroupSize, [&](float value) {
        return ordered_bits(value) == largest;
    });
    return {from_ordered_bits(largest), best + (found - group)};
}

// Sum of e^(value - largest).
double normalizer(const float *row, std::int64_t n, float largest) {
    double total = 0.0;
    for (std::int64_t first = 0; first < n; first += kNormalizerPiece) {
        float chains[kNormalizerChains] = {};
        const std::int64_t end = std::min(n, first + kNormalizerPiece);
        for (std::int64_t i = first; i < end; i += kLanes) {
            const auto count = static_cast<int>(std::min<std::int64_t>(kLanes, end - i));
            const Floats values = count == kLanes ? load(row + i) : load_first(row + i, count);
            const Floats below = subtract(values, broadcast(largest));
            float terms[kLanes];
            store(terms, exp2(multiply(below, broadcast(kLog2E))));
            std::fill(terms + count, terms + kLanes, 0.0f);
            float *chain = chains + (i - first) % kNormalizerChains;
            store(chain, add(load(chain), load(terms)));
        }
        for (const float chain : chains) {
            total += static_cast<double>(chain);
        }
    }
    return total;
}

struct Logprobs {
    float *logprob;
    std::int64_t *rank;
    std::int64_t *top_indices;
    float *top_logprobs;
};

void find_logprobs(const float *row, std::int64_t n, std::int64_t chosen, std::int64_t num_top,
                   void *memory, Logprobs result) {
    LargestValues values(row, n, memory);
    const auto largest = static_cast<double>(values.largest());
    const double log_total = std::log(normalizer(row, n, values.largest()));
    const auto logprob = [&](float value) {
        return static_cast<float>(static_cast<double>(value) - largest - log_total);
    };
    *result.logprob = logprob(row[chosen]);
    *result.rank = values.num_above(row[chosen]) + 1;
    if (num_top == 0) {
        return;
    }
    const auto [begin, end] = values.at_least_kth(num_top);
    std::partial_sort(begin, begin + num_top, end, [](const Candidate &a, const Candidate &b) {
        return a.bits > b.bits || (a.bits == b.bits && a.index < b.index);
    });
    for (std::int64_t i = 0; i < num_top; ++i) {
        result.top_indices[i] = begin[i].index;
        result.top_logprobs[i] = logprob(from_ordered_bits(begin[i].bits));
    }
}

std::int64_t scale_all(const float *row, std::int64_t n, float largest, float temperature,
                       float *scaled) {
    for (std::int64_t i = 0; i < n; ++i) {
        scaled[i] = (row[i] - largest) / temperature;
    }
    return n;
}

std::int64_t scale_largest(LargestValues &values, std::int64_t k, float temperature,
                           std::int32_t *indices, float *scaled) {
    const auto [begin, end] = values.at_least_kth(k);
    for (const Candidate *candidate = begin; candidate < end; ++candidate) {
        *indices++ = candidate->index;
        *scaled++ = (from_ordered_bits(candidate->bits) - values.largest()) / temperature;
    }
    return end - begin;
}

constexpr std::int64_t kWordBits = 32;

// -infinity where the bit of `word` is 0: without a branch, which random bits would mislead.
void mask(float *values, std::int64_t count, std::uint32_t word) {
    const auto masked = std::bit_cast<std::uint32_t>(-std::numeric_limits<float>::infinity());
    for (std::int64_t i = 0; i < count; ++i) {
        const std::uint32_t stays = 0u - (word >> i & 1u);
        const auto bits = std::bit_cast<std::uint32_t>(values[i]);
        values[i] = std::bit_cast<float>((bits & stays) | (masked & ~stays));
    }
}

void mask_row(float *values, std::int64_t n, const std::int32_t *words) {
    const std::int64_t num_whole = n / kWordBits;
    for (std::int64_t i = 0; i < num_whole; ++i) {
        mask(values + i * kWordBits, kWordBits, static_cast<std::uint32_t>(words[i]));
    }
    if (n % kWordBits != 0) {
        mask(values + num_whole * kWordBits, n % kWordBits,
             static_cast<std::uint32_t>(words[num_whole]));
    }
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_argmax(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                loraplex_dtype dtype, const void *logits, int64_t stride,
                                const int64_t *rows, int64_t *indices, float *maxima) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "argmax");
        return for_dtype(dtype, [&]<typename T>(T) {
            for_each_row(*pool, num_rows, n, [&](std::int64_t i) {
                const T *row = static_cast<const T *>(logits) + rows[i] * stride;
                const Largest largest = find_largest(row, n);
                indices[i] = largest.index;
                maxima[i] = largest.value;
            });
            return static_cast<loraplex_status>(LORAPLEX_OK);
        });
    });
}

loraplex_status loraplex_scale_candidates(loraplex_pool *pool, const loraplex_logits *logits,
                                          const int64_t *top_k, const float *temperatures,
                                          int64_t *counts, int32_t *indices, float *scaled) {
    using namespace loraplex;
    return guarded([&] {
        check(is_valid(*logits), "scale_candidates");
        const std::int64_t n = logits->n;
        const std::size_t num_bytes = LargestValues::num_bytes(n);
        for_each_row_with_memory(*pool, logits->num_rows, num_bytes, [&](auto i, void *memory) {
            const float *row = row_of(*logits, i);
            LargestValues values(row, n, memory);
            counts[i] = top_k[i] > 0 && top_k[i] < n
                            ? scale_largest(values, top_k[i], temperatures[i], indices + i * n,
                                            scaled + i * n)
                            : scale_all(row, n, values.largest(), temperatures[i], scaled + i * n);
        });
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_draw(loraplex_pool *pool, int64_t num_rows, int64_t n,
                              const int64_t *counts, const int32_t *indices,
                              const float *probabilities, const double *top_p,
                              const double *min_p, const double *uniforms, int64_t *drawn) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "draw");
        const std::size_t num_bytes = RowDraw::num_bytes(n);
        for_each_row_with_memory(*pool, num_rows, num_bytes, [&](auto i, void *memory) {
            RowDraw row(probabilities + i * n, counts[i], memory);
            const std::int64_t candidate = row.draw(top_p[i], min_p[i], uniforms[i]);
            drawn[i] = counts[i] == n ? candidate : indices[i * n + candidate];
        });
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_top_logprobs(loraplex_pool *pool, const loraplex_logits *logits,
                                      const int64_t *chosen, int64_t num_top, float *logprobs,
                                      int64_t *ranks, int64_t *top_indices,
                                      float *top_logprobs) {
    using namespace loraplex;
    return guarded([&] {
        check(is_valid(*logits) && num_top >= 0 && num_top <= logits->n, "top_logprobs");
        const std::size_t num_bytes = LargestValues::num_bytes(logits->n);
        for_each_row_with_memory(*pool, logits->num_rows, num_bytes, [&](auto i, void *memory) {
            find_logprobs(row_of(*logits, i), logits->n, chosen[i], num_top, memory,
                          {logprobs + i, ranks + i, top_indices + i * num_top,
                           top_logprobs + i * num_top});
        });
        return LORAPLEX_OK;
    });
}

loraplex_status loraplex_apply_bitmask(loraplex_pool *pool, int64_t num_rows, int64_t n,
                                       const int64_t *rows, const int32_t *words,
                                       int64_t words_stride, float *logits, int64_t stride) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && n >= 1, "apply_bitmask");
        for_each_row(*pool, num_rows, n, [&](std::int64_t row) {
            mask_row(logits + rows[row] * stride, n, words + row * words_stride);
        });
        return LORAPLEX_OK;
    });
}
