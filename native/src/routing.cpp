// Choice of experts: for each token by itself, in double precision; then the pairs by expert.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>

#include "loraplex/experts.h"
#include "loraplex/guard.h"
#include "loraplex/pool.h"
#include "row_vectors.h"

namespace loraplex {
namespace {

constexpr double kOut = -std::numeric_limits<double>::infinity();
constexpr std::int64_t kWorthSharing = 1 << 11;  // logits; with fewer, one thread is faster

// Whether a score comes before another: NaN before all numbers.
bool is_before(double a, double b) { return std::isnan(a) ? !std::isnan(b) : a > b; }

// The first of the best scores among those that `is_left` says; `count` if it says none.
template <typename IsLeft>
std::int64_t best_of(const double *scores, std::int64_t count, const IsLeft &is_left) {
    std::int64_t best = count;
    for (std::int64_t i = 0; i < count; ++i) {
        if (is_left(i) && (best == count || is_before(scores[i], scores[best]))) {
            best = i;
        }
    }
    return best;
}

// Not of NaN, if there is a number.
double largest_number(const double *values, std::int64_t count) {
    double largest = kOut;
    for (std::int64_t i = 0; i < count; ++i) {
        largest = std::max(largest, values[i]);
    }
    return largest;
}

double sum_of(const double *values, std::int64_t count) {
    double sum = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
        sum += values[i];
    }
    return sum;
}

void softmax(double *values, std::int64_t count) {
    const double largest = largest_number(values, count);
    for (std::int64_t i = 0; i < count; ++i) {
        values[i] = std::exp(values[i] - largest);
    }
    const double sum = sum_of(values, count);
    for (std::int64_t i = 0; i < count; ++i) {
        values[i] /= sum;
    }
}

// Works on one token after another, in memory of its own.
class Router {
public:
    static std::size_t num_bytes(const loraplex_routing_rules &rules) {
        const std::int64_t numbers = 2 * rules.num_experts + rules.num_groups + rules.num_chosen;
        const std::int64_t flags = rules.num_experts + rules.num_groups;
        return static_cast<std::size_t>(numbers) * sizeof(double) +
               static_cast<std::size_t>(flags) * sizeof(bool);
    }

    Router(const loraplex_routing_rules &rules, const float *selection_bias,
           const float *expert_factors, void *memory)
        : rules_(rules), selection_bias_(selection_bias), expert_factors_(expert_factors),
          scores_(static_cast<double *>(memory)), ranked_(scores_ + rules.num_experts), groups_(ranked_ + rules.num_experts),
          chosen_(groups_ + rules.num_groups),
          is_left_(reinterpret_cast<bool *>(chosen_ + rules.num_chosen)),
          is_group_left_(is_left_ + rules.num_experts) {}

    template <typename T>
    void choose(const T *logits, std::int32_t *experts, float *weights) {
        for (std::int64_t i = 0; i < rules_.num_experts; ++i) {
            scores_[i] = widen(logits[i]);
        }
        std::fill_n(is_left_, rules_.num_experts, true);
        if (rules_.mode == LORAPLEX_ROUTING_SPARSE_MIXER) {
            mix_sparsely(experts);
        } else {
            choose_largest(experts);
        }
        double divisor = 1.0;
        if (rules_.normalizes != 0) {
            divisor = sum_of(chosen_, rules_.num_chosen) + rules_.sum_floor;
        }
        for (std::int64_t i = 0; i < rules_.num_chosen; ++i) {
            const double own = expert_factors_ == nullptr ? 1.0 : expert_factors_[experts[i]];
            weights[i] = static_cast<float>(chosen_[i] / divisor * rules_.factor * own);
        }
    }

private:
    void choose_largest(std::int32_t *experts) {
        if (rules_.mode == LORAPLEX_ROUTING_SOFTMAX) {
            softmax(scores_, rules_.num_experts);
        }
        for (std::int64_t i = 0; i < rules_.num_experts; ++i) {
            if (rules_.mode == LORAPLEX_ROUTING_SIGMOID) {
                scores_[i] = 1.0 / (1.0 + std::exp(-scores_[i]));
            }
            ranked_[i] = scores_[i] + (selection_bias_ == nullptr ? 0.0 : selection_bias_[i]);
        }
        if (rules_.num_groups > 1) {
            keep_best_groups();
        }
        for (std::int64_t i = 0; i < rules_.num_chosen; ++i) {
            const std::int64_t expert = take_best(ranked_);
            experts[i] = static_cast<std::int32_t>(expert);
            chosen_[i] = scores_[expert];
        }
        if (rules_.mode == LORAPLEX_ROUTING_CHOSEN_SOFTMAX) {
            softmax(chosen_, rules_.num_chosen);
        }
    }

    std::int64_t take_best(const double *scores) {
        const std::int64_t best =
            best_of(scores, rules_.num_experts, [&](std::int64_t i) { return is_left_[i]; });
        is_left_[best] = false;
        return best;
    }

