"""Following a job of Kubernetes, with a `kubectl` that answers as an API server does."""

import os
import signal
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from paceline.submit import follow_kubernetes as module
from paceline.submit.crd_checks import read_crd_schema
from paceline.submit.follow_kubernetes import follow_kubernetes
from paceline.submit.submission import SubmissionFile
from tests.conftest import Shop
from tests.submit.kubernetes_cluster import (
    NO_IMAGE,
    RUNNING,
    WAITING,
    condition,
    ended,
    install_kubectl,
    job,
    pod,
)

Moment = dict[str, Any]
CRD = Path(__file__).parent / "jobset_crd.json"
COMPLETED = condition("Completed", "AllJobsCompleted", "jobset completed successfully")
REFUSED = condition(
    "Failed",
    "FailJobSetFailurePolicyAction",
    "applying FailJobSet failure policy action (first failed job: first-node-0)",
)
OUT_OF_RESTARTS = condition(
    "Failed",
    "ReachedMaxRestarts",
    "jobset failed due to reaching max number of restarts (first failed job: first-node-0)",
)


def line(second: float, text: str) -> str:
    return f"2026-11-30T10:00:{second:012.9f}Z {text}"


def moment(
    answer: dict[str, Any] | None, *pods: dict[str, Any], logs: dict[str, list[str]] | None = None, **more: Any
) -> Moment:
    return {"job": answer, "pods": list(pods), "logs": logs or {}, **more}


def rule(code: int, index: int) -> dict[str, Any]:
    message = f"Container paceline for pod default/first-node-0-1-a0 failed with exit code {code} matching FailJob rule at index {index}"
    return job("Job", condition("Failed", "PodFailurePolicy", message))


def follow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moments: list[Moment], *, kind: str = "jobset"
) -> tuple[int, list[str]]:
    """Return the exit code, and the lines on the screen."""
    install_kubectl(tmp_path / "bin", moments)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.3)
    file = SubmissionFile(path=tmp_path / "a.yaml", text="", command=f"kubectl apply -f '{tmp_path}/a b.yaml'")
    lines: list[str] = []
    code = follow_kubernetes(file, name="first", kind=kind, num_nodes=2, report=lines.append)
    return code, lines


def jobset_that_starts_again() -> list[Moment]:
    """Return a JobSet: no pods, no room, no image, running, a log that breaks, 75, a restart, and the end."""
    first, second = "first-node-0-0-a0", "first-node-0-0-a1"
    counts = {"name": "node", "ready": 0, "succeeded": 0, "failed": 0, "active": 1, "suspended": 0}
    answer = job("JobSet", restarts=0, restartsCountTowardsMax=0, replicatedJobsStatus=[counts])
    start = [line(1, "step 1"), line(2, "step 2"), line(2.5, "step 3 BREAKS"), line(2.5, "step 4")]
    both, again = {first: start}, job("JobSet", restarts=1, restartsCountTowardsMax=0, replicatedJobsStatus=[counts])
    saved = {first: [*start, line(3, "saved")]}
    end = {second: [line(20, "resumed"), line(21, "done")]}
    done = job(
        "JobSet",
        COMPLETED,
        restarts=1,
        restartsCountTowardsMax=0,
        replicatedJobsStatus=[counts],
        terminalState="Completed",
    )
    return [
        moment(answer),
        moment(answer, pod(0, None), pod(1, WAITING)),
        moment(None, is_away=True),
        moment(answer, pod(0, WAITING), pod(1, NO_IMAGE)),
        moment(answer, pod(0, RUNNING), pod(1, WAITING), logs=both),
        moment(answer, pod(0, RUNNING), pod(1, RUNNING), logs=both),
        moment(answer, pod(0, ended(75)), pod(1, ended(75)), logs=saved),
        moment(again, pod(0, ended(75)), pod(1, WAITING, attempt=1), logs=saved),
        moment(again, pod(0, RUNNING, attempt=1), pod(1, RUNNING, attempt=1), logs=end),
        moment(done, pod(0, ended(0), attempt=1), pod(1, ended(0), attempt=1), logs=end),
    ]


def test_a_jobset_is_followed_over_a_lost_connection_and_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = jobset_that_starts_again()
    schema = read_crd_schema(CRD, "JobSet", version="v1alpha2")["properties"]["status"]
    for each in moments:
        jsonschema.validate((each["job"] or {}).get("status", {}), schema)
    code, lines = follow(tmp_path, monkeypatch, moments)
    assert code == 0
    assert [each for each in lines if each.startswith("first")] == [
        "first created",
        "first: pending",
        "first: pending: node 0: Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        'first: pending: node 1: ImagePullBackOff: Back-off pulling image "registry.example/train:1"',
        "first: running, 1 of 2 nodes",
        "first: running, 2 of 2 nodes",
        "first: nodes 0, 1 ended with exit code 75",
        "first: started again (1 restart)",
        "first: pending",
        "first: running, 2 of 2 nodes",
        "first: completed: jobset completed successfully",
    ]
    broken = "no log of pod first-node-0-0-a0 at the moment: error: unexpected EOF"
    log = ["step 1", "step 2", "step 3 BREAKS", broken, "step 4", "saved", "resumed", "done"]
    assert [each for each in lines if not each.startswith("first")] == log
    called = (tmp_path / "bin" / "called").read_text()
    assert f"apply -f {tmp_path}/a b.yaml\n" in called
    assert "get jobsets.jobset.x-k8s.io first" in called and "--container paceline" in called


