// c[r][0 : columns] (+)= sum over i of a[r][i] * b[i][0 : columns]: few rows, and a `b` as stored.
//
// The one product of attention (scores; weighted values) and of the LoRA expansion. Every element
// of c is one chain over rising i, whatever the numbers of rows and columns: so a row has the same
// bits alone and in company. Where `a` is float32 the chain is of multiply_add, however i is cut
// into calls or pieces; where it is bfloat16, of pairs of a piece's i (bfloat16_pairs.h).
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>

#include "loraplex/simd.h"
#include "outer_product.h"

#if defined(LORAPLEX_ISA_X86_64_V4)
#include "bfloat16_pairs.h"
#endif

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

// A `b` whose rows lie in several places.
template <typename T>
struct RowPieces {
    struct Piece {
        const T *rows;
        std::int64_t count;
    };

    std::span<const Piece> pieces;
    std::int64_t stride;
    std::int64_t first_column = 0;

    RowPieces from(std::int64_t column) const { return {pieces, stride, first_column + column}; }
    const T *row(const Piece &piece, std::int64_t i) const {
        return piece.rows + i * stride + first_column;
    }
};

// Accumulators must cover the latency of a multiply_add and fit in the registers.
constexpr int product_vectors(int rows) {
    const int most = 2 * kMaxProductRows / rows;
    return most >= 8 ? 8 : most >= 4 ? 4 : 2;
}

// How an element of c meets kDepth columns of a and as many rows of b.
template <typename A>
struct Arithmetic;

template <>
struct Arithmetic<float> {
    static constexpr int kDepth = 1;

    static Floats factor(const float *a) { return broadcast(*a); }
    template <typename T>
    static Floats vector(const T *row, const T * /*next_row*/) {
        return load(row);
    }
    static Floats add(Floats a, Floats b, Floats sum) { return multiply_add(a, b, sum); }
    static void store_factor(float *target, Floats value) { store(target, value); }
};

#if defined(LORAPLEX_ISA_X86_64_V4)
template <>
struct Arithmetic<Bfloat16> {
    static constexpr int kDepth = 2;

    static Bfloat16Pairs factor(const Bfloat16 *a) { return broadcast_pair(a); }
    static Bfloat16Pairs last_factor(const Bfloat16 *a) { return broadcast_single(*a); }
    static Bfloat16Pairs vector(const Bfloat16 *row, const Bfloat16 *next_row) {
        return interleave(row, next_row);
    }
    static Bfloat16Pairs last_vector(const Bfloat16 *row) { return singles(row); }
    static Floats add(Bfloat16Pairs a, Bfloat16Pairs b, Floats sum) {
        return add_products(a, b, sum);
    }
    static void store_factor(Bfloat16 *target, Floats value) { store_normal(target, value); }
};
#endif

// place(piece, i, v): where vector v of row i of a piece is
template <bool kAccumulate, int kRows, int kVectors, typename A, typename T, typename GetPlace>
__attribute__((always_inline)) inline void multiply_vectors(Matrix<const A> a,
                                                            const RowPieces<T> &b,
                                                            const GetPlace &place,
                                                            Matrix<float> c) {
    using Products = Arithmetic<A>;
    Floats sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = kAccumulate ? load(c.row(r) + v * kLanes) : zeros();
        }
    }
    for (const auto &piece : b.pieces) {
        std::int64_t i = 0;
        for (; i + Products::kDepth <= piece.count; i += Products::kDepth) {
            outer_product(
                sums, [&](int r) { return Products::factor(a.row(r) + i); },
                [&](int v) {
                    return Products::vector(place(piece, i, v), place(piece, i + 1, v));
                },
                Products::add);
        }
        if constexpr (Products::kDepth > 1) {
            if (i < piece.count) {
                outer_product(
                    sums, [&](int r) { return Products::last_factor(a.row(r) + i); },
                    [&](int v) { return Products::last_vector(place(piece, i, v)); },
                    Products::add);
            }
        }
        a = a.at(0, piece.count);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            store(c.row(r) + v * kLanes, sums[r][v]);
        }
    }
}

template <bool kAccumulate, int kRows, int kVectors, typename A, typename T>
inline void multiply_full(Matrix<const A> a, const RowPieces<T> &b, Matrix<float> c) {
    multiply_vectors<kAccumulate, kRows, kVectors>(
        a, b,
        [&](const auto &piece, std::int64_t i, int v) { return b.row(piece, i) + v * kLanes; }, c);
}

