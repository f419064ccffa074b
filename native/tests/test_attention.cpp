#include <algorithm>
#include <cmath>
#include <string_view>

#include "loraplex/attention.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeads = 6;
constexpr std::int64_t kBlockSize = 16;

// Keys and values of the blocks 0 .. num_blocks - 1.
template <typename KV>
struct Cache {
    std::int64_t num_blocks;
    std::int64_t head_dim;
    std::vector<std::byte> keys, values;

    Cache(std::int64_t blocks, std::int64_t dim)
        : num_blocks(blocks), head_dim(dim),
          keys(static_cast<std::size_t>(blocks * kKvHeads * head_bytes())), values(keys.size()) {}

    std::int64_t head_bytes() const {
        constexpr std::int64_t kScale = std::is_same_v<KV, std::int8_t> ? sizeof(float) : 0;
        return (head_dim * static_cast<std::int64_t>(sizeof(KV)) + kScale) * kBlockSize;
    }

    double scale(const std::byte *head, std::int64_t offset) const {
        if constexpr (std::is_same_v<KV, std::int8_t>) {
            float scale;
            std::memcpy(&scale, head + head_dim * kBlockSize + offset * 4, sizeof(scale));
            return scale;
        } else {
            return 1.0;
        }
    }

    double element(const std::byte *head, std::int64_t index, std::int64_t offset) const {
        KV value;
        std::memcpy(&value, head + index * static_cast<std::int64_t>(sizeof(KV)), sizeof(KV));
        return widen(value) * scale(head, offset);
    }

    double key(std::int64_t slot, std::int64_t head, std::int64_t d) const {
        const std::int64_t offset = slot % kBlockSize;
        return element(keys.data() + (slot / kBlockSize * kKvHeads + head) * head_bytes(),
                       d * kBlockSize + offset, offset);
    }

    double value(std::int64_t slot, std::int64_t head, std::int64_t d) const {
        const std::int64_t offset = slot % kBlockSize;
        return element(values.data() + (slot / kBlockSize * kKvHeads + head) * head_bytes(),
                       offset * head_dim + d, offset);
    }
};

// A cache as numbers, [slot, head, element]: what it stores is read once, not for each query.
struct Contents {
    std::int64_t head_dim;
    std::vector<double> keys, values;

    template <typename KV>
    explicit Contents(const Cache<KV> &cache) : head_dim(cache.head_dim) {
        for (std::int64_t slot = 0; slot < cache.num_blocks * kBlockSize; ++slot) {
            for (std::int64_t head = 0; head < kKvHeads; ++head) {
                for (std::int64_t d = 0; d < head_dim; ++d) {
                    keys.push_back(cache.key(slot, head, d));
                    values.push_back(cache.value(slot, head, d));
                }
            }
        }
    }

    std::int64_t place(std::int64_t slot, std::int64_t head) const {
        return (slot * kKvHeads + head) * head_dim;
    }
};

template <typename T, typename KV>
void write(Checks &checks, loraplex_pool *pool, Cache<KV> &cache, const std::vector<T> &key,
           const std::vector<T> &value, const std::vector<std::int64_t> &slots) {
    const std::int64_t stride = kKvHeads * cache.head_dim;
    checks.ok(loraplex_write_kv(pool, static_cast<std::int64_t>(slots.size()), kKvHeads,
                                cache.head_dim, kBlockSize, slots.data(), kDtype<T>, key.data(),
                                stride, value.data(), stride, kDtype<KV>, cache.keys.data(),
                                cache.values.data()));
}

// Every slot of the cache, in an order that is not theirs.
std::vector<std::int64_t> shuffled_slots(Random &random, std::int64_t num_blocks) {
    std::vector<std::int64_t> slots;
    for (std::int64_t slot = 0; slot < num_blocks * kBlockSize; ++slot) {
        slots.push_back(slot);
    }
    for (std::size_t i = slots.size(); i > 1; --i) {
        std::swap(slots[i - 1], slots[static_cast<std::size_t>(
                                    random.below(static_cast<std::int64_t>(i)))]);
    }
    return slots;
}

// How far an element of a head that was stored may be off.
template <typename T, typename KV>
double storage_error(const T *head, std::int64_t head_dim, double element) {
    if constexpr (std::is_same_v<KV, std::int8_t>) {
        double largest = 0.0;
        for (std::int64_t d = 0; d < head_dim; ++d) {
            largest = std::max(largest, std::abs(double{widen(head[d])}));
        }
        return 0.501 * largest / 127.0;
    } else {
        return kRounding<KV> * std::abs(element) + 0x1p-24;
    }
}

