"""Choice of FSDP units, the modules whose parameters are gathered together, outermost last.

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

_CHAINS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True, kw_only=True)
class UnitChoice:
    """The rule that chooses units; by default the repeated blocks.

    `classes` are class names, `names` FQN patterns such as `layers.*`; with `min_numel`, the innermost modules with
    at least that many parameter elements are units.
    """

    classes: Sequence[str] = ()
    names: Sequence[str] = ()
    min_numel: int | None = None


def units_of(words: Sequence[str], *, model: nn.Module) -> UnitChoice:
    """Parse `place.units`: one number is a size, a module's class name is a class, other entries are name patterns.

    Raises:
        LayoutError: a number is given together with other words.
    """
    sizes = [word for word in words if word.isdigit()]
    if sizes and len(words) > 1:
        raise LayoutError(
            f"place.units={','.join(words)} mixes a size and names.",
            cause="units are given by a minimum number of elements, or by names",
            hint=f"--place.units {sizes[0]}, or the names",
        )
    known = {type(module).__name__ for module in model.modules()}
    classes = [word for word in words if word in known or not (set(word) & set(".*?[") or word[:1].islower())]
    names = [word for word in words if word not in classes and word not in sizes]
    return UnitChoice(classes=[] if sizes else classes, names=names, min_numel=int(sizes[0]) if sizes else None)


def find_units(model: nn.Module, *, by: UnitChoice) -> dict[str, nn.Module]:
    """Return the units by FQN, inner ones before those around them, without the model itself.

    A module that shares a parameter with a module outside it is no unit: its parameters belong to the root module.

    Raises:
        LayoutError: no module has a given name or class.
    """
    found = dict(_chosen(model, by))
    shared = _shared(model, found)
    kept = {name: module for name, module in found.items() if not (set(map(id, module.parameters())) & shared)}
    return dict(sorted(kept.items(), key=lambda pair: -pair[0].count(".")))


def _chosen(model: nn.Module, by: UnitChoice) -> Iterator[tuple[str, nn.Module]]:
    modules = [(n, m) for n, m in model.named_modules() if n and _can_be(m)]
    if by.classes or by.names:
        for wanted in by.classes:
            _check(wanted, [type(m).__name__ for _, m in modules], what="class")
        for pattern in by.names:
            if not any(fnmatchcase(name, pattern) for name, _ in modules):
                _check(pattern, [name for name, _ in modules], what="name")
        for name, module in modules:
            if type(module).__name__ in by.classes or any(fnmatchcase(name, pattern) for pattern in by.names):
                yield name, module
    elif by.min_numel is not None:
        yield from _by_size(model, by.min_numel)
    else:
        yield from _repeated(model, "")


def _can_be(module: nn.Module) -> bool:
    """Return whether a module can be a unit; a container can't, because it is never called and so never gathered."""
    return not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict) and any(
        True for _ in module.parameters()
    )


def _check(wanted: str, known: Sequence[str], *, what: str) -> None:
    if wanted not in known:
        some = ", ".join(sorted(set(known))[:8])
        raise LayoutError(
            f"no module with parameters has the {what} {wanted!r}.",
            cause=f"the model has {some}",
            hint="leave --place.units out: repeated blocks are found automatically",
        )


def _repeated(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the repeated blocks: children of a list that have submodules, and whose class occurs at least twice."""
    blocks = [c for c in module.children() if _can_be(c) and any(True for _ in c.children())]
    often = Counter(type(c) for c in blocks) if isinstance(module, _CHAINS) else Counter()
    for name, child in module.named_children():
        if child in blocks and often[type(child)] > 1:
            yield prefix + name, child
        else:
            yield from _repeated(child, f"{prefix}{name}.")


def _by_size(model: nn.Module, least: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield, innermost first, each module with at least `min_numel` parameter elements outside of inner units."""
    taken: set[int] = set()
    for name, module in sorted(model.named_modules(), key=lambda pair: -pair[0].count(".") if pair[0] else 1):
        own = [p for p in module.parameters() if id(p) not in taken]
        if name and _can_be(module) and sum(p.numel() for p in own) >= least:
            taken |= {id(p) for p in own}
            yield name, module


def _shared(model: nn.Module, units: dict[str, nn.Module]) -> set[int]:
    """Return ids of parameters used by two units, or inside and outside a unit; a nested unit counts as separate."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        inside = [u for u in units if name == u or name.startswith(f"{u}.") or module is units[u]]
        owner = max(inside, key=len, default="")
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(owner)
    return {parameter for parameter, found in owners.items() if len(found) > 1}
