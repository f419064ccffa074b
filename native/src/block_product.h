// c[r][0 : columns] (+)= sum over i of a[r][i] * b[i][0 : columns]: few rows, and a `b` as stored.
//
// The one product of attention (scores; weighted values) and of the LoRA expansion. Every element
// of c is one chain over rising i, whatever the numbers of rows and columns: so a row has the same
// bits alone and in company. Where `a` is float32 the chain is of multiply_add, however i is cut
// into calls or pieces; where it is bfloat16, of pairs of a piece's i (bfloat16_pairs.h).
//
// The loops are compiled once, in block_product.cpp: a hundred shapes for each type of `b`.
#pragma once

#include <cstdint>
#include <span>

#include "loraplex/simd.h"

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

// A is float, and T one of the element types or int8; with AVX-512 both may be bfloat16. first: c
// holds nothing to add to.
template <typename A, typename T>
void multiply(std::int64_t rows, std::int64_t columns, Matrix<const A> a, const RowPieces<T> &b,
              Matrix<float> c, bool first);

// `depth` is the number of columns of a.
template <typename A, typename T>
inline void multiply(std::int64_t rows, std::int64_t columns, std::int64_t depth,
                     Matrix<const A> a, Matrix<const T> b, Matrix<float> c, bool first) {
    const typename RowPieces<T>::Piece whole{b.data, depth};
    multiply(rows, columns, a, RowPieces<T>{{&whole, 1}, b.stride}, c, first);
}

// The first multiply with vectors of columns from several places, the rows of each `stride` apart:
// with one vector at a time, few rows have too few chains to cover the latency of a multiply_add.
// The bits are those of multiply.
template <typename A, typename T>
void multiply_apart(std::int64_t rows, int num_vectors, std::int64_t depth, Matrix<const A> a,
                    const T *const *columns, std::int64_t stride, Matrix<float> c);

}  // namespace loraplex
