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

WEIGHTS_RECORD = "weights.json"  # the digests of a consolidated folder, in a file next to it
MAX_FILE_BYTES = 5_000_000_000
_DIGEST_KEY = "seal"  # fixed: a key in weights.json
_FILE_STEM, _FILE_SUFFIX = "model", ".safetensors"


def write_model_folder(
    folder: Path, tensors: Sequence[Writable], *, config: Any, max_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write model files to a staging folder, and replace the model files in `folder` with them.

    If `folder` is a link, the files in its target are replaced. Other files in the folder (a tokenizer, a README) stay.
    Tensors are created and written one after another.
    """
    folder = folder.resolve()
    staging, replaced = folder.with_name(f".{folder.name}.tmp"), folder.with_name(f".{folder.name}.before")
    _keep_other_files(replaced, folder)  # an earlier process may have been killed between the two renames
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        files = _split_files(tensors, max_bytes=max_bytes)
        for name, file_tensors in files.items():
            write_tensors(staging / name, file_tensors)
        if len(files) > 1:
            write_json(staging / f"{_FILE_STEM}{_FILE_SUFFIX}.index.json", _weight_index(files))
        if config is not None:
            write_json(staging / "config.json", config)
        sync_folder(staging)
        if folder.exists():
            folder.rename(replaced)
        staging.rename(folder)
        _keep_other_files(replaced, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _keep_other_files(replaced: Path, folder: Path) -> None:
    """Remove the model files in `replaced`, and move its other files into `folder`.

    If `folder` does not exist, `replaced` is renamed to `folder` with all its files.
    """
    if not replaced.is_dir():
        return
    if not folder.exists():
        replaced.rename(folder)
        return
    for path in replaced.iterdir():
        if _is_model_file(path):
            path.unlink()
        elif not (folder / path.name).exists():
            path.rename(folder / path.name)
    with contextlib.suppress(OSError):  # not empty if both folders have a file of the same name
        replaced.rmdir()


def _is_model_file(path: Path) -> bool:
    is_weights = path.name.startswith(_FILE_STEM) and path.name.endswith((_FILE_SUFFIX, f"{_FILE_SUFFIX}.index.json"))
    return not path.is_dir() and (is_weights or path.name == "config.json")


def digest_files(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a written folder; subfolders are skipped.

    Raises:
        OSError: a file can't be read.
        ValueError: a file is not regular.
    """
    digests = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            continue
        with os.fdopen(open_regular(path), "rb") as file:
            digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def check_model_folder(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare every file of a written folder with its digest.

    Raises:
        CheckpointError: a file is missing, was added, or does not match its digest.
    """
    try:
        actual = digest_files(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder} can't be read: {error}.", where=str(folder)) from error
    for name in sorted({*actual, *digests}):
        if actual.get(name) != digests.get(name):
            problem = "differs from what was written" if name in digests else "was not written with the others"
            problem = problem if name in actual else "is missing"
            raise CheckpointError(
                f"{name} in {folder.name} {problem}.",
                where=str(folder / name),
                cause="a damaged disk, a flipped bit, or an edited file",
                hint="paceline ckpt consolidate RUN --to FOLDER writes it from the newest good checkpoint",
            )


def add_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of `weights.json` with the digest of its own text added."""
    return {**content, _DIGEST_KEY: hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def check_consolidated(folder: Path) -> bool:
    """Compare the final model with `weights.json` next to it; return False if that file is missing or has no digests.

    The file is missing if the run was killed before writing it; an older version wrote no digests.

    Raises:
        CheckpointError: a model file, or `weights.json`, does not match its digest.
    """
    file = folder.parent / WEIGHTS_RECORD
    if not file.exists():
        return False
    try:
        content = read_json(file)
        saved_digest = content.pop(_DIGEST_KEY, None)
        if saved_digest is None and "files" not in content:
            return False
        if add_digest(content)[_DIGEST_KEY] != saved_digest or not isinstance(content["files"], dict):
            raise ValueError("its digest does not match its content")
    except (OSError, ValueError, AttributeError, TypeError, KeyError) as error:
        raise CheckpointError(f"{file} differs from what was written: {error}.", where=str(file)) from error
    check_model_folder(folder, content["files"])
    return True


def _split_files(tensors: Iterable[Writable], *, max_bytes: int) -> dict[str, list[Writable]]:
    """Return the tensors by file; a tensor larger than `max_bytes` gets a file of its own."""
    groups: list[list[Writable]] = [[]]
    group_bytes = 0
    for tensor in tensors:
        if groups[-1] and group_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(tensor)
        group_bytes += tensor.num_bytes
    if len(groups) == 1:
        return {f"{_FILE_STEM}{_FILE_SUFFIX}": groups[0]}
    return {
        f"{_FILE_STEM}-{number:05d}-of-{len(groups):05d}{_FILE_SUFFIX}": group for number, group in enumerate(groups, 1)
    }


def _weight_index(files: dict[str, list[Writable]]) -> dict[str, Any]:
    total = sum(tensor.num_bytes for tensors in files.values() for tensor in tensors)
    return {
        "metadata": {"total_size": total},
        "weight_map": {tensor.name: name for name, tensors in files.items() for tensor in tensors},
    }
