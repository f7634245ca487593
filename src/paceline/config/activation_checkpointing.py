"""Parse the activation checkpointing that the user requests; works without torch."""

from dataclasses import dataclass
from enum import StrEnum

from typing_extensions import override

from paceline.console.formatting import did_you_mean
from paceline.errors import LayoutError


class RematKind(StrEnum):
    """The policies, which say what activations a block keeps for its backward."""

    NONE = "none"
    FULL = "full"
    EVERY = "every"
    SELECTIVE = "selective"


@dataclass(frozen=True, kw_only=True)
class Remat:
    """An activation checkpointing policy.

    With `every`, one of this many consecutive blocks keeps only its input and is recomputed. `keep` has the operations
    whose outputs `selective` keeps; () means Paceline's default list.
    """

    kind: RematKind = RematKind.NONE
    every: int = 1
    keep: tuple[str, ...] = ()

    @override
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
        LayoutError: the policy is unknown, or its option is invalid.
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
        return Remat(kind=kind, every=_parse_every(text, options))
    names = tuple(name.strip() for name in options.split("+")) if colon else ()
    if colon and (kind is not RematKind.SELECTIVE or not all(names)):
        raise LayoutError(
            f"remat={text}: {kind} takes no option {options!r}.", hint="remat=selective:mm+bmm, or remat=every:2"
        )
    return Remat(kind=kind, keep=names)


def _parse_every(text: str, count: str) -> int:
    if not count.isdigit() or int(count) < 1:
        raise LayoutError(
            f"remat={text}: every needs a count of blocks, got {count!r}.",
            hint="remat=every:2 recomputes every second block, remat=full all of them",
        )
    return int(count)
