// Large pages for weights.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace loraplex {

// Of memory not yet written: a kernel that reads it looks up fewer pages. It is only a wish.
inline void ask_for_large_pages([[maybe_unused]] void *memory, [[maybe_unused]] std::int64_t num_bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::uintptr_t kLargePage = std::uintptr_t{1} << 21;
    const auto start = reinterpret_cast<std::uintptr_t>(memory);
    const std::uintptr_t first = (start + kLargePage - 1) / kLargePage * kLargePage;
    const std::uintptr_t end =
        (start + static_cast<std::uintptr_t>(num_bytes)) / kLargePage * kLargePage;
    if (first < end) {
        madvise(reinterpret_cast<void *>(first), end - first, MADV_HUGEPAGE);
    }
#endif
}

}  // namespace loraplex
