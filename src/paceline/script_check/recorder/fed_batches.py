"""Batches of another recording in place of the script's own: one process trains on what several ranks trained on.

The batches of all ranks are joined: first the first one of each rank, then the second ones. The script's own batch
says how many samples come next, so a training with larger batches gets several of them at a time. A process that is fed
is a reference, which is changed on purpose.
"""

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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

    def __init__(self, folder: Path, key: Callable[[int], str]) -> None:
        self._folder = folder
        self._key = key
        self._number = 0
        self._waiting: list[Rows] = []

    def take(self, num_rows: int) -> Rows | None:
        """Return the next `num_rows` rows, fewer if there are not so many; None at the end.

        If a batch has more rows than are taken, the rest is left out: it may have filled an uneven end.
        """
        taken: list[Rows] = []
        while sum(len(next(iter(rows.values()))) for rows in taken) < num_rows:
            if not self._waiting:
                self._waiting = read_batches(self._folder, self._key(self._number))
                self._number += 1
            if not self._waiting:
                break
            taken.append(self._waiting.pop(0))
        return {path: rows[:num_rows] for path, rows in join_rows(taken).items()} if taken else None


class FedBatches:
    """The batches of a recording for the loaders and the models of this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._loaders: dict[int, _BatchQueue] = {}
        self._forwards: dict[tuple[str, int], _BatchQueue] = {}

    def for_loader(self, loader: int, batch: Any, *, is_data: IsData) -> Any:
        """Return the batch that a loader gives in place of its own `batch`; `batch` itself if there is no other."""
        own = batch_rows(batch, is_data=is_data)
        if not own:
            return batch
        queue = self._loaders.setdefault(loader, _BatchQueue(self._folder, lambda number: loader_key(loader, number)))
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
        queue = self._forwards.setdefault(
            (module, step), _BatchQueue(self._folder, lambda number: forward_key(module, step, number))
        )
        rows = queue.take(_num_rows(own))
        if rows is None or _num_rows(rows) < _num_rows(own):
            return None
        fed = replace_rows(arguments, _checked(rows, own))
        keys = [sample_keys(*each, own_outputs=own_outputs) or [] for each in (arguments, fed)]
        return None if sorted(keys[0]) == sorted(keys[1]) else fed


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
