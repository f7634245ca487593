"""Reader of a cluster's TOML file, which reports all mistakes at once."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.axis_counts import MOST_RANKS
from paceline.config.text_file import given_text
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.planner.hardware.catalog import CatalogEntry, catalog_cluster, device_named, link_named
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.hardware.unit_parsing import QuantityKind, currency_of, read_quantity

_KINDS = ("cpu", "cuda")
_LINKED = ("inside", "between", "host")
_COUNTS = ("nodes", "devices")
_OWN = {"host_memory": QuantityKind.BYTES, "disk": QuantityKind.BYTES, "price": QuantityKind.MONEY}
_DEVICE = {
    "memory": QuantityKind.BYTES,
    "bandwidth": QuantityKind.BYTES_PER_SECOND,
    "fp32": QuantityKind.FLOPS,
    "bf16": QuantityKind.FLOPS,
    "fp16": QuantityKind.FLOPS,
    "reserve": QuantityKind.BYTES,
    "watts": QuantityKind.WATTS,
}
_OR_ZERO = ("reserve", "latency")
_LINK = {"latency": QuantityKind.SECONDS, "bandwidth": QuantityKind.BYTES_PER_SECOND}
_EXAMPLE = 'device = "H100-80G", nodes = 4, devices = 8, between = "ib-ndr"'


def read_fleet_file(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes.

    Keys: `device`, `nodes`, `devices`, `inside`, `between`, `host`, `host_memory`, `disk`, `price`, `name`. A device or
    a link is a name of the catalogue, or a table: a device's `name`, `kind`, `memory`, `bandwidth`, `fp32`, `bf16`,
    `fp16`, `reserve`, `watts`; a link's `latency`, `bandwidth`, `shared`. `price` and all numbers not per rank are a
    node's.

    Raises:
        UsageError, Problems: the file is missing or no TOML, or has wrong keys or values, each named with its place.
    """
    return _Reading(path).fleet()


