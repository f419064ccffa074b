// Products by vector registers: weights of every kind, on every instruction set.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "linear_float_block.h"
#include "linear_group_inputs.h"
#include "linear_inputs.h"
#include "linear_quantized_block.h"
#include "linear_tiles.h"

namespace loraplex {

template <typename W, typename AnyInputs = Inputs<W>, const auto &kOf = kShapes>
class VectorProducts {
public:
    using Weight = W;
    using RowInputs = AnyInputs;

    static Cut cut(std::int64_t num_rows) {
        const BlockShape shape = kOf.of(num_rows);
        const bool is_few = num_rows <= kOf.many.rows;
        return {shape, is_few ? 1 : std::max(1, kTilePanels / shape.panels), kMaxTileRows};
    }

    using X = std::remove_pointer_t<decltype(std::declval<AnyInputs>().at({}, 0))>;
    using Function = BlockFunction<W, std::remove_const_t<X>>;
    using FindFunction = Function (*)(BlockShape shape, std::uint64_t cpu_features);

    VectorProducts(const PanelLayout<W> &layout, std::uint64_t cpu_features,
                   FindFunction find_function = &block_function<W>)
        : layout_(layout), cpu_features_(cpu_features), find_function_(find_function) {}

    // What is to be kept while a tile is computed: nothing.
    struct NoRegisters {};
    NoRegisters registers() const { return {}; }

    // sums [blocks][rows, padded][outputs of a block] += the share of a piece of the inputs. next:
    // the piece after it, of a block that is none if it is the last.
    void add(const AnyInputs &inputs, BlockShape shape, Range rows, TilePanels<W> panels,
             const InputPiece &piece, const InputPiece &next, float *sums) const {
        for (std::int64_t i = 0; i < panels.num_blocks; ++i) {
            const W *ahead = weights_after(layout_, panels, shape.panels, i, piece, next);
            add_block(inputs, shape, rows, panels.first + i * shape.panels * layout_.stride(),
                      piece, ahead, sums);
            sums += padded_rows(rows.size) * shape.panels * kPanelWidth;
        }
    }

private:
    // next: the weights of the call after this one.
    void add_block(const AnyInputs &inputs, BlockShape shape, Range rows, const W *panel,
                   const InputPiece &piece, const W *next, float *sums) const {
        const std::int64_t num_row_blocks = divide_up(rows.size, shape.rows);
        BlockWeights<W> block = {
            layout_.values(panel, piece.block, piece.first), layout_.stride(),
            layout_.scales(panel, piece.block, piece.first),
            layout_.offsets(panel, piece.block, piece.first), layout_.table(panel, piece.block),
            AnyInputs::of_groups(layout_), layout_.group_size(), {}};
        for (std::int64_t i = 0; i < num_row_blocks; ++i) {
            const Range part_rows = part(rows.size, num_row_blocks, i);
            const Range next_rows = part(rows.size, num_row_blocks, (i + 1) % num_row_blocks);
            block.ahead = num_row_blocks > 1
                              ? ReadAhead::part(next, piece.depth, num_row_blocks, i)
                          : rows.size == 1 && (cpu_features_ & LORAPLEX_CPU_READS_AHEAD) != 0
                              ? ReadAhead{}
                              : ReadAhead::whole(block.values + kReadAheadBytes / sizeof(W));
            block.ahead.inputs = reinterpret_cast<const std::byte *>(
                inputs.at(piece, rows.first + next_rows.first));
            const BlockShape part_shape = {static_cast<int>(part_rows.size), shape.panels};
            find_function_(part_shape, cpu_features_)(
                inputs.at(piece, rows.first + part_rows.first), block, piece.depth,
                sums + part_rows.first * shape.panels * kPanelWidth, piece.first == 0);
        }
    }

    PanelLayout<W> layout_;
    std::uint64_t cpu_features_;
    FindFunction find_function_;
};

// Of inputs that have a scale for each group, by products of pairs.
template <typename W>
using GroupProducts = VectorProducts<W, GroupInputs<W, std::int16_t>>;

}  // namespace loraplex
