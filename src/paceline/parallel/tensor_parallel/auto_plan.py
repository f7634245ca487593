"""Derive a tensor plan by running the model, and check a plan by comparing its results with those of one process."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.console.formatting import did_you_mean
from paceline.errors import JobError, LayoutError, PacelineError, raise_all, user_line
from paceline.parallel.module_access.model_copy import copy_model
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.parallel.tensor_parallel.auto_plan_search import (
    PlanSearchMode,
    WeightDecision,
    find_sharded_outputs,
    learn_from_all_gathers,
    reset_decisions,
    suggest_borders,
)
from paceline.parallel.tensor_parallel.collectives import WorldGroup
from paceline.parallel.tensor_parallel.hf_plan import read_model_plan
from paceline.parallel.tensor_parallel.plan_dry_run import PlanCheckGroup, ShardedParameterMode
from paceline.parallel.tensor_parallel.plan_toml import read_plan
from paceline.parallel.tensor_parallel.sharded_tensor import INSIDE_TRANSFORM, ShardPropagatingTensor
from paceline.parallel.tensor_parallel.tensor_parallel import split_model_in_group
from paceline.parallel.tensor_parallel.tensor_plan import (
    ParameterRole,
    TensorPlan,
    block_pattern,
    is_transposed,
    name_pattern,
    pattern_matches,
    resolve_plan,
)
from paceline.torch_internals.dispatch_modes import has_dispatch_mode

ModelRun = Callable[[nn.Module], Any]
LOCAL_MODULE_REASON = "its module runs on shards"
MIN_VOCABULARY = 1000  # an embedding without a head counts as a vocabulary if it has at least this many rows


def choose_plan(
    model: nn.Module,
    *,
    ranks: int,
    run: ModelRun | None = None,
    file: Path | None = None,
    replicate: Sequence[str] = (),
) -> TensorPlan:
    """Return the plan of the user's file, else a plan derived from a run, else the model's own plan.

    `run` calls the model on a small batch; if it is given, the plan is also checked with it. `replicate` has names or
    patterns of modules and parameters that are not sharded.

    Raises:
        LayoutError: there is no plan, or the plan does not fit the model.
        UsageError: the file is not a valid plan.
    """
    _refuse_unknown(model, replicate)
    if file is not None:
        plan = read_plan(file, model=model).with_replicated(replicate)
    elif run is not None:
        plan = derive_plan(model, run=run, ranks=ranks, replicate=replicate)
    if run is not None:
        check_plan_by_function(model, plan=plan, run=run, ranks=ranks)
    if file is not None or run is not None:
        return plan
    model_plan = read_model_plan(model, ranks=ranks)
    if model_plan is None:
        raise LayoutError(
            f"{type(model).__name__} has no tensor plan, and there is no batch to derive one from.",
            hint="pl.place(..., example=lambda model: model(x)), or a plan file: see docs/tensor.md",
        )
    return model_plan.with_replicated(replicate)


def derive_plan(model: nn.Module, *, run: ModelRun, ranks: int, replicate: Sequence[str] = ()) -> TensorPlan:
    """Derive a plan: find the weights that can be sharded over `ranks` ranks, by running the model.

    `run` calls the model on a small batch and returns the output, or the loss if there is one. The model does not
    change. The roles of `local` modules (experts) come from the model's own plan. `replicate` has names or patterns of
    modules and parameters that are not sharded.

    Raises:
        LayoutError: no weight can be sharded, or the number of heads is not divisible by `ranks`.
    """
    local_roles = {p: r for p, r in _local_roles(model, ranks).items() if not _matches_any(p, replicate)}
    fixed_decisions = {
        name: WeightDecision(kind="whole", reason="requested by place.replicate")
        for name, _ in model.named_parameters()
        if _matches_any(name, replicate)
    }
    for name, _ in model.named_parameters():
        if any(pattern_matches(f"{p}.**", name) or pattern_matches(p, name) for p in local_roles):
            fixed_decisions[name] = WeightDecision(kind="whole", reason=LOCAL_MODULE_REASON)
    decisions, search = _search_until_stable(model, run, ranks, fixed_decisions)
    _check_head_counts(decisions, ranks, search.group.heads)
    roles = {**_build_roles(model, decisions, search.group.heads), **local_roles}
    notes = [
        f"{pattern} stays whole: {decision.reason}"
        for pattern, decision in _decisions_by_pattern(decisions).items()
        if decision.kind == "whole" and decision.reason and decision.reason != LOCAL_MODULE_REASON
    ]
    if not roles:
        raise LayoutError(
            f"tensor parallelism finds nothing to split in {type(model).__name__}: {_layer_counts(model)}",
            cause=_transform_reason(decisions)
            or "; ".join(notes[:2])
            or "it splits a pair of matmuls with only elementwise operations or attention between them; "
            "convolutions stay whole",
            hint="--layout fsdp or ddp",
        )
    return TensorPlan(roles=roles, source="derived", notes=tuple(notes))


def _refuse_unknown(model: nn.Module, replicate: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in replicate:
        if not any(_matches_any(name, [pattern]) for name in names):
            modules = [name for name, _ in model.named_modules() if name]
            raise LayoutError(
                f"place.replicate names {pattern!r}, but this model has no module or parameter of that name.",
                cause=did_you_mean(pattern, [*modules, *names]) or f"the model has {', '.join(modules[:3])}, ...",
                hint="the names that model.named_modules() gives; * stands for one part between dots",
            )


def _local_roles(model: nn.Module, ranks: int) -> dict[str, ParameterRole]:
    """Return the roles of `local` modules and of their parameters from the model's own plan, if it has one."""
    try:
        model_plan = read_model_plan(model, ranks=ranks)
    except LayoutError:  # the model's plan has an unknown style: the roles are derived instead
        return {}
    if model_plan is None:
        return {}
    local = [p for p, r in model_plan.roles.items() if r.kind == "local"]
    return {p: r for p, r in model_plan.roles.items() if any(p == m or p.startswith(f"{m}.") for m in local)}


