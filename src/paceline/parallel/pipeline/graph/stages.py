"""Stages of a model without a chain of blocks: each runs its steps of the exported graph, with the model's modules.

The stage's steps replace the model's forward, so the model's own hooks run. After the last step an exception ends the
user's forward. New shapes, constants and modes are exported again from a memoryless copy.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import JobError, LayoutError, RunError
from paceline.parallel.pipeline.chain.external_reads import called_twice
from paceline.parallel.pipeline.chain.stages import StageOutput, stream_of, take_stream
from paceline.parallel.pipeline.free_memory import hollow_graph
from paceline.parallel.pipeline.graph.export import export
from paceline.parallel.pipeline.graph.module_graph import Graph, ModuleCall
from paceline.parallel.pipeline.graph.split import GraphStageSplit, LiveValues, parameters_in, place_of
from paceline.torch_internals.private_api import CallInterceptor, tree_flatten


@dataclass(kw_only=True)
class _Run:
    """The state of one stage's forward of one microbatch."""

    stage: int
    received: StageOutput | None
    sent: StageOutput | None = None
    called: bool = False


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """A graph for one set of shapes, with the steps at which its stages end."""

    graph: Graph
    live: LiveValues
    places: tuple[int, ...]


class _Left(BaseException):
    """The signal that the stage's last step has run.

    It is not an `Exception`, so that no `except Exception` in a forward catches it.
    """

    def __init__(self, run: _Run) -> None:
        super().__init__("left after the stage's last step")
        self.run = run


