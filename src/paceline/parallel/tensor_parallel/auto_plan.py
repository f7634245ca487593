"""Derivation of a tensor plan from one run of a model that brings none, and a check of the plan against one process."""

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
    forget_guesses,
    learn_from_blocked,
    splits_of,
    suggest_for_all_blocks,
)
from paceline.parallel.tensor_parallel.collectives import WorldWire
from paceline.parallel.tensor_parallel.hf_plan import own_plan
from paceline.parallel.tensor_parallel.plan_dry_run import CheckWire, ShownCuts
from paceline.parallel.tensor_parallel.plan_toml import read_plan
from paceline.parallel.tensor_parallel.sharded_tensor import TRANSFORM, ShardPropagatingTensor
from paceline.parallel.tensor_parallel.tensor_parallel import split_over
from paceline.parallel.tensor_parallel.tensor_plan import (
    ParameterRole,
    TensorPlan,
    cuts_of,
    first_number,
    is_turned,
    name_pattern,
    pattern_matches,
)
from paceline.torch_internals.dispatch_modes import has_dispatch_mode

Run = Callable[[nn.Module], Any]
IN_LOCAL = "its module runs on pieces"
LARGE = 1000  # an embedding without a head is a vocabulary from this number of rows


def choose_plan(
    model: nn.Module,
    *,
    ranks: int,
    run: Run | None = None,
    file: Path | None = None,
    replicate: Sequence[str] = (),
) -> TensorPlan:
    """Return the plan of the user's file, else one derived from a run, else the model's own.

    Raises:
        LayoutError: there is none of these, or `derive_plan` raised it. UsageError: `read_plan` raised it.
    """
    _refuse_unknown(model, replicate)
    if file is not None:
        plan = read_plan(file, model=model).without(replicate)
    elif run is not None:
        plan = derive_plan(model, run=run, ranks=ranks, replicate=replicate)
    if run is not None:
        hold_plan(model, plan=plan, run=run, ranks=ranks)
    if file is not None or run is not None:
        return plan
    own = own_plan(model, ranks=ranks)
    if own is None:
        raise LayoutError(
            f"{type(model).__name__} has no tensor plan, and there is no batch to derive one from.",
            hint="pl.place(..., example=lambda model: model(x)), or a plan file: see docs/tensor.md",
        )
    return own.without(replicate)


def derive_plan(model: nn.Module, *, run: Run, ranks: int, replicate: Sequence[str] = ()) -> TensorPlan:
    """Find the weights that `ranks` ranks can shard, by running the model.

    `run` calls the model on a small batch and returns its output (or its loss, if it is available). The model is left
    unchanged. Modules that the model's own plan runs on shards (experts) are taken from that plan; `replicate` names
    modules or parameters that stay whole.

    Raises:
        LayoutError: nothing can be sharded, or heads do not divide; the message names them.
    """
    local = {p: r for p, r in _own_local(model, ranks).items() if not _asked(p, replicate)}
    fixed = {
        name: WeightDecision(kind="whole", why="asked")
        for name, _ in model.named_parameters()
        if _asked(name, replicate)
    }
    for name, _ in model.named_parameters():
        if any(pattern_matches(f"{p}.**", name) or pattern_matches(p, name) for p in local):
            fixed[name] = WeightDecision(kind="whole", why=IN_LOCAL)
    found, explorer = _explored(model, run, ranks, fixed)
    _refuse_heads(found, ranks, explorer.wire.heads)
    roles = {**_roles(model, found, explorer.wire.heads), **local}
    notes = [
        f"{n} stays whole: {f.why}"
        for n, f in _by_pattern(found).items()
        if f.kind == "whole" and f.why and f.why != IN_LOCAL
    ]
    if not roles:
        raise LayoutError(
            f"tensor parallelism finds nothing to split in {type(model).__name__}: {_linears(model)}",
            cause=_by_transforms(found)
            or "; ".join(notes[:2])
            or "it splits pairs of matmuls with elementwise operations or attention between them; "
            "convolutions stay whole",
            hint="--layout fsdp or ddp",
        )
    return TensorPlan(roles=roles, source="derived", notes=tuple(notes))


