"""Pipeline stages that run the model's own forward: no traced graph, no wrapper, the same names in `state_dict()`.

Each stage runs the model's `forward` from its start. Blocks before the stage return placeholders, and the last of these
blocks returns the received values. The stage's own blocks run, and after the last one an exception ends the forward.
Calls are intercepted outside all hooks of a module, so sharding, compiling and recomputation apply to the stage's own
modules only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, RunError, user_line
from paceline.parallel.pipeline.chain.placeholders import Form, Placeholder, Pool
from paceline.parallel.pipeline.chain.split import StagePart, StageSplit
from paceline.parallel.pipeline.free_memory import free_other_stages, keep_shared_storage
from paceline.parallel.pipeline.stage_io import Spec, flatten_output, replace_at, tensors_in, unflatten_output
from paceline.torch_internals.private_api import CallInterceptor, is_in_backward, running_autograd_function
from paceline.torch_internals.rng import DisabledDropout


@dataclass(kw_only=True)
class StageOutput:
    """The values sent to the next stage: tensors, and a JSON description of them."""

    tensors: list[Tensor]
    spec: Spec

    def received(self) -> "StageOutput":
        """Return the output as the next stage receives it: detached from this stage's autograd graph."""
        return StageOutput(tensors=[_leaf(tensor) for tensor in self.tensors], spec=self.spec)


@dataclass(kw_only=True)
class _Run:
    """The state of one stage's forward of one microbatch."""

    part: StagePart
    received: StageOutput | None
    trains: bool = False
    pool: Pool = field(default_factory=dict)
    stream: Tensor | None = None
    carried: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, Tensor] = field(default_factory=dict)
    called: int = 0


class _Left(BaseException):
    """The signal that the stage's last block has run.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """

    def __init__(self, run: _Run, sent: StageOutput) -> None:
        super().__init__("left after the stage's last block")
        self.run = run
        self.sent = sent


