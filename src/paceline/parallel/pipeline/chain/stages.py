"""Pipeline stages that run the model's own forward: no traced graph, no wrapper, the same names in `state_dict()`.

Each stage runs the model's `forward` from its start. Blocks before the stage return placeholders, and the last of these
blocks returns the received values. The stage's own blocks run, and after the last one an exception ends the forward.
Calls are intercepted outside all hooks of a module, so sharding, compiling and recomputation apply to the stage's own
modules only.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, RunError, user_line
from paceline.parallel.pipeline.chain.placeholders import OutputTemplate, Placeholder, TensorPool
from paceline.parallel.pipeline.chain.split import ChainStage, StageSplit
from paceline.parallel.pipeline.free_memory import free_other_chain_stages, modules_outside_blocks
from paceline.parallel.pipeline.stage_io import (
    OutputSpec,
    flatten_output,
    substitute_tensors,
    tensors_in,
    unflatten_output,
)
from paceline.torch_internals.private_api import CallInterceptor, is_in_backward, running_autograd_function
from paceline.torch_internals.rng import InitiallyZeroDropout


@dataclass(kw_only=True)
class StageOutput:
    """The values sent to the next stage: tensors, and a JSON description of them."""

    tensors: list[Tensor]
    spec: OutputSpec

    def as_stage_input(self) -> "StageOutput":
        """Return the output as the next stage receives it: detached from this stage's autograd graph."""
        leaves = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in self.tensors]
        return StageOutput(tensors=leaves, spec=self.spec)


@dataclass(kw_only=True)
class _StageRun:
    """The state of one stage's forward of one microbatch.

    `start_rng_state` is the random generator's state before the forward; it is set only in evaluation. `received_skips`
    are the skip values (see `SkipValue`) from earlier stages, by index. `skip_values` also contains the skip values of
    the stage's own blocks.
    """

    stage: ChainStage
    stage_input: StageOutput | None
    is_grad_enabled: bool
    start_rng_state: Tensor | None
    placeholder_pool: TensorPool = field(default_factory=dict)
    received_skips: dict[int, Tensor] = field(default_factory=dict)
    skip_values: dict[int, Tensor] = field(default_factory=dict)
    num_called_blocks: int = 0


class _StageEnd(BaseException):
    """The signal that the stage's last block has run.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """

    def __init__(self, run: _StageRun, stage_output: StageOutput) -> None:
        super().__init__("the stage's last block has run")
        self.run = run
        self.stage_output = stage_output


