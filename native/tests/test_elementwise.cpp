#include <algorithm>
#include <cmath>

#include "loraplex/elementwise.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kRows = 21;
constexpr std::int64_t kWidths[] = {1, 7, 64, 203, 1028};
constexpr float kEps = 1e-5f;

template <typename T>
void check_norm(Checks &checks, const T *x, const T *weight, std::int64_t n, const T *output) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        squares += double{widen(x[i])} * widen(x[i]);
    }
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + double{kEps});
    for (std::int64_t i = 0; i < n; ++i) {
        const double expected = widen(x[i]) * factor * widen(weight[i]);
        checks.near(widen(output[i]), expected,
                    (1.01 * kRounding<T> + sum_error(n)) * std::abs(expected) + 0x1p-24, "norm");
    }
}

// The rows of float32 are far from 0: what is lost by not centring them shows.
template <typename T>
void check_layer_norm(Checks &checks, const T *x, const T *weight, const T *bias, std::int64_t n,
                      const T *output) {
    double mean = 0.0, variance = 0.0;
    for (std::int64_t i = 0; i < n; ++i) {
        mean += double{widen(x[i])} / static_cast<double>(n);
    }
    for (std::int64_t i = 0; i < n; ++i) {
        variance += std::pow(widen(x[i]) - mean, 2) / static_cast<double>(n);
    }
    const double factor = 1.0 / std::sqrt(variance + double{kEps});
    for (std::int64_t i = 0; i < n; ++i) {
        const double scaled = (widen(x[i]) - mean) * factor * widen(weight[i]);
        const double expected = scaled + widen(bias[i]);
        // The mean's own rounding is relative to the largest values, not to what is left.
        const double slack = 1e-6 * (1.0 + std::abs(mean)) * factor * std::abs(widen(weight[i]));
        checks.near(widen(output[i]), expected,
                    1.01 * kRounding<T> * std::abs(expected) +
                        sum_error(n) * std::abs(scaled) + slack + 1e-6,
                    "layer norm");
    }
}

// run(pool, first row, number of rows) -> the rows' results: the same for any threads and company.
template <typename Run>
void check_company(Checks &checks, std::int64_t width, const Run &run) {
    const auto all = run(Pool(1), 0, kRows);
    for (const int num_threads : {2, 3}) {
        checks.same_bits(run(Pool(num_threads), 0, kRows).data(), all.data(), kRows * width,
                         "threads");
    }
    for (const std::int64_t row : {std::int64_t{0}, kRows / 2, kRows - 1}) {
        checks.same_bits(run(Pool(1), row, 1).data(), all.data() + row * width, width, "alone");
    }
}

// body(T{}, n) for every dtype and width
template <typename Body>
void for_each_case(const Body &body) {
    for_each_dtype([&]<typename T>(T) {
        for (const std::int64_t n : kWidths) {
            body(T{}, n);
        }
    });
}

}  // namespace

void test_rms_norm(Checks &checks) {
    Random random(7);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const std::int64_t stride = n + 3;
        const auto x = random_values<T>(random, kRows * stride);
        const auto weight = random_values<T>(random, n);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_rms_norm(pool, count, 1, n, kDtype<T>, x.data() + first * stride,
                                        stride, n, weight.data(), kEps, output.data()));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t row = 0; row < kRows; ++row) {
            check_norm(checks, x.data() + row * stride, weight.data(), n, output.data() + row * n);
        }
        check_company(checks, n, run);
    });
}

void test_add_rms_norm(Checks &checks) {
    Random random(8);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n);
        const auto residual = random_values<T>(random, kRows * n);
        const auto weight = random_values<T>(random, n);
        std::vector<T> sum(x.size());
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_add_rms_norm(pool, count, n, kDtype<T>, x.data() + first * n, n,
                                            residual.data() + first * n, n, weight.data(), kEps,
                                            output.data(), sum.data() + first * n));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const T expected = narrow<T>(widen(x[i]) + widen(residual[i]));
            checks.same_bits(&sum[i], &expected, 1, "sum");
        }
        for (std::int64_t row = 0; row < kRows; ++row) {
            check_norm(checks, sum.data() + row * n, weight.data(), n, output.data() + row * n);
        }
        check_company(checks, n, run);
    });
}

void test_layer_norm(Checks &checks) {
    Random random(12);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const std::int64_t stride = n + 3;
        auto x = random_values<T>(random, kRows * stride);
        for (T &value : x) {
            value = narrow<T>(widen(value) + 3.0f);
        }
        const auto weight = random_values<T>(random, n);
        const auto bias = random_values<T>(random, n);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_layer_norm(pool, count, n, kDtype<T>, x.data() + first * stride,
                                          stride, weight.data(), bias.data(), kEps,
                                          output.data()));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t row = 0; row < kRows; ++row) {
            check_layer_norm(checks, x.data() + row * stride, weight.data(), bias.data(), n,
                             output.data() + row * n);
        }
        check_company(checks, n, run);
    });
}

