// The k largest values of a row without a sort: maxima of small groups, then the few groups that
// can hold them.
//
// Floats are compared as integers in the same order, so that the compiler makes vectors of the
// loops; -0 becomes +0 first. At least k values are as large as the kth largest group maximum, so
// nothing below it needs a look.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
#include <limits>

namespace loraplex {

using OrderedBits = std::int32_t;

inline OrderedBits ordered_bits(float value) {
    const auto bits = std::bit_cast<std::int32_t>(value + 0.0f);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

inline float from_ordered_bits(OrderedBits bits) {
    return std::bit_cast<float>(bits ^ (bits >> 31 & 0x7fffffff));
}

struct Candidate {
    OrderedBits bits;
    std::int32_t index;
};

inline constexpr std::int64_t kGroupSize = 64;

class LargestValues {
public:
    static std::int64_t num_groups(std::int64_t n) { return (n + kGroupSize - 1) / kGroupSize; }

    // Memory that an object needs for rows of n values.
    static std::size_t num_bytes(std::int64_t n) {
        return static_cast<std::size_t>(2 * num_groups(n)) * sizeof(OrderedBits) +
               static_cast<std::size_t>(n) * (sizeof(Candidate) + sizeof(OrderedBits));
    }

    LargestValues(const float *row, std::int64_t n, void *memory)
        : row_(row), n_(n), num_groups_(num_groups(n)),
          candidates_(static_cast<Candidate *>(memory)),
          ordering_(reinterpret_cast<OrderedBits *>(candidates_ + n)),
          maxima_(ordering_ + n + num_groups_) {
        for (std::int64_t group = 0; group < num_groups_; ++group) {
            const std::int64_t end = std::min(n, (group + 1) * kGroupSize);
            maxima_[group] = end == (group + 1) * kGroupSize
                                 ? maximum_of(row + group * kGroupSize, kGroupSize)
                                 : maximum_of(row + group * kGroupSize, end - group * kGroupSize);
        }
        largest_ = *std::max_element(maxima_, maxima_ + num_groups_);
    }

    float largest() const { return from_ordered_bits(largest_); }

    // How many are larger than this value.
    std::int64_t num_above(float value) const {
        const OrderedBits bits = ordered_bits(value);
        std::int64_t count = 0;
        for_each_group_from(bits, [&](std::int64_t first, std::int64_t end) {
            for (std::int64_t i = first; i < end; ++i) {
                count += ordered_bits(row_[i]) > bits ? 1 : 0;
            }
        });
        return count;
    }

    struct Candidates {
        Candidate *begin;
        Candidate *end;
    };

    // The k largest and those equal to the least of them, by rising index; 1 <= k <= n. What the
    // last call returned is lost.
    Candidates at_least_kth(std::int64_t k) {
        const OrderedBits bound = k > num_groups_ ? std::numeric_limits<OrderedBits>::min()
                                                  : kth(maxima_, num_groups_, k);
        Candidate *end = candidates_;
        for_each_group_from(bound, [&](std::int64_t first, std::int64_t last) {
            for (std::int64_t i = first; i < last; ++i) {
                const OrderedBits bits = ordered_bits(row_[i]);
                if (bits >= bound) {
                    *end++ = {bits, static_cast<std::int32_t>(i)};
                }
            }
        });
        if (end - candidates_ == k) {
            return {candidates_, end};
        }
        std::transform(candidates_, end, ordering_, [](Candidate c) { return c.bits; });
        const OrderedBits least = kth(ordering_, end - candidates_, k);
        end = std::remove_if(candidates_, end, [&](Candidate c) { return c.bits < least; });
        return {candidates_, end};
    }

private:
    static OrderedBits maximum_of(const float *values, std::int64_t n) {
        OrderedBits largest = std::numeric_limits<OrderedBits>::min();
        for (std::int64_t i = 0; i < n; ++i) {
            largest = std::max(largest, ordered_bits(values[i]));
        }
        return largest;
    }

    // The kth largest. Works in `ordering_`, which may be where the values are.
    OrderedBits kth(const OrderedBits *values, std::int64_t n, std::int64_t k) {
        OrderedBits *copy = ordering_;
        if (values != copy) {
            std::copy(values, values + n, copy);
        }
        std::nth_element(copy, copy + k - 1, copy + n, std::greater<>());
        return copy[k - 1];
    }

    // body(first, end) of the groups that have a value of at least `bound`.
    template <typename Body>
    void for_each_group_from(OrderedBits bound, const Body &body) const {
        for (std::int64_t group = 0; group < num_groups_; ++group) {
            if (maxima_[group] >= bound) {
                body(group * kGroupSize, std::min(n_, (group + 1) * kGroupSize));
            }
        }
    }

    const float *row_;
    std::int64_t n_;
    std::int64_t num_groups_;
    Candidate *candidates_;    // [n]
    OrderedBits *ordering_;    // [n + num_groups]
    OrderedBits *maxima_;      // [num_groups]
    OrderedBits largest_ = 0;
};

}  // namespace loraplex
