"""Each planted fault replaces a private function that still exists in Paceline."""

import ast
import importlib
import inspect
from collections.abc import Iterator

import pytest

from tests.verification.diagnosis.faults_in_data_parallel import IN_PARTS
from tests.verification.diagnosis.faults_in_jobs import IN_JOBS
from tests.verification.diagnosis.faults_in_sharding_and_pipeline import IN_STAGES
from tests.verification.diagnosis.faults_in_tensor_context_experts import IN_TENSORS

FAULTS = {fault.name: fault.code for fault in (*IN_JOBS, *IN_PARTS, *IN_STAGES, *IN_TENSORS)}


def gone(code: str) -> Iterator[str]:
    """What the fault imports, reads or replaces outside its functions, and Paceline has not, or calls otherwise."""
    tree = ast.parse(code)
    found: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("paceline"):
            for alias in node.names:
                try:
                    module = importlib.import_module(str(node.module))
                    found[alias.asname or alias.name] = _entry(module, alias.name)
                except (ImportError, AttributeError):
                    yield f"{node.module}.{alias.name}"
    methods = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
    functions = {name: one.args for name, one in methods.items()}
    for statement in (one for one in tree.body if isinstance(one, ast.Assign)):
        for node in ast.walk(statement):
            if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in found):
                continue
            if not hasattr(found[node.value.id], node.attr):
                yield ast.unparse(node)
            elif isinstance(statement.value, ast.Name) and isinstance(getattr(found[node.value.id], node.attr), type):
                yield from _unknown(getattr(found[node.value.id], node.attr), method=methods.get(statement.value.id))
            elif node in statement.targets:
                yield from _not_taken(getattr(found[node.value.id], node.attr), by=statement.value, functions=functions)


def _unknown(owner: type, *, method: ast.FunctionDef | None) -> Iterator[str]:
    """The private attributes that a planted method reads of `self`, and that no source of its class mentions."""
    sources = "".join(inspect.getsource(base) for base in owner.__mro__ if base.__module__.startswith("paceline"))
    for node in ast.walk(method) if method is not None else ():
        if not (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"):
            continue
        if node.attr.startswith("_") and f".{node.attr}" not in sources and f"def {node.attr}(" not in sources:
            yield f"{owner.__name__}.{node.attr}"


def _not_taken(part: object, *, by: ast.expr, functions: dict[str, ast.arguments]) -> list[str]:
    """What the part is called with by name and the function in its place has no room for."""
    taken = by.args if isinstance(by, ast.Lambda) else functions.get(by.id) if isinstance(by, ast.Name) else None
    if taken is None or taken.kwarg is not None or not callable(part):
        return []
    names = {one.arg for one in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs)}
    asked = [one.name for one in inspect.signature(part).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return [f"{ast.unparse(by)}({name})" for name in asked if name not in names]


def _entry(module: object, name: str) -> object:
    path = getattr(module, "__name__", "")
    return getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{path}.{name}")


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_fault_replaces_is_there(name: str) -> None:
    assert not list(gone(FAULTS[name]))


def test_a_part_that_is_gone_is_missed() -> None:
    code = "from paceline.parallel.gradients import tied_parameters as ties\nfrom paceline.parallel.gradients.tied_parameters import TiedReducer, gone\n"
    assert list(gone(f"{code}_sum = TiedReducer._sum\nties.sum_tied_gradients = None\nties.more = None")) == [
        "paceline.parallel.gradients.tied_parameters.gone",
        "TiedReducer._sum",
        "ties.more",
    ]
    code = "from paceline.parallel.gradients import tied_parameters as ties\ndef part(parameter, *, ranks, index): ...\nties.sum_tied_gradients = part"
    assert list(gone(code)) == ["part(world)"]
