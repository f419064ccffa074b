#include "loraplex/abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

uint64_t loraplex_cpu_features(void) {
    uint64_t features = 0;
#if defined(__x86_64__)
    // The builtin also asks whether the operating system saves the wide registers.
    __builtin_cpu_init();
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool has_f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    if (has_f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")) {
        features |= LORAPLEX_CPU_X86_64_V3;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512cd")) {
            features |= LORAPLEX_CPU_X86_64_V4;
            if (__builtin_cpu_supports("avx512vnni")) {
                features |= LORAPLEX_CPU_AVX512_VNNI;
            }
        }
        if (__builtin_cpu_supports("avxvnni")) {
            features |= LORAPLEX_CPU_AVX_VNNI;
        }
    }
#elif defined(__aarch64__)
    features |= LORAPLEX_CPU_NEON;
#endif
    return features;
}
