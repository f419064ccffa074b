#include <algorithm>
#include <cmath>

#include "loraplex/linear.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kMaxRows = 140;
constexpr std::int64_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 33, kMaxRows};

struct Size {
    std::int64_t out_features;
    std::int64_t in_features;
    std::int64_t group_size;
    std::int64_t num_blocks = 1;

    std::int64_t block_inputs() const { return in_features / num_blocks; }
    std::int64_t block_groups() const { return (block_inputs() + group_size - 1) / group_size; }
};

// A weight as a test knows it: what each element is worth, and the packed bytes.
struct Weight {
    loraplex_weight_kind kind;
    Size size;
    std::vector<double> values;  // [out, in]
    std::vector<std::byte> packed;
};

template <typename W>
Weight pack(Checks &checks, loraplex_weight_kind kind, Size size, const std::vector<W> &weight,
            const std::vector<float> &scales, std::vector<double> values) {
    const std::int64_t num_bytes = loraplex_packed_weight_bytes(
        kind, size.group_size, size.num_blocks, size.out_features, size.in_features);
    checks.expect(num_bytes > 0, "packed bytes");
    Weight result{kind, size, std::move(values),
                  std::vector<std::byte>(static_cast<std::size_t>(num_bytes))};
    const std::int64_t num_groups =
        scales.empty() ? 0 : static_cast<std::int64_t>(scales.size()) / size.out_features;
    checks.ok(loraplex_pack_weight(Pool(2), kind, size.group_size, size.num_blocks, weight.data(),
                                   size.in_features, scales.empty() ? nullptr : scales.data(),
                                   num_groups, size.out_features, size.in_features,
                                   result.packed.data()));
    return result;
}

template <typename W>
Weight float_weight(Checks &checks, Random &random, Size size) {
    const auto weight = random_values<W>(random, size.out_features * size.in_features);
    std::vector<double> values;
    for (const W value : weight) {
        values.push_back(widen(value));
    }
    return pack(checks, kDtype<W>, size, weight, {}, std::move(values));
}

Weight quantized_weight(Checks &checks, Random &random, loraplex_weight_kind kind, Size size) {
    const bool is_int8 = kind == LORAPLEX_WEIGHT_INT8;
    const std::int64_t num_groups = size.num_blocks * size.block_groups();
    std::vector<std::int8_t> weight;
    std::vector<float> scales;
    std::vector<double> values;
    for (std::int64_t i = 0; i < size.out_features * num_groups; ++i) {
        scales.push_back(static_cast<float>(random.uniform(0.001, 0.1)));
    }
    for (std::int64_t i = 0; i < size.out_features * size.in_features; ++i) {
        weight.push_back(static_cast<std::int8_t>(is_int8 ? random.below(255) - 127
                                                          : random.below(16) - 8));
        const std::int64_t input = i % size.in_features;
        const std::int64_t group = input / size.block_inputs() * size.block_groups() +
                                   input % size.block_inputs() / size.group_size;
        const auto scale = static_cast<std::size_t>(i / size.in_features * num_groups + group);
        values.push_back(double{scales[scale]} * weight.back());
    }
    return pack(checks, kind, size, weight, scales, std::move(values));
}

// [num_rows, out] of the first rows of x.
template <typename T>
std::vector<T> apply(Checks &checks, loraplex_pool *pool, const Weight &weight, const T *x,
                     std::int64_t num_rows, const float *bias) {
    const Size size = weight.size;
    std::vector<T> y(static_cast<std::size_t>(num_rows * size.out_features));
    checks.ok(loraplex_linear(pool, weight.kind, size.group_size, size.num_blocks, kDtype<T>, x,
                              size.in_features, num_rows, weight.packed.data(), size.out_features,
                              size.in_features, bias, nullptr, y.data(), size.out_features));
    return y;
}

