#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "loraplex/experts.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kTokens = 70;

// Results of loraplex_route.
struct Routes {
    std::vector<std::int32_t> experts, pairs, starts;
    std::vector<float> weights;

    Routes(std::int64_t num_tokens, const loraplex_routing_rules &rules)
        : experts(static_cast<std::size_t>(num_tokens * rules.num_chosen)),
          pairs(experts.size()), starts(static_cast<std::size_t>(rules.num_experts + 1)),
          weights(experts.size()) {}
};

template <typename T>
Routes route(Checks &checks, int num_threads, const loraplex_routing_rules &rules,
             const std::vector<T> &logits, const float *bias, const float *factors) {
    const auto num_tokens = static_cast<std::int64_t>(logits.size()) / rules.num_experts;
    Routes routes(num_tokens, rules);
    checks.ok(loraplex_route(Pool(num_threads), &rules, num_tokens, kDtype<T>, logits.data(),
                             rules.num_experts, bias, factors, routes.experts.data(),
                             routes.weights.data(), routes.pairs.data(), routes.starts.data()));
    return routes;
}

loraplex_routing_rules rules_of(std::int64_t num_experts, std::int64_t num_chosen,
                                loraplex_routing_mode mode) {
    return {num_experts, num_chosen, 1, 1, 1.5, 0.05, 1e-3, mode, mode == LORAPLEX_ROUTING_SIGMOID};
}

// The weights of one token's experts, which are the right ones, before they are normalised.
std::vector<double> weights_of(const loraplex_routing_rules &rules, const float *logits,
                               const std::int32_t *experts) {
    std::vector<double> weights;
    std::vector<bool> is_out(static_cast<std::size_t>(rules.num_experts));
    for (std::int64_t i = 0; i < rules.num_chosen; ++i) {
        const double chosen = logits[experts[i]];
        double sum = 0.0;
        for (std::int64_t e = 0; e < rules.num_experts; ++e) {
            const double other = logits[e];
            const bool is_chosen =
                std::find(experts, experts + rules.num_chosen, e) != experts + rules.num_chosen;
            const bool is_near =
                (chosen - other) / std::max(std::abs(other), chosen) <= 2.0 * rules.jitter;
            const bool counts = rules.mode == LORAPLEX_ROUTING_SOFTMAX ||
                                (rules.mode == LORAPLEX_ROUTING_CHOSEN_SOFTMAX && is_chosen) ||
                                (rules.mode == LORAPLEX_ROUTING_SPARSE_MIXER && is_near &&
                                 !is_out[static_cast<std::size_t>(e)]);
            sum += counts ? std::exp(other - chosen) : 0.0;
        }
        weights.push_back(rules.mode == LORAPLEX_ROUTING_SIGMOID ? 1.0 / (1.0 + std::exp(-chosen))
                                                                 : 1.0 / sum);
        is_out[static_cast<std::size_t>(experts[i])] = true;
    }
    return weights;
}

void check_token(Checks &checks, const loraplex_routing_rules &rules, const float *logits,
                 const float *bias, const float *factors, const std::int32_t *experts,
                 const float *weights) {
    const auto score = [&](std::int64_t e) {
        return bias == nullptr ? double{logits[e]} : 1.0 / (1.0 + std::exp(-logits[e])) + bias[e];
    };
    std::vector<std::int64_t> order;
    for (std::int64_t e = 0; e < rules.num_experts; ++e) {
        order.push_back(e);
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int64_t a, std::int64_t b) { return score(a) > score(b); });
    checks.expect(std::equal(experts, experts + rules.num_chosen, order.begin()), "choice");
    const std::vector<double> expected = weights_of(rules, logits, experts);
    double sum = 0.0;
    for (const double weight : expected) {
        sum += weight;
    }
    for (std::size_t i = 0; i < expected.size(); ++i) {
        const double divisor = rules.normalizes != 0 ? sum + rules.sum_floor : 1.0;
        const double own = factors == nullptr ? 1.0 : factors[experts[i]];
        const double weight = expected[i] / divisor * rules.factor * own;
        checks.near(weights[i], weight, 2e-7 * std::abs(weight), "weight");
    }
}

void check_order(Checks &checks, const Routes &routes) {
    for (std::size_t e = 0; e + 1 < routes.starts.size(); ++e) {
        const std::int32_t *first = routes.pairs.data() + routes.starts[e];
        const std::int32_t *end = routes.pairs.data() + routes.starts[e + 1];
        checks.expect(std::is_sorted(first, end), "order of pairs");
        checks.expect(std::all_of(first, end,
                                  [&](std::int32_t pair) {
                                      return routes.experts[static_cast<std::size_t>(pair)] ==
                                             static_cast<std::int32_t>(e);
                                  }),
                      "pairs of an expert");
    }
    checks.expect(routes.starts.front() == 0 &&
                      routes.starts.back() == static_cast<std::int32_t>(routes.pairs.size()),
                  "starts");
}