@pytest.mark.parametrize(
    ("kind", "end", "code", "says"),
    [
        # The pods are gone, but the job of the JobSet says which rule has ended it.
        ("jobset", moment(job("JobSet", REFUSED), jobs=[rule(2, 2)]), 2, "failed with exit code 2 matching FailJob rule"),
        # Node 1 has failed first; node 0 was then stopped.
        ("jobset", moment(job("JobSet", OUT_OF_RESTARTS, restarts=20), pod(0, ended(143, 12), attempt=20), pod(1, ended(3, 11), attempt=20)), 3, "max number of restarts"),
        ("jobset", moment(None), 1, "it was deleted"),
        ("trainjob", moment(job("TrainJob", OUT_OF_RESTARTS), pod(0, ended(75), container="node"), pod(1, ended(75, 11), container="node")), 75, "max number of restarts"),
        ("trainjob", moment(job("TrainJob", condition("Complete", "AllJobsCompleted", "jobset completed successfully"))), 0, "completed"),
        ("job", moment(rule(4, 2), pod(0, RUNNING)), 4, "rule at index 2"),
        ("job", moment(job("Job", condition("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")), pod(0, ended(1))), 1, "backoff limit"),
        ("job", moment(job("Job", condition("Failed", "DeadlineExceeded", "Job was active longer than specified deadline"))), 1, "specified deadline"),
        ("job", moment(job("Job", condition("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods"), condition("Complete", "CompletionsReached", "Reached expected number of succeeded pods"))), 0, "completed"),
    ],
)  # fmt: skip
def test_the_exit_code_is_that_of_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, end: Moment, code: int, says: str
) -> None:
    container = "node" if kind == "trainjob" else "paceline"
    names = {"jobset": "JobSet", "trainjob": "TrainJob", "job": "Job"}
    running = moment(job(names[kind]), pod(0, RUNNING, container=container), pod(1, RUNNING, container=container))
    suspended = moment(job(names[kind], condition("Suspended", "Suspended", "it is suspended")))
    got, lines = follow(tmp_path, monkeypatch, [suspended, running, end], kind=kind)
    assert got == code and says in lines[-1], lines
    assert "first: suspended" in lines and "first: running, 2 of 2 nodes" in lines
    assert f"--container {container}" in (tmp_path / "bin" / "called").read_text()


def test_a_pod_of_a_job_that_is_started_again_is_followed_like_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "first-0-x", "first-0-y"
    before = pod(0, ended(75), name=old)
    after = {
        **pod(0, RUNNING, name=new),
        "metadata": {**pod(0, RUNNING, name=new)["metadata"], "creationTimestamp": "2026-11-30T10:20:00Z"},
    }
    logs = {old: [line(1, "step 1")], new: [line(30, "step 2")]}
    done = condition("Complete", "CompletionsReached", "Reached expected number of succeeded pods")
    code, lines = follow(
        tmp_path, monkeypatch,
        [
            moment(job("Job", active=2), pod(0, RUNNING, name=old), pod(1, RUNNING), logs=logs),
            moment(job("Job", active=1), before, pod(1, RUNNING), logs=logs),
            moment(job("Job", active=2), before, after, pod(1, RUNNING), logs=logs),
            moment(job("Job", done), logs=logs),
        ],
        kind="job",
    )  # fmt: skip
    assert code == 0 and lines.count("step 1") == lines.count("step 2") == 1
    assert "first: node 0 ended with exit code 75" in lines


def test_ctrl_c_leaves_the_job_running_and_says_how_to_look_again(shop: Shop) -> None:
    """The whole command, which writes the file first."""
    running = moment(job("JobSet"), pod(0, RUNNING), pod(1, RUNNING), logs={"first-node-0-0-a0": [line(1, "step 1")]})
    install_kubectl(shop.path / "bin", [running])
    words = ("submit", "job.py", "--to", "k8s", "--image", "x", "--nodes", "2", "--run-dir", "runs/first", "--follow")
    command = shop.start(*words, environ={"PATH": f"{shop.path / 'bin'}:/usr/bin:/bin"})
    assert command.stdout is not None
    seen = ""
    while "step 1" not in seen:
        seen += (got := command.stdout.readline())
        assert got, (seen, command.communicate())
    os.killpg(command.pid, signal.SIGINT)  # as a terminal does
    rest, errors = command.communicate(timeout=120)
    assert command.returncode == 130, errors
    assert "job-first goes on in the cluster." in rest
    assert (
        "to look again: kubectl logs --follow --container paceline --selector jobset.sigs.k8s.io/jobset-name=job-first,"
        in rest
    )
    assert "to end it: kubectl delete jobsets.jobset.x-k8s.io job-first" in rest
    called = (shop.path / "bin" / "called").read_text()
    assert "apply -f runs/first/submit/jobset.yaml" in called and "delete" not in called


def test_a_cluster_that_stays_away_ends_it_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shop: Shop
) -> None:
    monkeypatch.setattr(module, "_MAX_FAILURES", 2)
    with pytest.raises(module.MachineError, match="Unable to connect to the server"):
        follow(tmp_path, monkeypatch, [moment(None, is_away=True)])
    done = shop.call(
        shop.command("submit", "job.py", "--to", "k8s", "--image", "x", "--run-dir", "runs/a", "--follow"),
        environ={"PATH": "/nowhere"},
    )
    assert done.code == 3 and "kubectl is not installed here" in done.err
