"""Fill a model that was sharded on the meta device with this rank's shards, so that no rank holds all of it."""

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
from paceline.parallel.initialization.meta_model import named_tensors, replace_tensors, with_data
from paceline.parallel.module_access.shard_spec import ShardSpec, ShardSpecs
from paceline.parallel.sharding.fully_sharded import row_shard_specs
from paceline.torch_internals.private_api import storage_key

Result = TypeVar("Result")


@dataclass(kw_only=True)
class DeferredModel:
    """A model with real buffers and with parameters on the meta device, and the source of the parameter values.

    Create it before the model is sharded. `notes` are for the user. They include the reasons why a run on the meta
    device was repeated with real values.
    """

    deferred_init: DeferredInit
    device: torch.device
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Fill the buffers with their values."""
        model, self._empty_specs = self.deferred_init.model, self.deferred_init.empty_specs()
        values = self._values({name: ShardSpec.full(tensor.shape) for name, tensor in model.named_buffers()})
        old = named_tensors(model)
        replacements = {
            n: values[n] if n in values else torch.empty_like(tensor, device="meta") for n, tensor in old.items()
        }
        replace_tensors(model, {name: with_data(old[name], tensor) for name, tensor in replacements.items()})

    def run_without_values(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, which runs the model on the meta device.

        If `function` needs values, it is rerun with real values, which are created and freed parameter by parameter.
        """
        try:
            with meta_forward(self.device):
                return function()
        except (Exception, UnknownNumber) as error:  # if the forward itself is wrong, the rerun reports the error
            reason, line = str(error).partition("\n")[0], user_line(error)
            prefix = f"{type(error).__name__}: " if isinstance(error, Exception) else "the forward asks for "
            reason = f"{prefix}{reason} (at {line})" if line else f"{prefix}{reason}"
        result = self.run_with_values(function)
        self.notes.append(
            "start: a forward before the first step needed the parameters' values, so each parameter was created when "
            f"needed and then freed: {reason}"
        )
        return result

    def run_with_values(self, function: Callable[[], Result]) -> Result:
        """Return the result of `function`, which runs the model; each parameter gets its values while it is needed."""
        with lend_parameters(self._make_lender(), device=self.device):
            return function()

    @contextmanager
    def temporary_values(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Give these parameters real values inside this context, if they are on the meta device."""
        meta_ids = {id(parameter) for parameter in parameters if parameter.is_meta}
        meta_parameters = {
            name: tensor for name, tensor in self.deferred_init.model.named_parameters() if id(tensor) in meta_ids
        }
        replace_tensors(
            self.deferred_init.model,
            {name: with_data(tensor, self._full_value(name)) for name, tensor in meta_parameters.items()},
        )
        try:
            yield
        finally:
            replace_tensors(self.deferred_init.model, meta_parameters)

    def fill(
        self,
        model: nn.Module,
        *,
        base_specs: ShardSpecs,
        absent_names: Collection[str],
        expert_names: Collection[str],
        shard_world: World | None,
    ) -> "LazyRows":
        """Fill each parameter with its shard in `base_specs`, or with the full tensor if it is not listed there.

        Other ranks hold the parameters in `absent_names`. With `shard_world`, parameters that are not in `expert_names`
        stay on the meta device, and this rank's rows of them are returned.
        """
        local_parameters = {name: parameter for name, parameter in model.named_parameters() if name not in absent_names}
        wanted_specs = {
            name: base_specs.get(name, ShardSpec.full(parameter.shape)) for name, parameter in local_parameters.items()
        }
        shardable_specs = {name: spec for name, spec in wanted_specs.items() if name not in expert_names}
        row_specs = {} if shard_world is None else row_shard_specs(model, world=shard_world, base_specs=shardable_specs)
        unsharded_specs = {name: spec for name, spec in wanted_specs.items() if name not in row_specs}
        eager_row_specs = {} if self.deferred_init.source.is_local else row_specs
        values = self._values({**unsharded_specs, **eager_row_specs})
        replace_tensors(model, {name: with_data(local_parameters[name], values[name]) for name in unsharded_specs})
        return LazyRows(
            shard_specs=row_specs, values={name: values[name] for name in eager_row_specs}, create_values=self._values
        )

    def _make_lender(self) -> Callable[[int], Tensor]:
        """Return a function that creates the values of a parameter.

        The argument of the function is the storage key of the parameter. The tensor that it returns has the strides of
        the parameter.
        """
        parameters_by_storage = {
            storage_key(parameter): (name, parameter) for name, parameter in self.deferred_init.model.named_parameters()
        }

        def create_tensor(storage: int) -> Tensor:
            name, parameter = parameters_by_storage[storage]
            value = self._full_value(name)
            if value.stride() == parameter.stride() and not value.storage_offset():
                return value
            return torch.empty_strided(
                parameter.shape, parameter.stride(), dtype=parameter.dtype, device=value.device
            ).copy_(value)

        return create_tensor

    def _full_value(self, name: str) -> Tensor:
        return self._values({name: ShardSpec.full(self._empty_specs[name].shape)})[name]

    def _values(self, shard_specs: ShardSpecs) -> dict[str, Tensor]:
        values, notes = self.deferred_init.source.values({**self._empty_specs, **shard_specs})
        self.notes += [note for note in notes if note not in self.notes]
        return values


class LazyRows:
    """A rank's rows of each parameter, by name. They are created at the first `pop` if they do not exist yet."""

    def __init__(
        self,
        *,
        shard_specs: ShardSpecs,
        values: dict[str, Tensor],
        create_values: Callable[[ShardSpecs], dict[str, Tensor]],
    ) -> None:
        self._shard_specs, self._values, self._create_values = shard_specs, values, create_values

    def __contains__(self, name: object) -> bool:
        """Return True if this rank has rows of the parameter."""
        return name in self._shard_specs

    def pop(self, name: str) -> Tensor:
        """Return the rows of a parameter, and remove them from this object."""
        return (
            self._values.pop(name)
            if name in self._values
            else self._create_values({name: self._shard_specs[name]})[name]
        )
