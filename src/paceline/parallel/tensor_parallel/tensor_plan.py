"""The tensor-parallel plan maps patterns of names to roles, which say how parameters are sharded."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor, nn

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError, PacelineError, raise_all
from paceline.parallel.tensor_parallel.sharding import DimSharding, shard_evenly

Kind = Literal["column", "row", "embedding", "head", "whole", "local"]
KINDS = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class ParameterRole:
    """The role of a module's parameters, or of one parameter.

    `column`: outputs are sharded. `row`: inputs are sharded. `embedding`, `head`: the vocabulary is sharded. `whole`:
    every rank holds the full parameter. `local`: the module's forward runs on the shards of its parameters, and its
    outputs are summed over the ranks (experts). A weight may concatenate several projections: `fused` is their number
    if their sizes are equal, else `sections` has their sizes. `heads` must be divisible by the number of ranks. `dim`
    is the sharded dimension if it differs from the role's default.
    """

    kind: Kind
    fused: int = 1
    sections: tuple[int, ...] = ()
    heads: int | None = None
    dim: int | None = None


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """The roles of modules and parameters, by name or pattern.

    `*` matches one name between dots, `**` any number of them. An exact name has precedence over a pattern. Parameters
    that match no pattern are not sharded. `source` describes the origin of the plan.
    """

    roles: Mapping[str, ParameterRole]
    source: str = "given"
    notes: tuple[str, ...] = field(default=())

    def find_role(self, name: str) -> ParameterRole | None:
        """Return the role of a module or a parameter.

        A role for a parameter's name has precedence over a role for its module.
        """
        for target in (name, name.rpartition(".")[0]):
            matches = [p for p in self.roles if p == target or pattern_matches(p, target)]
            if matches:
                return self.roles[max(matches, key=lambda p: (p == target, p.count("**") == 0, len(p)))]
        return None

    def with_replicated(self, patterns: Sequence[str]) -> "TensorPlan":
        """Return the plan with role `whole` (not sharded) for the parameters and modules that match a pattern."""
        roles = dict(self.roles)
        for pattern in patterns:
            roles[pattern] = roles[f"{pattern}.**"] = ParameterRole(kind="whole")
            for name in self.roles:
                if name == pattern or pattern_matches(pattern, name) or pattern_matches(f"{pattern}.**", name):
                    roles[name] = ParameterRole(kind="whole")
        return TensorPlan(roles=roles, source=self.source, notes=self.notes)


def pattern_matches(pattern: str, name: str) -> bool:
    """Return whether a pattern matches the name of a module or parameter."""
    wildcards = {"**": ".*", "*": "[^.]*"}
    parts = re.split(r"(\*\*|\*)", pattern)
    return re.fullmatch("".join(wildcards.get(p) or re.escape(p) for p in parts), name) is not None


@dataclass(frozen=True, kw_only=True)
class ParameterShardings:
    """A plan resolved for a model: the sharding of each parameter, by each of its names, and the `local` modules."""

    by_name: Mapping[str, DimSharding]
    local_modules: tuple[str, ...]


def resolve_plan(model: nn.Module, plan: TensorPlan, *, ranks: int) -> ParameterShardings:
    """Resolve a plan for this model.

    Raises:
        LayoutError: the plan does not fit the model: the number of heads is not divisible, a tied weight has two roles,
            a dtype cannot be sharded, or a pattern matches nothing. Several errors are raised together as `Problems`.
    """
    problems: list[PacelineError] = []
    shardings: dict[str, DimSharding] = {}
    first_uses: dict[int, tuple[str, DimSharding | None]] = {}
    local_modules = tuple(
        n for n, _ in model.named_modules() if (r := plan.roles.get(_best_pattern(plan, n))) and r.kind == "local"
    )
    for name, parameter, owner in _parameters(model):
        role = plan.find_role(name)
        if role is None or role.kind == "local":
            continue
        try:
            is_local = any(name.startswith(f"{module}.") for module in local_modules)
            sharding = _shard_parameter(name, parameter, owner, role, ranks, for_grouped_matmul=is_local)
            _check_tied(name, parameter, sharding, role, first_uses)
        except PacelineError as error:
            problems.append(error)
            continue
        if sharding is not None:
            shardings[name] = sharding
    _copy_to_tied_names(model, shardings)
    problems = [
        *_deduplicate(problems),
        *unknown_names(model, plan.roles),
        *_unsharded_local_parameters(model, local_modules, shardings),
    ]
    raise_all(problems)
    return ParameterShardings(by_name=shardings, local_modules=local_modules)


def _deduplicate(problems: list[PacelineError]) -> Iterator[PacelineError]:
    """Yield the first of several problems that differ only in numbers, as for the same weight in every block."""
    seen_messages: set[str] = set()
    for problem in problems:
        normalized = re.sub(r"\d+", "*", problem.what)
        if normalized not in seen_messages:
            yield problem
        seen_messages.add(normalized)


def _best_pattern(plan: TensorPlan, name: str) -> str:
    """Return the exact name or the longest pattern of the plan that matches a module's name; "" if none matches."""
    matches = [p for p in plan.roles if p == name or pattern_matches(p, name)]
    return max(matches, key=lambda p: (p == name, len(p)), default="")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, nn.Module]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            yield f"{prefix}.{name}" if prefix else name, parameter, module


