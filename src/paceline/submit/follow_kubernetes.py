"""Following a job of Kubernetes: its states and the log of node 0, until it ends."""

import json
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import plural
from paceline.errors import ExitCode, MachineError
from paceline.nodes.finding import format_nodes
from paceline.submit.kubernetes_status import (
    JobEnd,
    NodePod,
    is_suspended,
    job_end,
    newest_pods,
    num_restarts,
    training_exit_code,
)
from paceline.submit.pod_log import PodLog
from paceline.submit.scheduler_command import run_scheduler_command
from paceline.submit.submission import SubmissionFile

_POLL_SECONDS = 2.0
_MAX_FAILURES = 30
_JOBS, _NODE_0 = "jobs.batch", "batch.kubernetes.io/job-completion-index=0"
_PODS_OF_JOBSET = "jobset.sigs.k8s.io/jobset-name={name},jobset.sigs.k8s.io/replicatedjob-name=node"


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """A kind of job: its resource, its pods, and the container in which the training runs."""

    resource: str
    selector: str
    container: str


_KINDS = {
    "jobset": _Kind(resource="jobsets.jobset.x-k8s.io", selector=_PODS_OF_JOBSET, container="paceline"),
    # Kubeflow makes a JobSet of the same name, with its own name for the container.
    "trainjob": _Kind(resource="trainjobs.trainer.kubeflow.org", selector=_PODS_OF_JOBSET, container="node"),
    "job": _Kind(resource=_JOBS, selector="batch.kubernetes.io/job-name={name}", container="paceline"),
}


def follow_kubernetes(
    file: SubmissionFile, *, name: str, kind: str, num_nodes: int, report: Callable[[str], None]
) -> int:
    """Hand a file in, print the log of node 0 and the changes of the job's state, and return the training's exit code.

    An interrupt ends only this, not the job.

    Raises:
        MachineError: kubectl is missing or fails.
    """
    for line in run_scheduler_command(shlex.split(file.command)).splitlines():
        report(line)
    follower = _Follower(name, _KINDS[kind], num_nodes=num_nodes, report=report)
    try:
        return follower.run()
    except KeyboardInterrupt:
        follower.report_how_to_go_on()
        return int(ExitCode.INTERRUPTED)
    finally:
        follower.close()


