"""A job from a Hugging Face config alone, with placeholder rows of the right shape, for plans."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import Dataset
from typing_extensions import override

from paceline.config.job_reference import JobRef
from paceline.errors import JobError
from paceline.hf.hf_job import job
from paceline.hf.hf_model import as_known_config, infer_task, model_class, read_config
from paceline.job import Job, NamedParameters, import_job_module

ROWS = 1 << 20
MAX_POSITIONS, _DEFAULT_POSITIONS = 4096, 1024  # positions: the maximum, and the default if a config has none
_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions")  # names of the maximum in configs


def make_job(
    source: str,
    task: str = "",
    length: int = 0,
    global_batch_size: int = 64,
    optimizer: str = "AdamW",
    lr: float = 1e-4,
) -> Job:
    """Return a job for the model that `source` describes: a folder with config.json, or `module:Name`.

    Args:
        source: a folder, a config or a class that defines the model; its weights are neither needed nor read.
        task: as in `pl.hf.job`; by default the task that the config implies.
        length: positions of a sample; by default the model's maximum (at most 4,096), or 1,024 if the config has none.
        global_batch_size: samples of a step.
        optimizer: a class of `torch.optim`.
        lr: the learning rate of the optimizer; no plan depends on it.

    Raises:
        JobError, CheckpointError: there is no config, no task, or no such optimizer.
    """
    config, named_class = _read_source(source)
    task_or_class = named_class if named_class is not None else task or infer_task(config)
    model_class(config, task_or_class)  # refuses an impossible task before rows are made for it
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # a plan does not depend on this id
    rows = RepeatedRows(
        config=config,
        task=task_or_class if isinstance(task_or_class, str) else _task_of_class(named_class, config),
        length=length,
    )
    optimizer_class = getattr(torch.optim, optimizer, None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise JobError(f"torch.optim has no {optimizer}.", hint="--job.optimizer AdamW, or SGD, Adafactor, Muon")
    build_optimizer: Any = optimizer_class

    def build_job_optimizer(parameters: NamedParameters) -> Any:
        return build_optimizer([parameter for _, parameter in parameters], lr=lr)

    return job(
        config, task=task_or_class, train_data=rows, global_batch_size=global_batch_size, optimizer=build_job_optimizer,
        name=str(getattr(config, "model_type", "")) or type(config).__name__,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RepeatedRows(Dataset[Any]):
    """A dataset of identical rows, because a plan depends only on their shapes.

    `length` is the number of positions in a row, or 0 for the default.
    """

    config: Any
    task: str
    length: int

    def __len__(self) -> int:
        return ROWS

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.task == "image-classification":
            return {"pixel_values": self._image(), "labels": 0}
        if self.task == "speech-seq2seq":
            return {"input_features": self._spectrogram(), "labels": self._ids()}
        ids = self._ids()
        labels: Any = 0 if self.task == "text-classification" else torch.zeros_like(ids)
        return {"input_ids": ids, "labels": labels}

    def _ids(self) -> Tensor:
        text = self.config.get_text_config()
        lengths = (getattr(text, name, None) for name in _POSITIONS)
        longest = next((int(length) for length in lengths if length), _DEFAULT_POSITIONS)
        return torch.arange(self.length or min(longest, MAX_POSITIONS)) % int(text.vocab_size)

    def _image(self) -> Tensor:
        size = getattr(self.config, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.zeros(int(getattr(self.config, "num_channels", 3)), int(height), int(width))

    def _spectrogram(self) -> Tensor:
        """Return a spectrogram of Whisper's input length, which is twice the length of its encoder."""
        return torch.zeros(int(self.config.num_mel_bins), 2 * int(self.config.max_source_positions))


def _task_of_class(named_class: Any, config: Any) -> str:
    """Return the task of a named model class, derived from its name."""
    config_with_class = copy.copy(config)
    config_with_class.architectures = [named_class.__name__]
    return infer_task(config_with_class)


def _read_source(source: str) -> tuple[Any, Any]:
    """Return the config that `source` names, and the model class if `source` names a class."""
    if Path(source).is_dir():
        return _read_folder(Path(source)), None
    path_or_module, _, name = source.partition(":")
    module = import_job_module(
        JobRef(path=Path(path_or_module)) if path_or_module.endswith(".py") else JobRef(module=path_or_module)
    )
    target = getattr(module, name, None)
    if target is None:
        raise JobError(
            f"{path_or_module} has no {name}.",
            where=str(getattr(module, "__file__", path_or_module)),
            hint=f"{path_or_module}:NAME",
        )
    named_class = None
    if isinstance(target, type) and hasattr(target, "config_class") and not _is_config(target):
        target, named_class = target.config_class, target
    config = target if isinstance(target, transformers.PretrainedConfig) else _call_factory(source, target)
    if not isinstance(config, transformers.PretrainedConfig):
        raise JobError(
            f"{source} is a {type(config).__name__}, expected a Hugging Face config.", hint="module:LlamaConfig"
        )
    return as_known_config(read_config(config)[0]), named_class


def _is_config(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, transformers.PretrainedConfig)


def _call_factory(source: str, target: Any) -> Any:
    """Call a class or function without arguments to get a config; return any other object as it is."""
    if not callable(target):
        return target
    try:
        return target()
    except Exception as error:
        raise JobError(
            f"{source} does not return a config: {type(error).__name__}: {error}.",
            hint="a config that can be built without arguments",
        ) from error


def _read_folder(folder: Path) -> Any:
    try:
        return read_config(folder)[0]
    except (ValueError, OSError, KeyError) as error:
        raise JobError(
            f"{folder / 'config.json'} can't be read: {str(error).splitlines()[0]}.",
            cause="a model type that the installed transformers does not know, or a truncated file",
            hint="pip install --upgrade transformers",
        ) from error
