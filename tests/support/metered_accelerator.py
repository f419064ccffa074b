"""An accelerator with a memory of its own, of which only that is taken which a test takes."""

from loraplex.kernels.accelerator import DeviceMemory, HostAccelerator


class MeteredAccelerator(HostAccelerator):
    """All bytes are the test's word; tensors lie on the host and count nothing."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._taken = 0
        self._kept = 0
        self._most_reserved = 0

    def take(self, num_bytes: int) -> None:
        """Allocate bytes permanently; a negative number frees them."""
        self._taken += num_bytes
        self._note()

    def use(self, num_bytes: int) -> None:
        """Allocate bytes briefly; they stay reserved for later tensors until a trim."""
        self._kept = max(self._kept, num_bytes)
        self._note()

    def memory(self) -> DeviceMemory | None:
        reserved = self._taken + self._kept
        return DeviceMemory(
            total=self._total,
            free=self._total - reserved,
            reserved=reserved,
            most_reserved=self._most_reserved,
        )

    def reset_peak(self) -> None:
        self._most_reserved = self._taken + self._kept

    def trim(self) -> None:
        self._kept = 0

    def _note(self) -> None:
        self._most_reserved = max(self._most_reserved, self._taken + self._kept)
