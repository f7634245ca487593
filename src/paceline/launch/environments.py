"""Worlds that others made: torchrun, Open MPI, MPICH, Slurm. Each is a few variables, read in this order."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.launch.owner import own_environ

_LAUNCHERS = {
    "torchrun": "torchrun --nproc-per-node {local}",
    "mpirun": "mpirun -n {world}",
    "mpiexec": "mpiexec -n {world}",
    "srun": "srun --ntasks {world}",
}


@dataclass(frozen=True, kw_only=True)
class Joined:
    """This process's place in a world that a launcher made."""

    kind: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None
    job_id: str

    @property
    def is_one_node(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.local_world_size == self.world_size

    @property
    def launcher(self) -> list[str]:
        """The words that start as many processes again; how machines meet is not known here."""
        words = _LAUNCHERS.get(self.kind, "").format(local=self.local_world_size, world=self.world_size)
        return words.split()


def detect(environ: Mapping[str, str]) -> Joined | None:
    """The world this process was started into, or None: also where the variables are those of a rank that started it.

    Raises:
        UsageError: the launcher's numbers contradict each other.
    """
    environ = own_environ(environ)
    for read in (_torchrun, _open_mpi, _pmi, _slurm, _plain):
        found = read(environ)
        if found is not None:
            return _checked(found)
    return None


def world_size(environ: Mapping[str, str]) -> int | None:
    """How many processes it has, or None."""
    joined = detect(environ)
    return joined.world_size if joined else None


def _torchrun(environ: Mapping[str, str]) -> Joined | None:
    return _from(environ, "torchrun", environ.get("TORCHELASTIC_RUN_ID"), _TORCH)


def _open_mpi(environ: Mapping[str, str]) -> Joined | None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or "mpi"
    marked = "OMPI_COMM_WORLD_RANK" in environ
    return _from(environ, "mpirun", job if marked else None, tuple(f"OMPI_COMM_WORLD_{name}" for name in names))


def _pmi(environ: Mapping[str, str]) -> Joined | None:
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _from(environ, "mpiexec", environ.get("PMI_ID", "pmi") if "PMI_RANK" in environ else None, names)


def _slurm(environ: Mapping[str, str]) -> Joined | None:
    inside = environ.get("SLURM_STEP_ID") is not None and environ.get("SLURM_PROCID") is not None
    per_node = environ.get("SLURM_NTASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    filled = {**environ, "_LOCAL_SIZE": per_node.partition("(")[0]}
    names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "_LOCAL_SIZE")
    return _from(filled, "srun", environ.get("SLURM_JOB_ID", "slurm") if inside else None, names)


def _plain(environ: Mapping[str, str]) -> Joined | None:
    whole = "RANK" in environ and "WORLD_SIZE" in environ
    return _from(environ, "environment", "env" if whole else None, _TORCH)


_TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _from(environ: Mapping[str, str], kind: str, job_id: str | None, names: tuple[str, ...]) -> Joined | None:
    if job_id is None:
        return None
    try:
        rank, world = (int(environ[name]) for name in names[:2])
        local_rank = int(environ.get(names[2], rank))
        local_world = int(environ.get(names[3], world))
        port = int(environ["MASTER_PORT"]) if environ.get("MASTER_PORT") else None
    except (KeyError, ValueError) as error:
        raise UsageError(
            f"{kind} set variables that can't be read: {error}.", hint=f"env | grep -E '{'|'.join(names)}'"
        ) from None
    return Joined(
        kind=kind,
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        address=environ.get("MASTER_ADDR"),
        port=port,
        job_id=job_id,
    )


def _checked(found: Joined) -> Joined:
    if not 0 <= found.rank < found.world_size or not 0 <= found.local_rank < max(found.local_world_size, 1):
        raise UsageError(
            f"{found.kind}: rank {found.rank} of {found.world_size}, local rank {found.local_rank} of "
            f"{found.local_world_size}: these contradict each other.",
            hint="start as many tasks as ranks: --ntasks = nodes × --ntasks-per-node",
        )
    return found
