"""How a batch becomes an update."""

from enum import StrEnum

from paceline.errors import LayoutError
from paceline.spec.words import did_you_mean

NOT_YET = ("pipedream", "2bw", "ps", "hogwild", "local", "diloco")


class Update(StrEnum):
    """The update rules of this version."""

    SYNC = "sync"


def parse_update(text: str) -> Update:
    """Read `sync`.

    Raises:
        LayoutError: unknown, or not in this version.
    """
    word = text.partition(",")[0].strip().lower()
    if word in set(Update):
        return Update(word)
    if word in NOT_YET:
        raise LayoutError(f"the update {word!r} is not in this version yet.", hint="--update sync")
    raise LayoutError(
        f"{text!r} is no update rule.", cause=did_you_mean(word, [*Update, *NOT_YET]), hint="--update sync"
    )
