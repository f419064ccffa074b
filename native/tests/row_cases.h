// Cases of the ops on rows: widths, element types, and the company that a row may have.
#pragma once

#include "loraplex/elementwise.h"
#include "selftest.h"

namespace loraplex::selftest {

inline constexpr std::int64_t kRows = 21;
inline constexpr std::int64_t kWidths[] = {1, 7, 64, 203, 1028};

// run(pool, first row, number of rows) -> the rows' results: the same for any threads and company.
template <typename Run>
void check_company(Checks &checks, std::int64_t width, const Run &run) {
    const auto all = run(Pool(1), 0, kRows);
    for (const int num_threads : {2, 3}) {
        checks.same_bits(run(Pool(num_threads), 0, kRows).data(), all.data(), kRows * width,
                         "threads");
    }
    for (const std::int64_t row : {std::int64_t{0}, kRows / 2, kRows - 1}) {
        checks.same_bits(run(Pool(1), row, 1).data(), all.data() + row * width, width, "alone");
    }
}

// body(T{}, n) for every dtype and width
template <typename Body>
void for_each_case(const Body &body) {
    for_each_dtype([&]<typename T>(T) {
        for (const std::int64_t n : kWidths) {
            body(T{}, n);
        }
    });
}

}  // namespace loraplex::selftest
