"""The manifest of a checkpoint: it lists every file and tensor.

It has a digest of every tensor, of every file's header, and of itself.

Format 1 has one file of each kind, such as `model.safetensors`. In format 2 every rank writes a file with its shards,
such as `model.rank-0003.safetensors`, and the manifest has an entry for each shard, with its offset and the full shape.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest_schema import (
    FileSchema,
    ManifestSchema,
    check_state,
    parse_files,
    parse_manifest,
)
from paceline.checkpoint.files.resharding_reader import StoredShard, StoredTensors, check_coverage
from paceline.checkpoint.files.safetensors_io import TensorEntry, Writable, header_digest, sha256_digest, write_tensors
from paceline.errors import CheckpointError, MachineError
from paceline.filesystem.atomic_files import is_damage, parse_json, read_regular, write_text

FORMAT, RANK_FORMAT = "paceline-checkpoint-1", "paceline-checkpoint-2"
MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"(.+)\.rank-\d{4,}(\.safetensors)")
_MANIFEST_PATTERN = re.compile(rb'\{"digest": "([0-9a-f]{64})", "body": (".*")\}', re.DOTALL)
_MAX_BYTES = 1 << 29

Files = Mapping[str, Sequence[Writable]]  # tensors by file name
FileEntries = Mapping[str, Mapping[str, Any]]  # the manifest's entries by file name


def rank_file(kind: str, rank: int) -> str:
    """Return the file name of one rank: `model.rank-0003.safetensors` for `model.safetensors`."""
    stem, dot, ending = kind.rpartition(".")
    return f"{stem}.rank-{rank:04d}{dot}{ending}"


def file_kind(file: str) -> str:
    """Return the kind of a file: its name without a rank. It is the inverse of `rank_file`."""
    match = _RANK_FILE.fullmatch(file)
    return file if match is None else match[1] + match[2]


def write_files(staging: Path, files: Files) -> dict[str, Any]:
    """Write and flush files of tensors; return their entries for the manifest."""
    entries_by_file = {}
    for name, tensors in files.items():
        entries = write_tensors(staging / name, tensors)
        entries_by_file[name] = file_entry(staging / name, entries)
    return entries_by_file


def file_entry(path: Path, entries: Sequence[TensorEntry]) -> dict[str, Any]:
    """Return the manifest's entry for a file that contains tensors with these entries."""
    num_bytes, header = header_digest(path)
    return {"header": header, "bytes": num_bytes, "tensors": [entry.as_json() for entry in entries]}


def write_manifest(staging: Path, *, file_entries: FileEntries, state: Mapping[str, Any], step: int) -> None:
    """Write and flush the manifest.

    Raises:
        CheckpointError: an element of a tensor is in no file, or in two.
    """
    for (kind, name), entries in _group_by_tensor(file_entries).items():
        try:
            check_coverage(name, entries)
        except CheckpointError as error:
            raise CheckpointError(
                error.what,
                where=f"{kind} of step {step}",
                cause="the shards that the ranks wrote do not add up to the tensor: a bug in Paceline's sharding for "
                "this layout, not in the job",
                hint="report this bug; --resume uses the newest older checkpoint",
            ) from None
    format_name = FORMAT if all(file_kind(name) == name for name in file_entries) else RANK_FORMAT
    _write_body(staging, {"format": format_name, "step": step, "state": state, "files": file_entries})


def update_state(path: Path, **changes: Any) -> None:
    """Replace parts of a checkpoint's state atomically: a reader sees either the old or the new manifest.

    Raises:
        CheckpointError: the manifest can't be read.
    """
    body = read_body(path)
    state = {**body.state, **changes}
    _write_body(path, {"format": body.format, "step": body.step, "state": state, "files": body.files})


