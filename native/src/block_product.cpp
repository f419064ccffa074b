#include "block_product.h"

#include <algorithm>

#include "loraplex/dtype.h"
#include "outer_product.h"

namespace loraplex {
namespace {

// Accumulators must cover the latency of a multiply_add and fit in the registers.
constexpr int product_vectors(int rows) {
    const int most = 2 * kMaxProductRows / rows;
    return most >= 8 ? 8 : most >= 4 ? 4 : 2;
}

// place(piece, i, v): where vector v of row i of a piece is
template <int kRows, int kVectors, typename A, typename T, typename GetPlace>
__attribute__((always_inline)) inline void multiply_vectors(Matrix<const A> a,
                                                            const RowPieces<T> &b,
                                                            const GetPlace &place,
                                                            Matrix<float> c, bool first) {
    using Products = Arithmetic<A>;
    Floats sums[kRows][kVectors];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
            sums[r][v] = first ? zeros() : load(c.row(r) + v * kLanes);
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

template <int kRows, int kVectors, typename A, typename T>
void multiply_full(Matrix<const A> a, const RowPieces<T> &b, Matrix<float> c, bool first) {
    multiply_vectors<kRows, kVectors>(
        a, b,
        [&](const auto &piece, std::int64_t i, int v) { return b.row(piece, i) + v * kLanes; }, c,
        first);
}

// Fewer columns than lanes: as many rows of b as `a` has columns at a time, with zeros behind them.
template <typename A, typename T>
void multiply_rest(int rows, int columns, Matrix<const A> a, const RowPieces<T> &b,
                   Matrix<float> c, bool first) {
    constexpr int kDepth = Arithmetic<A>::kDepth;
    for (int r = 0; r < rows; ++r) {
        float sums[kLanes] = {};
        if (!first) {
            std::copy_n(c.row(r), columns, sums);
        }
        std::int64_t done = 0;
        for (const auto &piece : b.pieces) {
            for (std::int64_t i = 0; i < piece.count; i += kDepth) {
                const std::int64_t count = std::min<std::int64_t>(kDepth, piece.count - i);
                T whole[kDepth * kLanes] = {};
                for (std::int64_t row = 0; row < count; ++row) {
                    std::copy_n(b.row(piece, i + row), columns, whole + row * kLanes);
                }
                const typename RowPieces<T>::Piece filled{whole, count};
                multiply_full<1, 1>(a.at(r, done + i), RowPieces<T>{{&filled, 1}, kLanes},
                                    Matrix<float>{sums, kLanes}, false);
            }
            done += piece.count;
        }
        std::copy_n(sums, columns, c.row(r));
    }
}

template <int kRows, typename A, typename T>
void multiply_columns(std::int64_t columns, Matrix<const A> a, const RowPieces<T> &b,
                      Matrix<float> c, bool first) {
    constexpr int kMany = product_vectors(kRows);
    std::int64_t done = 0;
    for (; columns - done >= kMany * kLanes; done += kMany * kLanes) {
        multiply_full<kRows, kMany>(a, b.from(done), c.at(0, done), first);
    }
    if constexpr (kMany > 4) {
        for (; columns - done >= 4 * kLanes; done += 4 * kLanes) {
            multiply_full<kRows, 4>(a, b.from(done), c.at(0, done), first);
        }
    }
    for (; columns - done >= 2 * kLanes; done += 2 * kLanes) {
        multiply_full<kRows, 2>(a, b.from(done), c.at(0, done), first);
    }
    if (columns - done >= kLanes) {
        multiply_full<kRows, 1>(a, b.from(done), c.at(0, done), first);
        done += kLanes;
    }
    if (columns > done) {
        multiply_rest(kRows, static_cast<int>(columns - done), a, b.from(done), c.at(0, done),
                      first);
    }
}

template <int kRows, typename A, typename T>
void multiply_piece(std::int64_t rows, std::int64_t columns, Matrix<const A> a,
                    const RowPieces<T> &b, Matrix<float> c, bool first) {
    if (rows == kRows) {
        multiply_columns<kRows>(columns, a, b, c, first);
    } else if constexpr (kRows > 1) {
        multiply_piece<kRows - 1>(rows, columns, a, b, c, first);
    }
}

// multiply_full for a `b` whose vectors of columns lie apart.
template <int kRows, int kVectors, typename A, typename T>
void multiply_full_apart(std::int64_t depth, Matrix<const A> a, const T *const *columns,
                         std::int64_t stride, Matrix<float> c) {
    const typename RowPieces<T>::Piece all{nullptr, depth};
    multiply_vectors<kRows, kVectors>(
        a, RowPieces<T>{{&all, 1}, stride},
        [&](const auto & /*piece*/, std::int64_t i, int v) { return columns[v] + i * stride; }, c,
        true);
}

template <int kRows, typename A, typename T>
void multiply_piece_apart(std::int64_t rows, int num_vectors, std::int64_t depth,
                          Matrix<const A> a, const T *const *columns, std::int64_t stride,
                          Matrix<float> c) {
    if (rows == kRows) {
        constexpr int kMany = std::min(4, product_vectors(kRows));
        int done = 0;
        for (; num_vectors - done >= kMany; done += kMany) {
            multiply_full_apart<kRows, kMany>(depth, a, columns + done, stride,
                                              c.at(0, done * kLanes));
        }
        for (; done < num_vectors; ++done) {
            multiply_full_apart<kRows, 1>(depth, a, columns + done, stride,
                                          c.at(0, done * kLanes));
        }
    } else if constexpr (kRows > 1) {
        multiply_piece_apart<kRows - 1>(rows, num_vectors, depth, a, columns, stride, c);
    }
}

// body(first row, number of rows) for pieces of nearly equal size.
template <typename Body>
void for_each_row_piece(std::int64_t rows, const Body &body) {
    for (std::int64_t done = 0; done < rows;) {
        const std::int64_t rest = rows - done;
        const std::int64_t num_pieces = (rest + kMaxProductRows - 1) / kMaxProductRows;
        const std::int64_t piece = (rest + num_pieces - 1) / num_pieces;
        body(done, piece);
        done += piece;
    }
}

}  // namespace

template <typename A, typename T>
void multiply(std::int64_t rows, std::int64_t columns, Matrix<const A> a, const RowPieces<T> &b,
              Matrix<float> c, bool first) {
    for_each_row_piece(rows, [&](std::int64_t row, std::int64_t count) {
        multiply_piece<kMaxProductRows>(count, columns, a.at(row, 0), b, c.at(row, 0), first);
    });
}

template <typename A, typename T>
void multiply_apart(std::int64_t rows, int num_vectors, std::int64_t depth, Matrix<const A> a,
                    const T *const *columns, std::int64_t stride, Matrix<float> c) {
    for_each_row_piece(rows, [&](std::int64_t row, std::int64_t count) {
        multiply_piece_apart<kMaxProductRows>(count, num_vectors, depth, a.at(row, 0), columns,
                                              stride, c.at(row, 0));
    });
}

#define LORAPLEX_PRODUCTS(A, T)                                                            \
    template void multiply(std::int64_t, std::int64_t, Matrix<const A>, const RowPieces<T> &, \
                           Matrix<float>, bool);                                           \
    template void multiply_apart(std::int64_t, int, std::int64_t, Matrix<const A>,         \
                                 const T *const *, std::int64_t, Matrix<float>)

LORAPLEX_PRODUCTS(float, float);
LORAPLEX_PRODUCTS(float, Bfloat16);
LORAPLEX_PRODUCTS(float, Float16);
LORAPLEX_PRODUCTS(float, std::int8_t);
#if defined(LORAPLEX_ISA_X86_64_V4)
LORAPLEX_PRODUCTS(Bfloat16, Bfloat16);
#endif

}  // namespace loraplex
