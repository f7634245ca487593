"""The bytes that a rank sends: how many each collective needs, and a counter that the transport updates."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SENT_BYTES_PER_BYTE: Mapping[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: n - 1,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: (n - 1) / n,
    "reduce": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send": lambda _: 1.0,
}
"""The bytes that a rank sends for each byte that it passes to a collective of n ranks, with the algorithm that sends
least (Patarasu and Yuan, "Bandwidth optimal all-reduce", 2009). One-to-all transfers are averaged over the ranks. A
backend may send more."""


@dataclass(kw_only=True)
class Traffic:
    """The traffic of one process over all groups, without what torch sends by itself (the gathers of `fully_shard`)."""

    sent_bytes: float = 0.0
    num_operations: int = 0
    """How many collectives and sends have been started."""
    last_operation: str = ""
    """The kind of the one that was started last, a key of `SENT_BYTES_PER_BYTE`."""