class Stages:
    """The stages of one model that this process runs; the memory of other stages' parameters and buffers is freed.

    In interleaved and V-shaped schedules, several stages of one process share the model. Create this object before
    sharding, compiling or hooking the model, so that its interceptors see a call first. A model on the meta device
    will run on `device`. The functions in `on_forward_end` are called after each forward of a stage.
    """

    def __init__(
        self, model: nn.Module, *, split: StageSplit, owned_stages: Sequence[int], device: torch.device | None = None
    ) -> None:
        self.model = model
        self.split = split
        self.owned_stages = tuple(owned_stages)
        self.on_forward_end: list[Callable[[], None]] = []
        self._running = threading.local()  # several shards of a sequence may be in a stage, each in its own thread
        self._initially_zero_dropout = InitiallyZeroDropout(model)
        self._device = device or next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        modules = dict(model.named_modules(remove_duplicate=False))
        blocks = [modules[name] for name in split.blocks]
        first_names = {id(p): name for name, p in model.named_parameters()}
        outside_modules = {
            name: {first_names[id(p)] for p in module.parameters()}
            for name, module in modules_outside_blocks(model, blocks)
        }
        self._interceptors = [
            CallInterceptor(
                block,
                self._block_handler(
                    number, self._placeholder(block, split.blocks[number], split.output_templates[number])
                ),
            )
            for number, block in enumerate(blocks)
        ]
        self._interceptors += [
            CallInterceptor(
                modules[name],
                self._outside_module_handler(name, parameters, self._placeholder(modules[name], name)),
            )
            for name, parameters in outside_modules.items()
            if parameters
        ]
        free_other_chain_stages(model, split=split, owned_stages=self.owned_stages, blocks=blocks, device=device)

    def run(self, stage: int, stage_input: StageOutput | None, call: Callable[[], Any]) -> Any:
        """Run `call`, the forward of one microbatch, on one stage.

        Return the `StageOutput` for the next stage, or on the last stage the result of `call`. `stage_input` is the
        previous stage's output; its tensors have `requires_grad` if gradients flow back.

        Raises:
            JobError: the forward ended without calling any block.
            LayoutError: the forward called the blocks in another order than expected, ended before the stage's last
                block, or uses autograd in a way that stages don't support.
        """
        if stage not in self.owned_stages:
            raise RunError(f"stage {stage} is not one of this process's stages {list(self.owned_stages)}.")
        for interceptor in self._interceptors:
            interceptor.rewrap()
        run = _StageRun(
            stage=self.split.stages[stage],
            stage_input=stage_input,
            is_grad_enabled=torch.is_grad_enabled(),
            start_rng_state=None if self.model.training else device_rng_state(self._device),
        )
        if stage_input is not None:
            self._unpack_skip_values(run, stage_input)
        previous_run, self._current_run = self._current_run, run
        try:
            result = call()
        except _StageEnd as end:
            if end.run is not run:
                raise
            return end.stage_output
        except RuntimeError as error:
            if "appears to not have been used in the graph" in str(error):
                raise _gradient_through_stages_error(error) from error
            raise
        finally:
            self._current_run = previous_run
            for callback in self.on_forward_end:
                callback()
        if run.num_called_blocks < len(self.split.blocks):
            raise self._block_order_error(run) if run.num_called_blocks else self._no_block_error(stage)
        return result

    @property
    def _current_run(self) -> _StageRun | None:
        """The run of this thread."""
        return getattr(self._running, "run", None)

    @_current_run.setter
    def _current_run(self, run: _StageRun | None) -> None:
        self._running.run = run

    def check_trainable(self) -> None:
        """Raise, before the first step, if the stages can evaluate the model but not train it.

        Raises:
            LayoutError: an autograd function calls a block, so autograd does not record the block's operations.
        """
        if self.split.enclosed_block is not None:
            raise _autograd_function_error(*self.split.enclosed_block)

    def close(self) -> None:
        """Remove the interceptors."""
        for interceptor in reversed(self._interceptors):
            interceptor.undo()

    # -- blocks

    def _block_handler(self, number: int, placeholder: Placeholder) -> Callable[..., Any]:
        """Return the handler that runs a block of the stage, and returns a value for a block before the stage."""

        def handle_call(original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = self._current_run
            if run is None:
                return self._call_outside_run(original_call, args, kwargs, self.split.blocks[number])
            if number != run.num_called_blocks:
                raise self._block_order_error(run)
            run.num_called_blocks += 1
            if (
                run.is_grad_enabled
                and not torch.is_grad_enabled()
                and (function := running_autograd_function()) is not None
            ):
                raise _autograd_function_error(self.split.blocks[number], function.__name__)
            if number == run.stage.start - 1:
                return self._unpack_output(run)
            if number < run.stage.start:
                return placeholder.make_output(args, kwargs, pool=run.placeholder_pool)
            args, kwargs = self._insert_skip_values(run, number, args, kwargs)
            output = original_call(*args, **kwargs)
            self._store_skip_values(run, number, True, output)
            if number == run.stage.stop - 1 and run.stage.stop < len(self.split.blocks):
                raise _StageEnd(run, self._pack_output(run, number, output))
            return output

        return handle_call

    def _no_block_error(self, stage: int) -> JobError:
        return JobError(
            f"the forward of stage {stage} called no block of the model; {self.split.blocks[0]!r} must come first.",
            cause="a branch that skips blocks, or a forward= that does not call the model",
            hint="forward=lambda model, batch: model(...), which calls every block once",
        )

    def _block_order_error(self, run: _StageRun) -> LayoutError:
        """Return the error for blocks that are called in a different order than in the trace."""
        number = run.num_called_blocks
        expected = self.split.blocks[number] if number < len(self.split.blocks) else "no further block"
        return LayoutError(
            f"the forward does not call its blocks in the order in which the model was cut: {expected} was expected.",
            cause="layers that are skipped, shuffled or repeated at random or depending on the data",
            hint="call all blocks in one order, and make the choice inside a block; or --layout ddp or fsdp",
        )

    def _call_outside_run(self, original_call: Callable[..., Any], args: Any, kwargs: Any, name: str) -> Any:
        """Handle a call outside of a stage's run.

        The call runs if this process holds all stages, or in a backward, which recomputes modules of the stage.
        """
        if len(self.owned_stages) == self.split.num_stages or is_in_backward():
            return original_call(*args, **kwargs)
        raise RunError(
            f"{name} was called, but this process holds the stages {list(self.owned_stages)} of "
            f"{self.split.num_stages} only.",
            hint="run the model by its stages: stages.run(stage, stage_input, call)",
        )

    def _unpack_output(self, run: _StageRun) -> Any:
        """Return the received output of the block before this stage."""
        assert run.stage_input is not None, "a stage after the first runs on what it received"
        tensors = run.stage_input.tensors
        output_spec, has_rng_state = run.stage_input.spec
        if has_rng_state:
            set_device_rng_state(tensors[-1], tensors[0].device)
        if run.stage.should_clone_inputs:
            tensors = [tensor.clone() for tensor in tensors]
        return unflatten_output(output_spec, iter(tensors), self.split.output_classes)

    def _unpack_skip_values(self, run: _StageRun, stage_input: StageOutput) -> None:
        indices = run.stage.received_skips
        end = len(stage_input.tensors) - int(bool(stage_input.spec[1]))
        run.received_skips = dict(zip(indices, stage_input.tensors[end - len(indices) : end], strict=True))
        run.skip_values.update(run.received_skips)

    def _insert_skip_values(self, run: _StageRun, number: int, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments of a block, with the skip values received from earlier stages inserted."""
        new_tensors = {
            path: tensor
            for index, tensor in run.received_skips.items()
            for block, path in self.split.skip_values[index].targets
            if block == number
        }
        arguments = {"args": args, "kwargs": kwargs}
        if new_tensors:
            arguments = substitute_tensors(arguments, new_tensors)
        self._store_skip_values(run, number, False, arguments)
        return arguments["args"], arguments["kwargs"]

    def _store_skip_values(self, run: _StageRun, number: int, is_output: bool, value: Any) -> None:
        """Store the inputs or outputs of this block that later stages need."""
        paths = {
            index: occurrence.path
            for index in run.stage.sent_skips
            if (occurrence := self.split.skip_values[index].occurrence_in(run.stage)) is not None
            and (occurrence.block, occurrence.is_output) == (number, is_output)
        }
        if paths:
            tensors = dict(tensors_in(value))
            for index, path in paths.items():
                if path not in tensors:
                    raise LayoutError(
                        f"{self.split.blocks[number]} was called with different arguments than when the model was cut.",
                        hint="use the same keys in every batch",
                    )
                run.skip_values[index] = tensors[path]

    def _pack_output(self, run: _StageRun, number: int, output: Any) -> StageOutput:
        """Return what the next stage receives: the output, skip values, and the random generator's state if needed."""
        tensors, spec = flatten_output(output, where=self.split.blocks[number])
        tensors += [run.skip_values[index] for index in run.stage.sent_skips]
        if self.model.training:
            next_stage = self.split.stages[run.stage.index + 1]
            # dropout that was 0 when the model was split has no random stream of its own: if it is positive now, it
            # draws from the microbatch's stream, which the next stage must continue
            has_rng_state = next_stage.has_rng_state_input or self._initially_zero_dropout.has_positive_rate()
        else:  # in evaluation, blocks have no random streams of their own and share one generator
            has_rng_state = run.start_rng_state is not None and not torch.equal(
                device_rng_state(tensors[0].device), run.start_rng_state
            )
        if has_rng_state:
            tensors.append(device_rng_state(tensors[0].device))
        return StageOutput(tensors=tensors, spec=[spec, int(has_rng_state)])

    # -- modules outside the blocks

    def _outside_module_handler(self, name: str, parameters: set[str], placeholder: Placeholder) -> Callable[..., Any]:
        """Return the handler that runs a module outside the blocks, or returns its placeholder's output."""
        can_run = {stage: self.split.can_run_module(parameters, stage=stage) for stage in self.owned_stages}

        def handle_call(original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            run = self._current_run
            if run is None:
                return self._call_outside_run(original_call, args, kwargs, name)
            return original_call(*args, **kwargs) if can_run[run.stage.index] else placeholder.make_output(args, kwargs)

        return handle_call

    def _placeholder(self, module: nn.Module, name: str, template: OutputTemplate | None = None) -> Placeholder:
        return Placeholder(module, name=name, output_classes=self.split.output_classes, template=template)


def _gradient_through_stages_error(error: RuntimeError) -> LayoutError:
    """Return the error for a forward that computes a gradient through the blocks of other stages."""
    line = user_line(error)
    return LayoutError(
        "the forward asks for the gradient of a value that is on another stage (torch.autograd.grad).",
        where="" if line is None else str(line),
        cause="a gradient penalty or an energy: its graph goes through all blocks, but a stage has only some of them",
        hint="--layout ddp or fsdp; or take the gradient inside one block",
    )


def _autograd_function_error(name: str, function: str) -> LayoutError:
    """Return the error for a block that an autograd function calls."""
    if function != "CheckpointFunction":
        return LayoutError(
            f"the model calls {name} inside the autograd function {function}, so no gradient would come back over "
            "a stage border.",
            cause="such a function returns gradients of its inputs only, but a stage's first block gets the received "
            "values, which are not among these inputs",
            hint="call the block outside of the function (checkpoint(..., use_reentrant=False)), or --layout ddp or "
            "fsdp",
        )
    return LayoutError(
        f"the model checkpoints {name} with use_reentrant=True, so no gradient would come back over a stage border.",
        cause="such a checkpoint returns gradients of its inputs only, but a stage's first block gets the received "
        "values, which are not among these inputs",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or --layout pp,remat=full without this "
        "checkpoint",
    )


def device_rng_state(device: torch.device) -> Tensor:
    """Return the state of a device's random generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_device_rng_state(state: Tensor, device: torch.device) -> None:
    """Set a device's random generator to a state that `device_rng_state` returned."""
    state = state.clone()  # torch reads the storage from its start, but a received tensor may be a view into a buffer
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
