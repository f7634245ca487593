"""A shard as one replica holds it: what was read ahead, what was used, and the record to go on from."""

from collections import deque
from typing import Any

from paceline.data.checksum import fold
from paceline.data.fetch import raise_worker_error
from paceline.data.stream.shard_reader import READ_AGAIN, Record, StreamSample
from paceline.data.stream.shard_workers import InProcessShards, WorkerShards


class ShardBuffer:
    """Samples are used in order. `read` and `checksum` are about those that were used in this epoch."""

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
        """Samples that were read ahead."""
        return len(self._rows)

    @property
    def ended(self) -> bool:
        """Whether there are no more than those."""
        return self._over

    def ensure(self, samples: int) -> None:
        """Read ahead until there are so many, or no more; a failing sample fails when it is needed."""
        while self.have < samples and not self._over and self._trouble is None:
            chunk = self._pool.chunk(self.shard)
            self._rows += chunk.rows
            self._over, self._trouble = chunk.ended, chunk.trouble
            self.notes += chunk.notes

    def fail(self) -> None:
        """Raise what reading ahead has met, if anything."""
        raise_worker_error(self._trouble)

    def first(self, samples: int) -> list[int]:
        """The checksums of the next samples, which stay."""
        self.ensure(samples)
        return [row.crc for row, _ in zip(self._rows, range(samples), strict=False)]

    def take(self, samples: int) -> list[Any]:
        """Use so many samples; fewer only where the shard is not what it was said to be."""
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
        """Where to go on, as JSON: the oldest kept state, and what was read since, to know it again."""
        found: dict[str, Any] = {"read": self.read, "checksum": self.checksum}
        if self._anchors and self._anchors[0]["read"] <= self.read - READ_AGAIN:
            found["anchor"] = dict(self._anchors[0])
        return found

    def drop(self) -> None:
        """Hold it no longer."""
        self._pool.drop(self.shard)
