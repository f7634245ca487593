"""Exact context parallelism: the same bits for any number of `cp` ranks that divides the number of sequence shards.

The user fixes the number of shards of a sequence (`train.sequence_shards`). A shard is to the model what a rank is in
plain context parallelism: it has an early and a late chunk, its own forward and backward, and its place in the ring.
Each rank computes some neighbouring shards, one after another. So every kernel has the same operands on any number of
ranks, and a ring merges keys in an order that only the shards determine. The gradients and loss terms of the shards are
separate summands, which exact mode adds as integers or in the order of the shards.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.parallel.context_parallel.context_parallel import BatchShard, ContextParallel
from paceline.parallel.context_parallel.shard_threads import ShardThreads
from paceline.parallel.context_parallel.shard_world import ShardExchange, ShardWorld
from paceline.parallel.module_access.user_call_isolation import is_plain
from paceline.torch_internals.private_api import tensor_version

T = TypeVar("T")
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_NUM_WATCHED = 3  # how many forwards are watched in each mode, and of each new length
_MAX_WATCHED_LENGTHS = 4


class ExactContextParallel:
    """Context parallelism of one model over a fixed number of sequence shards, some of which this rank computes.

    `world` has the `cp` ranks. The other arguments are those of `ContextParallel`.

    Raises:
        LayoutError: the model has a layer or a setting that does not support context parallelism.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        sequence: Mapping[str, int],
        num_shards: int,
        world: World,
        is_model_loss: bool = False,
        check_length: Callable[[Any, int], None] | None = None,
    ) -> None:
        num_local = num_shards // world.world_size
        self.num_shards = num_shards
        self.shard_numbers = range(world.rank * num_local, (world.rank + 1) * num_local)
        self._threads = ShardThreads(num_shards=num_local)
        self._guard = _AttributeGuard(model) if num_local > 1 else None
        exchange = ShardExchange(threads=self._threads, process_world=world)
        self._contexts = [
            ContextParallel(
                model=model,
                sequence=sequence,
                world=ShardWorld(
                    rank=number,
                    world_size=num_shards,
                    device=world.device,
                    timeout_seconds=world.timeout_seconds,
                    exchange=exchange,
                ),
                is_model_loss=is_model_loss,
                check_length=check_length if number == self.shard_numbers[0] else None,
            )
            for number in self.shard_numbers
        ]

    @property
    def should_shift_labels(self) -> bool:
        """Return True if `shard` shifts the labels."""
        return self._contexts[0].should_shift_labels

    def shard(self, batch: Any) -> list[tuple[ContextParallel, BatchShard]]:
        """Return this rank's shards of the full batch, each with the context that its passes run in."""
        return [(context, context.shard(batch)) for context in self._contexts]

    def run(self, work: Callable[[int], T], *, is_training: bool = False, length: int = 0) -> list[T]:
        """Run `work(position)` for each shard of this rank, in threads that take turns, and return the results.

        A forward gives the length of its sequences. The first forwards of each length are watched: they must not write
        to the attributes of a module, which the shards share.

        Raises:
            LayoutError: a forward writes to an attribute.
        """
        if self._guard is None or not length:
            return self._threads.run(work)
        with self._guard.watch(self._threads, is_training=is_training, length=length):
            return self._threads.run(work)


class _AttributeGuard:
    """A guard that refuses forwards which write to attributes of modules: another shard would read the value."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_watched: dict[tuple[bool, int], int] = {}

    @contextmanager
    def watch(self, threads: ShardThreads, *, is_training: bool, length: int) -> Iterator[None]:
        """Return a context in which the attributes are compared whenever a shard passes its turn."""
        key = is_training, length
        num_watched = self._num_watched.get(key, 0)
        is_known = num_watched > 0 or len(self._num_watched) < _MAX_WATCHED_LENGTHS
        if num_watched >= _NUM_WATCHED or not is_known:
            yield
            return
        self._num_watched[key] = num_watched + 1
        before = _attributes(self._model)
        threads.on_switch = lambda: _refuse_changes(before, _attributes(self._model))
        try:
            yield
        finally:
            threads.on_switch = None


def _attributes(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of all modules, by full name, each with its content."""
    return {
        f"{name}.{key}".lstrip("."): (value, _content(value))
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in _MODULE_ATTRIBUTES
    }


def _content(value: Any) -> Any:
    """Return the content of an attribute that may change in place: of a container, a tensor or a plain object."""
    if isinstance(value, Tensor):
        return tensor_version(value)
    if isinstance(value, list | set):
        return list(value)
    if isinstance(value, dict):
        return [*value.items()]
    if value is None or isinstance(value, bool | int | float | str | tuple) or not is_plain(value):
        return None
    return [*vars(value).items()]


def _refuse_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name in (*before, *after):
        if name not in before or name not in after or not _is_same(before[name], after[name]):
            raise LayoutError(
                f"the forward writes to {name} of the model, and train.sequence_shards computes several parts of a "
                "sequence in turn on one rank: another part would read the value.",
                cause="a value that is stored in the forward and read later: a counter, a cache, an auxiliary loss",
                hint="pass the value as an argument, or return it; or leave --train.exact out",
            )


def _is_same(first: Any, second: Any) -> bool:
    """Return whether two attributes, or parts of them, are the same object, or equal numbers or texts."""
    if first is second:
        return True
    if type(first) is not type(second):
        return False
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(_is_same, first, second))
    return isinstance(first, bool | int | float | str) and (first == second or first != first)
