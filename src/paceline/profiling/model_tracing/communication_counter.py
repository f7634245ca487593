"""Count a rank's communication: calls and bytes of each collective and point-to-point message.

The counter is a dispatch mode, which sees every operation of torch. So it counts the collectives and messages of
Paceline, `fully_shard` and distributed tensors.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor
from typing_extensions import override

from paceline.bytes_sent import SENT_BYTES_PER_BYTE
from paceline.torch_internals.dispatch_modes import DispatchMode, group_size

_KIND_BY_OPERATOR = {
    "allreduce_": "all_reduce", "allreduce_coalesced_": "all_reduce", "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce", "all_reduce_coalesced": "all_reduce", "all_reduce_coalesced_": "all_reduce",
    "allgather_": "all_gather", "_allgather_base_": "all_gather", "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather", "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather", "all_gather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_": "reduce_scatter", "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_out": "reduce_scatter", "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall_": "all_to_all", "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "broadcast_": "broadcast", "broadcast": "broadcast", "reduce_": "reduce", "gather_": "gather",
    "scatter_": "scatter", "send": "send", "isend": "send", "recv_": "receive", "recv_any_source_": "receive",
    "irecv": "receive", "barrier": "barrier", "monitored_barrier_": "barrier",
}  # fmt: skip
_INPUT_ARGUMENTS = ("input", "inputs", "input_tensor", "input_tensors", "tensor", "tensors")


@dataclass(kw_only=True)
class CollectiveTotals:
    """The totals of one kind of collective on this rank.

    `payload_bytes` are the bytes of the inputs. `sent_bytes` are the bytes that the rank sends, computed from
    `SENT_BYTES_PER_BYTE`.
    """

    calls: int = 0
    payload_bytes: int = 0
    sent_bytes: float = 0.0


class CommunicationCounter(DispatchMode):
    """A dispatch mode that counts the communication of this thread, and of backwards that this thread starts.

    `totals` has the counts by kind of collective.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.totals: dict[str, CollectiveTotals] = {}

    @property
    def total_bytes(self) -> float:
        """The bytes that this rank has sent."""
        return sum(totals.sent_bytes for totals in self.totals.values())

    def as_json(self) -> dict[str, dict[str, float]]:
        """Return the totals by collective."""
        return {name: asdict(totals) for name, totals in sorted(self.totals.items())}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the operation and run it. For distributed tensors, count the local operations instead."""
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._count(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: Any, kwargs: Any) -> None:
        name = _KIND_BY_OPERATOR.get(func._schema.name.partition("::")[2])
        if name is None:
            return
        arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        group = next((arguments[key] for key in ("process_group", "group_name", "group") if key in arguments), None)
        payload = sum(_tensor_bytes(tensor) for key in _INPUT_ARGUMENTS for tensor in _tensors(arguments.get(key)))
        totals = self.totals.setdefault(name, CollectiveTotals())
        totals.calls += 1
        if name in SENT_BYTES_PER_BYTE:
            totals.payload_bytes += payload
            totals.sent_bytes += payload * SENT_BYTES_PER_BYTE[name](group_size(group))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _tensor_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
