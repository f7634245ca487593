"""`plan --nodes`: machines like this one, with a link between them that the user gives."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.cli import main
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, MatmulTimings, Rates
from paceline.planner.hardware.given_link import read_given_link
from paceline.planner.layout.host_resources import visible_gpus
from paceline.profiling.machine_benchmarks.benchmark_cache import machine_fingerprint, store_benchmark
from tests.planned_job import LINK_BOUND_JOB
from tests.profiling.test_benchmark_results import curve

DEVICE = " --device cpu" if visible_gpus() else ""  # is named if `auto` would choose another one


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(LINK_BOUND_JOB)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["plan", "job.py", "--device", "cpu", "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def slow_machine() -> HardwareBenchmark:
    """This machine, if it computed 20 GFLOP/s and moved 5 GB/s, however busy it is."""
    compute, memory = curve(1e-6, 5e-11), curve(1e-6, 2e-10)
    rates = Rates(
        busy=1, threads=1, products={"fp32": MatmulTimings(square=compute, narrow=((128, 1.0),))},
        attention={"fp32": compute}, attention_trained={"fp32": compute},
        streams=dict.fromkeys(("copy", "add", "gelu", "norm"), memory), optimizers={"adamw": memory},
        operation_seconds=1e-6, trained_operation_seconds=5e-6,
    )  # fmt: skip
    fingerprint = machine_fingerprint(ranks=1, device="cpu")
    return HardwareBenchmark(fingerprint=fingerprint, backend="gloo", took_seconds=20.0, rates=(rates,))


def test_a_slow_link_changes_the_layout_and_offers_local_sgd(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store_benchmark(slow_machine())  # the command finds it in the cache, as if it had measured it
    slow = plan(capfd, "--nodes", "2", "--link", "20Mbit/s", "--job.depth", "6")
    fast = plan(capfd, "--nodes", "2", "--link", "100Gbit/s", "--job.depth", "6")
    assert (slow["recommended"].partition(",")[0], fast["recommended"]) == ("pp", "ddp")
    assert (slow["cluster"]["nodes"], slow["cluster"]["devices"], slow["timed"]) == (2, 1, [])
    assert slow["links"]["between nodes"]["bytes_per_second"] == 2.5e6
    ddp = next(row for row in slow["plans"] if row["layout"] == "ddp")
    offered = {option["option"]: option for option in slow["options"]}
    local = offered["--update local,every=8"]
    sent_seconds = 8 * (512 * 512 + 512) * 4 / 2.5e6  # what ddp sends in a step, on a machine of any speed
    assert local["layout"] == "ddp" and ddp["step_seconds"] - local["step_seconds"] > sent_seconds / 2
    assert "trains alone for 8 steps" in local["changes"]
    assert not [option for option in fast["options"] if "--update" in option["option"]]
    words = f"--nodes 2:host1 --ranks-per-node 1{DEVICE} --layout {slow['recommended']} --job.depth 6"
    assert slow["command"].startswith(f"on every node: paceline train job.py --run-dir runs/job-on-2-nodes {words}")
    micro = next(row for row in fast["plans"] if row["layout"] == "ddp")["settings"]["train.micro_batch_size"]
    assert fast["command"].endswith(f"--job.depth 6 --train.micro_batch_size {micro}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--nodes", "2"], "--nodes needs the link between the machines."),
        (["--link", "1Gbit/s"], "--link needs --nodes."),
        (["--ranks-per-node", "2"], "--ranks-per-node needs --nodes."),
        (["--nodes", "1", "--link", "1Gbit/s"], "--nodes 1: a link needs two machines."),
        (["--nodes", "2", "--link", "1Gbit/s", "--ranks", "4"], "--nodes and --ranks contradict each other."),
        (["--nodes", "2", "--link", "1Gbit/s", "--cluster", "8xH100-80G"], "--nodes and --cluster 8xH100-80G contradict"),
        (["--nodes", "2", "--link", "1Gbit/s", "--ranks-per-node", "0"], "a machine needs at least one rank."),
        (["--nodes", "2", "--ranks-per-node", "2", "--link", "1Gbit/s", "--layout", "pp=3"], "pp=3 needs 3 ranks, you have 4"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_start_nothing(
    folder: Path, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["plan", "job.py", "--device", "cpu", "--run-dir", "run", *words]) == 2
    assert says in capfd.readouterr().err and not (folder / "run").exists()


def test_a_dry_run_measures_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--nodes", "2", "--ranks-per-node", "2", "--link", "1Gbit/s", "--layout", "pp=4", "--run-dir", "run"]
    assert main(["plan", "job.py", "--device", "cpu", "--dry-run", *words]) == 0
    assert not (folder / "run").exists()


@pytest.mark.parametrize("link", ["20mbps", "1.5", "-3Gbit/s", "no-such-link"])
def test_a_wrong_link_is_refused_with_links_that_can_be_read(
    folder: Path, capfd: pytest.CaptureFixture[str], link: str
) -> None:
    assert main(["plan", "job.py", "--nodes", "2", "--link", link]) == 2
    err = capfd.readouterr().err
    for example in ("20Mbit/s", "1.5GB/s", "eth-10g"):
        assert f"--link {example}" in err, err
        read_given_link(example)
    assert "--link doctor.json after `paceline doctor" in err


def test_the_file_of_the_doctor_says_how_many_nodes_there_are_and_where_they_meet(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store_benchmark(slow_machine())
    tested = {"ping_seconds": 1e-4, "bytes_per_second": 1e9, "problem": ""}
    links = [{"source": 0, "target": 1, **tested}, {"source": 1, "target": 0, **tested}]
    (folder / "links.json").write_text(json.dumps({"links": links, "num_nodes": 2, "head": "gpu-a:29500"}))
    found = plan(capfd, "--link", "links.json", "--layout", "ddp")
    assert found["cluster"]["nodes"] == 2 and "--nodes 2:gpu-a:29500 --ranks-per-node 1" in found["command"], found
    assert main(["plan", "job.py", "--device", "cpu", "--link", "links.json", "--layout", "ddp"]) == 0
    assert "\nto train, on every node: paceline train job.py" in capfd.readouterr().out
    (folder / "links.json").write_text(json.dumps({"links": links}))
    assert main(["plan", "job.py", "--link", "links.json"]) == 2
    assert "to do: --nodes 2 --ranks-per-node 1 --link links.json" in capfd.readouterr().err
