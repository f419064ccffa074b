#include "loraplex/abi.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// What __builtin_cpu_supports does, which does not work with every compiler's run-time library.
struct Cpuid {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Cpuid cpuid(unsigned leaf, unsigned subleaf) {
    Cpuid found;
    __get_cpuid_count(leaf, subleaf, &found.eax, &found.ebx, &found.ecx, &found.edx);
    return found;
}

bool has_all(unsigned word, unsigned bits) { return (word & bits) == bits; }

// Registers that the operating system saves. The CPU must have XSAVE.
unsigned saved_registers() {
    unsigned low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

constexpr unsigned kYmm = 0x6;   // XCR0: SSE, AVX
constexpr unsigned kZmm = 0xe6;  // XCR0: those, and the masks and both halves of AVX-512
constexpr unsigned kTiles = 0x60000;  // XCR0: shapes and contents of AMX's tile registers
constexpr unsigned kAvxVnni = 1U << 4, kAvx512Bf16 = 1U << 5;
constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24, kAmxInt8 = 1U << 25;

bool is_of_amd() {
    const Cpuid vendor = cpuid(0, 0);
    return vendor.ebx == signature_AMD_ebx && vendor.ecx == signature_AMD_ecx &&
           vendor.edx == signature_AMD_edx;
}

// Whether a product of pairs of bfloat16 takes no longer than a multiply-add of float32. On Intel's CPUs
// it takes more than two of them.
bool has_fast_bfloat16() { return is_of_amd() && has_all(cpuid(7, 1).eax, kAvx512Bf16); }

// Measured on Zen 5 (family 0x1a); Zen 4 and the Xeons need the program's own reading ahead.
bool reads_ahead() {
    constexpr unsigned kZen5 = 0x1a;
    const unsigned version = cpuid(1, 0).eax;
    return is_of_amd() && (version >> 8 & 0xf) + (version >> 20 & 0xff) >= kZen5;
}

// Linux gives a process the tile registers when it asks for them.
bool may_use_tiles() {
#if defined(__linux__)
    constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr int kTileData = 18;
    return has_all(saved_registers(), kTiles) &&
           syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

}  // namespace
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

uint64_t loraplex_cpu_features(void) {
    uint64_t features = 0;
#if defined(__x86_64__)
    const Cpuid basic = cpuid(1, 0), extended = cpuid(7, 0);
    if (!has_all(basic.ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_MOVBE) ||
        !has_all(extended.ebx, bit_AVX2 | bit_BMI | bit_BMI2) ||
        !has_all(saved_registers(), kYmm)) {
        return features;
    }
    features |= LORAPLEX_CPU_X86_64_V3;
    if (has_all(extended.ebx,
                bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ | bit_AVX512CD) &&
        has_all(saved_registers(), kZmm)) {
        features |= LORAPLEX_CPU_X86_64_V4;
        if (has_all(extended.ecx, bit_AVX512VNNI)) {
            features |= LORAPLEX_CPU_AVX512_VNNI;
        }
        features |= has_fast_bfloat16() ? LORAPLEX_CPU_AVX512_BF16 : 0;
        if (has_all(extended.edx, kAmxTile) && may_use_tiles()) {
            features |= has_all(extended.edx, kAmxInt8) ? LORAPLEX_CPU_AMX_INT8 : 0;
            features |= has_all(extended.edx, kAmxBf16) ? LORAPLEX_CPU_AMX_BF16 : 0;
        }
    }
    features |= reads_ahead() ? LORAPLEX_CPU_READS_AHEAD : 0;
    if (has_all(cpuid(7, 1).eax, kAvxVnni)) {
        features |= LORAPLEX_CPU_AVX_VNNI;
    }
#elif defined(__aarch64__)
    features |= LORAPLEX_CPU_NEON;
#if defined(__linux__)
    features |= (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0 ? LORAPLEX_CPU_NEON_DOTPROD : 0;
    features |= (getauxval(AT_HWCAP2) & HWCAP2_BF16) != 0 ? LORAPLEX_CPU_NEON_BF16 : 0;
#endif
#endif
    return features;
}
