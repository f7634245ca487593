"""The forecast's assumptions on the machines: links, reserved memory and peak rates, each with its source."""

from collections.abc import Iterator
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.hardware.cluster import Cluster, Device, Link

_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6


def assumption_lines(fleet: Cluster, *, precision: str, is_offloaded: bool = False) -> Iterator[str]:
    """Yield a line for each link that the ranks use, for the reserve, and for the peak rate behind MFU."""
    yield "the forecast assumes:"
    for name, link in _used(fleet, is_offloaded=is_offloaded).items():
        yield f"  link {name}: {_link(link)}"
    device = fleet.device
    one = "GPU" if device.is_accelerator else "rank"
    memory, reserve = format_size(round(device.memory_bytes)), format_size(round(device.reserve_bytes))
    yield f"  reserve: {reserve} of the {memory} of each {one} ({_reserve(device)})"
    yield f"  MFU: of {device.peak(precision) / _TERA:.4g} TFLOP/s of each {one}, {_peak(device, precision)}"


def assumptions(fleet: Cluster, *, precision: str) -> dict[str, Any]:
    """Return the assumptions for `--json`: `links`, `reserve` and `peak_flops_per_second`."""
    device = fleet.device
    return {
        "links": {
            name: {
                "name": link.name,
                "bytes_per_second": link.bytes_per_second,
                "latency_seconds": link.latency_seconds,
                "is_shared": link.is_shared,
                "origin": link.origin,
                "source": link.source,
            }
            for name, link in _used(fleet, is_offloaded=True).items()
        },
        "reserve": {"bytes": device.reserve_bytes, "origin": device.reserve_origin},
        "peak_flops_per_second": device.peak(precision),
    }


def _used(fleet: Cluster, *, is_offloaded: bool) -> dict[str, Link]:
    found = {}
    if fleet.devices > 1:
        found["inside a node"] = fleet.inside
    if fleet.nodes > 1:
        found["between nodes"] = fleet.between
    if is_offloaded and fleet.device.is_accelerator:
        found["to the host"] = fleet.host
    return found


def _link(link: Link) -> str:
    shared = " shared by all ranks of a node" if link.is_shared else ""
    source = f": {link.source}" if link.source and link.origin != "measured" else ""
    rate = f"{link.bytes_per_second / _GIGA:.3g} GB/s each way{shared}"
    return f"{link.name}, {rate}, latency {_latency(link.latency_seconds)} ({link.origin}{source})"


def _latency(seconds: float) -> str:
    return format_precise_duration(seconds) if seconds >= 1e-3 else f"{seconds / _MICRO:.3g} us"


def _reserve(device: Device) -> str:
    if device.reserve_origin == "given":
        return "given"
    what = "driver, context, communication" if device.is_accelerator else "interpreter, libraries, freed memory"
    return f"assumed, for {what}; device.reserve in a --cluster file overrides it"


def _peak(device: Device, precision: str) -> str:
    """Return the source of the peak rate: a data sheet, or the best measured rate."""
    known = device.peaks or device.flops_per_second
    own = precision if precision in known else f"fp32, because it has no {precision}"
    if device.peaks:
        return f"dense {own} by its data sheet"
    return f"dense {own} ({device.source})" if device.source else f"dense {own}"
