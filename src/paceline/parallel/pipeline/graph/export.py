"""Export of a memoryless model with `torch.export`, converted to a `Graph` of its modules' calls."""

import contextlib
import copy
import io
import logging
import re
import warnings
from collections.abc import Iterator, Sequence
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

_ROOT_KEY = "L__self__"
_SELF_ATTRIBUTE = re.compile(r"\bself\.([\w.]*\w)")
_DEVICES = ("cpu", "cuda")
_METADATA_ASSERTIONS = {torch.ops.aten._assert_tensor_metadata.default}


def export_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, units: Sequence[str]) -> Graph:
    """Return the graph of the forward on these arguments; calls of `units` are steps.

    `model` is a memoryless copy. Afterwards, it may keep hooks and attribute values from the forward.

    Raises:
        LayoutError: the forward can't be exported; the message gives the line in the user's code.
    """
    has_autocast = any(map(torch.is_autocast_enabled, _DEVICES))
    with (
        preserve_rng(),
        torch.enable_grad(),
        _captured_output() as printed,
        _disabled_autocast(),
        warnings.catch_warnings(record=True) as caught_warnings,
    ):
        states_before = cpu_rng_states()
        warnings.simplefilter("always")
        program, mode_check = _export_program(model, args, kwargs, units, has_autocast)
        if cpu_rng_states() != states_before:
            raise LayoutError(
                "the forward draws from random or numpy, and an exported graph would reuse that one draw forever.",
                cause="stochastic depth or augmentation by Python's own generators",
                hint="draw with torch, and compute with what was drawn: x * (torch.rand(()) > 0.5)",
            )
        # transformers registers hooks in the first forward to record hidden states; later forwards use them
        if mode_check.changed_hooks and not mode_check.changed_attribute:
            mode_check.apply_final_values()
            with mode_check.require_observing_hooks():
                program, mode_check = _export_program(model, args, kwargs, units, has_autocast)
        mode_check.refuse_changes()
        if mode_check.changed_state:  # an attribute that is set once, such as a size, does not change the next graph
            mode_check.apply_final_values()
            second_program, second_check = _export_program(model, args, kwargs, units, has_autocast)
            if second_check.changed_state or second_program.graph_module.code != program.graph_module.code:
                raise _changed_state_error(mode_check.changed_state)
    _refuse_stored_tensors([str(warning.message) for warning in caught_warnings], units)
    return replace(_GraphReader(program, units).read_graph(), has_print_calls=bool(printed.getvalue()))


def _export_program(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], units: Sequence[str], has_autocast: bool
) -> tuple[torch.export.ExportedProgram, ModeChangeCheck]:
    mode_check = ModeChangeCheck(model, units)
    lost_effects: list[LayoutError] = []

    def record_lost_effect(name: str) -> None:
        if mode_check.is_between_units and not lost_effects and (has_autocast or name != "torch.autocast"):
            line = current_user_line()
            lost_effects.append(_lost_effect_error(name, where="" if line is None else f"{line}: {line.text}"))

    try:
        with observe_autograd(record_lost_effect):
            program = torch.export.export(
                model, args, kwargs, strict=False, preserve_module_call_signature=tuple(units)
            )
    except Exception as error:
        raise _export_error(error) from error
    finally:
        mode_check.close()
    if lost_effects:
        raise lost_effects[0]
    return program, mode_check


def _lost_effect_error(name: str, *, where: str) -> LayoutError:
    """Return the error for a call between modules whose effect an exported graph does not contain."""
    return LayoutError(
        f"the forward calls {name} between its modules, and a graph that is cut into stages would lose its effect.",
        where=where,
        cause="an exported graph has only operations: no backward of a custom function, no hooks, no autocast regions",
        hint="do it inside a module that stays whole: a small nn.Module around the call; or --layout ddp or fsdp",
    )


