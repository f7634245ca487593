"""Sharding of a sequence over the ranks of a `cp` axis, and of a batch along it.

A sequence is split into twice as many chunks as ranks. Rank r holds two chunks: number r from the start and number r
from the end. Under a causal mask, early positions attend to few keys and late positions to many. Since each rank has
both, all ranks have equal work (the "zigzag" of Brandon et al., "Striped Attention", 2023, and of Llama 3's training).
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.errors import JobError, LayoutError

IGNORED_LABEL = -100


@dataclass(frozen=True, kw_only=True)
class SequenceChunk:
    """A range `[start, start + size)` of the sequence, stored from `local_start` in a rank's shard."""

    start: int
    local_start: int
    size: int

    @property
    def stop(self) -> int:
        """Return the end of the range."""
        return self.start + self.size

    @property
    def full_slice(self) -> slice:
        """Return the range as a slice of the full sequence."""
        return slice(self.start, self.stop)

    @property
    def local_slice(self) -> slice:
        """Return the range as a slice of the rank's shard."""
        return slice(self.local_start, self.local_start + self.size)

    def split(self, *, max_size: int) -> "Iterator[SequenceChunk]":
        """Yield sub-ranges of at most `max_size` positions."""
        for offset in range(0, self.size, max_size):
            yield SequenceChunk(
                start=self.start + offset, local_start=self.local_start + offset, size=min(max_size, self.size - offset)
            )


@dataclass(frozen=True, kw_only=True)
class SequenceSharding:
    """The sharding of `length` positions over `ranks`; the sizes of chunks differ by at most one position."""

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.ranks > 1 and self.length < 2 * self.ranks:
            raise LayoutError(
                f"a sequence of {self.length} over cp={self.ranks} needs at least 2 x {self.ranks} = "
                f"{2 * self.ranks} positions: each rank holds an early and a late chunk.",
                cause="a short batch, or cp (in exact mode: train.sequence_shards) too large for these sequences",
                hint=f"cp={max(1, self.length // 2)} or less, or pad this batch to {2 * self.ranks}",
            )

    def chunks(self, rank: int) -> tuple[SequenceChunk, ...]:
        """Return the chunks of a rank, in the order of its shard."""
        if self.ranks == 1:
            return (SequenceChunk(start=0, local_start=0, size=self.length),)
        early_start, early_size = self._chunk_range(rank)
        late_start, late_size = self._chunk_range(2 * self.ranks - 1 - rank)
        return (
            SequenceChunk(start=early_start, local_start=0, size=early_size),
            SequenceChunk(start=late_start, local_start=early_size, size=late_size),
        )

    def local_length(self, rank: int) -> int:
        """Return the number of positions that a rank holds."""
        return sum(chunk.size for chunk in self.chunks(rank))

    def positions(self, rank: int, *, device: torch.device | None = None) -> Tensor:
        """Return the positions of the rank's shard in the full sequence, as int64."""
        return torch.cat([torch.arange(chunk.start, chunk.stop, device=device) for chunk in self.chunks(rank)])

    def shard(self, full: Tensor, *, dim: int, rank: int) -> Tensor:
        """Return a rank's shard of a tensor with the full sequence along `dim`."""
        return torch.cat([full.narrow(dim, chunk.start, chunk.size) for chunk in self.chunks(rank)], dim=dim)

    def join(self, shards: Sequence[Tensor], *, dim: int) -> Tensor:
        """Return the full tensor from the shards of all ranks: the inverse of `shard`."""
        chunks = [
            (chunk.start, shard.narrow(dim, chunk.local_start, chunk.size))
            for rank, shard in enumerate(shards)
            for chunk in self.chunks(rank)
        ]
        return torch.cat([shard for _, shard in sorted(chunks, key=lambda pair: pair[0])], dim=dim)

    def _chunk_range(self, index: int) -> tuple[int, int]:
        """Return the start and the size of a chunk."""
        min_size, remainder = divmod(self.length, 2 * self.ranks)
        return index * min_size + min(index, remainder), min_size + (index < remainder)


def batch_length(batch: Any, *, sequence: Mapping[str, int]) -> int:
    """Return the length of a batch's sequence dimension.

    Raises:
        JobError: an entry is missing or is not a tensor, or the entries differ in length.
    """
    entries = dict(_tensor_entries(batch))
    lengths = {name: _sequence_entry(entries, name, dim).shape[dim] for name, dim in sequence.items()}
    if not lengths:
        raise JobError(
            "the job does not say which dimension of the batch is the sequence.",
            cause="context parallelism splits that dimension over its ranks",
            hint=sequence_hint(batch),
        )
    if len(set(lengths.values())) > 1:
        described = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise JobError(
            f"the sequence dimensions of one batch differ: {described}.",
            cause="an encoder and a decoder, or inputs and targets of different lengths",
            hint="in sequence={...}, name only entries of equal length, or leave cp out",
        )
    return next(iter(lengths.values()))


