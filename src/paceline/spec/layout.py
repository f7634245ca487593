"""How the model is placed: what was asked for on the command line, read without torch."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import LayoutError
from paceline.spec.words import did_you_mean


class Kind(StrEnum):
    """The layouts of this version."""

    SINGLE = "single"
    THREADS = "threads"
    DDP = "ddp"


NOT_YET = ("zero1", "zero2", "zero3", "fsdp", "hsdp", "tp", "pp", "cp", "ep", "auto")
_NOT_YET_AXES = ("pp", "dp_shard", "cp", "tp", "ep", "schedule", "remat", "offload", "zero")
_REPLICATE_AXES = ("dp", "dp_replicate")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout; `replicas` is None where the number of ranks decides."""

    kind: Kind
    replicas: int | None = None

    def __str__(self) -> str:
        if self.replicas is None:
            return str(self.kind)
        return f"{self.kind if self.kind is Kind.THREADS else 'dp_replicate'}={self.replicas}"

    def processes(self, *, ranks: int) -> int:
        """How many processes make these ranks: threads are replicas in one."""
        return 1 if self.kind is Kind.THREADS else ranks


def parse_layout(text: str) -> Layout:
    """Read `ddp`, `single`, `threads`, `threads=4`, `dp=4` or `dp_replicate=-1`.

    Raises:
        LayoutError: unknown, mistyped, or not in this version.
    """
    word = text.strip().lower()
    if word in set(Kind):
        return Layout(kind=Kind(word))
    if word in NOT_YET:
        raise _not_yet(word)
    if "=" in word:
        return _axes(text)
    raise LayoutError(
        f"{text!r} is no layout.",
        cause=did_you_mean(word, [*Kind, *NOT_YET]),
        hint=f"--layout {' | '.join(Kind)} | threads=N | dp=N",
    )


def _axes(text: str) -> Layout:
    replicas: int | None = None
    kind: Kind | None = None
    for part in text.lower().split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis in _NOT_YET_AXES:
            raise _not_yet(axis)
        if axis not in (*_REPLICATE_AXES, Kind.THREADS):
            raise LayoutError(
                f"{axis!r} in {text!r} is no axis.",
                cause=did_you_mean(axis, [*_REPLICATE_AXES, Kind.THREADS, *_NOT_YET_AXES]),
                hint="--layout dp=2",
            )
        if kind is Kind.THREADS or (axis == Kind.THREADS and kind is not None):
            raise LayoutError(
                f"{text!r} asks for threads and for something else.",
                cause="replicas as threads of one process go with no other axis",
                hint="--layout threads=2, or --layout dp=2",
            )
        kind = Kind.THREADS if axis == Kind.THREADS else Kind.DDP
        if size != "-1" and (not size.isdigit() or int(size) < 1):
            raise LayoutError(f"{part!r}: an axis needs a count, got {size!r}.", hint=f"--layout {axis}=2")
        replicas = None if size == "-1" else int(size)
    return Layout(kind=kind or Kind.DDP, replicas=replicas)


def _not_yet(word: str) -> LayoutError:
    return LayoutError(
        f"the layout {word!r} is not in this version yet.",
        cause="it places data parallelism only: single, threads, ddp",
        hint="--layout ddp",
    )
