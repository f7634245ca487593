"""The manifest of a checkpoint: it names every file and tensor with a digest, and carries its own.

Format 1 has one file of each kind. In format 2 every rank has written a file of what it holds
(`model.rank-0003.safetensors`), and a tensor that is in pieces has an entry for each: where it begins, and the shape
of the whole.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError
from paceline.store.disk import write_text
from paceline.store.pieces import Piece, Stored, check_cover
from paceline.store.tensors import TensorEntry, Writable, digest, header_digest, write_tensors

FORMAT, FORMAT_OF_RANKS = "paceline-checkpoint-1", "paceline-checkpoint-2"
MANIFEST = "manifest.json"
_RANK_FILE = re.compile(r"(.+)\.rank-\d{4,}(\.safetensors)")

Files = Mapping[str, Sequence[Writable]]
Listed = Mapping[str, Mapping[str, Any]]


def rank_file(kind: str, rank: int) -> str:
    """The file of one rank: `model.rank-0003.safetensors` for `model.safetensors`."""
    stem, dot, ending = kind.rpartition(".")
    return f"{stem}.rank-{rank:04d}{dot}{ending}"


def kind_of(file: str) -> str:
    """What a file holds, whoever wrote it."""
    match = _RANK_FILE.fullmatch(file)
    return file if match is None else match[1] + match[2]


def write_files(aside: Path, files: Files) -> dict[str, Any]:
    """Write and flush files of tensors; returns what the manifest says of them."""
    listed = {}
    for name, tensors in files.items():
        entries = write_tensors(aside / name, tensors)
        listed[name] = {
            "header": header_digest(aside / name),
            "bytes": (aside / name).stat().st_size,
            "tensors": [entry.as_json() for entry in entries],
        }
    return listed


def write_manifest(aside: Path, *, listed: Listed, state: Mapping[str, Any], step: int) -> None:
    """Write it and flush it.

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
                cause="what the ranks say they hold does not add up: a mistake of the layout, not of the job",
                hint="older checkpoints are untouched",
            ) from None
    form = FORMAT if all(kind_of(name) == name for name in listed) else FORMAT_OF_RANKS
    _write_body(aside, {"format": form, "step": step, "state": state, "files": listed})


def amend_state(path: Path, **changes: Any) -> None:
    """Replace parts of the state of a checkpoint that is whole, at once: a reader sees the old ones or the new.

    Raises:
        CheckpointError: its manifest can't be read.
    """
    body = read_body(path)
    _write_body(path, {**body, "state": {**body["state"], **changes}})


def _write_body(path: Path, body: Mapping[str, Any]) -> None:
    text = json.dumps(body, separators=(",", ":"))
    write_text(path / MANIFEST, json.dumps({"digest": digest(text.encode()), "body": text}))


def read_body(path: Path) -> dict[str, Any]:
    """The manifest's body, once its digest was found right.

    Raises:
        CheckpointError: it is missing, damaged, or of another format.
    """
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
        text, expected = outer["body"], outer["digest"]
        if digest(text.encode()) != expected or set(outer) != {"digest", "body"}:
            raise CheckpointError(f"the manifest of {path.name} is not what was written.", where=str(path))
        body: dict[str, Any] = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} has no {MANIFEST}.", where=str(path), cause="it is no checkpoint of Paceline's"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged.", where=str(path)) from error
    if body.get("format") not in (FORMAT, FORMAT_OF_RANKS):
        raise CheckpointError(
            f"{path.name} has the format {body.get('format')!r}, this version reads {FORMAT!r}"
            f" and {FORMAT_OF_RANKS!r}.",
            where=str(path),
        )
    return body


def stored_files(path: Path, listed: Listed) -> dict[str, Stored]:
    """What there is of each kind, once every file was found to be there, of its size, with its header.

    Raises:
        CheckpointError: a file is missing, cut off or foreign, or an element of a tensor is in none of them.
    """
    pieces: dict[str, list[Piece]] = {}
    for name, said in listed.items():
        entries = checked_file(path, name, said)
        pieces.setdefault(kind_of(name), []).extend(Piece(file=path / name, entry=entry) for entry in entries)
    return {kind: Stored(found) for kind, found in pieces.items()}


def checked_file(path: Path, name: str, listed: Mapping[str, Any]) -> list[TensorEntry]:
    """The entries of one file.

    Raises:
        CheckpointError: it is missing, cut off or foreign.
    """
    file = path / name
    if Path(name).name != name:
        raise CheckpointError(f"the manifest of {path.name} names a file outside it: {name}.", where=str(path))
    if not file.is_file():
        raise CheckpointError(f"{name} is missing from {path.name}.", where=str(path))
    if file.stat().st_size != listed["bytes"]:
        raise CheckpointError(
            f"{name} has {file.stat().st_size} bytes, {listed['bytes']} were written.", where=str(file)
        )
    if header_digest(file) != listed["header"]:
        raise CheckpointError(f"the header of {name} is not what was written.", where=str(file))
    try:
        return [TensorEntry.from_json(entry) for entry in listed["tensors"]]
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged: {error}.", where=str(path)) from error


def _by_tensor(listed: Listed) -> dict[tuple[str, str], list[TensorEntry]]:
    found: dict[tuple[str, str], list[TensorEntry]] = {}
    for file, said in listed.items():
        for entry in said["tensors"]:
            found.setdefault((kind_of(file), entry["name"]), []).append(TensorEntry.from_json(entry))
    return found
