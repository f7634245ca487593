"""Check that all ranks gather the same FSDP units in the same order.

All-gathers are matched by their order: if two ranks call different units of the same shape, each rank silently gets
rows of both units. So each rank adds its unit gathers, forward and backward, to a checksum, and the ranks compare
their checksums once a step, before the update.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import DesyncError

_KEPT = 4096


class UnitOrderCheck:
    """A check of the order in which ranks gather units. `names` holds the units' names, indexed by unit number."""

    def __init__(self, names: Sequence[str], *, world: World) -> None:
        self._names, self._world = tuple(names), world
        self._sum, self._count, self._first = 0, 0, list[int]()
        self._sent: tuple[Tensor, torch.cuda.Event | None, list[int]] | None = None

    def saw(self, number: int, *, backward: bool = False) -> None:
        """Record that unit `number` is gathered, for its forward or its backward."""
        word = 2 * number + backward
        self._sum = zlib.crc32(word.to_bytes(4, "little"), self._sum)
        self._count += 1
        if len(self._first) < _KEPT:
            self._first.append(word)

    def compare(self) -> None:
        """Compare the ranks' checksums; every rank calls this once a step.

        On a GPU it reads the result of the previous step's comparison, so that it does not wait for the device.

        Raises:
            DesyncError: the ranks have gathered different units, or in a different order.
        """
        self.hear()
        vector = torch.tensor([self._sum, -self._sum], dtype=torch.int64).to(self._world.device)
        self._world.all_reduce(vector, op="max")
        event, host = None, vector
        if vector.device.type == "cuda":
            host = torch.empty(2, dtype=torch.int64, pin_memory=True)
            host.copy_(vector, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._sent = host, event, self._first
        self._sum, self._count, self._first = 0, 0, []
        if event is None:
            self.hear()

    def hear(self) -> None:
        """Read the result of the last comparison.

        Raises:
            DesyncError: the ranks have gathered different units, or in a different order.
        """
        if self._sent is None:
            return
        (host, event, mine), self._sent = self._sent, None
        if event is not None:
            event.synchronize()
        largest, smallest = host.tolist()
        if largest != -smallest:
            raise self._apart(self._world.gather_json(mine))

    def told(self) -> str:
        """Return a description of this rank's progress in the step, for the report on a hang."""
        last = f", the last {self._said(self._first[-1])}" if self._first and self._count <= _KEPT else ""
        return f"has gathered units {self._count} times in this step{last}"

    def _apart(self, every: Sequence[Sequence[int]]) -> DesyncError:
        """Return the error for the first rank that differs from rank 0; all ranks return the same error."""
        rank = next((r for r, own in enumerate(every) if list(own) != list(every[0])), 0)
        pairs = zip(every[0], every[rank], strict=False)
        place = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(every[0]), len(every[rank])))
        found = [self._said(own[place]) if place < len(own) else "nothing" for own in (every[0], every[rank])]
        return DesyncError(
            f"fsdp gathered different units on different ranks: {found[0]} on one, {found[1]} on another "
            f"(ranks 0 and {rank} of those that hold each other's rows).",
            cause="a branch of the forward that depends on a rank's samples, or on a random draw: a "
            "block that is skipped, "
            "chosen or reordered",
            hint="--layout zero2 or ddp, where each rank may run different blocks",
        )

    def _said(self, word: int) -> str:
        number, backward = divmod(word, 2)
        return f"{self._names[number]}{' in backward' if backward else ''}"
