"""Rows and batches for Hugging Face models: tokens, masks, labels and padding.

The masks are drawn from torch's global generator. By default, the loader seeds this generator for each sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate
from typing_extensions import override

from paceline.errors import JobError

IGNORE_INDEX = -100
_PADDING_VALUES = {"attention_mask": 0, "token_type_ids": 0, "labels": IGNORE_INDEX, "decoder_attention_mask": 0}


@dataclass(frozen=True, kw_only=True)
class TokenizedRows(Dataset[Any]):
    """Rows with text, tokenized one at a time; rows that have `input_ids` are passed on unchanged."""

    rows: Any
    tokenizer: Any
    column: str
    target: str | None
    length: int | None

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if isinstance(row, Mapping) and "input_ids" in row:
            return row
        return tokenize_row(row, tokenizer=self.tokenizer, column=self.column, target=self.target, length=self.length)


def tokenize_row(row: Any, *, tokenizer: Any, column: str, target: str | None, length: int | None) -> dict[str, Any]:
    """Return one row's ids and mask; with `target`, the ids of that column become the labels.

    Raises:
        JobError: there is no tokenizer, or no such column.
    """
    if tokenizer is None:
        raise JobError(
            "the rows are text, but there is no tokenizer.",
            cause="the job comes from a config, or from a folder without a tokenizer",
            hint="pl.hf.job(..., tokenizer=AutoTokenizer.from_pretrained('folder'))",
        )
    columns = {"text": row} if isinstance(row, str) else row
    for name in filter(None, (column, target)):
        if name not in columns:
            raise JobError(
                f"the rows have no column {name!r}, they have {', '.join(map(repr, columns))}.",
                hint="text='the column', target='the column of the answer'",
            )
    truncation: dict[str, Any] = {"truncation": length is not None, "max_length": length}
    model_inputs = dict(tokenizer(columns[column], **truncation))
    if target is not None:
        model_inputs["labels"] = tokenizer(text_target=columns[target], **truncation)["input_ids"]
    elif "labels" in columns or "label" in columns:
        model_inputs["labels"] = columns.get("labels", columns.get("label"))
    return model_inputs


def mask_tokens(ids: Tensor, *, mask_id: int, vocabulary: int, special: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Return the ids with some of them masked, and their labels (Devlin et al. 2019).

    A fraction `rate` of the ids that are not `special` is chosen as targets: 80 % of these become `mask_id`, 10 % a
    random id, and 10 % stay as they are.
    """
    is_chosen = (torch.rand(ids.shape) < rate) & ~special
    draw = torch.rand(ids.shape)
    random_ids = torch.randint(vocabulary, ids.shape)
    masked_ids = torch.where(draw < 0.8, mask_id, torch.where(draw < 0.9, random_ids, ids))
    return torch.where(is_chosen, masked_ids, ids), torch.where(is_chosen, ids, IGNORE_INDEX)


@dataclass(frozen=True, kw_only=True)
class MaskedRows(Dataset[Any]):
    """Rows of ids, masked at random each time a row is read."""

    rows: Any
    mask_id: int
    vocabulary: int
    special: frozenset[int]
    rate: float

    def __len__(self) -> int:
        return len(self.rows)

    @override
    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if "labels" in row:
            return row
        ids = torch.as_tensor(row["input_ids"])
        special = torch.isin(ids, torch.tensor(sorted(self.special)))
        masked_ids, labels = mask_tokens(
            ids, mask_id=self.mask_id, vocabulary=self.vocabulary, special=special, rate=self.rate
        )
        return {**row, "input_ids": masked_ids, "labels": labels}


def collate(*, pad_id: int, copy_labels: bool) -> Callable[[list[Any]], Any]:
    """Return a collate function that pads rows to the longest; `copy_labels` copies ids to labels if there are none."""

    def collate_rows(rows: list[Any]) -> Any:
        if not isinstance(rows[0], Mapping):
            return default_collate(rows)
        batch: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            batch[name] = _pad(values, _PADDING_VALUES.get(name, pad_id)) if _has_length(values[0]) else _stack(values)
        ids = batch.get("input_ids")
        has_padding = ids is not None and len({len(row["input_ids"]) for row in rows}) > 1
        if has_padding and "attention_mask" not in batch:
            batch["attention_mask"] = _pad([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], 0)
        if copy_labels and "labels" not in batch and ids is not None:
            mask = batch.get("attention_mask")
            batch["labels"] = ids.clone() if mask is None else torch.where(mask.bool(), ids, IGNORE_INDEX)
        return batch

    return collate_rows


def _has_length(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 1) or isinstance(value, list | tuple)


def _stack(values: Sequence[Any]) -> Any:
    return default_collate(list(values))


def _pad(values: Sequence[Any], fill: int) -> Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    longest = max(len(tensor) for tensor in tensors)
    padded = tensors[0].new_full((len(tensors), longest), fill)
    for row, tensor in enumerate(tensors):
        padded[row, : len(tensor)] = tensor
    return padded