class Stages:
    """The stages of one model that this process runs; the memory of other stages' parameters and buffers is freed.

    Several stages of one process (interleaved, V) share the model. Create this object before sharding, compiling or
    hooking the model, so that its interceptors are outside of these. A model on the meta device will run on `device`.
    """

    def __init__(
        self, model: nn.Module, *, cut: StageSplit, own: Sequence[int], device: torch.device | None = None
    ) -> None:
        self.model = model
        self.cut = cut
        self.own = tuple(own)
        self.on_leave: list[Callable[[], None]] = []
        self._run: _Run | None = None
        self._idle = DisabledDropout(model)
        self._device = device or next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = [modules[name] for name in cut.blocks]
        first = {id(p): name for name, p in model.named_parameters()}
        outside = {
            name: {first[id(p)] for p in module.parameters()} for name, module in keep_shared_storage(model, blocks)
        }
        self._gates = [
            CallInterceptor(
                module, self._block_gate(number, self._dummy(module, cut.blocks[number], cut.forms[number]))
            )
            for number, module in enumerate(blocks)
        ]
        self._gates += [
            CallInterceptor(modules[name], self._glue_gate(name, parameters, self._dummy(modules[name], name)))
            for name, parameters in outside.items()
            if parameters
        ]
        free_other_stages(model, cut=cut, own=self.own, blocks=blocks, device=device)

    def run(self, stage: int, received: StageOutput | None, call: Callable[[], Any]) -> Any:
        """Run `call`, the forward of one microbatch, on one stage.

        Return the `StageOutput` for the next stage, or on the last stage the result of `call`. `received` is the
        previous stage's output; its tensors have `requires_grad` if gradients flow back.

        Raises:
            JobError: the forward ended without reaching the stage's last block.
        """
        if stage not in self.own:
            raise RunError(f"stage {stage} is not one of this process's stages {list(self.own)}.")
        for gate in self._gates:
            gate.rewrap()
        part = self.cut.parts[stage]
        run = _Run(part=part, received=received, trains=torch.is_grad_enabled())
        run.stream = None if self.model.training else stream_of(self._device)
        if received is not None:
            self._unpack_carried(run, received)
        before, self._run = self._run, run
        try:
            result = call()
        except _Left as finished:
            if finished.run is not run:
                raise
            return finished.sent
        except RuntimeError as error:
            if "appears to not have been used in the graph" in str(error):
                raise _through_stages(error) from error
            raise
        finally:
            self._run = before
            for leave in self.on_leave:
                leave()
        if run.called < len(self.cut.blocks):
            raise self._another_way(run) if run.called else self._never(stage)
        return result

    def refuse_training(self) -> None:
        """Raise, before the first step, if the stages can evaluate the model but not train it.

        Raises:
            LayoutError: an autograd function calls a block, so autograd does not record the block's operations.
        """
        if self.cut.enclosed is not None:
            raise _enclosed(*self.cut.enclosed)

    def close(self) -> None:
        """Remove the interceptors."""
        for gate in reversed(self._gates):
            gate.undo()

    # -- blocks

    def _block_gate(self, number: int, dummy: Placeholder) -> Callable[..., Any]:
        def gate(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return self._outside(call, args, kwargs, self.cut.blocks[number])
            if number != run.called:
                raise self._another_way(run)
            run.called += 1
            if run.trains and not torch.is_grad_enabled() and (function := running_autograd_function()) is not None:
                raise _enclosed(self.cut.blocks[number], function.__name__)
            if number == run.part.start - 1:
                return self._take(run)
            if number < run.part.start:
                return dummy.answer(args, kwargs, pool=run.pool)
            args, kwargs = self._handed(run, number, args, kwargs)
            output = call(*args, **kwargs)
            self._look(run, number, True, output)
            if number == run.part.stop - 1 and run.part.stop < len(self.cut.blocks):
                raise _Left(run, self._packed(run, number, output))
            return output

        return gate

    def _never(self, stage: int) -> JobError:
        return JobError(
            f"the forward of stage {stage} ended before its block {self.cut.blocks[0]}.",
            cause="a branch that skips blocks, or a forward= that does not call the model",
            hint="forward=lambda model, batch: model(...), which calls every block once",
        )

    def _another_way(self, run: _Run) -> LayoutError:
        """Return the error for blocks that are called in a different order than in the trace."""
        number = run.called
        due = self.cut.blocks[number] if number < len(self.cut.blocks) else "no further block"
        return LayoutError(
            f"the forward does not call its blocks in the order in which the model was cut: {due} was expected.",
            cause="layers that are skipped, shuffled or repeated at random or depending on the data",
            hint="call all blocks in one order, and make the choice inside a block; or --layout ddp or fsdp",
        )

    def _outside(self, call: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """Handle a call outside of a stage's run.

        The call runs if this process holds all stages, or in a backward, which recomputes modules of the stage.
        """
        if len(self.own) == self.cut.num_stages or is_in_backward():
            return call(*args, **kwargs)
        raise RunError(
            f"{name} was called, but this process holds the stages {list(self.own)} of {self.cut.num_stages} only.",
            hint="run the model by its stages: stages.run(stage, received, call)",
        )

    def _take(self, run: _Run) -> Any:
        assert run.received is not None, "a stage after the first runs on what it received"
        output, streams = run.received.spec
        if streams:
            take_stream(run.received.tensors[-1], run.received.tensors[0].device)
        tensors = [tensor.clone() for tensor in run.received.tensors] if run.part.copies else run.received.tensors
        return unflatten_output(output, iter(tensors), self.cut.kinds)

    def _unpack_carried(self, run: _Run, received: StageOutput) -> None:
        numbers = run.part.takes
        end = len(received.tensors) - int(bool(received.spec[1]))
        run.carried = dict(zip(numbers, received.tensors[end - len(numbers) : end], strict=True))
        run.seen.update(run.carried)

    def _handed(self, run: _Run, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a block, with the values carried from earlier stages inserted."""
        new = {
            path: tensor
            for carried, tensor in run.carried.items()
            for block, path in self.cut.carried[carried].targets
            if block == number
        }
        value = {"args": args, "kwargs": kwargs}
        if new:
            value = replace_at(value, new)
        self._look(run, number, False, value)
        return value["args"], value["kwargs"]

    def _look(self, run: _Run, number: int, is_output: bool, value: Any) -> None:
        """Store the inputs or outputs of this block that later stages need."""
        wanted = [
            (carried, sight[2])
            for carried in run.part.gives
            if (sight := self.cut.carried[carried].sight(run.part)) is not None and sight[:2] == (number, is_output)
        ]
        if wanted:
            found = dict(tensors_in(value))
            for carried, path in wanted:
                if path not in found:
                    raise LayoutError(
                        f"{self.cut.blocks[number]} was called with different arguments than when the model was cut.",
                        hint="use the same keys in every batch",
                    )
                run.seen[carried] = found[path]

    def _packed(self, run: _Run, number: int, output: Any) -> StageOutput:
        tensors, spec = flatten_output(output, where=self.cut.blocks[number])
        tensors += [run.seen[carried] for carried in run.part.gives]
        if self.model.training:
            streams = self.cut.parts[run.part.index + 1].takes_stream or self._idle.is_any_enabled()
        else:  # in evaluation, blocks have no random streams of their own and share one generator
            streams = run.stream is not None and not torch.equal(stream_of(tensors[0].device), run.stream)
        if streams:
            tensors.append(stream_of(tensors[0].device))
        return StageOutput(tensors=tensors, spec=[spec, int(streams)])

    # -- modules outside the blocks

    def _glue_gate(self, name: str, parameters: set[str], dummy: Placeholder) -> Callable[..., Any]:
        real = {stage: self.cut.runs(parameters, stage=stage) for stage in self.own}

        def gate(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = self._run
            if run is None:
                return self._outside(call, args, kwargs, name)
            return call(*args, **kwargs) if real[run.part.index] else dummy.answer(args, kwargs)

        return gate

    def _dummy(self, module: nn.Module, name: str, form: Form | None = None) -> Placeholder:
        return Placeholder(module, name=name, kinds=self.cut.kinds, form=form)


def _through_stages(error: RuntimeError) -> LayoutError:
    """Return the error for a forward that computes a gradient through the blocks of other stages."""
    line = user_line(error)
    return LayoutError(
        "the forward asks for the gradient of a value that is on another stage (torch.autograd.grad).",
        where="" if line is None else str(line),
        cause="a gradient penalty or an energy: its graph goes through all blocks, but a stage has only some of them",
        hint="--layout ddp or fsdp; or take the gradient inside one block",
    )


def _enclosed(name: str, function: str) -> LayoutError:
    if function != "CheckpointFunction":
        return LayoutError(
            f"the model calls {name} inside the autograd function {function}, so no gradient would come back over "
            "a stage border.",
            cause="such a function returns gradients of its inputs only, but a stage's first "
            "block takes what it received",
            hint="call the block outside of it (checkpoint(..., use_reentrant=False)), or --layout ddp or fsdp",
        )
    return LayoutError(
        f"the model checkpoints {name} with use_reentrant=True, so no gradient would come back over a stage border.",
        cause="such a checkpoint returns gradients of its inputs only, but a stage's first "
        "block takes what it received",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or --layout pp,remat=full without it",
    )


def leaves_of(sent: StageOutput) -> Iterator[Tensor]:
    """Return an iterator over the tensors of an output that require gradients."""
    return (tensor for tensor in sent.tensors if tensor.requires_grad)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def stream_of(device: torch.device) -> Tensor:
    """Return the state of a device's random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def take_stream(state: Tensor, device: torch.device) -> None:
    """Set a device's random generator to a state that `stream_of` returned."""
    state = state.clone()  # torch reads the storage from its start, but a received tensor may be a view into a buffer
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
