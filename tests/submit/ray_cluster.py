"""A Ray cluster on this machine, to and from which a test adds and takes nodes. It runs as a process of its own.

    python -m tests.submit.ray_cluster 2      # a head with 2 CPUs; then lines on standard input: add 2, drain, remove

Each node of the cluster is a raylet with the number of CPUs that it is told, however many the machine has.
"""

import os
import subprocess
import sys
from pathlib import Path

_DRAIN_SECONDS = 120


def main() -> None:
    os.environ["RAY_AUTH_MODE"] = "disabled"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1]), "include_dashboard": False})
    print(f"address {cluster.address}", flush=True)
    nodes = []
    for line in sys.stdin:
        verb, *words = line.split()
        if verb == "add":
            nodes.append(cluster.add_node(num_cpus=int(words[0])))
        elif verb == "drain":
            _drain(cluster.address, nodes[-1].node_id)
        elif verb == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        print("done", flush=True)
    cluster.shutdown()


def _drain(address: str, node: str) -> None:
    """Say that a node will be taken away, as a cloud says of a spot machine."""
    ray = Path(sys.executable).parent / "ray"
    reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    deadline = ["--deadline-remaining-seconds", str(_DRAIN_SECONDS)]
    subprocess.run(
        [ray, "drain-node", "--address", address, "--node-id", node, *reason, *deadline],
        stdout=subprocess.DEVNULL,
        check=True,
    )


if __name__ == "__main__":
    main()
