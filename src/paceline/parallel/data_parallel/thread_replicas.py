"""Thread replicas: several models in one process that share the weights of the first one.

Each replica is built in the same way as the model of a separate process. Then its parameters are made to share the
memory of the first replica's parameters, so that after one optimizer step every replica has the new weights. Each
replica has its own gradients, buffers and activations. Replicas on another device get a copy of the weights before each
step, as in `nn.DataParallel`.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import ThreadWorld
from paceline.errors import JobError, LayoutError
from paceline.parallel.data_parallel.exact_reduction import ExactReducer, FixedPointGrid
from paceline.parallel.data_parallel.reducer import Reducer
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.gradients.tied_uses import TiedUses
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, param_tensors
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.parallel.placement import ParallelizedModel
from paceline.torch_internals.private_api import add_all, divide_all


class ThreadReplicas:
    """The replicas of one process.

    The other replicas get the weights, `requires_grad`, training modes, buffers and exact-mode grid of the first one.
    Weights are shared if both replicas are on the same device, and copied if not. Everything else is copied.

    Raises:
        JobError: `model=` did not build a new model each time.
    """

    def __init__(self, *, models: Sequence[nn.Module], grids: Sequence[FixedPointGrid | None]) -> None:
        self._first, *other_models = models
        self._grids = list(grids)
        for other in other_models:
            _check_separate(self._first, other)
        self._weights = [
            pair for other in other_models for pair in zip(self._first.parameters(), other.parameters(), strict=True)
        ]
        self._modules = [
            pair for other in other_models for pair in zip(self._first.modules(), other.modules(), strict=True)
        ]
        self.refresh()

    def refresh(self) -> None:
        """Give the other replicas the first replica's weights, `requires_grad`, training modes, buffers and grid.

        This is called before each step, because the first replica may have changed since the last step: a checkpoint
        was loaded, weights were averaged, or the job has frozen a layer.
        """
        for source, target in self._weights:
            if target.requires_grad != source.requires_grad:
                target.requires_grad_(source.requires_grad)
            if source.device != target.device:
                target.data.copy_(source.data, non_blocking=target.is_cuda)
            elif source.data_ptr() != target.data_ptr():
                target.data = source.data
        for first, other in self._modules:
            if other.training != first.training:
                other.training = first.training
            for first_buffer, other_buffer in zip(
                first.buffers(recurse=False), other.buffers(recurse=False), strict=True
            ):
                copy_into(other_buffer.data, first_buffer.data, non_blocking=other_buffer.is_cuda)
        first_grid, *grids = self._grids
        for grid in grids:
            if grid is not None and first_grid is not None:
                grid.exponents = list(first_grid.exponents)

    def save_step_state(self) -> Callable[[], None]:
        """Save the first replica's buffers and grid, which a step changes; return a function that restores them."""
        buffers = [(buffer, buffer.detach().clone()) for buffer in self._first.buffers()]
        grid = self._grids[0]
        exponents = None if grid is None else list(grid.exponents)

        def undo() -> None:
            for buffer, value in buffers:
                copy_into(buffer.data, value)
            if grid is not None and exponents is not None:
                grid.exponents = exponents

        return undo


class ThreadReducer:
    """A reducer that sums the replicas' gradients into the first replica, in replica order.

    `target_parameters` are the parameters of the first replica. Each thread sums the gradients of some of them.
    """

    needs_equal_microbatches = False  # the replicas may run different numbers of microbatches

    def __init__(
        self,
        *,
        named_parameters: Sequence[NamedParameter],
        target_parameters: Sequence[NamedParameter],
        world: ThreadWorld,
    ) -> None:
        self._parameters = [member.parameter for member in named_parameters]
        self._target_parameters = [member.parameter for member in target_parameters]
        self._world = world

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, last: bool, has_samples: bool = True) -> None:
        """Do nothing: there is nothing to prepare."""

    def after_backward(self) -> None:
        """Do nothing: autograd has already added to this replica's `.grad`."""

    def finish(self, *, divisor: float | Tensor | None) -> bool:
        """Wait until all replicas have run backward, then sum this thread's share of the gradients and divide."""
        all_gradients: list[list[Tensor | None]] = self._world.exchange([p.grad for p in self._parameters])
        local_indices = range(self._world.rank, len(self._target_parameters), self._world.world_size)
        totals: dict[int, Tensor] = {}
        for gradients in all_gradients:
            self._add_gradients(totals, {i: g for i in local_indices if (g := gradients[i]) is not None})
        if divisor is not None:
            divide_all(list(totals.values()), _move_divisor(divisor, self._target_parameters))
        self._world.exchange(None)
        for index in local_indices:
            self._target_parameters[index].grad = totals.get(index)
        self._world.exchange(None)
        return True

    def close(self) -> None:
        """Do nothing: there are no hooks to remove."""

    def _add_gradients(self, totals: dict[int, Tensor], gradients: dict[int, Tensor]) -> None:
        local_gradients = {
            i: g.to(self._target_parameters[i].device, non_blocking=self._target_parameters[i].is_cuda)
            for i, g in gradients.items()
        }
        shared_indices = [i for i in local_gradients if i in totals]
        add_all([totals[i] for i in shared_indices], [local_gradients[i] for i in shared_indices])
        totals.update({i: g for i, g in local_gradients.items() if i not in totals})


