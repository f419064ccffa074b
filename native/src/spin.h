// Waiting without the operating system, for a short while.
#pragma once

#include <chrono>

namespace loraplex {

// Longer than the gap between two ops of a layer, short beside a step. Serving shares the cores.
inline constexpr std::chrono::microseconds kSpin{50};

inline void pause_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb" ::: "memory");
#endif
}

// Looks until condition() holds, for kSpin at most; whether it held.
template <typename Condition>
bool spin_until(const Condition &condition) {
    constexpr int kPausesPerLook = 32;
    if (condition()) {
        return true;
    }
    const auto end = std::chrono::steady_clock::now() + kSpin;
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            pause_cpu();
            if (condition()) {
                return true;
            }
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

}  // namespace loraplex
