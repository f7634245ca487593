"""Model folders for other programs: plain safetensors, split into several files with an index if large.

Names and index follow Hugging Face: https://huggingface.co/docs/safetensors/metadata_parsing
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.safetensors_io import Writable, write_tensors
from paceline.errors import CheckpointError
from paceline.filesystem.atomic_files import open_regular, read_json, sync_folder, write_json

WEIGHTS = "weights.json"
MOST_BYTES = 5_000_000_000
_SEAL = "seal"
_STEM, _ENDING = "model", ".safetensors"


def write_folder(folder: Path, tensors: Sequence[Writable], *, config: Any, most_bytes: int = MOST_BYTES) -> None:
    """Write aside, flush, and replace the model files in `folder`, or in the folder it links to.

    Other files there (a tokenizer, a README) stay. Tensors are made and written in their order.
    """
    folder = folder.resolve()
    aside, before = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.before")
    _keep_others(before, folder)  # of a process that was killed between the two
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
        if folder.exists():
            folder.rename(before)
        aside.rename(folder)
        _keep_others(before, folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _keep_others(before: Path, folder: Path) -> None:
    """Move the files of `before` that belong to no model into `folder`, and empty `before`."""
    if not before.is_dir():
        return
    if not folder.exists():
        before.rename(folder)
        return
    for path in before.iterdir():
        if _is_of_a_model(path):
            path.unlink()
        elif not (folder / path.name).exists():
            path.rename(folder / path.name)
    with contextlib.suppress(OSError):  # a name that both have: the older one stays aside
        before.rmdir()


def _is_of_a_model(path: Path) -> bool:
    is_weights = path.name.startswith(_STEM) and path.name.endswith((_ENDING, f"{_ENDING}.index.json"))
    return not path.is_dir() and (is_weights or path.name == "config.json")


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a written folder; subfolders are skipped.

    Raises:
        OSError: one can't be read.
        ValueError: one is no regular file.
    """
    found = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            continue
        with os.fdopen(open_regular(path), "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def check_folder(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare every file of a written folder with its digest.

    Raises:
        CheckpointError: one is missing, was added, or is not what was written.
    """
    try:
        found = digest_files(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}.", where=str(folder)) from error
    for name in sorted({*found, *digests}):
        if found.get(name) != digests.get(name):
            how = "differs from what was written" if name in digests else "was not written with the others"
            how = how if name in found else "is missing"
            raise CheckpointError(
                f"{name} in {folder.name} {how}.",
                where=str(folder / name),
                cause="a damaged disk, a flipped bit, or an edited file",
                hint="paceline ckpt consolidate RUN --to FOLDER writes it from the newest good checkpoint",
            )


def seal(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `weights.json` with the digest of its own text added."""
    return {**said, _SEAL: hashlib.sha256(json.dumps(said).encode()).hexdigest()}


def check_consolidated(folder: Path) -> bool:
    """Compare the final model with `weights.json` next to it; return False if that is missing or has no digests.

    It is missing if the run was killed meanwhile; an older version wrote no digests.

    Raises:
        CheckpointError: a model file, or `weights.json`, is not what was written.
    """
    file = folder.parent / WEIGHTS
    if not file.exists():
        return False
    try:
        said = read_json(file)
        found = said.pop(_SEAL, None)
        if found is None and "files" not in said:
            return False
        if seal(said)[_SEAL] != found or not isinstance(said["files"], dict):
            raise ValueError("its own digest differs")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} differs from what was written: {error}.", where=str(file)) from error
    check_folder(folder, said["files"])
    return True


def _files(tensors: Iterable[Writable], *, most_bytes: int) -> dict[str, list[Writable]]:
    """Return the tensors by file; a tensor larger than a file has one of its own."""
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
