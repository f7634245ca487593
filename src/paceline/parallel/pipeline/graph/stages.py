"""Stages of a model without a chain of blocks: each runs its steps of the exported graph, with the model's modules.

The stage's steps replace the model's forward, so the model's own hooks run. On the last stage, the user's forward then
continues with the model's output. On every other stage, an exception ends the user's forward after the stage's steps.
For new shapes, constants or modes (train or eval), the graph is exported again from a memoryless copy of the model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, RunError
from paceline.parallel.pipeline.chain.external_reads import called_twice_error
from paceline.parallel.pipeline.chain.stages import StageOutput, device_rng_state, set_device_rng_state
from paceline.parallel.pipeline.free_memory import free_other_graph_stages
from paceline.parallel.pipeline.graph.export import export_graph
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall
from paceline.parallel.pipeline.graph.split import (
    GraphStageSplit,
    LiveValues,
    boundary_position,
    canonical_names,
    parameters_between_calls,
)
from paceline.torch_internals.private_api import CallInterceptor, tree_flatten


@dataclass(kw_only=True)
class _StageRun:
    """The state of one stage's forward of one microbatch."""

    stage: int
    stage_input: StageOutput | None
    stage_output: StageOutput | None = None
    has_called_model: bool = False


@dataclass(frozen=True, kw_only=True)
class _SplitGraph:
    """A graph for one set of shapes, constants and modes, with the positions of the boundaries between its stages."""

    graph: Graph
    live_values: LiveValues
    boundaries: tuple[int, ...]


class _StageEnd(BaseException):
    """The signal that a stage other than the last has run its steps.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """

    def __init__(self, run: _StageRun) -> None:
        super().__init__("the stage's last step has run")
        self.run = run