void check_route(Checks &checks, Random &random, const loraplex_routing_rules &rules) {
    const auto logits = random_values<float>(random, kTokens * rules.num_experts, 4.0);
    const auto values = random_values<float>(random, rules.num_experts);
    const float *bias = rules.mode == LORAPLEX_ROUTING_SIGMOID ? values.data() : nullptr;
    const float *factors = rules.mode == LORAPLEX_ROUTING_SOFTMAX ? values.data() : nullptr;
    const Routes routes = route(checks, 2, rules, logits, bias, factors);
    check_order(checks, routes);
    for (std::int64_t t = 0; t < kTokens; ++t) {
        const float *own = logits.data() + t * rules.num_experts;
        const std::int32_t *experts = routes.experts.data() + t * rules.num_chosen;
        const float *weights = routes.weights.data() + t * rules.num_chosen;
        check_token(checks, rules, own, bias, factors, experts, weights);
        const Routes alone = route(
            checks, 1, rules, std::vector<float>(own, own + rules.num_experts), bias, factors);
        checks.same_bits(alone.experts.data(), experts, rules.num_chosen, "alone");
        checks.same_bits(alone.weights.data(), weights, rules.num_chosen, "alone");
    }
}

void check_nan(Checks &checks, const loraplex_routing_rules &rules) {
    std::vector<float> logits(static_cast<std::size_t>(rules.num_experts),
                              std::numeric_limits<float>::quiet_NaN());
    const Routes routes = route(checks, 1, rules, logits, nullptr, nullptr);
    std::vector<std::int32_t> experts = routes.experts;
    std::sort(experts.begin(), experts.end());
    checks.expect(std::adjacent_find(experts.begin(), experts.end()) == experts.end() &&
                      experts.front() >= 0 && experts.back() < rules.num_experts,
                  "experts of NaN");
    checks.expect(std::isnan(routes.weights[0]), "weights of NaN");
}

// Of inputs.
constexpr std::int64_t blocks_of(std::int64_t in_features) {
    return in_features % 2 == 0 ? 2 : 1;
}

// A packed weight of each expert, one after another.
template <typename W>
std::vector<std::byte> pack_experts(Checks &checks, Random &random, std::int64_t num_experts,
                                    std::int64_t out_features, std::int64_t in_features) {
    const std::int64_t num_blocks = blocks_of(in_features);
    const auto num_bytes =
        loraplex_packed_weight_bytes(kDtype<W>, 0, num_blocks, out_features, in_features);
    std::vector<std::byte> packed(static_cast<std::size_t>(num_experts * num_bytes));
    for (std::int64_t e = 0; e < num_experts; ++e) {
        const auto weight = random_values<W>(random, out_features * in_features);
        checks.ok(loraplex_pack_weight(Pool(2), kDtype<W>, 0, num_blocks, weight.data(),
                                       in_features, nullptr, 0, nullptr, nullptr, nullptr, 0,
                                       nullptr, out_features, in_features,
                                       packed.data() + e * num_bytes));
    }
    return packed;
}

template <typename W, typename T>
void check_grouped(Checks &checks, Random &random, std::int64_t num_experts,
                   std::int64_t num_chosen, std::int64_t out_features, std::int64_t in_features) {
    const auto rules = rules_of(num_experts, num_chosen, LORAPLEX_ROUTING_SOFTMAX);
    const auto packed = pack_experts<W>(checks, random, num_experts, out_features, in_features);
    const auto bias = random_values<float>(random, num_experts * out_features);
    const auto logits = random_values<float>(random, kTokens * num_experts);
    const Routes routes = route(checks, 1, rules, logits, nullptr, nullptr);
    const auto num_pairs = static_cast<std::int64_t>(routes.pairs.size());
    const auto x = random_values<T>(random, num_pairs * in_features);
    const auto bytes_of_one = packed.size() / static_cast<std::size_t>(num_experts);
    const std::int64_t num_blocks = blocks_of(in_features);
    const Pool pool(1);
    for (const std::int64_t pairs_per_row : {std::int64_t{1}, num_chosen}) {
        std::vector<T> alone(static_cast<std::size_t>(num_pairs * out_features));
        for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
            const auto e = routes.experts[static_cast<std::size_t>(pair)];
            checks.ok(loraplex_linear(
                pool, kDtype<W>, 0, num_blocks, kDtype<T>,
                x.data() + pair / pairs_per_row * in_features, in_features, 1,
                packed.data() + static_cast<std::size_t>(e) * bytes_of_one, out_features,
                in_features, bias.data() + e * out_features, nullptr,
                alone.data() + pair * out_features, out_features));
        }
        for (const int num_threads : {1, 3}) {
            std::vector<T> y(alone.size());
            checks.ok(loraplex_grouped_linear(
                Pool(num_threads), kDtype<W>, 0, num_blocks, kDtype<T>, x.data(), in_features,
                num_pairs, pairs_per_row, routes.pairs.data(), routes.starts.data(), num_experts,
                packed.data(), out_features, in_features, bias.data(), nullptr, y.data(),
                out_features));
            for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
                checks.same_bits(y.data() + pair * out_features,
                                 alone.data() + pair * out_features, out_features,
                                 "row of a pair");
            }
        }
    }
}

