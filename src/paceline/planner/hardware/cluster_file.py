"""Read the TOML file of a cluster, and report all its mistakes at once."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.config.axis_counts import MAX_RANKS
from paceline.config.text_file import read_user_text
from paceline.console.formatting import did_you_mean
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.planner.hardware.catalog import CatalogEntry, catalog_cluster, find_device, find_link
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.hardware.unit_parsing import QuantityKind, parse_currency, parse_quantity

_KINDS = ("cpu", "cuda")
_LINK_NAMES = ("inside", "between", "host")
_COUNT_NAMES = ("nodes", "devices")
_NODE_QUANTITIES = {"host_memory": QuantityKind.BYTES, "disk": QuantityKind.BYTES, "price": QuantityKind.MONEY}
_DEVICE_QUANTITIES = {
    "memory": QuantityKind.BYTES,
    "bandwidth": QuantityKind.BYTES_PER_SECOND,
    "fp32": QuantityKind.FLOPS,
    "bf16": QuantityKind.FLOPS,
    "fp16": QuantityKind.FLOPS,
    "reserve": QuantityKind.BYTES,
    "watts": QuantityKind.WATTS,
}
_MAY_BE_ZERO = ("reserve", "latency")
_LINK_QUANTITIES = {"latency": QuantityKind.SECONDS, "bandwidth": QuantityKind.BYTES_PER_SECOND}
_LINK_EXAMPLE = 'latency = "2 us", bandwidth = "400 Gbit/s"'
_EXAMPLE = 'device = "H100-80G", nodes = 4, devices = 8, between = "ib-ndr"'


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster that a TOML file describes.

    Keys: `device`, `nodes`, `devices`, `inside`, `between`, `host`, `host_memory`, `disk`, `price`, `name`. A device or
    a link is a name of the catalogue, or a table. A device has `name`, `kind`, `memory`, `bandwidth`, `fp32`, `bf16`,
    `fp16`, `reserve` and `watts`; a link has `latency`, `bandwidth` and `shared`. `host_memory`, `disk` and `price` are
    those of one node.

    Raises:
        UsageError, Problems: the file is missing, is not TOML, or has wrong keys or values.
    """
    return _ClusterFileReader(path).read()


