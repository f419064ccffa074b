#include <algorithm>
#include <cmath>
#include <limits>

#include "loraplex/convolution.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kLength = 19;
constexpr std::int64_t kNumRows = 3;
constexpr std::int64_t kNumBlocks = kNumRows * ((kLength + kBlockSize - 1) / kBlockSize);

struct Shape {
    std::int64_t num_channels, num_taps;
    bool has_bias;
    loraplex_activation activation;
};

// The inputs of some sequences, which have kLength positions each.
template <typename T>
struct Case {
    Case(Random &random, Shape given)
        : shape(given),
          x(random_values<T>(random, kNumRows * kLength * given.num_channels)),
          weight(random_values<float>(random, given.num_channels * given.num_taps)),
          bias(random_values<float>(random, given.num_channels)) {}

    const T *input(std::int64_t row, std::int64_t position) const {
        return x.data() + (row * kLength + position) * shape.num_channels;
    }

    double expected(std::int64_t row, std::int64_t position, std::int64_t channel) const {
        double sum = shape.has_bias ? bias[static_cast<std::size_t>(channel)] : 0.0;
        for (std::int64_t tap = 0; tap < shape.num_taps; ++tap) {
            const std::int64_t from = position - (shape.num_taps - 1 - tap);
            if (from >= 0) {
                sum += double{weight[static_cast<std::size_t>(channel * shape.num_taps + tap)]} *
                       widen(input(row, from)[channel]);
            }
        }
        return shape.activation == LORAPLEX_SILU ? sum / (1.0 + std::exp(-sum)) : sum;
    }

    Shape shape;
    std::vector<T> x;
    std::vector<float> weight;
    std::vector<float> bias;
};

// The results of all rows, in chunks of so many tokens; the rows of a step are all of them, and one
// that has no tokens. Weights lie by channels or by taps.
template <typename T>
std::vector<T> run(Checks &checks, const Case<T> &given, const Pool &pool, std::int64_t chunk,
                   bool by_taps) {
    const auto [num_channels, num_taps, has_bias, activation] = given.shape;
    const std::int64_t stride = num_channels + 3;
    std::vector<std::int64_t> tables;
    for (std::int64_t i = 0; i < kNumBlocks; ++i) {
        tables.push_back(kNumBlocks - 1 - i);
    }
    tables.push_back(0);  // of the row that has no tokens
    const std::int64_t table_size = kNumBlocks / kNumRows;
    const std::int64_t table_starts[] = {0, table_size, 2 * table_size, kNumBlocks};
    std::vector<float> weight = given.weight;
    if (by_taps) {
        for (std::size_t i = 0; i < weight.size(); ++i) {
            const auto taps = static_cast<std::size_t>(num_taps);
            const auto channels = static_cast<std::size_t>(num_channels);
            weight[i % taps * channels + i / taps] = given.weight[i];
        }
    }
    std::vector<float> stored(static_cast<std::size_t>(kNumBlocks * kBlockSize * num_channels),
                              std::numeric_limits<float>::quiet_NaN());
    std::vector<T> results(given.x.size());
    for (std::int64_t first = 0; first < kLength; first += chunk) {
        const std::int64_t count = std::min(chunk, kLength - first);
        const std::int64_t num_tokens = kNumRows * count + 2;  // two of padding
        std::vector<T> x(static_cast<std::size_t>(num_tokens * stride));
        std::vector<std::int64_t> positions(static_cast<std::size_t>(num_tokens));
        std::vector<std::int64_t> places(static_cast<std::size_t>(num_tokens), -1);
        for (std::int64_t token = 0; token < kNumRows * count; ++token) {
            const std::int64_t row = token / count, position = first + token % count;
            const T *source = given.input(row, position);
            std::copy(source, source + num_channels, x.data() + token * stride);
            const std::int64_t block = tables[static_cast<std::size_t>(
                table_starts[row] + position / kBlockSize)];
            positions[static_cast<std::size_t>(token)] = position;
            places[static_cast<std::size_t>(token)] = block * kBlockSize + position % kBlockSize;
        }
        const std::int64_t starts[] = {0, count, 2 * count, 3 * count, 3 * count};
        std::vector<T> output(static_cast<std::size_t>(num_tokens * num_channels));
        checks.ok(loraplex_causal_conv(
            pool, kNumRows + 1, num_tokens, num_channels, kBlockSize, starts, positions.data(),
            places.data(), table_starts, tables.data(), kDtype<T>, x.data(), stride, weight.data(),
            num_taps, by_taps ? 1 : num_taps, by_taps ? num_channels : 1,
            has_bias ? given.bias.data() : nullptr, activation, stored.data(), output.data()));
        for (std::int64_t token = 0; token < kNumRows * count; ++token) {
            const std::int64_t place = token / count * kLength + first + token % count;
            const T *source = output.data() + token * num_channels;
            std::copy(source, source + num_channels, results.data() + place * num_channels);
        }
        for (std::size_t i = output.size() - 2 * static_cast<std::size_t>(num_channels);
             i < output.size(); ++i) {
            checks.expect(widen(output[i]) == 0.0f, "padding");
        }
    }
    return results;
}

template <typename T>
void check_case(Checks &checks, const Case<T> &given) {
    const auto whole = run(checks, given, Pool(1), kLength, true);
    const std::int64_t num_channels = given.shape.num_channels;
    const auto size = static_cast<std::int64_t>(whole.size());
    for (std::int64_t i = 0; i < size; ++i) {
        const std::int64_t token = i / num_channels;
        const double expected =
            given.expected(token / kLength, token % kLength, i % num_channels);
        checks.near(widen(whole[static_cast<std::size_t>(i)]), expected,
                    1.01 * kRounding<T> * std::abs(expected) + 4e-6, "element");
    }
    for (const std::int64_t chunk : {1, 2, 3, 7}) {
        const auto cut = run(checks, given, Pool(2), chunk, chunk == 3);
        checks.same_bits(cut.data(), whole.data(), size, "chunks");
    }
}

}  // namespace

void test_causal_conv(Checks &checks) {
    Random random(41);
    for_each_dtype([&]<typename T>(T) {
        for (const Shape shape : {Shape{1, 1, false, LORAPLEX_NO_ACTIVATION},
                                  {37, 3, true, LORAPLEX_NO_ACTIVATION},
                                  {300, 4, false, LORAPLEX_SILU},
                                  {1100, 7, true, LORAPLEX_SILU}}) {
            check_case(checks, Case<T>(random, shape));
        }
    });
}

}  // namespace loraplex::selftest
