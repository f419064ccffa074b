// The groups that one LoRA op works on: those of its step, or what they become for experts.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "loraplex/experts.h"
#include "loraplex/lora.h"
#include "loraplex/pool.h"

namespace loraplex {

// An op whose time is LoRA's. The two readings of the clock take about 40 ns.
class LoraOp {
public:
    explicit LoraOp(loraplex_pool &pool) : pool_(pool), op_(pool), begin_(Clock::now()) {}
    LoraOp(const LoraOp &) = delete;
    LoraOp &operator=(const LoraOp &) = delete;
    ~LoraOp() {
        const std::chrono::nanoseconds time = Clock::now() - begin_;
        pool_.add_lora_ns(time.count());
    }

private:
    using Clock = std::chrono::steady_clock;

    loraplex_pool &pool_;
    Op op_;
    Clock::time_point begin_;  // after the op could begin
};

// Rows of y that one adapter applies to, by one cell of each module.
struct LoraGroups {
    std::int64_t num_groups;
    const std::int64_t *entries;
    const std::int64_t *experts;  // added to the modules' numbers; null: 0
    const std::int64_t *starts;   // into the two arrays below
    const std::int64_t *rows;
    const float *scales;
    std::int64_t num_waves;
    const std::int64_t *wave_starts;
    std::int64_t rows_per_input;  // row r of y has the input r / rows_per_input

    std::int64_t num_rows() const { return starts[num_groups]; }
};

inline LoraGroups groups_of(const loraplex_lora_step &step) {
    return {step.num_groups, step.group_entries, nullptr,        step.group_starts,
            step.token_indices, step.token_scales, step.num_waves, step.wave_starts, 1};
}

// Neighbouring rows of one group.
struct LoraTile {
    std::int64_t group;
    std::int64_t first;  // into rows
    std::int64_t count;
};

inline std::int64_t count_tiles(const LoraGroups &groups, std::int64_t rows_per_tile) {
    std::int64_t num_tiles = 0;
    for (std::int64_t group = 0; group < groups.num_groups; ++group) {
        const std::int64_t count = groups.starts[group + 1] - groups.starts[group];
        num_tiles += (count + rows_per_tile - 1) / rows_per_tile;
    }
    return num_tiles;
}

inline void fill_tiles(const LoraGroups &groups, std::int64_t rows_per_tile, LoraTile *tiles) {
    for (std::int64_t group = 0; group < groups.num_groups; ++group) {
        const std::int64_t end = groups.starts[group + 1];
        for (std::int64_t first = groups.starts[group]; first < end; first += rows_per_tile) {
            *tiles++ = {group, first, std::min(rows_per_tile, end - first)};
        }
    }
}

// The experts of a step's tokens.
struct ExpertChoices {
    std::int64_t num_experts;
    std::int64_t num_chosen;
    const std::int32_t *experts;  // [num_tokens, num_chosen]

    const std::int32_t *of(std::int64_t token) const { return experts + token * num_chosen; }
};

// Cuts the groups of a step by expert, wave by wave. Pairs whose adapter has no LoRA on their expert
// are left out.
class ExpertGroups {
public:
    ExpertGroups(loraplex_pool &pool, const loraplex_lora_step &step,
                 const loraplex_lora_linear &linear, std::int64_t layer, ExpertChoices choices)
        : step_(step), linear_(linear), layer_(layer), choices_(choices) {
        const std::int64_t most_rows = step.group_starts[step.num_groups] * choices.num_chosen;
        const std::int64_t most_groups =
            std::min(most_rows, step.num_groups * choices.num_experts);
        const std::int64_t num_words =
            2 * choices.num_experts + 3 * most_groups + 1 + step.num_waves + 1 + most_rows;
        auto *words = static_cast<std::int64_t *>(pool.list_scratch(
            static_cast<std::size_t>(num_words) * sizeof(std::int64_t) +
            static_cast<std::size_t>(most_rows) * sizeof(float)));
        const auto take = [&words](std::int64_t count) {
            words += count;
            return words - count;
        };
        cursors_ = take(choices.num_experts);
        found_ = take(choices.num_experts);
        entries_ = take(most_groups);
        experts_ = take(most_groups);
        starts_ = take(most_groups + 1);
        wave_starts_ = take(step.num_waves + 1);
        rows_ = take(most_rows);
        scales_ = reinterpret_cast<float *>(words);
        fill();
    }

