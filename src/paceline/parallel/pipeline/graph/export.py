"""Export of a memoryless model with `torch.export`, converted to a `Graph` of its modules' calls."""

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from traceback import extract_tb
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.fx import GraphModule, Node

from paceline.errors import LayoutError, current_user_line, user_line
from paceline.parallel.pipeline.graph.module_graph import (
    Graph,
    GraphSource,
    GraphValue,
    ModuleCall,
    Operation,
    Step,
    aliased_arguments,
)
from paceline.parallel.pipeline.graph.module_mode_changes import ModeChangeCheck
from paceline.torch_internals.private_api import observe_autograd
from paceline.torch_internals.rng import cpu_rng_states, preserve_rng

_ROOT = "L__self__"
_OWN_TENSOR = re.compile(r"\bself\.([\w.]*\w)")
_DEVICES = ("cpu", "cuda")
_CHECKS = {torch.ops.aten._assert_tensor_metadata.default}


def export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, units: Sequence[str]) -> Graph:
    """Return the graph of the forward on these arguments; calls of `units` are steps. The model does not change.

    Raises:
        LayoutError: the forward can't be exported; the message gives the line in the user's code.
    """
    is_mixed = any(map(torch.is_autocast_enabled, _DEVICES))
    with (
        preserve_rng(),
        torch.enable_grad(),
        _quiet() as printed,
        _plain(),
        warnings.catch_warnings(record=True) as told,
    ):
        before = cpu_rng_states()
        warnings.simplefilter("always")
        program, toggles = _program(model, args, kwargs, units, is_mixed)
        if cpu_rng_states() != before:
            raise LayoutError(
                "the forward draws from random or numpy, and an exported graph would reuse that one draw forever.",
                cause="stochastic depth or augmentation by Python's own generators",
                hint="draw with torch, and compute with what was drawn: x * (torch.rand(()) > 0.5)",
            )
        if (
            toggles.hooked and not toggles.found
        ):  # transformers registers hooks in the first forward to record hidden states; later forwards use them
            toggles.settle()
            with toggles.only_hearing():
                program, toggles = _program(model, args, kwargs, units, is_mixed)
        toggles.refuse()
        if toggles.changed:  # an attribute that is set once, such as a size, does not change the next graph
            toggles.settle()
            again, later = _program(model, args, kwargs, units, is_mixed)
            if later.changed or again.graph_module.code != program.graph_module.code:
                raise _changing(toggles.changed)
    _refuse_left([str(warning.message) for warning in told], units)
    return replace(_Reader(program, units).graph(), prints=bool(printed.getvalue()))


def _program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], units: Sequence[str], is_mixed: bool
) -> tuple[torch.export.ExportedProgram, ModeChangeCheck]:
    toggles = ModeChangeCheck(model, units)
    lost: list[LayoutError] = []

    def seen(name: str) -> None:
        if toggles.is_between_units and not lost and (is_mixed or name != "torch.autocast"):
            line = current_user_line()
            lost.append(_lost(name, where="" if line is None else f"{line}: {line.text}"))

    try:
        with observe_autograd(seen):
            program = torch.export.export(
                model, args, kwargs, strict=False, preserve_module_call_signature=tuple(units)
            )
    except Exception as error:
        raise _refused(error) from error
    finally:
        toggles.close()
    if lost:
        raise lost[0]
    return program, toggles


def _lost(name: str, *, where: str) -> LayoutError:
    """Return the error for a call between modules whose effect an exported graph does not contain."""
    return LayoutError(
        f"the forward calls {name} between its modules, and a graph that is cut into stages would lose its effect.",
        where=where,
        cause="an exported graph has operations alone: no backward of an own function, no hooks, no autocast regions",
        hint="do it inside a module that stays whole: a small nn.Module around the call; or --layout ddp or fsdp",
    )


def _changing(name: str) -> LayoutError:
    return LayoutError(
        f"the forward changes {name}, and an exported graph would keep the value at export.",
        cause="a counter or a flag that decides what the forward does",
        hint="register_buffer for it, and compute with it: torch.where(self.steps < 10, a, b)",
    )