def _matches_any(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name == p or name.startswith(f"{p}.") or pattern_matches(p, name) or pattern_matches(f"{p}.**", name)
        for p in patterns
    )


def _search_until_stable(
    model: nn.Module, run: ModelRun, ranks: int, fixed_decisions: dict[str, WeightDecision]
) -> tuple[dict[str, WeightDecision], PlanSearchMode]:
    """Run the model until a run changes no decision; return the decisions and the mode of the last run."""
    names = {id(p): n for n, p in model.named_parameters()}
    similarity_keys: dict[str, tuple[object, ...]] = {
        n: (name_pattern(n), p.shape) for n, p in model.named_parameters() if p.dim() == 2
    }
    decisions, earlier_decisions = dict(fixed_decisions), list[dict[str, WeightDecision]]()
    max_runs = 12 + 2 * len(similarity_keys)
    while decisions not in earlier_decisions and len(earlier_decisions) < max_runs:
        earlier_decisions.append(copy.deepcopy(decisions))
        search = PlanSearchMode(names=names, decisions=decisions, ranks=ranks)
        with side_effect_free(model), torch.no_grad(), _report_as_planning_error(model, run), search:
            output = run(model)
        for tensor in find_sharded_outputs(output):
            search.record_consumer(tensor, "output")
        if not (learn_from_all_gathers(search, decisions) or _resolve_unconsumed(decisions, search, model)):
            return decisions, search
        reset_decisions(decisions)
        suggest_borders(decisions, similarity_keys)
    raise LayoutError(
        f"the tensor plan of {type(model).__name__} is not stable: each run finds different weights to split.",
        cause="the model's forward takes a different path each time",
        hint="write the plan: see docs/tensor.md",
    )


def _resolve_unconsumed(decisions: dict[str, WeightDecision], search: PlanSearchMode, model: nn.Module) -> bool:
    """Decide about column-parallel weights whose outputs no row-parallel matmul reads; return whether this changed one.

    Of these weights only a vocabulary head stays sharded; the others become whole. An embedding is
    sharded if a head has its size or, without a head, if its vocabulary is large.
    """
    changed = False
    shapes = {name: p.shape for name, p in model.named_parameters()}
    vocabulary_sizes = set(search.embeddings.values())
    head_sizes = set()
    for name, decision in list(decisions.items()):
        if decision.kind != "column" or len(shapes[name]) < 2 or decision.reason == "embedding":
            continue
        consumers = search.consumers.get(name, set())
        if consumers == {"output"} and (shapes[name][0] in vocabulary_sizes or shapes[name][0] >= MIN_VOCABULARY):
            decision.reason = "head"
            head_sizes.add(shapes[name][0])
        elif "row" not in consumers:
            decision.kind, decision.dim, decision.reason, changed = (
                "whole",
                None,
                "no later matmul can use its sharding",
                True,
            )
    for name, size in search.embeddings.items():
        is_new = name not in decisions or decisions[name].reason == "head"
        if is_new and size >= search.group.size and (size in head_sizes or (not head_sizes and size >= MIN_VOCABULARY)):
            decisions[name] = WeightDecision(kind="column", dim=0, reason="embedding")
            changed = True
    return changed


