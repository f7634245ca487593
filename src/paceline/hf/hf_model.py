"""The `model` of a job: built from a Hugging Face config, or from a folder with weights."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from paceline.errors import CheckpointError, JobError
from paceline.hf.weight_conversion import ignored_tensors, weight_sources_for
from paceline.parallel.initialization.pretrained import LoadedShards, load_full_model
from paceline.parallel.initialization.safetensors_loading import load_shards
from paceline.parallel.module_access.shard_spec import ShardSpecs

TASKS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-classification": "AutoModelForImageClassification",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}


@dataclass(frozen=True, kw_only=True)
class ConfigModel:
    """A model constructor `() -> nn.Module` with its own copy of the config, so that two models share nothing."""

    config: Any
    model_class: Any
    dtype: torch.dtype = torch.float32

    def __call__(self) -> nn.Module:
        """Build the model."""
        config = copy.deepcopy(self.config)
        config.dtype = self.dtype
        default_dtype = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            is_auto_class = hasattr(self.model_class, "from_config")
            model = self.model_class.from_config(config) if is_auto_class else self.model_class(config)
        finally:
            torch.set_default_dtype(default_dtype)
        assert isinstance(model, nn.Module)
        return model.train()


@dataclass(frozen=True, kw_only=True)
class FolderModel:
    """A model constructor `() -> nn.Module` that reads a folder's weights; a rank reads only its own shards."""

    folder: Path
    build: ConfigModel
    new: Sequence[str] = ()

    def skeleton(self) -> nn.Module:
        """Build the model with the initial values of its constructor, without the folder's weights."""
        return self.build()

    def load(self, model: nn.Module, shard_specs: ShardSpecs) -> LoadedShards:
        """Load this rank's shards of the folder's tensors, and return them with notes."""
        return load_shards(
            model,
            shard_specs=shard_specs,
            folder=self.folder,
            find_weight_sources=weight_sources_for(model),
            ignored=ignored_tensors(model, has_new_head=bool(self.new)),
            new=self.new,
        )

    def __call__(self) -> nn.Module:
        """Build the whole model. A tensor that the folder lacks (`new`) is drawn from a random stream for its name."""
        return load_full_model(self, seed=torch.initial_seed())


def read_config(source: Any) -> tuple[Any, Path | None]:
    """Return a config prepared for training (no KV cache), and the folder it came from, if `source` is a folder.

    Raises:
        CheckpointError: `source` is a folder without a config.
        JobError: `source` is neither a config nor a folder, or the weights of its model are quantized.
    """
    folder = Path(source) if isinstance(source, str | Path) else None
    if folder is not None:
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"{folder} has no config.json.",
                cause="this is a name on the hub, or a folder without a Hugging Face model",
                hint=f"hf download {folder} --local-dir model, then pl.hf.job('model', ...)",
            )
        config = transformers.AutoConfig.from_pretrained(str(folder))
    elif isinstance(source, transformers.PretrainedConfig):
        config = copy.deepcopy(source)
    else:
        raise JobError(
            f"pl.hf.job got a {type(source).__name__}, expected a config or a folder.",
            hint="pl.hf.job(LlamaConfig(...), ...), or pl.hf.job('folder', ...)",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise JobError("the config has quantized weights, which have no gradient.", hint="the unquantized model")
    for part in [config, *(getattr(config, name) for name in getattr(config, "sub_configs", {}))]:
        if getattr(part, "use_cache", False):
            part.use_cache = False
    return config, folder


def as_known_config(config: Any) -> Any:
    """Return the config as the nearest base class that transformers has models for."""
    known_classes = [base for base in type(config).__mro__ if any(_has_model_for(base, task) for task in TASKS)]
    if not known_classes or known_classes[0] is type(config):
        return config
    base_config = copy.copy(config)
    base_config.__class__ = known_classes[0]
    return base_config


def infer_task(config: Any) -> str:
    """Return the task of the model class that the config names, else a task that transformers supports for the config.

    Raises:
        JobError: no task can be inferred from the config, so the job must name one.
    """
    named = " ".join(getattr(config, "architectures", None) or [])
    endings = {
        "ForCausalLM": ["causal-lm"], "LMHeadModel": ["causal-lm"], "ForMaskedLM": ["masked-lm"],
        "ForConditionalGeneration": ["seq2seq-lm", "speech-seq2seq"],
        "ForImageClassification": ["image-classification"],
        "ForSequenceClassification": ["text-classification"], "ForTokenClassification": ["token-classification"],
    }  # fmt: skip
    tasks = next((tasks for ending, tasks in endings.items() if ending in named), None) or _candidate_tasks(config)
    for task in tasks:
        if _is_supported(config, task):
            return task
    raise JobError(f"{type(config).__name__} does not imply a task.", hint=_supported_tasks_hint(config))


def _candidate_tasks(config: Any) -> list[str]:
    """Return candidate tasks by the kind of model. Two-tower models (text and image) get no image head by default."""
    if getattr(config, "is_encoder_decoder", False):
        return ["seq2seq-lm", "speech-seq2seq"]
    text_tasks = ["causal-lm"] if getattr(config, "is_decoder", False) else ["masked-lm", "causal-lm"]
    is_multimodal = "text_config" in getattr(config, "sub_configs", {})
    return text_tasks if is_multimodal else [*text_tasks, "image-classification"]


def model_class(config: Any, task: Any) -> Any:
    """Return the class that builds the model: the auto class of a task, or `task` itself if it is a class.

    Raises:
        JobError: the task is unknown, or transformers has no such model for this config.
    """
    if not isinstance(task, str):
        return task
    if task not in TASKS:
        raise JobError(f"task={task!r} is unknown.", hint=f"task= one of {', '.join(TASKS)}, or a model class")
    if not _is_supported(config, task):
        raise JobError(
            f"transformers has no {type(config).__name__.removesuffix('Config')} for {task}.",
            hint=_supported_tasks_hint(config),
        )
    return getattr(transformers, TASKS[task])


def _is_supported(config: Any, task: str) -> bool:
    return _has_model_for(type(config), task)


def _has_model_for(config_class: type, task: str) -> bool:
    return config_class in getattr(transformers, TASKS[task])._model_mapping


def _supported_tasks_hint(config: Any) -> str:
    """Return what to type for this config: the tasks that transformers supports, and classes with another head."""
    tasks = [f"task={task!r}" for task in TASKS if _is_supported(config, task)]
    other_classes = sorted(
        {name for name in dir(transformers) if name.startswith("AutoModelFor")} - set(TASKS.values())
    )
    mappings = [getattr(getattr(transformers, name), "_model_mapping", {}) for name in other_classes]
    matches = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    classes = [kind for match in matches for kind in (match if isinstance(match, tuple | list) else (match,))]
    class_names = {kind.__name__ for kind in classes}
    class_hints = [f"task=transformers.{name}" for name in sorted(class_names, key=lambda name: (len(name), name))[:3]]
    return " or ".join(tasks + class_hints) or f"task= one of {', '.join(TASKS)}, or a model class"
