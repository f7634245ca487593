"""Detection of a world that another launcher started, from the variables of torchrun, Open MPI, Slurm or MPICH."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.launch.inherited_environment import own_environ
from paceline.nodes.slurm_hosts import step_hosts, step_port

_COMMAND_BY_LAUNCHER = {
    "torchrun": "torchrun {rendezvous} --nproc-per-node {local}",
    "mpirun": "mpirun -n {world}",
    "mpiexec": "mpiexec -n {world}",
    "srun": "srun --ntasks {world}",
}
_BACKEND_OPTION = "--rdzv-backend=paceline"
USES_BACKEND = "PACELINE_TORCHRUN_BACKEND"  # set by `torchrun/startup/sitecustomize.py`, which can't import this


@dataclass(frozen=True, kw_only=True)
class JoinedWorld:
    """The rank of this process in the world of another launcher, such as torchrun, mpirun or srun."""

    kind: str
    """The launcher, such as `torchrun`; `environment` if only plain variables such as RANK are set."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    job_id: str
    has_unique_job_id: bool
    """True if `job_id` identifies the world, so that it can name the folder in which ranks find rank 0.

    It is True for every torchrun, although worlds of a static torchrun share the id "none": torchrun sets MASTER_ADDR
    and MASTER_PORT, so its ranks need no folder.
    """
    has_local_ranks: bool
    """True if the launcher says how many ranks are on this machine."""
    nodes: int = 1
    node_rank: int | None = None
    """The index of this machine, if the launcher gives it."""
    torchrun_options: tuple[str, ...] = ()
    """Options of torchrun that its variables show: how often it restarts, and the backend `paceline`."""

    @property
    def is_one_node(self) -> bool:
        """Return whether all ranks are on this machine."""
        return self.local_world_size == self.world_size

    def launch_command(self, command: Sequence[str]) -> str:
        """Return the command line that starts `command` on the same number of processes.

        If one command does not start the whole world, or the launcher's rendezvous is not known, the line begins with
        an instruction, such as "on each node".
        """
        launcher = _COMMAND_BY_LAUNCHER.get(self.kind, "")
        launcher_command = launcher.format(
            local=self.local_world_size, world=self.world_size, rendezvous=self._rendezvous_options()
        )
        line = shlex.join([*launcher_command.split(), *command])
        if not launcher:
            instruction = f"in each of the {self.world_size} processes, with its variables (RANK, ...): "
            return f"{instruction}{line}" if self.world_size > 1 else line
        if self.is_one_node or self.kind == "srun":  # the allocation determines the machines
            return line
        if self.kind != "torchrun":
            variables = ", MASTER_ADDR and MASTER_PORT" if self.address else ""
            return f"with the same hosts{variables}: {line}"
        if self._is_static:
            return f"on each node, with its own --node-rank: {line}"
        return f"the same torchrun command on each node, with: {shlex.join(command)}"

    @property
    def _is_static(self) -> bool:
        """Return whether the nodes of torchrun use a static rendezvous: MASTER_ADDR, without --rdzv-id."""
        return self.job_id == "none" and None not in (self.node_rank, self.address, self.port)

    def _rendezvous_options(self) -> str:
        """Return torchrun's rendezvous options, as far as its variables contain them."""
        if self.is_one_node:
            is_standalone = _UUID.fullmatch(self.job_id) and _BACKEND_OPTION not in self.torchrun_options
            return " ".join([*(["--standalone"] * bool(is_standalone)), *self.torchrun_options])  # it generates a UUID
        address = f"--master-addr {self.address} --master-port {self.port}"
        return " ".join([f"--nnodes {self.nodes} --node-rank {self.node_rank} {address}", *self.torchrun_options])


