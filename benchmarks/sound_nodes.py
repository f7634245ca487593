"""Run `paceline doctor` on three sound nodes of a busy machine, again and again, and see that it finds nothing.

    python benchmarks/sound_nodes.py                            # 20 rounds, beside 10 processes that only count
    python benchmarks/sound_nodes.py --rounds 3 --load 0

Needs root: each node is a network namespace of this machine. A round is `paceline doctor job.py --nodes 3:node0 --data
data --run-dir runs` on all three. Anything that it finds is a false alarm, and is printed; so is each exit code that is
not 0. At the end stand the seconds of a round, and the load of the machine as the kernel counts it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.nodes.network_nodes import NetworkNodes, network_nodes

NUM_NODES, PORT = 3, 29821
WAIT_SECONDS = 180


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep that many processes counting."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def examine(nodes: NetworkNodes) -> tuple[list[str], float]:
    """Run the doctor once; return its false alarms, and the seconds until the last node ended."""
    words = [
        "doctor",
        "job.py",
        "--nodes",
        f"{NUM_NODES}:node0:{PORT}",
        "--data",
        "data",
        "--run-dir",
        "runs",
        "--json",
    ]
    command = [sys.executable, "-m", "paceline", *words]
    started = time.monotonic()
    processes = [nodes.start(node, [*command, "--node", str(node)]) for node in range(NUM_NODES)]
    ends = [process.communicate(timeout=WAIT_SECONDS) for process in processes]
    seconds = time.monotonic() - started
    found = json.loads(ends[0][0])
    alarms = [f"{finding['what']}: {finding['hint']}" for finding in found["findings"]]
    alarms += [
        f"node {node} ended with {p.returncode}: {ends[node][1]}" for node, p in enumerate(processes) if p.returncode
    ]
    if len(found["links"]) != NUM_NODES * (NUM_NODES - 1):
        alarms.append(f"{len(found['links'])} links were tried")
    return alarms, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--load", type=int, default=10, help="processes that only count")
    options = parser.parse_args()
    false_alarms, times, loads = 0, [], []
    with tempfile.TemporaryDirectory(prefix="paceline-sound-") as name:
        folder = Path(name)
        (folder / "job.py").write_text("x = 1\n")
        for made in ("data", "runs"):
            (folder / made).mkdir()
        (folder / "data" / "part-0").write_text("1234")
        with busy(options.load), network_nodes(NUM_NODES, folder) as nodes:
            for number in range(1, options.rounds + 1):
                alarms, seconds = examine(nodes)
                times.append(seconds)
                loads.append(os.getloadavg()[0])
                false_alarms += len(alarms)
                print(f"round {number}: {seconds:.1f} s, load {loads[-1]:.1f}", *alarms, sep="\n  ", flush=True)
    print(
        f"{options.rounds} rounds, {false_alarms} false alarms; seconds of a round: median"
        f" {statistics.median(times):.1f}, longest {max(times):.1f}; load {min(loads):.1f} to {max(loads):.1f}"
    )
    return int(false_alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
