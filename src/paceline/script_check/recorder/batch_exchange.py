"""Write the batches of the script, or give it those of another recording."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from paceline.script_check.recorder.batch_files import forward_key, loader_key, write_batch
from paceline.script_check.recorder.fed_batches import FedBatches, feed_models
from paceline.script_check.recorder.forward_watch import ForwardWatch
from paceline.script_check.recorder.live_modules import unwrap
from paceline.script_check.recorder.loader_watch import watch_loaders
from paceline.script_check.recorder.sample_keys import is_data

Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


class BatchExchange:
    """The exchange of batches between a recording and the loaders and models of this process.

    `keep_in` is the folder for their batches, `feed_from` the recording whose batches they get, `rank()` the rank of
    this process, and `next_step()` the number of the step that comes next.
    """

    def __init__(
        self,
        forwards: ForwardWatch,
        *,
        keep_in: Path | None,
        feed_from: Path | None,
        rank: Callable[[], int],
        next_step: Callable[[], int],
        guard: Guard,
    ) -> None:
        self._forwards = forwards
        self._keep_in = keep_in
        self._fed = None if feed_from is None else FedBatches(feed_from)
        self._rank = rank
        self._next_step = next_step
        self._guard = guard
        self._numbers: dict[tuple[str, int], int] = {}
        watch_loaders(self._see_loader)
        if self._fed is not None:
            feed_models(guard(self._feed_model))

    def see_forward(self, module: str, args: Any, kwargs: Any) -> None:
        """Write what a model got."""
        if self._keep_in is None:
            return
        step = self._next_step()
        number = self._numbers[module, step] = self._numbers.get((module, step), -1) + 1
        key = forward_key(module, step, number)
        write_batch(self._keep_in, self._rank(), key, (args, kwargs), is_data=self._is_data)

    def _see_loader(self, loader: int, number: int, batch: Any) -> Any:
        seen = self._guard(self._exchange)(loader, number, batch)
        return batch if seen is None else seen

    def _exchange(self, loader: int, number: int, batch: Any) -> Any:
        if self._fed is not None:
            batch = self._fed.for_loader(loader, batch, is_data=self._is_data)
        if self._keep_in is not None:
            write_batch(self._keep_in, self._rank(), loader_key(loader, number), batch, is_data=self._is_data)
        return batch

    def _feed_model(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inner = unwrap(module)
        if not self._forwards.is_outermost(module) or not inner.training or not any(True for _ in inner.parameters()):
            return None
        assert self._fed is not None
        fed = self._fed.for_model(
            type(inner).__name__,
            self._next_step(),
            (args, kwargs),
            is_data=self._is_data,
            own_outputs=self._forwards.own_outputs,
        )
        self._forwards.is_fed = fed is not None
        return fed

    def _is_data(self, tensor: Tensor) -> bool:
        return is_data(tensor, own_outputs=self._forwards.own_outputs)
