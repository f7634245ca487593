"""The tensor-parallel plan: a readable mapping of name patterns to roles, which say how parameters are sharded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor, nn

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError, PacelineError, raise_all
from paceline.parallel.tensor_parallel.sharding import DimSharding, even_cut

Kind = Literal["column", "row", "embedding", "head", "whole", "local"]
KINDS = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class ParameterRole:
    """The role of a module's parameters, or of one parameter.

    `column`: outputs are sharded. `row`: inputs are sharded. `embedding`, `head`: the vocabulary is sharded. `whole`:
    every rank holds it. `local`: the module's own forward runs on the shards of its parameters, and its outputs are
    summed (experts). A weight may concatenate `fused` equal projections, or `sections` of these sizes; `heads` must
    divide by the number of ranks; `dim` is the sharded dimension if the role alone does not determine it.
    """

    kind: Kind
    fused: int = 1
    sections: tuple[int, ...] = ()
    heads: int | None = None
    dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """Roles by pattern: `*` matches one name between dots, `**` any number; an exact name wins over a pattern.

    Parameters that match no pattern stay whole. `source` says where the plan comes from.
    """

    roles: Mapping[str, ParameterRole]
    source: str = "given"
    notes: tuple[str, ...] = field(default=())

    def role_of(self, name: str) -> ParameterRole | None:
        """Return the role of a module, or of a parameter (by its own name, or by that of its module)."""
        for target in (name, name.rpartition(".")[0]):
            found = [p for p in self.roles if p == target or pattern_matches(p, target)]
            if found:
                return self.roles[max(found, key=lambda p: (p == target, p.count("**") == 0, len(p)))]
        return None

    def without(self, patterns: Sequence[str]) -> "TensorPlan":
        """Return the plan with everything that these patterns name (modules and all below them) kept whole."""
        kept = dict(self.roles)
        for pattern in patterns:
            kept[pattern] = kept[f"{pattern}.**"] = ParameterRole(kind="whole")
            for known in self.roles:
                if known == pattern or pattern_matches(pattern, known) or pattern_matches(f"{pattern}.**", known):
                    kept[known] = ParameterRole(kind="whole")
        return TensorPlan(roles=kept, source=self.source, notes=self.notes)


def pattern_matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a module or parameter."""
    words = {"**": ".*", "*": "[^.]*"}
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.fullmatch("".join(words.get(p) or re.escape(p) for p in parts), name) is not None


@dataclass(frozen=True, kw_only=True)
class ParameterCuts:
    """A plan resolved for a model: each sharded parameter's sharding, under each of its names, and local modules."""

    of: Mapping[str, DimSharding]
    local: tuple[str, ...]


def cuts_of(model: nn.Module, plan: TensorPlan, *, ranks: int) -> ParameterCuts:
    """Resolve a plan for this model.

    Raises:
        LayoutError: names the parameter and the reason: heads that do not divide, one weight in two roles, a type that
            cannot be sharded, a pattern that matches nothing. Several at once are raised as `Problems`.
    """
    problems: list[PacelineError] = []
    found: dict[str, DimSharding] = {}
    given: dict[int, tuple[str, DimSharding | None]] = {}
    local = tuple(n for n, _ in model.named_modules() if (r := plan.roles.get(_pattern(plan, n))) and r.kind == "local")
    for name, parameter, owner in _parameters(model):
        role = plan.role_of(name)
        if role is None or role.kind == "local":
            continue
        try:
            is_local = any(name.startswith(f"{module}.") for module in local)
            cut = _cut(name, parameter, owner, role, ranks, grouped=is_local)
            _agree(name, parameter, cut, role, given)
        except PacelineError as error:
            problems.append(error)
            continue
        if cut is not None:
            found[name] = cut
    _follow_ties(model, found)
    problems = [*_each_once(problems), *unknown_names(model, plan.roles), *_not_cut(model, local, found)]
    raise_all(problems)
    return ParameterCuts(of=found, local=local)


def _each_once(problems: list[PacelineError]) -> Iterator[PacelineError]:
    """Yield each problem once: a problem with the same weight of every block is reported for the first block."""
    known: set[str] = set()
    for problem in problems:
        alike = re.sub(r"\d+", "*", problem.what)
        if alike not in known:
            yield problem
        known.add(alike)


def _pattern(plan: TensorPlan, name: str) -> str:
    found = [p for p in plan.roles if p == name or pattern_matches(p, name)]
    return max(found, key=lambda p: (p == name, len(p)), default="")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, module


