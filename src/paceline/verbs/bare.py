"""A Hugging Face config in the place of a job, for the verbs that need no data: `plan`, `simulate`."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from paceline.errors import MachineError, UsageError

JOB = "paceline.hf.bare:make_job"
_CONFIG = "config.json"
_EACH = 8  # samples a device
_BATCH = "train.global_batch_size"


def is_config(job: str) -> bool:
    """Whether it is a folder with config.json, something of transformers, or `module:SomeConfig`."""
    if Path(job).is_dir():
        return (Path(job) / _CONFIG).is_file()
    place, _, name = _split(job)
    return place.partition(".")[0] == "transformers" or name.lower().endswith("config")


def as_job(job: str, overrides: Sequence[str], *, ranks: int) -> tuple[str, list[str], list[str]]:
    """The job that stands for it, its settings, and lines that say what was assumed; anything else as it is.

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
    source = str(Path(job).resolve()) if Path(job).is_dir() else f"{place}{colon}{name}"
    own, assumed = [f"--job.source={source}"], list[str]()
    given = {word.partition("=")[0].lstrip("-") for word in overrides if word.startswith("--")}
    if not given & {_BATCH, "job.global_batch_size"}:
        own.append(f"--{_BATCH}={_EACH * ranks}")
        assumed.append(f"--{_BATCH} {_EACH * ranks}")
    if "job.length" not in given:
        assumed.append("--job.length as the model has positions, 4,096 at most")
    if "job.optimizer" not in given:
        assumed.append("--job.optimizer AdamW")
    if "train.precision" not in given:
        assumed.append("--train.precision fp32")
    return JOB, [*own, *overrides], [f"assumed: {' · '.join(assumed)}"] if assumed else []


def _split(job: str) -> tuple[str, str, str]:
    """`transformers.LlamaConfig` is `transformers:LlamaConfig`."""
    if ":" in job or job.endswith(".py") or "/" in job:
        return job.partition(":")
    place, _, name = job.rpartition(".")
    return (place, ":", name) if place else (job, "", "")
