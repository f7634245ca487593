"""Choose the FSDP units: the modules whose parameters are gathered together.

A unit's parameters are gathered while its forward or backward runs. By default the units are the repeated blocks; they
can also be chosen by class, by name pattern or by size. Parameters in no unit belong to the root module and stay
gathered from its forward to its backward.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from paceline.errors import LayoutError

_LIST_TYPES = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """The rule that chooses units; by default the repeated blocks.

    `classes` are names of module classes. `names` are patterns of module names, such as `layers.*`. With `min_numel`,
    a module is a unit if it has at least that many parameter elements outside of the units inside it.
    """

    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    min_numel: int | None = None


def parse_units(entries: Sequence[str], *, model: nn.Module) -> UnitChoice:
    """Parse `place.units`.

    One number is a minimum size in parameter elements. A class name of a module, or another capitalized word that is
    not a pattern, is a class. All other entries are patterns of module names.

    Raises:
        LayoutError: a number is given together with other entries.
    """
    sizes = [entry for entry in entries if entry.isdigit()]
    if sizes and len(entries) > 1:
        raise LayoutError(
            f"place.units={','.join(entries)} mixes a size and names.",
            cause="units are given by a minimum number of elements, or by names",
            hint=f"--place.units {sizes[0]}, or the names",
        )
    class_names = {type(module).__name__ for module in model.modules()}
    classes = [
        entry for entry in entries if entry in class_names or not (set(entry) & set(".*?[") or entry[:1].islower())
    ]
    names = [entry for entry in entries if entry not in classes and entry not in sizes]
    return UnitChoice(classes=[] if sizes else classes, names=names, min_numel=int(sizes[0]) if sizes else None)


def find_units(model: nn.Module, *, choice: UnitChoice) -> dict[str, nn.Module]:
    """Return the units by module name, nested units first, without the model itself.

    A module that shares a parameter with a module outside it does not become a unit. Its parameters then belong to the
    root module.

    Raises:
        LayoutError: no module has a given name or class.
    """
    chosen = dict(_choose_modules(model, choice))
    shared = _shared_parameters(model, chosen)
    units = {name: module for name, module in chosen.items() if not (set(map(id, module.parameters())) & shared)}
    return dict(sorted(units.items(), key=lambda pair: -pair[0].count(".")))


def _choose_modules(model: nn.Module, choice: UnitChoice) -> Iterator[tuple[str, nn.Module]]:
    modules = [(n, m) for n, m in model.named_modules() if n and _is_eligible(m)]
    if choice.classes or choice.names:
        for class_name in choice.classes:
            _check_found(class_name, [type(m).__name__ for _, m in modules], kind="class")
        for pattern in choice.names:
            if not any(fnmatchcase(name, pattern) for name, _ in modules):
                _check_found(pattern, [name for name, _ in modules], kind="name")
        for name, module in modules:
            if type(module).__name__ in choice.classes or any(fnmatchcase(name, pattern) for pattern in choice.names):
                yield name, module
    elif choice.min_numel is not None:
        yield from _modules_by_size(model, choice.min_numel)
    else:
        yield from _repeated_blocks(model, "")


def _is_eligible(module: nn.Module) -> bool:
    """Return whether a module has parameters and is not a container, which is never called and so never gathered."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict) and any(
        True for _ in module.parameters()
    )


def _check_found(requested: str, available: Sequence[str], *, kind: str) -> None:
    if requested not in available:
        examples = ", ".join(sorted(set(available))[:8])
        raise LayoutError(
            f"no module with parameters has the {kind} {requested!r}.",
            cause=f"the model has {examples}",
            hint="leave --place.units out: repeated blocks are found automatically",
        )


def _repeated_blocks(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated blocks: children of a list that have submodules, and whose class occurs at least twice."""
    blocks = [c for c in module.children() if _is_eligible(c) and any(True for _ in c.children())]
    class_counts = Counter(type(c) for c in blocks) if isinstance(module, _LIST_TYPES) else Counter()
    for name, child in module.named_children():
        if child in blocks and class_counts[type(child)] > 1:
            yield prefix + name, child
        else:
            yield from _repeated_blocks(child, f"{prefix}{name}.")


def _modules_by_size(model: nn.Module, min_numel: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield, innermost first, each module with at least `min_numel` parameter elements outside of the units in it."""
    assigned: set[int] = set()
    for name, module in sorted(model.named_modules(), key=lambda pair: -pair[0].count(".") if pair[0] else 1):
        parameters = [p for p in module.parameters() if id(p) not in assigned]
        if name and _is_eligible(module) and sum(p.numel() for p in parameters) >= min_numel:
            assigned |= {id(p) for p in parameters}
            yield name, module


def _shared_parameters(model: nn.Module, units: dict[str, nn.Module]) -> set[int]:
    """Return the ids of parameters that belong to two units, or to a unit and to the model outside all units.

    A parameter of a nested unit belongs only to the innermost unit around it.
    """
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        enclosing_units = [u for u in units if name == u or name.startswith(f"{u}.") or module is units[u]]
        owner = max(enclosing_units, key=len, default="")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
    return {parameter_id for parameter_id, names in owners.items() if len(names) > 1}
