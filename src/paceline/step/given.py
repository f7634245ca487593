"""What a step is given: this replica's microbatches of one global batch."""

from collections.abc import Sequence
from typing import Any, Protocol


class Micro(Protocol):
    """One microbatch of this replica; `index` is its place in the whole global batch."""

    @property
    def index(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def data(self) -> Any: ...


class Given(Protocol):
    """This replica's share of one step; `micro` may be empty."""

    @property
    def micro(self) -> Sequence[Micro]: ...
    @property
    def num_micro(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
