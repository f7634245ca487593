"""Define the results of a machine benchmark (probe): the measured times of devices, links and disk."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any

from paceline.bytes_sent import SENT_BYTES_PER_BYTE
from paceline.errors import MachineError
from paceline.planner.hardware.timing_curve import TimingCurve, read_curve

FORMAT = 1
HEAD_WIDTH = 64
"""The width of the attention heads that the probe measures. Other widths are converted to a number of such heads."""
ATTENTION_FLOPS = 4
"""The FLOPs of a head's forward, divided by length² × width."""
TRAINED_ATTENTION_FLOPS = 14
"""The FLOPs of a head's forward and backward, divided by length² × width."""
_MAX_OTHER_LOAD = 0.2  # the fraction of the cores that other programs may use during a probe
_RERUN_HINT = "probe_here(ranks=N, again=True) measures again"


@dataclass(frozen=True, kw_only=True)
class MachineFingerprint:
    """The conditions of a probe. A stored probe is used again only under equal conditions."""

    cpu: str
    """The model name of the CPU."""
    cores: int
    """The number of cores that the probe could use."""
    torch: str
    """The version of torch."""
    gpus: tuple[str, ...]
    """The model names of the GPUs."""
    kernels: str
    """The name of the numerical kernels: `default`, or the name of those of exact mode."""
    device: str
    """The type of the measured devices: `cpu` or `cuda`."""
    ranks: int
    threads: int
    """The number of threads of one rank."""


@dataclass(frozen=True, kw_only=True)
class MatmulTimings:
    """The timings of matmuls in one precision."""

    square: TimingCurve
    """The seconds of square matmuls by FLOPs; a multiply-add is two FLOPs."""
    narrow: tuple[tuple[int, float], ...] = ()
    """Pairs of (smallest dimension, time relative to a square matmul of equal FLOPs), by ascending dimension."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of each of several processes that compute on a machine at the same time."""

    busy: int
    """The number of processes that compute at the same time."""
    threads: int
    """The threads of each process."""
    products: Mapping[str, MatmulTimings]
    """The timings of matmuls, by precision."""
    attention: Mapping[str, TimingCurve]
    """The forward seconds of a head by its FLOPs, by precision."""
    attention_trained: Mapping[str, TimingCurve]
    """The forward and backward seconds of a head by its FLOPs, by precision."""
    streams: Mapping[str, TimingCurve]
    """The seconds of memory-bound operations by bytes read and written.

    `copy` writes to existing memory; `add`, `gelu` and `norm` write to new memory.
    """
    optimizers: Mapping[str, TimingCurve]
    """The seconds of an update of one tensor by bytes read and written."""
    operation_seconds: float
    """The seconds of an operation on almost no data."""
    trained_operation_seconds: float
    """The seconds of an operation on almost no data and of its backward."""


