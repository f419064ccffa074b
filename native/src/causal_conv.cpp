// A channel's inputs lie side by side with those of other channels, so a vector is of channels.
//
// A tile is a slice of the channels, of all tokens: it stores its inputs before it reads any, and a
// row may read what another one stored.
#include "loraplex/convolution.h"

#include <algorithm>

#include "activations.h"
#include "loraplex/guard.h"
#include "loraplex/simd.h"
#include "row_vectors.h"
#include "tiles.h"

namespace loraplex {
namespace {

constexpr std::int64_t kFewestChannels = 128;  // of a slice: whole cache lines of each token
constexpr std::int64_t kMostChannels = 1024;

struct ConvolutionRows {
    std::int64_t num_rows;
    std::int64_t num_tokens;
    std::int64_t num_channels;
    std::int64_t block_size;
    const std::int64_t *query_start_loc;
    const std::int64_t *positions;
    const std::int64_t *places;
    const std::int64_t *table_starts;
    const std::int64_t *tables;

    // Where an earlier position of a row is stored.
    std::int64_t place(std::int64_t row, std::int64_t position) const {
        const std::int64_t block = tables[table_starts[row] + position / block_size];
        return block * block_size + position % block_size;
    }
};

struct ConvolutionWeight {
    const float *elements;
    std::int64_t num_taps;
    std::int64_t channel_stride;
    std::int64_t tap_stride;
    const float *bias;

    Floats load(std::int64_t tap, std::int64_t channel, int count) const {
        const float *first = elements + tap * tap_stride + channel * channel_stride;
        if (channel_stride == 1) {
            return load_up_to(first, count);
        }
        float lanes[kLanes] = {};
        for (int lane = 0; lane < count; ++lane) {
            lanes[lane] = first[lane * channel_stride];
        }
        return loraplex::load(lanes);
    }
};

// The inputs of one token, by taps: first those that are stored, then those of the step.
template <typename T>
struct Inputs {
    std::int64_t first_tap;   // before it position 0
    std::int64_t first_given;
    const float *stored[LORAPLEX_MOST_TAPS];
    const T *given[LORAPLEX_MOST_TAPS];
};

template <typename T>
class Slice {
public:
    Slice(const ConvolutionRows &rows, const ConvolutionWeight &weight, const T *x,
          std::int64_t x_stride, float *stored, T *output, std::int64_t first, std::int64_t end)
        : rows_(rows), weight_(weight), x_(x), x_stride_(x_stride), stored_(stored),
          output_(output), first_(first), size_(end - first) {}

    void store() const {
        for (std::int64_t token = 0; token < rows_.num_tokens; ++token) {
            if (rows_.places[token] < 0) {
                continue;
            }
            float *target = at(rows_.places[token]);
            const T *source = given(token);
            for_each_vector(size_, [&](std::int64_t i, int count) {
                store_up_to(target + i, load_up_to(source + i, count), count);
            });
        }
    }

    template <typename Activation>
    void compute(const Activation &activation) const {
        for (std::int64_t row = 0; row < rows_.num_rows; ++row) {
            const std::int64_t end = rows_.query_start_loc[row + 1];
            for (std::int64_t token = rows_.query_start_loc[row]; token < end; ++token) {
                convolve(inputs_of(row, token), result(token), activation);
            }
        }
        for (std::int64_t token = rows_.query_start_loc[rows_.num_rows]; token < rows_.num_tokens;
             ++token) {
            std::fill_n(result(token), size_, narrow<T>(0.0f));
        }
    }

private:
    float *at(std::int64_t place) const { return stored_ + place * rows_.num_channels + first_; }
    const T *given(std::int64_t token) const { return x_ + token * x_stride_ + first_; }
    T *result(std::int64_t token) const { return output_ + token * rows_.num_channels + first_; }

