"""The manifest of a checkpoint: it names every file and tensor with a digest, and carries its own.

Format 1 has one file of each kind. In format 2 every rank has written a file of what it holds
(`model.rank-0003.safetensors`), and a tensor that is in pieces has an entry for each: its offset, and the shape of the
whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.manifest_schema import FileForm, ManifestForm, check_state, parse_files, parse_manifest
from paceline.checkpoint.files.resharding_reader import StoredShard, StoredTensors, check_cover
from paceline.checkpoint.files.safetensors_io import TensorEntry, Writable, digest, header_digest, write_tensors
from paceline.errors import CheckpointError, MachineError
from paceline.filesystem.atomic_files import is_damage, parse_json, read_regular, write_text

FORMAT, FORMAT_OF_RANKS = "paceline-checkpoint-1", "paceline-checkpoint-2"
MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"(.+)\.rank-\d{4,}(\.safetensors)")
_OUTER = re.compile(rb'\{"digest": "([0-9a-f]{64})", "body": (".*")\}', re.DOTALL)
_MOST_BYTES = 1 << 29

Files = Mapping[str, Sequence[Writable]]
Listed = Mapping[str, Mapping[str, Any]]


def rank_file(kind: str, rank: int) -> str:
    """Return the file name of one rank: `model.rank-0003.safetensors` for `model.safetensors`."""
    stem, dot, ending = kind.rpartition(".")
    return f"{stem}.rank-{rank:04d}{dot}{ending}"


def kind_of(file: str) -> str:
    """Return the kind of a file, without the rank that wrote it."""
    match = _RANK_FILE.fullmatch(file)
    return file if match is None else match[1] + match[2]


def write_files(aside: Path, files: Files) -> dict[str, Any]:
    """Write and flush files of tensors; return their entries for the manifest."""
    listed = {}
    for name, tensors in files.items():
        entries = write_tensors(aside / name, tensors)
        num_bytes, header = header_digest(aside / name)
        listed[name] = {
            "header": header,
            "bytes": num_bytes,
            "tensors": [entry.as_json() for entry in entries],
        }
    return listed


def write_manifest(aside: Path, *, listed: Listed, state: Mapping[str, Any], step: int) -> None:
    """Write and flush the manifest.

    Raises:
        CheckpointError: an element of a tensor is in no file, or in two.
    """
    for (kind, name), entries in _by_tensor(listed).items():
        try:
            check_cover(name, entries)
        except CheckpointError as error:
            raise CheckpointError(
                error.what,
                where=f"{kind} of step {step}",
                cause="the parts that the ranks report do not add up: a bug in Paceline's sharding for this layout, "
                "not in the job",
                hint="report this bug; --resume uses the newest older checkpoint",
            ) from None
    form = FORMAT if all(kind_of(name) == name for name in listed) else FORMAT_OF_RANKS
    _write_body(aside, {"format": form, "step": step, "state": state, "files": listed})


def amend_state(path: Path, **changes: Any) -> None:
    """Replace parts of a whole checkpoint's state atomically: a reader sees the old ones or the new.

    Raises:
        CheckpointError: its manifest can't be read.
    """
    body = read_body(path)
    state = {**body.state, **changes}
    _write_body(path, {"format": body.format, "step": body.step, "state": state, "files": body.files})


def _write_body(path: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps(body, separators=(",", ":"))
    write_text(path / MANIFEST, json.dumps({"digest": digest(text.encode()), "body": text}))


def read_body(path: Path) -> ManifestForm:
    """Return the manifest's body after checking its digest and the type of every part.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
        MachineError: it exists, but can't be read now.
    """
    try:
        text = _body_text(read_regular(path / MANIFEST, most_bytes=_MOST_BYTES))
    except OSError as error:
        raise _unread(path, error) from error
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged: {error}.", where=str(path)) from error
    if text is None:
        raise CheckpointError(f"the manifest of {path.name} differs from what was written.", where=str(path))
    try:
        body = parse_manifest(text)
        if body.format in (FORMAT, FORMAT_OF_RANKS):
            check_state(body.state)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} can't be used: {error}.", where=str(path)) from error
    if body.format not in (FORMAT, FORMAT_OF_RANKS):
        raise CheckpointError(
            f"{path.name} has the format {body.format!r}, this version reads {FORMAT!r} and {FORMAT_OF_RANKS!r}.",
            where=str(path),
            hint="use the version of Paceline that wrote it",
        )
    return body


def _body_text(data: bytes) -> str | None:
    """Return the text that a manifest carries; None if one byte of the file is not what `write_manifest` wrote."""
    outer = _OUTER.fullmatch(data)
    if outer is None:
        return None
    text = parse_json(outer[2])
    if digest(text.encode()) != outer[1].decode() or json.dumps(text).encode() != outer[2]:
        return None
    return str(text)


def _unread(path: Path, error: OSError) -> CheckpointError | MachineError:
    """Return the error for a manifest: damaged, or unreadable now and not to be replaced by an older checkpoint."""
    if isinstance(error, FileNotFoundError):
        cause = "it is not a Paceline checkpoint"
        return CheckpointError(f"{path.name} has no {MANIFEST}.", where=str(path), cause=cause)
    if is_damage(error):
        return CheckpointError(f"the manifest of {path.name} is damaged: {error.strerror}.", where=str(path))
    return unreadable_file_error(path / MANIFEST, error)


def unreadable_file_error(file: Path, error: OSError) -> MachineError:
    """Return the error for a file that exists and can't be read now, which says nothing about its content."""
    return MachineError(
        f"{file.parent.name}/{file.name} can't be read: {error.strerror}.",
        where=str(file),
        cause="missing permissions, or a disk that does not respond; the checkpoint itself may be intact",
        hint=f"ls -l {file}, then the same command; or --resume with an older checkpoint",
    )


