"""How a batch becomes an update."""

from dataclasses import dataclass
from enum import StrEnum

from paceline.errors import LayoutError
from paceline.spec.words import did_you_mean

NOT_YET = ("ps", "local", "diloco")
_VERTICAL = "vertical"


class Kind(StrEnum):
    """The update rules of this version."""

    SYNC = "sync"
    PIPEDREAM = "pipedream"
    DOUBLE = "2bw"
    HOGWILD = "hogwild"


@dataclass(frozen=True, kw_only=True)
class Update:
    """What was asked for. `vertical`: every stage uses the weights that the first one has (PipeDream's option)."""

    kind: Kind = Kind.SYNC
    vertical: bool = False

    @property
    def is_stashed(self) -> bool:
        """Whether a pipeline goes on without waiting, on older weights."""
        return self.kind in (Kind.PIPEDREAM, Kind.DOUBLE)

    @property
    def layout(self) -> str:
        """What several ranks are taken for where no layout is asked for."""
        return "pp" if self.is_stashed else "ddp"

    def __str__(self) -> str:
        return f"{self.kind},{_VERTICAL}" if self.vertical else str(self.kind)


def parse_update(text: str) -> Update:
    """Read `sync`, `pipedream`, `pipedream,vertical`, `2bw`, `hogwild`.

    Raises:
        LayoutError: unknown, or not in this version.
    """
    word, *options = (part.strip().lower() for part in text.split(","))
    if word in NOT_YET:
        raise LayoutError(f"the update {word!r} is not in this version yet.", hint="--update sync")
    if word not in set(Kind):
        raise LayoutError(
            f"{text!r} is no update rule.", cause=did_you_mean(word, [*Kind, *NOT_YET]), hint="--update sync"
        )
    kind = Kind(word)
    allowed = [_VERTICAL] if kind is Kind.PIPEDREAM else []
    wrong = [option for option in options if option not in allowed]
    if wrong:
        raise LayoutError(
            f"--update {kind} has no option {wrong[0]!r}.",
            cause=f"its options: {', '.join(allowed) or 'none'}",
            hint=f"--update {','.join([kind, *allowed])}",
        )
    return Update(kind=kind, vertical=_VERTICAL in options)