def detect_world(environ: Mapping[str, str]) -> JoinedWorld | None:
    """Return the world of which this process is a rank, or None.

    Variables that were set for another process and inherited by this process are ignored.

    Raises:
        UsageError: the launcher's numbers contradict each other.
    """
    environ = own_environ(environ)
    for read in (_torchrun, _open_mpi, _slurm, _pmi, _plain_environment):
        world = read(environ)
        if world is not None:
            return _check_world(world)
    return None


def world_size(environ: Mapping[str, str]) -> int | None:
    """Return the world size if this process is a rank of another launcher, else None."""
    joined = detect_world(environ)
    return joined.world_size if joined else None


def _torchrun(environ: Mapping[str, str]) -> JoinedWorld | None:
    world = _read_world(environ, "torchrun", environ.get("TORCHELASTIC_RUN_ID"), _TORCH_NAMES)
    restarts = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    options = (
        *((_BACKEND_OPTION,) if USES_BACKEND in environ else ()),
        *((f"--max-restarts {restarts}",) if restarts.isdecimal() and int(restarts) else ()),
    )
    return world and replace(world, torchrun_options=options)


def _open_mpi(environ: Mapping[str, str]) -> JoinedWorld | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpi"
    is_open_mpi = "OMPI_COMM_WORLD_RANK" in environ
    return _read_world(
        environ, "mpirun", job if is_open_mpi else None, tuple(f"OMPI_COMM_WORLD_{name}" for name in names)
    )


def _slurm(environ: Mapping[str, str]) -> JoinedWorld | None:
    is_step = environ.get("SLURM_STEP_ID") is not None and environ.get("SLURM_PROCID") is not None
    if not is_step or not _is_srun_task(environ):
        return None
    variables = {**environ, "_SIZE": _number_of_tasks(environ), "_LOCAL_SIZE": _tasks_on_node(environ)}
    names = ("SLURM_PROCID", "_SIZE", "SLURM_LOCALID", "_LOCAL_SIZE")
    job = f"{environ.get('SLURM_JOB_ID', 'slurm')}-{environ['SLURM_STEP_ID']}"
    world = _read_world(variables, "srun", job, names)
    if world is None or world.is_one_node or (world.address and world.port):
        return world
    try:  # the first task is on the first node, whatever the distribution
        return replace(world, address=world.address or step_hosts(environ)[0], port=world.port or step_port(environ))
    except (KeyError, ValueError, IndexError):
        return world


