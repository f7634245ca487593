"""The batches of a recorded run: a file for each batch of a data loader, and for each batch that a model got.

A file has the tensors of the batch that have a row for each sample, with their places in the batch. The tensors keep
their types and bits. The weights of each rank before the first step are kept too: by their values, another run finds
them in its own.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.script_check.recording import BATCH_FOLDER, START_FOLDER
from paceline.torch_internals.pytree import map_leaves

_IGNORED_LABEL = -100  # of torch's cross entropy
_MAX_ELEMENTS = 1 << 27  # of a rank's weights that are written
IsData = Callable[[Tensor], bool]


def loader_key(loader: int, number: int) -> str:
    """Return the name of the batch `number` of a data loader; loaders are counted as the script begins to use them."""
    return f"loader-{loader}-{number}"


def forward_key(module: str, step: int, number: int) -> str:
    """Return the name of the batch `number` that a model of this class got in a step."""
    return f"forward-{module}-{step}-{number}"


def write_batch(folder: Path, rank: int, key: str, batch: Any, *, is_data: IsData) -> None:
    """Write the rows of a batch of a rank; nothing if the batch has no tensor with rows."""
    rows = batch_rows(batch, is_data=is_data)
    if rows:
        file = batch_file(folder, rank, key)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file({path: tensor.detach().cpu().contiguous().clone() for path, tensor in rows.items()}, file)


def read_batches(folder: Path, key: str) -> dict[int, dict[str, Tensor]]:
    """Return the batches of this name by the ranks that had them, in the order of the ranks."""
    files = sorted(
        (folder / BATCH_FOLDER).glob(f"rank-*/{key}.safetensors"), key=lambda file: int(file.parent.name[5:])
    )
    try:
        return {int(file.parent.name[5:]): load_file(file) for file in files}
    except SafetensorError as error:
        raise ValueError(f"a batch {key} of {folder} can't be read: {error}") from None


def batch_file(folder: Path, rank: int, key: str) -> Path:
    """Return the file of a batch."""
    return folder / BATCH_FOLDER / f"rank-{rank}" / f"{key}.safetensors"


def batch_rows(batch: Any, *, is_data: IsData) -> dict[str, Tensor]:
    """Return the tensors of a batch that have a row for each sample, by their place in the batch."""
    found: dict[str, Tensor] = {}

    def keep_tensor(path: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.layout == torch.strided and is_data(leaf):
            found[path] = leaf
        return leaf

    map_leaves(batch, keep_tensor, is_leaf=_is_tensor, path="")
    num_rows = next((len(tensor) for tensor in found.values()), 0)
    return {path: tensor for path, tensor in found.items() if num_rows and len(tensor) == num_rows}


def replace_rows(batch: Any, rows: dict[str, Tensor]) -> Any:
    """Return a batch with the tensors of another one at the same places, on the devices of its own."""

    def change(path: str, leaf: Any) -> Any:
        return rows[path].to(leaf.device) if path in rows and isinstance(leaf, Tensor) else leaf

    return map_leaves(batch, change, is_leaf=_is_tensor, path="")


def join_rows(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the rows of several batches as one; shorter sequences are padded at their end.

    Raises:
        ValueError: the batches have tensors at different places, or of different shapes.
    """
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"the batches of the ranks have different parts: {sorted(parts[0])}, and others")
    return {path: _join([part[path] for part in parts], path) for path in parts[0]}


def _join(tensors: Sequence[Tensor], path: str) -> Tensor:
    if len({tensor.dim() for tensor in tensors}) > 1:
        raise ValueError(f"the batches of the ranks have tensors of different dimensions at {path}")
    longest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    value = _IGNORED_LABEL if "label" in path else 0
    return torch.cat([_pad(tensor, longest, value) for tensor in tensors])


def _pad(tensor: Tensor, sizes: Sequence[int], value: int) -> Tensor:
    padding = [
        amount
        for size, own in zip(reversed(sizes), reversed(tensor.shape[1:]), strict=True)
        for amount in (0, size - own)
    ]
    return torch.nn.functional.pad(tensor, padding, value=value) if any(padding) else tensor


def _is_tensor(_: str, value: Any) -> bool:
    return isinstance(value, Tensor)


def write_start_weights(folder: Path, rank: int, optimizer: int, weights: Mapping[str, Any]) -> None:
    """Write the weights of an optimizer of a rank; nothing if they are large, or parts of DTensors."""
    plain = {name: each.detach() for name, each in weights.items() if not hasattr(each, "placements")}
    if not plain or len(plain) < len(weights) or sum(each.numel() for each in plain.values()) > _MAX_ELEMENTS:
        return
    file = folder / START_FOLDER / f"rank-{rank}-{optimizer}.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: each.cpu().contiguous().clone() for name, each in plain.items()}, file)


def read_start_weights(folder: Path, optimizer: int) -> dict[int, dict[str, Tensor]]:
    """Return the weights of an optimizer by rank.

    Raises:
        ValueError: a file can't be read.
    """
    files = (folder / START_FOLDER).glob(f"rank-*-{optimizer}.safetensors")
    try:
        return {int(file.stem.split("-")[1]): load_file(file) for file in sorted(files)}
    except SafetensorError as error:
        raise ValueError(f"the start weights of {folder} can't be read: {error}") from None