class GraphStages:
    """The stages of one model that this process runs; the memory of other stages' parameters and buffers is freed.

    `empty_model` is the copy from `memoryless_copy`. Create this object before sharding, compiling or hooking the
    model; the module calls run hooks and wrappers that are added later. The functions in `on_forward_end` are called
    after each forward of a stage.
    """

    def __init__(
        self, model: nn.Module, *, split: GraphStageSplit, owned_stages: Sequence[int], empty_model: nn.Module
    ) -> None:
        self.model = model
        self.split = split
        self.owned_stages = tuple(owned_stages)
        self.on_forward_end: list[Callable[[], None]] = []
        self._empty_model = empty_model
        self._modules_by_name = dict(model.named_modules())
        self._split_graphs: dict[Any, _SplitGraph] = {}
        self._current_run: _StageRun | None = None
        self._interceptor = CallInterceptor(model, self._intercept_call)
        model.forward = self._wrap_forward(model.forward)
        free_other_graph_stages(model, split=split, owned_stages=self.owned_stages)

    def run(self, stage: int, stage_input: StageOutput | None, call: Callable[[], Any]) -> Any:
        """Run `call`, the forward of one microbatch, on one stage.

        Return the `StageOutput` for the next stage, or on the last stage the result of `call`. `stage_input` is the
        previous stage's output.

        Raises:
            JobError: `call` does not call the model, and this is not the last stage.
            LayoutError: with these inputs the forward differs from the traced one, or the model is called twice.
        """
        if stage not in self.owned_stages:
            raise RunError(f"stage {stage} is not one of this process's stages {list(self.owned_stages)}.")
        self._interceptor.rewrap()
        current = _StageRun(stage=stage, stage_input=stage_input)
        previous_run, self._current_run = self._current_run, current
        try:
            result = call()
        except _StageEnd as signal:
            if signal.run is not current or current.stage_output is None:
                raise
            return current.stage_output
        finally:
            self._current_run = previous_run
            for callback in self.on_forward_end:
                callback()
        if stage + 1 < self.split.num_stages:
            raise JobError(
                f"the forward of stage {stage} ended without a call of the model.",
                cause="a forward= that does not call the model, or calls a part of it",
                hint="forward=lambda model, batch: model(...)",
            )
        return result

    def check_trainable(self) -> None:
        """Do nothing: the split along the graph has already rejected models that can't be trained."""

    def close(self) -> None:
        """Remove the interceptor and restore the model's forward."""
        self._interceptor.undo()
        del self.model.forward

    def _intercept_call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        current = self._current_run
        if current is None and len(self.owned_stages) < self.split.num_stages:
            raise RunError(
                f"the model was called, but this process holds the stages {list(self.owned_stages)} of "
                f"{self.split.num_stages} only.",
                hint="run the model by its stages: stages.run(stage, stage_input, call)",
            )
        if current is not None:
            if current.has_called_model:
                raise called_twice_error()
            current.has_called_model = True
        output = call(*args, **kwargs)
        if current is not None and current.stage + 1 < self.split.num_stages:
            raise _StageEnd(current)
        return output

    def _wrap_forward(self, original_forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original_forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            current = self._current_run
            return original_forward(*args, **kwargs) if current is None else self._run_steps(current, args, kwargs)

        return forward

    def _run_steps(self, current: _StageRun, args: Any, kwargs: Any) -> Any:
        """Run the steps of one stage; the sent tensors are also returned, for hooks that read the output."""
        split = self._split_for_inputs(args, kwargs)
        graph, live_values = split.graph, split.live_values
        stage, is_last = current.stage, current.stage + 1 == self.split.num_stages
        start = split.boundaries[stage - 1] if stage else 0
        stop = len(graph.steps) if is_last else split.boundaries[stage]
        env = graph.initial_env(self.model, args, kwargs)
        if current.stage_input is not None:
            env.update(self._unpack_received(current.stage_input, live_values, start, stop))
        for index in range(start, stop):
            graph.steps[index].run(env, self.model)
            for name in live_values.dead_after(index):
                env.pop(name, None)
        if is_last:
            return graph.build_output(env)
        tensors = [env[name] for name in live_values.live_at(stop)]
        has_rng_state = live_values.has_draws_before(stop)
        current.stage_output = StageOutput(tensors=list(tensors), spec=[len(tensors), int(has_rng_state)])
        if has_rng_state:
            current.stage_output.tensors.append(device_rng_state(tensors[0].device if tensors else torch.device("cpu")))
        return tuple(tensors)

    def _unpack_received(
        self, received: StageOutput, live_values: LiveValues, start: int, stop: int
    ) -> dict[str, Tensor]:
        """Return the received values by name; also set the random generator's state if it was received."""
        names, (num_values, has_rng_state) = live_values.live_at(start), received.spec
        if num_values != len(names):
            raise RunError(
                f"{num_values} values were received but {len(names)} were expected: the stages had different inputs."
            )
        if has_rng_state:
            set_device_rng_state(received.tensors[-1], received.tensors[0].device)
        tensors = received.tensors[:num_values]
        if live_values.has_writes(start, stop):
            tensors = [tensor.clone() for tensor in tensors]
        return dict(zip(names, tensors, strict=True))

    def _split_for_inputs(self, args: Any, kwargs: Any) -> _SplitGraph:
        """Return the graph for the shapes and constants of these arguments and the modules' current modes."""
        leaves, tree_spec = tree_flatten((args, kwargs))
        modes = tuple(module.training for module in self._modules_by_name.values())
        key = (str(tree_spec), tuple(_input_key(leaf) for leaf in leaves), modes)
        if key not in self._split_graphs:
            for name, module in self._empty_model.named_modules():
                module.training = self._modules_by_name[name].training
            graph = export_graph(self._empty_model, args, kwargs, units=self.split.units)
            live_values, blocks = LiveValues(graph), self.split.blocks
            boundaries = tuple(boundary_position(each, live_values, blocks=blocks) for each in self.split.boundaries)
            self._refuse_missing_modules(graph, boundaries)
            self._split_graphs[key] = _SplitGraph(graph=graph, live_values=live_values, boundaries=boundaries)
        return self._split_graphs[key]

    def _refuse_missing_modules(self, graph: Graph, boundaries: Sequence[int]) -> None:
        """Raise `LayoutError` if a stage of a new graph uses modules or parameters that the stage does not hold."""
        if list(boundaries) != sorted(boundaries):
            raise LayoutError(
                "with these inputs the forward calls its modules in a different order than when it was cut.",
                cause="a branch on a shape, an argument or train() and eval()",
                hint="call the modules in the same order in every forward, or use another layout than pp",
            )
        starts, stops = [0, *boundaries], [*boundaries, len(graph.steps)]
        for part, start, stop in zip(self.split.stages, starts, stops, strict=True):
            called_modules = {step.module_name for step in graph.steps[start:stop] if isinstance(step, ModuleCall)}
            parameters = canonical_names(self.model, parameters_between_calls(graph, start, stop))
            missing = sorted(called_modules - part.modules) + sorted(parameters - part.parameters)
            if missing:
                raise LayoutError(
                    f"with these inputs stage {part.index} uses {missing[0]}, which it does not hold.",
                    cause="a branch on a shape, an argument or train() and eval()",
                    hint="call the same modules in every forward, or --place.blocks",
                )


def _input_key(leaf: Any) -> Any:
    """Return what the graph depends on: a tensor's shape and dtype, or the value of a constant."""
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
