// Changes of outputs by adapters in addition to LoRA: biases, DoRA's factors.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "lora_rows.h"
#include "loraplex/dtype.h"
#include "loraplex/lora.h"
#include "loraplex/pool.h"
#include "loraplex/simd.h"

namespace loraplex {

inline constexpr std::int64_t kVectorColumns = 128;  // of the tokens of a step at a time
inline constexpr std::int64_t kSerialElements = 32 * 1024;  // less is not worth a hand-over

// work: elements of all tiles, of matrices or outputs
template <typename Fn>
void run_lora_tiles(loraplex_pool &pool, std::int64_t work, std::int64_t num_tiles, const Fn &fn) {
    if (work > kSerialElements) {
        pool.parallel_for_tiles(num_tiles, fn);
    } else {
        loraplex_pool::serial_for_tiles(num_tiles, fn);
    }
}

// One call, of Page's vectors.
template <typename Page>
class LoraVectors {
public:
    LoraVectors(loraplex_pool &pool, const loraplex_lora_step &step,
                const loraplex_lora_linear &linear, std::int64_t layer, OutputRows y)
        : pool_(pool), step_(step), linear_(linear), layer_(layer), y_(y) {}

    void run() {
        if (step_.vector_starts == nullptr) {
            return;
        }
        std::int64_t most_tokens = 0, num_tiles = 0, work = 0;
        for (std::int64_t module = 0; module < linear_.num_modules; ++module) {
            std::int64_t num_tokens = 0;
            for (const loraplex_output_vector &vector : vectors(module)) {
                num_tokens += vector.num_tokens;
                work += vector.num_tokens * vector.size;
            }
            most_tokens = std::max(most_tokens, num_tokens);
            num_tiles += vector_tiles(module);
        }
        if (work == 0) {
            return;
        }
        const std::size_t bytes =
            static_cast<std::size_t>(most_tokens * kVectorColumns) * sizeof(float);
        worker_memory_ = static_cast<std::byte *>(pool_.worker_scratch(bytes));
        worker_stride_ = loraplex_pool::worker_scratch_stride(bytes);
        run_lora_tiles(pool_, work, num_tiles, [&](std::int64_t tile, int worker) {
            std::int64_t module = 0;
            while (tile >= vector_tiles(module)) {
                tile -= vector_tiles(module++);
            }
            const std::int64_t first = tile * kVectorColumns;
            add_columns(module, first,
                        std::min(first + kVectorColumns, linear_.out_features[module]), worker);
        });
    }

private:
    std::span<const loraplex_output_vector> vectors(std::int64_t module) const {
        const std::int64_t *starts =
            step_.vector_starts + layer_ * step_.num_modules + linear_.modules[module];
        return {step_.vectors + starts[0], step_.vectors + starts[1]};
    }

    std::int64_t vector_tiles(std::int64_t module) const {
        return (linear_.out_features[module] + kVectorColumns - 1) / kVectorColumns;
    }

    // Columns first to end of one module. All shares are computed before any is added.
    void add_columns(std::int64_t module, std::int64_t first, std::int64_t end,
                     int worker) const {
        float *share = shares(worker);
        for (const loraplex_output_vector &vector : vectors(module)) {
            const std::int64_t from = std::max(first, vector.first);
            const std::int64_t to = std::min(end, vector.first + vector.size);
            for (std::int64_t t = 0; t < vector.num_tokens && from < to; ++t) {
                const float *values = y_.widened(
                    vector.token_indices[t], linear_.out_offsets[module] + from, to - from, share);
                scale_and_shift(values, elements(vector.factor, from - vector.first),
                                elements(vector.shift, from - vector.first),
                                vector.token_scales[t], to - from, share);
                share += to - from;
            }
        }
        share = shares(worker);
        for (const loraplex_output_vector &vector : vectors(module)) {
            const std::int64_t from = std::max(first, vector.first);
            const std::int64_t to = std::min(end, vector.first + vector.size);
            for (std::int64_t t = 0; t < vector.num_tokens && from < to; ++t) {
                y_.add(vector.token_indices[t], linear_.out_offsets[module] + from, to - from,
                       share);
                share += to - from;
            }
        }
    }

    static const Page *elements(const void *vector, std::int64_t first) {
        return vector == nullptr ? nullptr : static_cast<const Page *>(vector) + first;
    }

    // share = (values * factor + shift) * scale; without a factor, shift * scale. values may be share.
    static void scale_and_shift(const float *values, const Page *factor, const Page *shift,
                                float scale, std::int64_t count, float *share) {
        std::int64_t i = 0;
        for (; i + kLanes <= count; i += kLanes) {
            Floats value = zeros();
            if (factor != nullptr) {
                value = loraplex::multiply(load(values + i), load(factor + i));
            }
            if (shift != nullptr) {
                value = add(value, load(shift + i));
            }
            store(share + i, loraplex::multiply(value, broadcast(scale)));
        }
        for (; i < count; ++i) {
            float value = 0.0f;
            if (factor != nullptr) {
                value = values[i] * widen(factor[i]);
            }
            if (shift != nullptr) {
                value += widen(shift[i]);
            }
            share[i] = value * scale;
        }
    }

    float *shares(int worker) const {
        return reinterpret_cast<float *>(worker_memory_ +
                                         static_cast<std::size_t>(worker) * worker_stride_);
    }

    loraplex_pool &pool_;
    const loraplex_lora_step &step_;
    const loraplex_lora_linear &linear_;
    std::int64_t layer_;
    OutputRows y_;
    std::byte *worker_memory_ = nullptr;
    std::size_t worker_stride_ = 0;
};

}  // namespace loraplex
