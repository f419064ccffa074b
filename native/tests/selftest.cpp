// Every op against a naive reference in double precision: one line each, exit status 1 on a failure.
#include "selftest.h"

#include <cstdio>

namespace loraplex::selftest {

constexpr int kMaxPrinted = 5;
constexpr int kSkipped = 77;

std::string Checks::difference(const std::string &what, double actual, double expected,
                               double tolerance) {
    return what + ": " + std::to_string(actual) + " for " + std::to_string(expected) +
           ", may be off by " + std::to_string(tolerance);
}

void Checks::fail(const std::string &what) {
    if (++num_failures_ <= kMaxPrinted) {
        std::printf("  %s: %s\n", name_.c_str(), what.c_str());
    }
}

struct Test {
    const char *name;
    void (*run)(Checks &checks);
};

constexpr Test kTests[] = {
    {"linear float", test_linear_float},
    {"linear int8", test_linear_int8},
    {"linear int4", test_linear_int4},
    {"linear super-blocks", test_linear_super_blocks},
    {"write_kv", test_write_kv},
    {"paged_attention", test_attention},
    {"add_lora", test_lora},
    {"route", test_route},
    {"grouped_linear", test_grouped_linear},
    {"add_expert_lora", test_add_expert_lora},
    {"combine_experts", test_combine_experts},
    {"rms_norm", test_rms_norm},
    {"add_rms_norm", test_add_rms_norm},
    {"layer_norm", test_layer_norm},
    {"add_layer_norm", test_add_layer_norm},
    {"add", test_add},
    {"multiply", test_multiply},
    {"rotary", test_rotary},
    {"scale", test_scale},
    {"activate, gate", test_activate_and_gate},
    {"xielu", test_xielu},
    {"take_rows", test_take_rows},
    {"causal_conv", test_causal_conv},
    {"argmax", test_argmax},
    {"scale_candidates, draw", test_candidates_and_draw},
    {"top_logprobs", test_top_logprobs},
    {"apply_bitmask", test_apply_bitmask},
    {"delta_rule", test_delta_rule},
    {"ssd", test_ssd},
    {"gated_rms_norm, sigmoid", test_gates},
    {"program", test_program},
    {"channel", test_channel},
};

std::uint64_t needed_cpu_features() {
    const std::string name = loraplex_instruction_set();
    return name == "x86-64-v4"      ? LORAPLEX_CPU_X86_64_V4
           : name == "x86-64-v3"    ? LORAPLEX_CPU_X86_64_V3
           : name == "aarch64-neon" ? LORAPLEX_CPU_NEON
                                    : 0;
}

int run_all() {
    int num_failed = 0;
    for (const Test &test : kTests) {
        Checks checks(test.name);
        test.run(checks);
        const bool failed = checks.num_failures() > 0 || checks.num_checks() == 0;
        std::printf("%-24s %s: %d of %d checks failed\n", test.name, failed ? "FAILED" : "ok",
                    checks.num_failures(), checks.num_checks());
        std::fflush(stdout);
        num_failed += failed ? 1 : 0;
    }
    return num_failed == 0 ? 0 : 1;
}

}  // namespace loraplex::selftest

int main() {
    using namespace loraplex::selftest;
    std::printf("%s, ABI %d, CPU features 0x%llx\n", loraplex_instruction_set(),
                loraplex_abi_version(),
                static_cast<unsigned long long>(loraplex_cpu_features()));
    const std::uint64_t needed = needed_cpu_features();
    if ((loraplex_cpu_features() & needed) != needed) {
        std::printf("this CPU cannot run it\n");
        return kSkipped;
    }
    return run_all();
}
