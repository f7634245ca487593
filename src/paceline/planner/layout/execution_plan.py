"""The execution plan: ranks, replicas, microbatches, backend and threads, each with a line that says why."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config.compression import Compression, parse_compress
from paceline.config.layout import Layout, LayoutKind
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.console.formatting import plural
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.planner.layout.axis_products import check_axis_products
from paceline.planner.layout.compression_checks import refuse_compress
from paceline.planner.layout.mesh import Mesh, layout_label, mesh_of
from paceline.planner.layout.pipeline_options import pipeline_notes
from paceline.planner.layout.update_rule_checks import rule_planning

_DEVICES = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "mpi": ("cpu", "cuda"), "ucc": ("cpu", "cuda")}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The ranks, and the resources of each."""

    ranks: int
    device: str = "cpu"
    cores: int = 1
    ranks_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The properties of the job that the plan depends on."""

    global_batch_size: int
    micro_batch_size: int | None = None
    accumulation: int | None = None
    num_samples: int | None = None
    one_thread: bool = False
    threads: int | None = None
    backend: str = "auto"
    built_in: tuple[str, ...] = ("nccl", "gloo")
    is_resumed: bool = False
    """True if the job continues a run whose microbatches are already fixed."""


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """The plan that every rank follows. `layout` is the name of `asked` on this `mesh`."""

    layout: str
    asked: Layout
    mesh: Mesh
    update: str
    processes: int
    replicas: int
    device: str
    backend: str
    threads: int
    global_batch_size: int
    micro_batch_size: int
    num_micro: int
    notes: tuple[str, ...]
    compress: str = "none"

    @property
    def wire(self) -> Compression:
        """The compression with which replicas send gradients."""
        return parse_compress(self.compress)

    @property
    def rule(self) -> UpdateRule:
        """The rule by which a batch becomes an update."""
        return parse_update(self.update)

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for plan.json."""
        return asdict(self)