def _refuse_unknown(model: nn.Module, replicate: Sequence[str]) -> None:
    names = [name for name, _ in model.named_parameters()]
    for pattern in replicate:
        if not any(_asked(name, [pattern]) for name in names):
            modules = [name for name, _ in model.named_modules() if name]
            raise LayoutError(
                f"place.replicate names {pattern!r}, but this model has no module or parameter of that name.",
                cause=did_you_mean(pattern, [*modules, *names]) or f"the model has {', '.join(modules[:3])}, ...",
                hint="the names that model.named_modules() gives; * is one name between dots",
            )


def _own_local(model: nn.Module, ranks: int) -> dict[str, ParameterRole]:
    try:
        own = own_plan(model, ranks=ranks)
    except LayoutError:  # an unknown style: the role of its modules can be derived
        return {}
    if own is None:
        return {}
    local = [p for p, r in own.roles.items() if r.kind == "local"]
    return {p: r for p, r in own.roles.items() if any(p == m or p.startswith(f"{m}.") for m in local)}


def _asked(name: str, patterns: Sequence[str]) -> bool:
    return any(
        name == p or name.startswith(f"{p}.") or pattern_matches(p, name) or pattern_matches(f"{p}.**", name)
        for p in patterns
    )


def _explored(
    model: nn.Module, run: Run, ranks: int, fixed: dict[str, WeightDecision]
) -> tuple[dict[str, WeightDecision], PlanSearchMode]:
    names = {id(p): n for n, p in model.named_parameters()}
    likes: dict[str, tuple[object, ...]] = {
        n: (name_pattern(n), p.shape) for n, p in model.named_parameters() if p.dim() == 2
    }
    found, before = dict(fixed), list[dict[str, WeightDecision]]()
    while found not in before and len(before) < 12 + 2 * len(likes):
        before.append(copy.deepcopy(found))
        explorer = PlanSearchMode(names=names, found=found, ranks=ranks)
        with side_effect_free(model), torch.no_grad(), _said_as_planning(model, run), explorer:
            output = run(model)
        for split in splits_of(output):
            explorer.reached(split, "output")
        if not (learn_from_blocked(explorer, found) or _settle_ends(found, explorer, model)):
            return found, explorer
        forget_guesses(found)
        suggest_for_all_blocks(found, likes)
    raise LayoutError(
        f"the tensor plan of {type(model).__name__} is not stable: what can be split differs from run to run.",
        cause="the model's forward takes a different path each time",
        hint="write the plan: see docs/tensor.md",
    )


def _settle_ends(found: dict[str, WeightDecision], explorer: PlanSearchMode, model: nn.Module) -> bool:
    """Keep whole every column weight that no row weight follows, except a vocabulary head; shard its embedding too."""
    changed = False
    shapes = {name: p.shape for name, p in model.named_parameters()}
    rows = set(explorer.embeddings.values())
    heads = set()
    for name, known in list(found.items()):
        if known.kind != "column" or len(shapes[name]) < 2 or known.why == "embedding":
            continue
        ends = explorer.consumed.get(name, set())
        if ends == {"output"} and (shapes[name][0] in rows or shapes[name][0] >= LARGE):
            known.why = "head"
            heads.add(shapes[name][0])
        elif "row" not in ends:
            known.kind, known.dim, known.why, changed = "whole", None, "nothing after it can use the split", True
    for name, size in explorer.embeddings.items():
        is_new = name not in found or found[name].why == "head"
        if is_new and size >= explorer.wire.size and (size in heads or (not heads and size >= LARGE)):
            found[name] = WeightDecision(kind="column", dim=0, why="embedding")
            changed = True
    return changed


