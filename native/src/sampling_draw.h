// The draw of one row: exact sums of fixed-point weights, and the nucleus by a histogram of them.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>

namespace loraplex {

// The weight of a probability, a whole number: 2^40 for 1. As a float32 it is exact.
inline float whole_weight(float probability) { return std::trunc(probability * 0x1p40f); }

inline std::int64_t as_integer(float weight) { return static_cast<std::int64_t>(weight); }

class RowDraw {
public:
    // Memory for the kept candidates of a row of at most n.
    static std::size_t num_bytes(std::int64_t n) {
        return static_cast<std::size_t>(n) * (sizeof(float) + sizeof(std::int32_t));
    }

    RowDraw(const float *probabilities, std::int64_t count, void *memory)
        : probabilities_(probabilities), count_(count),
          kept_weights_(static_cast<float *>(memory)),
          kept_(reinterpret_cast<std::int32_t *>(kept_weights_ + count)) {}

    // The number of the candidate that is drawn.
    std::int64_t draw(double top_p, double min_p, double uniform) {
        if (top_p >= 1.0 && min_p <= 0.0) {
            return draw_of_all(uniform);
        }
        const Nucleus nucleus = top_p < 1.0 ? find_nucleus(top_p) : Nucleus{0.0f, count_};
        return draw_of_kept(keep(nucleus, min_p), uniform);
    }

private:
    // What stays: weights above `least`, and the first num_ties of those that are equal to it.
    struct Nucleus {
        float least;
        std::int64_t num_ties;
    };

    // Weights from 1 to 2^40, cut by exponent and the five highest bits of the mantissa.
    static constexpr int kBinShift = 18;
    static constexpr std::uint32_t kFirstBin = 0x3f800000u >> kBinShift;
    static constexpr std::uint32_t kNumBins = (0x53800000u >> kBinShift) - kFirstBin + 1;
    static constexpr std::int64_t kPiece = 1024;

    static std::uint32_t bin_of(float weight) {
        return (std::bit_cast<std::uint32_t>(weight) >> kBinShift) - kFirstBin;
    }

    static std::int64_t target_of(double uniform, std::int64_t total) {
        return static_cast<std::int64_t>(uniform * static_cast<double>(total));
    }

    std::int64_t sum_of(std::int64_t first, std::int64_t end) const {
        std::int64_t sum = 0;
        for (std::int64_t i = first; i < end; ++i) {
            sum += as_integer(whole_weight(probabilities_[i]));
        }
        return sum;
    }

    std::int64_t draw_of_all(double uniform) const {
        std::int64_t total = 0;
        for (std::int64_t first = 0; first < count_; first += kPiece) {
            total += sum_of(first, std::min(count_, first + kPiece));
        }
        std::int64_t left = target_of(uniform, total), first = 0;
        for (; first + kPiece < count_; first += kPiece) {
            const std::int64_t sum = sum_of(first, first + kPiece);
            if (sum > left) {
                break;
            }
            left -= sum;
        }
        for (std::int64_t i = first;; ++i) {
            left -= as_integer(whole_weight(probabilities_[i]));
            if (left < 0) {
                return i;
            }
        }
    }

    Nucleus find_nucleus(double top_p) {
        std::int64_t sums[kNumBins] = {};
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            const float weight = whole_weight(probabilities_[i]);
            if (weight >= 1.0f) {
                sums[bin_of(weight)] += as_integer(weight);
                total += as_integer(weight);
            }
        }
        const double wanted = top_p * static_cast<double>(total);
        std::int64_t above = 0;
        std::uint32_t bin = kNumBins - 1;
        while (static_cast<double>(above + sums[bin]) < wanted) {
            above += sums[bin--];
        }
        return within_bin(bin, above, wanted);
    }

    // `above`: the sum of the weights in higher bins, less than what is wanted.
    Nucleus within_bin(std::uint32_t bin, std::int64_t above, double wanted) {
        float *end = kept_weights_;
        for (std::int64_t i = 0; i < count_; ++i) {
            const float weight = whole_weight(probabilities_[i]);
            if (weight >= 1.0f && bin_of(weight) == bin) {
                *end++ = weight;
            }
        }
        std::sort(kept_weights_, end, std::greater<>());
        Nucleus nucleus{kept_weights_[0], 0};
        for (const float *weight = kept_weights_;
             weight < end && static_cast<double>(above) < wanted; ++weight) {
            nucleus.num_ties = *weight == nucleus.least ? nucleus.num_ties + 1 : 1;
            nucleus.least = *weight;
            above += as_integer(*weight);
        }
        return nucleus;
    }

    // How many are kept; they and their weights are in kept_ and kept_weights_.
    std::int64_t keep(Nucleus nucleus, double min_p) {
        const auto largest = static_cast<double>(whole_weight(1.0f));
        const double threshold = min_p > 0.0 ? min_p * largest : 0.0;
        std::int64_t num_kept = 0;
        for (std::int64_t i = 0; i < count_; ++i) {
            const float weight = whole_weight(probabilities_[i]);
            if (weight < nucleus.least || (weight == nucleus.least && --nucleus.num_ties < 0) ||
                static_cast<double>(weight) < threshold) {
                continue;
            }
            kept_[num_kept] = static_cast<std::int32_t>(i);
            kept_weights_[num_kept++] = weight;
        }
        return num_kept;
    }

    std::int64_t draw_of_kept(std::int64_t num_kept, double uniform) const {
        std::int64_t total = 0;
        for (std::int64_t i = 0; i < num_kept; ++i) {
            total += as_integer(kept_weights_[i]);
        }
        std::int64_t left = target_of(uniform, total);
        std::int64_t i = -1;
        do {
            left -= as_integer(kept_weights_[++i]);
        } while (left >= 0);
        return kept_[i];
    }

    const float *probabilities_;
    std::int64_t count_;
    float *kept_weights_;
    std::int32_t *kept_;
};

}  // namespace loraplex