def _check_head_counts(decisions: dict[str, WeightDecision], ranks: int, heads: dict[str, int]) -> None:
    """Raise LayoutError if no projection of heads is sharded because the numbers of heads are not divisible by `ranks`.

    `heads` maps the names of weights to their numbers of heads. In a model such as Swin, stages have different numbers
    of heads. If some of these numbers are divisible, the projections of the other stages stay whole, and a note gives
    the reason.
    """
    has_sharded_projection = any(decisions[name].dim is not None for name in heads)
    problems: dict[str, PacelineError] = {}
    for name, decision in decisions.items():
        if decision.kind != "whole" or not decision.heads or decision.heads % ranks == 0:
            continue
        if has_sharded_projection:
            decision.reason = f"{decision.heads} heads are not divisible by tp={ranks}"
            continue
        module = name.rpartition(".")[0]
        parent = module.rpartition(".")[0]
        sharded_siblings = [
            n for n, d in decisions.items() if n.rpartition(".")[0].rpartition(".")[0] == parent and d.dim is not None
        ]
        if not sharded_siblings:
            nearest = next(n for n in range(ranks, 0, -1) if decision.heads % n == 0)
            problems[name_pattern(module)] = LayoutError(
                f"{module}: {decision.heads} heads are not divisible by tp={ranks}.",
                cause="each rank takes the same number of whole heads",
                hint=f"tp={nearest}, or keep it whole: --place.replicate '{name_pattern(module)}'",
            )
    raise_all(list(problems.values()))


def _build_roles(
    model: nn.Module, decisions: dict[str, WeightDecision], heads: dict[str, int]
) -> dict[str, ParameterRole]:
    """Return the role of each weight by the name of its module, and of other parameters by their own names.

    Numbered modules with equal roles are merged into one pattern.
    """
    owners = dict(model.named_modules())
    exact_roles: dict[str, ParameterRole | None] = {}
    for name, parameter in model.named_parameters():
        decision, (path, _, attribute) = decisions.get(name), name.rpartition(".")
        key = path if attribute == "weight" else name
        if parameter.dim() < 2:
            if decision is not None and decision.dim is not None and attribute != "bias":
                exact_roles[name] = ParameterRole(kind="column", sections=_sections(decision, parameter))
            continue
        exact_roles[key] = (
            None
            if decision is None or decision.dim is None
            else _build_role(decision, parameter, owners[path], heads.get(name))
        )
    return _merge_numbered_names(exact_roles)


def _sections(decision: WeightDecision, parameter: Tensor) -> tuple[int, ...]:
    """Return the sizes of the sections of a fused projection; empty for a single projection."""
    sections = decision.sections(parameter.shape[decision.dim or 0])
    return sections if len(sections) > 1 else ()


def _build_role(decision: WeightDecision, parameter: Tensor, owner: nn.Module, heads: int | None) -> ParameterRole:
    sections = _sections(decision, parameter)
    fused = len(sections) if len(set(sections)) == 1 else 1
    kind = decision.reason if decision.reason in ("head", "embedding") else decision.kind
    default_dim = 0 if kind in ("head", "embedding") else (0 if (kind == "column") != is_transposed(owner) else 1)
    return ParameterRole(
        kind=kind,  # type: ignore[arg-type]
        fused=fused,
        sections=() if fused > 1 else sections,
        heads=heads if decision.kind == "column" and kind == "column" else None,
        dim=None if decision.dim == default_dim else decision.dim,
    )


def _merge_numbered_names(exact_roles: dict[str, ParameterRole | None]) -> dict[str, ParameterRole]:
    """Replace numbers in names by `*` if all matching names have one role.

    For each name, replacing all numbers is tried first, then the first number only.
    """
    groups: dict[str, set[ParameterRole | None]] = {}
    for name, role in exact_roles.items():
        for pattern in (name_pattern(name), block_pattern(name)):
            groups.setdefault(pattern, set()).add(role)
    merged: dict[str, ParameterRole] = {}
    for name, role in exact_roles.items():
        if role is not None:
            patterns = (name_pattern(name), block_pattern(name))
            merged[next((p for p in patterns if len(groups[p]) == 1), name)] = role
    return merged


def _decisions_by_pattern(decisions: dict[str, WeightDecision]) -> dict[str, WeightDecision]:
    """Return the first decision of each group of names that differ only in numbers, by their common pattern."""
    return {name_pattern(name): decision for name, decision in reversed(decisions.items())}


def _transform_reason(decisions: dict[str, WeightDecision]) -> str:
    """Return a sentence about the weights that stay whole because of `torch.func`; "" if there are none."""
    names = [name for name, decision in decisions.items() if decision.reason.endswith(INSIDE_TRANSFORM)]
    return f"the output of {', '.join(names[:2])} is used{INSIDE_TRANSFORM}, and stays whole" if names else ""


