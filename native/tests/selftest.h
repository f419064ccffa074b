// What the tests of the kernels share: numbers, pools, and checks that are counted.
//
// They go through the C functions alone, as Python does, and need nothing but a C++ compiler: so
// they run where there is no Python, as in an emulator of another CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "loraplex/abi.h"
#include "loraplex/dtype.h"

namespace loraplex::selftest {

// splitmix64: the same numbers everywhere.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed) {}

    std::uint64_t bits() {
        std::uint64_t z = state_ += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }

    // In [low, high).
    double uniform(double low = -1.0, double high = 1.0) {
        return low + (high - low) * static_cast<double>(bits() >> 11) * 0x1p-53;
    }

    std::int64_t below(std::int64_t end) {
        return static_cast<std::int64_t>(bits() % static_cast<std::uint64_t>(end));
    }

private:
    std::uint64_t state_;
};

template <typename T>
inline constexpr loraplex_dtype kDtype = std::is_same_v<T, float>      ? LORAPLEX_FLOAT32
                                         : std::is_same_v<T, Bfloat16> ? LORAPLEX_BFLOAT16
                                         : std::is_same_v<T, Float16>  ? LORAPLEX_FLOAT16
                                                                       : LORAPLEX_INT8;

// The largest relative error of a number that was rounded to T.
template <typename T>
inline constexpr double kRounding = std::is_same_v<T, float>      ? 0x1p-24
                                    : std::is_same_v<T, Bfloat16> ? 0x1p-8
                                                                  : 0x1p-11;

// Of a sum of float32, of so many terms, relative to the sum of their magnitudes.
constexpr double sum_error(std::int64_t num_terms) {
    return static_cast<double>(num_terms + 4) * 0x1p-23;
}

template <typename T>
std::vector<T> random_values(Random &random, std::int64_t count, double scale = 1.0) {
    std::vector<T> values(static_cast<std::size_t>(count));
    for (T &value : values) {
        value = narrow<T>(static_cast<float>(random.uniform(-scale, scale)));
    }
    return values;
}

class Pool {
public:
    explicit Pool(int num_threads) {
        if (loraplex_pool_create(num_threads, &pool_) != LORAPLEX_OK) {
            std::abort();
        }
    }
    ~Pool() { loraplex_pool_destroy(pool_); }
    Pool(const Pool &) = delete;
    Pool &operator=(const Pool &) = delete;

    operator loraplex_pool *() const { return pool_; }

private:
    loraplex_pool *pool_ = nullptr;
};

// The checks of one op. The first failures are printed.
class Checks {
public:
    explicit Checks(std::string name) : name_(std::move(name)) {}

    void expect(bool holds, const char *what) {
        ++num_checks_;
        if (!holds) {
            fail(what);
        }
    }
    void ok(loraplex_status status) { expect(status == LORAPLEX_OK, "status"); }

    // `what` is text, or a function that returns it: there are millions of checks, and an emulator
    // is slow, so a text is made for a check that fails only.
    template <typename What>
    void near(double actual, double expected, double tolerance, const What &what) {
        ++num_checks_;
        if (!(std::abs(actual - expected) <= tolerance)) {
            if constexpr (std::is_invocable_v<What>) {
                fail(difference(what(), actual, expected, tolerance));
            } else {
                fail(difference(what, actual, expected, tolerance));
            }
        }
    }

    template <typename T>
    void same_bits(const T *actual, const T *expected, std::int64_t count, const char *what) {
        const auto num_bytes = static_cast<std::size_t>(count) * sizeof(T);
        ++num_checks_;
        if (std::memcmp(actual, expected, num_bytes) != 0) {
            fail(std::string(what) + ": other bits");
        }
    }

    const std::string &name() const { return name_; }
    int num_checks() const { return num_checks_; }
    int num_failures() const { return num_failures_; }

private:
    static std::string difference(const std::string &what, double actual, double expected,
                                  double tolerance);
    void fail(const std::string &what);

    std::string name_;
    int num_checks_ = 0;
    int num_failures_ = 0;
};

// body(T{}) for float, Bfloat16, Float16.
template <typename Body>
void for_each_dtype(const Body &body) {
    body(float{});
    body(Bfloat16{});
    body(Float16{});
}

void test_linear_float(Checks &checks);
void test_linear_int8(Checks &checks);
void test_linear_int4(Checks &checks);
void test_linear_super_blocks(Checks &checks);
void test_write_kv(Checks &checks);
void test_attention(Checks &checks);
void test_lora(Checks &checks);
void test_route(Checks &checks);
void test_grouped_linear(Checks &checks);
void test_add_expert_lora(Checks &checks);
void test_combine_experts(Checks &checks);
void test_rms_norm(Checks &checks);
void test_add_rms_norm(Checks &checks);
void test_layer_norm(Checks &checks);
void test_add_layer_norm(Checks &checks);
void test_add(Checks &checks);
void test_multiply(Checks &checks);
void test_rotary(Checks &checks);
void test_scale(Checks &checks);
void test_activate_and_gate(Checks &checks);
void test_xielu(Checks &checks);
void test_take_rows(Checks &checks);
void test_causal_conv(Checks &checks);
void test_argmax(Checks &checks);
void test_candidates_and_draw(Checks &checks);
void test_top_logprobs(Checks &checks);
void test_apply_bitmask(Checks &checks);
void test_delta_rule(Checks &checks);
void test_gates(Checks &checks);
void test_ssd(Checks &checks);
void test_program(Checks &checks);
void test_channel(Checks &checks);

}  // namespace loraplex::selftest