def _write_body(path: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps(body, separators=(",", ":"))
    write_text(path / MANIFEST, json.dumps({"digest": sha256_digest(text.encode()), "body": text}))


def read_body(path: Path) -> ManifestSchema:
    """Return the manifest's body after checking its digest and the type of every part.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of another format.
        MachineError: the manifest exists, but can't be read now.
    """
    try:
        text = _body_text(read_regular(path / MANIFEST, max_bytes=_MAX_BYTES))
    except OSError as error:
        raise _unreadable_manifest_error(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged: {error}.", where=str(path)) from error
    if text is None:
        raise CheckpointError(f"the manifest of {path.name} differs from what was written.", where=str(path))
    try:
        body = parse_manifest(text)
        if body.format in (FORMAT, RANK_FORMAT):
            check_state(body.state)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} can't be used: {error}.", where=str(path)) from error
    if body.format not in (FORMAT, RANK_FORMAT):
        raise CheckpointError(
            f"{path.name} has the format {body.format!r}, but this version reads {FORMAT!r} and {RANK_FORMAT!r}.",
            where=str(path),
            hint="use the version of Paceline that wrote it",
        )
    return body


def parse_file_entries(manifest: bytes) -> FileEntries | None:
    """Return the entries of the files in the content of a manifest, or None if the manifest is damaged."""
    text = _body_text(manifest)
    try:
        return None if text is None else parse_manifest(text).files
    except ValueError:
        return None


def _body_text(data: bytes) -> str | None:
    """Return the body of a manifest as text; None if any byte of the file differs from what was written."""
    outer = _MANIFEST_PATTERN.fullmatch(data)
    if outer is None:
        return None
    text = parse_json(outer[2])
    if sha256_digest(text.encode()) != outer[1].decode() or json.dumps(text).encode() != outer[2]:
        return None
    return str(text)


def _unreadable_manifest_error(path: Path, error: OSError) -> CheckpointError | MachineError:
    """Return the error for a manifest that is damaged, or that can't be read now but may be intact."""
    if isinstance(error, FileNotFoundError):
        cause = "it is not a Paceline checkpoint"
        return CheckpointError(f"{path.name} has no {MANIFEST}.", where=str(path), cause=cause)
    if is_damage(error):
        return CheckpointError(f"the manifest of {path.name} is damaged: {error.strerror}.", where=str(path))
    return unreadable_file_error(path / MANIFEST, error)


def unreadable_file_error(file: Path, error: OSError) -> MachineError:
    """Return the error for a file that exists but can't be read now. Its content may be intact."""
    return MachineError(
        f"{file.parent.name}/{file.name} can't be read: {error.strerror}.",
        where=str(file),
        cause="missing permissions, or a disk that does not respond; the checkpoint itself may be intact",
        hint=f"ls -l {file}, then the same command; or --resume with an older checkpoint",
    )


def open_stored_files(
    path: Path, file_entries: FileEntries, *, obtain: Callable[[str], None] | None = None
) -> dict[str, StoredTensors]:
    """Return the stored tensors of each kind, after checking every file's presence, size and header.

    With `obtain`, files may be missing: `obtain(name)` is called before a file is first read, and then it is checked.

    Raises:
        CheckpointError: a file is missing, truncated or wrong, or an element of a tensor is in none of them.
        MachineError: a file can't be read now.
    """
    try:
        files = parse_files(file_entries)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} can't be used: {error}.", where=str(path)) from error
    shards: dict[str, list[StoredShard]] = {}
    for name, (file_schema, entries) in files.items():
        check_file_name(path, name)
        check = cache(partial(_obtain_and_check, path, name, file_schema, obtain))
        if obtain is None:
            check()
        shards.setdefault(file_kind(name), []).extend(
            StoredShard(file=path / name, entry=entry, obtain=check) for entry in entries
        )
    return {kind: StoredTensors(kind_shards) for kind, kind_shards in shards.items()}


def _obtain_and_check(path: Path, name: str, file_schema: FileSchema, obtain: Callable[[str], None] | None) -> None:
    if obtain is not None:
        obtain(name)
    _check_file(path, name, file_schema)


def check_file_name(path: Path, name: str) -> None:
    """Check that a name in a manifest is that of a file in the checkpoint's own folder.

    Raises:
        CheckpointError: it is not.
    """
    if Path(name).name != name or name == ".." or "\0" in name:
        raise CheckpointError(
            f"the manifest of {path.name} names a file outside the checkpoint: {name}.", where=str(path)
        )


def _check_file(path: Path, name: str, file_schema: FileSchema) -> None:
    """Raise an error for a file that is missing, truncated or from another checkpoint."""
    file = path / name
    try:
        size, header = header_digest(file)
    except OSError as error:
        if not is_damage(error):
            raise unreadable_file_error(file, error) from error
        raise CheckpointError(f"{name} is missing from {path.name}.", where=str(path)) from None
    except ValueError as error:
        raise CheckpointError(f"{name} of {path.name} can't be used: {error}.", where=str(file)) from None
    if size != file_schema.bytes:
        raise CheckpointError(f"{name} has {size} bytes, but {file_schema.bytes} were written.", where=str(file))
    if header != file_schema.header:
        raise CheckpointError(f"the header of {name} differs from what was written.", where=str(file))


def _group_by_tensor(file_entries: FileEntries) -> dict[tuple[str, str], list[TensorEntry]]:
    entries_by_tensor: dict[tuple[str, str], list[TensorEntry]] = {}
    for file, file_entry in file_entries.items():
        for entry in file_entry["tensors"]:
            entries_by_tensor.setdefault((file_kind(file), entry["name"]), []).append(TensorEntry.from_json(entry))
    return entries_by_tensor
