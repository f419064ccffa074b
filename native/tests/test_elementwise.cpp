#include <algorithm>
#include <cmath>

#include "row_cases.h"

namespace loraplex::selftest {

void test_rotary(Checks &checks) {
    Random random(9);
    constexpr std::int64_t kHeads = 3;
    constexpr std::int64_t kKvHeads = 2;
    struct Sizes {
        std::int64_t head_dim, rotary_dim;
    };
    const auto check_case = [&]<typename T>(T, Sizes sizes, bool is_interleaved) {
        const auto [head_dim, rotary_dim] = sizes;
        const std::int64_t half = rotary_dim / 2;
        const std::int64_t width = (kHeads + kKvHeads) * head_dim;
        const auto x = random_values<T>(random, kRows * width);
        const auto cos = random_values<float>(random, kRows * half);
        const auto sin = random_values<float>(random, kRows * half);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> heads(x.begin() + first * width, x.begin() + (first + count) * width);
            checks.ok(loraplex_rotary(pool, count, kHeads, kKvHeads, head_dim, rotary_dim,
                                      is_interleaved ? 1 : 0, cos.data() + first * half,
                                      sin.data() + first * half, kDtype<T>, heads.data(), width,
                                      heads.data() + kHeads * head_dim, width));
            return heads;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t i = 0; i < kRows * width; ++i) {
            const std::int64_t place = i % head_dim;
            const auto at = static_cast<std::size_t>(i);
            if (place >= rotary_dim) {
                checks.same_bits(&output[at], &x[at], 1, "beyond the rotation");
                continue;
            }
            const std::int64_t pair = is_interleaved ? place / 2 : place % half;
            const bool is_first = is_interleaved ? place % 2 == 0 : place < half;
            const T *first = x.data() + i - place + (is_interleaved ? 2 * pair : pair);
            const double a = widen(first[0]), b = widen(first[is_interleaved ? 1 : half]);
            const auto angle = static_cast<std::size_t>(i / width * half + pair);
            const double c = cos[angle], s = sin[angle];
            const double expected = is_first ? a * c - b * s : b * c + a * s;
            checks.near(widen(output[at]), expected,
                        1.01 * kRounding<T> * std::abs(expected) + 2e-7, "element");
        }
        check_company(checks, width, run);
    };
    for_each_dtype([&]<typename T>(T) {
        for (const Sizes sizes : {Sizes{2, 2}, {20, 20}, {64, 64}, {74, 74}, {80, 20}, {150, 142}}) {
            check_case(T{}, sizes, false);
            check_case(T{}, sizes, true);
        }
    });
}

void test_multiply(Checks &checks) {
    Random random(19);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const std::int64_t stride = n + 3;
        const auto x = random_values<T>(random, kRows * stride);
        const auto factor = random_values<T>(random, kRows * n);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_multiply(pool, count, n, kDtype<T>, x.data() + first * stride,
                                        stride, factor.data() + first * n, n, output.data()));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t i = 0; i < kRows * n; ++i) {
            const T expected = narrow<T>(widen(x[static_cast<std::size_t>(i / n * stride + i % n)]) *
                                         widen(factor[static_cast<std::size_t>(i)]));
            checks.same_bits(&output[static_cast<std::size_t>(i)], &expected, 1, "element");
        }
        check_company(checks, n, run);
    });
}

void test_scale(Checks &checks) {
    Random random(18);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n, 12.0);
        for (const float soft_cap : {0.0f, 2.0f}) {
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> values(x.begin() + first * n, x.begin() + (first + count) * n);
                checks.ok(loraplex_scale(pool, count, n, kDtype<T>, 0.7f, soft_cap, values.data(),
                                         n));
                return values;
            };
            const auto output = run(Pool(1), 0, kRows);
            for (std::size_t i = 0; i < x.size(); ++i) {
                const double scaled = double{0.7f} * widen(x[i]);
                const double cap = soft_cap;
                const double expected = cap > 0.0 ? cap * std::tanh(scaled / cap) : scaled;
                checks.near(widen(output[i]), expected,
                            (1.01 * kRounding<T> + 8e-7) * std::abs(expected) + 0x1p-24,
                            "element");
            }
            check_company(checks, n, run);
        }
    });
}

