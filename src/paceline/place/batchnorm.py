"""Running statistics of BatchNorm, folded as one process would have: microbatch after microbatch.

While a step runs, each normalisation writes its batch's own statistics (momentum 1); they are put on a tape in
the microbatch's row. At the end all rows meet on every rank and are folded in index order, so that neither the
number of ranks nor the dealing changes a bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import DesyncError, JobError
from paceline.place.stand_in import is_stand_in
from paceline.place.views import same
from paceline.torch_private import BatchNormBase, NormBase, in_backward
from paceline.world import World


@dataclass
class _Layer:
    name: str
    module: NormBase
    momentum: float | None
    before: tuple[Tensor, Tensor]
    count: Tensor | None
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.before[0].numel() * 2

    def weight(self, number: int) -> float:
        """What a call weighs, the `number`-th of the run. Instance norms count none, and torch gives them nothing."""
        if self.momentum is not None:
            return self.momentum
        return 1.0 / number if isinstance(self.module, BatchNormBase) else 0.0

    def is_as_recorded(self) -> bool:
        """Whether nothing has been written since the last recorded call."""
        *_, mean, variance = [part for parts in self.rows.values() for part in parts] or self.before
        now = _statistics(self.module)
        return same(now[0], mean) and same(now[1], variance)


@dataclass(frozen=True)
class _Calls:
    layer: _Layer
    by_microbatch: list[int]


class StatisticsTape:
    """The tape of one model. `begin`, then `at(j)` before each microbatch, then `fold`."""

    def __init__(self, *, model: nn.Module, world: World, enabled: bool = True) -> None:
        self._world = world
        self._now = 0
        self._counts = True
        self._checked = False
        self._layers = [_layer(name, module) for name, module in running(model)] if enabled else []
        self._handles = [
            handle
            for layer in self._layers
            for handle in (
                layer.module.register_forward_pre_hook(self._before(layer)),
                layer.module.register_forward_hook(self._after(layer), always_call=True),
            )
        ]

    def begin(self) -> None:
        """Start a step, or start it again: the statistics are those before it."""
        for layer in self._layers:
            if layer.rows:
                self._write(layer, layer.before, 0)
            layer.before, layer.count = _statistics(layer.module), _tracked(layer.module)
            layer.momentum = layer.module.momentum
            layer.rows.clear()

    def at(self, microbatch: int, *, counts: bool = True) -> None:
        """The next forward is of this microbatch, or of one that leaves no trace."""
        self._now, self._counts = microbatch, counts

    def fold(self, *, num_micro: int) -> None:
        """Leave in every normalisation what one process would have after `num_micro` microbatches.

        Raises:
            DesyncError: a layer is in training mode on some ranks and in eval mode on others.
            JobError: statistics were written by something else than the layer's own forward.
        """
        if not self._checked:
            self._refuse_strangers()
        uses = [calls for calls in self._calls(num_micro) if sum(calls.by_microbatch)]
        if not uses:
            return
        for calls, tape in zip(uses, self._meet(uses), strict=True):
            layer, half = calls.layer, calls.layer.width // 2
            mean, variance = (part.clone() for part in layer.before)
            seen = 0 if layer.momentum is not None or layer.count is None else int(layer.count)
            for number, row in enumerate(tape.view(-1, layer.width), 1):
                weight = layer.weight(seen + number)
                mean.mul_(1.0 - weight).add_(row[:half].to(mean.dtype), alpha=weight)
                variance.mul_(1.0 - weight).add_(row[half:].to(mean.dtype), alpha=weight)
            self._write(layer, (mean, variance), sum(calls.by_microbatch))
            layer.rows.clear()

    def undo(self) -> None:
        """Leave what was there before the step: it was not taken."""
        for layer in self._layers:
            self._write(layer, layer.before, 0)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _calls(self, num_micro: int) -> list[_Calls]:
        """How often each layer that is being trained ran in each microbatch, on whichever rank that was."""
        asked = torch.zeros(len(self._layers), num_micro + 2, dtype=torch.int64)
        for layer, counts in zip(self._layers, asked, strict=True):
            counts[num_micro + int(layer.module.training)] = 1
            for index, parts in layer.rows.items():
                if layer.module.training and index < num_micro:
                    counts[index] = len(parts) // 2
        if self._world.world_size > 1 and self._layers:
            asked = self._world.all_reduce(asked.to(self._world.device), op="max").cpu()
        for layer, (*_, rests, trains) in zip(self._layers, asked.tolist(), strict=True):
            if rests and trains:
                self._refuse_modes(layer)
        return [_Calls(layer, counts[:-2]) for layer, counts in zip(self._layers, asked.tolist(), strict=True)]

    def _refuse_strangers(self) -> None:
        """By value: `F.batch_norm` writes without a trace. In the first step only, for what it costs."""
        self._checked = True
        for layer in self._layers:
            if (layer.rows or self._world.world_size > 1) and not layer.is_as_recorded():
                raise JobError(
                    f"the running statistics of {layer.name} were written by something else than its own forward.",
                    cause="F.batch_norm(x, layer.running_mean, ...), or code that assigns to them in a forward",
                    hint="call the layer itself, or --train.buffers broadcast",
                )

    def _refuse_modes(self, layer: _Layer) -> None:
        modes = self._world.gather_json(layer.module.training)
        resting = [str(rank) for rank, is_live in enumerate(modes) if not is_live]
        raise DesyncError(
            f"{layer.name} is in eval mode on rank {', '.join(resting)} and in training mode on the others.",
            cause="code that calls eval() or train() on some ranks only",
            hint="the same mode on every rank; to freeze its statistics, eval() on all",
        )

    def _meet(self, uses: Sequence[_Calls]) -> list[Tensor]:
        """Every row on every rank. Each row is one rank's alone, so that the sum adds only zeros."""
        first = uses[0].layer.before[0]
        widths = [[count * calls.layer.width for count in calls.by_microbatch] for calls in uses]
        dtype = torch.promote_types(first.dtype, torch.float32)
        flat = torch.zeros(sum(map(sum, widths)), dtype=dtype, device=first.device)
        tapes = list(flat.split([sum(each) for each in widths]))
        for calls, each, tape in zip(uses, widths, tapes, strict=True):
            for index, row in enumerate(tape.split(each)):
                if index in calls.layer.rows:
                    row.copy_(torch.cat(calls.layer.rows[index]))
        self._world.all_reduce(flat)
        return tapes

    def _before(self, layer: _Layer) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, _: object) -> None:
            if module.training and not is_stand_in(layer.module.running_mean):
                layer.module.momentum = 1.0 if self._counts else 0.0

        return hook

    def _after(self, layer: _Layer) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, output: object) -> None:
            if module.training and not is_stand_in(layer.module.running_mean):
                layer.module.momentum = layer.momentum
                if self._counts and (
                    output is not None or in_backward()
                ):  # checkpointing leaves a repeated one once it has written
                    layer.rows.setdefault(self._now, []).extend(_statistics(layer.module))

        return hook

    @staticmethod
    def _write(layer: _Layer, statistics: tuple[Tensor, Tensor], calls: int) -> None:
        with torch.no_grad():
            assert layer.module.running_mean is not None and layer.module.running_var is not None
            layer.module.running_mean.copy_(statistics[0])
            layer.module.running_var.copy_(statistics[1])
            if layer.module.num_batches_tracked is not None and layer.count is not None:
                layer.module.num_batches_tracked.copy_(layer.count + calls)


def running(model: nn.Module) -> list[tuple[str, NormBase]]:
    """The normalisations that keep running statistics, by FQN, a shared one once."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and module.running_mean is not None and not module.running_mean.is_meta
    ]


def _layer(name: str, module: NormBase) -> _Layer:
    return _Layer(name, module, module.momentum, _statistics(module), _tracked(module))


def _statistics(module: NormBase) -> tuple[Tensor, Tensor]:
    assert module.running_mean is not None and module.running_var is not None
    return module.running_mean.detach().clone(), module.running_var.detach().clone()


def _tracked(module: NormBase) -> Tensor | None:
    if module.num_batches_tracked is None or not isinstance(module, BatchNormBase):
        return None
    return module.num_batches_tracked.detach().clone()
