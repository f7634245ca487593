"""The function `pl.hf.job`, which returns a Job from a Hugging Face config or folder."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.optim import Optimizer

from paceline.errors import JobError
from paceline.hf.hf_model import ConfigModel, FolderModel, infer_task, model_class, read_config
from paceline.hf.tokenize_and_mask import MaskedRows, TokenizedRows, collate
from paceline.job import Job, NamedParameters

# A folder with a tokenizer has at least one of these files.
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "spiece.model", "tokenizer.model")


def job(
    source: Any,
    *,
    train_data: Any,
    global_batch_size: int,
    task: Any = None,
    optimizer: Callable[[NamedParameters], Optimizer | list[Optimizer]] | None = None,
    lr: float = 5e-5,
    weight_decay: float = 0.0,
    tokenizer: Any = None,
    text: str = "text",
    target: str | None = None,
    length: int | None = None,
    mask_rate: float = 0.15,
    new: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> Job:
    """Return a job that trains an unmodified Hugging Face model with its own loss.

    Args:
        source: a config (fresh weights), or a folder with `config.json` and safetensors (its weights).
        train_data: rows with the arguments of the model's forward (`input_ids`, `labels`, ...), or rows of text.
        task: `causal-lm`, `masked-lm`, `seq2seq-lm`, `image-classification`, ..., or a model class; by default the task
            of the class that the config names. If the config names none, it is the first task that transformers
            supports for this config: seq2seq-lm or speech-seq2seq for an encoder-decoder; masked-lm (unless the config
            says that the model is a decoder), causal-lm or image-classification for another model.
        optimizer: as in `Job`; by default AdamW at `lr`, with `weight_decay` on matrices only.
        tokenizer: for rows of text; by default the folder's.
        text, target: the columns of the text, and of the answer for seq2seq.
        length: the number of ids to which texts are cut.
        mask_rate: the fraction of ids that masked-lm hides, with new draws in each epoch.
        new: prefixes of tensors that may be missing in the folder, such as a new head: `("classifier",)`.
        dtype: the dtype of the parameters, whichever dtype the folder has.
        fields: any other fields of `Job`, which override the defaults of this function.

    Raises:
        JobError, CheckpointError: the task is unknown, there is no config, or the model can't train.
    """
    config, folder = read_config(source)
    task = task or infer_task(config)
    build = ConfigModel(config=config, model_class=model_class(config, task), dtype=dtype)
    tokenizer = tokenizer or (folder and _tokenizer(folder))
    data = {
        name: _prepare_rows(rows, config, task, tokenizer, text=text, target=target, length=length, rate=mask_rate)
        for name, rows in {"train_data": train_data, **_evaluation_data(fields)}.items()
    }
    pad_ids = (getattr(tokenizer, "pad_token_id", None), _text_config_value(config, "pad_token_id"))
    pad_id = next((pad_id for pad_id in pad_ids if pad_id is not None), 0)
    defaults: dict[str, Any] = {
        "model": build if folder is None else FolderModel(folder=folder.resolve(), build=build, new=tuple(new)),
        "optimizer": optimizer or _adamw(lr, weight_decay),
        "collate": collate(pad_id=pad_id, copy_labels=task == "causal-lm"),
        "global_batch_size": global_batch_size,
    }
    return Job(**{**defaults, **fields, **data})


def _evaluation_data(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in ("eval_data", "test_data") if fields.get(name) is not None}


def _prepare_rows(
    rows: Any, config: Any, task: Any, tokenizer: Any, *, text: str, target: str | None, length: int | None, rate: float
) -> Any:
    """Return map-style rows in the form of the model's inputs; any other dataset is returned unchanged."""
    if callable(rows) and not hasattr(rows, "__getitem__"):
        return lambda: _prepare_rows(
            rows(), config, task, tokenizer, text=text, target=target, length=length, rate=rate
        )
    dataset = rows
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")) or not len(dataset):
        return rows
    first_row = dataset[0]
    is_text = isinstance(first_row, str) or (
        isinstance(first_row, dict) and text in first_row and "input_ids" not in first_row
    )
    if is_text:
        dataset = TokenizedRows(rows=dataset, tokenizer=tokenizer, column=text, target=target, length=length)
        first_row = dataset[0]
    if task == "masked-lm" and isinstance(first_row, dict) and "labels" not in first_row:
        dataset = _mask_rows(dataset, config, tokenizer, rate)
    return dataset


def _mask_rows(rows: Any, config: Any, tokenizer: Any, rate: float) -> MaskedRows:
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None:
        raise JobError(
            "masked-lm needs labels in the rows, or a tokenizer with a mask token.",
            hint="rows with `labels` (-100 where there is no target), or tokenizer=...",
        )
    special = frozenset(tokenizer.all_special_ids)
    return MaskedRows(
        rows=rows, mask_id=mask_id, vocabulary=int(_text_config_value(config, "vocab_size")), special=special, rate=rate
    )


def _text_config_value(config: Any, name: str) -> Any:
    """Return a value of the text part of the config."""
    return getattr(config.get_text_config(), name, None)


def _tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        return None
    return transformers.AutoTokenizer.from_pretrained(str(folder))


def _adamw(lr: float, weight_decay: float) -> Callable[[NamedParameters], Optimizer]:
    def build(named: NamedParameters) -> Optimizer:
        matrix_parameters = [p for _, p in named if p.dim() > 1]
        other_parameters = [p for _, p in named if p.dim() <= 1]
        groups = [
            {"params": matrix_parameters, "weight_decay": weight_decay},
            {"params": other_parameters, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr)

    return build