    // Puts the experts of the other groups out.
    void keep_best_groups() {
        const std::int64_t size = rules_.num_experts / rules_.num_groups;
        for (std::int64_t group = 0; group < rules_.num_groups; ++group) {
            const double *scores = ranked_ + group * size;
            const std::int64_t best = best_of(scores, size, [](std::int64_t) { return true; });
            groups_[group] = scores[best];
            if (rules_.mode == LORAPLEX_ROUTING_SIGMOID && size > 1) {
                groups_[group] +=
                    scores[best_of(scores, size, [&](std::int64_t i) { return i != best; })];
            }
        }
        std::fill_n(is_group_left_, rules_.num_groups, true);
        const auto is_left = [&](std::int64_t group) { return is_group_left_[group]; };
        for (std::int64_t i = 0; i < rules_.num_chosen_groups; ++i) {
            is_group_left_[best_of(groups_, rules_.num_groups, is_left)] = false;
        }
        for (std::int64_t i = 0; i < rules_.num_experts; ++i) {
            if (is_group_left_[i / size]) {
                ranked_[i] = kOut;
            }
        }
    }

    void mix_sparsely(std::int32_t *experts) {
        for (std::int64_t round = 0; round < rules_.num_chosen; ++round) {
            for (std::int64_t i = 0; i < rules_.num_experts; ++i) {
                ranked_[i] = is_left_[i] ? scores_[i] : kOut;
            }
            const std::int64_t expert = take_best(scores_);
            const double largest = scores_[expert];
            for (std::int64_t i = 0; i < rules_.num_experts; ++i) {
                const double distance =
                    (largest - scores_[i]) / std::max(std::abs(scores_[i]), largest);
                if (distance > 2.0 * rules_.jitter) {
                    ranked_[i] = kOut;
                }
            }
            softmax(ranked_, rules_.num_experts);
            experts[round] = static_cast<std::int32_t>(expert);
            chosen_[round] = ranked_[expert];
        }
    }

    const loraplex_routing_rules &rules_;
    const float *selection_bias_;
    const float *expert_factors_;
    double *scores_;  // those that become weights
    double *ranked_;  // those that are compared
    double *groups_;
    double *chosen_;
    bool *is_left_;
    bool *is_group_left_;
};

// The pairs by expert: a stable counting sort, with `starts` for its counters.
void sort_pairs(const std::int32_t *experts, std::int64_t num_pairs, std::int64_t num_experts,
                std::int32_t *pairs, std::int32_t *starts) {
    std::fill_n(starts, num_experts + 1, 0);
    for (std::int64_t pair = 0; pair < num_pairs; ++pair) {
        ++starts[experts[pair] + 1];
    }
    for (std::int64_t expert = 0; expert < num_experts; ++expert) {
        starts[expert + 1] += starts[expert];
    }
    // From the back, so that starts[e + 1] goes from the end of expert e to its start.
    for (std::int64_t pair = num_pairs - 1; pair >= 0; --pair) {
        pairs[--starts[experts[pair] + 1]] = static_cast<std::int32_t>(pair);
    }
    std::copy_n(starts + 1, num_experts, starts);
    starts[num_experts] = static_cast<std::int32_t>(num_pairs);
}

void check(const loraplex_routing_rules &rules, std::int64_t num_tokens) {
    loraplex::check(rules.num_experts >= 1 && rules.num_chosen >= 1 && rules.num_groups >= 1 &&
                        rules.num_experts <= std::numeric_limits<std::int32_t>::max() &&
                        rules.num_experts % rules.num_groups == 0 &&
                        rules.num_chosen_groups >= 1 &&
                        rules.num_chosen_groups <= rules.num_groups &&
                        rules.num_chosen <= rules.num_experts &&
                        rules.mode >= LORAPLEX_ROUTING_SOFTMAX &&
                        rules.mode <= LORAPLEX_ROUTING_SPARSE_MIXER && num_tokens >= 0 &&
                        num_tokens <= std::numeric_limits<std::int32_t>::max() / rules.num_chosen,
                    "route");
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_route(loraplex_pool *pool, const loraplex_routing_rules *rules,
                               int64_t num_tokens, loraplex_dtype dtype, const void *logits,
                               int64_t logits_stride, const float *selection_bias,
                               const float *expert_factors, int32_t *experts, float *weights,
                               int32_t *pairs, int32_t *starts) {
    using namespace loraplex;
    return guarded([&] {
        check(*rules, num_tokens);
        return for_dtype(dtype, [&]<typename T>(T) {
            const Op op(*pool);
            const std::size_t bytes = Router::num_bytes(*rules);
            auto *memory = static_cast<std::byte *>(pool->worker_scratch(bytes));
            const auto choose = [&](std::int64_t token, int worker) {
                const auto place = static_cast<std::size_t>(worker) *
                                   loraplex_pool::worker_scratch_stride(bytes);
                const std::int64_t first = token * rules->num_chosen;
                Router(*rules, selection_bias, expert_factors, memory + place)
                    .choose(static_cast<const T *>(logits) + token * logits_stride,
                            experts + first, weights + first);
            };
            if (num_tokens * rules->num_experts >= kWorthSharing) {
                pool->parallel_for_tiles(num_tokens, choose);
            } else {
                for (std::int64_t token = 0; token < num_tokens; ++token) {
                    choose(token, 0);
                }
            }
            sort_pairs(experts, num_tokens * rules->num_chosen, rules->num_experts, pairs, starts);
            return LORAPLEX_OK;
        });
    });
}
