// The state space of Mamba2 against its step form in double precision.
#include <algorithm>
#include <cmath>
#include <limits>

#include "loraplex/recurrence.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kBlockSize = 4;
constexpr std::int64_t kEvery = 8;
constexpr std::int64_t kLength = 27;
constexpr std::int64_t kNumRows = 2;
constexpr std::int64_t kBlocksOfRow = (kLength + kBlockSize - 1) / kBlockSize;
constexpr std::int64_t kNumPlaces = kNumRows * kBlocksOfRow * kBlockSize;
constexpr std::int64_t kStatesOfRow = kLength / kEvery;

std::size_t index(std::int64_t number) { return static_cast<std::size_t>(number); }

struct Shape {
    std::int64_t num_heads, head_size, state_size, num_groups;

    std::int64_t num_values() const { return num_heads * head_size; }
    std::int64_t num_keys() const { return num_groups * state_size; }
    std::int64_t row_size() const { return num_values() + 2 * num_keys(); }
};

// Rows of a step, where each sequence has so many tokens from a first position on; and a last row
// without tokens, and two tokens of padding. States are kept at each border, or at the last alone.
struct Step {
    Step(std::int64_t first, std::int64_t count, bool keeps_all)
        : num_tokens(kNumRows * count + 2), positions(index(num_tokens)),
          places(index(num_tokens), -1), writes(index(num_tokens), -1) {
        for (std::int64_t row = 0; row <= kNumRows; ++row) {
            starts.push_back(std::min(row, kNumRows) * count);
            table_starts.push_back(std::min(row, kNumRows - 1) * kBlocksOfRow);
            const bool has_state = row < kNumRows && first >= kEvery;
            reads.push_back(has_state ? row * kStatesOfRow + first / kEvery - 1 : -1);
        }
        starts.push_back(kNumRows * count);
        for (std::int64_t i = 0; i < kNumRows * kBlocksOfRow; ++i) {
            tables.push_back(kNumRows * kBlocksOfRow - 1 - i);
        }
        const std::int64_t last_border = (first + count) / kEvery * kEvery;
        for (std::int64_t token = 0; token < kNumRows * count; ++token) {
            const std::int64_t row = token / count, position = first + token % count;
            const std::int64_t block = tables[index(row * kBlocksOfRow + position / kBlockSize)];
            positions[index(token)] = position;
            places[index(token)] = block * kBlockSize + position % kBlockSize;
            const bool is_kept = keeps_all || position + 1 == last_border;
            if ((position + 1) % kEvery == 0 && is_kept) {
                writes[index(token)] = row * kStatesOfRow + (position + 1) / kEvery - 1;
            }
        }
    }

    std::int64_t num_tokens;
    std::vector<std::int64_t> starts, positions, places, writes, reads, table_starts, tables;
};

template <typename T>
struct Case {
    Case(Random &random, Shape given)
        : shape(given),
          xbc(random_values<T>(random, kNumRows * kLength * given.row_size())),
          dt(random_values<T>(random, kNumRows * kLength * given.num_heads, 2.0)),
          rates(random_values<float>(random, given.num_heads)),
          dt_bias(random_values<float>(random, given.num_heads)),
          skip(random_values<float>(random, given.num_heads)) {
        for (float &rate : rates) {
            rate = -std::exp(rate);
        }
    }

    // A step after the other, in double.
    std::vector<double> expected() const {
        const std::int64_t size = shape.head_size, keys = shape.state_size;
        std::vector<double> results(index(kNumRows * kLength * shape.num_values()));
        for (std::int64_t head = 0; head < kNumRows * shape.num_heads; ++head) {
            const std::int64_t row = head / shape.num_heads, own = head % shape.num_heads;
            const std::int64_t group = own / (shape.num_heads / shape.num_groups);
            std::vector<double> state(index(size * keys));
            for (std::int64_t i = 0; i < kLength; ++i) {
                const std::int64_t token = row * kLength + i;
                const T *x = xbc.data() + token * shape.row_size() + own * size;
                const T *b = xbc.data() + token * shape.row_size() + shape.num_values() + group * keys;
                const T *c = b + shape.num_keys();
                const double wide = widen(dt[index(token * shape.num_heads + own)]);
                const double step =
                    std::max(0.25, std::log1p(std::exp(wide + double{dt_bias[index(own)]})));
                for (std::int64_t j = 0; j < size; ++j) {
                    double sum = double{skip[index(own)]} * widen(x[j]);
                    for (std::int64_t k = 0; k < keys; ++k) {
                        double &element = state[index(k * size + j)];
                        element = std::exp(rates[index(own)] * step) * element +
                                  step * widen(b[k]) * widen(x[j]);
                        sum += element * widen(c[k]);
                    }
                    results[index(token * shape.num_values() + own * size + j)] = sum;
                }
            }
        }
        return results;
    }