class _ClusterFileReader:
    """A reader of one cluster file. It collects all problems of the file before it raises them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[PacelineError] = []
        self.tree = _load_toml(path)

    def read(self) -> Cluster:
        self._check_keys(self.tree, ("device", *_COUNT_NAMES, *_LINK_NAMES, *_NODE_QUANTITIES, "name"), "")
        counts = {name: self._read_count(name) for name in _COUNT_NAMES}
        if not self.problems and counts["nodes"] * counts["devices"] > MAX_RANKS:
            self._add_problem(f"nodes × devices is more than {MAX_RANKS:,} ranks.", "", cause="one digit too many")
        entry = self._read_device()
        links = {name: self._read_link(name) for name in _LINK_NAMES if name in self.tree}
        node_values = dict(self._read_quantities(self.tree, _NODE_QUANTITIES, ""))
        cluster_name = self._read_name(self.tree, "name", "".join(c for c in self.path.stem if c.isprintable()))
        raise_all(self.problems)
        catalog = catalog_cluster(entry, nodes=counts["nodes"], devices=counts["devices"])
        return replace(
            catalog,
            inside=links.get("inside") or catalog.inside,
            between=links.get("between") or catalog.between,
            host=links.get("host") or catalog.host,
            host_bytes=node_values.get("host_memory", catalog.host_bytes),
            disk_bytes=node_values.get("disk"),
            price_per_hour=node_values.get("price"),
            currency=parse_currency(self.tree["price"]) if "price" in node_values else "",
            name=cluster_name,
        )

    def _read_name(self, tree: Mapping[str, Any], key: str, default: str) -> str:
        """Return the `name` in a table; add a problem if it has control characters, which a terminal may interpret.

        `key` is the full name of the key, for messages.
        """
        name = tree.get("name", default)
        if not isinstance(name, str) or not name.isprintable():
            self._add_problem(f"{key} = {name!r} is not a name.", key, hint=f'{key} = "ours"')
        return str(name)

    def _read_device(self) -> CatalogEntry:
        """Return the device, with the links that it is usually sold with."""
        value = self.tree.get("device")
        if not isinstance(value, Mapping):
            if not isinstance(value, str):
                self._add_problem("the file does not name a device.", "device", hint='device = "H100-80G"')
                return find_device("cpu", problems=[])
            return find_device(value, problems=self.problems, where=f"{self.path}, device")
        self._check_keys(value, ("name", "kind", *_DEVICE_QUANTITIES), "device.")
        quantities = dict(self._read_quantities(value, _DEVICE_QUANTITIES, "device."))
        for name in ("memory", "bandwidth", "fp32"):
            if name not in value:
                self._add_problem(
                    f"device.{name} is missing.", f"device.{name}", hint='device = "H100-80G", which has all'
                )
        kind = str(value.get("kind", "cuda"))
        if kind not in _KINDS:
            self._add_problem(f"device.kind = {kind!r} is unknown.", "device.kind", hint=f"kind = {' | '.join(_KINDS)}")
        # the entry supplies the links and the reserve that the file omits; the L40S stands for a GPU with PCIe links
        entry = find_device("cpu" if kind == "cpu" else "L40S", problems=[])
        if "memory" in quantities and quantities.get("reserve", 0.0) >= quantities["memory"]:
            cause = f"the reserve is what a process needs before it has a model, out of {value['memory']}"
            self._add_problem("device.reserve leaves nothing of device.memory.", "device.reserve", cause=cause)
        device = Device(
            name=self._read_name(value, "device.name", "device"),
            kind=kind,
            memory_bytes=quantities.get("memory", 1.0),
            bytes_per_second=quantities.get("bandwidth", 1.0),
            flops_per_second={name: quantities[name] for name in ("fp32", "bf16", "fp16") if name in quantities},
            reserve_bytes=quantities.get("reserve", entry.device.reserve_bytes),
            watts=quantities.get("watts"),
            source=str(self.path),
            reserve_origin="given" if "reserve" in quantities else "assumed",
        )
        return replace(entry, device=device, host_bytes=None)

    def _read_link(self, name: str) -> Link | None:
        value = self.tree[name]
        if isinstance(value, str):
            return replace(find_link(value, problems=self.problems, where=f"{self.path}, {name}"), origin="given")
        if not isinstance(value, Mapping):
            self._add_problem(f"{name} = {value!r} is not a link.", name, hint=f'{name} = "ib-ndr"')
            return None
        self._check_keys(value, (*_LINK_QUANTITIES, "shared"), f"{name}.")
        quantities = dict(self._read_quantities(value, _LINK_QUANTITIES, f"{name}."))
        for quantity in _LINK_QUANTITIES:
            if quantity not in value:
                self._add_problem(f"{name}.{quantity} is missing.", f"{name}.{quantity}", hint=_LINK_EXAMPLE)
        is_shared = value.get("shared", False)
        if not isinstance(is_shared, bool):
            self._add_problem(
                f"{name}.shared = {is_shared!r} is neither true nor false.", f"{name}.shared", hint="true"
            )
        return Link(
            name=name,
            latency_seconds=quantities.get("latency", 1.0),
            bytes_per_second=quantities.get("bandwidth", 1.0),
            is_shared=is_shared is True,
            source=str(self.path),
            origin="given",
        )

    def _read_quantities(
        self, tree: Mapping[str, Any], kinds: Mapping[str, QuantityKind], prefix: str
    ) -> Iterator[tuple[str, float]]:
        """Yield the name and the value of each quantity in a table; add a problem for each invalid one."""
        for name, kind in kinds.items():
            if name in tree:
                try:
                    where = f"{self.path}, {prefix}{name}"
                    allow_zero = name in _MAY_BE_ZERO
                    full_name = f"{prefix}{name}"
                    yield (
                        name,
                        parse_quantity(tree[name], kind=kind, name=full_name, where=where, allow_zero=allow_zero),
                    )
                except UsageError as error:
                    self.problems.append(error)

    def _read_count(self, name: str) -> int:
        count = self.tree.get(name, 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            self._add_problem(f"{name} = {count!r} is not a valid count.", name, cause="at least 1", hint=f"{name} = 8")
            return 1
        return count

    def _check_keys(self, tree: Mapping[str, Any], known_keys: tuple[str, ...], prefix: str) -> None:
        """Add a problem for each unknown key of a table; `prefix` is the table's name in messages."""
        for name in tree:
            if name not in known_keys:
                hint = f"one of {', '.join(f'{prefix}{other}' for other in known_keys)}"
                message = f"a cluster file has no key {prefix}{name}."
                self._add_problem(message, f"{prefix}{name}", cause=did_you_mean(name, known_keys), hint=hint)

    def _add_problem(self, message: str, key: str, *, cause: str = "", hint: str = "") -> None:
        where = f"{self.path}, {key}" if key else str(self.path)
        self.problems.append(UsageError(message, where=where, cause=cause, hint=hint or _EXAMPLE))


def _load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_user_text(path, expected="a cluster file", hint=_EXAMPLE))
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist.", cause="a name with .toml or / is a file", hint="--cluster 8xH100-80G, or here"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} can't be read: {error}.", where=str(path), hint=_EXAMPLE) from None
