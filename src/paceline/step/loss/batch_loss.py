"""A loss over the whole global batch, such as a contrastive loss: every replica computes it from all outputs.

The gradient of such a loss is the sum, over replicas, of the gradients through each replica's own outputs. So outputs
are gathered without gradients. Each replica replaces its own rows by the tensors that autograd tracks, and computes the
same loss. The usual all-reduce then sums the gradients; no gradient is sent to another replica's outputs.

Values other than tensors (texts, names, arrays) are joined too if they are a column: a list with one entry per sample.
All other values must be the same on every replica; otherwise the replicas would compute different losses. A list with
as many entries as there are samples could be a column or one value for the batch. The first batch decides for the whole
run: if the list differs between replicas, it is a column; if it is the same on all replicas, it is refused.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.checksum import checksum
from paceline.data.stream.dataset_state_json import NotJsonConvertible, from_json, to_json
from paceline.errors import JobError
from paceline.step.loss.loss_return_value import Terms
from paceline.torch_internals.pytree import concatenate_columns, is_column, is_square, map_leaves

_NAMES = ("output", "batch")


def gather_rows(
    output: Any, batch: Any, *, world: World, num_samples: int, known_columns: dict[str, bool] | None = None
) -> tuple[Any, Any] | None:
    """Join output and batch over replicas in rank order: the rows of every tensor, and every column.

    Every replica calls this. A replica without samples passes None for both and gets None. A tensor without dimensions,
    such as a temperature, is shared: its gradient is divided by the number of replicas that have samples.
    `known_columns` is kept from batch to batch. It maps the path of each value in output and batch to True if the value
    is a column.

    Raises:
        JobError: a tensor's first dimension is not the number of samples, or a value cannot be joined and is not the
            same on every replica.
    """
    columns_by_path = {} if known_columns is None else known_columns
    local_parts = (
        None
        if batch is None
        else _BatchParts.from_batch((output, batch), num_samples=num_samples, columns_by_path=columns_by_path)
    )
    parts_by_rank: list[dict[str, Any] | None] = world.gather_json(
        None if local_parts is None else local_parts.as_json()
    )
    parts_of_replicas = [parts for parts in parts_by_rank if parts is not None]  # the replicas with samples
    _refuse_wrong_length(parts_of_replicas)
    _refuse_different_types(parts_of_replicas)
    _refuse_different_values(parts_of_replicas)
    _decide_columns(parts_of_replicas, columns_by_path)
    local_tensors = [] if local_parts is None else local_parts.tensors
    joined = []
    for position, (shape, dtype_name) in enumerate(parts_of_replicas[0]["tensors"]):
        tensor = local_tensors[position] if local_tensors else None
        if not shape:
            joined.append(tensor if tensor is None else share_gradient(tensor, num_replicas=len(parts_of_replicas)))
            continue
        num_rows_by_rank = [0 if parts is None else parts["tensors"][position][0][0] for parts in parts_by_rank]
        dtype = getattr(torch, dtype_name.removeprefix("torch."))
        joined.append(_join_rows(tensor, num_rows_by_rank, shape[1:], dtype, world))
    if local_parts is None:
        return None
    joined_lists = [
        concatenate_columns([from_json(parts["columns"][path]) for parts in parts_of_replicas])
        for path in local_parts.column_paths
    ]
    return local_parts.rebuild(joined, joined_lists)


@dataclass(kw_only=True)
class _BatchParts:
    """The output and batch of one replica, split into tensors, columns and other values.

    `fixed` has the checksums of the values that must be the same on every replica. `columns_by_path` maps each path of
    earlier batches to True if its value is a column, and otherwise to False.
    """

    value: tuple[Any, Any]
    num_samples: int
    columns_by_path: dict[str, bool]
    tensors: list[Tensor] = field(default_factory=list)
    columns: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, int] = field(default_factory=dict)

    @staticmethod
    def from_batch(value: tuple[Any, Any], *, num_samples: int, columns_by_path: dict[str, bool]) -> "_BatchParts":
        """Split output and batch into tensors, columns and other values."""
        parts = _BatchParts(value=value, num_samples=num_samples, columns_by_path=columns_by_path)
        for name, root in zip(_NAMES, value, strict=True):
            map_leaves(root, parts._store_leaf, is_leaf=parts._is_leaf, path=name)
        return parts

    @property
    def column_paths(self) -> list[str]:
        """The paths of the columns."""
        return list(self.columns)

    def as_json(self) -> dict[str, Any]:
        """Return, as JSON, what the other replicas need: the shapes of the tensors, the columns and the checksums."""
        tensors = [(list(tensor.shape), str(tensor.dtype)) for tensor in self.tensors]
        return {"samples": self.num_samples, "tensors": tensors, "columns": self.columns, "fixed": self.fixed}

    def rebuild(self, tensors: list[Any], columns: list[Any]) -> tuple[Any, Any]:
        """Return output and batch with these tensors and columns in place of this replica's own."""
        remaining_tensors, column_by_path = iter(tensors), dict(zip(self.columns, columns, strict=True))

        def replace_leaf(path: str, leaf: Any) -> Any:
            return next(remaining_tensors) if isinstance(leaf, Tensor) else column_by_path.get(path, leaf)

        output, batch = (
            map_leaves(root, replace_leaf, is_leaf=self._is_leaf, path=name)
            for name, root in zip(_NAMES, self.value, strict=True)
        )
        return output, batch

    def _is_leaf(self, path: str, value: Any) -> bool:
        return isinstance(value, Tensor) or self._is_column(path, value)

    def _is_column(self, path: str, value: Any) -> bool:
        return self.columns_by_path.get(path, True) and is_column(value, self.num_samples)

    def _store_leaf(self, path: str, leaf: Any) -> Any:
        """Add a leaf to the tensors, the columns or the checksums, and return it."""
        if isinstance(leaf, Tensor):
            self.tensors.append(leaf)
            if not leaf.dim() and not leaf.requires_grad:
                self.fixed[path] = checksum(leaf, 0)
        elif self._is_column(path, leaf):
            self.columns[path] = self._column_to_json(path, leaf)
        else:
            self.fixed[path] = checksum(leaf, 0)
        return leaf

    def _column_to_json(self, path: str, leaf: Any) -> Any:
        """Return the column as JSON."""
        if path not in self.columns_by_path and is_square(leaf):
            raise JobError(
                f'loss_over="batch" can\'t tell which dimension of {path} runs over the samples: its length and the '
                f"length of each entry are both equal to the number of samples, {self.num_samples}.",
                hint="collate=: a dict with a list of texts or numbers for each name",
            )
        try:
            return to_json(leaf)
        except NotJsonConvertible as error:
            raise JobError(
                f'loss_over="batch" joins outputs and batch over replicas, but {path} holds {error}.',
                cause="replicas exchange tensors, arrays, text, numbers, and lists and dicts of these",
                hint="collate=: pass one of these to the loss instead",
            ) from error


