"""A Hugging Face config used as a job, for the verbs that need no data: `plan` and `simulate`."""

from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from paceline.config.merge_settings import read_requested_settings
from paceline.errors import MachineError, PacelineError, UsageError
from paceline.planner.hardware.cluster import Cluster

JOB = "paceline.hf.config_only_job:make_job"  # the job that is built from a config
_CONFIG_FILE = "config.json"
_SAMPLES_PER_DEVICE = 8
_BATCH_SETTING = "train.global_batch_size"
_PRECISION_SETTING = "train.precision"
_MIXED_PRECISION_NOTE = (
    " (mixed: matmuls in {}, weights and optimizer in float32; --train.precision fp32 for float32 only)"
)


def is_hf_config(job: str) -> bool:
    """Return whether `job` is a config.json or its folder, a transformers class, or `module:SomeConfig`."""
    if Path(job).is_dir():
        return (Path(job) / _CONFIG_FILE).is_file()
    if Path(job).name == _CONFIG_FILE:
        return Path(job).is_file()
    module, _, name = _split_reference(job)
    return module.partition(".")[0] == "transformers" or name.lower().endswith("config")


def config_as_job(
    job: str, overrides: Sequence[str], *, ranks: int, cluster: Cluster | None = None, file: Path | None = None
) -> tuple[str, list[str], list[str]]:
    """Return the job, its settings, and lines about assumed values.

    If `job` is a Hugging Face config, the returned job builds its model from the config; any other job is returned
    unchanged. A value in `overrides` or in the TOML `file` replaces the assumed one. The assumed batch has 8 samples
    per rank, and the assumed precision is the usual one for the devices of `cluster`. If `cluster` is None, the job
    runs on this machine with `ranks` ranks.

    Raises:
        UsageError: `job` is a folder without a config.
        MachineError: transformers, which reads the config, is not installed.
    """
    if not is_hf_config(job):
        if Path(job).is_dir():
            raise UsageError(
                f"{job} is a folder without {_CONFIG_FILE}.",
                hint=f"paceline plan {job.rstrip('/')}/job.py, or a model's folder",
            )
        return job, list(overrides), []
    if find_spec("transformers") is None:
        raise MachineError(
            f"{job} is a Hugging Face config, and transformers is not installed.", hint="pip install 'paceline[hf]'"
        )
    module, colon, name = _split_reference(job)
    folder = Path(job).parent if Path(job).name == _CONFIG_FILE else Path(job)
    source = str(folder.resolve()) if folder.is_dir() and Path(job).exists() else f"{module}{colon}{name}"
    config_settings, assumed = [f"--job.source={source}"], list[str]()
    requested = _requested_names(overrides, file)
    if not requested & {_BATCH_SETTING, "job.global_batch_size"}:
        batch = _SAMPLES_PER_DEVICE * (ranks if cluster is None else cluster.ranks)
        config_settings.append(f"--{_BATCH_SETTING}={batch}")
        assumed.append(f"--{_BATCH_SETTING} {batch}")
    if "job.length" not in requested:
        assumed.append("--job.length from the model's positions, at most 4,096")
    if "job.optimizer" not in requested:
        assumed.append("--job.optimizer AdamW")
    if _PRECISION_SETTING not in requested:
        precision = _usual_precision(cluster)
        config_settings.append(f"--{_PRECISION_SETTING}={precision}")
        assumed.append(
            f"--{_PRECISION_SETTING} {precision}"
            f"{_MIXED_PRECISION_NOTE.format(precision) if precision != 'fp32' else ''}"
        )
    return JOB, [*config_settings, *overrides], [f"assumed: {' · '.join(assumed)}"] if assumed else []


def _requested_names(overrides: Sequence[str], file: Path | None) -> set[str]:
    """Return the names of the settings in the arguments and in the file."""
    names = {word.partition("=")[0].lstrip("-") for word in overrides if word.startswith("--")}
    if file is not None:
        with suppress(PacelineError):  # an unreadable file is reported later, together with all other problems
            names |= set(read_requested_settings(file=file, overrides=()).values)
    return names


def _usual_precision(cluster: Cluster | None) -> str:
    """Return bf16, or the precision to use on a device without bf16."""
    if cluster is None:
        return "bf16"
    return next((name for name in ("bf16", "fp16") if name in cluster.device.flops_per_second), "fp32")


def _split_reference(job: str) -> tuple[str, str, str]:
    """Split a reference into its parts; `transformers.LlamaConfig` is read as `transformers:LlamaConfig`."""
    if ":" in job or job.endswith(".py") or "/" in job:
        return job.partition(":")
    module, _, name = job.rpartition(".")
    return (module, ":", name) if module else (job, "", "")
