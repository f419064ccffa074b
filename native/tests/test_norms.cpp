#include <cmath>

#include "row_cases.h"

namespace loraplex::selftest {
namespace {

constexpr float kEps = 1e-5f;

template <typename T, typename W>
void check_norm(Checks &checks, const T *x, const W *weight, std::int64_t n, const T *output) {
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
template <typename T, typename W>
void check_layer_norm(Checks &checks, const T *x, const W *weight, const W *bias, std::int64_t n,
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

// With the factor 1 to the bit.
template <typename T>
void check_sum(Checks &checks, const std::vector<T> &x, const std::vector<T> &residual,
               float factor, const std::vector<T> &sum) {
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double expected = double{factor} * widen(x[i]) + widen(residual[i]);
        checks.near(widen(sum[i]), expected, 1.01 * kRounding<T> * std::abs(expected) + 2e-7,
                    "sum");
        if (factor == 1.0f) {
            const T rounded = narrow<T>(widen(x[i]) + widen(residual[i]));
            checks.same_bits(&sum[i], &rounded, 1, "sum");
        }
    }
}

// body(T{}, W{}, n) for every dtype and width, with weights of this dtype and of float32
template <typename Body>
void for_each_weight(const Body &body) {
    for_each_case([&]<typename T>(T, std::int64_t n) {
        body(T{}, T{}, n);
        if constexpr (!std::is_same_v<T, float>) {
            body(T{}, float{}, n);
        }
    });
}

}  // namespace

void test_rms_norm(Checks &checks) {
    Random random(7);
    for_each_weight([&]<typename T, typename W>(T, W, std::int64_t n) {
        const std::int64_t stride = n + 3;
        const auto x = random_values<T>(random, kRows * stride);
        const auto weight = random_values<W>(random, n);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            checks.ok(loraplex_rms_norm(pool, count, 1, n, kDtype<T>, x.data() + first * stride,
                                        stride, n, kDtype<W>, weight.data(), kEps,
                                        output.data()));
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
    for_each_weight([&]<typename T, typename W>(T, W, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n);
        const auto residual = random_values<T>(random, kRows * n);
        const auto weight = random_values<W>(random, n);
        std::vector<T> sum(x.size());
        for (const float factor : {1.0f, 0.22f}) {
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> output(static_cast<std::size_t>(count * n));
                checks.ok(loraplex_add_rms_norm(
                    pool, count, n, kDtype<T>, x.data() + first * n, n,
                    residual.data() + first * n, n, factor, kDtype<W>, weight.data(), kEps,
                    output.data(), sum.data() + first * n));
                return output;
            };
            const auto output = run(Pool(1), 0, kRows);
            check_sum(checks, x, residual, factor, sum);
            for (std::int64_t row = 0; row < kRows; ++row) {
                check_norm(checks, sum.data() + row * n, weight.data(), n,
                           output.data() + row * n);
            }
            check_company(checks, n, run);
        }
    });
}

// Three heads per token, with weights of their own or shared.
void test_layer_norm(Checks &checks) {
    Random random(12);
    constexpr std::int64_t kHeads = 3;
    for_each_weight([&]<typename T, typename W>(T, W, std::int64_t n) {
        const std::int64_t head_stride = n + 1, stride = kHeads * head_stride + 2;
        auto x = random_values<T>(random, kRows * stride);
        for (T &value : x) {
            value = narrow<T>(widen(value) + 3.0f);
        }
        const auto weight = random_values<W>(random, kHeads * n);
        const auto bias = random_values<W>(random, kHeads * n);
        for (const std::int64_t weight_stride : {std::int64_t{0}, n}) {
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> output(static_cast<std::size_t>(count * kHeads * n));
                checks.ok(loraplex_layer_norm(pool, count, kHeads, n, kDtype<T>,
                                              x.data() + first * stride, stride, head_stride,
                                              kDtype<W>, weight.data(), bias.data(),
                                              weight_stride, kEps, output.data()));
                return output;
            };
            const auto output = run(Pool(1), 0, kRows);
            for (std::int64_t row = 0; row < kRows * kHeads; ++row) {
                const std::int64_t head = row % kHeads;
                check_layer_norm(checks, x.data() + row / kHeads * stride + head * head_stride,
                                 weight.data() + head * weight_stride,
                                 bias.data() + head * weight_stride, n, output.data() + row * n);
            }
            check_company(checks, kHeads * n, run);
        }
    });
}

void test_add_layer_norm(Checks &checks) {
    Random random(13);
    for_each_weight([&]<typename T, typename W>(T, W, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n);
        const auto residual = random_values<T>(random, kRows * n);
        const auto weight = random_values<W>(random, n);
        const auto bias = random_values<W>(random, n);
        std::vector<T> sum(x.size());
        for (const float factor : {1.0f, 0.22f}) {
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> output(static_cast<std::size_t>(count * n));
                checks.ok(loraplex_add_layer_norm(
                    pool, count, n, kDtype<T>, x.data() + first * n, n,
                    residual.data() + first * n, n, factor, kDtype<W>, weight.data(), bias.data(),
                    kEps, output.data(), sum.data() + first * n));
                return output;
            };
            const auto output = run(Pool(1), 0, kRows);
            check_sum(checks, x, residual, factor, sum);
            for (std::int64_t row = 0; row < kRows; ++row) {
                check_layer_norm(checks, sum.data() + row * n, weight.data(), bias.data(), n,
                                 output.data() + row * n);
            }
            check_company(checks, n, run);
        }
    });
}

void test_add(Checks &checks) {
    Random random(17);
    for_each_case([&]<typename T>(T, std::int64_t n) {
        const auto x = random_values<T>(random, kRows * n);
        const auto residual = random_values<T>(random, kRows * n);
        for (const float factor : {1.0f, -0.7f}) {
            const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                std::vector<T> sum(static_cast<std::size_t>(count * n));
                checks.ok(loraplex_add(pool, count, n, kDtype<T>, x.data() + first * n, n,
                                       residual.data() + first * n, n, factor, sum.data()));
                return sum;
            };
            check_sum(checks, x, residual, factor, run(Pool(1), 0, kRows));
            check_company(checks, n, run);
        }
    });
}

}  // namespace loraplex::selftest