def _layer_counts(model: nn.Module) -> str:
    class_names = [type(m).__name__ for m in model.modules()]
    convolutions = sum("Conv" in name and name != "Conv1D" for name in class_names)
    return (
        f"{class_names.count('Linear')} linear layers and {convolutions} convolutions, "
        "and none is in a pair that can be split."
    )


def check_plan_by_function(model: nn.Module, *, plan: TensorPlan, run: ModelRun, ranks: int) -> None:
    """Check a plan in one run: compute each function on sharded tensors on all ranks, and in one process.

    The check is skipped for a model with parameters on the meta device, and inside a dispatch mode, because then there
    are no values to compare.

    Raises:
        LayoutError: a result on a rank differs from that of one process; the message gives the line of the call.
    """
    has_no_memory = any(parameter.untyped_storage().device.type == "meta" for parameter in model.parameters())
    if has_no_memory or has_dispatch_mode():
        return
    shardings = resolve_plan(model, plan, ranks=ranks)
    ids = {
        id(parameter): shardings.by_name[name]
        for name, parameter in model.named_parameters()
        if name in shardings.by_name and not any(name.startswith(f"{module}.") for module in shardings.local_modules)
    }
    with (
        side_effect_free(model),
        torch.no_grad(),
        _report_as_planning_error(model, run),
        ShardedParameterMode(ids, PlanCheckGroup(size=ranks)),
    ):
        run(model)


@contextmanager
def _report_as_planning_error(model: nn.Module, run: ModelRun) -> Iterator[None]:
    """Convert an error of the user's code in the `with` body to a `LayoutError`.

    After such an error, run the model without sharding. If this run also fails, raise its error unchanged.
    """
    try:
        yield
    except PacelineError:
        raise
    except Exception as error:
        with side_effect_free(model), torch.no_grad():
            run(model)
        raise LayoutError(
            f"the model's own code fails while tp is being planned: {type(error).__name__}: {error}",
            where=str(user_line(error) or ""),
            cause="planning runs it on one microbatch, with the values of one process, but with split weights; "
            "the same run without splits succeeds",
            hint="--place.replicate NAME for the modules around that line, or a plan: see docs/tensor.md",
        ) from error


def check_plan(model: nn.Module, *, plan: TensorPlan, run: ModelRun, ranks: int, sequence: bool = False) -> float:
    """Compare the outputs of the full model with those of sharded copies, one per rank, as threads of this process.

    Return the largest relative difference.

    Raises:
        JobError: `run` returns a different output each time.
        LayoutError: an output differs by more than rounding.
    """

    def full_outputs(model: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            outputs = _float_tensors(run(model.eval()))
            return [t.full_tensor() if isinstance(t, ShardPropagatingTensor) else t for t in outputs]

    def run_rank(world: World) -> list[Tensor]:
        local_model = copy_model(model)
        split_model_in_group(local_model, plan=plan, group=WorldGroup(world, sequence=sequence))
        return full_outputs(local_model)

    with side_effect_free(model, parameters=False):
        expected, rerun = (full_outputs(copy_model(model)) for _ in range(2))
        if not all(
            _relative_difference(*pair) <= 4096 * torch.finfo(pair[1].dtype).eps
            for pair in zip(rerun, expected, strict=True)
        ):
            raise JobError(
                f"two calls of run with the same {type(model).__name__} return different outputs, so no plan can be "
                "checked.",
                cause="run makes a new batch each time, or the model draws random numbers in evaluation mode too",
                hint="make the batch once, outside run: batch = torch.randn(4, 16), run = lambda model: model(batch)",
            )
        rank_outputs = run_simulated_ranks(run_rank, ranks=ranks)
    largest_difference = 0.0
    for rank, outputs in enumerate(rank_outputs):
        for index, (output, reference) in enumerate(zip(outputs, expected, strict=True)):
            difference = _relative_difference(output, reference)
            largest_difference = max(largest_difference, difference)
            if not difference <= 4096 * torch.finfo(reference.dtype).eps:
                raise LayoutError(
                    f"the {plan.source} tensor plan changes output {index} of {type(model).__name__} on rank {rank} "
                    f"by {difference:.1e} of its largest value.",
                    hint="do not split the modules that compute it: --place.replicate NAME, and report this as a bug",
                )
    return largest_difference


def _relative_difference(output: Tensor, reference: Tensor) -> float:
    return (
        float((output - reference).abs().max() / reference.abs().max().clamp(min=1e-30)) if reference.numel() else 0.0
    )


def _float_tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for item in items for t in _float_tensors(item)]