def _refuse_left(told: Sequence[str], units: Sequence[str]) -> None:
    """Raise if the forward stores a tensor on an opened module: it would be stored only once, at export."""
    names = [name for text in told if "assigned during export" in text for name in _OWN_TENSOR.findall(text)]
    left = [name for name in names if not any(name.startswith(f"{unit}.") for unit in units)]
    if left:
        raise LayoutError(
            f"the forward stores a tensor on the model between its modules (self.{left[0]}), which a graph can't do.",
            cause="a value stored for code outside the forward, such as an auxiliary loss",
            hint="return it from the forward, or register_buffer for state that is kept between steps",
        )


class _Reader:
    def __init__(self, program: torch.export.ExportedProgram, units: Sequence[str]) -> None:
        self._program = program
        self._units = frozenset(units)
        self._module: GraphModule = program.graph_module
        self._signatures = {entry.fqn: entry.signature for entry in program.module_call_graph}
        self._inside: dict[str, int] = {}
        self._draws: set[int] = set()
        self._steps: list[Step] = []
        self._place: dict[str, int] = {}

    def graph(self) -> Graph:
        """Return the graph, with its steps in the order of the forward."""
        sources, constants = dict(self._sources()), dict(self._program.constants)
        values = {node.name: node for node in self._module.graph.nodes}
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                sources[node.name] = GraphSource(kind=None, target=node.name)
                constants[node.name] = getattr(self._module, str(node.target))
            elif node.op == "call_function" and node.target not in _CHECKS:
                self._add(node)
        whole = self._signatures[""]
        assert whole is not None
        outputs = tuple(_value(spec.arg) for spec in self._outputs())
        steps = tuple(self._settled(values))
        found = Graph(
            steps=steps,
            inputs=tuple(self._inputs()),
            sources=sources,
            outputs=outputs,
            form=whole.out_spec,
            values=values,
            constants=constants,
            inside=self._inside,
        )
        _check_hidden(found)
        return found

    def _settled(self, values: Mapping[str, Node]) -> list[Step]:
        """Return the steps with the buffer copies, which torch.export puts last, after the step of each new value."""
        steps = list(self._steps)
        last: list[Operation] = []
        while steps and isinstance(step := steps[-1], Operation) and step.node.target is torch.ops.aten.copy_.default:
            last.append(step)
            steps.pop()
        for write in reversed(last):
            buffer, value = write.node.args[:2]
            assert isinstance(buffer, Node) and isinstance(value, Node)
            if value.name not in self._inside and not _is_same(value, buffer):
                names = {buffer.name, value.name}
                at = max(place for place, step in enumerate(steps) if names & {*step.uses, *step.makes})
                steps.insert(at + 1, write)
        moved = {id(step): place for place, step in enumerate(steps)}
        for name, place in list(self._inside.items()):
            self._inside[name] = moved[id(self._steps[place])]
        return steps

    def _inputs(self) -> Iterator[str]:
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                yield spec.arg.name if isinstance(spec.arg, TensorArgument) else ""

    def _outputs(self) -> Iterator[Any]:
        return (spec for spec in self._program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT)

    def _sources(self) -> Iterator[tuple[str, GraphSource]]:
        for spec in self._program.graph_signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                yield spec.arg.name, GraphSource(kind=spec.kind, target=str(spec.target))
            elif spec.kind is not InputKind.USER_INPUT:
                yield spec.arg.name, GraphSource(kind=None, target=str(spec.target))

    def _add(self, node: Node) -> None:
        found = self._unit(node)
        if found is None:
            self._steps.append(Operation(node=node, draws=_draws(node)))
            return
        key, module = found
        if key not in self._place:
            self._place[key] = len(self._steps)
            self._steps.append(self._call(key, module))
        place = self._place[key]
        self._inside[node.name] = place
        call = self._steps[place]
        if _draws(node) and not call.draws and isinstance(call, ModuleCall):
            self._steps[place] = ModuleCall(**{**vars(call), "draws": True})

    def _unit(self, node: Node) -> tuple[str, str] | None:
        """Return the outermost unit that contains an operation, as (call, module name), or None."""
        stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack", {})
        return next(((key, name) for key, (name, _) in stack.items() if name in self._units), None)

    def _call(self, key: str, module: str) -> ModuleCall:
        name = key.removeprefix(_ROOT)
        number = int(name.partition("@")[2] or 0)
        signature = self._signatures.get(name)
        if signature is None:
            raise LayoutError(
                f"torch.export does not record what {name} takes and returns.",
                cause="a module whose forward is called as a function: block.forward(x)",
                hint="call the module: block(x)",
            )
        if signature.in_spec.num_leaves != len(signature.inputs):
            raise LayoutError(
                f"{name} changes a list or a dict that it gets, and the change is lost at a stage border.",
                cause="blocks that append their auxiliary values to one list",
                hint="return the values: x, aux = block(x); or --layout fsdp",
            )
        return ModuleCall(
            module=module,
            number=number,
            takes=tuple(_value(argument) for argument in signature.inputs),
            gives=tuple(_value(argument) for argument in signature.outputs),
            form=signature.in_spec,
        )


