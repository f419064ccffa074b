// Runs programs: the arguments of a call are words, and a template unpacks them for each op's type.
#include "loraplex/program.h"

#include <bit>
#include <cstring>
#include <iterator>
#include <stdexcept>
#include <type_traits>
#include <utility>

#include "loraplex/attention.h"
#include "loraplex/channel.h"
#include "loraplex/convolution.h"
#include "loraplex/elementwise.h"
#include "loraplex/experts.h"
#include "loraplex/guard.h"
#include "loraplex/latent.h"
#include "loraplex/linear.h"
#include "loraplex/lora.h"
#include "loraplex/recurrence.h"
#include "loraplex/weight_rows.h"

namespace loraplex {
namespace {

constexpr std::int64_t kMaxArguments = 32;
constexpr std::int64_t kHeadWords = 3;

template <typename T>
T argument(std::int64_t word) {
    if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(word);
    } else if constexpr (std::is_same_v<T, float>) {
        return std::bit_cast<float>(static_cast<std::int32_t>(word));
    } else {
        static_assert(std::is_integral_v<T>);
        return static_cast<T>(word);
    }
}

template <auto kFunction, typename... Arguments, std::size_t... kIndices>
loraplex_status call(const std::int64_t *words, std::index_sequence<kIndices...>) {
    return kFunction(argument<Arguments>(words[kIndices])...);
}

struct ProgramOp {
    const char *name;
    std::int64_t num_arguments;
    loraplex_status (*run)(const std::int64_t *words);
};

template <auto kFunction, typename... Arguments>
constexpr ProgramOp make_op(const char *name, loraplex_status (*)(Arguments...)) {
    static_assert(sizeof...(Arguments) <= kMaxArguments);
    return {name, sizeof...(Arguments), [](const std::int64_t *words) {
                return call<kFunction, Arguments...>(words,
                                                     std::index_sequence_for<Arguments...>());
            }};
}

#define LORAPLEX_PROGRAM_OP(function) make_op<&function>(#function, &function)

constexpr ProgramOp kOps[] = {
    LORAPLEX_PROGRAM_OP(loraplex_activate),
    LORAPLEX_PROGRAM_OP(loraplex_add),
    LORAPLEX_PROGRAM_OP(loraplex_add_expert_lora),
    LORAPLEX_PROGRAM_OP(loraplex_add_heads_lora),
    LORAPLEX_PROGRAM_OP(loraplex_add_layer_norm),
    LORAPLEX_PROGRAM_OP(loraplex_add_lora),
    LORAPLEX_PROGRAM_OP(loraplex_add_rms_norm),
    LORAPLEX_PROGRAM_OP(loraplex_causal_conv),
    LORAPLEX_PROGRAM_OP(loraplex_channel_gather),
    LORAPLEX_PROGRAM_OP(loraplex_combine_experts),
    LORAPLEX_PROGRAM_OP(loraplex_delta_rule),
    LORAPLEX_PROGRAM_OP(loraplex_gate),
    LORAPLEX_PROGRAM_OP(loraplex_gated_rms_norm),
    LORAPLEX_PROGRAM_OP(loraplex_gather_columns),
    LORAPLEX_PROGRAM_OP(loraplex_grouped_linear),
    LORAPLEX_PROGRAM_OP(loraplex_latent_attention),
    LORAPLEX_PROGRAM_OP(loraplex_layer_norm),
    LORAPLEX_PROGRAM_OP(loraplex_linear),
    LORAPLEX_PROGRAM_OP(loraplex_multiply),
    LORAPLEX_PROGRAM_OP(loraplex_paged_attention),
    LORAPLEX_PROGRAM_OP(loraplex_rms_norm),
    LORAPLEX_PROGRAM_OP(loraplex_rotary),
    LORAPLEX_PROGRAM_OP(loraplex_route),
    LORAPLEX_PROGRAM_OP(loraplex_scale),
    LORAPLEX_PROGRAM_OP(loraplex_scale_heads),
    LORAPLEX_PROGRAM_OP(loraplex_sigmoid_gate),
    LORAPLEX_PROGRAM_OP(loraplex_ssd),
    LORAPLEX_PROGRAM_OP(loraplex_take_rows),
    LORAPLEX_PROGRAM_OP(loraplex_weight_rows),
    LORAPLEX_PROGRAM_OP(loraplex_write_kv),
    LORAPLEX_PROGRAM_OP(loraplex_write_latent),
    LORAPLEX_PROGRAM_OP(loraplex_xielu),
};

constexpr std::int64_t kNumOps = std::size(kOps);

const ProgramOp &op_of(const std::int64_t *call, std::int64_t num_words) {
    if (num_words < kHeadWords || call[0] < 0 || call[0] >= kNumOps ||
        call[1] != kOps[call[0]].num_arguments || num_words < kHeadWords + call[1]) {
        throw std::invalid_argument("program");
    }
    return kOps[call[0]];
}

void fill(const std::int64_t *call, const std::int64_t *parameters, std::int64_t num_parameters,
          std::int64_t *words) {
    for (std::int64_t i = 0; i < call[1]; ++i) {
        const std::int64_t word = call[kHeadWords + i];
        if ((call[2] >> i & 1) == 0) {
            words[i] = word;
        } else if (word >= 0 && word < num_parameters) {
            words[i] = parameters[word];
        } else {
            throw std::invalid_argument("program: parameter");
        }
    }
}

}  // namespace
}  // namespace loraplex

int64_t loraplex_program_op(const char *name) {
    using namespace loraplex;
    for (std::int64_t op = 0; op < kNumOps; ++op) {
        if (std::strcmp(kOps[op].name, name) == 0) {
            return op;
        }
    }
    return -1;
}

loraplex_status loraplex_run_program(const int64_t *code, int64_t num_words,
                                     const int64_t *parameters, int64_t num_parameters) {
    using namespace loraplex;
    return guarded([&] {
        std::int64_t words[kMaxArguments];
        for (const std::int64_t *end = code + num_words; code < end; code += kHeadWords + code[1]) {
            const ProgramOp &op = op_of(code, end - code);
            fill(code, parameters, num_parameters, words);
            const loraplex_status status = op.run(words);
            if (status != LORAPLEX_OK) {
                return status;
            }
        }
        return static_cast<loraplex_status>(LORAPLEX_OK);
    });
}