template <typename T, typename KV>
void check_write(Checks &checks, Random &random, std::int64_t head_dim) {
    const std::int64_t num_blocks = 3;
    const auto slots = shuffled_slots(random, num_blocks);
    const auto count = static_cast<std::int64_t>(slots.size()) * kKvHeads * head_dim;
    const auto key = random_values<T>(random, count, 3.0);
    const auto value = random_values<T>(random, count, 3.0);
    Cache<KV> cache(num_blocks, head_dim);
    write(checks, Pool(3), cache, key, value, slots);
    for (std::size_t i = 0; i < key.size(); ++i) {
        const auto index = static_cast<std::int64_t>(i);
        const std::int64_t slot = slots[i / static_cast<std::size_t>(kKvHeads * head_dim)];
        const std::int64_t head = index / head_dim % kKvHeads;
        const std::int64_t d = index % head_dim;
        checks.near(cache.key(slot, head, d), widen(key[i]),
                    storage_error<T, KV>(&key[i] - d, head_dim, widen(key[i])), "key");
        checks.near(cache.value(slot, head, d), widen(value[i]),
                    storage_error<T, KV>(&value[i] - d, head_dim, widen(value[i])), "value");
    }
    Cache<KV> one_by_one(num_blocks, head_dim);
    const Pool pool(1);
    for (std::size_t i = 0; i < slots.size(); ++i) {
        const auto first = static_cast<std::ptrdiff_t>(i) * kKvHeads * head_dim;
        const auto last = first + kKvHeads * head_dim;
        write<T, KV>(checks, pool, one_by_one, {key.begin() + first, key.begin() + last},
                     {value.begin() + first, value.begin() + last}, {slots[i]});
    }
    checks.same_bits(one_by_one.keys.data(), cache.keys.data(),
                     static_cast<std::int64_t>(cache.keys.size()), "keys one by one");
    checks.same_bits(one_by_one.values.data(), cache.values.data(),
                     static_cast<std::int64_t>(cache.values.size()), "values one by one");
}

constexpr std::int64_t kMaxDistance = 21;
constexpr std::int64_t kBiases = 2 * kMaxDistance + 1;

// [kHeads, kBiases]
std::vector<float> position_bias() {
    std::vector<float> numbers;
    for (std::int64_t i = 0; i < kHeads * kBiases; ++i) {
        numbers.push_back(static_cast<float>(i * 37 % 101) / 40.0f - 1.0f);
    }
    return numbers;
}

constexpr float kSlopes[kHeads] = {0.5f, 0.25f, 0.125f, 0.0f, 1.0f, 2.0f};
constexpr float kSinkLogits[kHeads] = {-2.0f, 0.0f, 1.0f, 3.0f, 20.0f, -90.0f};

// What a token sees, and what becomes of a score.
struct Rules {
    std::int64_t window = 0;
    std::int64_t num_sinks = 0;
    float scale = 0.2f;
    float soft_cap = 0.0f;
    bool has_slopes = false;
    bool has_sink_logits = false;
    bool has_position_bias = false;
    bool is_causal = true;

    double score(double product, std::int64_t head, std::int64_t distance) const {
        double score = double{scale} * product;
        if (soft_cap > 0.0f) {
            score = soft_cap * std::tanh(score / soft_cap);
        }
        if (has_position_bias) {
            const std::int64_t entry = std::clamp(distance, -kMaxDistance, kMaxDistance);
            score += position_bias()[static_cast<std::size_t>(head * kBiases + kMaxDistance +
                                                              entry)];
        }
        return score + (has_slopes ? double{kSlopes[head]} * static_cast<double>(distance) : 0.0);
    }
};

// Some rows: how many tokens each computes, and how many positions it has then.
struct Rows {
    std::vector<std::int64_t> query_lens, seq_lens;
    std::vector<std::int64_t> query_start_loc = {0};
    std::vector<std::int64_t> block_tables;
    std::int64_t max_blocks = 0;

    Rows(Random &random, std::vector<std::int64_t> queries, std::vector<std::int64_t> seqs,
         std::int64_t num_blocks)
        : query_lens(std::move(queries)), seq_lens(std::move(seqs)) {
        max_blocks = (*std::max_element(seq_lens.begin(), seq_lens.end()) - 1) / kBlockSize + 1;
        for (const std::int64_t query_len : query_lens) {
            query_start_loc.push_back(query_start_loc.back() + query_len);
            for (std::int64_t block = 0; block < max_blocks; ++block) {
                block_tables.push_back(random.below(num_blocks));
            }
        }
    }

