// LoRA of a layer whose heads latent attention takes apart (latent.h): two products by head.
//
// A unit is some heads of one token. A head's sums are those of lora.cpp: a chain per lane and the
// lanes pairwise for the first product, a chain over the ranks for the second.
#include <algorithm>
#include <cstddef>
#include <span>
#include <stdexcept>

#include "block_product.h"
#include "lora_groups.h"
#include "lora_rows.h"
#include "lora_shrink.h"
#include "lora_vectors.h"
#include "loraplex/guard.h"
#include "loraplex/latent.h"
#include "loraplex/pool.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kUnitHeads = 8;

bool is_valid(const loraplex_lora_step &step, const loraplex_heads_place &place) {
    return place.num_heads >= 1 && place.key_size >= 1 && place.value_size >= 1 &&
           place.latent_size >= 1 && place.module >= 0 && step.num_layers == 1 &&
           place.module < step.num_modules;
}

// x [tokens, heads, ...]: the heads have a stride.
std::int64_t first_of(std::int64_t token, std::int64_t head, std::int64_t stride,
                      std::int64_t head_stride) {
    return token * stride + head * head_stride;
}

// One call of add_heads_lora.
template <typename Page>
class HeadsLora {
public:
    HeadsLora(loraplex_pool &pool, const loraplex_lora_step &step,
              const loraplex_heads_place &place, const InputRows &x, std::int64_t x_stride,
              std::int64_t x_head_stride, const OutputRows &y)
        : pool_(pool), step_(step), place_(place), x_(x), x_stride_(x_stride),
          x_head_stride_(x_head_stride), y_(y),
          in_(place.is_of_keys ? place.key_size : place.latent_size),
          out_(place.is_of_keys ? place.latent_size : place.value_size) {}

    void run() {
        for (std::int64_t group = 0; group < step_.num_groups; ++group) {
            max_rank_ = std::max<std::int64_t>(max_rank_, step_.ranks[cell(group)]);
        }
        if (max_rank_ == 0) {
            return;
        }
        const std::int64_t floats = kShrinkTokens * in_ + kUnitHeads * (max_rank_ + out_);
        const std::size_t bytes = static_cast<std::size_t>(floats) * sizeof(float);
        worker_memory_ = static_cast<std::byte *>(pool_.worker_scratch(bytes));
        worker_stride_ = loraplex_pool::worker_scratch_stride(bytes);
        for (std::int64_t wave = 0; wave < step_.num_waves; ++wave) {
            run_wave(step_.wave_starts[wave], step_.wave_starts[wave + 1]);
        }
    }

private:
    std::int64_t cell(std::int64_t group) const {
        return step_.group_entries[group] * step_.num_modules + place_.module;
    }

    // In a wave a token occurs once.
    void run_wave(std::int64_t first_group, std::int64_t end_group) const {
        const std::int64_t units_per_token = divide_up(place_.num_heads, kUnitHeads);
        const std::int64_t first = step_.group_starts[first_group];
        const std::int64_t num_tokens = step_.group_starts[end_group] - first;
        const std::int64_t work = num_tokens * place_.num_heads * max_rank_ * (in_ + out_);
        run_lora_tiles(pool_, work, num_tokens * units_per_token,
                       [&](std::int64_t unit, int worker) {
                           const std::int64_t index = first + unit / units_per_token;
                           const std::int64_t *ends = step_.group_starts + first_group + 1;
                           const std::int64_t group =
                               std::upper_bound(ends, step_.group_starts + end_group + 1, index) -
                               ends + first_group;
                           run_heads(group, index, unit % units_per_token * kUnitHeads, worker);
                       });
    }

    void run_heads(std::int64_t group, std::int64_t index, std::int64_t first_head,
                   int worker) const {
        const std::int64_t rank = step_.ranks[cell(group)];
        if (rank == 0) {
            return;
        }
        const std::int64_t num_heads = std::min(kUnitHeads, place_.num_heads - first_head);
        const std::int64_t token = step_.token_indices[index];
        const float scale = step_.token_scales[index] * step_.scales[cell(group)];
        auto *wide = reinterpret_cast<float *>(worker_memory_ +
                                               static_cast<std::size_t>(worker) * worker_stride_);
        const Matrix<float> reduced{wide + kShrinkTokens * in_, rank};
        float *sums = reduced.data + kUnitHeads * max_rank_;
        const Page *a = static_cast<const Page *>(step_.pages) + step_.offsets[cell(group)];
        const Page *b = a + rank * place_.latent_size;
        if (place_.is_of_keys) {
            for (std::int64_t head = 0; head < num_heads; ++head) {
                reduce(token, first_head + head, 1, b + of_head(first_head + head), out_features(),
                       rank, wide, reduced.at(head, 0));
            }
        } else {
            for (std::int64_t head = 0; head < num_heads; head += kShrinkTokens) {
                reduce(token, first_head + head, std::min(kShrinkTokens, num_heads - head), a,
                       place_.latent_size, rank, wide, reduced.at(head, 0));
            }
        }
        std::for_each_n(reduced.data, num_heads * rank, [scale](float &sum) { sum *= scale; });
        if (place_.is_of_keys) {
            expand(num_heads, reduced, rank, {a, place_.latent_size}, sums);
        } else {
            for (std::int64_t head = 0; head < num_heads; ++head) {
                const Page *values = b + of_head(first_head + head) + place_.key_size;
                expand(1, reduced.at(head, 0), rank, {values, out_features()}, sums + head * out_);
            }
        }
        for (std::int64_t head = 0; head < num_heads; ++head) {
            y_.add(token * place_.num_heads + first_head + head, 0, out_, sums + head * out_);
        }
    }

