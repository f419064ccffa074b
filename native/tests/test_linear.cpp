#include <algorithm>
#include <bit>
#include <cmath>
#include <span>

#include "loraplex/linear.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kMaxRows = 140;
constexpr std::int64_t kRowCounts[] = {1, 2, 3, 4, 5, 6, 7, 12, 13, 25, 33, kMaxRows};
// With one thread, each count. How threads share a product depends on its size alone.
constexpr std::int64_t kSharedRowCounts[] = {1, 6, 33, kMaxRows};
constexpr std::int64_t kManyInputs = 300;
// What a CPU may have beyond what the library needs: then it multiplies with them, or without.
constexpr std::uint64_t kOptionalFeatures = LORAPLEX_CPU_AVX512_VNNI | LORAPLEX_CPU_AVX_VNNI |
                                            LORAPLEX_CPU_AMX_INT8 | LORAPLEX_CPU_AMX_BF16 |
                                            LORAPLEX_CPU_AVX512_BF16 | LORAPLEX_CPU_NEON_DOTPROD |
                                            LORAPLEX_CPU_NEON_BF16;

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
            const std::vector<float> &scales, std::vector<double> values,
            const std::vector<float> &offsets = {}, const std::int16_t *table = nullptr,
            const std::vector<std::int8_t> &factors = {},
            const std::vector<std::int8_t> &minima = {}) {
    const std::int64_t num_bytes = loraplex_packed_weight_bytes(
        kind, size.group_size, size.num_blocks, size.out_features, size.in_features);
    checks.expect(num_bytes > 0, "packed bytes");
    Weight result{kind, size, std::move(values),
                  std::vector<std::byte>(static_cast<std::size_t>(num_bytes))};
    const std::int64_t num_groups =
        scales.empty() ? 0 : static_cast<std::int64_t>(scales.size()) / size.out_features;
    const std::int64_t num_factors = static_cast<std::int64_t>(factors.size()) / size.out_features;
    checks.ok(loraplex_pack_weight(Pool(2), kind, size.group_size, size.num_blocks, weight.data(),
                                   size.in_features, scales.empty() ? nullptr : scales.data(),
                                   num_groups, offsets.empty() ? nullptr : offsets.data(),
                                   factors.empty() ? nullptr : factors.data(),
                                   minima.empty() ? nullptr : minima.data(), num_factors, table,
                                   size.out_features, size.in_features,
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

// Values of a kind: from, how many, and what they stand for.
struct Numbers {
    int lowest;
    int count;
    std::vector<std::int16_t> table;
};

Numbers numbers_of(Random &random, loraplex_weight_kind kind, std::int64_t group_size) {
    if (kind == LORAPLEX_WEIGHT_INT8 || kind == LORAPLEX_WEIGHT_INT8_OFFSETS ||
        kind == LORAPLEX_WEIGHT_INT8_BY_INT8) {
        return {-128, 256, {}};
    }
    if (kind != LORAPLEX_WEIGHT_TABLE4) {
        return {-8, 16, {}};
    }
    const std::int64_t largest = std::min<std::int64_t>(65536 / group_size - 1, 1000);
    Numbers numbers = {0, 16, {}};
    for (int i = 0; i < numbers.count; ++i) {
        numbers.table.push_back(static_cast<std::int16_t>(
            static_cast<std::int64_t>(random.below(2 * largest + 1)) - largest));
    }
    return numbers;
}

Weight quantized_weight(Checks &checks, Random &random, loraplex_weight_kind kind, Size size) {
    const Numbers numbers = numbers_of(random, kind, size.group_size);
    const bool has_offsets =
        kind == LORAPLEX_WEIGHT_INT8_OFFSETS || kind == LORAPLEX_WEIGHT_INT4_OFFSETS;
    const std::int64_t num_groups = size.num_blocks * size.block_groups();
    std::vector<std::int8_t> weight;
    std::vector<float> scales;
    std::vector<float> offsets;
    std::vector<double> values;
    for (std::int64_t i = 0; i < size.out_features * num_groups; ++i) {
        scales.push_back(static_cast<float>(random.uniform(0.001, 0.1)));
        if (has_offsets) {
            offsets.push_back(static_cast<float>(random.uniform(-1.0, 1.0)));
        }
    }
    for (std::int64_t i = 0; i < size.out_features * size.in_features; ++i) {
        const auto number = static_cast<int>(random.below(numbers.count));
        weight.push_back(static_cast<std::int8_t>(numbers.lowest + number));
        const std::int64_t input = i % size.in_features;
        const std::int64_t group = input / size.block_inputs() * size.block_groups() +
                                   input % size.block_inputs() / size.group_size;
        const auto scale = static_cast<std::size_t>(i / size.in_features * num_groups + group);
        const double factor = numbers.table.empty()
                                  ? weight.back()
                                  : numbers.table[static_cast<std::size_t>(number)];
        values.push_back(double{scales[scale]} * factor -
                         (has_offsets ? double{offsets[scale]} : 0.0));
    }
    return pack(checks, kind, size, weight, scales, std::move(values), offsets,
                numbers.table.empty() ? nullptr : numbers.table.data());
}

bool has_super_blocks(loraplex_weight_kind kind) { return kind >= LORAPLEX_WEIGHT_SUPER4; }

Weight super_block_weight(Checks &checks, Random &random, loraplex_weight_kind kind, Size size) {
    constexpr std::int64_t kInputs = LORAPLEX_SUPER_BLOCK_INPUTS;
    const bool has_minima = kind != LORAPLEX_WEIGHT_SUPER6;
    const bool is_narrow = kind == LORAPLEX_WEIGHT_SUPER4;
    const auto any_byte = [&] {
        return static_cast<std::int8_t>(static_cast<int>(random.below(256)) - 128);
    };
    std::vector<std::int8_t> weight, factors, minima;
    std::vector<float> scales, offsets;
    std::vector<double> values;
    for (std::int64_t i = 0; i < size.out_features * size.in_features; ++i) {
        const bool is_first = i % kInputs == 0;
        if (is_first) {
            scales.push_back(static_cast<float>(random.uniform(-0.001, 0.001)));
            offsets.push_back(has_minima ? static_cast<float>(random.uniform(0.0, 0.01)) : 0.0f);
        }
        if (i % size.group_size == 0) {
            // The largest sums: all inputs may be 127 or -127.
            factors.push_back(random.below(4) == 0 ? std::int8_t{-128} : any_byte());
            minima.push_back(has_minima ? any_byte() : std::int8_t{0});
        }
        const auto number = static_cast<int>(random.below(is_narrow ? 16 : 64));
        weight.push_back(static_cast<std::int8_t>(is_narrow ? number : number - 32));
        values.push_back(double{scales.back()} * factors.back() * weight.back() -
                         double{offsets.back()} * minima.back());
    }
    if (!has_minima) {
        offsets.clear();
        minima.clear();
    }
    return pack(checks, kind, size, weight, scales, std::move(values), offsets, nullptr, factors,
                minima);
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

// Half a step of the inputs' 16 or 8 bits, for every weight.
double input_rounding(const Weight &weight, const double *x, const double *w) {
    if (weight.size.group_size == 0) {
        return 0.0;
    }
    double largest = 0.0;
    double sum = 0.0;
    for (std::int64_t i = 0; i < weight.size.in_features; ++i) {
        largest = std::max(largest, std::abs(x[i]));
        sum += std::abs(w[i]);
    }
    const bool has_bytes = weight.kind == LORAPLEX_WEIGHT_INT8_BY_INT8 ||
                           weight.kind == LORAPLEX_WEIGHT_INT4_BY_INT8 ||
                           has_super_blocks(weight.kind);
    return 0.51 * largest / (has_bytes ? 127.0 : 32767.0) * sum;
}

template <typename T>
void check_values(Checks &checks, const Weight &weight, const std::vector<double> &x,
                  const float *bias, const std::vector<T> &y) {
    const std::int64_t out_features = weight.size.out_features;
    const std::int64_t in_features = weight.size.in_features;
    for (std::size_t i = 0; i < y.size(); ++i) {
        const double *row = x.data() + static_cast<std::int64_t>(i) / out_features * in_features;
        const std::int64_t output = static_cast<std::int64_t>(i) % out_features;
        const double *w = weight.values.data() + output * in_features;
        double sum = bias == nullptr ? 0.0 : bias[output];
        double magnitudes = std::abs(sum);
        for (std::int64_t k = 0; k < in_features; ++k) {
            const double product = row[k] * w[k];
            sum += product;
            magnitudes += std::abs(product);
        }
        checks.near(widen(y[i]), sum,
                    sum_error(in_features) * magnitudes + kRounding<T> * std::abs(sum) * 1.01 +
                        input_rounding(weight, row, w) + 0x1p-24,
                    [&] {
                        return "output " + std::to_string(output) + " of " +
                               std::to_string(out_features) + "x" + std::to_string(in_features);
                    });
    }
}

template <typename T>
void check_fewer_rows(Checks &checks, const Weight &weight, const std::vector<T> &x,
                      const float *bias, const std::vector<T> &all) {
    for (const int num_threads : {1, 2, 3}) {
        const Pool pool(num_threads);
        const std::span<const std::int64_t> counts =
            num_threads == 1 ? std::span<const std::int64_t>(kRowCounts) : kSharedRowCounts;
        for (const std::uint64_t features : {~std::uint64_t{0}, std::uint64_t{0}}) {
            if (features == 0 && (loraplex_cpu_features() & kOptionalFeatures) == 0) {
                continue;
            }
            checks.ok(loraplex_pool_limit_cpu_features(pool, features));
            // Tiles of bfloat16 are added in an order of their own.
            const bool has_other_bits = features == 0 && std::is_same_v<T, Bfloat16> &&
                                        weight.kind == LORAPLEX_WEIGHT_BFLOAT16;
            const auto expected =
                has_other_bits ? apply(checks, pool, weight, x.data(), kMaxRows, bias) : all;
            for (const std::int64_t num_rows : counts) {
                const auto y = apply(checks, pool, weight, x.data(), num_rows, bias);
                checks.same_bits(y.data(), expected.data(), num_rows * weight.size.out_features,
                                 "fewer rows");
            }
        }
    }
}

template <typename T>
void test_weight(Checks &checks, Random &random, const Weight &weight) {
    const auto x = random_values<T>(random, kMaxRows * weight.size.in_features);
    const auto bias = random_values<float>(random, weight.size.out_features);
    std::vector<double> wide;
    for (const T value : x) {
        wide.push_back(widen(value));
    }
    const auto all = apply(checks, Pool(3), weight, x.data(), kMaxRows, bias.data());
    check_values(checks, weight, wide, bias.data(), all);
    check_values(checks, weight, wide, nullptr,
                 apply(checks, Pool(2), weight, x.data(), 5, nullptr));
    check_fewer_rows(checks, weight, x, bias.data(), all);
}

// Towards 0, but to the odd one of two neighbours where that loses bits. Of normal numbers.
double round_to_odd(double exact) {
    constexpr std::uint64_t kOne = std::uint64_t{1} << 29;  // the last place of a float32
    const auto bits = std::bit_cast<std::uint64_t>(exact);
    return std::bit_cast<double>(bits % kOne == 0 ? bits : (bits - bits % kOne) | kOne);
}

// The order of aarch64's instruction for bfloat16: the sum of a pair's products joins the others. The
// first input's products are large, and the last one's their opposites, so that all roundings show.
void test_sums_of_matrices(Checks &checks, Random &random) {
    if ((loraplex_cpu_features() & LORAPLEX_CPU_NEON_BF16) == 0) {
        return;
    }
    constexpr std::int64_t kOutputs = 50, kInputs = 333, kRows = 7;
    auto x = random_values<Bfloat16>(random, kRows * kInputs);
    auto weight = random_values<Bfloat16>(random, kOutputs * kInputs);
    for (auto row = x.begin(); row < x.end(); row += kInputs) {
        row[0] = narrow<Bfloat16>(0x1p18f);
        row[kInputs - 1] = narrow<Bfloat16>(-0x1p18f);
    }
    for (auto output = weight.begin(); output < weight.end(); output += kInputs) {
        output[kInputs - 1] = output[0];
    }
    std::vector<Bfloat16> expected;
    for (auto row = x.begin(); row < x.end(); row += kInputs) {
        for (auto output = weight.begin(); output < weight.end(); output += kInputs) {
            const auto product = [&](std::int64_t i) {
                return i < kInputs ? double{widen(row[i])} * widen(output[i]) : 0.0;
            };
            double sum = 0.0;
            for (std::int64_t i = 0; i < kInputs; i += 2) {
                sum = round_to_odd(sum + round_to_odd(product(i) + product(i + 1)));
            }
            expected.push_back(narrow<Bfloat16>(static_cast<float>(sum)));
        }
    }
    const Size size = {kOutputs, kInputs, 0};
    const std::vector<float> no_bias(kOutputs);
    const auto y = apply(checks, Pool(2),
                         pack(checks, LORAPLEX_WEIGHT_BFLOAT16, size, weight, {}, {}), x.data(),
                         kRows, no_bias.data());
    checks.same_bits(y.data(), expected.data(), static_cast<std::int64_t>(y.size()), "order");
}

}  // namespace

void test_linear_float(Checks &checks) {
    Random random(1);
    for (const Size size : {Size{1, 1, 0}, Size{5, 7, 0}, Size{130, 33, 0}, Size{150, 301, 0},
                            Size{5, 8, 0, 8}, Size{150, 1100, 0, 4}, Size{70, 1040, 0}}) {
        for_each_dtype([&]<typename W>(W) {
            const Weight weight = float_weight<W>(checks, random, size);
            for_each_dtype([&]<typename T>(T) {
                // Inputs are widened before the product, so that small sizes say what becomes of
                // each dtype beside each other.
                const bool is_usual = std::is_same_v<T, W> || std::is_same_v<T, float>;
                if (is_usual || size.in_features < kManyInputs) {
                    test_weight<T>(checks, random, weight);
                }
            });
        });
    }
    test_sums_of_matrices(checks, random);
}

void test_linear_int8(Checks &checks) {
    Random random(2);
    for (const Size size : {Size{1, 1, 512}, Size{5, 7, 512}, Size{129, 513, 512},
                            Size{5, 4, 512, 4}, Size{129, 1030, 512, 2}}) {
        const Weight weight = quantized_weight(checks, random, LORAPLEX_WEIGHT_INT8, size);
        for_each_dtype([&]<typename T>(T) { test_weight<T>(checks, random, weight); });
    }
    for (const Size size : {Size{5, 37, 16}, Size{33, 1030, 64, 2}}) {
        for (const auto kind : {LORAPLEX_WEIGHT_INT8, LORAPLEX_WEIGHT_INT8_OFFSETS,
                                LORAPLEX_WEIGHT_INT8_BY_INT8}) {
            test_weight<float>(checks, random, quantized_weight(checks, random, kind, size));
        }
    }
    for (const Size size : {Size{5, 7, 128}, Size{129, 1030, 128, 2}}) {
        const Weight weight =
            quantized_weight(checks, random, LORAPLEX_WEIGHT_INT8_BY_INT8, size);
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
    for (const Size size : {Size{5, 48, 16}, Size{33, 1024, 64, 2}, Size{130, 512, 512}}) {
        for (const auto kind : {LORAPLEX_WEIGHT_INT4_OFFSETS, LORAPLEX_WEIGHT_TABLE4,
                                LORAPLEX_WEIGHT_INT4_BY_INT8}) {
            test_weight<float>(checks, random, quantized_weight(checks, random, kind, size));
        }
    }
}

void test_linear_super_blocks(Checks &checks) {
    Random random(4);
    for (const auto kind : {LORAPLEX_WEIGHT_SUPER4, LORAPLEX_WEIGHT_SUPER6,
                            LORAPLEX_WEIGHT_SUPER6_OFFSETS}) {
        for (const Size size : {Size{1, 256, 32}, Size{130, 768, 16}, Size{33, 1536, 32, 2},
                                Size{20, 1024, 16, 4}}) {
            const Weight weight = super_block_weight(checks, random, kind, size);
            for_each_dtype([&]<typename T>(T) { test_weight<T>(checks, random, weight); });
        }
        for (const Size size : {Size{4, 128, 32}, Size{4, 256, 64}, Size{4, 512, 32, 4}}) {
            checks.expect(loraplex_packed_weight_bytes(kind, size.group_size, size.num_blocks,
                                                       size.out_features, size.in_features) == 0,
                          "a size without whole super-blocks, or groups of another size");
        }
    }
}

}  // namespace loraplex::selftest