def _changed_state_error(name: str) -> LayoutError:
    return LayoutError(
        f"the forward changes {name}, and an exported graph would keep the value at export.",
        cause="a counter or a flag that decides what the forward does",
        hint="register_buffer for it, and compute with it: torch.where(self.steps < 10, a, b)",
    )


def _refuse_stored_tensors(warning_texts: Sequence[str], units: Sequence[str]) -> None:
    """Raise if the forward stores a tensor on a module outside all units, because only the export would store it."""
    texts = [text for text in warning_texts if "assigned during export" in text]
    names = [name for text in texts for name in _SELF_ATTRIBUTE.findall(text)]
    names = [name for name in names if not name.startswith(tuple(f"{unit}." for unit in units))]
    if names:
        raise LayoutError(
            f"between the calls of its modules, the forward stores a tensor on the model (self.{names[0]}), "
            "which a graph can't do.",
            cause="a value stored for code outside the forward, such as an auxiliary loss",
            hint="return it from the forward, or register_buffer for state that is kept between steps",
        )


class _GraphReader:
    """The conversion of an exported program to a `Graph`."""

    def __init__(self, program: torch.export.ExportedProgram, units: Sequence[str]) -> None:
        self._program = program
        self._units = frozenset(units)
        self._graph_module: GraphModule = program.graph_module
        self._signatures = {entry.fqn: entry.signature for entry in program.module_call_graph}
        self._enclosing_steps: dict[str, int] = {}
        self._steps: list[Step] = []
        self._step_of_call: dict[str, int] = {}

    def read_graph(self) -> Graph:
        """Return the graph, with its steps in the order of the forward."""
        sources, constants = dict(self._sources()), dict(self._program.constants)
        nodes = {node.name: node for node in self._graph_module.graph.nodes}
        for node in nodes.values():
            if node.op == "get_attr":
                sources[node.name] = GraphSource(kind=None, target=node.name)
                constants[node.name] = getattr(self._graph_module, str(node.target))
            elif node.op == "call_function" and node.target not in _METADATA_ASSERTIONS:
                self._add_node(node)
        model_signature = self._signatures[""]
        assert model_signature is not None
        graph = Graph(
            steps=tuple(self._move_buffer_copies()),
            input_names=tuple(self._input_names()),
            sources=sources,
            outputs=tuple(_graph_value(spec.arg) for spec in self._output_specs()),
            out_spec=model_signature.out_spec,
            nodes=nodes,
            constants=constants,
            enclosing_steps=self._enclosing_steps,
        )
        _refuse_unreturned_values(graph)
        return graph

    def _move_buffer_copies(self) -> list[Step]:
        """Return the steps, with each copy into a buffer moved forward from the end, where torch.export puts it.

        The copy then follows the last step that uses the buffer or the new value. A copy is left out if the module
        call or the in-place operation that made the new value also writes it to the buffer.
        """
        steps = list(self._steps)
        copies: list[Operation] = []
        while steps and isinstance(step := steps[-1], Operation) and step.node.target is torch.ops.aten.copy_.default:
            copies.append(step)
            steps.pop()
        for buffer_copy in reversed(copies):
            buffer, value = buffer_copy.node.args[:2]
            assert isinstance(buffer, Node) and isinstance(value, Node)
            if value.name not in self._enclosing_steps and not _is_in_place_result(value, buffer):
                names = {buffer.name, value.name}
                users = (i for i, step in enumerate(steps) if names & {*step.input_names, *step.output_names})
                steps.insert(max(users) + 1, buffer_copy)
        new_indices = {id(step): index for index, step in enumerate(steps)}
        for name, index in list(self._enclosing_steps.items()):
            self._enclosing_steps[name] = new_indices[id(self._steps[index])]
        return steps

    def _input_names(self) -> Iterator[str]:
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                yield spec.arg.name if isinstance(spec.arg, TensorArgument) else ""

    def _output_specs(self) -> Iterator[Any]:
        return (spec for spec in self._program.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT)

    def _sources(self) -> Iterator[tuple[str, GraphSource]]:
        for spec in self._program.graph_signature.input_specs:
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                yield spec.arg.name, GraphSource(kind=spec.kind, target=str(spec.target))
            elif spec.kind is not InputKind.USER_INPUT:
                yield spec.arg.name, GraphSource(kind=None, target=str(spec.target))

    def _add_node(self, node: Node) -> None:
        unit = self._enclosing_unit(node)
        if unit is None:
            self._steps.append(Operation(node=node, draws_random=_draws_random(node)))
            return
        call_key, module_name = unit
        if call_key not in self._step_of_call:
            self._step_of_call[call_key] = len(self._steps)
            self._steps.append(self._module_call(call_key, module_name))
        index = self._step_of_call[call_key]
        self._enclosing_steps[node.name] = index
        call = self._steps[index]
        if _draws_random(node) and not call.draws_random and isinstance(call, ModuleCall):
            self._steps[index] = replace(call, draws_random=True)

    def _enclosing_unit(self, node: Node) -> tuple[str, str] | None:
        """Return the outermost unit that contains an operation, as (key of its call, module name), or None."""
        stack: dict[str, tuple[str, Any]] = node.meta.get("nn_module_stack", {})
        return next(((key, name) for key, (name, _) in stack.items() if name in self._units), None)

    def _module_call(self, call_key: str, module_name: str) -> ModuleCall:
        name = call_key.removeprefix(_ROOT_KEY)
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
            module_name=module_name,
            call_index=int(name.partition("@")[2] or 0),
            inputs=tuple(_graph_value(argument) for argument in signature.inputs),
            outputs=tuple(_graph_value(argument) for argument in signature.outputs),
            in_spec=signature.in_spec,
        )


