#include <algorithm>
#include <cmath>
#include <limits>

#include "loraplex/sampling.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kAll = 7;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// A few rows of a matrix of logits; many values are equal, some are -inf.
struct Logits {
    std::int64_t n;
    std::int64_t stride;
    std::vector<float> values;
    std::vector<std::int64_t> rows = {4, 0, 6, 3, 1};

    Logits(Random &random, std::int64_t size) : n(size), stride(size + 3) {
        for (std::int64_t i = 0; i < kAll * stride; ++i) {
            const bool is_masked = i % stride != 0 && random.below(9) == 0;
            values.push_back(is_masked ? -kInfinity : std::floor(static_cast<float>(
                                                          random.uniform(-40.0, 40.0))) * 0.25f);
        }
    }

    loraplex_logits view() const {
        return {values.data(), stride, n, static_cast<std::int64_t>(rows.size()), rows.data()};
    }

    const float *row(std::size_t i) const { return values.data() + rows[i] * stride; }

    // The indices of a row, the likeliest first; of equal ones the first.
    std::vector<std::int64_t> order(std::size_t i) const {
        std::vector<std::int64_t> indices;
        for (std::int64_t index = 0; index < n; ++index) {
            indices.push_back(index);
        }
        const float *values_of_row = row(i);
        std::stable_sort(indices.begin(), indices.end(), [&](std::int64_t a, std::int64_t b) {
            return values_of_row[a] > values_of_row[b];
        });
        return indices;
    }
};

template <typename Body>
void for_each_logits(std::uint64_t seed, const Body &body) {
    Random random(seed);
    for (const std::int64_t n : {1, 5, 64, 1003, 40003}) {
        const Logits logits(random, n);
        for (const int num_threads : {1, 2, 3}) {
            body(logits, Pool(num_threads), random);
        }
    }
}

// What loraplex_draw is to give, from the candidates of one row.
std::int64_t draw_reference(const std::vector<std::int64_t> &indices,
                            const std::vector<float> &probabilities, double top_p, double min_p,
                            double uniform) {
    std::vector<double> weights;  // whole numbers below 2^53: sums are exact
    for (const float probability : probabilities) {
        weights.push_back(std::floor(double{probability} * 0x1p40));
    }
    std::vector<std::size_t> order(weights.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return weights[a] > weights[b]; });
    double total = 0.0;
    for (const double weight : weights) {
        total += weight;
    }
    std::vector<bool> stays(weights.size(), top_p >= 1.0);
    double sum = 0.0;
    for (std::size_t i = 0; i < order.size() && top_p < 1.0; ++i) {
        stays[order[i]] = true;
        sum += weights[order[i]];
        if (sum >= top_p * total) {
            break;
        }
    }
    double left = 0.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        stays[i] = stays[i] && (min_p <= 0.0 || weights[i] >= min_p * weights[order[0]]);
        left += stays[i] ? weights[i] : 0.0;
    }
    double up_to = 0.0;
    for (std::size_t i = 0; i < weights.size(); ++i) {
        up_to += stays[i] ? weights[i] : 0.0;
        if (stays[i] && up_to > uniform * left) {
            return indices[i];
        }
    }
    return -1;
}

}  // namespace

void test_argmax(Checks &checks) {
    for_each_logits(12, [&](const Logits &logits, const Pool &pool, Random &) {
        for_each_dtype([&]<typename T>(T) {
            std::vector<T> values;  // quarters up to 10: exact in any dtype
            for (const float value : logits.values) {
                values.push_back(narrow<T>(value));
            }
            const std::size_t num_rows = logits.rows.size();
            std::vector<std::int64_t> indices(num_rows);
            std::vector<float> maxima(num_rows);
            checks.ok(loraplex_argmax(pool, static_cast<std::int64_t>(num_rows), logits.n,
                                      kDtype<T>, values.data(), logits.stride, logits.rows.data(),
                                      indices.data(), maxima.data()));
            for (std::size_t i = 0; i < num_rows; ++i) {
                const std::int64_t expected = logits.order(i).front();
                checks.expect(indices[i] == expected, "index");
                checks.expect(maxima[i] == logits.row(i)[expected], "maximum");
            }
        });
    });
}