def _refuse_heads(found: dict[str, WeightDecision], ranks: int, heads: dict[str, int]) -> None:
    """Raise if a projection's heads do not divide by `ranks` and no sibling projection is sharded.

    If stages have different numbers of heads, as in Swin, and those of one divide, the others stay whole with a note.
    """
    others = any(found[name].dim is not None for name in heads)
    problems: dict[str, PacelineError] = {}
    for name, known in found.items():
        if known.kind != "whole" or not known.heads or known.heads % ranks == 0:
            continue
        if others:
            known.why = f"{known.heads} heads do not divide by tp={ranks}"
            continue
        module = name.rpartition(".")[0]
        parent = module.rpartition(".")[0]
        beside = [
            n for n, f in found.items() if n.rpartition(".")[0].rpartition(".")[0] == parent and f.dim is not None
        ]
        if not beside:
            nearest = next(n for n in range(ranks, 0, -1) if known.heads % n == 0)
            problems[name_pattern(module)] = LayoutError(
                f"{module}: {known.heads} heads do not divide by tp={ranks}.",
                cause="each rank takes the same number of whole heads",
                hint=f"tp={nearest}, or keep it whole: --place.replicate '{name_pattern(module)}'",
            )
    raise_all(list(problems.values()))


def _roles(model: nn.Module, found: dict[str, WeightDecision], heads: dict[str, int]) -> dict[str, ParameterRole]:
    """Return the roles by module for weights, else by parameter name.

    Numbered modules with equal roles are merged into one pattern.
    """
    owners = dict(model.named_modules())
    exact: dict[str, ParameterRole | None] = {}
    for name, parameter in model.named_parameters():
        known, (path, _, own) = found.get(name), name.rpartition(".")
        key = path if own == "weight" else name
        if parameter.dim() < 2:
            if known is not None and known.dim is not None and own != "bias":
                exact[name] = ParameterRole(kind="column", sections=_sections(known, parameter))
            continue
        exact[key] = (
            None if known is None or known.dim is None else _role(known, parameter, owners[path], heads.get(name))
        )
    return _compressed(exact)


def _sections(known: WeightDecision, parameter: Tensor) -> tuple[int, ...]:
    sections = known.sections(parameter.shape[known.dim or 0])
    return sections if len(sections) > 1 else ()


def _role(known: WeightDecision, parameter: Tensor, owner: nn.Module, heads: int | None) -> ParameterRole:
    sections = _sections(known, parameter)
    fused = len(sections) if len(set(sections)) == 1 else 1
    kind = known.why if known.why in ("head", "embedding") else known.kind
    usual = 0 if kind in ("head", "embedding") else (0 if (kind == "column") != is_turned(owner) else 1)
    return ParameterRole(
        kind=kind,  # type: ignore[arg-type]
        fused=fused,
        sections=() if fused > 1 else sections,
        heads=heads if known.kind == "column" and kind == "column" else None,
        dim=None if known.dim == usual else known.dim,
    )


def _compressed(exact: dict[str, ParameterRole | None]) -> dict[str, ParameterRole]:
    """Replace numbers in names by `*` where all matching names share one role.

    Tried in this order: all numbers, the first number, the name itself.
    """
    groups: dict[str, set[ParameterRole | None]] = {}
    for name, role in exact.items():
        for pattern in (name_pattern(name), first_number(name)):
            groups.setdefault(pattern, set()).add(role)
    found: dict[str, ParameterRole] = {}
    for name, role in exact.items():
        if role is not None:
            patterns = (name_pattern(name), first_number(name))
            found[next((p for p in patterns if len(groups[p]) == 1), name)] = role
    return found


def _by_pattern(found: dict[str, WeightDecision]) -> dict[str, WeightDecision]:
    return {name_pattern(name): known for name, known in reversed(found.items())}


def _by_transforms(found: dict[str, WeightDecision]) -> str:
    names = [name for name, known in found.items() if known.why.endswith(TRANSFORM)]
    return f"the output of {', '.join(names[:2])} is used{TRANSFORM}, and stays whole" if names else ""


