"""A Hugging Face config used as a job, for the verbs that need no data: `plan` and `simulate`."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from paceline.config.loading import read_asked
from paceline.errors import MachineError, PacelineError, UsageError
from paceline.planner.hardware.cluster import Cluster

JOB = "paceline.hf.config_only_job:make_job"
_CONFIG = "config.json"
_EACH = 8  # samples per device
_BATCH = "train.global_batch_size"
_PRECISION = "train.precision"
_MIXED = " (mixed: matmuls in {}, weights and optimizer in float32; --train.precision fp32 for float32 only)"


def is_config(job: str) -> bool:
    """Return whether `job` is a config.json or its folder, a transformers class, or `module:SomeConfig`."""
    if Path(job).is_dir():
        return (Path(job) / _CONFIG).is_file()
    if Path(job).name == _CONFIG:
        return Path(job).is_file()
    place, _, name = _split(job)
    return place.partition(".")[0] == "transformers" or name.lower().endswith("config")


def as_job(
    job: str, overrides: Sequence[str], *, ranks: int, fleet: Cluster | None = None, file: Path | None = None
) -> tuple[str, list[str], list[str]]:
    """Return a job built from the config, its settings, and lines about assumed values; other jobs are unchanged.

    Values in `overrides` or in the TOML `file` are not assumed. The precision is the usual one for such models on the
    devices of the `cluster`, which also sets the number of ranks; None is this machine.

    Raises:
        UsageError, MachineError: a folder without a config, or no transformers to read one.
    """
    if not is_config(job):
        if Path(job).is_dir():
            raise UsageError(
                f"{job} is a folder without {_CONFIG}.",
                hint=f"paceline plan {job.rstrip('/')}/job.py, or a model's folder",
            )
        return job, list(overrides), []
    if find_spec("transformers") is None:
        raise MachineError(
            f"{job} is a Hugging Face config, and transformers is not installed.", hint="pip install 'paceline[hf]'"
        )
    place, colon, name = _split(job)
    folder = Path(job).parent if Path(job).name == _CONFIG else Path(job)
    source = str(folder.resolve()) if folder.is_dir() and Path(job).exists() else f"{place}{colon}{name}"
    own, assumed = [f"--job.source={source}"], list[str]()
    given = _given(overrides, file)
    if not given & {_BATCH, "job.global_batch_size"}:
        batch = _EACH * (ranks if fleet is None else fleet.ranks)
        own.append(f"--{_BATCH}={batch}")
        assumed.append(f"--{_BATCH} {batch}")
    if "job.length" not in given:
        assumed.append("--job.length from the model's positions, at most 4,096")
    if "job.optimizer" not in given:
        assumed.append("--job.optimizer AdamW")
    if _PRECISION not in given:
        precision = _usual_precision(fleet)
        own.append(f"--{_PRECISION}={precision}")
        assumed.append(f"--{_PRECISION} {precision}{_MIXED.format(precision) if precision != 'fp32' else ''}")
    return JOB, [*own, *overrides], [f"assumed: {' · '.join(assumed)}"] if assumed else []


def _given(overrides: Sequence[str], file: Path | None) -> set[str]:
    """Return the names of the settings in the arguments and in the file."""
    found = {word.partition("=")[0].lstrip("-") for word in overrides if word.startswith("--")}
    if file is not None:
        with suppress(PacelineError):  # an unreadable file is reported later, together with all other problems
            found |= set(read_asked(file=file, overrides=()).values)
    return found


def _usual_precision(fleet: Cluster | None) -> str:
    """Return bf16, or the precision to use on a device without bf16."""
    if fleet is None:
        return "bf16"
    return next((name for name in ("bf16", "fp16") if name in fleet.device.flops_per_second), "fp32")


def _split(job: str) -> tuple[str, str, str]:
    """Split a reference into its parts; `transformers.LlamaConfig` is read as `transformers:LlamaConfig`."""
    if ":" in job or job.endswith(".py") or "/" in job:
        return job.partition(":")
    place, _, name = job.rpartition(".")
    return (place, ":", name) if place else (job, "", "")
