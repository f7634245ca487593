"""List what a forecast assumes about the cluster: links, reserved memory and peak rates, each with its source."""

from collections.abc import Iterator
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size
from paceline.planner.hardware.cluster import Cluster, Device, Link

_GIGA, _TERA, _MICRO = 1e9, 1e12, 1e-6
_MIN_GIGABYTES = 0.1  # slower links are shown in MB/s


def assumption_lines(cluster: Cluster, *, precision: str, is_offloaded: bool = False) -> Iterator[str]:
    """Yield a line for each link that the ranks use, for the reserved memory, and for the peak rate behind MFU.

    The link to the host is among the lines only if training state is offloaded (`is_offloaded`).
    """
    yield "the forecast assumes:"
    for name, link in _used_links(cluster, is_offloaded=is_offloaded).items():
        yield f"  link {name}: {_link_text(link)}"
    device = cluster.device
    unit = "GPU" if device.is_accelerator else "rank"
    memory, reserve = format_size(round(device.memory_bytes)), format_size(round(device.reserve_bytes))
    yield f"  reserve: {reserve} of the {memory} of each {unit} ({_reserve_text(device)})"
    yield f"  MFU: of {device.peak(precision) / _TERA:.4g} TFLOP/s of each {unit}, {_peak_text(device, precision)}"


def assumptions(cluster: Cluster, *, precision: str) -> dict[str, Any]:
    """Return the assumptions for `--json`: `links`, `reserve` and `peak_flops_per_second`."""
    device = cluster.device
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
            for name, link in _used_links(cluster, is_offloaded=True).items()
        },
        "reserve": {"bytes": device.reserve_bytes, "origin": device.reserve_origin},
        "peak_flops_per_second": device.peak(precision),
    }


def _used_links(cluster: Cluster, *, is_offloaded: bool) -> dict[str, Link]:
    """Return the links over which the ranks communicate, by the position of the link in the cluster."""
    links = {}
    if cluster.devices > 1:
        links["inside a node"] = cluster.inside
    if cluster.nodes > 1:
        links["between nodes"] = cluster.between
    if is_offloaded and cluster.device.is_accelerator:
        links["to the host"] = cluster.host
    return links


def _link_text(link: Link) -> str:
    shared = " shared by all ranks of a node" if link.is_shared else ""
    source = f": {link.source}" if link.source and link.origin != "measured" else ""
    gigabytes = link.bytes_per_second / _GIGA
    speed = f"{gigabytes:.3g} GB/s" if gigabytes >= _MIN_GIGABYTES else f"{gigabytes * 1e3:.3g} MB/s"
    rate = f"{speed} each way{shared}"
    return f"{link.name}, {rate}, latency {_latency_text(link.latency_seconds)} ({link.origin}{source})"


def _latency_text(seconds: float) -> str:
    return format_precise_duration(seconds) if seconds >= 1e-3 else f"{seconds / _MICRO:.3g} us"


def _reserve_text(device: Device) -> str:
    if device.reserve_origin == "given":
        return "given"
    purpose = "driver, context, communication" if device.is_accelerator else "interpreter, libraries, freed memory"
    return f"assumed, for {purpose}; device.reserve in a --cluster file overrides it"


def _peak_text(device: Device, precision: str) -> str:
    """Return the precision and the source of the peak rate.

    The source is the data sheet if it is known, else that of the device's rates, such as a measurement.
    """
    rates = device.peaks or device.flops_per_second
    precision_text = precision if precision in rates else f"fp32, because it has no {precision}"
    if device.peaks:
        return f"dense {precision_text} by its data sheet"
    return f"dense {precision_text} ({device.source})" if device.source else f"dense {precision_text}"
