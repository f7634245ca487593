"""The status of a training in Kubernetes: what the answers of `kubectl get` say of the job and of its pods."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ExitCode

_INDEX, _RESTART = "batch.kubernetes.io/job-completion-index", "jobset.sigs.k8s.io/restart-attempt"
_DONE_CONDITIONS, _FAILED_CONDITION = ("Complete", "Completed"), "Failed"
_EXIT_CODE = re.compile(r"failed with exit code (\d+)")


@dataclass(frozen=True, kw_only=True)
class NodePod:
    """The pod of a node, at one moment."""

    name: str
    node: int
    attempt: int
    """How often all pods had been started again when this one was made."""
    created: str
    starts: int
    """How often its container was started again in place."""
    is_running: bool
    """Whether its container runs now."""
    trouble: str
    """Why its container does not run yet; empty if there is no word about it."""
    exit_code: int | None
    finished: str
    """When its container ended."""

    @property
    def has_log(self) -> bool:
        """Return whether its container was started."""
        return self.is_running or self.exit_code is not None


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """The end of a job, and what the cluster says about it."""

    has_failed: bool
    message: str


def newest_pods(listing: Mapping[str, Any], *, container: str) -> list[NodePod]:
    """Return the newest pod of each node, in the order of the nodes."""
    pods = [_read_pod(pod, container) for pod in listing.get("items", [])]
    newest = {pod.node: pod for pod in sorted(pods, key=lambda pod: (pod.attempt, pod.created))}
    return [newest[node] for node in sorted(newest)]


def job_end(document: Mapping[str, Any]) -> JobEnd | None:
    """Return the end of a JobSet, a TrainJob or a Job; None if it has not ended."""
    for condition in _conditions(document):
        kind, message = condition.get("type"), str(condition.get("message") or condition.get("reason") or "")
        if condition.get("status") == "True" and kind in (*_DONE_CONDITIONS, _FAILED_CONDITION):
            return JobEnd(has_failed=kind == _FAILED_CONDITION, message=message)
    return None


def is_suspended(document: Mapping[str, Any]) -> bool:
    """Return whether a queue, or someone, holds the job back."""
    return any(each.get("type") == "Suspended" and each.get("status") == "True" for each in _conditions(document))


def num_restarts(document: Mapping[str, Any], pods: Iterable[NodePod]) -> int:
    """Return how often all pods were started again together."""
    restarts = document.get("status", {}).get("restarts") or 0
    return max([int(restarts), *(pod.attempt for pod in pods)])


def training_exit_code(end: JobEnd, pods: Iterable[NodePod]) -> int:
    """Return the exit code of the training; `pods` are those of the last attempt.

    The message of a rule names it. Else it is that of the node that failed first: the others were then stopped.
    """
    if not end.has_failed:
        return int(ExitCode.DONE)
    if named := _EXIT_CODE.search(end.message):
        return int(named[1])
    codes = [(pod.finished, pod.node, pod.exit_code) for pod in pods if pod.exit_code]
    return min(codes)[2] if codes else int(ExitCode.FAILED)


def _conditions(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return document.get("status", {}).get("conditions") or []


def _read_pod(pod: Mapping[str, Any], container: str) -> NodePod:
    metadata, status = pod.get("metadata", {}), pod.get("status", {})
    labels = {**(metadata.get("annotations") or {}), **(metadata.get("labels") or {})}
    states = [each for each in status.get("containerStatuses") or [] if each.get("name") == container]
    own: Mapping[str, Any] = states[0] if states else {}
    state = own.get("state") or {}
    ended = state.get("terminated") or {}
    return NodePod(
        name=metadata.get("name", ""),
        node=int(labels.get(_INDEX, 0)),
        attempt=int(labels.get(_RESTART, 0)),
        created=metadata.get("creationTimestamp", ""),
        starts=own.get("restartCount") or 0,
        is_running="running" in state,
        trouble=_trouble(status, state),
        exit_code=ended.get("exitCode"),
        finished=ended.get("finishedAt") or "",
    )


def _trouble(status: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Return why a container does not run, such as "Unschedulable: 0/3 nodes are available"."""
    unscheduled = [
        each
        for each in status.get("conditions") or []
        if each.get("type") == "PodScheduled" and each["status"] != "True"
    ]
    found = [each for each in (*unscheduled, state.get("waiting") or {}) if each.get("message")]
    return f"{found[0].get('reason', 'waiting')}: {found[0]['message']}" if found else ""
