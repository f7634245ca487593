"""Make the execution plan: ranks, replicas, microbatches, backend and threads, with a line of explanation for each."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.config.compression import Compression, parse_compress
from paceline.config.layout import Layout, LayoutKind
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.console.formatting import plural
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.planner.layout.compression_checks import refuse_compressed_layout
from paceline.planner.layout.mesh import Mesh, layout_label, resolve_mesh
from paceline.planner.layout.pipeline_options import pipeline_notes, refuse_schedule
from paceline.planner.layout.update_rule_checks import rule_planning

_BACKEND_DEVICES = {"nccl": ("cuda",), "gloo": ("cpu", "cuda"), "mpi": ("cpu", "cuda"), "ucc": ("cpu", "cuda")}


@dataclass(frozen=True, kw_only=True)
class Resources:
    """The ranks of a run, and the devices and cores of this machine."""

    ranks: int
    """The number of ranks on all machines."""
    device: str = "cpu"
    """The type of the device of each rank: `cpu` or `cuda`."""
    cores: int = 1
    """The number of cores of this machine that the run may use."""
    ranks_per_node: int | None = None
    """The number of ranks that share the cores of this machine; None if all ranks run on this machine."""


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """The properties of the job that the plan depends on."""

    global_batch_size: int
    """The samples of one optimizer step."""
    micro_batch_size: int | None = None
    """The requested samples of a microbatch; None to derive them."""
    accumulation: int | None = None
    """The requested microbatches of a replica in one step; None to derive them."""
    one_thread: bool = False
    """True if each rank must compute with one thread, as in exact mode and under `verify`."""
    threads: int | None = None
    """The requested threads of each rank; None to divide the cores among the ranks."""
    backend: str = "auto"
    """The requested backend of torch.distributed; `auto` to choose it by device."""
    built_in_backends: tuple[str, ...] = ("nccl", "gloo")
    """The backends that this build of torch has."""
    is_resumed: bool = False
    """True if the job resumes a run, which fixes the microbatch size."""


@dataclass(frozen=True, kw_only=True)
class ExecutionPlan:
    """The plan that every rank follows. The field names are keys of plan.json."""

    layout: str
    """The name of the layout on this mesh."""
    asked: Layout
    """The layout that the user requested."""
    mesh: Mesh
    update: str
    """The text of the update rule, as in `--update`."""
    processes: int
    """The number of processes of the run, with parameter servers; 1 if the replicas are threads."""
    replicas: int
    device: str
    """The type of the device of each rank: `cpu` or `cuda`."""
    backend: str
    """The backend of torch.distributed; `none` for a single process."""
    threads: int
    """The number of threads of each rank or, if the replicas are threads, of each replica."""
    global_batch_size: int
    micro_batch_size: int
    num_micro: int
    """The number of microbatches of a full batch, over all replicas."""
    notes: tuple[str, ...]
    """The lines about the plan that a run prints when it starts."""
    compress: str = "none"
    """The text of the compression, as in `--compress`."""

    @property
    def compression(self) -> Compression:
        """The compression of the gradients, parsed from `compress`."""
        return parse_compress(self.compress)

    @property
    def update_rule(self) -> UpdateRule:
        """The update rule, parsed from `update`."""
        return parse_update(self.update)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for plan.json."""
        return asdict(self)