    std::int64_t out_features() const {
        return place_.num_heads * (place_.key_size + place_.value_size);
    }

    std::int64_t of_head(std::int64_t head) const {
        return head * (place_.key_size + place_.value_size);
    }

    // sums[h][r] = x of the token's head first_head + h . row r
    void reduce(std::int64_t token, std::int64_t first_head, std::int64_t num_heads,
                const Page *first_row, std::int64_t row_stride, std::int64_t rank, float *wide,
                Matrix<float> sums) const {
        const float *inputs[kShrinkTokens];
        for (std::int64_t h = 0; h < num_heads; ++h) {
            inputs[h] = x_.widened(0, first_of(token, first_head + h, x_stride_, x_head_stride_),
                                   in_, wide + h * in_);
        }
        const Page *rows[kShrinkRows];
        for (std::int64_t first = 0; first < rank; first += kShrinkRows) {
            const std::int64_t count = std::min<std::int64_t>(kShrinkRows, rank - first);
            for (std::int64_t r = 0; r < count; ++r) {
                rows[r] = first_row + (first + r) * row_stride;
            }
            dot_rows(inputs, static_cast<int>(num_heads), rows, static_cast<int>(count), {0, in_},
                     sums.at(0, first));
        }
    }

    void expand(std::int64_t num_heads, Matrix<float> reduced, std::int64_t rank,
                Matrix<const Page> rows, float *sums) const {
        multiply(num_heads, out_, rank, Matrix<const float>{reduced.data, reduced.stride}, rows,
                 Matrix<float>{sums, out_}, true);
    }

    loraplex_pool &pool_;
    const loraplex_lora_step &step_;
    const loraplex_heads_place &place_;
    const InputRows &x_;
    std::int64_t x_stride_;
    std::int64_t x_head_stride_;
    const OutputRows &y_;  // [tokens * heads, out]
    std::int64_t in_;
    std::int64_t out_;
    std::int64_t max_rank_ = 0;
    std::byte *worker_memory_ = nullptr;
    std::size_t worker_stride_ = 0;
};

std::span<const loraplex_output_vector> vectors_of(const loraplex_lora_step &step,
                                                   std::int64_t module) {
    if (step.vector_starts == nullptr) {
        return {};
    }
    const std::int64_t *starts = step.vector_starts + module;
    return {step.vectors + starts[0], step.vectors + starts[1]};
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_add_heads_lora(loraplex_pool *pool, const loraplex_lora_step *step,
                                        const loraplex_heads_place *place, loraplex_dtype dtype,
                                        const void *x, int64_t x_stride, int64_t x_head_stride,
                                        void *y) {
    using namespace loraplex;
    return guarded([&] {
        check(is_valid(*step, *place), "add_heads_lora");
        const InputRows inputs(dtype, x, 0);
        const OutputRows outputs(dtype, y,
                                 place->is_of_keys ? place->latent_size : place->value_size);
        return for_dtype(step->pages_dtype, [&]<typename Page>(Page) {
            const LoraOp op(*pool);
            HeadsLora<Page>(*pool, *step, *place, inputs, x_stride, x_head_stride, outputs).run();
            return loraplex_status{LORAPLEX_OK};
        });
    });
}

loraplex_status loraplex_scale_heads(loraplex_pool *pool, const loraplex_lora_step *step,
                                     const loraplex_heads_place *place, int64_t num_tokens,
                                     loraplex_dtype dtype, const void *x, int64_t x_stride,
                                     int64_t x_head_stride, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(is_valid(*step, *place) && num_tokens >= 0, "scale_heads");
        const std::int64_t num_heads = place->num_heads;
        const bool is_of_keys = place->is_of_keys != 0;
        const std::int64_t size = is_of_keys ? place->key_size : place->value_size;
        const std::int64_t head_size = place->key_size + place->value_size;
        const std::int64_t before = is_of_keys ? 0 : place->key_size;
        return for_dtype(dtype, [&]<typename T>(T) {
            return for_dtype(step->pages_dtype, [&]<typename Page>(Page) {
                const auto head_of = [&](std::int64_t token, std::int64_t head) {
                    return static_cast<const T *>(x) +
                           first_of(token, head, x_stride, x_head_stride);
                };
                T *target = static_cast<T *>(output);
                for_each_row(*pool, num_tokens, num_heads * size, [&](std::int64_t token) {
                    for (std::int64_t head = 0; head < num_heads; ++head) {
                        std::copy_n(head_of(token, head), size,
                                    target + (token * num_heads + head) * size);
                    }
                });
                for (const loraplex_output_vector &vector : vectors_of(*step, place->module)) {
                    const auto *factor = static_cast<const Page *>(vector.factor);
                    const auto *shift =
                        is_of_keys ? nullptr : static_cast<const Page *>(vector.shift);
                    check(vector.first == 0 && vector.size == num_heads * head_size,
                          "scale_heads: vector");
                    for_each_row(
                        *pool, vector.num_tokens, num_heads * size, [&](std::int64_t index) {
                            const std::int64_t token = vector.token_indices[index];
                            const float scale = vector.token_scales[index];
                            for (std::int64_t i = 0; i < num_heads * size; ++i) {
                                const std::int64_t head = i / size;
                                const std::int64_t place_of = head * head_size + before + i % size;
                                const float base = widen(head_of(token, head)[i % size]);
                                float share = factor == nullptr
                                                  ? 0.0f
                                                  : base * widen(factor[place_of]);
                                if (shift != nullptr) {
                                    share += widen(shift[place_of]);
                                }
                                T &sum = target[token * num_heads * size + i];
                                sum = narrow<T>(widen(sum) + share * scale);
                            }
                        });
                }
                return loraplex_status{LORAPLEX_OK};
            });
        });
    });
}