void test_candidates_and_draw(Checks &checks) {
    for_each_logits(13, [&](const Logits &logits, const Pool &pool, Random &random) {
        const auto view = logits.view();
        const std::size_t num_rows = logits.rows.size();
        const auto size = static_cast<std::size_t>(view.n) * num_rows;
        const std::vector<std::int64_t> top_k = {0, 1, 3, 50, 200000};
        std::vector<float> temperatures, scaled(size), probabilities(size);
        std::vector<double> top_p, min_p, uniforms;
        for (std::size_t i = 0; i < num_rows; ++i) {
            temperatures.push_back(static_cast<float>(random.uniform(0.3, 3.0)));
            top_p.push_back(i % 2 == 0 ? 1.0 : random.uniform(0.2, 0.95));
            min_p.push_back(i % 3 == 0 ? 0.0 : random.uniform(0.0, 0.3));
            uniforms.push_back(random.uniform(0.0, 1.0));
        }
        std::vector<std::int64_t> counts(num_rows), drawn(num_rows);
        std::vector<std::int32_t> indices(size);
        checks.ok(loraplex_scale_candidates(pool, &view, top_k.data(), temperatures.data(),
                                            counts.data(), indices.data(), scaled.data()));
        for (std::size_t i = 0; i < size; ++i) {
            probabilities[i] = std::exp(scaled[i]);
        }
        checks.ok(loraplex_draw(pool, view.num_rows, view.n, counts.data(), indices.data(),
                                probabilities.data(), top_p.data(), min_p.data(), uniforms.data(),
                                drawn.data()));
        for (std::size_t i = 0; i < num_rows; ++i) {
            const auto order = logits.order(i);
            const float *row = logits.row(i);
            const bool takes_all = top_k[i] == 0 || top_k[i] >= view.n;
            const std::int64_t num_likely = takes_all ? view.n : top_k[i];
            const float least = row[order[static_cast<std::size_t>(num_likely) - 1]];
            std::vector<std::int64_t> expected;
            std::vector<float> weights;
            const std::size_t first = i * static_cast<std::size_t>(view.n);
            for (std::int64_t index = 0; index < view.n; ++index) {
                if (row[index] >= least) {
                    const std::size_t at = first + expected.size();
                    const float value = (row[index] - row[order[0]]) / temperatures[i];
                    checks.expect(takes_all || indices[at] == index, "candidate");
                    checks.expect(scaled[at] == value, "scaled");
                    weights.push_back(probabilities[at]);
                    expected.push_back(index);
                }
            }
            checks.expect(counts[i] == static_cast<std::int64_t>(expected.size()), "count");
            checks.expect(drawn[i] ==
                              draw_reference(expected, weights, top_p[i], min_p[i], uniforms[i]),
                          "drawn");
        }
    });
}

void test_top_logprobs(Checks &checks) {
    for_each_logits(14, [&](const Logits &logits, const Pool &pool, Random &random) {
        const auto view = logits.view();
        const std::size_t num_rows = logits.rows.size();
        const std::int64_t num_top = std::min<std::int64_t>(view.n, 20);
        std::vector<std::int64_t> chosen, ranks(num_rows);
        for (std::size_t i = 0; i < num_rows; ++i) {
            chosen.push_back(random.below(view.n));
        }
        std::vector<float> logprobs(num_rows);
        std::vector<std::int64_t> top(num_rows * static_cast<std::size_t>(num_top));
        std::vector<float> top_logprobs(top.size());
        checks.ok(loraplex_top_logprobs(pool, &view, chosen.data(), num_top, logprobs.data(),
                                        ranks.data(), top.data(), top_logprobs.data()));
        for (std::size_t i = 0; i < num_rows; ++i) {
            const auto order = logits.order(i);
            const float *row = logits.row(i);
            double sum = 0.0;
            std::int64_t num_larger = 0;
            for (std::int64_t index = 0; index < view.n; ++index) {
                sum += std::exp(double{row[index]} - row[order[0]]);
                num_larger += row[index] > row[chosen[i]] ? 1 : 0;
            }
            const auto logprob = [&](std::int64_t index) {
                return row[index] - row[order[0]] - std::log(sum);
            };
            const auto expect_logprob = [&](float actual, std::int64_t index) {
                const double expected = logprob(index);
                const double tolerance = 1e-5 * (1.0 + std::abs(expected));
                checks.expect(std::isinf(expected) ? actual == -kInfinity
                                                   : std::abs(actual - expected) <= tolerance,
                              "logprob");
            };
            checks.expect(ranks[i] == num_larger + 1, "rank");
            expect_logprob(logprobs[i], chosen[i]);
            for (std::size_t t = 0; t < static_cast<std::size_t>(num_top); ++t) {
                const std::size_t at = i * static_cast<std::size_t>(num_top) + t;
                checks.expect(top[at] == order[t], "top index");
                expect_logprob(top_logprobs[at], order[t]);
            }
        }
    });
}

void test_apply_bitmask(Checks &checks) {
    for_each_logits(15, [&](const Logits &logits, const Pool &pool, Random &random) {
        const std::int64_t num_words = (logits.n + 31) / 32 + 1;
        std::vector<std::int32_t> words;
        for (std::int64_t i = 0; i < kAll * num_words; ++i) {
            words.push_back(static_cast<std::int32_t>(random.bits()));
        }
        std::vector<std::int64_t> rows;  // the last first
        for (std::int64_t i = 0; i < kAll; ++i) {
            rows.push_back(kAll - 1 - i);
        }
        auto values = logits.values;
        checks.ok(loraplex_apply_bitmask(pool, kAll, logits.n, rows.data(), words.data(), num_words,
                                         values.data(), logits.stride));
        for (std::int64_t i = 0; i < kAll * logits.stride; ++i) {
            const std::int64_t index = i % logits.stride;
            const auto at = static_cast<std::size_t>(i);
            bool stays = true;
            if (index < logits.n) {
                const std::int64_t row = kAll - 1 - i / logits.stride;
                const std::int64_t word = row * num_words + index / 32;
                const auto bits = static_cast<std::uint32_t>(words[static_cast<std::size_t>(word)]);
                stays = (bits >> index % 32 & 1u) != 0;
            }
            checks.expect(values[at] == (stays ? logits.values[at] : -kInfinity), "element");
        }
    });
}

}  // namespace loraplex::selftest