double activated(loraplex_activation activation, double x) {
    switch (activation) {
        case LORAPLEX_GELU:
            return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
        case LORAPLEX_GELU_TANH:
            return x / (1.0 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        case LORAPLEX_RELU:
            return std::max(x, 0.0);
        case LORAPLEX_SQUARED_RELU:
            return std::max(x, 0.0) * std::max(x, 0.0);
        case LORAPLEX_CLAMPED_SWIGLU:
            return std::min(x, 7.0) / (1.0 + std::exp(-1.702 * std::min(x, 7.0)));
        default:
            return x / (1.0 + std::exp(-x));
    }
}

void test_activate_and_gate(Checks &checks) {
    Random random(14);
    for (const loraplex_activation activation :
         {LORAPLEX_GELU, LORAPLEX_GELU_TANH, LORAPLEX_RELU, LORAPLEX_SQUARED_RELU, LORAPLEX_SILU,
          LORAPLEX_CLAMPED_SWIGLU}) {
        const bool is_clamped = activation == LORAPLEX_CLAMPED_SWIGLU;
        for_each_case([&]<typename T>(T, std::int64_t n) {
            const auto x = random_values<T>(random, kRows * 2 * n, 12.0);
            // The rows of activate are the first halves.
            const auto run = [&](bool is_gate) {
                return [&, is_gate](const Pool &pool, std::int64_t first, std::int64_t count) {
                    std::vector<T> output(static_cast<std::size_t>(count * n));
                    checks.ok((is_gate ? loraplex_gate : loraplex_activate)(
                        pool, count, n, kDtype<T>, activation, x.data() + first * 2 * n, 2 * n,
                        output.data()));
                    return output;
                };
            };
            for (const bool is_gate : {false, true}) {
                if (is_clamped && !is_gate) {
                    continue;  // it is a gate only
                }
                const auto output = run(is_gate)(Pool(1), 0, kRows);
                for (std::int64_t i = 0; i < kRows * n; ++i) {
                    const T *row = x.data() + i / n * 2 * n;
                    const double second = is_gate ? widen(row[n + i % n]) : 1.0;
                    const double up =
                        is_clamped ? std::clamp(second, -7.0, 7.0) + 1.0 : second;
                    const double expected = activated(activation, widen(row[i % n])) * up;
                    checks.near(widen(output[static_cast<std::size_t>(i)]), expected,
                                (1.01 * kRounding<T> + 2e-6) * std::abs(expected) +
                                    2e-7 * std::max(1.0, std::abs(up)),
                                "element");
                }
                check_company(checks, n, run(is_gate));
            }
        });
    }
}

void test_xielu(Checks &checks) {
    Random random(15);
    constexpr float kPositive = 0.7f, kNegative = 1.3f;
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const std::int64_t stride = n + 3;
        const auto x = random_values<T>(random, kRows * stride, 12.0);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_xielu(pool, count, n, kDtype<T>, kPositive, kNegative,
                                     x.data() + first * stride, stride, output.data()));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t i = 0; i < kRows * n; ++i) {
            const double value = widen(x[static_cast<std::size_t>(i / n * stride + i % n)]);
            const double curve = value > 0.0 ? double{kPositive} * value * value
                                             : kNegative * (std::expm1(value) - value);
            const double expected = curve + value / 2.0;
            checks.near(widen(output[static_cast<std::size_t>(i)]), expected,
                        1.01 * kRounding<T> * std::abs(expected) + 1e-6 * std::abs(value),
                        "element");
        }
        check_company(checks, n, run);
    });
}

void test_take_rows(Checks &checks) {
    Random random(11);
    constexpr std::int64_t kTable = 50;
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const std::int64_t stride = n + 5;
        const auto table = random_values<T>(random, kTable * stride);
        std::vector<std::int64_t> indices;
        for (std::int64_t row = 0; row < kRows; ++row) {
            indices.push_back(random.below(kTable));
        }
        for (const int num_threads : {1, 3}) {
            std::vector<T> output(static_cast<std::size_t>(kRows * n));
            checks.ok(loraplex_take_rows(Pool(num_threads), kRows, n, kDtype<T>, table.data(),
                                         stride, indices.data(), output.data()));
            for (std::int64_t row = 0; row < kRows; ++row) {
                checks.same_bits(output.data() + row * n,
                                 table.data() + indices[static_cast<std::size_t>(row)] * stride, n,
                                 "row");
            }
        }
    });
}

}  // namespace loraplex::selftest
