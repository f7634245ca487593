"""Activation checkpointing as requested by the user, read without torch."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError


class RematKind(StrEnum):
    """The policies: the activations that a repeated block keeps for its backward."""

    NONE = "none"
    FULL = "full"
    EVERY = "every"
    SELECTIVE = "selective"


@dataclass(frozen=True, kw_only=True)
class Remat:
    """An activation checkpointing policy.

    `every`: of this many blocks, one keeps only its input. `keep`: operations whose outputs are kept; () is our list.
    """

    kind: RematKind = RematKind.NONE
    every: int = 1
    keep: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.kind is RematKind.EVERY:
            return f"every:{self.every}"
        return f"{self.kind}:{'+'.join(self.keep)}" if self.keep else str(self.kind)

    @property
    def is_on(self) -> bool:
        """Return whether any activation is recomputed."""
        return self.kind is not RematKind.NONE


def parse_remat(text: str) -> Remat:
    """Parse `none`, `full`, `every:2`, `selective` or `selective:mm+bmm`.

    Raises:
        LayoutError: an unknown word, or an invalid count.
    """
    word, colon, options = (part.strip() for part in text.strip().partition(":"))
    word = word.lower()
    if word not in set(RematKind):
        raise LayoutError(
            f"remat={text} is not a policy.",
            cause=did_you_mean(word, list(RematKind)),
            hint="remat=none | full | every:2 | selective | selective:mm+bmm",
        )
    kind = RematKind(word)
    if kind is RematKind.EVERY:
        return Remat(kind=kind, every=_count(text, options))
    names = tuple(name.strip() for name in options.split("+")) if colon else ()
    if colon and (kind is not RematKind.SELECTIVE or not all(names)):
        raise LayoutError(
            f"remat={text}: {kind} takes no option {options!r}.", hint="remat=selective:mm+bmm, or remat=every:2"
        )
    return Remat(kind=kind, keep=names)


def _count(text: str, size: str) -> int:
    if not size.isdigit() or int(size) < 1:
        raise LayoutError(
            f"remat={text}: every needs a count of blocks, got {size!r}.",
            hint="remat=every:2 recomputes every second block, remat=full all of them",
        )
    return int(size)
