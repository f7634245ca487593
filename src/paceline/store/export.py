"""The folder that other programs open: plain safetensors, several files and an index where one would be large.

Names and index as Hugging Face writes them: https://huggingface.co/docs/safetensors/metadata_parsing
"""

import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from paceline.store.disk import sync_folder, write_json
from paceline.store.tensors import Writable, write_tensors

MOST_BYTES = 5_000_000_000
_STEM, _ENDING = "model", ".safetensors"


def write_folder(folder: Path, tensors: Sequence[Writable], *, config: Any, most_bytes: int = MOST_BYTES) -> None:
    """Write aside, flush, and put in the place of `folder`. Tensors are made and written in their order."""
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        files = _files(tensors, most_bytes=most_bytes)
        for name, own in files.items():
            write_tensors(aside / name, own)
        if len(files) > 1:
            write_json(aside / f"{_STEM}{_ENDING}.index.json", _index(files))
        if config is not None:
            write_json(aside / "config.json", config)
        sync_folder(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _files(tensors: Iterable[Writable], *, most_bytes: int) -> dict[str, list[Writable]]:
    """A tensor larger than a file has one of its own."""
    cut: list[list[Writable]] = [[]]
    held = 0
    for tensor in tensors:
        if cut[-1] and held + tensor.num_bytes > most_bytes:
            cut.append([])
            held = 0
        cut[-1].append(tensor)
        held += tensor.num_bytes
    if len(cut) == 1:
        return {f"{_STEM}{_ENDING}": cut[0]}
    return {f"{_STEM}-{number:05d}-of-{len(cut):05d}{_ENDING}": own for number, own in enumerate(cut, 1)}


def _index(files: dict[str, list[Writable]]) -> dict[str, Any]:
    total = sum(tensor.num_bytes for own in files.values() for tensor in own)
    return {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: name for name, own in files.items() for tensor in own},
    }