void test_add_layer_norm(Checks &checks) {
    Random random(13);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n);
        const auto residual = random_values<T>(random, kRows * n);
        const auto weight = random_values<T>(random, n);
        const auto bias = random_values<T>(random, n);
        std::vector<T> sum(x.size());
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_add_layer_norm(pool, count, n, kDtype<T>, x.data() + first * n, n,
                                              residual.data() + first * n, n, weight.data(),
                                              bias.data(), kEps, output.data(),
                                              sum.data() + first * n));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::size_t i = 0; i < x.size(); ++i) {
            const T expected = narrow<T>(widen(x[i]) + widen(residual[i]));
            checks.same_bits(&sum[i], &expected, 1, "sum");
        }
        for (std::int64_t row = 0; row < kRows; ++row) {
            check_layer_norm(checks, sum.data() + row * n, weight.data(), bias.data(), n,
                             output.data() + row * n);
        }
        check_company(checks, n, run);
    });
}

void test_rotary(Checks &checks) {
    Random random(9);
    constexpr std::int64_t kHeads = 3;
    constexpr std::int64_t kKvHeads = 2;
    for_each_dtype([&]<typename T>(T) {
        for (const std::int64_t head_dim : {2, 20, 64, 74}) {
            const std::int64_t half = head_dim / 2;
            const std::int64_t width = (kHeads + kKvHeads) * head_dim;
            const auto x = random_values<T>(random, kRows * width);
            const auto cos = random_values<float>(random, kRows * half);
            const auto sin = random_values<float>(random, kRows * half);
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> heads(x.begin() + first * width,
                                     x.begin() + (first + count) * width);
                checks.ok(loraplex_rotary(pool, count, kHeads, kKvHeads, head_dim,
                                          cos.data() + first * half, sin.data() + first * half,
                                          kDtype<T>, heads.data(), width,
                                          heads.data() + kHeads * head_dim, width));
                return heads;
            };
            const auto output = run(Pool(1), 0, kRows);
            for (std::int64_t i = 0; i < kRows * width; ++i) {
                const std::int64_t place = i % head_dim;
                const std::int64_t angle = i / width * half + place % half;
                const T *pair = x.data() + i - place + place % half;
                const double a = widen(pair[0]), b = widen(pair[half]);
                const double c = cos[static_cast<std::size_t>(angle)];
                const double s = sin[static_cast<std::size_t>(angle)];
                const double expected = place < half ? a * c - b * s : b * c + a * s;
                checks.near(widen(output[static_cast<std::size_t>(i)]), expected,
                            1.01 * kRounding<T> * std::abs(expected) + 2e-7, "element");
            }
            check_company(checks, width, run);
        }
    });
}

void test_silu_mul(Checks &checks) {
    Random random(10);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * 2 * n, 30.0);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_silu_mul(pool, count, n, kDtype<T>, x.data() + first * 2 * n, 2 * n,
                                        output.data()));
            return output;
        };
        const auto output = run(Pool(1), 0, kRows);
        for (std::int64_t i = 0; i < kRows * n; ++i) {
            const T *row = x.data() + i / n * 2 * n;
            const double gate = widen(row[i % n]);
            const double expected = gate / (1.0 + std::exp(-gate)) * widen(row[n + i % n]);
            checks.near(widen(output[static_cast<std::size_t>(i)]), expected,
                        (1.01 * kRounding<T> + 2e-6) * std::abs(expected) + 0x1p-24, "element");
        }
        check_company(checks, n, run);
    });
}

void test_activate(Checks &checks) {
    Random random(14);
    const auto expected_of = [](loraplex_activation activation, double x) {
        switch (activation) {
            case LORAPLEX_GELU:
                return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
            case LORAPLEX_GELU_TANH:
                return x / (1.0 + std::exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
            default:
                return std::max(x, 0.0);
        }
    };
    for (const loraplex_activation activation : {LORAPLEX_GELU, LORAPLEX_GELU_TANH, LORAPLEX_RELU}) {
        for_each_case([&]<typename T>(T, std::int64_t n) {
            const auto x = random_values<T>(random, kRows * n, 12.0);
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> output(static_cast<std::size_t>(count * n));
                checks.ok(loraplex_activate(pool, count, n, kDtype<T>, activation,
                                            x.data() + first * n, n, output.data()));
                return output;
            };
            const auto output = run(Pool(1), 0, kRows);
            for (std::size_t i = 0; i < x.size(); ++i) {
                const double expected = expected_of(activation, widen(x[i]));
                checks.near(widen(output[i]), expected,
                            (1.01 * kRounding<T> + 2e-6) * std::abs(expected) + 2e-7, "element");
            }
            check_company(checks, n, run);
        });
    }
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
