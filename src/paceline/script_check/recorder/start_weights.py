"""The weights of each rank before the first step, in files: by their values, another run finds them in its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.script_check.recording import START_FOLDER

_MAX_ELEMENTS = 1 << 27  # of a rank's weights that are written


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
