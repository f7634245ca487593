"""The recorder inside a foreign training process: it writes a line for each step of each optimizer.

It uses the public hooks of torch alone. It changes no tensor, draws no random number and calls no collective: each rank
writes what it has, and what belongs together is added when it is read.
"""

import contextlib
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from paceline.script_check.recorder.batch_exchange import BatchExchange
from paceline.script_check.recorder.batch_files import read_start_weights, write_start_weights
from paceline.script_check.recorder.compute_precision import ComputePrecision
from paceline.script_check.recorder.forward_watch import ForwardWatch
from paceline.script_check.recorder.live_modules import (
    find_loss_scalers,
    find_schedulers,
    find_trained_modules,
    unwrap,
)
from paceline.script_check.recorder.loader_passes import LoaderPasses
from paceline.script_check.recorder.model_pieces import PiecePrinter
from paceline.script_check.recorder.own_gradients import OwnGradients
from paceline.script_check.recorder.parameter_views import ParameterView, view_parameters
from paceline.script_check.recorder.source_lines import calling_line, user_frame, variable_name
from paceline.script_check.recorder.tensor_print import print_tensor
from paceline.script_check.recording import (
    CHECKER_VARIABLE,
    EVERY_VARIABLE,
    FEED_VARIABLE,
    FIRST_STEPS,
    FOLDER_VARIABLE,
    KEEP_VARIABLE,
    SEED_VARIABLE,
    STEPS_VARIABLE,
    UNKNOWN_PARAMETER,
    RecorderFault,
    RecordingHeader,
    StepLine,
    TensorPrint,
    encode_line,
    has_reached_last_step,
    last_step_file,
    recording_file,
)
from paceline.verification.fingerprints.fingerprint import FLOAT32_EPS

_MAX_BUFFER_ELEMENTS = 1 << 20
_NUM_BEFORE = 4  # parameters whose digests before a step are written
_PEER_SECONDS = 30.0  # for the other ranks to reach the last step


class _OptimizerRecord:
    """An optimizer of the script, its number, the modules that it trains, and its last step.

    `trained` are the parameters that have an own gradient.
    """

    def __init__(self, optimizer: Optimizer, number: int, *, trained: Sequence[Tensor]) -> None:
        self.optimizer = optimizer
        self.number = number
        self.step = 0
        self.schedulers = find_schedulers(optimizer)
        self.scalers = find_loss_scalers()
        self.made_before = _steps_in_state(optimizer)
        self.name = variable_name(user_frame(), optimizer)
        self._trained = trained
        self.pieces: PiecePrinter | None = None
        self._look_up()

    def views(self) -> list[ParameterView]:
        """Return the optimizer's parameters with their names; those that were added are looked up again."""
        if {id(p) for p in self._parameters()} != self._known:
            self._look_up()
        return self._views

    def weights(self) -> dict[str, Tensor]:
        """Return the parameters by name; none if this rank has only parts of them."""
        views = self.views()
        is_whole = all(view.is_whole and view.span is None for view in views)
        return {view.name: view.owner for view in views} if is_whole else {}

    @property
    def sharding(self) -> str:
        """Return how the weights are split; see `StepLine.sharding`."""
        return "fsdp" if any(view.place[0] is not None for view in self._views) else self.modules.sharding

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _look_up(self) -> None:
        parameters = self._parameters()
        self._known = {id(p) for p in parameters}
        self.modules = find_trained_modules(parameters)
        if any(name.startswith(UNKNOWN_PARAMETER) for name in self.modules.names.values()):
            others = [p for p in self._trained if id(p) not in self._known]
            self.modules = find_trained_modules([*parameters, *others])
        names, modules = self.modules.names, self.modules.outermost
        trained = [p for p in self._trained if id(p) in names]
        self._views = view_parameters(parameters, names, modules, trained)


