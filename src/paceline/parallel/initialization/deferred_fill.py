"""A model that is sharded on the meta device and then filled with this rank's shards, so no rank holds all of it."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.errors import user_line
from paceline.parallel.initialization.deferred_init import DeferredInit
from paceline.parallel.initialization.meta_forward import UnknownNumber, lend_parameters, meta_forward
from paceline.parallel.initialization.meta_model import named_tensors, put_tensors, with_data
from paceline.parallel.module_access.shard_spec import Parts, ShardSpec
from paceline.parallel.sharding.fully_sharded import row_parts
from paceline.torch_internals.private_api import storage_key

T = TypeVar("T")


@dataclass(kw_only=True)
class DeferredModel:
    """A model with real buffers and with parameters on the meta device, and the source of the parameter values.

    Create it before the model is sharded. `notes` says which runs needed real values, and why.
    """

    draft: DeferredInit
    device: torch.device
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill the buffers with their values."""
        model, self._nothing = self.draft.model, self.draft.without_values()
        values = self._values({name: ShardSpec.all_of(tensor.shape) for name, tensor in model.named_buffers()})
        old = named_tensors(model)
        new = {n: values[n] if n in values else torch.empty_like(tensor, device="meta") for n, tensor in old.items()}
        put_tensors(model, {name: with_data(old[name], tensor) for name, tensor in new.items()})

    def planned(self, work: Callable[[], T]) -> T:
        """Return the result of `function`, which runs the model on the meta device.

        If `function` needs values, it is rerun with real values, which are created and freed parameter by parameter.
        """
        try:
            with meta_forward(self.device):
                return work()
        except (
            Exception,
            UnknownNumber,
        ) as error:  # the rerun with real values reports any error, as it does for a small model
            why, line = str(error).partition("\n")[0], user_line(error)
            why = f"{type(error).__name__}: {why}" if isinstance(error, Exception) else f"the forward asks for {why}"
            why += f" (at {line})" if line else ""
        found = self.valued(work)
        self.notes.append(f"start: planned with real values, each parameter created and freed in turn: {why}")
        return found

    def valued(self, work: Callable[[], T]) -> T:
        """Return the result of `function`, which runs the model with values, created and freed one by one."""
        with lend_parameters(self._lender(), device=self.device):
            return work()

    @contextmanager
    def held(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Give these parameters real values inside this context, if they are on the meta device."""
        asked = {id(parameter) for parameter in parameters if parameter.is_meta}
        old = {name: tensor for name, tensor in self.draft.model.named_parameters() if id(tensor) in asked}
        put_tensors(self.draft.model, {name: with_data(tensor, self._one(name)) for name, tensor in old.items()})
        try:
            yield
        finally:
            put_tensors(self.draft.model, old)

    def fill(
        self,
        model: nn.Module,
        *,
        base: Parts,
        hollow: Collection[str],
        routed: Collection[str],
        shard: World | None,
    ) -> "LateRows":
        """Fill the model's parameters with the shards in `base_specs`, or with full tensors.

        Other ranks hold the parameters in `absent_names`. With `shard_world`, parameters that are not in `expert_names`
        stay on the meta device, and this rank's rows of them are returned.
        """
        now = {name: parameter for name, parameter in model.named_parameters() if name not in hollow}
        wanted = {name: base.get(name, ShardSpec.all_of(parameter.shape)) for name, parameter in now.items()}
        cut = {name: part for name, part in wanted.items() if name not in routed}
        rows = {} if shard is None else row_parts(model, world=shard, base=cut)
        whole = {name: part for name, part in wanted.items() if name not in rows}
        eager = {} if self.draft.source.apiece else rows
        values = self._values({**whole, **eager})
        put_tensors(model, {name: with_data(now[name], values[name]) for name in whole})
        return LateRows(parts=rows, values={name: values[name] for name in eager}, make=self._values)

    def _lender(self) -> Callable[[int], Tensor]:
        """Return a function from a storage key to its parameter's values, in the same memory layout."""
        known = {storage_key(parameter): (name, parameter) for name, parameter in self.draft.model.named_parameters()}

        def make(memory: int) -> Tensor:
            name, like = known[memory]
            value = self._one(name)
            if value.stride() == like.stride() and not value.storage_offset():
                return value
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=value.device).copy_(value)

        return make

    def _one(self, name: str) -> Tensor:
        return self._values({name: ShardSpec.all_of(self._nothing[name].shape)})[name]

    def _values(self, parts: Parts) -> dict[str, Tensor]:
        values, notes = self.draft.source.values({**self._nothing, **parts})
        self.notes += [note for note in notes if note not in self.notes]
        return values


class LateRows:
    """A rank's rows by name; `pop` creates rows that do not exist yet."""

    def __init__(self, *, parts: Parts, values: dict[str, Tensor], make: Callable[[Parts], dict[str, Tensor]]) -> None:
        self._parts, self._values, self._make = parts, values, make

    def __contains__(self, name: object) -> bool:
        """Return True if this rank has rows of the parameter."""
        return name in self._parts

    def pop(self, name: str) -> Tensor:
        """Return the rows of a parameter, and remove them from this object."""
        return self._values.pop(name) if name in self._values else self._make({name: self._parts[name]})[name]
