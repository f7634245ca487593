"""The training loader of iterable datasets (streams).

If a stream can be split, it is split into virtual shards, and each replica reads the shards that it needs. Otherwise
every replica reads the whole stream and uses only its own microbatches, which is exact but reads more. Checksums detect
samples that differ between replicas, or between the reads before and after a resume.
"""

from collections.abc import Iterator, Mapping
from types import GeneratorType
from typing import Any

from paceline.data.checksum import checksum
from paceline.data.order.batches import Batch, Microbatch
from paceline.data.order.cursor import Cursor
from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.source import Source
from paceline.data.stream.epoch import Epoch, GatherJson, StreamSettings
from paceline.data.stream.microbatch_collator import Collator
from paceline.data.stream.virtual_sharding import StreamSharding, decide_sharding
from paceline.data.types import BatchPartition, ReplicaMicrobatch, StepInput
from paceline.errors import DataError, JobError, ResumeError
from paceline.torch_internals.rng import stream_key

__all__ = ["IterableLoader", "checksum"]


class IterableLoader:
    """A loader over an iterable. `gather_json` returns the values of all replicas, in the order of replicas."""

    num_samples: int | None = None

    def __init__(
        self,
        *,
        source: Source,
        partition: BatchPartition,
        cursor: Cursor,
        seed: int,
        sample_seeds: str = "auto",
        shards: int | None = None,
        gather_json: GatherJson | None = None,
    ) -> None:
        if source.order is not None:
            raise JobError("order= needs data that can be indexed.", hint="leave order= out for an iterable")
        self._source = source
        self._partition = partition
        self._cursor = cursor
        self._requested_shards = shards
        self._seed = None if sample_seeds == "never" else seed
        self._gather_json = gather_json
        self._saved_state: Mapping[str, Any] | None = None
        self._epoch: Epoch | None = None
        self._collator: Collator | None = None
        self._sharding = decide_sharding(source, requested=shards, global_batch_size=partition.global_batch_size)

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines that the banner shows about the data."""
        return (*self._source.notes, describe_stream(self._sharding, replicas=self._partition.replicas, kind="data"))

    def __iter__(self) -> Iterator[StepInput]:
        """Yield step inputs forever: the stream is read again for each epoch."""
        cursor = self._cursor
        self._collator = self._collator or Collator(self._source)
        epoch = self._resume_epoch()
        while True:
            shard_counts = epoch.next_batch()
            if shard_counts is None:
                raise self._no_batch_error(cursor)
            batch = _make_batch(cursor, sum(shard_counts), self._partition.micro_batch_size)
            samples = epoch.take_batch()
            micro = self._collate_local(batch, samples)
            fingerprint = epoch.checksum
            if epoch.next_batch() is None:
                end = batch.next_cursor
                next_epoch = Cursor(epoch=end.epoch + 1, samples=end.samples, step=end.step)
                batch = Batch(cursor=batch.cursor, next_cursor=next_epoch, micro=batch.micro)
            self._cursor = cursor = batch.next_cursor
            yield StepInput(batch=batch, micro=micro, fingerprint=fingerprint & 0xFFFFFF, notes=tuple(epoch.notes))
            if cursor.position == 0:
                epoch = self._open_epoch(cursor.epoch)

    def state(self) -> Mapping[str, Any]:
        """Return the position of each shard, for a resume on any number of replicas. Every replica calls this."""
        state: dict[str, Any] = {"shards": self._sharding.shards, "epoch": self._cursor.epoch}
        if self._epoch is not None and self._cursor.position:
            state |= self._epoch.state()
        return state

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a state returned by `state`, with the number of shards in that state.

        Raises:
            ResumeError: the stream can't be split as before, or another number of shards is requested.
        """
        self._saved_state = state
        saved_shards, requested = int(state["shards"]), self._requested_shards
        if requested is not None and requested != saved_shards and self._sharding.shards != saved_shards:
            raise ResumeError(
                f"data.shards was {saved_shards}, is {requested}.",
                cause="the order of samples depends on the number of shards, which is fixed when a run first starts",
                hint="leave --data.shards out",
            )
        sharding = self._sharding
        if saved_shards != sharding.shards:
            sharding = decide_sharding(
                self._source,
                requested=saved_shards,
                global_batch_size=max(saved_shards, self._partition.global_batch_size),
            )
        if saved_shards != sharding.shards:
            raise ResumeError(
                f"the stream was split into {saved_shards} shards, but can't be split now: "
                f"{sharding.reason_not_split}.",
                cause="different data, or a different version of it",
                hint="use the data that the run was started with",
            )
        self._sharding = sharding

    def close(self) -> None:
        """Stop the data workers."""
        if self._epoch is not None:
            self._epoch.close()
        if self._collator is not None:
            self._collator.close()

    def _no_batch_error(self, cursor: Cursor) -> DataError:
        problem, hint = "is empty", "check the path it reads from"
        if cursor.position:
            problem = "ends before the position at which this run stopped"
        elif self._partition.drop_last:
            problem = (
                f"is shorter than a global batch of {self._partition.global_batch_size}, which data.drop_last drops"
            )
            hint = "--data.drop_last false, or a smaller --train.global_batch_size"
        return DataError(f"the stream of train_data {problem}.", hint=hint)

    def _open_epoch(self, number: int, saved: Mapping[str, Any] | None = None) -> Epoch:
        if self._epoch is not None and isinstance(self._source.data, GeneratorType):
            raise DataError(
                f"train_data is a generator, which can be read only once: epoch {number + 1} has no data.",
                hint="train_data=the generator function itself, without calling it: it is called for each epoch",
            )
        if self._epoch is not None:
            self._epoch.close()
        settings = StreamSettings(
            sharding=self._sharding,
            source=self._source,
            partition=self._partition,
            seed=self._seed,
            gather_json=self._gather_json,
        )
        self._epoch = Epoch(settings=settings, number=number, saved=saved)
        return self._epoch

    def _resume_epoch(self) -> Epoch:
        """Return the epoch at the cursor: from saved records if possible, else by reading the epoch from its start."""
        cursor, saved = self._cursor, self._saved_state
        is_saved = saved is not None and saved.get("epoch") == cursor.epoch and "read" in saved
        if saved is not None and is_saved and sum(saved["read"]) == cursor.position:
            return self._open_epoch(cursor.epoch, saved)
        epoch = self._open_epoch(cursor.epoch)
        while sum(epoch.num_read) < cursor.position and epoch.next_batch() is not None:
            epoch.take_batch()
        return epoch

    def _collate_local(self, batch: Batch, samples: list[Any]) -> tuple[ReplicaMicrobatch, ...]:
        """Return this replica's microbatches of a batch, collated from the samples of the whole batch."""
        first_position, microbatches = batch.cursor.position, []
        assert self._collator is not None
        for index in assign_microbatches(
            len(batch.micro), replica=self._partition.replica, replicas=self._partition.replicas
        ):
            micro = batch.micro[index]
            seed = None if self._seed is None else stream_key(self._seed, "microbatch", batch.cursor.epoch, micro.start)
            microbatch_samples = samples[micro.start - first_position : micro.stop - first_position]
            microbatches.append(
                self._collator.collate_microbatch(microbatch_samples, index=index, start=micro.start, seed=seed)
            )
        return tuple(microbatches)


