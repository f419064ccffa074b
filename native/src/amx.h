// The tile registers of AMX: eight of up to 16 rows of 64 bytes, and products of them.
//
// In assembly: the library must load without it. Compilers use no tile register of their own accord.
#pragma once

#include <immintrin.h>

#include <array>
#include <cstdint>

namespace loraplex::amx {

inline constexpr int kTileRows = 16;
inline constexpr int kTileBytes = 64;  // of a row
inline constexpr int kNumTiles = 8;

// Rows, and bytes of a row, of each register.
struct TileShape {
    std::uint16_t row_bytes;
    std::uint8_t rows;
};

// The registers of this thread are in use: another library may have shaped them for itself before,
// and what is left in them costs every switch of threads.
class Registers {
public:
    explicit Registers(const std::array<TileShape, kNumTiles> &shapes) {
        // "TILECFG" of Intel's manual, volume 1, chapter 18.
        struct alignas(64) {
            std::uint8_t palette = 1;
            std::uint8_t start_row = 0;
            std::uint8_t reserved[14] = {};
            std::uint16_t row_bytes[16] = {};
            std::uint8_t rows[16] = {};
        } config;
        static_assert(sizeof(config) == 64);
        for (std::size_t tile = 0; tile < kNumTiles; ++tile) {
            config.row_bytes[tile] = shapes[tile].row_bytes;
            config.rows[tile] = shapes[tile].rows;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    Registers(const Registers &) = delete;
    Registers &operator=(const Registers &) = delete;
    ~Registers() { asm volatile("tilerelease" ::); }
};

template <int kTile>
inline void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
}

// stride: bytes from row to row
template <int kTile>
inline void load(const void *source, std::int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(source), "r"(stride)
                 : "memory");
}

// The same of what is not read again soon: it takes little of the first cache.
template <int kTile>
inline void load_once(const void *source, std::int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(kTile), "r"(source), "r"(stride)
                 : "memory");
}

template <int kTile>
inline void store(void *target, std::int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(kTile), "r"(target), "r"(stride)
                 : "memory");
}

// One addition of floats in each step of a product. Without any, products of tiles that wait for the
// memory take 1.2 to 1.5 times as long (measured on a Xeon; additions of integers do not help): it seems
// that the units of multiply-adds fall asleep.
inline void stay_awake() {
    __m512 value = _mm512_setzero_ps();
    asm volatile("vaddps %0, %0, %0" : "+v"(value));
}

// sums[m][n] += sum over k of a[m][2 k] b[k][2 n] + sum over k of a[m][2 k + 1] b[k][2 n + 1], of
// bfloat16, in float32. Both sums are chains of multiply-adds, rounded to the nearest; subnormal
// numbers count as 0.
template <int kSums, int kA, int kB>
inline void multiply_bfloat16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

// sums[m][n] += sum over k and j < 4 of a[m][4 k + j] b[k][4 n + j], of int8, in int32.
template <int kSums, int kA, int kB>
inline void multiply_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

// The same of a's that are uint8.
template <int kSums, int kA, int kB>
inline void multiply_unsigned() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

// The same of int8 times uint8.
template <int kSums, int kA, int kB>
inline void multiply_signed_by_unsigned() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kA), "i"(kB));
}

}  // namespace loraplex::amx