    Shape shape;
    std::vector<T> xbc, dt;
    std::vector<float> rates, dt_bias, skip;
};

struct Storage {
    explicit Storage(const Shape &shape)
        : keys(numbers(kNumPlaces * shape.num_keys())),
          written(numbers(kNumPlaces * shape.num_values())),
          sums(numbers(kNumPlaces * shape.num_heads)),
          states(numbers(kNumRows * kStatesOfRow * shape.num_values() * shape.state_size)) {}

    static std::vector<float> numbers(std::int64_t count) {
        return std::vector<float>(index(count), std::numeric_limits<float>::quiet_NaN());
    }

    std::vector<float> keys, written, sums, states;
};

// The results of all sequences, in chunks of so many tokens.
template <typename T>
std::vector<T> run(Checks &checks, const Case<T> &given, const Pool &pool, std::int64_t chunk,
                   bool keeps_all) {
    const Shape &shape = given.shape;
    const std::int64_t stride = shape.row_size() + 3, dt_stride = shape.num_heads + 1;
    Storage storage(shape);
    std::vector<T> results(index(kNumRows * kLength * shape.num_values()));
    for (std::int64_t first = 0; first < kLength; first += chunk) {
        const std::int64_t count = std::min(chunk, kLength - first);
        const Step step(first, count, keeps_all);
        std::vector<T> xbc(index(step.num_tokens * stride)), dt(index(step.num_tokens * dt_stride));
        const auto place = [&](std::int64_t token) {
            return token / count * kLength + first + token % count;
        };
        for (std::int64_t token = 0; token < kNumRows * count; ++token) {
            const T *x = given.xbc.data() + place(token) * shape.row_size();
            std::copy(x, x + shape.row_size(), xbc.data() + token * stride);
            const T *steps = given.dt.data() + place(token) * shape.num_heads;
            std::copy(steps, steps + shape.num_heads, dt.data() + token * dt_stride);
        }
        std::vector<T> output(index(step.num_tokens * shape.num_values()));
        checks.ok(loraplex_ssd(
            pool, step.num_tokens, kNumRows + 1, shape.num_heads, shape.head_size,
            shape.state_size, shape.num_groups, kEvery, kBlockSize, kDtype<T>, xbc.data(), stride,
            dt.data(), dt_stride, given.rates.data(), given.dt_bias.data(), given.skip.data(),
            0.25f, std::numeric_limits<float>::infinity(), step.starts.data(),
            step.positions.data(), step.reads.data(), step.writes.data(), step.places.data(),
            step.table_starts.data(), step.tables.data(), storage.keys.data(),
            storage.written.data(), storage.sums.data(), storage.states.data(), output.data()));
        for (std::int64_t token = 0; token < kNumRows * count; ++token) {
            const T *source = output.data() + token * shape.num_values();
            std::copy(source, source + shape.num_values(),
                      results.data() + place(token) * shape.num_values());
        }
        for (std::size_t i = index(kNumRows * count * shape.num_values()); i < output.size(); ++i) {
            checks.expect(widen(output[i]) == 0.0f, "padding");
        }
    }
    return results;
}

template <typename T>
void check_case(Checks &checks, const Case<T> &given) {
    const auto whole = run(checks, given, Pool(1), kLength, true);
    const auto expected = given.expected();
    for (std::size_t i = 0; i < whole.size(); ++i) {
        checks.near(widen(whole[i]), expected[i],
                    1.01 * kRounding<T> * std::abs(expected[i]) + 2e-5, "element");
    }
    const auto size = static_cast<std::int64_t>(whole.size());
    for (const std::int64_t chunk : {1, 2, 3, 8, 13}) {
        const auto cut = run(checks, given, Pool(2), chunk, true);
        checks.same_bits(cut.data(), whole.data(), size, "chunks");
    }
    const auto sparse = run(checks, given, Pool(2), kLength, false);
    checks.same_bits(sparse.data(), whole.data(), size, "states without a block");
}

}  // namespace

void test_ssd(Checks &checks) {
    Random random(43);
    for_each_dtype([&]<typename T>(T) {
        for (const Shape shape :
             {Shape{1, 1, 1, 1}, {4, 5, 7, 2}, {6, 16, 32, 1}, {24, 12, 20, 2}}) {
            check_case(checks, Case<T>(random, shape));
        }
    });
}

}  // namespace loraplex::selftest