def make_execution_plan(
    *, layout: Layout, update: UpdateRule, cluster: Resources, facts: JobFacts, compress: Compression | None = None
) -> ExecutionPlan:
    """Return the plan, or raise all problems at once.

    Raises:
        LayoutError, UsageError, Problems: the layout, the update rule, the batch or the backend is impossible.
    """
    problems: list[PacelineError] = []
    processes, rule = layout.processes(ranks=cluster.ranks), rule_planning(update)
    workers = rule.workers(update, ranks=cluster.ranks, problems=problems)
    mesh = rule.arrange(mesh_of(layout, ranks=workers, problems=problems, update=update))
    wire = compress or Compression()
    problems += [*check_axis_products(layout, mesh), *rule.refuse_layout(update, layout, mesh)]
    problems += refuse_compress(wire, update, layout, mesh)
    replicas = mesh.replicas
    micro = _micro_batch_size(facts, replicas, problems)
    backend, why = settle_backend(replace(cluster, ranks=processes), facts, problems)
    num_micro = -(-facts.global_batch_size // micro)
    problems += rule.refuse_batch(update, mesh, num_micro=num_micro)
    raise_all(problems)
    threads = settle_threads(cluster=cluster, one=facts.one_thread, asked=facts.threads)
    pipeline = [*rule.notes(update, mesh, num_micro=num_micro)]
    if rule.flushes_pipeline:
        pipeline += pipeline_notes(layout, mesh, num_micro=num_micro, micro_batch_size=micro)
    return ExecutionPlan(
        layout=layout_label(layout, mesh),
        asked=layout,
        mesh=mesh,
        update=str(update),
        compress=str(wire),
        processes=processes,
        replicas=replicas,
        device=cluster.device,
        backend=backend,
        threads=threads,
        global_batch_size=facts.global_batch_size,
        micro_batch_size=micro,
        num_micro=num_micro,
        notes=(*_notes(layout, mesh, cluster, facts, why, threads, micro, num_micro), *pipeline),
    )


def settle_threads(*, cluster: Resources, one: bool, asked: int | None) -> int:
    """Return the threads per rank: those asked for, or one, or the usable cores divided by this machine's ranks."""
    if one:
        return 1
    return asked or max(1, cluster.cores // (cluster.ranks_per_node or cluster.ranks))


def refuse_backend(asked: str, built_in: Sequence[str]) -> list[PacelineError]:
    """Refuse a backend that a build of torch does not have."""
    if asked == "auto" or asked in built_in:
        return []
    what = f"this build of torch has no backend {asked}; it has {', '.join(built_in) or 'none'}."
    return [UsageError(what, hint="leave --train.backend out: the device decides it")]


def settle_backend(cluster: Resources, facts: JobFacts, problems: list[PacelineError]) -> tuple[str, str]:
    """Return the backend, and a text with the reason for it.

    NCCL serves GPUs, over Ethernet too, with Gloo where the build lacks it; Gloo serves CPUs; one process needs none.
    """
    asked = facts.backend
    if cluster.ranks == 1:
        return "none", "none, because there is one process"
    if asked == "auto":
        if cluster.device == "cpu":
            return "gloo", "gloo, because the ranks compute on CPUs"
        if "nccl" in facts.built_in:
            return "nccl", "nccl, because each rank has a GPU"
        return "gloo", "gloo, because this build of torch has no nccl: slower, because tensors go through the host"
    missing = refuse_backend(asked, facts.built_in)
    problems += missing
    if not missing and cluster.device not in _DEVICES[asked]:
        problems.append(
            UsageError(f"the {asked} backend can't send tensors of a {cluster.device}.", hint="--train.backend gloo")
        )
    return asked, f"{asked}, because --train.backend asks for it"


def _micro_batch_size(facts: JobFacts, replicas: int, problems: list[PacelineError]) -> int:
    total, asked, rounds = facts.global_batch_size, facts.micro_batch_size, facts.accumulation
    if total < 1:
        problems.append(UsageError(f"global_batch_size is {total}, expected at least 1."))
    if asked is not None and not 1 <= asked <= max(total, 1):
        problems.append(
            UsageError(
                f"micro_batch_size {asked} is not between 1 and global_batch_size {total}.",
                cause="a microbatch is a part of the global batch",
                hint=f"--train.micro_batch_size {max(1, min(asked, total))}",
            )
        )
        return 1
    if rounds is not None and rounds < 1:
        problems.append(UsageError(f"gradient_accumulation_steps is {rounds}, expected at least 1."))
        return 1
    if asked is not None and rounds is not None and asked * replicas * rounds != total:
        problems.append(
            UsageError(
                f"micro_batch_size {asked} × {replicas} replicas × {rounds} accumulation steps = "
                f"{asked * replicas * rounds}, but global_batch_size is {total}.",
                hint="leave --train.gradient_accumulation_steps out: it is derived",
            )
        )
    if asked is not None:
        return asked
    micro = -(-max(total, 1) // (replicas * (rounds or 1)))
    if rounds is not None and total >= 1:
        problems += _refuse_accumulation(rounds, total=total, replicas=replicas, micro=micro)
    return micro


def _refuse_accumulation(rounds: int, *, total: int, replicas: int, micro: int) -> list[PacelineError]:
    """Refuse accumulation steps that no microbatch size gives: `micro`, the nearest one, gives fewer."""
    num_micro = -(-total // micro)
    per_replica = -(-num_micro // replicas)
    if per_replica == rounds:
        return []
    return [
        UsageError(
            f"gradient_accumulation_steps {rounds} × {plural(replicas, 'replica')} = {rounds * replicas} microbatches, "
            f"but global_batch_size {total} is {plural(num_micro, 'microbatch')} of at most "
            f"{plural(micro, 'sample')}: {per_replica} per replica.",
            cause=f"no microbatch size gives {rounds} microbatches per replica",
            hint=f"--train.gradient_accumulation_steps {per_replica}, or leave it out: it is derived",
        )
    ]


def _splits(mesh: Mesh) -> list[str]:
    """Return what each axis does, in a user's words."""
    sharded = {1: "optimizer state", 2: "gradients and optimizer state", 3: "parameters, gradients and optimizer state"}
    found = {
        "pp": f"layers in {mesh.pp} groups, one after another",
        "dp_shard": f"{sharded.get(mesh.zero, '')} in {mesh.dp_shard} shares",
        "cp": f"sequences in {mesh.cp} parts",
        "tp": f"large weights in {mesh.tp} pieces",
        "ep": f"experts over {mesh.ep} ranks",
    }
    return [said for axis, said in found.items() if axis in mesh.split]


def _notes(
    layout: Layout,
    mesh: Mesh,
    cluster: Resources,
    facts: JobFacts,
    why: str,
    threads: int,
    micro: int,
    num_micro: int,
) -> tuple[str, ...]:
    replicas = mesh.replicas
    one = "replica" if layout.kind is LayoutKind.THREADS else "rank"
    per_rank = -(-num_micro // replicas)
    idle = max(0, replicas - num_micro)
    fair = -(-facts.global_batch_size // replicas)
    unused = f"warning: {idle} of {replicas} replicas get no samples; --train.micro_batch_size {fair} would use all"
    if micro == 1:  # no smaller microbatch exists
        unused = f"warning: {idle} of {replicas} replicas get no samples: train.global_batch_size is {num_micro}"
    elif facts.is_resumed:
        unused = (
            f"warning: {idle} of {replicas} replicas get no samples with the microbatch size that this run was started "
            f"with; --train.micro_batch_size {fair} --allow micro_batch_size would use all, but changes the training"
        )
    return (
        f"layout: {layout_label(layout, mesh)}, {plural(replicas, 'replica')}"
        + (" in one process" if layout.kind is LayoutKind.THREADS else "")
        + "".join(f"; {said}" for said in _splits(mesh)),
        f"backend: {why}",
        f"batch: {plural(facts.global_batch_size, 'sample')} per step in {plural(num_micro, 'microbatch')} of {micro}"
        f" ({per_rank} per replica)",
        *([unused] if idle else []),
        f"threads: {threads} per {one} ({'pinned' if facts.one_thread else plural(cluster.cores, 'usable core')})",
    )