    LoraGroups groups(std::int64_t rows_per_input) const {
        return {num_groups_, entries_,        experts_,     starts_,       rows_,
                scales_,     step_.num_waves, wave_starts_, rows_per_input};
    }

private:
    static constexpr std::int64_t kUnseen = -1;
    static constexpr std::int64_t kNoLora = -2;

    void fill() {
        std::fill_n(cursors_, choices_.num_experts, kUnseen);
        starts_[0] = wave_starts_[0] = 0;
        for (std::int64_t wave = 0; wave < step_.num_waves; ++wave) {
            for (std::int64_t group = step_.wave_starts[wave];
                 group < step_.wave_starts[wave + 1]; ++group) {
                add(group);
            }
            wave_starts_[wave + 1] = num_groups_;
        }
    }

    // A counting sort of the pairs of one group, over the experts that they have.
    void add(std::int64_t group) {
        const std::int64_t entry = step_.group_entries[group];
        std::int64_t num_found = 0;
        for_each_pair(group, [&](std::int64_t, std::int64_t, std::int64_t expert) {
            if (cursors_[expert] == kUnseen) {
                cursors_[expert] = has_lora(entry, expert) ? 0 : kNoLora;
                found_[num_found++] = expert;
            }
            cursors_[expert] += cursors_[expert] == kNoLora ? 0 : 1;
        });
        for (std::int64_t i = 0; i < num_found; ++i) {
            std::int64_t &cursor = cursors_[found_[i]];
            if (cursor == kNoLora) {
                continue;
            }
            const std::int64_t count = cursor;
            cursor = starts_[num_groups_];
            entries_[num_groups_] = entry;
            experts_[num_groups_] = found_[i];
            starts_[++num_groups_] = cursor + count;
        }
        for_each_pair(group, [&](std::int64_t use, std::int64_t pair, std::int64_t expert) {
            if (cursors_[expert] != kNoLora) {
                rows_[cursors_[expert]] = pair;
                scales_[cursors_[expert]++] = step_.token_scales[use];
            }
        });
        for (std::int64_t i = 0; i < num_found; ++i) {
            cursors_[found_[i]] = kUnseen;
        }
    }

    // body(index of the use, pair, expert)
    template <typename Body>
    void for_each_pair(std::int64_t group, const Body &body) const {
        for (std::int64_t use = step_.group_starts[group]; use < step_.group_starts[group + 1];
             ++use) {
            const std::int64_t token = step_.token_indices[use];
            for (std::int64_t choice = 0; choice < choices_.num_chosen; ++choice) {
                body(use, token * choices_.num_chosen + choice, choices_.of(token)[choice]);
            }
        }
    }

    bool has_lora(std::int64_t entry, std::int64_t expert) const {
        const std::int32_t *ranks =
            step_.ranks + (entry * step_.num_layers + layer_) * step_.num_modules + expert;
        return std::any_of(linear_.modules, linear_.modules + linear_.num_modules,
                           [ranks](std::int64_t module) { return ranks[module] > 0; });
    }

    const loraplex_lora_step &step_;
    const loraplex_lora_linear &linear_;
    std::int64_t layer_;
    ExpertChoices choices_;
    std::int64_t *cursors_;  // by expert: kUnseen, kNoLora, a number of pairs, then their place
    std::int64_t *found_;    // experts of the group at hand
    std::int64_t num_groups_ = 0;
    std::int64_t *entries_;
    std::int64_t *experts_;
    std::int64_t *starts_;
    std::int64_t *wave_starts_;
    std::int64_t *rows_;
    float *scales_;
};

}  // namespace loraplex
