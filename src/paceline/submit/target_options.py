"""The options that only one scheduler has: `--using partition=gpu account=me`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all


@dataclass(frozen=True, kw_only=True)
class KubernetesOptions:
    """The needs of a pod, and where the runs are. Amounts are in Kubernetes' spelling, such as "200Gi"."""

    kind: str = "jobset"
    """jobset, trainjob (where Kubeflow is installed), or job (where neither is)."""
    cpus: str = "4"
    memory: str = "64Gi"
    shared_memory: str = ""
    """The size of /dev/shm, which counts to the memory; default: 16Gi, but at most half of the memory."""
    claim: str = "runs"
    """The claim of the volume for the runs, which all nodes mount at /runs."""
    runtime: str = "torch-distributed"
    """The runtime of Kubeflow."""
    crd: str = ""
    """A file with the resource definition of the cluster, to check against."""


@dataclass(frozen=True, kw_only=True)
class SageMakerOptions:
    """The parts of the account that a job needs."""

    role: str = ""
    """The ARN of the role that the job runs as."""
    instance: str = ""
    """The kind of machine, such as ml.p4d.24xlarge."""
    storage: str = ""
    """Where the run is stored: efs://ID/FOLDER or fsx://ID/FOLDER, which all machines mount; for one machine also
    s3://BUCKET/FOLDER, which gets copies of the checkpoints."""
    mount: str = ""
    """The mount name of an FSx file system, with which its paths begin."""
    output: str = ""
    """An S3 folder for what SageMaker itself writes at the end."""
    network: str = ""
    """SUBNET,SECURITY_GROUP of the file system."""
    spot: str = "false"
    """true: use spot machines, which may be interrupted."""


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The needs of a node, and how soon Ray changes their number."""

    cpus: str = "1"
    """The CPUs of each rank, as Ray counts them."""
    resize_seconds: str = "60"
    """How often Ray looks whether the cluster has room for another number of nodes."""


def read_slurm_options(words: Sequence[str]) -> dict[str, str]:
    """Return the options of sbatch by their names, without the dashes.

    Raises:
        UsageError: a word is not NAME=VALUE, or names an option that the script sets itself.
    """
    values = _split(words)
    problems: list[PacelineError] = [
        UsageError(
            f"--using {name}=: the script sets this option itself.",
            hint="the file that submit writes is yours to change",
        )
        for name in values
        if name in _SET_BY_SCRIPT
    ]
    raise_all(problems)
    return values


def read_kubernetes_options(words: Sequence[str]) -> KubernetesOptions:
    """Return the options for Kubernetes.

    Raises:
        UsageError: a word is not NAME=VALUE, or no such option.
    """
    values = _split(words)
    _refuse_unknown(values, [field.name for field in fields(KubernetesOptions)])
    options = KubernetesOptions(**values)
    if options.kind not in KUBERNETES_KINDS:
        raise UsageError(f"--using kind={options.kind}.", hint=f"kind= {' | '.join(KUBERNETES_KINDS)}")
    return options


def read_sagemaker_options(words: Sequence[str]) -> SageMakerOptions:
    """Return the options for SageMaker.

    Raises:
        UsageError: a word is not NAME=VALUE, no such option, or a needed one is missing.
    """
    values = _split(words)
    _refuse_unknown(values, [field.name for field in fields(SageMakerOptions)])
    options = SageMakerOptions(**values)
    missing = [name for name in ("role", "instance", "storage", "output") if not getattr(options, name)]
    if missing:
        raise UsageError(f"SageMaker needs {', '.join(missing)}.", hint=f"--using {missing[0]}=...")
    if options.spot not in ("true", "false"):
        raise UsageError(f"--using spot={options.spot}.", hint="spot=true or spot=false")
    return options


def read_ray_options(words: Sequence[str]) -> RayOptions:
    """Return the options for Ray.

    Raises:
        UsageError: a word is not NAME=VALUE, no such option, or its value is no number.
    """
    values = _split(words)
    _refuse_unknown(values, [field.name for field in fields(RayOptions)])
    problems: list[PacelineError] = [
        UsageError(f"--using {name}={text} is no number above 0.", hint=f"{name}={getattr(RayOptions(), name)}")
        for name, text in values.items()
        if not _NUMBER.fullmatch(text) or not float(text)
    ]
    raise_all(problems)
    return RayOptions(**values)


_NUMBER = re.compile(r"\d+(\.\d+)?")
_SET_BY_SCRIPT = (
    "nodes", "ntasks", "ntasks_per_node", "time", "signal", "requeue", "open_mode", "output", "array", "job_name",
    "chdir", "exclusive", "mem", "gpus_per_node",
)  # fmt: skip
KUBERNETES_KINDS = ("jobset", "trainjob", "job")


def _split(words: Sequence[str]) -> dict[str, str]:
    """Return the values by their names.

    Raises:
        UsageError: a word is not NAME=VALUE.
    """
    bad = [word for word in words if not word.partition("=")[0] or "=" not in word or "\n" in word]
    problems: list[PacelineError] = [
        UsageError(f"--using {word} is not NAME=VALUE.", hint="--using partition=gpu account=me") for word in bad
    ]
    raise_all(problems)
    return {word.partition("=")[0].removeprefix("--").replace("-", "_"): word.partition("=")[2] for word in words}


def _refuse_unknown(values: Mapping[str, str], known: Sequence[str]) -> None:
    problems: list[PacelineError] = [
        UsageError(f"--using {name}=: there is no such option.", cause=did_you_mean(name, known), hint=", ".join(known))
        for name in values
        if name not in known
    ]
    raise_all(problems)
