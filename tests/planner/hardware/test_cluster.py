"""Clusters as text and as files, the hardware catalogue, and the time of messages."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import MachineError, PacelineError, Problems, UsageError
from paceline.planner.hardware.assumed_rates import assumption_lines
from paceline.planner.hardware.catalog import DEVICES, LINKS
from paceline.planner.hardware.cluster import build_group, cluster_from_json
from paceline.planner.hardware.local_cluster import available_memory
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.hardware.unit_parsing import UNITS, QuantityKind, parse_quantity

_GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "nodes", "devices", "name", "between"),
    [
        ("H100-80G", 1, 1, "H100-80G", "ib-ndr"),
        ("8xH100-80G", 1, 8, "H100-80G", "ib-ndr"),
        ("4x8xh100-80g", 4, 8, "H100-80G", "ib-ndr"),
        ("4×8×A100-40G@ETH-100G", 4, 8, "A100-40G", "eth-100g"),
        (" 2x4xMI250X ", 2, 4, "MI250X", "ib-hdr"),
        ("2x1xRTX-4090@roce-200g", 2, 1, "RTX-4090", "roce-200g"),
        ("2xcpu", 1, 2, "cpu", "eth-1g"),
    ],
)
def test_a_cluster_as_it_is_typed(text: str, nodes: int, devices: int, name: str, between: str) -> None:
    fleet = parse_cluster(text)
    assert (fleet.nodes, fleet.devices, fleet.device.name, fleet.between.name) == (nodes, devices, name, between)
    assert fleet.ranks == nodes * devices
    assert cluster_from_json(json.loads(json.dumps(fleet.as_json()))) == fleet


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0xH100-80G", "0 is not a valid count"),
        ("4x0xH100-80G", "0 is not a valid count"),
        ("H100", "did you mean 'H100-80G'"),
        ("8xA100-80", "did you mean 'A100-80G'"),
        ("4x8xH100-80G@ib-nd", "did you mean 'ib-ndr'"),
        ("8x", "not a known device"),
        ("", "can't be read"),
        ("here", "was not measured"),
        ("99999x9xT4", "899,991 ranks"),
        ("999999999xT4", "one digit too many"),
        ("nowhere/cluster.toml", "does not exist"),
    ],
)
def test_what_is_no_cluster(text: str, says: str) -> None:
    with pytest.raises(PacelineError) as caught:
        parse_cluster(text)
    assert says in str(caught.value) and "to do: " in str(caught.value)
    assert caught.value.exit_code == 2


def test_two_mistakes_are_told_at_once() -> None:
    with pytest.raises(Problems) as caught:
        parse_cluster("0x8xH100@ib-nd")
    assert len(caught.value.problems) == 3


def test_here_is_what_was_measured() -> None:
    here = parse_cluster("2xcpu")
    assert parse_cluster("here", local_cluster=here) is here


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(
        'nodes = 4\ndevices = 8\nhost_memory = "2 TiB"\ndisk = "30 TB"\nprice = "98.32 USD/h"\ninside = "nvlink4"\n'
        '[device]\nname = "X1"\nmemory = "80 GiB"\nbandwidth = "3.35 TB/s"\nfp32 = "67 TFLOP/s"\nbf16 = "989 TFLOP/s"\n'
        '[between]\nlatency = "2 us"\nbandwidth = "400 Gbit/s"\nshared = true\n'
    )
    fleet = parse_cluster(str(path))
    assert fleet.name == "ours" and fleet.ranks == 32 and fleet.device.name == "X1"
    assert fleet.device.memory_bytes == 80 * _GIB and fleet.device.rate("bf16") == 989e12
    assert fleet.device.rate("fp16") == 67e12  # which it does not have
    assert (fleet.between.bytes_per_second, fleet.between.latency_seconds) == (50e9, pytest.approx(2e-6))
    assert fleet.between.is_shared and fleet.inside == replace(LINKS["nvlink4"], origin="given")
    assert (fleet.price_per_hour, fleet.currency, fleet.host_bytes) == (98.32, "USD", 2 << 40)
    assert cluster_from_json(json.loads(json.dumps(fleet.as_json()))) == fleet


def test_a_reserve_and_a_latency_may_be_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ideal.toml"
    device = '[device]\nmemory = "{}"\nreserve = "0 B"\nbandwidth = "1 TB/s"\nfp32 = "1 TFLOP/s"\n'
    path.write_text(device.format("1 GiB") + '[inside]\nlatency = "0 s"\nbandwidth = "1 GB/s"\n')
    fleet = parse_cluster(str(path))
    assert (fleet.device.reserve_bytes, fleet.inside.latency_seconds) == (0.0, 0.0)
    path.write_text(device.format("0 GiB"))
    with pytest.raises(UsageError, match=r"device\.memory = '0 GiB' is not positive"):
        parse_cluster(str(path))


def test_all_that_is_wrong_in_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(
        'nodes = 0\ndevices = true\nbetwen = "x"\nprice = "9.8 USD"\nhost_memory = "2 GiB/s"\ninside = "nvlnk4"\n'
        'host = 5\nname = "a\\u001b[31m"\n[device]\nname = 7\nmemory = "80"\nbandwidth = "3 TB/s"\nkind = "tpu"\ncolour = "red"\n'
        '[between]\nlatency = "2 hours"\nbandwidth = "-4 GB/s"\nshared = "yes"\n'
    )
    with pytest.raises(Problems) as caught:
        parse_cluster(str(path))
    said = str(caught.value)
    for words in (
        "no key betwen", "did you mean 'between'", "nodes = 0 is not a valid count", "devices = True is not a valid count",
        "device.memory = '80' has no unit", "device.fp32 is missing", "device.kind = 'tpu' is unknown", "no key device.colour",
        "'nvlnk4' is not a known link", "'hours' is not a unit of seconds", "between.bandwidth = '-4 GB/s' is not positive",
        "that is a unit of bytes per second", "did you mean 'USD/h'", "host = 5 is not a link", "neither true nor false",
        r"name = 'a\x1b[31m' is not a name", "device.name = 7 is not a name",
    ):  # fmt: skip
        assert words in said, words
    assert all(str(path) in problem.where for problem in caught.value.problems)


@pytest.mark.parametrize("text", ["nodes = [", "\x00", "nodes = 1\nnodes = 2"])
def test_a_file_that_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match="can't be read"):
        parse_cluster(str(path))


def test_a_file_without_a_device(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("nodes = 2\n")
    with pytest.raises(UsageError, match="does not name a device"):
        parse_cluster(str(path))


@pytest.mark.parametrize(
    ("text", "measures", "value"),
    [
        ("80 GiB", QuantityKind.BYTES, 80 * _GIB),
        ("80GB", QuantityKind.BYTES, 80e9),
        ("1,024 B", QuantityKind.BYTES, 1024),
        ("400 Gbit/s", QuantityKind.BYTES_PER_SECOND, 50e9),
        ("1e3 MB/s", QuantityKind.BYTES_PER_SECOND, 1e9),
        ("2 µs", QuantityKind.SECONDS, 2e-6),
        ("0.5 ms", QuantityKind.SECONDS, 5e-4),
        ("989 TFLOP/s", QuantityKind.FLOPS, 989e12),
        ("0.7 kW", QuantityKind.WATTS, 700),
        ("12 EUR/h", QuantityKind.MONEY, 12),
    ],
)
def test_quantities(text: str, measures: QuantityKind, value: float) -> None:
    assert parse_quantity(text, kind=measures, name="it") == pytest.approx(value)


@pytest.mark.parametrize("measures", list(QuantityKind))
@pytest.mark.parametrize(
    "text",
    [
        "5",
        5,
        None,
        "",
        "many",
        "-1 {}",
        "0 {}",
        "5 parsecs",
        "3,35 {}",
        "3,3_5,, {}",
        "1e999 {}",
        "nan {}",
        "1e-300 {}",
        "1e300 {}",
        ["5 {}"],
    ],
)
def test_what_is_no_quantity(text: object, measures: QuantityKind) -> None:
    given = text.format(next(iter(UNITS[measures]))) if isinstance(text, str) else text
    with pytest.raises(UsageError, match="it = "):
        parse_quantity(given, kind=measures, name="it")


@pytest.mark.parametrize("name", list(DEVICES))
def test_a_device_of_the_catalogue_can_be(name: str) -> None:
    entry = DEVICES[name]
    device = entry.device
    assert device.name == name and device.source
    assert 0 < device.reserve_bytes < device.memory_bytes / 4
    assert {entry.inside, entry.between, entry.host} <= set(LINKS)
    assert device.rate("fp32") > 0 and device.rate("float8") == device.rate("fp32")
    if device.is_accelerator:
        assert 5e12 < device.rate("fp32") <= device.rate("fp16") < 3e15
        assert 5 < device.rate("fp16") / device.bytes_per_second / 2 < 500  # operations a number read
        assert device.watts and 1e10 < device.rate("fp16") / device.watts < 1e13
        assert device.bytes_per_second > LINKS[entry.inside].bytes_per_second
    fleet = parse_cluster(f"2x4x{name}")
    assert fleet.ranks == 8 and name in str(fleet)


@pytest.mark.parametrize("name", list(LINKS))
def test_a_link_of_the_catalogue_can_be(name: str) -> None:
    link = LINKS[name]
    assert link.source and 1e-7 < link.latency_seconds < 1e-3 and 1e8 <= link.bytes_per_second <= 1e12


def _ring(size: int, num_bytes: float, latency: float, rate: float) -> float:
    """The naive version: every rank passes a piece on, size - 1 times."""
    return sum(latency + num_bytes / size / rate for _ in range(size - 1))


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_a_ring_inside_a_node(size: int) -> None:
    fleet = parse_cluster("2x8xH100-80G")
    group, link = build_group(fleet, [(1, size)]), fleet.inside
    assert group.all_gather(1e9) == pytest.approx(_ring(size, 1e9, link.latency_seconds, link.bytes_per_second))
    assert group.all_reduce(1e9) == pytest.approx(2 * group.all_gather(1e9))
    assert group.send(1e9) == pytest.approx(link.latency_seconds + 1e9 / link.bytes_per_second)


def test_a_group_of_one_sends_nothing() -> None:
    group = build_group(parse_cluster("8xH100-80G"), [(1, 1)])
    assert group.all_gather(1e9) == group.all_reduce(1e9) == group.all_to_all(1e9) == group.send(1e9) == 0


def test_which_link_an_axis_takes() -> None:
    fleet = parse_cluster("4x8xH100-80G")
    inside, between = fleet.inside.bytes_per_second, fleet.between.bytes_per_second
    assert build_group(fleet, [(1, 8)]).bytes_per_second == inside
    assert build_group(fleet, [(8, 4)]).bytes_per_second == between  # one of each node: its own port
    assert build_group(fleet, [(4, 8)]).bytes_per_second == 2 * between  # two of each node
    assert build_group(fleet, [(1, 32)]).bytes_per_second == min(inside, 8 * between)
    assert build_group(fleet, [(8, 4)]).hop_bytes_per_second == between
    slow = parse_cluster("4x8xH100-80G@eth-100g")
    assert build_group(slow, [(8, 4)]).bytes_per_second == slow.between.bytes_per_second / 8  # shared by all of a node


def test_of_gpus_the_driver_is_asked_for_their_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = --query-gpu=memory.total ] && echo "81559 MiB\n40960 MiB"\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert available_memory("cuda") == 40960 << 20


def test_without_a_driver_that_says_it_the_cluster_is_to_be_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="nvidia-smi does not report") as caught:
        available_memory("cuda")
    assert "toml" in caught.value.hint
    assert available_memory("cpu") > 1 << 30


def test_a_file_says_what_is_given_and_the_rest_is_assumed(tmp_path: Path) -> None:
    own = "[device]\nname = 'own'\nmemory = '80 GiB'\nbandwidth = '2 TB/s'\nfp32 = '20 TFLOP/s'\n"
    (tmp_path / "own.toml").write_text(f"devices = 2\ninside = 'nvlink4'\n{own}reserve = '1 GiB'\n")
    fleet = parse_cluster(str(tmp_path / "own.toml"))
    assert (fleet.inside.origin, fleet.between.origin, fleet.device.reserve_origin) == ("given", "assumed", "given")
    (tmp_path / "own.toml").write_text(f"{own}[between]\nlatency = '9 us'\nbandwidth = '10 GB/s'\n")
    fleet = parse_cluster(str(tmp_path / "own.toml"))
    assert (fleet.inside.origin, fleet.between.origin, fleet.device.reserve_origin) == ("assumed", "given", "assumed")
    lines = "\n".join(assumption_lines(fleet, precision="bf16"))
    assert "reserve: 2.0 GiB of the 80.0 GiB of each GPU (assumed, for " in lines
    assert "MFU: of 20 TFLOP/s of each GPU, dense fp32, because it has no bf16 (" in lines