def _linears(model: nn.Module) -> str:
    kinds = [type(m).__name__ for m in model.modules()]
    convolutions = sum("Conv" in kind and kind != "Conv1D" for kind in kinds)
    return (
        f"{sum(kind == 'Linear' for kind in kinds)} linear layers and {convolutions} convolutions, none in such a pair."
    )


def hold_plan(model: nn.Module, *, plan: TensorPlan, run: Run, ranks: int) -> None:
    """Check a plan in one run: each function on sharded tensors is computed by all ranks and by one process.

    It takes the time of one forward plus that of the threads. The check is skipped for a model with parameters on the
    meta device, and inside a dispatch mode, which computes no numbers.

    Raises:
        LayoutError: a rank's value differs from one process's; the message gives the line that calls the function.
    """
    has_no_memory = any(parameter.untyped_storage().device.type == "meta" for parameter in model.parameters())
    if has_no_memory or has_dispatch_mode():
        return
    cuts = cuts_of(model, plan, ranks=ranks)
    ids = {
        id(parameter): cuts.of[name]
        for name, parameter in model.named_parameters()
        if name in cuts.of and not any(name.startswith(f"{module}.") for module in cuts.local)
    }
    with side_effect_free(model), torch.no_grad(), _said_as_planning(model, run), ShownCuts(ids, CheckWire(size=ranks)):
        run(model)


@contextmanager
def _said_as_planning(model: nn.Module, run: Run) -> Iterator[None]:
    """Re-raise errors of the user's code: unchanged if one process raises them too, else as errors of tp planning."""
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


def check_plan(model: nn.Module, *, plan: TensorPlan, run: Run, ranks: int, sequence: bool = False) -> float:
    """Run a plan on copies, with all ranks as threads of this process, and compare it with the whole model.

    Returns the largest relative difference of the outputs.

    Raises:
        JobError: `run` returns a different output each time. LayoutError: an output differs by more than rounding.
    """

    def alone(subject: nn.Module) -> list[Tensor]:
        with torch.no_grad():
            return [t.gathered() if isinstance(t, ShardPropagatingTensor) else t for t in _floats(run(subject.eval()))]

    def work(world: World) -> list[Tensor]:
        mine = copy_model(model)
        split_over(mine, plan=plan, wire=WorldWire(world, sequence=sequence))
        return alone(mine)

    with side_effect_free(model, parameters=False):
        expected, again = (alone(copy_model(model)) for _ in range(2))
        if not all(
            _apart(*pair) <= 4096 * torch.finfo(pair[1].dtype).eps for pair in zip(again, expected, strict=True)
        ):
            raise JobError(
                f"run gives different outputs of the whole {type(model).__name__} each time, so "
                "no plan can be checked.",
                cause="it makes a new batch each time, or the model draws random numbers in evaluation mode too",
                hint="make the batch once, outside of it: batch = torch.randn(4, 16), run = lambda model: model(batch)",
            )
        found = run_simulated_ranks(work, ranks=ranks)
    worst = 0.0
    for rank, outputs in enumerate(found):
        for number, (mine, whole) in enumerate(zip(outputs, expected, strict=True)):
            apart = _apart(mine, whole)
            worst = max(worst, apart)
            if not apart <= 4096 * torch.finfo(whole.dtype).eps:
                raise LayoutError(
                    f"the {plan.source} tensor plan changes output {number} of {type(model).__name__} on rank {rank} "
                    f"by {apart:.1e} of its size.",
                    hint="keep the modules behind it whole: --place.replicate NAME, and report this as a bug",
                )
    return worst


def _apart(mine: Tensor, whole: Tensor) -> float:
    return float((mine - whole).abs().max() / whole.abs().max().clamp(min=1e-30)) if whole.numel() else 0.0


def _floats(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [t for v in inner for t in _floats(v)]