// Fewer columns than lanes: as many rows of b as `a` has columns at a time, with zeros behind them.
template <bool kAccumulate, typename A, typename T>
inline void multiply_rest(int rows, int columns, Matrix<const A> a, const RowPieces<T> &b,
                          Matrix<float> c) {
    constexpr int kDepth = Arithmetic<A>::kDepth;
    for (int r = 0; r < rows; ++r) {
        float sums[kLanes] = {};
        if (kAccumulate) {
            std::copy_n(c.row(r), columns, sums);
        }
        std::int64_t first = 0;
        for (const auto &piece : b.pieces) {
            for (std::int64_t i = 0; i < piece.count; i += kDepth) {
                const std::int64_t count = std::min<std::int64_t>(kDepth, piece.count - i);
                T whole[kDepth * kLanes] = {};
                for (std::int64_t row = 0; row < count; ++row) {
                    std::copy_n(b.row(piece, i + row), columns, whole + row * kLanes);
                }
                const typename RowPieces<T>::Piece filled{whole, count};
                multiply_full<true, 1, 1>(a.at(r, first + i), RowPieces<T>{{&filled, 1}, kLanes},
                                          Matrix<float>{sums, kLanes});
            }
            first += piece.count;
        }
        std::copy_n(sums, columns, c.row(r));
    }
}

template <bool kAccumulate, int kRows, typename A, typename T>
inline void multiply_columns(std::int64_t columns, Matrix<const A> a, const RowPieces<T> &b,
                             Matrix<float> c) {
    constexpr int kMany = product_vectors(kRows);
    std::int64_t done = 0;
    for (; columns - done >= kMany * kLanes; done += kMany * kLanes) {
        multiply_full<kAccumulate, kRows, kMany>(a, b.from(done), c.at(0, done));
    }
    if constexpr (kMany > 4) {
        for (; columns - done >= 4 * kLanes; done += 4 * kLanes) {
            multiply_full<kAccumulate, kRows, 4>(a, b.from(done), c.at(0, done));
        }
    }
    for (; columns - done >= 2 * kLanes; done += 2 * kLanes) {
        multiply_full<kAccumulate, kRows, 2>(a, b.from(done), c.at(0, done));
    }
    if (columns - done >= kLanes) {
        multiply_full<kAccumulate, kRows, 1>(a, b.from(done), c.at(0, done));
        done += kLanes;
    }
    if (columns > done) {
        multiply_rest<kAccumulate>(kRows, static_cast<int>(columns - done), a, b.from(done),
                                   c.at(0, done));
    }
}

template <bool kAccumulate, int kRows, typename A, typename T>
inline void multiply_piece(std::int64_t rows, std::int64_t columns, Matrix<const A> a,
                           const RowPieces<T> &b, Matrix<float> c) {
    if (rows == kRows) {
        multiply_columns<kAccumulate, kRows>(columns, a, b, c);
    } else if constexpr (kRows > 1) {
        multiply_piece<kAccumulate, kRows - 1>(rows, columns, a, b, c);
    }
}

// The rows of a are cut into pieces of nearly equal size.
template <bool kAccumulate, typename A, typename T>
inline void multiply(std::int64_t rows, std::int64_t columns, Matrix<const A> a,
                     const RowPieces<T> &b, Matrix<float> c) {
    while (rows > 0) {
        const std::int64_t num_pieces = (rows + kMaxProductRows - 1) / kMaxProductRows;
        const std::int64_t piece = (rows + num_pieces - 1) / num_pieces;
        multiply_piece<kAccumulate, kMaxProductRows>(piece, columns, a, b, c);
        a = a.at(piece, 0);
        c = c.at(piece, 0);
        rows -= piece;
    }
}

// `depth` is the number of columns of a.
template <bool kAccumulate, typename A, typename T>
inline void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                     Matrix<const A> a, Matrix<const T> b, Matrix<float> c) {
    const typename RowPieces<T>::Piece whole{b.data, depth};
    multiply<kAccumulate>(rows, columns, a, RowPieces<T>{{&whole, 1}, b.stride}, c);
}

// multiply_full for a `b` whose vectors of columns lie apart, with the rows of each `stride` apart.
template <int kRows, int kVectors, typename A, typename T>
inline void multiply_apart(std::int64_t depth, Matrix<const A> a, const T *const *columns,
                           std::int64_t stride, Matrix<float> c) {
    const typename RowPieces<T>::Piece all{nullptr, depth};
    multiply_vectors<false, kRows, kVectors>(
        a, RowPieces<T>{{&all, 1}, stride},
        [&](const auto & /*piece*/, std::int64_t i, int v) { return columns[v] + i * stride; }, c);
}

template <int kRows, typename A, typename T>
inline void multiply_piece_apart(std::int64_t rows, int num_vectors, std::int64_t depth,
                                 Matrix<const A> a, const T *const *columns,
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
template <typename A, typename T>
inline void multiply_apart(std::int64_t rows, int num_vectors, std::int64_t depth,
                           Matrix<const A> a, const T *const *columns, std::int64_t stride,
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