@dataclass(frozen=True, kw_only=True)
class CollectiveTimings:
    """The timings of one kind of collective."""

    kind: str
    """The name of the collective, a key of `SENT_BYTES_PER_BYTE`."""
    ranks: int
    """The number of ranks that take part."""
    curve: TimingCurve
    """The seconds by the bytes that each rank passes to the collective."""

    @property
    def latency_seconds(self) -> float:
        """The seconds of a collective without data."""
        return self.curve.seconds(0)

    @property
    def line_rate(self) -> float:
        """The bytes per second that leave a rank in large collectives."""
        return self.curve.end_rate * SENT_BYTES_PER_BYTE[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """The speed of a disk for one rank while all ranks use it."""

    folder: str
    """The folder of the measured files."""
    write_rate: float
    """The bytes per second of a file that is written and flushed to disk."""
    read_rate: float
    """The bytes per second of a file that is read and is not in the page cache."""


@dataclass(frozen=True, kw_only=True)
class HardwareBenchmark:
    """The results of a probe. The field names are keys of the probe's file."""

    fingerprint: MachineFingerprint
    backend: str
    """The backend of the collectives."""
    took_seconds: float
    """The duration of the probe."""
    rates: tuple[Rates, ...]
    """The compute rates, for each measured number of busy processes."""
    collectives: tuple[CollectiveTimings, ...] = ()
    copies: Mapping[str, TimingCurve] = field(default_factory=dict)
    """The seconds of copies `to_device` and `to_host` by bytes of pinned memory; empty without GPUs."""
    disk: Disk | None = None
    """The speed of the disk; None if it was not measured."""
    others: float | None = None
    """The fraction of the machine's cores that other programs used during the probe; None if it is unknown."""

    @property
    def is_quiet(self) -> bool:
        """False if other programs used so many cores during the probe that the measured rates are too low."""
        return self.others is None or self.others <= _MAX_OTHER_LOAD

    def rates_for(self, busy: int) -> Rates:
        """Return the rates measured with `busy` processes, or with the next larger measured number of processes.

        If all measured numbers are smaller, return the rates of the largest.
        """
        large_enough = [rates for rates in self.rates if rates.busy >= busy]
        if large_enough:
            return min(large_enough, key=lambda rates: rates.busy)
        return max(self.rates, key=lambda rates: rates.busy)

    def collective_seconds(self, kind: str, *, num_bytes: float, ranks: int) -> float:
        """Return the seconds of a collective of `num_bytes`, scaled from the nearest measured group size.

        Raises:
            MachineError: the probe has no such collective.
        """
        if ranks == 1:
            return 0.0
        same_kind = [collective for collective in self.collectives if collective.kind == kind]
        if not same_kind:
            raise MachineError(
                f"the probe has no {kind}.", cause=_available_text([c.kind for c in self.collectives]), hint=_RERUN_HINT
            )
        nearest = min(same_kind, key=lambda collective: (abs(log(collective.ranks / ranks)), collective.ranks))
        sent_fraction = SENT_BYTES_PER_BYTE[kind]
        scaled_bytes = num_bytes * sent_fraction(ranks) / sent_fraction(nearest.ranks)
        latency_ratio = 1.0 if kind == "send" else (ranks - 1) / (nearest.ranks - 1)
        return nearest.curve.seconds(scaled_bytes) + nearest.latency_seconds * (latency_ratio - 1)

    def as_json(self) -> dict[str, Any]:
        """Return the fields and the version of the format, for a file; `read_probe` reads them."""
        return {"format": FORMAT, **asdict(self)}


def read_probe(stored: Mapping[str, Any]) -> HardwareBenchmark:
    """Return the results that `HardwareBenchmark.as_json` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the content is not valid, or of another version.
    """
    fields = dict(stored)
    if fields.pop("format") != FORMAT or not fields["rates"]:
        raise ValueError("a probe of another version of Paceline, or an empty one")
    fingerprint = fields["fingerprint"]
    fields["fingerprint"] = MachineFingerprint(**{**fingerprint, "gpus": tuple(fingerprint["gpus"])})
    fields["rates"] = tuple(map(_read_rates, fields["rates"]))
    fields["collectives"] = tuple(
        CollectiveTimings(**{**each, "curve": read_curve(each["curve"])}) for each in fields["collectives"]
    )
    fields["copies"] = _read_curves(fields["copies"])
    fields["disk"] = None if fields["disk"] is None else Disk(**fields["disk"])
    fields["others"] = None if fields["others"] is None else float(fields["others"])
    fields["took_seconds"] = float(fields["took_seconds"])
    return HardwareBenchmark(**fields)


def _read_rates(stored: Mapping[str, Any]) -> Rates:
    curves = {name: _read_curves(stored[name]) for name in ("attention", "attention_trained", "streams", "optimizers")}
    products = {
        precision: MatmulTimings(
            square=read_curve(each["square"]), narrow=tuple((int(least), slow) for least, slow in each["narrow"])
        )
        for precision, each in stored["products"].items()
    }
    return Rates(**{**stored, **curves, "products": products})


def _read_curves(stored: Mapping[str, Any]) -> dict[str, TimingCurve]:
    return {name: read_curve(each) for name, each in stored.items()}


def _available_text(names: Any) -> str:
    return f"it has {', '.join(dict.fromkeys(names)) or 'none'}"