// Half a step of the inputs' 16 bits, for every weight.
template <typename T>
double input_rounding(const Weight &weight, const T *x, const double *w) {
    if (weight.size.group_size == 0) {
        return 0.0;
    }
    double largest = 0.0;
    double sum = 0.0;
    for (std::int64_t i = 0; i < weight.size.in_features; ++i) {
        largest = std::max(largest, std::abs(double{widen(x[i])}));
        sum += std::abs(w[i]);
    }
    return 0.51 * largest / 32767.0 * sum;
}

template <typename T>
void check_values(Checks &checks, const Weight &weight, const T *x, const float *bias,
                  const std::vector<T> &y) {
    const std::int64_t out_features = weight.size.out_features;
    const std::int64_t in_features = weight.size.in_features;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const T *row = x + static_cast<std::int64_t>(i) / out_features * in_features;
        const std::int64_t output = static_cast<std::int64_t>(i) % out_features;
        const double *w = weight.values.data() + output * in_features;
        double sum = bias == nullptr ? 0.0 : bias[output];
        double magnitudes = std::abs(sum);
        for (std::int64_t k = 0; k < in_features; ++k) {
            sum += widen(row[k]) * w[k];
            magnitudes += std::abs(widen(row[k]) * w[k]);
        }
        checks.near(widen(y[i]), sum,
                    sum_error(in_features) * magnitudes + kRounding<T> * std::abs(sum) * 1.01 +
                        input_rounding(weight, row, w) + 0x1p-24,
                    "output " + std::to_string(output) + " of " + std::to_string(out_features) +
                        "x" + std::to_string(in_features));
    }
}

template <typename T>
void test_weight(Checks &checks, Random &random, const Weight &weight) {
    const auto x = random_values<T>(random, kMaxRows * weight.size.in_features);
    const auto bias = random_values<float>(random, weight.size.out_features);
    const Pool pools[] = {Pool(1), Pool(2), Pool(3)};
    const auto all = apply(checks, pools[2], weight, x.data(), kMaxRows, bias.data());
    check_values(checks, weight, x.data(), bias.data(), all);
    check_values(checks, weight, x.data(), static_cast<const float *>(nullptr),
                 apply(checks, pools[1], weight, x.data(), 5, nullptr));
    for (const Pool &pool : pools) {
        for (const bool may_use_all : {true, false}) {
            checks.ok(loraplex_pool_limit_cpu_features(pool, may_use_all ? ~std::uint64_t{0} : 0));
            for (const std::int64_t num_rows : kRowCounts) {
                const auto y = apply(checks, pool, weight, x.data(), num_rows, bias.data());
                checks.same_bits(y.data(), all.data(), num_rows * weight.size.out_features,
                                 "fewer rows");
            }
        }
    }
}

}  // namespace

void test_linear_float(Checks &checks) {
    Random random(1);
    for (const Size size : {Size{1, 1, 0}, Size{5, 7, 0}, Size{130, 33, 0}, Size{150, 301, 0},
                            Size{5, 8, 0, 8}, Size{150, 1100, 0, 4}}) {
        for_each_dtype([&]<typename W>(W) {
            const Weight weight = float_weight<W>(checks, random, size);
            for_each_dtype([&]<typename T>(T) { test_weight<T>(checks, random, weight); });
        });
    }
}

void test_linear_int8(Checks &checks) {
    Random random(2);
    for (const Size size : {Size{1, 1, 512}, Size{5, 7, 512}, Size{129, 513, 512},
                            Size{5, 4, 512, 4}, Size{129, 1030, 512, 2}}) {
        const Weight weight = quantized_weight(checks, random, LORAPLEX_WEIGHT_INT8, size);
        for_each_dtype([&]<typename T>(T) { test_weight<T>(checks, random, weight); });
    }
}

void test_linear_int4(Checks &checks) {
    Random random(3);
    for (const Size size : {Size{1, 32, 32}, Size{33, 192, 64}, Size{130, 640, 128},
                            Size{33, 768, 64, 4}}) {
        const Weight weight = quantized_weight(checks, random, LORAPLEX_WEIGHT_INT4, size);
        for_each_dtype([&]<typename T>(T) { test_weight<T>(checks, random, weight); });
    }
}

}  // namespace loraplex::selftest