def _is_in_place_result(value: Node, buffer: Node) -> bool:
    """Return whether a value is the result of writing to the buffer in place."""
    while value is not buffer:
        written_argument = next((argument for argument, is_write in aliased_arguments(value) if is_write), None)
        if written_argument is None:
            return False
        value = written_argument
    return True


def _graph_value(argument: Any) -> GraphValue:
    if isinstance(argument, ConstantArgument):
        return GraphValue(constant=argument.value)
    return GraphValue(name=argument.name)


def _draws_random(node: Node) -> bool:
    """Return whether an operation draws random numbers; dropout in evaluation mode does not."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return not (arguments.get("train") is False or ("dropout_p" in names and not arguments.get("dropout_p", 0.0)))


def _refuse_unreturned_values(graph: Graph) -> None:
    """Raise `LayoutError` if a step or the output uses a value that a module made but did not return."""
    known = {*graph.input_names, *graph.sources}
    for step in graph.steps:
        for name in step.input_names:
            if name not in known:
                raise _unreturned_value_error(graph, name, f"{step.name} needs it")
        known.update(step.output_names)
    for value in graph.outputs:
        if value.name and value.name not in known:
            raise _unreturned_value_error(graph, value.name, "the forward returns it")


def _unreturned_value_error(graph: Graph, name: str, user: str) -> LayoutError:
    module = graph.steps[graph.enclosing_steps[name]].name if name in graph.enclosing_steps else "a module"
    return LayoutError(
        f"{module} creates a value ({name}) that it does not return, but {user}.",
        cause="a module that stores a tensor on itself (self.last = x) for code outside of it",
        hint="return it from the module",
    )


@contextlib.contextmanager
def _captured_output() -> Iterator[io.StringIO]:
    """Suppress logging and stderr, and capture stdout; `LayoutError` reports the errors of torch.export."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            yield printed
    finally:
        logging.disable(level)


@contextlib.contextmanager
def _disabled_autocast() -> Iterator[None]:
    """Disable autocast, so that the graph has the model's own dtypes; its steps may run under autocast later."""
    with contextlib.ExitStack() as stack:
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _export_error(error: Exception) -> LayoutError:
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