template <typename T>
void check_combine(Checks &checks, Random &random, std::int64_t num_chosen, std::int64_t n) {
    const auto weights = random_values<float>(random, kTokens * num_chosen);
    const auto y = random_values<T>(random, kTokens * num_chosen * n);
    const auto shared = random_values<T>(random, kTokens * n);
    const auto gates = random_values<T>(random, kTokens, 4.0);
    for (const int num_added : {0, 1, 2}) {
        const auto combine = [&](int num_threads) {
            std::vector<T> output(static_cast<std::size_t>(kTokens * n));
            checks.ok(loraplex_combine_experts(
                Pool(num_threads), kTokens, num_chosen, n, kDtype<T>, weights.data(), y.data(), n,
                num_added > 0 ? shared.data() : nullptr, n, num_added > 1 ? gates.data() : nullptr,
                1, output.data()));
            return output;
        };
        const auto output = combine(1);
        for (std::int64_t i = 0; i < kTokens * n; ++i) {
            const auto token = static_cast<std::size_t>(i / n);
            const double gate = num_added > 1 ? 1.0 / (1.0 + std::exp(-widen(gates[token]))) : 1.0;
            double sum = num_added > 0 ? gate * widen(shared[static_cast<std::size_t>(i)]) : 0.0;
            double magnitudes = std::abs(sum);
            for (std::int64_t j = 0; j < num_chosen; ++j) {
                const auto pair = static_cast<std::int64_t>(token) * num_chosen + j;
                const double share = double{weights[static_cast<std::size_t>(pair)]} *
                                     widen(y[static_cast<std::size_t>(pair * n + i % n)]);
                sum += share;
                magnitudes += std::abs(share);
            }
            checks.near(widen(output[static_cast<std::size_t>(i)]), sum,
                        sum_error(num_chosen) * magnitudes + 1.01 * kRounding<T> * std::abs(sum) +
                            0x1p-24,
                        "sum of experts");
        }
        checks.same_bits(combine(3).data(), output.data(), kTokens * n, "threads");
    }
}

// A table of adapters whose two modules have kExperts cells each, and a step that uses them.
constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kChosen = 2;
constexpr std::int64_t kCells = 2 * kExperts;
constexpr std::int64_t kIn = 37;
constexpr std::int64_t kOut[] = {21, 50};
constexpr std::int64_t kOffsets[] = {0, 24};
constexpr std::int64_t kOutputs = 80;
constexpr std::int64_t kModules[] = {0, kExperts};
constexpr std::array<std::int32_t, 3> kRanks = {8, 0, 19};

template <typename P>
struct Table {
    std::vector<P> pages;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> ranks;
    std::vector<float> scales;

    explicit Table(Random &random) {
        std::int64_t size = 3;
        for (std::int64_t i = 0; i < 3 * kCells; ++i) {
            offsets.push_back(size);
            ranks.push_back(kRanks[static_cast<std::size_t>(random.below(3))]);
            scales.push_back(static_cast<float>(random.uniform(0.5, 2.0)));
            size += ranks.back() * (kIn + kOut[1]);
        }
        pages = random_values<P>(random, size);
    }
};

struct Groups {
    std::vector<std::int64_t> entries, starts, tokens, waves;
    std::vector<float> scales;
};

template <typename P>
loraplex_lora_step make_step(const Table<P> &table, const Groups &groups) {
    return {table.pages.data(),
            table.offsets.data(),
            table.ranks.data(),
            table.scales.data(),
            1,
            kCells,
            static_cast<std::int64_t>(groups.entries.size()),
            groups.entries.data(),
            groups.starts.data(),
            groups.tokens.data(),
            groups.scales.data(),
            static_cast<std::int64_t>(groups.waves.size()) - 1,
            groups.waves.data(),
            kDtype<P>,
            nullptr,
            nullptr};
}