class ScriptRecorder:
    """The recorder of one process. After `last_step` steps of an optimizer, it ends the process with exit code 0.

    If not `is_whole_process`, it records only until `close`, and stops after the last step without ending the process.

    It summarizes gradients and weights at the first steps, at the last one, and at every `every`-th one. If `checker`,
    the process of `check`, was killed, it ends this process, too; 0 if there is none. `keeps_batches`: it writes the
    script's batches. `feed_from` is the recording whose batches the script gets in place of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        last_step: int,
        checker: int = 0,
        every: int = 1,
        keeps_batches: bool = False,
        feed_from: Path | None = None,
        is_whole_process: bool = True,
    ) -> None:
        self._folder = folder
        self._is_whole_process = is_whole_process
        self._last_step = last_step
        self._checker = checker
        self._every = every
        self._keeps_batches = keeps_batches
        self._feed_from = feed_from
        self._file: int | None = None
        self._rank, self._world_size = 0, 1
        self._is_off = False
        self._depth = 0  # of nested optimizers: one may call another one inside
        self._optimizers: dict[int, _OptimizerRecord] = {}
        self._gradients: dict[str, TensorPrint] = {}
        self._buffers: dict[str, int] = {}
        self._digests_before: dict[str, int] = {}
        self._loss_scales: tuple[float, ...] = ()
        self._unreadable: dict[str, str] = {}
        self._own_gradients = OwnGradients(guard=self.guard)
        self._precision = ComputePrecision(guard=self.guard)
        self._loaders = LoaderPasses(guard=self.guard, sees_all_epochs=is_whole_process)
        self._forwards = ForwardWatch(guard=self.guard, begin=self._begin_forward, see_batch=self._see_batch)
        self._exchange: BatchExchange | None = None
        if keeps_batches or feed_from is not None:
            self._exchange = BatchExchange(
                self._forwards,
                keep_in=folder if keeps_batches else None,
                feed_from=feed_from,
                rank=lambda: rank_and_world_size(os.environ)[0],
                next_step=lambda: max((known.step for known in self._optimizers.values()), default=0) + 1,
                guard=self.guard,
            )
        self._optimizer_hooks = (
            register_optimizer_step_pre_hook(self.guard(self._before_step)),
            register_optimizer_step_post_hook(self.guard(self._after_step)),
        )

    def guard(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook whose faults end the recording, and never the training."""

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._is_off or _is_capturing():
                return None
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                self._give_up(f"{type(error).__name__}: {error}")
                return None

        return run

    def close(self) -> None:
        """Remove the hooks and close the file. Not to be called within a step or a backward pass."""
        self._stop()
        for hook in self._optimizer_hooks:
            hook.remove()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def has_steps(self) -> bool:
        """True if an optimizer has made a step."""
        return any(known.step for known in self._optimizers.values())

    def _stop(self) -> None:
        """Record nothing more. The hooks of the optimizers remain, because torch may be calling them now."""
        self._is_off = True
        self._forwards.stop()
        self._own_gradients.stop()
        self._loaders.stop()

    def _give_up(self, fault: str) -> None:
        self._stop()
        print(f"paceline: the recording has stopped, and the training goes on: {fault}", file=sys.stderr)
        with contextlib.suppress(Exception):
            self._write(RecorderFault(fault=fault))

    def _see_batch(self, module: str, args: Any, kwargs: Any) -> None:
        if self._exchange is not None:
            self._exchange.see_forward(module, args, kwargs)

    def _begin_forward(self, module: nn.Module) -> None:
        inner = unwrap(module)
        if inner.training or not self._optimizers:  # a copy of the model that is evaluated is not kept alive
            self._own_gradients.observe(module)
            self._precision.observe(module)
        if not self._own_gradients.is_active or not inner.training:
            return
        buffers = [(name, buffer) for name, buffer in inner.named_buffers() if not hasattr(buffer, "placements")]
        if inner is module:
            self._read_buffers(buffers)
        elif buffers:
            hook = inner.register_forward_pre_hook(self.guard(lambda *_: read()))  # after the wrapper has sent them

        def read() -> None:
            hook.remove()
            self._read_buffers(buffers)

    def _read_buffers(self, buffers: Sequence[tuple[str, Tensor]]) -> None:
        with torch.no_grad():
            small = [(name, buffer) for name, buffer in buffers if 0 < buffer.numel() < _MAX_BUFFER_ELEMENTS]
            self._buffers = {name: found.digest for name, buffer in small if (found := self._summary(name, buffer))}

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        if self._depth > 1:
            return None
        if id(optimizer) not in self._optimizers:
            number, trained = len(self._optimizers), self._own_gradients.seen_parameters()
            self._optimizers[id(optimizer)] = _OptimizerRecord(optimizer, number, trained=trained)
            self._begin_optimizer(self._optimizers[id(optimizer)])
        self._loss_scales = tuple(float(each.get_scale()) for each in self._optimizers[id(optimizer)].scalers)
        self._look_at_weights(self._optimizers[id(optimizer)])
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 and callable(args[1]) else None)
        if closure is None:
            self._look_at_gradients(optimizer)
            return None

        def run_closure() -> Any:
            result = closure()
            self.guard(self._look_at_gradients)(optimizer)
            return result

        return args[:1], {**kwargs, "closure": run_closure}

    def _begin_optimizer(self, known: _OptimizerRecord) -> None:
        """Write the start of an optimizer, and look for the pieces of the model that other ranks have."""
        weights = known.weights()
        if weights and self._feed_from is not None:
            known.pieces = PiecePrinter(weights, read_start_weights(self._feed_from, known.number))
        self._write_step(known)
        if weights and self._keeps_batches:
            write_start_weights(self._folder, self._rank, known.number, weights)

    def _has_prints(self, step: int) -> bool:
        """Return whether gradients and weights are summarized at this step of an optimizer."""
        return step <= FIRST_STEPS or step == self._last_step or step % self._every == 0

    def _look_at_weights(self, known: _OptimizerRecord) -> None:
        has_prints = self._has_prints(known.step + 1)
        whole = [view for view in known.views() if view.is_whole] if has_prints else []
        chosen = sorted(whole, key=lambda view: view.owner.numel())[:_NUM_BEFORE]
        small = [view for view in chosen if view.owner.numel() < _MAX_BUFFER_ELEMENTS]
        found = self._summaries(small, lambda view: view.owner)
        self._digests_before = {name: each.digest for name, each in found.items()}

    def _summaries(
        self, views: Sequence[ParameterView], choose: Callable[[ParameterView], Tensor | None], **options: float
    ) -> dict[str, TensorPrint]:
        """Return the summaries of the tensors that `choose` returns for some parameters; None is left out."""
        chosen = [(view, tensor) for view in views if (tensor := choose(view)) is not None]
        found = [
            (view.name, self._summary(view.name, view.select(tensor), place=view.place, **options))
            for view, tensor in chosen
        ]
        return {name: each for name, each in found if each is not None}

    def _summary(self, name: str, tensor: Tensor, **options: Any) -> TensorPrint | None:
        """Return the summary of a tensor; None, and a note of it, if it is of a kind that can't be read."""
        try:
            return print_tensor(tensor, **options)
        except Exception as error:
            self._unreadable[name] = f"{name}: {type(error).__name__}: {error}"
            return None

    def _look_at_gradients(self, optimizer: Optimizer) -> None:
        known = self._optimizers[id(optimizer)]
        if not self._has_prints(known.step + 1):
            return
        loss_scale = getattr(optimizer, "grad_scale", None)  # a fused step divides by it itself
        scale = 1.0 if loss_scale is None else 1.0 / float(loss_scale)
        eps = max(FLOAT32_EPS, self._precision.eps)
        self._gradients = self._summaries(known.views(), lambda view: view.owner.grad, scale=scale, eps=eps)
        if known.pieces is not None:
            known.pieces.read_gradients(known.weights(), scale=scale, eps=eps)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._depth -= 1
        if self._depth:
            return
        known = self._optimizers[id(optimizer)]
        known.step += 1
        self._write_step(known)
        self._own_gradients.is_active = any(self._has_prints(each.step + 1) for each in self._optimizers.values())
        if self._checker and not Path("/proc", str(self._checker)).exists() and Path("/proc/self").exists():
            os._exit(1)
        if self._last_step and known.step >= self._last_step:
            if not self._is_whole_process:
                self._stop()
                return
            self._end_process()

    def _write_step(self, known: _OptimizerRecord) -> None:
        views, own = known.views(), self._own_gradients
        own_gradients = {view.name: own.take(view.key) for view in views} if known.step else {}
        has_prints = self._has_prints(known.step)
        weights = self._summaries(views, lambda view: view.owner) if has_prints else {}
        self._write(
            StepLine(
                step=known.step,
                optimizer=known.number,
                optimizer_class=type(known.optimizer).__name__,
                optimizer_name=known.name,
                groups=tuple(_plain_options(group) for group in known.optimizer.param_groups),
                has_prints=has_prints,
                gradients=self._gradients if known.step else {},
                digests_before=self._digests_before if known.step else {},
                weights=weights,
                own_gradients={name: passes for name, passes in own_gradients.items() if passes and has_prints},
                own_eps=own.eps,
                eps=max(own.eps, self._precision.eps),
                num_discarded=own.take_discarded() if known.step else 0,
                calls=self._forwards.take() if known.step else (),
                buffers=self._buffers if has_prints else {},
                wrappers=known.modules.wrappers if has_prints else (),
                batch_norms=known.modules.batch_norms if has_prints else (),
                sharding=known.sharding if has_prints else "",
                scheduler_steps=tuple(int(scheduler.last_epoch) for scheduler in known.schedulers),
                lines={
                    "backward": own.take_line(view.key for view in views) if known.step else "",
                    "step": calling_line(),
                },
                loaders=self._loaders.take() if known.step else (),
                loss_scales=self._loss_scales if known.step else (),
                shapes={} if known.step else {name: tuple(each.shape) for name, each in known.weights().items()},
                pieces=known.pieces.take(known.weights()) if known.pieces is not None and has_prints else (),
                unknown_pieces=known.pieces.unknown if known.pieces is not None and not known.step else (),
                made_before=known.made_before,
                unreadable=(*self._unreadable.values(), *sorted(own.unreadable)),
                framework=known.modules.framework if has_prints else "",
            )
        )
        self._gradients = {}

    def _write(self, line: StepLine | RecorderFault) -> None:
        if self._file is None:
            self._rank, self._world_size = rank_and_world_size(os.environ)
            self._folder.mkdir(parents=True, exist_ok=True)
            path = recording_file(self._folder, self._rank)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            header = RecordingHeader(
                rank=self._rank,
                world_size=self._world_size,
                argv=tuple(sys.argv),
                torch=str(torch.__version__),
                seed=torch.initial_seed(),
            )
            os.write(self._file, encode_line(header))
        os.write(self._file, encode_line(line))

    def _end_process(self) -> None:
        """Wait until all ranks have made their last step, because they may still need this one, and exit."""
        last_step_file(self._folder, self._rank).touch()
        until = time.monotonic() + _PEER_SECONDS
        while not has_reached_last_step(self._folder, self._world_size) and time.monotonic() < until:
            time.sleep(0.02)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(0)


