"""Answer an option of sbatch after `paceline submit`: another option, `--using`, or the reason to leave it out."""

import re
import shlex
from collections.abc import Mapping

from paceline.nodes.launcher_options import SBATCH_OPTIONS, SLURM_OPTIONS

TARGET_NAMES = {
    **dict.fromkeys(("kubernetes", "kube", "kubectl", "k8", "jobset", "eks", "gke", "aks"), "k8s"),
    **dict.fromkeys(("sbatch", "srun", "salloc"), "slurm"),
    **dict.fromkeys(("aws", "sm"), "sagemaker"),
    **dict.fromkeys(("rayjob", "kuberay", "anyscale"), "ray"),
}
"""Other names of the schedulers of `--to`."""
_ALL_MEMORY = "the script asks for all memory of each node (--mem=0)"
_SET_BY_SCRIPT = {
    "mem": _ALL_MEMORY,
    "mem_per_cpu": _ALL_MEMORY,
    "mem_per_gpu": _ALL_MEMORY,
    "job_name": "the script names the job after the file of the job and the run folder",
    "exclusive": "the script asks for whole nodes (--exclusive)",
    "signal": "the script asks for a signal three minutes before the end of --hours",
    "requeue": "the script starts the job again after a stop",
    "open_mode": "the script appends to its log (--open-mode=append)",
    "chdir": "the job starts in the folder in which `paceline submit` is typed",
}
"""Why an option is not needed, by its name."""
_GPUS = re.compile(r"gpu(:[^:,]+)?:(\d+)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?", re.IGNORECASE)


def sbatch_option_hint(name: str, flag: str, value: str, *, typed: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the likely cause and what to type in place of an option of sbatch; None if sbatch has none of that name.

    `flag` is the option as it was typed, and `typed` has the values of all options of the command by their names.
    """
    if name not in (*SLURM_OPTIONS, *SBATCH_OPTIONS):
        return None
    target = typed.get("to") or "slurm"
    target = TARGET_NAMES.get(target.lower(), target)
    gpus = _GPUS.fullmatch(value) if name == "gres" else None
    if gpus is not None and int(gpus[2]):
        return "each process has one GPU, and submit asks for as many GPUs", f"--ranks-per-node {gpus[2]}"
    if target != "slurm":
        return _hint_for_target(target, name, flag, value)
    if name == "output":
        cause = f"the script sets it: the log is {_log_file(typed)}"
    else:
        cause = _SET_BY_SCRIPT.get(name, "")
    if cause:
        return cause, f"leave {flag} out; the file that submit writes is yours to change"
    cause = "Slurm's own options are given as --using"
    if name == "cpus_per_task":
        cause += "; without it, the task of each node, which starts its ranks, has all CPUs"
    return cause, f"--using {name.replace('_', '-')}={shlex.quote(value or 'VALUE')}"


def _hint_for_target(target: str, name: str, flag: str, value: str) -> tuple[str, str]:
    """Return the hint for another scheduler than Slurm."""
    cause = f"it is an option of Slurm, and --to is {target}"
    memory = _MEMORY.fullmatch(value) if name == "mem" else None
    if target == "k8s" and memory is not None:
        return cause, f"--using memory={memory[1]}{(memory[2] or 'M').upper()}i"
    if target == "k8s" and name == "cpus_per_task" and value.isdecimal():
        return cause, f"--using cpus={value}"
    return cause, f"leave {flag} out"


def _log_file(typed: Mapping[str, str]) -> str:
    """Return where the script writes its log."""
    file = "slurm-JOBID-TASK.out" if typed.get("array") else "slurm-JOBID.out"
    run = typed.get("run_dir")
    return f"{run.rstrip('/')}/submit/{file}" if run else f"{file} in the folder `submit` of the run"