def is_transposed(module: nn.Module) -> bool:
    """Return whether a module stores its weight as (inputs, outputs), as Conv1D of Hugging Face does."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def sharded_dim(parameter: Tensor, owner: nn.Module, role: ParameterRole) -> int | None:
    """Return the dimension that a role shards, or None if the parameter is not sharded."""
    if role.kind == "whole":
        return None
    if role.dim is not None and parameter.dim() > 1:
        return role.dim
    if parameter.dim() < 2:
        return 0 if role.kind in ("column", "head") and parameter.dim() == 1 else None
    if role.kind in ("embedding", "head"):
        return 0
    is_output_dim = (role.kind == "column") != is_transposed(owner)
    return parameter.dim() - (2 if is_output_dim else 1)


def _shard_parameter(
    name: str, parameter: Tensor, owner: nn.Module, role: ParameterRole, ranks: int, *, for_grouped_matmul: bool
) -> DimSharding | None:
    """Return the sharding of one parameter by its role, or None if it is not sharded.

    With `for_grouped_matmul` (experts), the sizes of shards are multiples of 16 bytes if possible, as torch requires.
    """
    dim = sharded_dim(parameter, owner, role)
    if dim is None:
        return None
    if not parameter.is_floating_point() or parameter.element_size() < 2:
        raise LayoutError(
            f"{name} holds {str(parameter.dtype).removeprefix('torch.')}: a quantised or "
            "integer weight can't be split.",
            cause="the partial sums of a split weight need floating point",
            hint=f"keep it whole: --place.replicate {name}",
        )
    size = parameter.shape[dim]
    if role.heads is not None and role.heads % ranks:
        raise LayoutError(
            f"{name}: {role.heads} heads are not divisible by tp={ranks}.",
            cause="each rank takes the same number of whole heads",
            hint=f"tp={_nearest_divisor(role.heads, ranks)}, or keep it whole: "
            f"--place.replicate {name.rpartition('.')[0]}",
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
            f"{name}: size {min(sections)} along dimension {dim} is too small for tp={ranks}.",
            hint=f"a smaller tp, or keep it whole: --place.replicate {name.rpartition('.')[0]}",
        )
    unit = 16 // parameter.element_size() if for_grouped_matmul else 1
    fits_unit = all(n % unit == 0 and n // unit >= ranks for n in sections)
    return shard_evenly(size, ranks=ranks, sections=sections, dim=dim, unit=unit if fits_unit else 1)


def _nearest_divisor(heads: int, ranks: int) -> int:
    """Return the largest divisor of `heads` that is at most `ranks`."""
    return next(n for n in range(ranks, 0, -1) if heads % n == 0)


def _check_tied(
    name: str,
    parameter: nn.Parameter,
    sharding: DimSharding | None,
    role: ParameterRole,
    first_uses: dict[int, tuple[str, DimSharding | None]],
) -> None:
    """Raise LayoutError if a tied parameter has another sharding under its first name.

    `first_uses` maps the id of a parameter to its first name and sharding; this function adds to it.
    """
    other_name, other_sharding = first_uses.setdefault(id(parameter), (name, sharding))
    if other_sharding != sharding:
        raise LayoutError(
            f"{name} and {other_name} are one weight in two roles, which split it differently.",
            cause="they are tied: one tensor, which can be split in only one way",
            hint="the same role for both, or 'whole' for both",
        )


def _copy_to_tied_names(model: nn.Module, shardings: dict[str, DimSharding]) -> None:
    """Add the sharding of each tied parameter under all its names."""
    by_id = {id(p): shardings[n] for n, p, _ in _parameters(model) if n in shardings}
    for name, parameter, _ in _parameters(model):
        if id(parameter) in by_id:
            shardings[name] = by_id[id(parameter)]


def unknown_names(model: nn.Module, roles: Mapping[str, object]) -> list[PacelineError]:
    """Return an error for each pattern that matches nothing in the model, except for roles of kind `whole`."""
    names = [n for n, _ in model.named_modules(remove_duplicate=False)] + [n for n, _, _ in _parameters(model)]
    return [
        LayoutError(
            f"the tensor plan names {pattern!r}, but no module or parameter of this model has that name.",
            cause=did_you_mean(pattern, map(name_pattern, names)) or f"the model has {', '.join(names[1:4])}, ...",
            hint="the names that model.named_modules() gives; * stands for one part between dots",
        )
        for pattern, role in roles.items()
        if getattr(role, "kind", role) != "whole"
        and pattern not in names
        and not any(pattern_matches(pattern, name) for name in names)
    ]


def _unsharded_local_parameters(
    model: nn.Module, local_modules: Sequence[str], shardings: Mapping[str, DimSharding]
) -> list[PacelineError]:
    """Return an error for each parameter of a `local` module that is not sharded."""
    problems: list[PacelineError] = []
    for name in local_modules:
        for key, _ in model.get_submodule(name).named_parameters():
            if f"{name}.{key}" not in shardings:
                problems.append(
                    LayoutError(
                        f"{name}.{key} is whole in a module that runs on shards (role local): the sum over the ranks "
                        "would count it once per rank.",
                        hint=f"keep the module whole: --place.replicate {name}",
                    )
                )
    return problems


def name_pattern(name: str) -> str:
    """Return the name with every number replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def block_pattern(name: str) -> str:
    """Return the name with its first number, the index of a block, replaced by `*`."""
    parts = name.split(".")
    position = next((n for n, part in enumerate(parts) if part.isdigit()), None)
    return name if position is None else ".".join([*parts[:position], "*", *parts[position + 1 :]])
