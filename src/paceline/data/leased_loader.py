"""The loader of a parameter-server worker: reads any share of any batch on request."""

from typing import Any

from paceline.data.dataset_properties import find_properties, is_repeatable_read, refuse_different_data
from paceline.data.fetch import Fetcher, MicrobatchRequest, SampleCheckRequest, raise_worker_error
from paceline.data.loader import stream_error
from paceline.data.order.batches import Batch
from paceline.data.order.cursor import Cursor
from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.source import Collate, SampleOrder, read_source
from paceline.data.types import DatasetSummary, ReplicaMicrobatch, StepInput


class RandomAccessLoader:
    """A loader that reads shares of batches in any order. The batches are the same as those of `MapStyleLoader`."""

    def __init__(
        self, *, data: Any, collate: Collate | None, order: Any, seed: int, sample_seeds: str, global_batch_size: int,
        drop_last: bool,
    ) -> None:  # fmt: skip
        source = read_source(data, collate=collate, order=order, workers=0, name="train_data")
        if not source.is_indexed:
            raise stream_error()
        self._source = source
        self._seed = seed
        self._compared_epoch: int | None = None
        self._global_batch_size = global_batch_size
        self._drop_last = drop_last
        properties = find_properties(source, seed=seed)
        self._order = SampleOrder(order=source.order, num_samples=properties.num_samples, seed=seed)
        seeded = sample_seeds == "always" or (sample_seeds == "auto" and properties.draws_random)
        self._order_source = source.order_source
        self._order_checksums: dict[int, str] = {}
        self._fetcher = Fetcher(data=source.data, collate=source.collate, seed=seed, seed_samples=seeded)

    def read_share(self, cursor: Cursor, *, micro_batch_size: int, number: int = 0, num_shares: int = 1) -> StepInput:
        """Return share `number` of the batch at `cursor`, which is divided into `num_shares` shares."""
        batch = self._order.next_batch(
            cursor,
            global_batch_size=self._global_batch_size,
            micro_batch_size=micro_batch_size,
            drop_last=self._drop_last,
        )
        indices = assign_microbatches(len(batch.micro), replica=number, replicas=num_shares)
        return StepInput(batch=batch, micro=tuple(self._read(batch, index) for index in indices))

    def compare_data(self, epoch: int, summary: DatasetSummary, *, rank: int) -> None:
        """Compare this worker's data with the summary of the server's data, once per epoch.

        Raises:
            DataError: this worker's data can't be read.
            DesyncError: this worker's data differs from the server's in length or samples.
        """
        if self._compared_epoch == epoch:
            return
        self._compared_epoch = epoch
        local_summary = raise_worker_error(
            self._fetcher[MicrobatchRequest(epoch=epoch, indices=(), check=SampleCheckRequest(samples=summary.samples))]
        )
        refuse_different_data(
            {0: summary.num_samples, rank: local_summary.num_samples},
            {0: summary.checksum, rank: local_summary.checksum},
            samples=summary.samples,
            name="train_data",
            is_repeatable=lambda: is_repeatable_read(
                self._source, samples=summary.samples, epoch=epoch, seed=self._seed
            ),
        )

    def order_checksum(self, epoch: int) -> list[str] | None:
        """Return the checksum and the `Source.order_source` of a user-defined order; None if there is none.

        The server compares the checksums of its workers.
        """
        if not self._order.is_user_defined:
            return None
        if epoch not in self._order_checksums:  # a checksum over all indices: computed once per epoch
            self._order_checksums = {e: crc for e, crc in self._order_checksums.items() if e == epoch - 1}
            self._order_checksums[epoch] = self._order.checksum_or_name(epoch)
        return [self._order_checksums[epoch], self._order_source]

    def _read(self, batch: Batch, index: int) -> ReplicaMicrobatch:
        micro, epoch = batch.micro[index], batch.next_cursor.epoch
        indices = self._order.indices_at(epoch=epoch, start=micro.start, stop=micro.stop)
        data = raise_worker_error(self._fetcher[MicrobatchRequest(epoch=epoch, indices=indices)])
        return ReplicaMicrobatch(index=index, num_samples=len(indices), data=data, indices=indices)
