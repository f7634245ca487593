"""A loss over the whole global batch, such as a contrastive loss: every replica computes it from all outputs.

The gradient of such a loss is the sum, over replicas, of the gradients through each replica's own outputs. So outputs
are gathered as values. Each replica replaces its own rows by the tensors that autograd tracks, and computes the same
loss. The usual all-reduce then sums the gradients; no gradient is sent to another replica's outputs.

Values other than tensors (texts, names, arrays) are joined too if they are a column: a list with one entry per sample.
All other values must be the same on every replica; otherwise the replicas would compute different losses. A list as
long as the number of samples may be either. In the first batch it is a column if the replicas' lists differ, and it
stays one for the whole run.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.checksum import checksum
from paceline.data.stream.dataset_state_json import CannotBeWritten, from_json, to_json
from paceline.errors import JobError
from paceline.step.loss.loss_return_value import Terms
from paceline.torch_internals.pytree import is_column, is_square, joined_columns, map_leaves

_NAMES = ("output", "batch")


def gather_rows(
    output: Any, batch: Any, *, world: World, num_samples: int, columns: dict[str, bool] | None = None
) -> tuple[Any, Any] | None:
    """Join output and batch over replicas in rank order: the rows of every tensor, and every column.

    Every replica calls this. A replica without samples passes None twice and gets None. A tensor without dimensions,
    such as a temperature, is shared: its gradient is divided by the number of replicas that have samples. `columns`
    stores, from batch to batch, which paths are columns.

    Raises:
        JobError: a tensor's first dimension is not the samples, or a value cannot be joined and is not the same on
            every replica.
    """
    kinds = {} if columns is None else columns
    mine = None if batch is None else _Parts.of((output, batch), num_samples=num_samples, kinds=kinds)
    told: list[dict[str, Any] | None] = world.gather_json(None if mine is None else mine.as_json())
    present = [each for each in told if each is not None]
    _refuse_odd(present)
    _refuse_other_types(present)
    _refuse_other_values(present)
    _decide_columns(present, kinds)
    own = [] if mine is None else mine.tensors
    joined = []
    for place, (shape, kind) in enumerate(present[0]["tensors"]):
        tensor = own[place] if own else None
        if not shape:
            joined.append(tensor if tensor is None else share_gradient(tensor, among=len(present)))
            continue
        rows = [0 if each is None else each["tensors"][place][0][0] for each in told]
        joined.append(_joined(tensor, rows, shape[1:], getattr(torch, kind.removeprefix("torch.")), world))
    if mine is None:
        return None
    joined_lists = [joined_columns([from_json(each["columns"][place]) for each in present]) for place in mine.places]
    return mine.rebuilt(joined, joined_lists)


@dataclass(kw_only=True)
class _Parts:
    """The output and batch of one replica: tensors, columns by path, and checksums of all other values by path.

    `columns_by_path` says which paths are columns, as decided in earlier batches.
    """

    value: tuple[Any, Any]
    num_samples: int
    kinds: dict[str, bool]
    tensors: list[Tensor] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def of(value: tuple[Any, Any], *, num_samples: int, kinds: dict[str, bool]) -> "_Parts":
        """Split output and batch into tensors, columns and other values."""
        parts = _Parts(value=value, num_samples=num_samples, kinds=kinds)
        for name, each in zip(_NAMES, value, strict=True):
            map_leaves(each, parts._take, is_leaf=parts._is_leaf, path=name)
        return parts

    @property
    def places(self) -> list[str]:
        """The paths of the columns."""
        return list(self.columns)

    def as_json(self) -> dict[str, Any]:
        """Return what the other replicas need of these parts, as JSON."""
        tensors = [(list(tensor.shape), str(tensor.dtype)) for tensor in self.tensors]
        return {"samples": self.num_samples, "tensors": tensors, "columns": self.columns, "fixed": self.fixed}

    def rebuilt(self, tensors: list[Any], columns: list[Any]) -> tuple[Any, Any]:
        """Return output and batch with these tensors and columns in place of their own."""
        of_tensors, of_columns = iter(tensors), dict(zip(self.columns, columns, strict=True))

        def put(path: str, leaf: Any) -> Any:
            return next(of_tensors) if isinstance(leaf, Tensor) else of_columns.get(path, leaf)

        output, batch = (
            map_leaves(each, put, is_leaf=self._is_leaf, path=name)
            for name, each in zip(_NAMES, self.value, strict=True)
        )
        return output, batch

    def _is_leaf(self, path: str, value: Any) -> bool:
        return isinstance(value, Tensor) or self._is_column(path, value)

    def _is_column(self, path: str, value: Any) -> bool:
        return self.kinds.get(path, True) and is_column(value, self.num_samples)

    def _take(self, path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            if not leaf.dim() and not leaf.requires_grad:
                self.fixed[path] = checksum(leaf, 0)
        elif self._is_column(path, leaf):
            self.columns[path] = self._column(path, leaf)
        else:
            self.fixed[path] = checksum(leaf, 0)
        return leaf

    def _column(self, path: str, leaf: Any) -> Any:
        """Return the column as JSON."""
        if path not in self.kinds and is_square(leaf):
            raise JobError(
                f'loss_over="batch" can\'t tell rows from columns in {path}: it is as long as the samples, '
                f"{self.num_samples}, and so is each of its entries.",
                hint="collate=: a dict with a list of texts or numbers for each name",
            )
        try:
            return to_json(leaf)
        except CannotBeWritten as error:
            raise JobError(
                f'loss_over="batch" joins outputs and batch over replicas, but {path} holds {error}.',
                cause="replicas exchange tensors, arrays, text, numbers, and lists and dicts of these",
                hint="collate=: pass one of these to the loss instead",
            ) from error


def share_gradient(tensor: Tensor, *, among: int) -> Tensor:
    """Return the same value with its gradient divided by `num_replicas`, since each of them adds this gradient."""
    return tensor.detach() + (tensor - tensor.detach()) / among if tensor.requires_grad else tensor


def mean_terms(terms: Terms) -> Tensor:
    """Return the loss that backward runs on: the sum over the terms of sum / count, for the whole batch."""
    return torch.stack([total / count for total, count in terms.values()]).sum()


def _joined(own: Tensor | None, rows: list[int], rest: list[int], dtype: torch.dtype, world: World) -> Tensor | None:
    """Join rows by an all-reduce of zero-padded tensors, which is exact and includes replicas without rows."""
    start = sum(rows[: world.rank])
    sent = torch.uint8 if dtype is torch.bool else dtype
    whole = torch.zeros([sum(rows), *rest], dtype=sent, device=world.device)
    if own is not None:
        whole[start : start + len(own)] = own.detach().to(sent)
    whole = world.all_reduce(whole).to(dtype)
    if own is None or not own.requires_grad:
        return whole
    return torch.cat([whole[:start], own, whole[start + len(own) :]])


def _refuse_odd(present: list[dict[str, Any]]) -> None:
    for told in present:
        odd = next((shape for shape, _ in told["tensors"] if shape and shape[0] != told["samples"]), None)
        if odd is not None:
            raise JobError(
                f'loss_over="batch" joins outputs and batch along their first dimension, but one of shape '
                f"{tuple(odd)} came with {told['samples']} samples.",
                hint="forward=lambda model, batch: tensors of shape [samples, ...], or without dimensions",
            )


def _refuse_other_types(present: list[dict[str, Any]]) -> None:
    kinds = {repr([(shape[1:], bool(shape), kind) for shape, kind in told["tensors"]]) for told in present}
    if len(kinds) > 1:
        raise JobError(
            "loss_over=\"batch\": the replicas' outputs or batches differ in shape or type, so they can't be joined.",
            cause="padding to the longest sample of each microbatch",
            hint="pad to one length in collate=",
        )


def _decide_columns(present: list[dict[str, Any]], kinds: dict[str, bool]) -> None:
    """Decide which paths are columns, in the first batch in which a path occurs.

    Raises:
        JobError: all replicas have the same list at a path, which may be a constant or a column.
    """
    first = present[0]
    for path, column in first["columns"].items():
        if path not in kinds and len(present) > 1 and all(told["columns"][path] == column for told in present):
            raise JobError(
                f'loss_over="batch" can\'t tell whether {path} is one value for the whole batch or has one entry per '
                f"sample: it is as long as the samples, {first['samples']}, and the same on every replica.",
                hint="collate=: a tensor of shape [samples, ...] for a column; a constant belongs in the loss itself",
            )
    kinds.update(dict.fromkeys(first["columns"], True))
    for path in first["fixed"]:
        kinds.setdefault(path, False)


def _refuse_other_values(present: list[dict[str, Any]]) -> None:
    """Raise unless every value that is not a column is the same on every replica."""
    first = present[0]
    for told in present:
        names = dict.fromkeys([*first["columns"], *told["columns"], *first["fixed"], *told["fixed"]])
        apart = [name for name in names if (name in first["columns"]) != (name in told["columns"])]
        apart += [name for name in names if first["fixed"].get(name) != told["fixed"].get(name)]
        if apart:
            raise JobError(
                f'loss_over="batch": {apart[0]} is not the same on every replica, and can\'t be joined.',
                cause="it belongs to the samples of one microbatch, but the loss covers the whole batch",
                hint="collate= or forward=: a tensor or a list with one entry per sample, or leave it out",
            )