    loraplex_attention_step step(std::int64_t head_dim, const Rules &rules) const {
        return {static_cast<std::int64_t>(seq_lens.size()), kHeads, kKvHeads, head_dim, kBlockSize,
                rules.window, rules.num_sinks, rules.scale, rules.soft_cap,
                rules.has_slopes ? kSlopes : nullptr, query_start_loc.data(), seq_lens.data(),
                block_tables.data(), max_blocks, rules.is_causal};
    }

    std::int64_t slot(std::int64_t row, std::int64_t position) const {
        const auto entry = static_cast<std::size_t>(row * max_blocks + position / kBlockSize);
        return block_tables[entry] * kBlockSize + position % kBlockSize;
    }
};

// What a token at `own` sees.
std::vector<std::int64_t> seen(std::int64_t own, std::int64_t seq_len, const Rules &rules) {
    std::vector<std::int64_t> positions;
    for (std::int64_t position = 0; position < seq_len; ++position) {
        const bool is_near = rules.window == 0 || std::abs(position - own) < rules.window;
        if ((is_near && (!rules.is_causal || position <= own)) ||
            (position < rules.num_sinks && position <= own)) {
            positions.push_back(position);
        }
    }
    return positions;
}

// Attention of one head of one token at `own` that sees the positions. rounding: that of the
// weights.
template <typename T>
void check_head(Checks &checks, const Contents &contents, const Rows &rows, const Rules &rules,
                std::int64_t row, std::int64_t own, const std::vector<std::int64_t> &positions,
                std::int64_t head, double rounding, const T *query, const T *output) {
    const auto head_dim = static_cast<std::size_t>(contents.head_dim);
    std::vector<double> wide(head_dim), weights, sums(head_dim), magnitudes(head_dim);
    for (std::size_t d = 0; d < head_dim; ++d) {
        wide[d] = widen(query[d]);
    }
    std::vector<std::int64_t> places;
    for (const std::int64_t position : positions) {
        places.push_back(contents.place(rows.slot(row, position), head / (kHeads / kKvHeads)));
        const double *key = contents.keys.data() + places.back();
        double score = 0.0;
        for (std::size_t d = 0; d < head_dim; ++d) {
            score += wide[d] * key[d];
        }
        weights.push_back(rules.score(score, head, position - own));
    }
    const double largest = *std::max_element(weights.begin(), weights.end());
    double total = rules.has_sink_logits ? std::exp(kSinkLogits[head] - largest) : 0.0;
    for (double &weight : weights) {
        weight = std::exp(weight - largest);
        total += weight;
    }
    for (std::size_t i = 0; i < positions.size(); ++i) {
        const double *value = contents.values.data() + places[i];
        const double weight = weights[i] / total;
        for (std::size_t d = 0; d < head_dim; ++d) {
            const double share = weight * value[d];
            sums[d] += share;
            magnitudes[d] += std::abs(share);
        }
    }
    for (std::size_t d = 0; d < head_dim; ++d) {
        checks.near(widen(output[d]), sums[d],
                    (2e-5 + rounding) * magnitudes[d] +
                        kRounding<T> * std::abs(sums[d]) * 1.01 + 0x1p-24,
                    [&] {
                        return "head of " + std::to_string(head_dim) + ", element " +
                               std::to_string(d);
                    });
    }
}

// Whether weights and values are multiplied by pairs of bfloat16, which rounds weights.
template <typename T, typename KV>
bool multiplies_pairs(std::uint64_t features) {
    return std::is_same_v<T, Bfloat16> && std::is_same_v<KV, Bfloat16> &&
           std::string_view(loraplex_instruction_set()) == "x86-64-v4" &&
           (features & loraplex_cpu_features() & LORAPLEX_CPU_AVX512_BF16) != 0;
}

