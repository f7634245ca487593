"""Global batches of an epoch and their microbatches: the same for any number of ranks."""

from dataclasses import dataclass

from paceline.data.order.cursor import Cursor


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """A microbatch at positions `start` to `stop` of the epoch's order; `index` is its position in the global batch."""

    index: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        """The number of samples in the microbatch."""
        return self.stop - self.start


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A global batch with the run's cursor before and after it."""

    cursor: Cursor
    next_cursor: Cursor
    micro: tuple[Microbatch, ...]

    @property
    def num_samples(self) -> int:
        """The number of samples over all ranks."""
        return self.next_cursor.samples - self.cursor.samples


def next_batch(
    cursor: Cursor,
    *,
    num_samples: int,
    global_batch_size: int,
    micro_batch_size: int,
    drop_last: bool = False,
) -> Batch:
    """Return the batch at `cursor`. A batch never spans two epochs, so the last batch of an epoch may be short."""
    num_left = num_samples - cursor.position
    if num_left <= 0 or (drop_last and num_left < global_batch_size):
        cursor = Cursor(epoch=cursor.epoch + 1, samples=cursor.samples, step=cursor.step)
        num_left = num_samples
    size = min(global_batch_size, num_left)
    stop = cursor.position + size
    starts = range(cursor.position, stop, micro_batch_size)
    micro = tuple(
        Microbatch(index=index, start=start, stop=min(start + micro_batch_size, stop))
        for index, start in enumerate(starts)
    )
    return Batch(cursor=cursor, next_cursor=_advance(cursor, size), micro=micro)


def _advance(cursor: Cursor, size: int) -> Cursor:
    return Cursor(
        epoch=cursor.epoch,
        position=cursor.position + size,
        samples=cursor.samples + size,
        step=cursor.step + 1,
    )
