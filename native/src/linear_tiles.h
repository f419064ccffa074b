// How `linear` cuts its work into tiles, and writes what they give.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "linear_block.h"
#include "linear_inputs.h"
#include "loraplex/simd.h"

namespace loraplex {

// Rows of one tile: their inputs of one depth stay in the second cache.
inline constexpr std::int64_t kMaxTileRows = 128;
// Outputs of one tile with many rows: so often the inputs are used when they are there.
inline constexpr int kTilePanels = 4;

// Part i of `total` things in `parts` even parts.
struct Range {
    std::int64_t first;
    std::int64_t size;
};

constexpr Range part(std::int64_t total, std::int64_t parts, std::int64_t i) {
    const std::int64_t first = total * i / parts;
    return {first, total * (i + 1) / parts - first};
}

// How rows are cut into tiles, and tiles into blocks.
struct Cut {
    BlockShape shape;
    std::int64_t tile_blocks;
    std::int64_t max_tile_rows;
    // Whether the sums of each panel lie apart, [panels][rows, padded][kPanelWidth], and not a block's side
    // by side in a row.
    bool has_panel_sums = false;
};

// Sums of a tile have rows up to a multiple of this: some kernels write so many at once.
inline constexpr std::int64_t kRowMultiple = 16;

constexpr std::int64_t padded_rows(std::int64_t num_rows) {
    return divide_up(num_rows, kRowMultiple) * kRowMultiple;
}

// Panels of a tile: blocks of as many as the shape has.
template <typename W>
struct TilePanels {
    const W *first;
    std::int64_t num_blocks;
};

// The weights of the call after that of block i of a piece: of the tile's next block, or of the first
// one and the next piece, or of the next tile.
template <typename W>
const W *weights_after(const PanelLayout<W> &layout, const TilePanels<W> &panels, int block_panels,
                       std::int64_t i, const InputPiece &piece, const InputPiece &next) {
    const W *next_panel = panels.first + (i + 1) * block_panels * layout.stride();
    return i + 1 < panels.num_blocks            ? layout.values(next_panel, piece.block, piece.first)
           : next.block < layout.num_blocks() ? layout.values(panels.first, next.block, next.first)
                                              : next_panel;
}

// Neighbouring rows that are multiplied with one weight, cut into tiles.
struct Product {
    std::int64_t weight;  // its number
    Range rows;           // of the inputs
    Cut cut;
    std::int64_t num_row_tiles;
    std::int64_t num_column_tiles;
    std::int64_t first_tile;  // of all products of a call

    Product(std::int64_t weight, Range rows, Cut cut, std::int64_t out_features,
            std::int64_t first_tile)
        : weight(weight), rows(rows), cut(cut),
          num_row_tiles(divide_up(rows.size, cut.max_tile_rows)),
          num_column_tiles(divide_up(num_panels(out_features), tile_panels())),
          first_tile(first_tile) {}

    std::int64_t num_tiles() const { return num_row_tiles * num_column_tiles; }
    std::int64_t tile_panels() const { return cut.shape.panels * cut.tile_blocks; }
    std::int64_t block_outputs() const { return cut.shape.panels * kPanelWidth; }

    std::size_t sums_bytes() const {
        const std::int64_t tile_rows = padded_rows(std::min(rows.size, cut.max_tile_rows));
        return static_cast<std::size_t>(tile_rows * block_outputs() * cut.tile_blocks) *
               sizeof(float);
    }
};

// y, or this rank's slot of a channel. Neighbouring sums.
template <typename T>
inline void write_sums(const float *sums, const float *bias, std::int64_t num_outputs, T *target) {
    std::int64_t output = 0;
    if (bias == nullptr) {
        for (; output + kLanes <= num_outputs; output += kLanes) {
            store(target + output, load(sums + output));
        }
    } else {
        for (; output + kLanes <= num_outputs; output += kLanes) {
            store(target + output, add(load(sums + output), load(bias + output)));
        }
    }
    if (const auto count = static_cast<int>(num_outputs - output); count > 0) {
        const Floats last = bias == nullptr ? zeros() : load_first(bias + output, count);
        store_first(target + output, add(load(sums + output), last), count);
    }
}

// A row's sums: `width` side by side, the next ones `stride` after them.
struct RowSums {
    const float *first;
    std::int64_t width;
    std::int64_t stride;
};

template <typename T>
inline void write_row(const RowSums &sums, const float *bias, std::int64_t num_outputs, T *target) {
    const float *source = sums.first;
    for (std::int64_t output = 0; output < num_outputs; output += sums.width) {
        write_sums(source, bias == nullptr ? nullptr : bias + output,
                   std::min(sums.width, num_outputs - output), target + output);
        source += sums.stride;
    }
}

}  // namespace loraplex
