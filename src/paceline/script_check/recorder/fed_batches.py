"""Batches of another recording in place of the script's own: one process trains on what several ranks trained on.

The batches of all ranks are joined: first the first one of each rank, then the second ones. The script's own batch
says how many samples come next, so a training with larger batches gets several of them at a time. A batch that several
ranks read, because they have parts of one model or of its sequences, counts once. A process that is fed is a reference,
which is changed on purpose.
"""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.script_check.judge.rank_peers import read_peers
from paceline.script_check.recorder.batch_files import (
    IsData,
    batch_rows,
    forward_key,
    join_rows,
    loader_key,
    read_batches,
    replace_rows,
)
from paceline.script_check.recorder.sample_keys import OutputKey, sample_keys

Rows = dict[str, Tensor]


class _BatchQueue:
    """The batches of all ranks under names that are counted, in the order in which they are given out."""

    def __init__(self, folder: Path, key: Callable[[int], str], are_peers: Callable[[int, int], bool]) -> None:
        self._folder = folder
        self._key = key
        self._are_peers = are_peers
        self._number = 0
        self._waiting: list[Rows] = []

    def take(self, num_rows: int) -> Rows | None:
        """Return the next `num_rows` rows, fewer if there are not so many; None at the end.

        If a batch has more rows than are taken, the rest is left out: it may have filled an uneven end.
        """
        taken: list[Rows] = []
        while sum(len(next(iter(rows.values()))) for rows in taken) < num_rows:
            if not self._waiting:
                self._waiting = self._distinct(read_batches(self._folder, self._key(self._number)))
                self._number += 1
            if not self._waiting:
                break
            taken.append(self._waiting.pop(0))
        return {path: rows[:num_rows] for path, rows in join_rows(taken).items()} if taken else None

    def has_pieces(self, own: Rows) -> bool:
        """Return whether the ranks have pieces of the sequences of the next batch, of which this process has all."""
        parts = self._waiting or self._distinct(read_batches(self._folder, self._key(self._number)))
        return len(parts) > 1 and any(_are_pieces([part[path] for part in parts], own[path]) for path in own)

    def _distinct(self, batches: dict[int, Rows]) -> list[Rows]:
        """Return the batches of the ranks; of peers that have the same one, the first."""
        kept: dict[int, Rows] = {}
        for rank, rows in batches.items():
            if not any(self._are_peers(other, rank) and _are_equal(rows, each) for other, each in kept.items()):
                kept[rank] = rows
        return list(kept.values())


class FedBatches:
    """The batches of a recording for the loaders and the models of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._peers = read_peers(folder)
        self._loaders: dict[int, _BatchQueue] = {}
        self._forwards: dict[tuple[str, int], _BatchQueue] = {}

    def for_loader(self, loader: int, batch: Any, *, is_data: IsData) -> Any:
        """Return the batch that a loader gives in place of its own `batch`; `batch` itself if there is no other."""
        own = batch_rows(batch, is_data=is_data)
        if not own:
            return batch
        queue = self._loaders.setdefault(loader, self._queue(lambda number: loader_key(loader, number)))
        rows = queue.take(_num_rows(own))
        return batch if rows is None else replace_rows(batch, _checked(rows, own))

    def for_model(self, module: str, step: int, arguments: Any, *, is_data: IsData, own_outputs: Set[OutputKey]) -> Any:
        """Return the arguments of a model, args and kwargs, in place of its own.

        They are None if its own have the same samples, or more than the step of the recording: then the batches of the
        two scripts are not alike, which the comparison of the samples shows.

        Raises:
            ValueError: the model has other inputs than that of the recording.
        """
        own = batch_rows(arguments, is_data=is_data)
        if not own:
            return None
        queue = self._forwards.setdefault((module, step), self._queue(lambda number: forward_key(module, step, number)))
        if queue.has_pieces(own):
            return None
        rows = queue.take(_num_rows(own))
        if rows is None or _num_rows(rows) < _num_rows(own):
            return None
        fed = replace_rows(arguments, _checked(rows, own))
        keys = [sample_keys(*each, own_outputs=own_outputs) or [] for each in (arguments, fed)]
        return None if sorted(keys[0]) == sorted(keys[1]) else fed

    def _queue(self, key: Callable[[int], str]) -> _BatchQueue:
        return _BatchQueue(self._folder, key, self._peers.share_batches)


def feed_models(feed: Callable[[nn.Module, Any, Any], Any]) -> None:
    """Let `feed(module, args, kwargs)` replace the arguments of each call of a module from now on.

    `feed` returns args and kwargs, or None to leave them. A hook can't do it: a global one doesn't see kwargs.
    """
    call = nn.Module.__call__

    def fed_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fed = feed(module, args, kwargs) if torch.is_grad_enabled() else None
        args, kwargs = (args, kwargs) if fed is None else fed
        return call(module, *args, **kwargs)

    nn.Module.__call__ = fed_call  # type: ignore[method-assign]


def _are_equal(one: Rows, other: Rows) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[path], other[path]) for path in one)


def _are_pieces(parts: list[Tensor], own: Tensor) -> bool:
    """Return whether a tensor has as many elements as all parts, each of which is shorter in a dimension of a row."""
    shape = parts[0].shape
    if any(part.shape != shape for part in parts) or own.dim() != len(shape) or own.dim() < 2:
        return False
    longer = [whole / part for whole, part in zip(own.shape[1:], shape[1:], strict=True) if whole != part]
    return len(longer) == 1 and longer[0] > 1 and own.numel() == sum(part.numel() for part in parts)


def _num_rows(rows: Rows) -> int:
    return len(next(iter(rows.values())))


def _checked(rows: Rows, own: Rows) -> Rows:
    """Return the rows if they are at the same places as the script's own.

    Raises:
        ValueError: they are at other places.
    """
    if rows.keys() != own.keys():
        raise ValueError(f"the other recording has batches with {sorted(rows)}, and this script with {sorted(own)}")
    return rows
