"""Running statistics of BatchNorm, folded as one process would have: microbatch after microbatch.

While a step runs, each normalisation writes its batch's own statistics (momentum 1); they are put on a tape in
the microbatch's row. At the end all rows meet on every rank and are folded in index order, so that neither the
number of ranks nor the dealing changes a bit.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from paceline.errors import DesyncError
from paceline.torch_private import NormBase
from paceline.world import World


@dataclass
class _Layer:
    name: str
    module: NormBase
    momentum: float | None
    before: tuple[Tensor, Tensor]
    count: int
    rows: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.before[0].numel() * 2


class StatisticsTape:
    """The tape of one model. `begin`, then `at(j)` before each microbatch, then `fold`."""

    def __init__(self, *, model: nn.Module, world: World, enabled: bool = True) -> None:
        self._world = world
        self._now = 0
        self._layers = [_layer(name, module) for name, module in running(model)] if enabled else []
        self._handles = [
            handle
            for layer in self._layers
            for handle in (
                layer.module.register_forward_pre_hook(self._before(layer)),
                layer.module.register_forward_hook(self._after(layer)),
            )
        ]

    def begin(self) -> None:
        """Start a step, or start it again: the statistics are those before it."""
        for layer in self._layers:
            if layer.rows:
                self._write(layer, layer.before, layer.count)
            layer.before = _statistics(layer.module)
            layer.count = int(_tracked(layer.module))
            layer.rows.clear()

    def at(self, microbatch: int) -> None:
        """The next forward is of this microbatch."""
        self._now = microbatch

    def fold(self, *, num_micro: int) -> None:
        """Leave in every normalisation what one process would have after `num_micro` microbatches."""
        joint = self._calls()
        live = [layer for layer, uses in zip(self._layers, joint, strict=True) if uses]
        if not live:
            return
        calls = [uses for uses in joint if uses]
        tapes = self._meet(live, calls, num_micro)
        for layer, tape, uses in zip(live, tapes, calls, strict=True):
            mean, variance = (part.clone() for part in layer.before)
            for number, row in enumerate(tape.view(num_micro * uses, layer.width), 1):
                weight = layer.momentum if layer.momentum is not None else 1.0 / (layer.count + number)
                half = layer.width // 2
                mean.mul_(1.0 - weight).add_(row[:half].to(mean.dtype), alpha=weight)
                variance.mul_(1.0 - weight).add_(row[half:].to(mean.dtype), alpha=weight)
            self._write(layer, (mean, variance), layer.count + num_micro * uses)
            layer.rows.clear()

    def undo(self) -> None:
        """Leave what was there before the step: it was not taken."""
        for layer in self._layers:
            self._write(layer, layer.before, layer.count)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _calls(self) -> list[int]:
        """How often each layer that is being trained ran in one microbatch; the same on every rank that had one.

        Raises:
            DesyncError: a layer is in training mode on some ranks and in eval mode on others.
        """
        live = [layer.module.training for layer in self._layers]
        own = [
            max((len(rows) // 2 for rows in layer.rows.values()), default=0) if is_live else 0
            for layer, is_live in zip(self._layers, live, strict=True)
        ]
        if self._world.world_size == 1 or not own:
            return own
        asked = [*own, *map(int, live), *(int(not is_live) for is_live in live)]
        found = self._world.all_reduce(torch.tensor(asked, device=self._world.device), op="max").tolist()
        num = len(own)
        for layer, trains, rests in zip(self._layers, found[num : 2 * num], found[2 * num :], strict=True):
            if trains and rests:
                self._refuse_modes(layer)
        return [int(uses) for uses in found[:num]]

    def _refuse_modes(self, layer: _Layer) -> None:
        modes = self._world.gather_json(layer.module.training)
        resting = [str(rank) for rank, is_live in enumerate(modes) if not is_live]
        raise DesyncError(
            f"{layer.name} is in eval mode on rank {', '.join(resting)} and in training mode on the others.",
            cause="code that calls eval() or train() on some ranks only",
            hint="the same mode on every rank; to freeze its statistics, eval() on all",
        )

    def _meet(self, live: Sequence[_Layer], calls: Sequence[int], num_micro: int) -> list[Tensor]:
        """Every row on every rank. Each row is one rank's alone, so that the sum adds only zeros."""
        widths = [num_micro * uses * layer.width for layer, uses in zip(live, calls, strict=True)]
        dtype = torch.promote_types(live[0].before[0].dtype, torch.float32)
        flat = torch.zeros(sum(widths), dtype=dtype, device=live[0].before[0].device)
        tapes = list(flat.split(widths))
        for layer, uses, tape in zip(live, calls, tapes, strict=True):
            rows = tape.view(num_micro, uses * layer.width)
            for index, parts in layer.rows.items():
                rows[index, : sum(part.numel() for part in parts)] = torch.cat(parts)
        self._world.all_reduce(flat)
        return tapes

    def _before(self, layer: _Layer) -> Callable[[nn.Module, object], None]:
        def hook(module: nn.Module, _: object) -> None:
            if module.training:
                layer.module.momentum = 1.0

        return hook

    def _after(self, layer: _Layer) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, _: object, __: object) -> None:
            if module.training:
                layer.module.momentum = layer.momentum
                layer.rows.setdefault(self._now, []).extend(_statistics(layer.module))

        return hook

    @staticmethod
    def _write(layer: _Layer, statistics: tuple[Tensor, Tensor], count: int) -> None:
        with torch.no_grad():
            assert layer.module.running_mean is not None and layer.module.running_var is not None
            layer.module.running_mean.copy_(statistics[0])
            layer.module.running_var.copy_(statistics[1])
            if layer.module.num_batches_tracked is not None:
                layer.module.num_batches_tracked.fill_(count)


def running(model: nn.Module) -> list[tuple[str, NormBase]]:
    """The normalisations that keep running statistics, by FQN, a shared one once."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, NormBase) and module.running_mean is not None
    ]


def _layer(name: str, module: NormBase) -> _Layer:
    return _Layer(name, module, module.momentum, _statistics(module), int(_tracked(module)))


def _statistics(module: NormBase) -> tuple[Tensor, Tensor]:
    assert module.running_mean is not None and module.running_var is not None
    return module.running_mean.detach().clone(), module.running_var.detach().clone()


def _tracked(module: NormBase) -> Tensor | int:
    return module.num_batches_tracked if module.num_batches_tracked is not None else 0