def share_gradient(tensor: Tensor, *, num_replicas: int) -> Tensor:
    """Return the tensor with its gradient divided by `num_replicas`, because every replica adds the whole gradient."""
    return tensor.detach() + (tensor - tensor.detach()) / num_replicas if tensor.requires_grad else tensor


def mean_terms(terms: Terms) -> Tensor:
    """Return the loss that backward runs on: the sum over the terms of sum / count, for the whole batch."""
    return torch.stack([total / count for total, count in terms.values()]).sum()


def _join_rows(
    local_rows: Tensor | None, num_rows_by_rank: list[int], row_shape: list[int], dtype: torch.dtype, world: World
) -> Tensor | None:
    """Return the rows of all replicas, joined by an all-reduce of zero-padded tensors.

    The all-reduce is exact, and replicas without rows can take part in it.
    """
    start = sum(num_rows_by_rank[: world.rank])
    sent_dtype = torch.uint8 if dtype is torch.bool else dtype
    all_rows = torch.zeros([sum(num_rows_by_rank), *row_shape], dtype=sent_dtype, device=world.device)
    if local_rows is not None:
        all_rows[start : start + len(local_rows)] = local_rows.detach().to(sent_dtype)
    all_rows = world.all_reduce(all_rows).to(dtype)
    if local_rows is None or not local_rows.requires_grad:
        return all_rows
    return torch.cat([all_rows[:start], local_rows, all_rows[start + len(local_rows) :]])


def _refuse_wrong_length(parts_of_replicas: list[dict[str, Any]]) -> None:
    """Raise an error if a tensor's first dimension is not its replica's number of samples."""
    for parts in parts_of_replicas:
        wrong_shape = next((shape for shape, _ in parts["tensors"] if shape and shape[0] != parts["samples"]), None)
        if wrong_shape is not None:
            raise JobError(
                f'loss_over="batch" joins outputs and batch along their first dimension, but a tensor of '
                f"shape {tuple(wrong_shape)} came with {parts['samples']} samples.",
                hint="forward=lambda model, batch: tensors of shape [samples, ...], or without dimensions",
            )


def _refuse_different_types(parts_of_replicas: list[dict[str, Any]]) -> None:
    """Raise an error if tensors differ between replicas in dtype or in the shape of a row."""
    row_types = {
        repr([(shape[1:], bool(shape), dtype) for shape, dtype in parts["tensors"]]) for parts in parts_of_replicas
    }
    if len(row_types) > 1:
        raise JobError(
            "loss_over=\"batch\": the replicas' outputs or batches differ in shape or type, so they can't be joined.",
            cause="padding to the longest sample of each microbatch",
            hint="pad to one length in collate=",
        )


def _decide_columns(parts_of_replicas: list[dict[str, Any]], columns_by_path: dict[str, bool]) -> None:
    """Decide for each path that is new in this batch whether its value is a column.

    Raises:
        JobError: all replicas have the same list at a path, which may be a constant or a column.
    """
    first = parts_of_replicas[0]
    for path, column in first["columns"].items():
        if (
            path not in columns_by_path
            and len(parts_of_replicas) > 1
            and all(parts["columns"][path] == column for parts in parts_of_replicas)
        ):
            raise JobError(
                f'loss_over="batch" can\'t tell whether {path} is one value for the whole batch or has one entry per '
                f"sample: it has {first['samples']} entries, as many as there are samples, and is the same on every "
                "replica.",
                hint="collate=: a tensor of shape [samples, ...] for a column; a constant belongs in the loss itself",
            )
    columns_by_path.update(dict.fromkeys(first["columns"], True))
    for path in first["fixed"]:
        columns_by_path.setdefault(path, False)


def _refuse_different_values(parts_of_replicas: list[dict[str, Any]]) -> None:
    """Raise an error if a value that is not a column differs between replicas."""
    first = parts_of_replicas[0]
    for parts in parts_of_replicas:
        names = dict.fromkeys([*first["columns"], *parts["columns"], *first["fixed"], *parts["fixed"]])
        different = [name for name in names if (name in first["columns"]) != (name in parts["columns"])]
        different += [name for name in names if first["fixed"].get(name) != parts["fixed"].get(name)]
        if different:
            raise JobError(
                f'loss_over="batch": {different[0]} is not the same on every replica, and can\'t be joined.',
                cause="it belongs to the samples of one microbatch, but the loss covers the whole batch",
                hint="collate= or forward=: a tensor or a list with one entry per sample, or leave it out",
            )