def stored_files(path: Path, listed: Listed) -> dict[str, StoredTensors]:
    """Return the stored tensors of each kind, after checking every file's presence, size and header.

    Raises:
        CheckpointError: a file is missing, cut off or foreign, or an element of a tensor is in none of them.
        MachineError: a file can't be read now.
    """
    try:
        files = parse_files(listed)
    except ValueError as error:
        raise CheckpointError(f"the manifest of {path.name} can't be used: {error}.", where=str(path)) from error
    pieces: dict[str, list[StoredShard]] = {}
    for name, (said, entries) in files.items():
        _check_file(path, name, said)
        file = path / name
        pieces.setdefault(kind_of(name), []).extend(StoredShard(file=file, entry=entry) for entry in entries)
    return {kind: StoredTensors(found) for kind, found in pieces.items()}


def _check_file(path: Path, name: str, listed: FileForm) -> None:
    """Raise an error for a file that is missing, cut off or foreign."""
    file = path / name
    if Path(name).name != name or name == ".." or "\0" in name:
        raise CheckpointError(f"the manifest of {path.name} names a file outside it: {name}.", where=str(path))
    try:
        size, header = header_digest(file)
    except OSError as error:
        if not is_damage(error):
            raise unreadable_file_error(file, error) from error
        raise CheckpointError(f"{name} is missing from {path.name}.", where=str(path)) from None
    except ValueError as error:
        raise CheckpointError(f"{name} of {path.name} can't be used: {error}.", where=str(file)) from None
    if size != listed.bytes:
        raise CheckpointError(f"{name} has {size} bytes, but {listed.bytes} were written.", where=str(file))
    if header != listed.header:
        raise CheckpointError(f"the header of {name} differs from what was written.", where=str(file))


def _by_tensor(listed: Listed) -> dict[tuple[str, str], list[TensorEntry]]:
    found: dict[tuple[str, str], list[TensorEntry]] = {}
    for file, said in listed.items():
        for entry in said["tensors"]:
            found.setdefault((kind_of(file), entry["name"]), []).append(TensorEntry.from_json(entry))
    return found
