"""Cells of encoded images: the rows that an encoder computed, until prompts have read them."""

import dataclasses
from collections.abc import Iterable, Sequence

from loraplex.core.plan import CellId
from loraplex.memory.block_pool import BlockPool

ImageKey = tuple[bytes, bytes]
"""(salt, digest) of an image: tenants share no cell, and adapters do."""


@dataclasses.dataclass(slots=True, eq=False)
class ImageCell:
    """Place of one image's rows."""

    cell_id: CellId
    key: ImageKey
    is_filled: bool = False
    """Whether a planned step encodes the image: every later one, and its own rows, can read it."""


class ImageCells:
    """A fixed number of cells, found by the content of their image.

    A sequence holds the cells of all images that it has yet to read, from when it takes its slot.
    Cells that no sequence holds are kept, and the least recently released is used again first.
    """

    def __init__(self, num_cells: int) -> None:
        self._pool = BlockPool(num_cells, self._forget)
        self._cells: dict[CellId, ImageCell] = {}
        self._by_key: dict[ImageKey, ImageCell] = {}

    @property
    def num_held(self) -> int:
        return self._pool.num_held

    def acquire(self, keys: Sequence[ImageKey]) -> list[ImageCell] | None:
        """Hold a cell for each image; None and no change if there are too few.

        An image that is there twice has one cell, held twice.
        """
        known = {key: self._by_key[key] for key in keys if key in self._by_key}
        num_cached = sum(not self._pool.ref_count(cell.cell_id) for cell in known.values())
        num_new = len(set(keys)) - len(known)
        if num_new + num_cached > self._pool.num_available:
            return None
        # Known ones first: taking others must not evict them.
        self._pool.share(self._by_key[key].cell_id for key in keys if key in known)
        return [known[key] if key in known else self._take(key) for key in keys]

    def release(self, cells: Iterable[ImageCell]) -> None:
        """Drop one holder of each cell."""
        for cell in cells:
            if cell.is_filled:
                self._pool.keep(cell.cell_id)
            self._pool.release([cell.cell_id])

    def lose(self, cell_id: CellId) -> None:
        """Note that a step did not encode the image of a cell: it is encoded again if needed."""
        cell = self._cells.get(cell_id)
        if cell is not None:
            cell.is_filled = False
            self._pool.drop(cell_id)
            if not self._pool.ref_count(cell_id):
                self._forget(cell_id)

    def check(self, held: Iterable[Sequence[ImageCell]]) -> None:
        """Assert that the cells which sequences hold are counted, and that each has its key."""
        self._pool.check([[cell.cell_id for cell in cells] for cells in held])
        assert len(self._by_key) == len(self._cells)
        assert all(self._by_key[cell.key] is cell for cell in self._cells.values())
        for cell_id, cell in self._cells.items():
            assert cell.cell_id == cell_id
            assert cell.is_filled or self._pool.ref_count(cell_id), "an empty cell is kept"
        assert len(self._cells) == self._pool.num_held + self._pool.num_cached

    def _take(self, key: ImageKey) -> ImageCell:
        if key in self._by_key:
            cell = self._by_key[key]
            self._pool.share([cell.cell_id])
            return cell
        taken = self._pool.allocate(1)
        assert taken is not None, "too few cells"
        cell = self._cells[taken[0]] = self._by_key[key] = ImageCell(taken[0], key)
        return cell

    def _forget(self, cell_id: CellId) -> None:
        cell = self._cells.pop(cell_id)
        del self._by_key[cell.key]