class GraphStages:
    """The stages of one model that this process runs; the memory of other stages' parameters and buffers is freed.

    `bare` is a copy of the model from `memoryless_copy`. Create this object before sharding, compiling or hooking
    the model; the module calls run hooks and wrappers that are added later.
    """

    def __init__(self, model: nn.Module, *, cut: GraphStageSplit, own: Sequence[int], bare: nn.Module) -> None:
        self.model = model
        self.cut = cut
        self.own = tuple(own)
        self.on_leave: list[Callable[[], None]] = []
        self._bare = bare
        self._modules = dict(model.named_modules())
        self._cuts: dict[Any, _Cut] = {}
        self._run: _Run | None = None
        self._whole = model.forward
        self._gate = CallInterceptor(model, self._answer)
        model.forward = self._in_place_of(model.forward)
        hollow_graph(model, cut=cut, own=self.own)

    def run(self, stage: int, received: StageOutput | None, call: Callable[[], Any]) -> Any:
        """Run `call`, the forward of one microbatch, on one stage.

        Return the `StageOutput` for the next stage, or on the last stage the result of `call`.

        Raises:
            JobError: `call` does not call the model.
            LayoutError: with these inputs the forward differs from the traced one, or the model is called twice.
        """
        if stage not in self.own:
            raise RunError(f"stage {stage} is not one of this process's stages {list(self.own)}.")
        self._gate.rewrap()
        run = _Run(stage=stage, received=received)
        before, self._run = self._run, run
        try:
            result = call()
        except _Left as finished:
            if finished.run is not run or run.sent is None:
                raise
            return run.sent
        finally:
            self._run = before
            for leave in self.on_leave:
                leave()
        if stage + 1 < self.cut.num_stages:
            raise JobError(
                f"the forward of stage {stage} ended without a call of the model.",
                cause="a forward= that does not call the model, or calls a part of it",
                hint="forward=lambda model, batch: model(...)",
            )
        return result

    def refuse_training(self) -> None:
        """Do nothing: the split along the graph has already rejected models that can't be trained."""

    def close(self) -> None:
        """Remove the interceptor and restore the model's forward."""
        self._gate.undo()
        del self.model.forward

    def _answer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self._run
        if run is None and len(self.own) < self.cut.num_stages:
            raise RunError(
                f"the model was called, but this process holds the stages {list(self.own)} of "
                f"{self.cut.num_stages} only.",
                hint="run the model by its stages: stages.run(stage, received, call)",
            )
        if run is not None:
            if run.called:
                raise called_twice()
            run.called = True
        output = call(*args, **kwargs)
        if run is not None and run.stage + 1 < self.cut.num_stages:
            raise _Left(run)
        return output

    def _in_place_of(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(whole)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return whole(*args, **kwargs) if self._run is None else self._play(self._run, args, kwargs)

        return forward

    def _play(self, run: _Run, args: Any, kwargs: Any) -> Any:
        """Run the steps of one stage; the sent tensors are also returned, for hooks that read the output."""
        cut = self._cut_for(args, kwargs)
        stage, last = run.stage, run.stage + 1 == self.cut.num_stages
        start = cut.places[stage - 1] if stage else 0
        stop = len(cut.graph.steps) if last else cut.places[stage]
        env = cut.graph.given(self.model, args, kwargs)
        if run.received is not None:
            env.update(self._unpacked(run.received, cut, start, stop))
        for place in range(start, stop):
            cut.graph.steps[place].run(env, self.model)
            for name in cut.live.dead(place):
                env.pop(name, None)
        if last:
            return cut.graph.output(env)
        tensors = [env[name] for name in cut.live.over(stop)]
        run.sent = StageOutput(tensors=list(tensors), spec=[len(tensors), int(cut.live.draws_before(stop))])
        if run.sent.spec[1]:
            run.sent.tensors.append(stream_of(tensors[0].device if tensors else torch.device("cpu")))
        return tuple(tensors)

    def _unpacked(self, received: StageOutput, cut: _Cut, start: int, stop: int) -> dict[str, Tensor]:
        names, (number, streams) = cut.live.over(start), received.spec
        if number != len(names):
            raise RunError(
                f"{number} values were received but {len(names)} were expected: the stages had different inputs."
            )
        if streams:
            take_stream(received.tensors[-1], received.tensors[0].device)
        tensors = received.tensors[:number]
        if cut.live.writes_in(start, stop):
            tensors = [tensor.clone() for tensor in tensors]
        return dict(zip(names, tensors, strict=True))

    def _cut_for(self, args: Any, kwargs: Any) -> _Cut:
        leaves, form = tree_flatten((args, kwargs))
        modes = tuple(module.training for module in self._modules.values())
        key = (str(form), tuple(_shape(leaf) for leaf in leaves), modes)
        if key not in self._cuts:
            for name, module in self._bare.named_modules():
                module.training = self._modules[name].training
            graph = export(self._bare, args, kwargs, units=self.cut.units)
            live = LiveValues(graph)
            places = tuple(place_of(border, live, blocks=self.cut.blocks) for border in self.cut.borders)
            self._check(graph, places)
            self._cuts[key] = _Cut(graph=graph, live=live, places=places)
        return self._cuts[key]

    def _check(self, graph: Graph, places: Sequence[int]) -> None:
        """Raise `LayoutError` if a stage of a new graph uses modules or parameters that the stage does not hold."""
        if list(places) != sorted(places):
            raise LayoutError(
                "with these inputs the forward calls its modules in a different order than when it was cut.",
                cause="a branch on a shape, an argument or train() and eval()",
                hint="call the modules in the same order in every forward, or use another layout than pp",
            )
        first = {id(p): name for name, p in self.model.named_parameters()}
        for part, (start, stop) in zip(
            self.cut.parts, zip([0, *places], [*places, len(graph.steps)], strict=True), strict=True
        ):
            called = {step.module for step in graph.steps[start:stop] if isinstance(step, ModuleCall)} - part.modules
            direct = {first[id(self.model.get_parameter(name))] for name in parameters_in(graph, start, stop)}
            strange = sorted(called) + sorted(direct - part.parameters)
            if strange:
                raise LayoutError(
                    f"with these inputs stage {part.index} uses {strange[0]}, which it does not hold.",
                    cause="a branch on a shape, an argument or train() and eval()",
                    hint="call the same modules in every forward, or --place.blocks",
                )


def _shape(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))
