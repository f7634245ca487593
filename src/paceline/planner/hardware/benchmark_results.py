"""What a probe of this machine has found: how quick devices, links and disk are, and what a step's parts then take."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from math import exp, log
from typing import Any, TypeVar

from paceline.bytes_sent import SHARES
from paceline.errors import MachineError
from paceline.planner.hardware.timing_curve import TimingCurve, read_curve

FORMAT = 1
HEAD_WIDTH = 64  # of what was measured; other widths count as more heads, or fewer
ATTENTION_WORK, TRAINED_WORK = 4, 14  # FLOPs of a head are so many times its length squared by its width
_QUIET = 0.2
_AGAIN = "probe_here(ranks=N, again=True) measures anew"
_Kept = TypeVar("_Kept")


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a probe holds for. `kernels` are those of exact mode or the default ones; `threads` are a rank's."""

    cpu: str
    cores: int
    torch: str
    gpus: tuple[str, ...]
    kernels: str
    device: str
    ranks: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class MatmulTimings:
    """Matrix products of one precision. `square` is seconds by FLOPs (a multiply-add is two).

    `narrow` are least dimensions with how often longer than a square one such a product takes, the smallest first.
    """

    square: TimingCurve
    narrow: tuple[tuple[int, float], ...] = ()

    def seconds(self, *, rows: int, inner: int, columns: int) -> float:
        """Of one product `rows x inner x columns`, as the mean of its forward and its two in backward."""
        least = min(rows, inner, columns)
        return self.square.seconds(2.0 * rows * inner * columns) * self.longer(least)

    def longer(self, least: int) -> float:
        """Straight between what was measured, both as logarithms. Even narrower takes as long for less."""
        if not self.narrow or least >= self.narrow[-1][0]:
            return self.narrow[-1][1] if self.narrow else 1.0
        first = self.narrow[0]
        if least <= first[0]:
            return first[1] * first[0] / max(least, 1)
        (low, slow), (high, quick) = next(pair for pair in pairwise(self.narrow) if pair[1][0] >= least)
        share = log(least / low) / log(high / low)
        return exp(log(slow) + share * (log(quick) - log(slow)))


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of each of `busy` processes that compute on a machine at the same time, with `threads` each.

    `attention` and `attention_trained` (forward with backward) are seconds of a head by its FLOPs. `streams`
    are operations that read and write much and compute little (`copy` into what is there, `add`, `gelu`, `norm` into
    new memory), seconds by bytes read and written. `optimizers` are seconds by bytes read and written for one tensor.
    `operation_seconds` is what an operation on almost nothing takes, `trained_operation_seconds` with its backward.
    """

    busy: int
    threads: int
    products: Mapping[str, MatmulTimings]
    attention: Mapping[str, TimingCurve]
    attention_trained: Mapping[str, TimingCurve]
    streams: Mapping[str, TimingCurve]
    optimizers: Mapping[str, TimingCurve]
    operation_seconds: float
    trained_operation_seconds: float

    def product_seconds(self, *, rows: int, inner: int, columns: int, precision: str = "fp32") -> float:
        """Of one matrix product.

        Raises:
            MachineError: the probe has no such precision.
        """
        return _of(self.products, precision, "products in").seconds(rows=rows, inner=inner, columns=columns)

    def attention_seconds(self, *, flops: float, length: int, precision: str = "fp32", trained: bool = False) -> float:
        """Of fused attention whose forward has `flops` of `4 * batch * heads * length^2 * width`, over all positions.

        `trained`: with its backward, which has 2.5 times as many.

        Raises:
            MachineError: the probe has no such precision.
        """
        heads = flops / (ATTENTION_WORK * length**2 * HEAD_WIDTH)
        work = TRAINED_WORK if trained else ATTENTION_WORK
        curves = self.attention_trained if trained else self.attention
        return heads * _of(curves, precision, "attention in").seconds(work * length**2 * HEAD_WIDTH)

    def stream_seconds(self, *, num_bytes: float, kind: str = "add") -> float:
        """Of one operation that reads and writes so many bytes.

        Raises:
            MachineError: the probe has no such kind.
        """
        return _of(self.streams, kind, "stream").seconds(num_bytes)

    def optimizer_seconds(self, *, tensors: int, num_bytes: float, kind: str = "adamw") -> float:
        """Of a step over `tensors` equal ones that reads and writes `num_bytes` in all, 28 an fp32 element of AdamW.

        Raises:
            MachineError: the probe has no such kind.
        """
        return tensors * _of(self.optimizers, kind, "optimizer").seconds(num_bytes / max(tensors, 1))


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One kind among `ranks`; seconds by what a rank hands over, as `traffic.SHARES` counts it."""

    kind: str
    ranks: int
    curve: TimingCurve

    @property
    def latency_seconds(self) -> float:
        """Of one that carries nothing."""
        return self.curve.seconds(0)

    @property
    def line_rate(self) -> float:
        """Bytes a second that leave a rank, where much is handed over."""
        return self.curve.end_rate * SHARES[self.kind](self.ranks)


