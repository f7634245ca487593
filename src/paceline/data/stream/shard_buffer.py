"""A buffer of one shard on one replica: samples read ahead, counts of those used, and the record to resume from."""

from collections import deque
from typing import Any

from paceline.data.checksum import fold
from paceline.data.fetch import raise_worker_error
from paceline.data.stream.shard_reader import READ_AGAIN, Record, StreamSample
from paceline.data.stream.shard_workers import InProcessShards, WorkerShards


class ShardBuffer:
    """A buffer whose samples are used in order. `read` and `checksum` cover those that were used in this epoch."""

    def __init__(self, *, shard: int, pool: InProcessShards | WorkerShards, record: Record | None = None) -> None:
        self.shard = shard
        self.read = 0
        self.checksum = 0
        self.notes: list[str] = []
        self._pool = pool
        self._rows: deque[StreamSample] = deque()
        self._over = False
        self._trouble: Any = None
        self._anchors: list[dict[str, Any]] = []
        if record is not None:
            self.read, self.checksum = int(record["read"]), int(record["checksum"])
            self._anchors = [dict(record["anchor"])] if record.get("anchor") else []

    @property
    def have(self) -> int:
        """The number of samples that were read ahead."""
        return len(self._rows)

    @property
    def ended(self) -> bool:
        """Return whether the shard has no samples beyond those."""
        return self._over

    def ensure(self, samples: int) -> None:
        """Read ahead until `samples` are buffered or the shard ends; a failing sample raises only when it is needed."""
        while self.have < samples and not self._over and self._trouble is None:
            chunk = self._pool.chunk(self.shard)
            self._rows += chunk.rows
            self._over, self._trouble = chunk.ended, chunk.trouble
            self.notes += chunk.notes

    def fail(self) -> None:
        """Raise the error that reading ahead has met, if any."""
        raise_worker_error(self._trouble)

    def first(self, samples: int) -> list[int]:
        """Return the checksums of the next samples without using them."""
        self.ensure(samples)
        return [row.crc for row, _ in zip(self._rows, range(samples), strict=False)]

    def take(self, samples: int) -> list[Any]:
        """Use and return `samples` samples; fewer only if the shard is shorter than expected."""
        self.ensure(samples)
        if samples > self.have:
            self.fail()
        found = []
        for _ in range(min(samples, self.have)):
            row = self._rows.popleft()
            self.read += 1
            self.checksum = fold(self.checksum, row.crc)
            for anchor in self._anchors:
                anchor["checksum"] = fold(anchor["checksum"], row.crc)
            if row.state is not None:
                self._anchors.append({"read": self.read, "state": row.state, "checksum": 0})
            found.append(row.sample)
        old = [anchor for anchor in self._anchors if anchor["read"] <= self.read - READ_AGAIN]
        self._anchors = old[-1:] + self._anchors[len(old) :]
        return found

    def record(self) -> dict[str, Any]:
        """Return the record to resume from, as JSON: the oldest kept state, and a checksum of what was read since."""
        found: dict[str, Any] = {"read": self.read, "checksum": self.checksum}
        if self._anchors and self._anchors[0]["read"] <= self.read - READ_AGAIN:
            found["anchor"] = dict(self._anchors[0])
        return found

    def drop(self) -> None:
        """Release the shard."""
        self._pool.drop(self.shard)
