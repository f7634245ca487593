"""A buffer of one shard on one replica: the samples that were read ahead, and the record for a resume."""

from collections import deque
from typing import Any

from paceline.data.checksum import extend_checksum
from paceline.data.fetch import raise_worker_error
from paceline.data.stream.shard_reader import NUM_READ_AGAIN, Record, StreamSample
from paceline.data.stream.shard_workers import InProcessShards, WorkerShards


class ShardBuffer:
    """A buffer of samples of one shard.

    `num_read` and `checksum` cover all samples of the epoch that were taken, also before a resume.
    """

    def __init__(self, *, shard: int, pool: InProcessShards | WorkerShards, record: Record | None = None) -> None:
        self.shard = shard
        self.num_read = 0
        self.checksum = 0
        self.notes: list[str] = []
        self._pool = pool
        self._samples: deque[StreamSample] = deque()
        self._has_ended = False
        self._error: Any = None
        self._anchors: list[dict[str, Any]] = []
        if record is not None:
            self.num_read, self.checksum = int(record["read"]), int(record["checksum"])
            self._anchors = [dict(record["anchor"])] if record.get("anchor") else []

    @property
    def num_buffered(self) -> int:
        """The number of samples in the buffer."""
        return len(self._samples)

    @property
    def has_ended(self) -> bool:
        """True if the shard has no samples after those in the buffer."""
        return self._has_ended

    def read_ahead(self, num_samples: int) -> None:
        """Buffer `num_samples`, or fewer if the shard ends. An error is stored until the failed sample is needed."""
        while self.num_buffered < num_samples and not self._has_ended and self._error is None:
            chunk = self._pool.read_chunk(self.shard)
            self._samples += chunk.samples
            self._has_ended, self._error = chunk.has_ended, chunk.error
            self.notes += chunk.notes

    def raise_error(self) -> None:
        """Raise the error that occurred while reading ahead, if any."""
        raise_worker_error(self._error)

    def peek_checksums(self, num_samples: int) -> list[int]:
        """Return the checksums of the next samples without taking them."""
        self.read_ahead(num_samples)
        return [sample.crc for sample, _ in zip(self._samples, range(num_samples), strict=False)]

    def take(self, num_samples: int) -> list[Any]:
        """Remove the next samples from the buffer and return them; fewer than `num_samples` at the end of the shard."""
        self.read_ahead(num_samples)
        if num_samples > self.num_buffered:
            self.raise_error()
        samples = []
        for _ in range(min(num_samples, self.num_buffered)):
            sample = self._samples.popleft()
            self.num_read += 1
            self.checksum = extend_checksum(self.checksum, sample.crc)
            for anchor in self._anchors:
                anchor["checksum"] = extend_checksum(anchor["checksum"], sample.crc)
            if sample.state is not None:
                self._anchors.append({"read": self.num_read, "state": sample.state, "checksum": 0})
            samples.append(sample.sample)
        expired = [anchor for anchor in self._anchors if anchor["read"] <= self.num_read - NUM_READ_AGAIN]
        self._anchors = expired[-1:] + self._anchors[len(expired) :]
        return samples

    def record(self) -> dict[str, Any]:
        """Return the record of this shard for a resume, as JSON (see `shard_reader`)."""
        record: dict[str, Any] = {"read": self.num_read, "checksum": self.checksum}
        if self._anchors and self._anchors[0]["read"] <= self.num_read - NUM_READ_AGAIN:
            record["anchor"] = dict(self._anchors[0])
        return record

    def release(self) -> None:
        """Tell the pool that the shard is not needed any more."""
        self._pool.release(self.shard)