def _is_same(value: Node, buffer: Node) -> bool:
    """Return whether a value is the result of writing to the buffer in place."""
    while value is not buffer:
        found = next((argument for argument, is_write in aliased_arguments(value) if is_write), None)
        if found is None:
            return False
        value = found
    return True


def _value(argument: Any) -> GraphValue:
    if isinstance(argument, ConstantArgument):
        return GraphValue(constant=argument.value)
    return GraphValue(name=argument.name)


def _draws(node: Node) -> bool:
    """Return whether an operation draws random numbers; dropout in evaluation mode does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return not (given.get("train") is False or ("dropout_p" in names and not given.get("dropout_p", 0.0)))


def _check_hidden(graph: Graph) -> None:
    """Raise `LayoutError` if a step or the output uses a value that a module made but did not return."""
    known = {*graph.inputs, *graph.sources}
    for step in graph.steps:
        for name in step.uses:
            if name not in known:
                raise _hidden(graph, name, f"{step.name} needs it")
        known.update(step.makes)
    for value in graph.outputs:
        if value.name and value.name not in known:
            raise _hidden(graph, value.name, "the forward returns it")


def _hidden(graph: Graph, name: str, why: str) -> LayoutError:
    maker = graph.steps[graph.inside[name]].name if name in graph.inside else "a module"
    return LayoutError(
        f"{maker} creates a value ({name}) that it does not return, but {why}.",
        cause="a module that stores a tensor on itself (self.last = x) for code outside of it",
        hint="return it from the module",
    )


@contextlib.contextmanager
def _quiet() -> Iterator[io.StringIO]:
    """Suppress logging and stderr, and capture stdout; `LayoutError` reports the errors of torch.export."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            yield printed
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Disable autocast, so that the graph has the model's own dtypes; its steps may run under autocast later."""
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _refused(error: Exception) -> LayoutError:
    line = user_line(error)
    text = str(error).strip().partition("\n")[0]
    if any(frame.name == "deepcopy" and frame.filename == copy.__file__ for frame in extract_tb(error.__traceback__)):
        return LayoutError(
            "the forward copies a module (copy.deepcopy), which an exported graph can't do.",
            where="" if line is None else str(line),
            cause="a teacher or a frozen twin that is recreated in each forward",
            hint="call the module itself, for a teacher under torch.no_grad(); or --layout ddp or fsdp",
        )
    if "data-dependent" in str(error):
        return LayoutError(
            "the forward branches on a tensor's value, so torch.export can't make a graph to cut into stages.",
            where="" if line is None else str(line),
            cause="an `if`, a loop, a size or .item() that depends on the data",
            hint="torch.where instead of the branch, or a chain of blocks with the branch inside one",
        )
    return LayoutError(
        f"torch.export can't take the forward, so it can't be cut into stages: {type(error).__name__}: {text}",
        where="" if line is None else str(line),
        cause="the model has no chain of blocks, and its forward can't be exported as a graph",
        hint="list blocks that each forward calls in sequence: --place.blocks; or --layout fsdp",
    )