def make_execution_plan(
    *, layout: Layout, update: UpdateRule, resources: Resources, facts: JobFacts, compress: Compression | None = None
) -> ExecutionPlan:
    """Return the execution plan of a run.

    Raises:
        LayoutError, UsageError, Problems: the layout, the update rule, the batch or the backend is impossible. All
            problems are raised at once.
    """
    problems: list[PacelineError] = []
    processes, rule = layout.processes(ranks=resources.ranks), rule_planning(update)
    workers = rule.num_workers(update, ranks=resources.ranks, problems=problems)
    mesh = rule.order_ranks(resolve_mesh(layout, ranks=workers, problems=problems, update=update))
    compression = compress or Compression()
    problems += [*refuse_schedule(layout, mesh), *rule.refuse_layout(update, layout, mesh)]
    problems += refuse_compressed_layout(compression, update, layout, mesh)
    replicas = mesh.replicas
    micro_batch_size = _choose_micro_batch_size(facts, replicas, problems)
    backend, backend_reason = choose_backend(replace(resources, ranks=processes), facts, problems)
    num_micro = -(-facts.global_batch_size // micro_batch_size)
    problems += rule.refuse_batch(update, mesh, num_micro=num_micro)
    raise_all(problems)
    threads = choose_threads(resources=resources, one_thread=facts.one_thread, requested=facts.threads)
    rule_notes = [*rule.notes(update, mesh, num_micro=num_micro)]
    if rule.flushes_pipeline:
        rule_notes += pipeline_notes(layout, mesh, num_micro=num_micro, micro_batch_size=micro_batch_size)
    return ExecutionPlan(
        layout=layout_label(layout, mesh),
        asked=layout,
        mesh=mesh,
        update=str(update),
        compress=str(compression),
        processes=processes,
        replicas=replicas,
        device=resources.device,
        backend=backend,
        threads=threads,
        global_batch_size=facts.global_batch_size,
        micro_batch_size=micro_batch_size,
        num_micro=num_micro,
        notes=(
            *_plan_notes(layout, mesh, resources, facts, backend_reason, threads, micro_batch_size, num_micro),
            *rule_notes,
        ),
    )


def choose_threads(*, resources: Resources, one_thread: bool, requested: int | None) -> int:
    """Return the number of threads of each rank.

    It is 1 with `one_thread`. Otherwise it is the `requested` number, or by default the usable cores divided by the
    ranks of this machine.
    """
    if one_thread:
        return 1
    return requested or max(1, resources.cores // (resources.ranks_per_node or resources.ranks))


def refuse_backend(requested: str, built_in: Sequence[str]) -> list[PacelineError]:
    """Return an error if this build of torch does not have the backend."""
    if requested == "auto" or requested in built_in:
        return []
    message = f"this build of torch has no backend {requested}; it has {', '.join(built_in) or 'none'}."
    return [UsageError(message, hint="leave --train.backend out: the device decides it")]


def choose_backend(resources: Resources, facts: JobFacts, problems: list[PacelineError]) -> tuple[str, str]:
    """Return the backend and the reason for the choice; add an error to `problems` if the requested one is impossible.

    By default, GPUs use NCCL, or Gloo if the build lacks NCCL. CPUs use Gloo. A single process needs no backend.
    """
    requested = facts.backend
    if resources.ranks == 1:
        return "none", "none, because there is one process"
    if requested == "auto":
        if resources.device == "cpu":
            return "gloo", "gloo, because the ranks compute on CPUs"
        if "nccl" in facts.built_in_backends:
            return "nccl", "nccl, because each rank has a GPU"
        return "gloo", "gloo, because this build of torch has no nccl: slower, because tensors go through the host"
    missing = refuse_backend(requested, facts.built_in_backends)
    problems += missing
    if not missing and resources.device not in _BACKEND_DEVICES[requested]:
        problems.append(
            UsageError(
                f"the {requested} backend can't send tensors of a {resources.device}.", hint="--train.backend gloo"
            )
        )
    return requested, f"{requested}, because --train.backend asks for it"


def _choose_micro_batch_size(facts: JobFacts, replicas: int, problems: list[PacelineError]) -> int:
    """Return the requested microbatch size, or derive it; add errors about the batch to `problems`."""
    global_batch_size, requested, accumulation = facts.global_batch_size, facts.micro_batch_size, facts.accumulation
    if global_batch_size < 1:
        problems.append(UsageError(f"global_batch_size is {global_batch_size}, expected at least 1."))
    if requested is not None and not 1 <= requested <= max(global_batch_size, 1):
        problems.append(
            UsageError(
                f"micro_batch_size {requested} is not between 1 and global_batch_size {global_batch_size}.",
                cause="a microbatch is a part of the global batch",
                hint=f"--train.micro_batch_size {max(1, min(requested, global_batch_size))}",
            )
        )
        return 1
    if accumulation is not None and accumulation < 1:
        problems.append(UsageError(f"gradient_accumulation_steps is {accumulation}, expected at least 1."))
        return 1
    if requested is not None and accumulation is not None and requested * replicas * accumulation != global_batch_size:
        problems.append(
            UsageError(
                f"micro_batch_size {requested} × {replicas} replicas × {accumulation} accumulation steps = "
                f"{requested * replicas * accumulation}, but global_batch_size is {global_batch_size}.",
                hint="leave --train.gradient_accumulation_steps out: it is derived",
            )
        )
    if requested is not None:
        return requested
    micro_batch_size = -(-max(global_batch_size, 1) // (replicas * (accumulation or 1)))
    if accumulation is not None and global_batch_size >= 1:
        problems += _refuse_accumulation(
            accumulation, total=global_batch_size, replicas=replicas, micro_batch_size=micro_batch_size
        )
    return micro_batch_size


def _refuse_accumulation(accumulation: int, *, total: int, replicas: int, micro_batch_size: int) -> list[PacelineError]:
    """Return an error if no microbatch size gives `accumulation` microbatches per replica for a batch of `total`.

    `micro_batch_size` is the smallest size that gives at most that many.
    """
    num_micro = -(-total // micro_batch_size)
    per_replica = -(-num_micro // replicas)
    if per_replica == accumulation:
        return []
    return [
        UsageError(
            f"gradient_accumulation_steps {accumulation} × {plural(replicas, 'replica')} = "
            f"{accumulation * replicas} microbatches, but global_batch_size {total} is "
            f"{plural(num_micro, 'microbatch')} of at most {plural(micro_batch_size, 'sample')}: "
            f"{per_replica} per replica.",
            cause=f"no microbatch size gives {accumulation} microbatches per replica",
            hint=f"--train.gradient_accumulation_steps {per_replica}, or leave it out: it is derived",
        )
    ]


def _describe_axes(mesh: Mesh) -> list[str]:
    """Return, for each axis that is split, what it splits and into how many parts."""
    sharded_state = {
        1: "optimizer state",
        2: "gradients and optimizer state",
        3: "parameters, gradients and optimizer state",
    }
    descriptions = {
        "pp": f"layers in {mesh.pp} groups, one after another",
        "dp_shard": f"{sharded_state.get(mesh.zero, '')} in {mesh.dp_shard} shares",
        "cp": f"sequences in {mesh.cp} parts",
        "tp": f"large weights in {mesh.tp} pieces",
        "ep": f"experts over {mesh.ep} ranks",
    }
    return [description for axis, description in descriptions.items() if axis in mesh.split_axes]


def _plan_notes(
    layout: Layout,
    mesh: Mesh,
    resources: Resources,
    facts: JobFacts,
    backend_reason: str,
    threads: int,
    micro_batch_size: int,
    num_micro: int,
) -> tuple[str, ...]:
    """Return the lines on layout, backend, batch and threads that a run prints when it starts."""
    replicas = mesh.replicas
    unit = "replica" if layout.kind is LayoutKind.THREADS else "rank"
    per_replica = -(-num_micro // replicas)
    num_idle = max(0, replicas - num_micro)
    even_size = -(-facts.global_batch_size // replicas)
    idle_warning = (
        f"warning: {num_idle} of {replicas} replicas get no samples; --train.micro_batch_size {even_size} would use all"
    )
    if micro_batch_size == 1:  # no smaller microbatch exists
        idle_warning = (
            f"warning: {num_idle} of {replicas} replicas get no samples: train.global_batch_size is {num_micro}"
        )
    elif facts.is_resumed:
        idle_warning = (
            f"warning: {num_idle} of {replicas} replicas get no samples with the microbatch size that this run was "
            f"started with; --train.micro_batch_size {even_size} --allow micro_batch_size would use all, but changes "
            "the training"
        )
    return (
        f"layout: {layout_label(layout, mesh)}, {plural(replicas, 'replica')}"
        + (" in one process" if layout.kind is LayoutKind.THREADS else "")
        + "".join(f"; {description}" for description in _describe_axes(mesh)),
        f"backend: {backend_reason}",
        f"batch: {plural(facts.global_batch_size, 'sample')} per step in {plural(num_micro, 'microbatch')} of "
        f"{micro_batch_size} ({'at most ' if num_micro % replicas else ''}{per_replica} per replica)",
        *([idle_warning] if num_idle else []),
        f"threads: {threads} per {unit} "
        f"({'fixed: the number affects results' if facts.one_thread else plural(resources.cores, 'usable core')})",
    )