class _Follower:
    """A job that is followed, with what was seen of it until now."""

    def __init__(self, name: str, kind: _Kind, *, num_nodes: int, report: Callable[[str], None]) -> None:
        self._name = name
        self._kind = replace(kind, selector=kind.selector.format(name=name))
        self._num_nodes = num_nodes
        self._report = report
        self._log: PodLog | None = None
        self._state = ""
        self._restarts = 0
        self._pods: dict[int, NodePod] = {}  # of the last attempt, also those that are gone

    def run(self) -> int:
        """Follow until the job has ended; return the exit code of the training."""
        num_failures = 0
        while True:
            try:
                end = self._look()
                num_failures = 0
            except MachineError:  # the API server may be away for a moment
                num_failures += 1
                if num_failures > _MAX_FAILURES:
                    raise
                end = None
            if end is not None:
                self._finish_log()
                self._report(f"{self._name}: {'failed' if end.has_failed else 'completed'}: {end.message}")
                return training_exit_code(end, self._pods.values())
            if self._log is None:
                time.sleep(_POLL_SECONDS)
            else:
                self._log.print_lines(_POLL_SECONDS)

    def report_how_to_go_on(self) -> None:
        """Say that the job goes on, and what to type to look again, or to end it."""
        logs = f"kubectl logs --follow --container {self._kind.container} --selector {self._kind.selector},{_NODE_0}"
        self._report(f"{self._name} goes on in the cluster.")
        self._report(f"to look again: {logs}")
        self._report(f"to end it: kubectl delete {self._kind.resource} {self._name}")

    def close(self) -> None:
        """End the stream of the log."""
        if self._log is not None:
            self._log.close()

    def _look(self) -> JobEnd | None:
        """Ask how the job and its pods are, say what has changed, and return the end of the job.

        Raises:
            MachineError: kubectl fails.
        """
        document = _get(self._kind.resource, self._name, "--ignore-not-found")
        if document is None:
            return JobEnd(has_failed=True, message="it was deleted")
        listing = _get("pods", "--selector", self._kind.selector) or {}
        pods = newest_pods(listing, container=self._kind.container)
        self._report_restart(num_restarts(document, pods))
        own = [pod for pod in pods if pod.attempt == self._restarts or self._kind.resource == _JOBS]
        self._report_ends(own)
        self._pods.update({pod.node: pod for pod in own})
        end = job_end(document)
        if end is None:
            self._report_state(self._describe(own, is_held=is_suspended(document)))
        elif end.has_failed and self._kind.resource != _JOBS:
            end = replace(end, message="; ".join([end.message, *self._failures_of_jobs()]))
        self._follow_log(own)
        return end

    def _describe(self, pods: Sequence[NodePod], *, is_held: bool) -> str:
        """Return the state of a job that has not ended; between the end of its pods and its own, that from before."""
        if is_held:
            return "suspended"
        num_running = sum(pod.is_running for pod in pods)
        if num_running:
            return f"running, {num_running} of {plural(self._num_nodes, 'node')}"
        if pods and all(pod.exit_code is not None for pod in pods):
            return self._state
        troubles = [f"node {pod.node}: {pod.trouble}" for pod in pods if pod.trouble]
        return ": ".join(["pending", *troubles[:1]])

    def _report_state(self, state: str) -> None:
        if state != self._state:
            self._report(f"{self._name}: {state}")
        self._state = state

    def _report_restart(self, restarts: int) -> None:
        if restarts > self._restarts:
            self._report_state(f"started again ({plural(restarts, 'restart')})")
            self._restarts, self._pods = restarts, {}

    def _report_ends(self, pods: Sequence[NodePod]) -> None:
        """Say which nodes have ended since the last look, unless they are done."""
        before = {(pod.name, pod.exit_code) for pod in self._pods.values()}
        ended = [pod for pod in pods if pod.exit_code and (pod.name, pod.exit_code) not in before]
        for code in sorted({pod.exit_code for pod in ended if pod.exit_code}):
            nodes = format_nodes([pod.node for pod in ended if pod.exit_code == code])
            self._report(f"{self._name}: {nodes} ended with exit code {code}")

    def _follow_log(self, pods: Sequence[NodePod]) -> None:
        """Read the log of the first node's pod as soon as its container was started."""
        pod = next((pod for pod in pods if pod.node == 0 and pod.has_log), None)
        if pod is None:
            return
        if self._log is None or (self._log.pod, self._log.starts) != (pod.name, pod.starts):
            self._finish_log()
            self._log = PodLog(pod.name, self._kind.container, starts=pod.starts, report=self._report)
        self._log.open()
        if pod.exit_code is not None:
            self._log.finish()

    def _finish_log(self) -> None:
        if self._log is not None:
            self._log.finish()

    def _failures_of_jobs(self) -> list[str]:
        """Return what the jobs of a JobSet say about their failures, which names the rule and the exit code."""
        try:
            listing = _get(_JOBS, "--selector", f"jobset.sigs.k8s.io/jobset-name={self._name}") or {}
        except MachineError:
            return []
        ends = [job_end(job) for job in listing.get("items", [])]
        return [end.message for end in ends if end is not None and end.has_failed]


def _get(*words: str) -> dict[str, Any] | None:
    """Return what `kubectl get` says; None if it says nothing.

    Raises:
        MachineError: kubectl fails.
    """
    text = run_scheduler_command(["kubectl", "get", *words, "--output", "json"])
    try:
        content: dict[str, Any] | None = json.loads(text) if text.strip() else None
    except ValueError:
        raise MachineError(f"kubectl get {' '.join(words)} printed no JSON: {text[:200]}.") from None
    return content