def sequence_hint(batch: Any) -> str:
    """Return a hint that names the entries of the batch that may have a sequence dimension."""
    candidates = ", ".join(f"{n!r}: 1" for n, v in _tensor_entries(batch) if v.dim() in (2, 3))
    if not candidates:
        return "leave cp out: this batch has no sequence"
    return f"sequence={{{candidates}}} in the job, or leave cp out"


def count_sequences(batch: Any, *, sequence: Mapping[str, int]) -> int:
    """Return the number of sequences of a batch: the product of the dimensions before the sequence dimension."""
    entries = dict(_tensor_entries(batch))
    entry, dim = next((entries[name], dim) for name, dim in sequence.items())
    return math.prod(entry.shape[: dim % entry.dim()])


def shard_batch(batch: Any, *, sequence: Mapping[str, int], ranks: int, rank: int, shift_labels: bool = False) -> Any:
    """Return a rank's shard of a batch, which is a tensor, a dict, a tuple or a list.

    `sequence` maps the name of an entry to its sequence dimension; entries of a tuple or list have the names "0", "1",
    ... . Another tensor is sharded too if it and a named entry have equal sizes in the sequence dimension and in all
    dimensions before it.
    With `shift_labels`, the entry `labels` is first shifted one position to the left over the full sequence. The last
    label of each shard is then correct; that of the full sequence is the ignored label -100.
    """
    sharding = SequenceSharding(length=batch_length(batch, sequence=sequence), ranks=ranks)
    entries = dict(_tensor_entries(batch))
    leading_shapes = {tuple(entries[name].shape[: dim % entries[name].dim() + 1]) for name, dim in sequence.items()}

    def shard_entry(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name in sequence:
            dim = sequence[name] % value.dim()
        else:
            dim = next((len(shape) - 1 for shape in leading_shapes if tuple(value.shape[: len(shape)]) == shape), -1)
        if dim < 0:
            return value
        if shift_labels and name == "labels":
            value = next_position_labels(value, dim=dim)
        return sharding.shard(value, dim=dim, rank=rank)

    return _map_entries(batch, shard_entry)


def next_position_labels(labels: Tensor, *, dim: int) -> Tensor:
    """Shift labels so that each position has the label of the next one; the last label is `IGNORED_LABEL`."""
    end = torch.full_like(labels.narrow(dim, 0, 1), IGNORED_LABEL)
    return torch.cat([labels.narrow(dim, 1, labels.shape[dim] - 1), end], dim=dim)


def has_padding(batch: Any) -> bool:
    """Return whether the `attention_mask` of the full batch masks a position; all ranks need this information."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return isinstance(mask, Tensor) and not bool(mask.all())


def _sequence_entry(entries: Mapping[str, Tensor], name: str, dim: int) -> Tensor:
    """Return an entry by name; raise JobError if it is missing or does not have the dimension."""
    entry = entries.get(name)
    if entry is None or not -entry.dim() <= dim < entry.dim():
        shapes = ", ".join(f"{n} {tuple(v.shape)}" for n, v in entries.items()) or "no tensor"
        raise JobError(
            f"sequence={{{name!r}: {dim}}} does not match the batch, which has {shapes}.",
            cause="the entry is not in the batch, or has fewer dimensions",
            hint='a dict\'s key, or "0", "1", ... for the entries of a tuple; "0" for a batch that is one tensor',
        )
    return entry


def _tensor_entries(batch: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of each entry that is a tensor."""
    if isinstance(batch, Tensor):
        yield "0", batch
    else:
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        yield from ((str(name), value) for name, value in pairs if isinstance(value, Tensor))


def _map_entries(batch: Any, change: Callable[[str, Any], Any]) -> Any:
    """Return a batch of the same structure, with each entry replaced by `change(name, entry)`."""
    if isinstance(batch, Tensor):
        return change("0", batch)
    if isinstance(batch, Mapping):
        return {name: change(str(name), value) for name, value in batch.items()}
    entries = [change(str(index), value) for index, value in enumerate(batch)]
    if hasattr(batch, "_fields"):
        return type(batch)(*entries)
    return entries if isinstance(batch, list) else tuple(entries)
