"""Batches for Hugging Face models: text to ids, masks, labels, padding. Draws come from each sample's own stream."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from paceline.errors import JobError

IGNORED = -100
_FILL = {"attention_mask": 0, "token_type_ids": 0, "labels": IGNORED, "decoder_attention_mask": 0}


@dataclass(frozen=True, kw_only=True)
class Texts(Dataset[Any]):
    """Rows with text, tokenized one at a time; rows that have `input_ids` are passed on unchanged."""

    rows: Any
    tokenizer: Any
    column: str
    target: str | None
    length: int | None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if isinstance(row, Mapping) and "input_ids" in row:
            return row
        return tokenized(row, tokenizer=self.tokenizer, column=self.column, target=self.target, length=self.length)


def tokenized(row: Any, *, tokenizer: Any, column: str, target: str | None, length: int | None) -> dict[str, Any]:
    """Return one row's ids and mask; with `target`, the ids of that column become the labels.

    Raises:
        JobError: no tokenizer, or no such column.
    """
    if tokenizer is None:
        raise JobError(
            "the rows are text, but there is no tokenizer.",
            cause="a job from a config, or from a folder without one",
            hint="pl.hf.job(..., tokenizer=AutoTokenizer.from_pretrained('folder'))",
        )
    given = {"text": row} if isinstance(row, str) else row
    for name in filter(None, (column, target)):
        if name not in given:
            raise JobError(
                f"the rows have no column {name!r}, they have {', '.join(map(repr, given))}.",
                hint="text='the column', target='the column of the answer'",
            )
    cut: dict[str, Any] = {"truncation": length is not None, "max_length": length}
    found = dict(tokenizer(given[column], **cut))
    if target is not None:
        found["labels"] = tokenizer(text_target=given[target], **cut)["input_ids"]
    elif "labels" in given or "label" in given:
        found["labels"] = given.get("labels", given.get("label"))
    return found


def masked(ids: Tensor, *, mask_id: int, vocabulary: int, special: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Mask some ids and return labels for them: 80 % masked, 10 % random, 10 % kept (Devlin et al. 2019)."""
    chosen = (torch.rand(ids.shape) < rate) & ~special
    kind = torch.rand(ids.shape)
    others = torch.randint(vocabulary, ids.shape)
    hidden = torch.where(kind < 0.8, mask_id, torch.where(kind < 0.9, others, ids))
    return torch.where(chosen, hidden, ids), torch.where(chosen, ids, IGNORED)


@dataclass(frozen=True, kw_only=True)
class Masking(Dataset[Any]):
    """Rows of ids that are masked again at each read."""

    rows: Any
    mask_id: int
    vocabulary: int
    special: frozenset[int]
    rate: float

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        row = self.rows[index]
        if "labels" in row:
            return row
        ids = torch.as_tensor(row["input_ids"])
        special = torch.isin(ids, torch.tensor(sorted(self.special)))
        hidden, labels = masked(ids, mask_id=self.mask_id, vocabulary=self.vocabulary, special=special, rate=self.rate)
        return {**row, "input_ids": hidden, "labels": labels}


def collate(*, pad_id: int, copy_labels: bool) -> Callable[[list[Any]], Any]:
    """Return a collate function that pads rows to the longest; `copy_labels` copies ids to labels if there are none."""

    def together(rows: list[Any]) -> Any:
        if not isinstance(rows[0], Mapping):
            return default_collate(rows)
        found: dict[str, Any] = {}
        for name in rows[0]:
            values = [row[name] for row in rows]
            found[name] = _padded(values, _FILL.get(name, pad_id)) if _has_length(values[0]) else _stacked(values)
        ids = found.get("input_ids")
        uneven = ids is not None and len({len(row["input_ids"]) for row in rows}) > 1
        if uneven and "attention_mask" not in found:
            found["attention_mask"] = _padded([torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows], 0)
        if copy_labels and "labels" not in found and ids is not None:
            mask = found.get("attention_mask")
            found["labels"] = ids.clone() if mask is None else torch.where(mask.bool(), ids, IGNORED)
        return found

    return together


def _has_length(value: Any) -> bool:
    return (isinstance(value, Tensor) and value.dim() == 1) or isinstance(value, list | tuple)


def _stacked(values: Sequence[Any]) -> Any:
    return default_collate(list(values))


def _padded(values: Sequence[Any], fill: int) -> Tensor:
    tensors = [torch.as_tensor(value) for value in values]
    longest = max(len(tensor) for tensor in tensors)
    found = tensors[0].new_full((len(tensors), longest), fill)
    for place, tensor in enumerate(tensors):
        found[place, : len(tensor)] = tensor
    return found
