"""On a link of 20 Mbit/s, `doctor` names the link, and `plan` chooses another layout, which is really faster there."""

import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.profiling.machine_benchmarks.machine_benchmark import BenchmarkRequest, probe_machine
from tests.nodes.network_nodes import NetworkNodes, can_make_nodes, network_nodes
from tests.planned_job import LINK_BOUND_JOB

pytestmark = [
    pytest.mark.one_worker,
    pytest.mark.skipif(
        not can_make_nodes(), reason="network namespaces need root; test_plan_for_nodes.py needs no slow link"
    ),
]
PORT = 29471


@pytest.fixture(scope="module")
def slow_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NetworkNodes]:
    folder = tmp_path_factory.mktemp("slow")
    (folder / "job.py").write_text(LINK_BOUND_JOB)
    with network_nodes(2, folder) as made:
        made.slow(1, "20mbit")
        yield made


@pytest.fixture(scope="module")
def doctor_output(slow_nodes: NetworkNodes) -> tuple[int, dict[str, Any]]:
    """The exit code and the output of the doctor on the head, which is in links.json."""
    words = [sys.executable, "-m", "paceline", "doctor", "job.py", "--nodes", f"2:node0:{PORT}", "--json"]
    processes = [slow_nodes.start(node, [*words, "--node", str(node)]) for node in range(2)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    (slow_nodes.folder / "links.json").write_text(outputs[0])
    return processes[0].returncode, json.loads(outputs[0])


def plan(nodes: NetworkNodes, link: str) -> dict[str, Any]:
    """The plan for both nodes with this link between them."""
    probe_machine(ranks=1, request=BenchmarkRequest(seconds=2.0, folder=nodes.folder))  # is cached for the command
    words = ["plan", "job.py", "--nodes", "2", "--ranks-per-node", "1", "--link", link, "--device", "cpu", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *words], cwd=nodes.folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def step_seconds(nodes: NetworkNodes, run: Path, typed: str, *, port: int, steps: int = 3) -> float:
    """The mean time of a step after the first, on both nodes, with the options of a plan."""
    words = ["train", "job.py", "--nodes", f"2:node0:{port}", "--run-dir", str(run), *typed.split(), "--device", "cpu"]
    words += ["--train.steps", str(steps), "--log.every", "1", "--checkpoint.every", "1000", "--train.threads", "1"]
    command = [sys.executable, "-W", "ignore", "-m", "paceline", *words]
    processes = [nodes.start(node, [*command, "--node", str(node)]) for node in range(2)]
    ends = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], ends
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return statistics.mean(line["time/step"] for line in lines if line.get("step", 0) > 1 and "time/step" in line)


def test_the_doctor_names_the_slow_link(doctor_output: tuple[int, dict[str, Any]]) -> None:
    code, output = doctor_output
    assert code == 3
    (finding,) = output["findings"]
    assert finding["what"].startswith("between node 0 (node0) and node 1 (node1): slow: 2.")
    assert all(1.5e6 < link["bytes_per_second"] < 2.6e6 for link in output["links"])


def test_the_plan_over_the_slow_link_is_another_one_and_faster_there(
    slow_nodes: NetworkNodes, doctor_output: tuple[int, dict[str, Any]], tmp_path: Path
) -> None:
    over_slow, over_fast = plan(slow_nodes, "links.json"), plan(slow_nodes, "100Gbit/s")
    assert (over_slow["recommended"].partition(",")[0], over_fast["recommended"]) == ("pp", "ddp")
    link = over_slow["links"]["between nodes"]
    assert link["origin"] == "measured" and link["source"] == "links.json"
    assert link["bytes_per_second"] == min(each["bytes_per_second"] for each in doctor_output[1]["links"])
    (local,) = (option for option in over_slow["options"] if option["option"] == "--update local,every=8")
    assert not [option for option in over_fast["options"] if "--update" in option["option"]]
    rows = {"pp": over_slow["plans"][0], "ddp": over_fast["plans"][0], "local": local}
    forecast = {name: found["step_seconds"] for name, found in rows.items()}
    forecast["ddp"] = next(found["step_seconds"] for found in over_slow["plans"] if found["layout"] == "ddp")
    measured = {}
    for port, (name, found) in enumerate(rows.items(), PORT + 1):
        settings = "".join(f" --{setting} {value}" for setting, value in found["settings"].items())
        update, steps = (f" {local['option']}", 9) if name == "local" else ("", 3)
        typed = f"--layout {found['layout']}{settings}{update}"
        measured[name] = step_seconds(slow_nodes, tmp_path / name, typed, port=port, steps=steps)
    print(f"seconds of a step: forecast {forecast}, measured {measured}")
    for quick, ratio in (("pp", 2.0), ("local", 1.5)):  # local SGD computes more between messages, on shared cores
        assert forecast["ddp"] > 4 * forecast[quick] and measured["ddp"] > ratio * measured[quick], (forecast, measured)
