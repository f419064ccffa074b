#include <array>
#include <cmath>

#include "loraplex/lora.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kModules = 3;
constexpr std::int64_t kLayers = 2;
constexpr std::int64_t kLayer = 1;
constexpr std::int64_t kTokens = 45;
constexpr std::int32_t kRanks[] = {8, 5, 0, 16, 33};
constexpr std::int64_t kEntries = std::size(kRanks);

// One fused layer of two of the table's modules, with columns between them that belong to neither.
constexpr std::int64_t kFused[] = {2, 0};
constexpr std::int64_t kOutOffsets[] = {0, 40};
constexpr std::int64_t kOutFeatures[] = {37, 70};
constexpr std::int64_t kOutputs = 112;

// Adapters in pages, at odd places.
template <typename P>
struct Table {
    std::vector<P> pages;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> ranks;
    std::vector<float> scales;

    Table(Random &random, std::int64_t in_features) {
        std::int64_t size = 3;
        for (std::int64_t entry = 0; entry < kEntries; ++entry) {
            for (std::int64_t i = 0; i < kLayers * kModules; ++i) {
                const std::int32_t rank = i == 4 ? 0 : kRanks[entry];
                offsets.push_back(size);
                ranks.push_back(rank);
                scales.push_back(static_cast<float>(random.uniform(0.5, 2.0)));
                size += rank * (in_features + 70);
            }
        }
        pages = random_values<P>(random, size);
    }
};

// Groups of tokens in waves: tokens of the second wave have another adapter already.
struct Groups {
    std::vector<std::int64_t> entries, group_starts = {0}, tokens, wave_starts = {0};
    std::vector<float> token_scales;

    void add_group(std::int64_t entry, std::vector<std::int64_t> some, Random &random) {
        entries.push_back(entry);
        for (const std::int64_t token : some) {
            tokens.push_back(token);
            token_scales.push_back(static_cast<float>(random.uniform(0.5, 1.5)));
        }
        group_starts.push_back(static_cast<std::int64_t>(tokens.size()));
    }

    void end_wave() { wave_starts.push_back(static_cast<std::int64_t>(entries.size())); }
};

Groups make_groups(Random &random) {
    Groups groups;
    std::vector<std::int64_t> many;
    for (std::int64_t token = 10; token < 40; ++token) {
        many.push_back(token);
    }
    groups.add_group(0, {0}, random);
    groups.add_group(1, {3, 1, 7}, random);
    groups.add_group(2, {2}, random);
    groups.add_group(3, many, random);
    groups.end_wave();
    groups.add_group(4, {44, 1, 12}, random);
    groups.end_wave();
    return groups;
}

constexpr std::array<std::int64_t, kLayers * kModules + 1> kNoVectors{};

template <typename P>
loraplex_lora_step make_step(const Table<P> &table, const Groups &groups) {
    return {table.pages.data(),
            table.offsets.data(),
            table.ranks.data(),
            table.scales.data(),
            kLayers,
            kModules,
            static_cast<std::int64_t>(groups.entries.size()),
            groups.entries.data(),
            groups.group_starts.data(),
            groups.tokens.data(),
            groups.token_scales.data(),
            static_cast<std::int64_t>(groups.wave_starts.size()) - 1,
            groups.wave_starts.data(),
            kDtype<P>,
            kNoVectors.data(),
            nullptr};
}