def is_turned(module: nn.Module) -> bool:
    """Return whether a module stores its weight as (inputs, outputs), as Hugging Face's Conv1D does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def cut_dim(parameter: Tensor, owner: nn.Module, role: ParameterRole) -> int | None:
    """Return the dimension that a role shards, or None if the parameter stays whole."""
    if role.kind == "whole":
        return None
    if role.dim is not None and parameter.dim() > 1:
        return role.dim
    if parameter.dim() < 2:
        return 0 if role.kind in ("column", "head") and parameter.dim() == 1 else None
    if role.kind in ("embedding", "head"):
        return 0
    outputs = (role.kind == "column") != is_turned(owner)
    return parameter.dim() - (2 if outputs else 1)


def _cut(
    name: str, parameter: Tensor, owner: nn.Module, role: ParameterRole, ranks: int, *, grouped: bool
) -> DimSharding | None:
    """Return the sharding of one parameter by its role, None if it stays whole.

    With `grouped` the pieces are multiples of 16 bytes where possible, as torch's grouped matmul requires.
    """
    dim = cut_dim(parameter, owner, role)
    if dim is None:
        return None
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        raise LayoutError(
            f"{name} holds {str(parameter.dtype).removeprefix('torch.')}: a quantised or "
            "integer weight can't be split.",
            cause="sums over pieces need floating point",
            hint=f"keep it whole: --place.replicate {name}",
        )
    size = parameter.shape[dim]
    if role.heads is not None and role.heads % ranks:
        raise LayoutError(
            f"{name}: {role.heads} heads do not divide by tp={ranks}.",
            cause="each rank takes the same number of whole heads",
            hint=f"tp={_nearest(role.heads, ranks)}, or keep it whole: --place.replicate {name.rpartition('.')[0]}",
        )
    sections = role.sections or (size // role.fused,) * role.fused
    if sum(sections) != size:
        raise LayoutError(
            f"{name} has {size} along dimension {dim}, but its role has {list(sections)}.",
            cause="sections (or fused) describe concatenated parts of one weight, and must cover all of it",
            hint=f"sections that add up to {size}, or no sections",
        )
    if min(sections) < ranks:
        raise LayoutError(
            f"{name}: {min(sections)} along dimension {dim} are too few for tp={ranks}.",
            hint=f"a smaller tp, or keep it whole: --place.replicate {name.rpartition('.')[0]}",
        )
    unit = 16 // parameter.element_size() if grouped else 1
    fits_unit = all(n % unit == 0 and n // unit >= ranks for n in sections)
    return even_cut(size, ranks=ranks, sections=sections, dim=dim, unit=unit if fits_unit else 1)


def _nearest(heads: int, ranks: int) -> int:
    return next(n for n in range(ranks, 0, -1) if heads % n == 0)


def _agree(
    name: str,
    parameter: nn.Parameter,
    cut: DimSharding | None,
    role: ParameterRole,
    given: dict[int, tuple[str, DimSharding | None]],
) -> None:
    other, known = given.setdefault(id(parameter), (name, cut))
    if known != cut:
        raise LayoutError(
            f"{name} and {other} are one weight in two roles: {role.kind} splits it differently.",
            cause="they are tied: one tensor, which can be split in only one way",
            hint="the same role for both, or 'whole' for both",
        )


def _follow_ties(model: nn.Module, found: dict[str, DimSharding]) -> None:
    by_id = {id(p): found[n] for n, p, _ in _parameters(model) if n in found}
    for name, parameter, _ in _parameters(model):
        if id(parameter) in by_id:
            found[name] = by_id[id(parameter)]


def unknown_names(model: nn.Module, roles: Mapping[str, object]) -> list[PacelineError]:
    """Return an error for each pattern that matches nothing in the model; roles of kind `whole` may match nothing."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)] + [n for n, _, _ in _parameters(model)]
    return [
        LayoutError(
            f"the tensor plan names {pattern!r}, but no module or parameter of this model has that name.",
            cause=did_you_mean(pattern, map(name_pattern, names)) or f"the model has {', '.join(names[1:4])}, ...",
            hint="the names that model.named_modules() gives; * is one name between dots",
        )
        for pattern, role in roles.items()
        if getattr(role, "kind", role) != "whole"
        and pattern not in names
        and not any(pattern_matches(pattern, name) for name in names)
    ]


def _not_cut(model: nn.Module, local: Sequence[str], found: Mapping[str, DimSharding]) -> list[PacelineError]:
    problems: list[PacelineError] = []
    for name in local:
        for own, _ in model.get_submodule(name).named_parameters():
            if f"{name}.{own}" not in found:
                problems.append(
                    LayoutError(
                        f"{name}.{own} is whole in a module that runs on pieces: the sum would count it once per rank.",
                        hint=f"keep the module whole: --place.replicate {name}",
                    )
                )
    return problems


def name_pattern(name: str) -> str:
    """Return the pattern of a name: every number becomes `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def first_number(name: str) -> str:
    """Return the pattern of a name: its first number, a block's index, becomes `*`."""
    parts = name.split(".")
    at = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return name if at is None else ".".join([*parts[:at], "*", *parts[at + 1 :]])
