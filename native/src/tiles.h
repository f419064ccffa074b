// Work cut into tiles for the pool: rows of small work, enough in each to be worth a claim.
#pragma once

#include <algorithm>
#include <cstdint>

#include "loraplex/pool.h"

namespace loraplex {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

inline constexpr std::int64_t kElementsPerTile = 16 * 1024;  // a few microseconds

// body(row) for each row of about row_elements elements. Takes the pool only if there is work for
// more than one thread.
template <typename Body>
void for_each_row(loraplex_pool &pool, std::int64_t num_rows, std::int64_t row_elements,
                  const Body &body) {
    const std::int64_t rows_per_tile =
        std::max<std::int64_t>(1, kElementsPerTile / std::max<std::int64_t>(1, row_elements));
    const auto run = [&](std::int64_t tile, int) {
        const std::int64_t end = std::min(num_rows, (tile + 1) * rows_per_tile);
        for (std::int64_t row = tile * rows_per_tile; row < end; ++row) {
            body(row);
        }
    };
    const std::int64_t num_tiles = divide_up(num_rows, rows_per_tile);
    if (num_tiles <= 1) {
        loraplex_pool::serial_for_tiles(num_tiles, run);
        return;
    }
    const Op op(pool);
    pool.parallel_for_tiles(num_tiles, run);
}

}  // namespace loraplex
