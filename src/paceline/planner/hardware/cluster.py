"""Devices, the links between them and the cluster's size, in numbers, each with its source."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.from_json import as_written


@dataclass(frozen=True, kw_only=True)
class Device:
    """The device of one rank.

    `flops_per_second` are dense matmul rates by precision; `bytes_per_second` is the bandwidth of the device's own
    memory. `reserve_bytes` are never available to the model: driver, context, buffers of the communication library,
    workspaces of libraries; `reserve_origin` says if they are given or assumed. `peaks` are the data sheet's rates of a
    device whose own rates were measured.
    """

    name: str
    kind: str = "cuda"
    memory_bytes: float
    flops_per_second: Mapping[str, float]
    bytes_per_second: float
    reserve_bytes: float = 0.0
    watts: float | None = None
    source: str = ""
    reserve_origin: str = "assumed"
    peaks: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_accelerator(self) -> bool:
        """True if it has a memory of its own, separate from the host's."""
        return self.kind != "cpu"

    def rate(self, precision: str) -> float:
        """Return the operations per second in this precision; one that the device lacks runs as float32."""
        return self.flops_per_second.get(precision) or self.flops_per_second["fp32"]

    def peak(self, precision: str) -> float:
        """Return the operations per second by the data sheet, or as measured if no sheet is known."""
        return self.peaks.get(precision) or self.rate(precision)


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link between ranks: seconds until the first byte arrives, and bytes per second of one rank in one direction.

    `is_shared`: all ranks of a node share one such link. `origin` says how it is known: measured, given by the user, or
    assumed because the device is usually sold with it.
    """

    name: str
    latency_seconds: float
    bytes_per_second: float
    is_shared: bool = False
    source: str = ""
    origin: str = "assumed"


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster of `nodes` machines with `devices` each, and its links: inside a node, between nodes, and to the host.

    `host_bytes` and `disk_bytes` are a node's; `price_per_hour` is a node's too, in `currency`. `longer` and `fuller`
    are the ratios of measured to forecast step time and memory in earlier runs here, by family of layouts.
    """

    device: Device
    nodes: int = 1
    devices: int = 1
    inside: Link
    between: Link
    host: Link
    host_bytes: float | None = None
    disk_bytes: float | None = None
    price_per_hour: float | None = None
    currency: str = ""
    name: str = ""
    longer: Mapping[str, float] = field(default_factory=dict)
    fuller: Mapping[str, float] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """The number of ranks, one per device."""
        return self.nodes * self.devices

    def __str__(self) -> str:
        """Return e.g. `4 × 8 × H100-80G`."""
        counts = [f"{count:,}" for count in (self.nodes, self.devices) if count > 1]
        return " × ".join([*counts, self.device.name])

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for plan.json; `fleet_of` reads them back."""
        own = asdict(self)
        own["device"]["flops_per_second"] = dict(self.device.flops_per_second)
        own["device"]["peaks"] = dict(self.device.peaks)
        return own


def of_family(ratios: Mapping[str, float], family: str) -> float:
    """Return the correction factor of a forecast: that of the family, else that of all runs, else 1."""
    return ratios.get(family) or ratios.get("") or 1.0


def fleet_of(found: Mapping[str, Any]) -> Cluster:
    """Return the cluster that `Cluster.as_json` wrote."""
    return as_written(found, Cluster)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of `size` ranks that communicate with each other.

    `latency_seconds` is that of one collective of all ranks, `hop_seconds` that of a message to a neighbour.
    """

    size: int
    latency_seconds: float = 0.0
    bytes_per_second: float = 1.0
    hop_seconds: float = 0.0
    hop_bytes_per_second: float = 1.0

    def all_gather(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of an all-gather of `num_bytes` in total; a reduce-scatter takes the same.

        A ring of n ranks sends (n - 1) / n of the bytes (Patarasuk and Yuan, 2009).
        """
        if self.size == 1:
            return 0.0
        return calls * self.latency_seconds + (self.size - 1) / self.size * num_bytes / self.bytes_per_second

    def all_reduce(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of an all-reduce: a reduce-scatter, then an all-gather."""
        return 2 * self.all_gather(num_bytes, calls=calls)

    def all_to_all(self, num_bytes: float, *, calls: float = 1) -> float:
        """Return the seconds of an all-to-all: each rank sends `num_bytes` in equal shares, over its own link."""
        if self.size == 1:
            return 0.0
        return calls * self.latency_seconds + (self.size - 1) / self.size * num_bytes / self.hop_bytes_per_second

    def pass_on(self, num_bytes: float) -> float:
        """Return the seconds to send to a neighbour."""
        return 0.0 if self.size == 1 else self.hop_seconds + num_bytes / self.hop_bytes_per_second


def group_of(fleet: Cluster, axes: Sequence[tuple[int, int]], *, efficiency: float = 1.0) -> Group:
    """Return the group along some axes, each `(stride, size)`: neighbours on an axis are `stride` ranks apart.

    Between nodes, each of the group's ranks on a node uses its own link, so bandwidths add up. Inside a node, latencies
    add up along the ring; between nodes, along a tree (NCCL's double binary trees).
    """
    size = near = 1
    for stride, count in axes:
        size *= count
        near *= max(1, min(count, fleet.devices // stride))
    inside, between = fleet.inside, fleet.between
    latency, rate = (near - 1) * inside.latency_seconds, inside.bytes_per_second
    hop_latency, hop_rate = inside.latency_seconds, rate
    if size > near:
        hop_latency = between.latency_seconds
        hop_rate = between.bytes_per_second / (fleet.devices if between.is_shared else 1)
        latency += (-(-size // near) - 1).bit_length() * between.latency_seconds
        rate = min(rate, hop_rate * near) if near > 1 else hop_rate
    return Group(
        size=size,
        latency_seconds=latency,
        bytes_per_second=rate * efficiency,
        hop_seconds=hop_latency,
        hop_bytes_per_second=hop_rate * efficiency,
    )
