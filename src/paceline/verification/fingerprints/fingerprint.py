"""Fingerprints: a summary of a tensor from which two runs can be compared without storing the tensor.

A fingerprint has the norm, the largest magnitude, 16 projections on fixed random signs, and a digest of the bits. The
projection of a sum of tensors is the sum of their projections, so a wrong combination of gradients can be recognized
(Johnson and Lindenstrauss, 1984; signs: Achlioptas, 2003).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import UsageError
from paceline.filesystem.atomic_files import parse_json, read_regular

_FAINT_EPS, _FAINT_EPS_HALF = 256.0, 16.0  # limits of rounding, in machine epsilons: float32, half precision
NUM_PROJECTIONS = 16
FLOAT32_EPS = 2.0**-23  # machine epsilon of float32; finer types are compared as float32
_BLOCK = 4096  # the number of elements in a block; see `projection_signs`
FOLDER = "record"  # of a run folder
_PARSE_ERRORS = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_MAX_BYTES = 1 << 32
_RECORD_HINT = "record it again: pl.record(model, optimizer, path)"
Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """The fingerprint of one tensor.

    `eps`: the machine epsilon of the type in which the tensor was computed. `faint_share`: the share of elements that
    are not zero, but so small relative to the largest element that they may be only rounding.
    """

    numel: int
    norm: float
    largest: float
    projections: tuple[float, ...]
    digest: str
    eps: float = FLOAT32_EPS
    faint_share: float = 0.0

    def as_json(self) -> list[Any]:
        """Return the fingerprint in compact form for a JSON line."""
        return [self.numel, self.norm, self.largest, list(self.projections), self.digest, self.eps, self.faint_share]

    @staticmethod
    def from_json(value: list[Any]) -> "Fingerprint":
        """Return a fingerprint from a JSON line; lines of older versions end after the digest."""
        numel, norm, largest, projections, digest, *optional = value
        eps, faint_share = optional or (FLOAT32_EPS, 0.0)
        if len(projections) != NUM_PROJECTIONS:
            raise ValueError(f"{len(projections)} projections, expected {NUM_PROJECTIONS}")
        return Fingerprint(
            numel=int(numel),
            norm=float(norm),
            largest=float(largest),
            projections=tuple(float(p) for p in projections),
            digest=str(digest),
            eps=float(eps),
            faint_share=float(faint_share),
        )

    def distance(self, other: "Fingerprint") -> float:
        """Return an estimate of the relative distance of the two tensors; 0 if the bits are equal."""
        if self.digest == other.digest:
            return 0.0
        if self.numel != other.numel:
            return float("inf")
        if not np.all(np.isfinite([*self.projections, *other.projections])):
            return float("inf")
        difference = np.subtract(self.projections, other.projections)
        norm = max(self.norm, other.norm)
        if not np.all(np.isfinite(difference)) or not np.isfinite(norm):
            return float("inf")
        return float(np.sqrt(np.mean(difference**2)) / norm) if norm else 0.0


@dataclass(frozen=True, kw_only=True)
class Record:
    """A recorded step of one optimizer: fingerprints of gradients before the update and weights after it, by FQN.

    `batch` is a checksum of the rank's batch; `optimizer` is the index of the optimizer.
    """

    step: int
    gradients: Mapping[str, Fingerprint]
    weights: Mapping[str, Fingerprint]
    batch: int | None = None
    optimizer: int = 0


def max_rounding(eps: float) -> float:
    """Return how large a gradient that is only rounding may be, relative to the gradients around it.

    Measured on convnets, attention and normalized weights: 1 to 30 machine epsilons. In half precision an epsilon is
    large, so the limit is fewer epsilons.
    """
    return min(_FAINT_EPS * eps, max(_FAINT_EPS_HALF * eps, _FAINT_EPS * FLOAT32_EPS))


def projection_signs(numel: int) -> tuple[Vector, Vector]:
    """Return two matrices of random signs: a row for each position in a block, and a row for each block.

    An element's sign in a projection is the product of the signs of its position and of its block.
    """
    return _signs(_BLOCK, 1), _signs(-(-numel // _BLOCK), 2)


def digest_bits(raw: bytes | memoryview) -> str:
    """Return a digest of a tensor's own bits."""
    return hashlib.blake2b(raw, digest_size=12).hexdigest()


@cache
def _signs(rows: int, key: int) -> Vector:
    """Return random signs; row i depends only on i and the key of the generator."""
    signs = np.random.Generator(np.random.Philox(key=key)).integers(0, 2, size=(rows, NUM_PROJECTIONS))
    return signs.astype(np.float64) * 2.0 - 1.0


def has_recording(path: Path) -> bool:
    """Return True if `path` is a recording, or a run folder that holds one."""
    return _recording_file(path).exists()


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The steps of a recording, in order. `is_torn`: the last line of the file is incomplete and was left out."""

    path: Path
    records: list[Record]
    is_torn: bool = False

    @property
    def note(self) -> str:
        """A line about what was left out; empty if nothing was."""
        if not self.is_torn:
            return ""
        return f"{self.path}: the last line is incomplete, as after a kill, and was left out"


def read_recording(path: Path, *, rank: int = 0) -> Recording:
    """Read a recording of one rank.

    Raises:
        UsageError: there is no recording, it has no complete line, or a complete line can't be read.
    """
    path_of_rank = _recording_file(path, rank)
    if not path_of_rank.is_file():
        raise UsageError(f"{path} contains no recording.", hint="pl.record(model, optimizer, path)")
    records, is_torn = _parse_records(path_of_rank)
    if not records:
        raise UsageError(
            f"the recording {path_of_rank} has no step: "
            + ("its only line is incomplete." if is_torn else "it is empty."),
            cause="the recorded loop ended before its optimizer's first step was written",
            hint=_RECORD_HINT,
        )
    return Recording(path=path, records=records, is_torn=is_torn)


def num_ranks(path: Path) -> int:
    """Return how many ranks wrote into the recording."""
    rank = 0
    while _recording_file(path, rank).exists():
        rank += 1
    return rank


def _recording_file(path: Path, rank: int = 0) -> Path:
    subfolder = path / FOLDER
    return (subfolder if subfolder.is_dir() else path) / f"rank-{rank}.jsonl"


def _parse_records(file: Path) -> tuple[list[Record], bool]:
    """Return the complete steps of a file, and whether the last line is torn: unreadable and without a line end."""
    try:
        data = read_regular(file, max_bytes=_MAX_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"the recording {file} can't be read: {error}.", hint=_RECORD_HINT) from None
    records: list[Record] = []
    lines = data.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            records.append(_parse_record(parse_json(line)))
        except _PARSE_ERRORS as error:
            if number == len(lines) and not data.endswith(b"\n"):
                return records, True
            raise UsageError(
                f"{file}: line {number} is not a step of a recording: {type(error).__name__}: {error}",
                cause="the file was changed or damaged after it was written",
                hint=_RECORD_HINT,
            ) from None
    return records, False


def _parse_record(value: Any) -> Record:
    batch = value.get("batch")
    return Record(
        step=int(value["step"]),
        gradients={str(name): Fingerprint.from_json(entry) for name, entry in value["gradients"].items()},
        weights={str(name): Fingerprint.from_json(entry) for name, entry in value["weights"].items()},
        batch=None if batch is None else int(batch),
        optimizer=int(value.get("optimizer", 0)),
    )