class _Reading:
    """A file being read, with the problems found in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[PacelineError] = []
        self.tree = _tree(path)

    def fleet(self) -> Cluster:
        self._known(self.tree, ("device", *_COUNTS, *_LINKED, *_OWN, "name"), "")
        counts = {name: self._count(name) for name in _COUNTS}
        if not self.problems and counts["nodes"] * counts["devices"] > MOST_RANKS:
            self._wrong(f"nodes × devices is more than {MOST_RANKS:,} ranks.", "", cause="one digit too many")
        entry = self._device()
        links = {name: self._link(name) for name in _LINKED if name in self.tree}
        own = dict(self._quantities(self.tree, _OWN, ""))
        called = self._name(self.tree, "name", "".join(c for c in self.path.stem if c.isprintable()))
        raise_all(self.problems)
        usual = catalog_cluster(entry, nodes=counts["nodes"], devices=counts["devices"])
        return replace(
            usual,
            inside=links.get("inside") or usual.inside,
            between=links.get("between") or usual.between,
            host=links.get("host") or usual.host,
            host_bytes=own.get("host_memory", usual.host_bytes),
            disk_bytes=own.get("disk"),
            price_per_hour=own.get("price"),
            currency=currency_of(self.tree["price"]) if "price" in own else "",
            name=called,
        )

    def _name(self, tree: Mapping[str, Any], place: str, usual: str) -> str:
        """Return the name to print; one with unprintable characters, which a terminal may interpret, is a problem."""
        found = tree.get("name", usual)
        if not isinstance(found, str) or not found.isprintable():
            self._wrong(f"{place} = {found!r} is not a name.", place, hint=f'{place} = "ours"')
        return str(found)

    def _device(self) -> CatalogEntry:
        asked = self.tree.get("device")
        if not isinstance(asked, Mapping):
            if not isinstance(asked, str):
                self._wrong("the file does not name a device.", "device", hint='device = "H100-80G"')
                return device_named("cpu", problems=[])
            return device_named(asked, problems=self.problems, where=f"{self.path}, device")
        self._known(asked, ("name", "kind", *_DEVICE), "device.")
        found = dict(self._quantities(asked, _DEVICE, "device."))
        for name in ("memory", "bandwidth", "fp32"):
            if name not in asked:
                self._wrong(f"device.{name} is missing.", f"device.{name}", hint='device = "H100-80G", which has all')
        kind = str(asked.get("kind", "cuda"))
        if kind not in _KINDS:
            self._wrong(f"device.kind = {kind!r} is unknown.", "device.kind", hint=f"kind = {' | '.join(_KINDS)}")
        entry = device_named("cpu" if kind == "cpu" else "L40S", problems=[])
        if "memory" in found and found.get("reserve", 0.0) >= found["memory"]:
            cause = f"the reserve is what a process needs before it has a model, out of {asked['memory']}"
            self._wrong("device.reserve leaves nothing of device.memory.", "device.reserve", cause=cause)
        device = Device(
            name=self._name(asked, "device.name", "device"),
            kind=kind,
            memory_bytes=found.get("memory", 1.0),
            bytes_per_second=found.get("bandwidth", 1.0),
            flops_per_second={name: found[name] for name in ("fp32", "bf16", "fp16") if name in found},
            reserve_bytes=found.get("reserve", entry.device.reserve_bytes),
            watts=found.get("watts"),
            source=str(self.path),
            reserve_origin="given" if "reserve" in found else "assumed",
        )
        return replace(entry, device=device, host_bytes=None)

    def _link(self, name: str) -> Link | None:
        asked = self.tree[name]
        if isinstance(asked, str):
            return replace(link_named(asked, problems=self.problems, where=f"{self.path}, {name}"), origin="given")
        if not isinstance(asked, Mapping):
            self._wrong(f"{name} = {asked!r} is not a link.", name, hint=f'{name} = "ib-ndr"')
            return None
        self._known(asked, (*_LINK, "shared"), f"{name}.")
        found = dict(self._quantities(asked, _LINK, f"{name}."))
        for part in _LINK:
            if part not in asked:
                self._wrong(f"{name}.{part} is missing.", f"{name}.{part}", hint='latency = "2 us"')
        shared = asked.get("shared", False)
        if not isinstance(shared, bool):
            self._wrong(f"{name}.shared = {shared!r} is neither true nor false.", f"{name}.shared", hint="true")
        return Link(
            name=name,
            latency_seconds=found.get("latency", 1.0),
            bytes_per_second=found.get("bandwidth", 1.0),
            is_shared=shared is True,
            source=str(self.path),
            origin="given",
        )

    def _quantities(
        self, tree: Mapping[str, Any], measures: Mapping[str, QuantityKind], prefix: str
    ) -> Iterator[tuple[str, float]]:
        for name, kind in measures.items():
            if name in tree:
                try:
                    where = f"{self.path}, {prefix}{name}"
                    zero = name in _OR_ZERO
                    full = f"{prefix}{name}"
                    yield name, read_quantity(tree[name], measures=kind, name=full, where=where, or_zero=zero)
                except UsageError as error:
                    self.problems.append(error)

    def _count(self, name: str) -> int:
        count = self.tree.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            self._wrong(f"{name} = {count!r} is not a valid count.", name, cause="at least 1", hint=f"{name} = 8")
            return 1
        return count

    def _known(self, tree: Mapping[str, Any], known: tuple[str, ...], prefix: str) -> None:
        for name in tree:
            if name not in known:
                hint = f"one of {', '.join(f'{prefix}{other}' for other in known)}"
                what = f"a cluster file has no key {prefix}{name}."
                self._wrong(what, f"{prefix}{name}", cause=did_you_mean(name, known), hint=hint)

    def _wrong(self, what: str, place: str, *, cause: str = "", hint: str = "") -> None:
        where = f"{self.path}, {place}" if place else str(self.path)
        self.problems.append(UsageError(what, where=where, cause=cause, hint=hint or _EXAMPLE))


def _tree(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(given_text(path, what="a cluster file", hint=_EXAMPLE))
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist.", cause="this names a cluster file", hint="--cluster 8xH100-80G, or here"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} can't be read: {error}.", where=str(path), hint=_EXAMPLE) from None