def _is_capturing() -> bool:
    """Return whether a CUDA graph is captured, in which nothing can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def start_recorder(environ: Mapping[str, str]) -> ScriptRecorder:
    """Start the recorder of this process as the environment says."""
    if seed := environ.get(SEED_VARIABLE):
        _seed_all(int(seed))
    return ScriptRecorder(
        Path(environ[FOLDER_VARIABLE]),
        last_step=int(environ.get(STEPS_VARIABLE, "0")),
        every=int(environ.get(EVERY_VARIABLE, "1")),
        checker=int(environ.get(CHECKER_VARIABLE, "0")),
        keeps_batches=bool(environ.get(KEEP_VARIABLE)),
        feed_from=Path(environ[FEED_VARIABLE]) if environ.get(FEED_VARIABLE) else None,
    )


def _seed_all(seed: int) -> None:
    """Seed Python, NumPy and torch alike on all ranks, before the first line of a script that seeds nothing."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rank_and_world_size(environ: Mapping[str, str]) -> tuple[int, int]:
    """Return the rank of this process and the number of ranks, of its process group or else of its environment."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))


def _steps_in_state(optimizer: Optimizer) -> int:
    """Return how many steps the state of an optimizer has, as after a checkpoint was loaded; 0 if it does not say."""
    counts = [state["step"] for state in list(optimizer.state.values()) if isinstance(state, dict) and "step" in state]
    return max((int(count) for count in counts[:1]), default=0)


def _plain_options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group that are numbers, such as the learning rate."""
    options = {
        name: float(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"
    }
    return {name: value for name, value in options.items() if isinstance(value, bool | int | float | tuple)}