def describe_stream(sharding: StreamSharding, *, replicas: int, kind: str) -> str:
    """Return a line for the banner that says how the stream is read. The line begins with `kind`, such as "data"."""
    if sharding.shards == 1:
        resume = "; a resume continues from its state" if sharding.has_state else ""
        return (
            f"{kind}: a stream, not split ({sharding.reason_not_split}); every replica reads all of it and keeps "
            f"its own microbatches (exact, but reads more){resume}"
        )
    reading = (
        "each replica reads its own shards"
        if sharding.shards >= replicas
        else f"about {-(-replicas // sharding.shards)} replicas read each shard (more shards need a new run)"
    )
    return f"{kind}: a stream in {sharding.shards} virtual shards, fixed for this run; {reading}"


def _make_batch(cursor: Cursor, size: int, micro_batch_size: int) -> Batch:
    stop = cursor.position + size
    starts = range(cursor.position, stop, micro_batch_size)
    micro = tuple(
        Microbatch(index=i, start=start, stop=min(start + micro_batch_size, stop)) for i, start in enumerate(starts)
    )
    next_cursor = Cursor(epoch=cursor.epoch, position=stop, samples=cursor.samples + size, step=cursor.step + 1)
    return Batch(cursor=cursor, next_cursor=next_cursor, micro=micro)