def _number_of_tasks(environ: Mapping[str, str]) -> str:
    """Return the number of tasks of the step, which may be smaller than that of its job."""
    return environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of `srun` itself.

    `srun --mpi=pmi2` sets each number under two names, with equal values. `mpiexec` in an allocation starts one helper
    on each node by `srun`. Its ranks inherit the helper's Slurm numbers, which differ from their own PMI numbers.
    """
    own_numbers = environ.get("PMI_RANK"), environ.get("PMI_SIZE")
    slurm_numbers = environ["SLURM_PROCID"], _number_of_tasks(environ)
    return all(own in (None, theirs) for own, theirs in zip(own_numbers, slurm_numbers, strict=True))


def _tasks_on_node(environ: Mapping[str, str]) -> str:
    """Return this node's number of tasks. In Slurm's list, `2(x3),1` means 2 on three nodes and 1 on the next."""
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_NTASKS_PER_NODE", "1")
    groups = [(count, int(num_nodes or 1)) for count, num_nodes in _TASK_COUNTS.findall(tasks_per_node)]
    counts = [count for count, num_nodes in groups for _ in range(num_nodes)]
    node = environ.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else tasks_per_node.partition("(")[0]


def _pmi(environ: Mapping[str, str]) -> JoinedWorld | None:
    """Read the world of Hydra (MPICH, Intel MPI) or PALS, which use different names for the local rank."""
    if "PMI_RANK" not in environ:
        return None
    local = next((name for name in _PMI_LOCAL_NAMES if name[0] in environ), _PMI_LOCAL_NAMES[0])
    return _read_world(
        environ, "mpiexec", environ.get("PMI_JOBID") or environ.get("PMI_ID", "pmi"), ("PMI_RANK", "PMI_SIZE", *local)
    )


def _plain_environment(environ: Mapping[str, str]) -> JoinedWorld | None:
    is_complete = "RANK" in environ and "WORLD_SIZE" in environ
    return _read_world(environ, "environment", "env" if is_complete else None, _TORCH_NAMES)


_PMI_LOCAL_NAMES = (
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
    ("PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
)
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TASK_COUNTS = re.compile(r"(\d+)(?:\(x(\d+)\))?")
_TORCH_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _read_world(
    environ: Mapping[str, str], kind: str, job_id: str | None, names: tuple[str, ...]
) -> JoinedWorld | None:
    """Return the world that `names` describe (rank, world size, local rank and size); None without a job id."""
    if job_id is None:
        return None
    try:
        rank, num_ranks = (int(environ[name]) for name in names[:2])
        local_rank, local_world = _local_ranks(environ, kind, names[2:], rank=rank, num_ranks=num_ranks)
        port = int(environ["MASTER_PORT"]) if environ.get("MASTER_PORT") else None
        nodes = int(environ.get("GROUP_WORLD_SIZE") or -(-num_ranks // max(local_world, 1)))
        node_rank = environ.get("GROUP_RANK") or environ.get("NODE_RANK")
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{kind} set variables that can't be read: {error}.", hint=f"env | grep -E '{'|'.join(names)}'"
        ) from None
    return JoinedWorld(
        kind=kind,
        rank=rank,
        world_size=num_ranks,
        local_rank=local_rank,
        local_world_size=local_world,
        address=environ.get("MASTER_ADDR"),
        port=port,
        job_id=job_id,
        has_unique_job_id=kind in ("torchrun", "srun")
        or "PMIX_NAMESPACE" in environ
        or "OMPI_MCA_ess_base_jobid" in environ,
        has_local_ranks=any(name in environ for name in (names[3], _TORCH_NAMES[3])),
        nodes=nodes,
        node_rank=int(node_rank) if node_rank and node_rank.isdecimal() else None,
    )


def _local_ranks(
    environ: Mapping[str, str], kind: str, names: tuple[str, ...], *, rank: int, num_ranks: int
) -> tuple[int, int]:
    """Return the local rank and the number of ranks on this machine.

    If all ranks must be on this machine (a single rank, or a loopback address), the local ranks are the global ones.

    Raises:
        UsageError: the launcher does not set local ranks, and ranks may be on several machines.
    """
    for local_names in (names, _TORCH_NAMES[2:]):
        if local_names[0] in environ:
            return int(environ[local_names[0]]), int(environ.get(local_names[1], num_ranks))
    if num_ranks == 1 or is_loopback(environ.get("MASTER_ADDR") or "127.0.0.1"):
        return rank, num_ranks
    raise UsageError(
        f"{kind} does not give the local rank of rank {rank} of {num_ranks}: {names[0]} is not set.",
        cause="MASTER_ADDR names a host, so the ranks may be on several machines",
        hint="export LOCAL_RANK=<0, 1, ... on each machine> LOCAL_WORLD_SIZE=<ranks on this machine>",
    )


def is_loopback(address: str) -> bool:
    """Return whether the address can only mean this machine."""
    return address in ("localhost", "::1") or address.startswith("127.")


def _check_world(world: JoinedWorld) -> JoinedWorld:
    if not 0 <= world.rank < world.world_size or not 0 <= world.local_rank < max(world.local_world_size, 1):
        raise UsageError(
            f"{world.kind}: rank {world.rank} of {world.world_size}, local rank {world.local_rank} of "
            f"{world.local_world_size}: these values contradict each other.",
            hint="start one task for each rank: with srun, --ntasks is the number of nodes × --ntasks-per-node",
        )
    return world
