"""A small `kubectl` that answers as an API server does, from a file with one answer for each moment.

Each question for the job itself is the next moment. The fields are those of the real schemas.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JOBSET_KEYS = {"jobset.sigs.k8s.io/jobset-name": "first", "jobset.sigs.k8s.io/replicatedjob-name": "node"}
_KUBECTL = """#!PYTHON
import json, os, pathlib, sys, time
folder = pathlib.Path(__file__).parent
moments = json.loads((folder / "moments.json").read_text())
counter, words = folder / "moment", sys.argv[1:]
with (folder / "called").open("a") as stream:
    stream.write(" ".join(words) + "\\n")
def now():
    return moments[min(int(counter.read_text()), len(moments) - 1)] if counter.exists() else {}
if words[0] in ("apply", "create"):
    print("first created")
elif words[0] == "get" and words[1] == "pods":
    print(json.dumps({"kind": "List", "items": now()["pods"]}))
elif words[0] == "get" and "--selector" in words:
    print(json.dumps({"kind": "List", "items": now().get("jobs", [])}))
elif words[0] == "get":
    number = int(counter.read_text()) + 1 if counter.exists() else 0
    partial = counter.with_suffix(".new")
    partial.write_text(str(number))
    partial.replace(counter)
    if now().get("is_away"):
        sys.exit("Unable to connect to the server: dial tcp 10.0.0.1:6443: i/o timeout")
    print(json.dumps(now()["job"]) if now()["job"] else "")
elif words[0] == "logs":
    pod, shown = words[-1], 0
    since = [word.partition("=")[2][:19] for word in words if word.startswith("--since-time=")]
    is_broken = folder / ("broken-" + pod)
    while True:
        moment = now()
        known = [each for each in moment["pods"] if each["metadata"]["name"] == pod]
        lines = [line for line in moment["logs"].get(pod, []) if not since or line[:19] >= since[0]]
        for line in lines[shown:]:
            print(line, flush=True)
            shown += 1
            if "BREAKS" in line and not is_broken.exists():
                is_broken.touch()
                sys.stdout.write(line[:40])
                sys.exit("error: unexpected EOF")
        states = [status["state"] for each in known for status in each["status"]["containerStatuses"]]
        if "--follow" not in words or not any("running" in state for state in states):
            break
        time.sleep(0.05)
"""


def install_kubectl(folder: Path, moments: Sequence[dict[str, Any]]) -> None:
    """Write the command to a folder, with what it answers."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    (folder / "moments.json").write_text(json.dumps(moments))
    (folder / "kubectl").write_text(_KUBECTL.replace("PYTHON", sys.executable))
    (folder / "kubectl").chmod(0o755)


def pod(
    node: int, state: dict[str, Any] | None, *, attempt: int = 0, name: str = "", container: str = "paceline"
) -> dict[str, Any]:
    """Return a pod. `state` is that of its container; None if no machine has room for it."""
    conditions = [{"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-11-30T10:00:00Z"}]
    statuses = [
        {"name": container, "state": state, "lastState": {}, "ready": "running" in (state or {}), "restartCount": 0}
    ]
    if state is None:
        conditions[0] |= {
            "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        }  # fmt: skip
        statuses = []
    labels = {
        "batch.kubernetes.io/job-completion-index": str(node), "batch.kubernetes.io/job-name": "first",
        "jobset.sigs.k8s.io/restart-attempt": str(attempt), **JOBSET_KEYS,
    }  # fmt: skip
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name or f"first-node-0-{node}-a{attempt}",
            "labels": labels,
            "creationTimestamp": f"2026-11-30T10:0{attempt}:00Z",
        },
        "status": {"phase": "Pending", "conditions": conditions, "containerStatuses": statuses},
    }


WAITING = {"waiting": {"reason": "ContainerCreating"}}
NO_IMAGE = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "registry.example/train:1"'}}
RUNNING = {"running": {"startedAt": "2026-11-30T10:00:05Z"}}


def ended(code: int, second: int = 10) -> dict[str, Any]:
    """Return the state of a container that has ended."""
    reason = "Error" if code else "Completed"
    return {"terminated": {"exitCode": code, "reason": reason, "finishedAt": f"2026-11-30T10:10:{second:02d}Z"}}


def condition(kind: str, reason: str, message: str) -> dict[str, Any]:
    """Return a condition that is true."""
    return {
        "type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": "2026-11-30T10:10:12Z",
    }  # fmt: skip


def job(kind: str, *conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    """Return a JobSet, a TrainJob or a Job with its status."""
    versions = {"JobSet": "jobset.x-k8s.io/v1alpha2", "TrainJob": "trainer.kubeflow.org/v1alpha1", "Job": "batch/v1"}
    return {
        "apiVersion": versions[kind],
        "kind": kind,
        "metadata": {"name": "first"},
        "status": {"conditions": list(conditions), **status},
    }