// y += scale * (x A^T) B^T of one token, module and adapter; errors grow by what may be off.
template <typename P, typename T>
void add_reference(const Table<P> &table, std::size_t place, double token_scale, const T *x,
                   std::int64_t in_features, std::int64_t module, double *y, double *errors) {
    const P *a = table.pages.data() + table.offsets[place];
    const std::int64_t rank = table.ranks[place];
    const std::int64_t out_features = kOutFeatures[module];
    const P *b = a + rank * in_features;
    std::vector<double> lows, low_magnitudes;
    for (std::int64_t r = 0; r < rank; ++r) {
        lows.push_back(0.0);
        low_magnitudes.push_back(0.0);
        for (std::int64_t i = 0; i < in_features; ++i) {
            const double product = widen(x[i]) * double{widen(a[r * in_features + i])};
            lows.back() += product;
            low_magnitudes.back() += std::abs(product);
        }
    }
    for (std::int64_t o = 0; o < out_features && rank > 0; ++o) {
        double delta = 0.0;
        double magnitudes = 0.0;
        for (std::int64_t r = 0; r < rank; ++r) {
            const double factor =
                table.scales[place] * token_scale * widen(b[r * out_features + o]);
            delta += lows[static_cast<std::size_t>(r)] * factor;
            magnitudes += low_magnitudes[static_cast<std::size_t>(r)] * std::abs(factor);
        }
        const std::int64_t column = kOutOffsets[module] + o;
        y[column] += delta;
        errors[column] += sum_error(in_features + rank) * magnitudes +
                          1.01 * kRounding<T> * (std::abs(delta) + std::abs(y[column]));
    }
}

template <typename P, typename T>
void check_lora(Checks &checks, Random &random, std::int64_t in_features,
                std::int64_t num_blocks) {
    const Table<P> table(random, in_features);
    const Groups groups = make_groups(random);
    const auto x = random_values<T>(random, kTokens * in_features);
    const auto y = random_values<T>(random, kTokens * kOutputs);
    const loraplex_lora_linear linear = {in_features,  num_blocks,  std::size(kFused), kFused,
                                         kOutOffsets, kOutFeatures};
    const auto add = [&](int num_threads, const Groups &some) {
        auto result = y;
        const auto step = make_step(table, some);
        checks.ok(loraplex_add_lora(Pool(num_threads), &step, &linear, kLayer, kDtype<T>, x.data(),
                                    in_features, nullptr, result.data(), kOutputs));
        return result;
    };
    const auto result = add(1, groups);

    std::vector<double> expected(y.size()), errors(y.size());
    for (std::size_t i = 0; i < y.size(); ++i) {
        expected[i] = widen(y[i]);
    }
    for (std::size_t group = 0; group < groups.entries.size(); ++group) {
        const std::int64_t entry = groups.entries[group];
        for (auto i = static_cast<std::size_t>(groups.group_starts[group]);
             i < static_cast<std::size_t>(groups.group_starts[group + 1]); ++i) {
            for (std::int64_t module = 0; module < linear.num_modules; ++module) {
                const auto place = static_cast<std::size_t>((entry * kLayers + kLayer) * kModules +
                                                            kFused[module]);
                add_reference(table, place, groups.token_scales[i],
                              x.data() + groups.tokens[i] * in_features, in_features, module,
                              expected.data() + groups.tokens[i] * kOutputs,
                              errors.data() + groups.tokens[i] * kOutputs);
            }
        }
    }
    for (std::size_t i = 0; i < y.size(); ++i) {
        checks.near(widen(result[i]), expected[i], errors[i], "element");
    }

    for (const int num_threads : {2, 3}) {
        checks.same_bits(add(num_threads, groups).data(), result.data(), kTokens * kOutputs,
                         "threads");
    }
    Groups alone;
    alone.entries = {3};
    alone.tokens = {10 + 5};
    alone.group_starts = alone.wave_starts = {0, 1};
    alone.token_scales = {groups.token_scales[5 + 5]};  // the sixth of the fourth group
    checks.same_bits(add(1, alone).data() + alone.tokens[0] * kOutputs,
                     result.data() + alone.tokens[0] * kOutputs, kOutputs, "alone");
}

}  // namespace

void test_lora(Checks &checks) {
    Random random(6);
    for_each_dtype([&]<typename P>(P) {
        for_each_dtype([&]<typename T>(T) {
            check_lora<P, T>(checks, random, 29, 1);
            check_lora<P, T>(checks, random, 200, 1);
            check_lora<P, T>(checks, random, 148, 4);
        });
    });
}

}  // namespace loraplex::selftest
