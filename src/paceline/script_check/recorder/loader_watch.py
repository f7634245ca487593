"""The batches of the script's data loaders: each is seen, and may be replaced, before the script gets it."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader

ExchangeBatch = Callable[[int, int, Any], Any]


class _WatchedIterator:
    """An iterator over a data loader that passes each batch through `exchange`. It has the attributes of `inner`."""

    def __init__(self, inner: Iterator[Any], exchange: Callable[[Any], Any]) -> None:
        self._inner = inner
        self._exchange = exchange

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._exchange(next(self._inner))

    def __len__(self) -> int:
        length: int = len(self._inner)  # type: ignore[arg-type]
        return length

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def watch_loaders(exchange: ExchangeBatch) -> None:
    """Replace each batch of each data loader by `exchange(loader, number, batch)` from now on.

    Loaders are counted in the order in which the script begins to use them, and their batches through all epochs.
    """
    iterate = DataLoader.__iter__
    loaders: list[Any] = []  # kept, so that their ids stay theirs
    counts: dict[int, int] = {}

    def watched(loader: Any) -> Any:
        place = next((place for place, known in enumerate(loaders) if known is loader), len(loaders))
        if place == len(loaders):
            loaders.append(loader)

        def exchange_next(batch: Any) -> Any:
            counts[place] = counts.get(place, -1) + 1
            return exchange(place, counts[place], batch)

        return _WatchedIterator(iterate(loader), exchange_next)

    DataLoader.__iter__ = watched  # type: ignore[method-assign]