template <typename T, typename KV>
void check_attention(Checks &checks, Random &random, std::int64_t head_dim, const Rules &rules,
                     std::vector<std::int64_t> query_lens = {1, 3, 40, 1, 17},
                     std::uint64_t features = ~std::uint64_t{0}) {
    const bool has_pairs = multiplies_pairs<T, KV>(features);
    const double rounding = has_pairs ? kRounding<Bfloat16> : 0.0;
    const std::int64_t num_blocks = 9;
    Cache<KV> cache(num_blocks, head_dim);
    const auto slots = shuffled_slots(random, num_blocks);
    const auto count = static_cast<std::int64_t>(slots.size()) * kKvHeads * head_dim;
    write(checks, Pool(2), cache, random_values<T>(random, count), random_values<T>(random, count),
          slots);
    const Contents contents(cache);
    const Rows rows(random, query_lens, {1, 50, 40, 133, 80}, num_blocks);
    const std::vector<float> bias = position_bias();
    const std::int64_t stride = kHeads * head_dim;
    const std::int64_t num_tokens = rows.query_start_loc.back();
    const auto query = random_values<T>(random, num_tokens * stride, 2.0);
    std::vector<T> output(query.size());
    const auto run = [&](int num_threads, const Rows &some, const T *q, T *out) {
        const auto step = some.step(head_dim, rules);
        const Pool pool(num_threads);
        checks.ok(loraplex_pool_limit_cpu_features(pool, features));
        checks.ok(loraplex_paged_attention(pool, &step, kDtype<KV>, cache.keys.data(),
                                           cache.values.data(),
                                           rules.has_sink_logits ? kSinkLogits : nullptr,
                                           rules.has_position_bias ? bias.data() : nullptr,
                                           rules.has_position_bias ? kMaxDistance : 0, kDtype<T>, q, stride, out, stride));
    };
    run(1, rows, query.data(), output.data());
    for (std::size_t row = 0; row < rows.seq_lens.size(); ++row) {
        const std::int64_t first_token = rows.query_start_loc[row];
        for (std::int64_t i = 0; i < rows.query_lens[row]; ++i) {
            const std::int64_t own = rows.seq_lens[row] - rows.query_lens[row] + i;
            const auto positions = seen(own, rows.seq_lens[row], rules);
            for (std::int64_t head = 0; head < kHeads; ++head) {
                const std::int64_t at = (first_token + i) * stride + head * head_dim;
                check_head(checks, contents, rows, rules, static_cast<std::int64_t>(row), own,
                           positions, head, rounding, query.data() + at, output.data() + at);
            }
        }
        Rows alone = rows;
        alone.seq_lens = {rows.seq_lens[row]};
        alone.query_start_loc = {0, rows.query_lens[row]};
        alone.block_tables.erase(alone.block_tables.begin(),
                                 alone.block_tables.begin() +
                                     static_cast<std::ptrdiff_t>(row) * rows.max_blocks);
        std::vector<T> result(static_cast<std::size_t>(rows.query_lens[row] * stride));
        run(2, alone, query.data() + first_token * stride, result.data());
        checks.same_bits(result.data(), output.data() + first_token * stride,
                         rows.query_lens[row] * stride, "alone");
    }
    std::vector<T> shared(query.size());
    run(3, rows, query.data(), shared.data());
    checks.same_bits(shared.data(), output.data(), num_tokens * stride, "three threads");
    if (has_pairs) {
        check_attention<T, KV>(checks, random, head_dim, rules, query_lens, 0);
    }
}

template <typename Body>
void for_each_storage(const Body &body) {
    for_each_dtype([&]<typename T>(T) {
        for_each_dtype([&]<typename KV>(KV) { body.template operator()<T, KV>(); });
        body.template operator()<T, std::int8_t>();
    });
}

}  // namespace

void test_write_kv(Checks &checks) {
    Random random(4);
    for_each_storage([&]<typename T, typename KV>() {
        for (const std::int64_t head_dim : {6, 20, 64}) {
            check_write<T, KV>(checks, random, head_dim);
        }
    });
}

void test_attention(Checks &checks) {
    Random random(5);
    for_each_storage([&]<typename T, typename KV>() {
        check_attention<T, KV>(checks, random, 20, {});
        check_attention<T, KV>(checks, random, 64, {.scale = 0.125f});
        check_attention<T, KV>(checks, random, 64, {.window = 21});
        check_attention<T, KV>(checks, random, 64, {.window = 21, .num_sinks = 5});
        check_attention<T, KV>(checks, random, 20, {.window = 3, .num_sinks = 70});
        check_attention<T, KV>(checks, random, 4, {.soft_cap = 1.5f});
        check_attention<T, KV>(checks, random, 20, {.has_slopes = true});
        check_attention<T, KV>(checks, random, 20, {.has_sink_logits = true});
        check_attention<T, KV>(checks, random, 20, {.has_position_bias = true});
        check_attention<T, KV>(checks, random, 64, {.has_position_bias = true, .is_causal = false},
                               {1, 50, 40, 133, 80});
        check_attention<T, KV>(checks, random, 20, {.is_causal = false}, {3, 1, 44, 2, 17});
        check_attention<T, KV>(checks, random, 20,
                               {.window = 21, .num_sinks = 5, .is_causal = false},
                               {1, 50, 40, 133, 80});
        check_attention<T, KV>(checks, random, 256,
                               {.window = 40,
                                .num_sinks = 3,
                                .scale = 0.05f,
                                .soft_cap = 2.0f,
                                .has_slopes = true,
                                .has_sink_logits = true});
    });
}

}  // namespace loraplex::selftest
