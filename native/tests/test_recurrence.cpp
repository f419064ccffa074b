// Recurrences against their step form in double precision, and the gates.
#include <cmath>
#include <limits>

#include "loraplex/recurrence.h"
#include "row_cases.h"

namespace loraplex::selftest {
namespace {

struct Sizes {
    std::int64_t keys, values, key_size, value_size;
};

inline constexpr Sizes kSizes[] = {{2, 6, 5, 19}, {1, 2, 16, 32}};
inline constexpr std::int64_t kEvery = 8, kBlock = 4, kTokens = 21, kStates = 3;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

// One sequence, whose blocks lie in falling order.
template <typename T>
struct DeltaCase {
    DeltaCase(const Sizes &sizes, Random &random)
        : sizes(sizes),
          width(2 * sizes.keys * sizes.key_size + sizes.values * sizes.value_size),
          qkv(random_values<T>(random, kTokens * width)),
          b(random_values<T>(random, kTokens * sizes.values)),
          a(random_values<T>(random, kTokens * sizes.values)),
          a_log(random_values<float>(random, sizes.values)),
          dt_bias(random_values<float>(random, sizes.values)) {
        for (std::int64_t block = 0; block * kBlock < kTokens; ++block) {
            table.push_back(kTokens / kBlock - block);
        }
    }

    // The outputs of the tokens in chunks of this size.
    std::vector<T> run(Checks &checks, int num_threads, std::int64_t chunk) const {
        const Pool pool(num_threads);
        const auto positions = static_cast<std::size_t>(kBlock * std::ssize(table));
        std::vector<float> keys(positions * static_cast<std::size_t>(sizes.keys * sizes.key_size),
                                kNan);
        std::vector<float> values(
            positions * static_cast<std::size_t>(sizes.values * sizes.value_size), kNan);
        std::vector<float> sums(positions * static_cast<std::size_t>(sizes.values), kNan);
        std::vector<float> states(static_cast<std::size_t>(kStates * sizes.values *
                                                           sizes.key_size * sizes.value_size),
                                  kNan);
        std::vector<T> output(static_cast<std::size_t>(kTokens * sizes.values * sizes.value_size));
        for (std::int64_t first = 0; first < kTokens; first += chunk) {
            const std::int64_t count = std::min(chunk, kTokens - first);
            std::vector<std::int64_t> position, write, place;
            for (std::int64_t token = first; token < first + count; ++token) {
                position.push_back(token);
                write.push_back((token + 1) % kEvery == 0 ? (token + 1) / kEvery : -1);
                place.push_back(table[static_cast<std::size_t>(token / kBlock)] * kBlock +
                                token % kBlock);
            }
            const std::int64_t starts[] = {0, count, count}, table_starts[] = {0, 0};
            const std::int64_t reads[] = {first < kEvery ? -1 : first / kEvery, -1};
            checks.ok(loraplex_delta_rule(
                pool, count, 2, sizes.keys, sizes.values, sizes.key_size, sizes.value_size,
                kEvery, kBlock, kDtype<T>, qkv.data() + first * width, width,
                b.data() + first * sizes.values, sizes.values, a.data() + first * sizes.values,
                sizes.values, a_log.data(), dt_bias.data(), starts, position.data(), reads,
                write.data(), place.data(), table_starts, table.data(), keys.data(),
                values.data(), sums.data(), states.data(),
                output.data() + first * sizes.values * sizes.value_size));
        }
        return output;
    }

    // The unit vector of a head's query (part 0) or key (part 1), element by element.
    double unit(std::int64_t token, std::int64_t part, std::int64_t head, std::int64_t i) const {
        const T *row = qkv.data() + token * width + (part * sizes.keys + head) * sizes.key_size;
        double squares = 1e-6;
        for (std::int64_t j = 0; j < sizes.key_size; ++j) {
            squares += std::pow(double{widen(row[j])}, 2);
        }
        return widen(row[i]) / std::sqrt(squares);
    }

