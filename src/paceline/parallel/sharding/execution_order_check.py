"""Check that all ranks gather the same FSDP units in the same order.

The ranks' all-gathers are matched by their order. If two ranks call different units of the same shape, each rank
silently gets rows of both units. So each rank adds every gather of a unit, in forward and backward, to a checksum. Once
a step, before the update, the ranks compare their checksums.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import DesyncError

_MAX_RECORDED = 4096


class UnitOrderCheck:
    """A check of the order in which ranks gather units, identified by their positions in `names`."""

    def __init__(self, names: Sequence[str], *, world: World) -> None:
        self._names, self._world = tuple(names), world
        self._checksum, self._count, self._recorded = 0, 0, list[int]()
        # the last comparison: its result in host memory, the event of the copy, and this rank's recorded gathers
        self._pending: tuple[Tensor, torch.cuda.Event | None, list[int]] | None = None

    def record_gather(self, unit_index: int, *, backward: bool = False) -> None:
        """Record that the unit with this index is gathered, for its forward or its backward."""
        event_code = 2 * unit_index + backward
        self._checksum = zlib.crc32(event_code.to_bytes(4, "little"), self._checksum)
        self._count += 1
        if len(self._recorded) < _MAX_RECORDED:
            self._recorded.append(event_code)

    def compare(self) -> None:
        """Compare the ranks' checksums; every rank calls this once a step.

        On a GPU, this call starts the comparison of this step and reads the result of the previous step, so that it
        does not wait for the device.

        Raises:
            DesyncError: the ranks have gathered different units, or in a different order.
        """
        self.check_pending()
        vector = torch.tensor([self._checksum, -self._checksum], dtype=torch.int64).to(self._world.device)
        self._world.all_reduce(vector, op="max")
        cuda_event, host_vector = None, vector
        if vector.device.type == "cuda":
            host_vector = torch.empty(2, dtype=torch.int64, pin_memory=True)
            host_vector.copy_(vector, non_blocking=True)
            cuda_event = torch.cuda.Event()
            cuda_event.record()
        self._pending = host_vector, cuda_event, self._recorded
        self._checksum, self._count, self._recorded = 0, 0, []
        if cuda_event is None:
            self.check_pending()

    def check_pending(self) -> None:
        """Read the result of the last comparison, if it has not been read yet.

        Raises:
            DesyncError: the ranks have gathered different units, or in a different order.
        """
        if self._pending is None:
            return
        (host_vector, cuda_event, recorded), self._pending = self._pending, None
        if cuda_event is not None:
            cuda_event.synchronize()
        largest, negative_smallest = host_vector.tolist()
        if largest != -negative_smallest:
            raise self._order_error(self._world.gather_json(recorded))

    def describe_progress(self) -> str:
        """Return a description of this rank's progress in the step, for the report on a hang."""
        last_gather = (
            f", the last {self._describe(self._recorded[-1])}"
            if self._recorded and self._count <= _MAX_RECORDED
            else ""
        )
        return f"has gathered units {self._count} times in this step{last_gather}"

    def _order_error(self, all_recorded: Sequence[Sequence[int]]) -> DesyncError:
        """Return the error for the first rank that differs from rank 0; all ranks return the same error."""
        rank = next((r for r, recorded in enumerate(all_recorded) if list(recorded) != list(all_recorded[0])), 0)
        pairs = zip(all_recorded[0], all_recorded[rank], strict=False)
        position = next(
            (n for n, (a, b) in enumerate(pairs) if a != b), min(len(all_recorded[0]), len(all_recorded[rank]))
        )
        descriptions = [
            self._describe(recorded[position]) if position < len(recorded) else "nothing"
            for recorded in (all_recorded[0], all_recorded[rank])
        ]
        return DesyncError(
            f"fsdp gathered different units on different ranks: {descriptions[0]} on rank 0 and {descriptions[1]} on "
            f"rank {rank} of a shard group.",
            cause="a branch of the forward that depends on a rank's samples, or on a random draw: a block that is "
            "skipped, chosen or reordered",
            hint="--layout zero2 or ddp, where each rank may run different blocks",
        )

    def _describe(self, event_code: int) -> str:
        unit_index, backward = divmod(event_code, 2)
        return f"{self._names[unit_index]}{' in backward' if backward else ''}"