// Each pair has the bits that loraplex_add_lora gives it alone, with the cells of its expert.
template <typename P, typename T>
void check_lora(Checks &checks, Random &random, std::int64_t pairs_per_row) {
    const Table<P> table(random);
    const Groups groups = {{0, 1, 2, 0}, {0, 2, 9, 10, 12}, {4, 0, 1, 2, 3, 5, 6, 7, 8, 9, 1, 9},
                           {0, 3, 4},    {1, 2, .5, 1, 1, 1, 1, 1.5, 1, 1, 1, .25}};
    std::vector<std::int32_t> experts;
    for (std::int64_t token = 0; token < 10; ++token) {
        experts.push_back(static_cast<std::int32_t>(random.below(kExperts)));
        experts.push_back((experts.back() + 1) % kExperts);
    }
    const auto x = random_values<T>(random, 10 * kChosen * kIn);
    const auto y = random_values<T>(random, 10 * kChosen * kOutputs);
    const auto step = make_step(table, groups);
    const loraplex_lora_linear linear = {kIn, 1, 2, kModules, kOffsets, kOut};
    auto expected = y;
    for (std::size_t group = 0; group < groups.entries.size(); ++group) {
        for (std::int64_t i = groups.starts[group] * kChosen;
             i < groups.starts[group + 1] * kChosen; ++i) {
            const auto use = static_cast<std::size_t>(i / kChosen);
            const std::int64_t pair = groups.tokens[use] * kChosen + i % kChosen;
            const std::int64_t expert = experts[static_cast<std::size_t>(pair)];
            const std::int64_t modules[] = {expert, kExperts + expert};
            const loraplex_lora_linear own = {kIn, 1, 2, modules, kOffsets, kOut};
            const Groups alone = {{groups.entries[group]}, {0, 1}, {0}, {0, 1}, {groups.scales[use]}};
            const auto own_step = make_step(table, alone);
            checks.ok(loraplex_add_lora(Pool(1), &own_step, &own, 0, kDtype<T>,
                                        x.data() + pair / pairs_per_row * kIn, kIn, nullptr,
                                        expected.data() + pair * kOutputs, kOutputs));
        }
    }
    for (const int num_threads : {1, 3}) {
        auto result = y;
        checks.ok(loraplex_add_expert_lora(Pool(num_threads), &step, &linear, 0, kExperts, kChosen,
                                           experts.data(), kDtype<T>, x.data(), kIn,
                                           pairs_per_row, nullptr, result.data(), kOutputs));
        checks.same_bits(result.data(), expected.data(), 10 * kChosen * kOutputs, "pairs alone");
    }
}

}  // namespace

void test_route(Checks &checks) {
    Random random(21);
    for (const loraplex_routing_mode mode :
         {LORAPLEX_ROUTING_SOFTMAX, LORAPLEX_ROUTING_CHOSEN_SOFTMAX, LORAPLEX_ROUTING_SIGMOID,
          LORAPLEX_ROUTING_SPARSE_MIXER}) {
        for (const auto &[num_experts, num_chosen] :
             {std::array<std::int64_t, 2>{1, 1}, {3, 2}, {8, 8}, {64, 8}}) {
            check_route(checks, random, rules_of(num_experts, num_chosen, mode));
            check_nan(checks, rules_of(num_experts, num_chosen, mode));
        }
    }
}

void test_grouped_linear(Checks &checks) {
    Random random(22);
    for_each_dtype([&]<typename W>(W) {
        for_each_dtype([&]<typename T>(T) {
            check_grouped<W, T>(checks, random, 1, 1, 17, 1);
            check_grouped<W, T>(checks, random, 3, 2, 130, 302);
            check_grouped<W, T>(checks, random, 40, 4, 5, 17);
        });
    });
}

void test_combine_experts(Checks &checks) {
    Random random(23);
    for_each_dtype([&]<typename T>(T) {
        for (const std::int64_t n : {1, 17, 700}) {
            check_combine<T>(checks, random, 1, n);
            check_combine<T>(checks, random, 8, n);
        }
    });
}

void test_add_expert_lora(Checks &checks) {
    Random random(24);
    for_each_dtype([&]<typename P>(P) {
        for_each_dtype([&]<typename T>(T) {
            check_lora<P, T>(checks, random, 1);
            check_lora<P, T>(checks, random, kChosen);
        });
    });
}

}  // namespace loraplex::selftest