    void check(Checks &checks, std::int64_t head, const std::vector<T> &output) const {
        const std::int64_t key_head = head / (sizes.values / sizes.keys);
        std::vector<double> state(static_cast<std::size_t>(sizes.key_size * sizes.value_size));
        for (std::int64_t token = 0; token < kTokens; ++token) {
            const auto at = static_cast<std::size_t>(token * sizes.values + head);
            const double rate = std::exp(double{a_log[static_cast<std::size_t>(head)]});
            const double decay = std::exp(
                -rate * softplus(double{widen(a[at])} + dt_bias[static_cast<std::size_t>(head)]));
            const double strength =
                widen(narrow<T>(static_cast<float>(sigmoid(double{widen(b[at])}))));
            for (double &number : state) {
                number *= decay;
            }
            for (std::int64_t v = 0; v < sizes.value_size; ++v) {
                const auto cell = [&](std::int64_t i) -> double & {
                    return state[static_cast<std::size_t>(i * sizes.value_size + v)];
                };
                double found = 0.0, read = 0.0;
                for (std::int64_t i = 0; i < sizes.key_size; ++i) {
                    found += cell(i) * unit(token, 1, key_head, i);
                }
                const std::int64_t values = 2 * sizes.keys * sizes.key_size;
                const double value = widen(qkv[static_cast<std::size_t>(
                    token * width + values + head * sizes.value_size + v)]);
                for (std::int64_t i = 0; i < sizes.key_size; ++i) {
                    cell(i) += unit(token, 1, key_head, i) * strength * (value - found);
                    read += cell(i) * unit(token, 0, key_head, i);
                }
                read /= std::sqrt(static_cast<double>(sizes.key_size));
                checks.near(widen(output[at * static_cast<std::size_t>(sizes.value_size) +
                                         static_cast<std::size_t>(v)]),
                            read, 1.01 * kRounding<T> * std::abs(read) + 2e-6, "delta rule");
            }
        }
    }

    Sizes sizes;
    std::int64_t width;
    std::vector<T> qkv, b, a;
    std::vector<float> a_log, dt_bias;
    std::vector<std::int64_t> table;
};

}  // namespace

void test_delta_rule(Checks &checks) {
    for_each_dtype([&]<typename T>(T) {
        for (const Sizes &sizes : kSizes) {
            Random random(7);
            const DeltaCase<T> delta(sizes, random);
            const auto whole = delta.run(checks, 1, kTokens);
            for (std::int64_t head = 0; head < sizes.values; ++head) {
                delta.check(checks, head, whole);
            }
            for (const std::int64_t chunk : {1, 3, 8, 11}) {
                checks.same_bits(delta.run(checks, 3, chunk).data(), whole.data(),
                                 std::ssize(whole), "chunks");
            }
        }
    });
}

void test_gates(Checks &checks) {
    for_each_case([&]<typename T>(T, std::int64_t n) {
        Random random(5);
        const auto x = random_values<T>(random, kRows * n), gate = random_values<T>(random, kRows * n);
        const auto weight = random_values<T>(random, n);
        const auto run = [&](const Pool &pool, std::int64_t first, std::int64_t count, int kind) {
            std::vector<T> output(static_cast<std::size_t>(count * n));
            const T *inputs = x.data() + first * n, *gates = gate.data() + first * n;
            checks.ok(kind == 2 ? loraplex_sigmoid_gate(pool, count, 1, n, kDtype<T>, inputs, n, 0,
                                                        gates, n, 0, output.data())
                                : loraplex_gated_rms_norm(pool, count, 1, n, kDtype<T>, inputs, n,
                                                          0, gates, n, 0, weight.data(), 0, 1e-5f,
                                                          kind, output.data()));
            return output;
        };
        for (const int kind : {0, 1, 2}) {
            const auto all = run(Pool(1), 0, kRows, kind);
            check_company(checks, n, [&](const Pool &pool, std::int64_t first, std::int64_t count) {
                return run(pool, first, count, kind);
            });
            for (std::int64_t row = 0; row < kRows; ++row) {
                const auto input = [&](std::int64_t i) {
                    const auto at = static_cast<std::size_t>(row * n + i);
                    const double g = widen(gate[at]);
                    return widen(x[at]) * (kind == 1 ? g * sigmoid(g) : 1.0);
                };
                double squares = 0.0;
                for (std::int64_t i = 0; i < n; ++i) {
                    squares += std::pow(input(i), 2);
                }
                const double factor = 1.0 / std::sqrt(squares / static_cast<double>(n) + 1e-5);
                for (std::int64_t i = 0; i < n; ++i) {
                    const auto at = static_cast<std::size_t>(row * n + i);
                    const double g = widen(gate[at]);
                    const double scaled = input(i) * factor * widen(weight[static_cast<std::size_t>(i)]);
                    const double expected = kind == 2   ? input(i) * sigmoid(g)
                                            : kind == 1 ? scaled
                                                        : scaled * g * sigmoid(g);
                    checks.near(widen(all[at]), expected,
                                (3.1 * kRounding<T> + sum_error(n)) * std::abs(expected) + 0x1p-20,
                                "gate");
                }
            }
        }
    });
}

}  // namespace loraplex::selftest