    Inputs<T> inputs_of(std::int64_t row, std::int64_t token) const {
        const std::int64_t before = weight_.num_taps - 1, position = rows_.positions[token];
        const std::int64_t of_row = token - rows_.query_start_loc[row];
        Inputs<T> inputs;
        inputs.first_tap = std::max<std::int64_t>(0, before - position);
        inputs.first_given = std::max<std::int64_t>(0, before - of_row);
        for (std::int64_t tap = inputs.first_tap; tap < inputs.first_given; ++tap) {
            inputs.stored[tap] = at(rows_.place(row, position - before + tap));
        }
        for (std::int64_t tap = inputs.first_given; tap <= before; ++tap) {
            inputs.given[tap] = given(token - before + tap);
        }
        return inputs;
    }

    template <typename Activation>
    void convolve(const Inputs<T> &inputs, T *target, const Activation &activation) const {
        for_each_vector(size_, [&](std::int64_t i, int count) {
            Floats sum = zeros();
            for (std::int64_t tap = inputs.first_tap; tap < inputs.first_given; ++tap) {
                sum = multiply_add(weight_.load(tap, first_ + i, count),
                                   load_up_to(inputs.stored[tap] + i, count), sum);
            }
            for (std::int64_t tap = std::max(inputs.first_tap, inputs.first_given);
                 tap < weight_.num_taps; ++tap) {
                sum = multiply_add(weight_.load(tap, first_ + i, count),
                                   load_up_to(inputs.given[tap] + i, count), sum);
            }
            if (weight_.bias != nullptr) {
                sum = add(sum, load_up_to(weight_.bias + first_ + i, count));
            }
            store_up_to(target + i, activation(sum), count);
        });
    }

    const ConvolutionRows &rows_;
    const ConvolutionWeight &weight_;
    const T *x_;
    std::int64_t x_stride_;
    float *stored_;
    T *output_;
    std::int64_t first_;
    std::int64_t size_;
};

template <typename Body>
loraplex_status for_any_activation(loraplex_activation activation, const Body &body) {
    if (activation == LORAPLEX_NO_ACTIVATION) {
        body([](Floats x) { return x; });
        return LORAPLEX_OK;
    }
    return for_activation(activation, body);
}

// Channels of a slice, so that its work is worth a claim.
std::int64_t slice_size(const ConvolutionRows &rows, const ConvolutionWeight &weight) {
    const std::int64_t num_tokens = std::max<std::int64_t>(1, rows.num_tokens);
    const std::int64_t wanted = kElementsPerTile / (num_tokens * (weight.num_taps + 2));
    const std::int64_t size = std::clamp(wanted, kFewestChannels, kMostChannels);
    return size / kFewestChannels * kFewestChannels;
}

}  // namespace
}  // namespace loraplex

loraplex_status loraplex_causal_conv(
    loraplex_pool *pool, int64_t num_rows, int64_t num_tokens, int64_t num_channels,
    int64_t block_size, const int64_t *query_start_loc, const int64_t *positions,
    const int64_t *places, const int64_t *table_starts, const int64_t *tables,
    loraplex_dtype dtype, const void *x, int64_t x_stride, const float *weight, int64_t num_taps,
    int64_t channel_stride, int64_t tap_stride, const float *bias, loraplex_activation activation,
    float *stored, void *output) {
    using namespace loraplex;
    return guarded([&] {
        check(num_rows >= 0 && num_tokens >= 0 && num_channels >= 1 && block_size >= 1 &&
                  num_taps >= 1 && num_taps <= LORAPLEX_MOST_TAPS,
              "causal_conv");
        const ConvolutionRows rows{num_rows,  num_tokens, num_channels, block_size, query_start_loc,
                                   positions, places,     table_starts, tables};
        const ConvolutionWeight taps{weight, num_taps, channel_stride, tap_stride, bias};
        const std::int64_t size = slice_size(rows, taps);
        return for_dtype(dtype, [&](auto element) {
            using T = decltype(element);
            return for_any_activation(activation, [&](const auto &function) {
                const std::int64_t num_slices = divide_up(num_channels, size);
                // A row of this loop is a slice.
                for_each_row(*pool, num_slices, kElementsPerTile, [&](std::int64_t slice) {
                    const Slice<T> part(rows, taps, static_cast<const T *>(x), x_stride, stored,
                                        static_cast<T *>(output), slice * size,
                                        std::min(num_channels, (slice + 1) * size));
                    part.store();
                    part.compute(function);
                });
            });
        });
    });
}
