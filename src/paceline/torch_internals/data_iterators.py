"""The iterators of torch's `DataLoader`: each batch that one of them gives is seen. Tested on torch 2.11 to 2.13."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, dataloader


@dataclass(frozen=True)
class LoaderTraits:
    """The traits of an iterator's `DataLoader`. `sampler` is the same object for all iterators of one loader."""

    sampler: Any
    num_workers: int
    is_iterable: bool


def watch_iterators(observe: Callable[[Any, int], None], end: Callable[[Any], None]) -> Callable[[], None]:
    """Call `observe(iterator, number)` after each batch of an iterator, and `end(iterator)` at the end of its pass.

    Batches are numbered from 0 in each pass. Return a function that ends the watch.
    """
    give = dataloader._BaseDataLoaderIter.__next__

    def watched(iterator: Any) -> Any:
        number = iterator._num_yielded
        try:
            batch = give(iterator)
        except StopIteration:
            end(iterator)
            raise
        observe(iterator, number)
        return batch

    def stop() -> None:
        if dataloader._BaseDataLoaderIter.__next__ is watched:
            dataloader._BaseDataLoaderIter.__next__ = give  # type: ignore[method-assign]

    dataloader._BaseDataLoaderIter.__next__ = watched  # type: ignore[method-assign, assignment]
    return stop


def loader_traits(iterator: Any) -> LoaderTraits:
    """Return the traits of the `DataLoader` of an iterator, which need not live any more."""
    return LoaderTraits(
        sampler=iterator._index_sampler,
        num_workers=int(iterator._num_workers),
        is_iterable=isinstance(getattr(iterator, "_dataset", None), IterableDataset),
    )
