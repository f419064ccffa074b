// c[r][0 : columns] (+)= sum over i of a[r][i] * b[i][0 : columns]: few rows, and a `b` as stored.
//
// The one product of attention (scores; weighted values) and of the LoRA expansion. Every element
// of c is one chain of multiply_add over rising i, whatever the numbers of rows and columns and
// however i is cut into calls: so a row has the same bits alone and in company.
#pragma once

#include <algorithm>
#include <cstdint>

#include "loraplex/simd.h"

namespace loraplex {

#if defined(LORAPLEX_ISA_X86_64_V4) || defined(LORAPLEX_ISA_NEON)
inline constexpr int kMaxProductRows = 12;  // 32 vector registers
#else
inline constexpr int kMaxProductRows = 6;  // 16
#endif

template <typename T>
struct Matrix {
    T *data;
    std::int64_t stride;

    T *row(std::int64_t index) const { return data + index * stride; }
    Matrix at(std::int64_t row, std::int64_t column) const {
        return {data + row * stride + column, stride};
    }
};

// Accumulators must cover the latency of a multiply_add and fit in the registers.
constexpr int product_vectors(int rows) {
    const int most = 2 * kMaxProductRows / rows;
    return most >= 8 ? 8 : most >= 4 ? 4 : 2;
}

// vector(i, v): vector v of row i of b
template <bool kAccumulate, int kRows, int kVectors, typename GetVector>
__attribute__((always_inline)) inline void multiply_vectors(std::int64_t depth,
                                                            Matrix<const float> a,
                                                            const GetVector &vector,
                                                            Matrix<float> c) {
    Floats sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = kAccumulate ? load(c.row(r) + v * kLanes) : zeros();
        }
    }
    for (std::int64_t i = 0; i < depth; ++i) {
        Floats row[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            row[v] = vector(i, v);
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
            const Floats factor = broadcast(a.row(r)[i]);
#pragma GCC unroll 16
            for (int v = 0; v < kVectors; ++v) {
                sums[r][v] = multiply_add(factor, row[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            store(c.row(r) + v * kLanes, sums[r][v]);
        }
    }
}

template <bool kAccumulate, int kRows, int kVectors, typename T>
inline void multiply_full(std::int64_t depth, Matrix<const float> a, Matrix<const T> b,
                          Matrix<float> c) {
    multiply_vectors<kAccumulate, kRows, kVectors>(
        depth, a,
        [&](std::int64_t i, int v) __attribute__((always_inline)) {
            return load(b.row(i) + v * kLanes);
        },
        c);
}

// Fewer columns than lanes.
template <bool kAccumulate, typename T>
inline void multiply_rest(int rows, int columns, std::int64_t depth, Matrix<const float> a,
                          Matrix<const T> b, Matrix<float> c) {
    for (int r = 0; r < rows; ++r) {
        Floats sum = kAccumulate ? load_first(c.row(r), columns) : zeros();
        for (std::int64_t i = 0; i < depth; ++i) {
            sum = multiply_add(broadcast(a.row(r)[i]), load_first(b.row(i), columns), sum);
        }
        store_first(c.row(r), sum, columns);
    }
}

template <bool kAccumulate, int kRows, typename T>
inline void multiply_columns(std::int64_t columns, std::int64_t depth, Matrix<const float> a,
                             Matrix<const T> b, Matrix<float> c) {
    constexpr int kMany = product_vectors(kRows);
    std::int64_t done = 0;
    for (; columns - done >= kMany * kLanes; done += kMany * kLanes) {
        multiply_full<kAccumulate, kRows, kMany>(depth, a, b.at(0, done), c.at(0, done));
    }
    for (; columns - done >= 2 * kLanes; done += 2 * kLanes) {
        multiply_full<kAccumulate, kRows, 2>(depth, a, b.at(0, done), c.at(0, done));
    }
    if (columns - done >= kLanes) {
        multiply_full<kAccumulate, kRows, 1>(depth, a, b.at(0, done), c.at(0, done));
        done += kLanes;
    }
    if (columns > done) {
        multiply_rest<kAccumulate>(kRows, static_cast<int>(columns - done), depth, a,
                                   b.at(0, done), c.at(0, done));
    }
}

template <bool kAccumulate, int kRows, typename T>
inline void multiply_piece(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                           Matrix<const float> a, Matrix<const T> b, Matrix<float> c) {
    if (rows == kRows) {
        multiply_columns<kAccumulate, kRows>(columns, depth, a, b, c);
    } else if constexpr (kRows > 1) {
        multiply_piece<kAccumulate, kRows - 1>(rows, columns, depth, a, b, c);
    }
}

// The rows are cut into pieces of nearly equal size; `depth` is the number of columns of a.
template <bool kAccumulate, typename T>
inline void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                     Matrix<const float> a, Matrix<const T> b, Matrix<float> c) {
    while (rows > 0) {
        const std::int64_t num_pieces = (rows + kMaxProductRows - 1) / kMaxProductRows;
        const std::int64_t piece = (rows + num_pieces - 1) / num_pieces;
        multiply_piece<kAccumulate, kMaxProductRows>(piece, columns, depth, a, b, c);
        a = a.at(piece, 0);
        c = c.at(piece, 0);
        rows -= piece;
    }
}

// multiply_full for a `b` whose vectors of columns lie apart, with the rows of each `stride` apart.
template <int kRows, int kVectors, typename T>
inline void multiply_apart(std::int64_t depth, Matrix<const float> a, const T *const *columns,
                           std::int64_t stride, Matrix<float> c) {
    multiply_vectors<false, kRows, kVectors>(
        depth, a,
        [&](std::int64_t i, int v) __attribute__((always_inline)) {
            return load(columns[v] + i * stride);
        },
        c);
}

template <int kRows, typename T>
inline void multiply_piece_apart(std::int64_t rows, int num_vectors, std::int64_t depth,
                                 Matrix<const float> a, const T *const *columns,
                                 std::int64_t stride, Matrix<float> c) {
    if (rows == kRows) {
        constexpr int kMany = std::min(4, product_vectors(kRows));
        int done = 0;
        for (; num_vectors - done >= kMany; done += kMany) {
            multiply_apart<kRows, kMany>(depth, a, columns + done, stride, c.at(0, done * kLanes));
        }
        for (; done < num_vectors; ++done) {
            multiply_apart<kRows, 1>(depth, a, columns + done, stride, c.at(0, done * kLanes));
        }
    } else if constexpr (kRows > 1) {
        multiply_piece_apart<kRows - 1>(rows, num_vectors, depth, a, columns, stride, c);
    }
}

// multiply<false> with vectors of columns from several places: with one vector at a time, few rows
// have too few chains to cover the latency of a multiply_add. The bits are those of multiply.
template <typename T>
inline void multiply_apart(std::int64_t rows, int num_vectors, std::int64_t depth,
                           Matrix<const float> a, const T *const *columns, std::int64_t stride,
                           Matrix<float> c) {
    while (rows > 0) {
        const std::int64_t num_pieces = (rows + kMaxProductRows - 1) / kMaxProductRows;
        const std::int64_t piece = (rows + num_pieces - 1) / num_pieces;
        multiply_piece_apart<kMaxProductRows>(piece, num_vectors, depth, a, columns, stride, c);
        a = a.at(piece, 0);
        c = c.at(piece, 0);
        rows -= piece;
    }
}

}  // namespace loraplex