def parallelize_thread_replica(
    model: nn.Module,
    *,
    members: Sequence[NamedParameter],
    targets: Sequence[NamedParameter],
    world: ThreadWorld,
    exact: bool,
) -> ParallelizedModel:
    """Return the model of a thread replica with the trainable parameters `members`.

    Without `exact`, the gradients of all replicas are summed into `targets`, the first replica's parameters. With
    `exact`, `targets` is not used: each replica gets the sums in the gradients of its own `members`.
    """
    reducer: Reducer = ThreadReducer(named_parameters=members, target_parameters=targets, world=world)
    grid = None
    if exact:
        tied_uses = TiedUses(model)
        grid = FixedPointGrid(names=[member.name for member in members], tied_uses=tied_uses)
        reducer = ExactReducer(named_parameters=members, world=world, grid=grid)
        tied_uses.register_hooks()
    local_world = World(device=world.device)
    weights = ShardedTensors(world=local_world, tensors=param_tensors(members))
    return ParallelizedModel(
        named_parameters=members, weights=weights, optim_shards=weights, reducer=reducer,
        sync_after_update=do_nothing, sync_after_load=do_nothing, grid=grid,
    )  # fmt: skip


def thread_layout_errors(*, buffers: str, compiled: bool) -> list[LayoutError]:
    """Return errors for settings that thread replicas don't support."""
    errors = []
    if buffers == "sync_bn":
        cause = "replicas that draw random numbers run one at a time, but sync_bn synchronises them inside the forward"
        errors.append(
            LayoutError("train.buffers=sync_bn does not work with layout threads.", cause=cause, hint=_DDP_HINT)
        )
    if compiled:
        cause = "compiled code is cached per process, not per thread"
        errors.append(LayoutError("train.compile does not work with layout threads.", cause=cause, hint=_DDP_HINT))
    return errors


_DDP_HINT = "--layout ddp"


def _move_divisor(divisor: float | Tensor, target_parameters: Sequence[nn.Parameter]) -> float | Tensor:
    return divisor.to(target_parameters[0].device) if isinstance(divisor, Tensor) else divisor


def _check_separate(first: nn.Module, other: nn.Module) -> None:
    """Refuse replicas that differ or share state.

    Replicas may share a module without submodules, such as an activation function, if it has no tensors.

    Raises:
        JobError: the replicas differ, or share a tensor or a module with submodules.
    """
    other_ids = {id(part) for part in (*other.modules(), *other.parameters(), *other.buffers())}
    parts: list[tuple[str, object]] = [(name, part) for name, part in first.named_modules() if any(part.children())]
    parts = [*parts, *first.named_parameters(), *first.named_buffers()]
    shared_names = [name or type(part).__name__ for name, part in parts if id(part) in other_ids]
    if shared_names:
        raise JobError(
            f"model= returned {shared_names[0]} twice; with layout threads each replica needs its own model.",
            cause="a model, or a part of it, is built once and returned each time",
            hint="model=lambda: MyModel(), or --layout ddp",
        )
    if _model_structure(first) != _model_structure(other):
        raise JobError(
            "model= built two different models in two calls.",
            cause="it counts its calls, or depends on state that the first build changed",
            hint="build only from the arguments of make_job, or --layout ddp",
        )


def _model_structure(model: nn.Module) -> tuple[list[str], list[tuple[str, torch.Size]]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [name for name, _ in model.named_modules()], [(name, tensor.shape) for name, tensor in tensors]


def shared_gpu(devices: Sequence[torch.device]) -> torch.device | None:
    """Return a GPU that more than one replica computes on, or None."""
    return next((device for device in devices if device.type == "cuda" and list(devices).count(device) > 1), None)
