#include <bit>

#include "loraplex/elementwise.h"
#include "loraplex/program.h"
#include "selftest.h"

namespace loraplex::selftest {
namespace {

constexpr std::int64_t kRows = 3;
constexpr std::int64_t kSize = 24;
constexpr float kEps = 1e-5f;

std::int64_t word(const void *pointer) { return reinterpret_cast<std::int64_t>(pointer); }
std::int64_t word(loraplex_pool *pool) { return reinterpret_cast<std::int64_t>(pool); }
std::int64_t word(float value) { return std::bit_cast<std::int32_t>(value); }
std::int64_t word(std::int64_t value) { return value; }
std::int64_t word(std::int32_t value) { return value; }

// Appends a call; bits of the mask are the arguments that name a parameter.
template <typename... Arguments>
void add_call(std::vector<std::int64_t> &code, const char *op, std::int64_t mask,
              Arguments... arguments) {
    code.insert(code.end(), {loraplex_program_op(op), std::int64_t{sizeof...(Arguments)}, mask,
                             word(arguments)...});
}

}  // namespace

// take_rows of indices that are a parameter, then a norm of what it gave.
void test_program(Checks &checks) {
    Random random(16);
    checks.expect(loraplex_program_op("loraplex_pool_create") == -1, "no op");
    for_each_dtype([&]<typename T>(T) {
        const Pool pool(2);
        const auto table = random_values<T>(random, 10 * kSize);
        const auto weight = random_values<T>(random, kSize);
        std::vector<T> taken(kRows * kSize), output(taken.size()), expected(taken.size());
        std::vector<std::int64_t> code;
        add_call(code, "loraplex_take_rows", 1 << 6, static_cast<loraplex_pool *>(pool), kRows,
                 kSize, kDtype<T>, static_cast<const void *>(table.data()), kSize, std::int64_t{1},
                 static_cast<const void *>(taken.data()));
        add_call(code, "loraplex_rms_norm", 0, static_cast<loraplex_pool *>(pool), kRows,
                 std::int64_t{1}, kSize, kDtype<T>, static_cast<const void *>(taken.data()), kSize,
                 kSize, kDtype<T>, static_cast<const void *>(weight.data()), kEps,
                 static_cast<const void *>(output.data()));
        const auto num_words = static_cast<std::int64_t>(code.size());
        for (const auto &indices : {std::vector<std::int64_t>{3, 0, 9}, {1, 1, 5}}) {
            const std::int64_t parameters[] = {0, word(static_cast<const void *>(indices.data()))};
            checks.ok(loraplex_run_program(code.data(), num_words, parameters, 2));
            std::vector<T> rows;
            for (const std::int64_t index : indices) {
                rows.insert(rows.end(), table.begin() + index * kSize,
                            table.begin() + (index + 1) * kSize);
            }
            checks.ok(loraplex_rms_norm(pool, kRows, 1, kSize, kDtype<T>, rows.data(), kSize, kSize,
                                        kDtype<T>, weight.data(), kEps, expected.data()));
            checks.same_bits(output.data(), expected.data(), kRows * kSize, "result");
        }
        const std::int64_t one_parameter[] = {0};
        checks.expect(loraplex_run_program(code.data(), num_words, one_parameter, 1) ==
                          LORAPLEX_INVALID_ARGUMENT,
                      "a parameter too few");
        checks.expect(loraplex_run_program(code.data(), num_words - 1, one_parameter, 1) !=
                          LORAPLEX_OK,
                      "a program cut short");
    });
}

}  // namespace loraplex::selftest
