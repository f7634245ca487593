"""The passes of the script's data loaders through their data: how many batches each gives, and for which epoch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any
from weakref import WeakSet

from torch.utils.data import DistributedSampler

from paceline.script_check.recording import LoaderUse
from paceline.torch_internals.data_iterators import LoaderTraits, loader_traits, watch_iterators

_MAX_DEPTH = 4  # of samplers in samplers
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(kw_only=True)
class _Loader:
    number: int
    traits: LoaderTraits  # with the sampler, so that its id stays its own
    passes: int = 0
    batches: int = 0  # since the last `take`
    last: int = 0
    epoch: int | None = None
    has_ended: bool = False
    is_restarted: bool = False


class LoaderPasses:
    """The data loaders that the script reads, in the order in which it begins to.

    `sees_all_epochs`: the watch began before the script, so that it sees each call of `set_epoch`.
    """

    def __init__(self, *, guard: Guard, sees_all_epochs: bool) -> None:
        self._loaders: dict[int, _Loader] = {}
        self._sees_all_epochs = sees_all_epochs
        self._with_epoch: WeakSet[Any] = WeakSet()  # samplers whose epoch was set
        self._set_epoch = DistributedSampler.set_epoch
        self._watched_set_epoch = self._watch_epochs()
        self._stop = watch_iterators(guard(self._see), guard(self._end))

    def take(self) -> tuple[LoaderUse, ...]:
        """Return the use of each loader that gave a batch since the last time."""
        used = [each for each in self._loaders.values() if each.batches]
        uses = tuple(self._use(each) for each in used)
        for each in used:
            each.batches = 0
        return uses

    def stop(self) -> None:
        """End the watch."""
        self._stop()
        if DistributedSampler.set_epoch is self._watched_set_epoch:
            DistributedSampler.set_epoch = self._set_epoch  # type: ignore[method-assign]

    def _watch_epochs(self) -> Any:
        set_epoch, seen = self._set_epoch, self._with_epoch

        @wraps(set_epoch)
        def watched(sampler: Any, epoch: int) -> None:
            seen.add(sampler)
            set_epoch(sampler, epoch)

        DistributedSampler.set_epoch = watched  # type: ignore[method-assign, assignment]
        return watched

    def _see(self, iterator: Any, number: int) -> None:
        loader = self._loader(iterator)
        if number == 0:
            loader.is_restarted = loader.passes > 0 and not loader.has_ended
            loader.passes += 1
            loader.has_ended = False
            sampler = _shuffling_sampler(loader.traits.sampler)
            loader.epoch = None if sampler is None else int(sampler.epoch)
        loader.batches += 1
        loader.last = number

    def _end(self, iterator: Any) -> None:
        self._loader(iterator).has_ended = True

    def _loader(self, iterator: Any) -> _Loader:
        traits = loader_traits(iterator)
        known = self._loaders.get(id(traits.sampler))
        if known is None:
            known = self._loaders[id(traits.sampler)] = _Loader(number=len(self._loaders), traits=traits)
        return known

    def _use(self, loader: _Loader) -> LoaderUse:
        sampler = _shuffling_sampler(loader.traits.sampler)
        return LoaderUse(
            loader=loader.number,
            num_workers=loader.traits.num_workers,
            is_iterable=loader.traits.is_iterable,
            passes=loader.passes,
            batches=loader.batches,
            last=loader.last,
            epoch=loader.epoch,
            is_restarted=loader.is_restarted,
            is_epoch_forgotten=self._sees_all_epochs and sampler is not None and sampler not in self._with_epoch,
        )


def _shuffling_sampler(sampler: Any) -> Any:
    """Return the `DistributedSampler` in a sampler that shuffles by its epoch; None if there is none."""
    for _ in range(_MAX_DEPTH):
        if isinstance(sampler, DistributedSampler):
            is_own = type(sampler).set_epoch is DistributedSampler.set_epoch
            return sampler if sampler.shuffle and is_own else None
        sampler = getattr(sampler, "sampler", None) or getattr(sampler, "batch_sampler", None)
    return None