@dataclass(frozen=True, kw_only=True)
class Disk:
    """Bytes a second of each rank's file where all ranks write, flushed to disk, and where all read, uncached."""

    folder: str
    write_rate: float
    read_rate: float


@dataclass(frozen=True, kw_only=True)
class HardwareBenchmark:
    """All of it. `copies` (`to_device`, `to_host`) are seconds by bytes from pinned memory, where there is a GPU.

    `others` is the share of the machine's cores that other programs had meanwhile, where that is known.
    """

    fingerprint: Fingerprint
    backend: str
    took_seconds: float
    rates: tuple[Rates, ...]
    collectives: tuple[Collective, ...] = ()
    copies: Mapping[str, TimingCurve] = field(default_factory=dict)
    disk: Disk | None = None
    others: float | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether little else ran on the machine, as far as is known: else the figures are too low."""
        return self.others is None or self.others <= _QUIET

    def of_busy(self, busy: int) -> Rates:
        """The rates while so many processes of a machine compute: of so many, else of the next more, else of most."""
        enough = [each for each in self.rates if each.busy >= busy]
        return min(enough, key=lambda each: each.busy) if enough else max(self.rates, key=lambda each: each.busy)

    def collective_seconds(self, kind: str, *, num_bytes: float, ranks: int) -> float:
        """Of one that hands over `num_bytes`. Groups of another size than those measured are reckoned from the nearest.

        Raises:
            MachineError: the probe has no such collective.
        """
        if ranks == 1:
            return 0.0
        had = [each for each in self.collectives if each.kind == kind]
        if not had:
            raise MachineError(f"the probe has no {kind}.", cause=_has([c.kind for c in self.collectives]), hint=_AGAIN)
        nearest = min(had, key=lambda each: (abs(log(each.ranks / ranks)), each.ranks))
        share = SHARES[kind]
        alike = num_bytes * share(ranks) / share(nearest.ranks)
        rounds = 1.0 if kind == "send" else (ranks - 1) / (nearest.ranks - 1)
        return nearest.curve.seconds(alike) + nearest.latency_seconds * (rounds - 1)

    def copy_seconds(self, way: str, *, num_bytes: float) -> float:
        """From the host `to_device`, or `to_host`.

        Raises:
            MachineError: it was probed without a GPU.
        """
        return _of(self.copies, way, "copy").seconds(num_bytes)

    def as_json(self) -> dict[str, Any]:
        """For a file; `read_probe` reads it back."""
        return {"format": FORMAT, **asdict(self)}


def read_probe(found: Mapping[str, Any]) -> HardwareBenchmark:
    """What `as_json` wrote.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: it is something else, or of another version.
    """
    own = dict(found)
    if own.pop("format") != FORMAT or not own["rates"]:
        raise ValueError("a probe of another version of Paceline, or of nothing")
    mark = own["fingerprint"]
    own["fingerprint"] = Fingerprint(**{**mark, "gpus": tuple(mark["gpus"])})
    own["rates"] = tuple(map(_read_rates, own["rates"]))
    own["collectives"] = tuple(
        Collective(**{**each, "curve": read_curve(each["curve"])}) for each in own["collectives"]
    )
    own["copies"] = _read_curves(own["copies"])
    own["disk"] = None if own["disk"] is None else Disk(**own["disk"])
    own["others"] = None if own["others"] is None else float(own["others"])
    own["took_seconds"] = float(own["took_seconds"])
    return HardwareBenchmark(**own)


def _read_rates(found: Mapping[str, Any]) -> Rates:
    curves = {name: _read_curves(found[name]) for name in ("attention", "attention_trained", "streams", "optimizers")}
    products = {
        precision: MatmulTimings(
            square=read_curve(each["square"]), narrow=tuple((int(least), slow) for least, slow in each["narrow"])
        )
        for precision, each in found["products"].items()
    }
    return Rates(**{**found, **curves, "products": products})


def _read_curves(found: Mapping[str, Any]) -> dict[str, TimingCurve]:
    return {name: read_curve(each) for name, each in found.items()}


def _of(had: Mapping[str, _Kept], name: str, what: str) -> _Kept:
    if name not in had:
        raise MachineError(f"the probe has no {what} {name}.", cause=_has(had), hint=_AGAIN)
    return had[name]


def _has(names: Any) -> str:
    return f"it has {', '.join(dict.fromkeys(names)) or 'none'}"
