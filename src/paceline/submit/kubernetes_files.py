"""The files for Kubernetes: a JobSet, a TrainJob of Kubeflow, or an indexed Job where neither is installed."""

import json
import shlex
from textwrap import indent

from paceline.submit.submission import MAX_RESTARTS, Submission, SubmissionFile, fill_template
from paceline.submit.target_options import KubernetesOptions

_POD_INDENTS = {"jobset": 14, "job": 6}
_MAX_RESTARTS = 20


def kubernetes_file(submission: Submission, needs: KubernetesOptions) -> SubmissionFile:
    """Return the file of the kind that the options name."""
    kind = needs.kind
    path = submission.folder / f"{kind}.yaml"
    name = submission.name
    head = {"jobset": f"{name}-node-0-0.{name}", "job": f"{name}-0.{name}"}.get(kind)
    more = [] if head is None else ["--nodes", f"{submission.num_nodes}:{head}"]
    if kind == "job":
        more += ["--nodes.restarts", str(MAX_RESTARTS)]
    gpus = {"nvidia.com/gpu": str(submission.ranks_per_node)} if submission.uses_gpus else {}
    values = {
        **submission.values(),
        "path": shlex.quote(str(path)),
        "image": json.dumps(submission.image),
        "command": json.dumps(submission.train_command(*more)),
        "max_restarts": str(_MAX_RESTARTS if kind == "jobset" else _MAX_RESTARTS * submission.num_nodes),
        "limits": _amounts({**gpus, "memory": needs.memory}),
        "requests": _amounts({**gpus, "cpu": needs.cpus, "memory": needs.memory}),
        "claim": json.dumps(needs.claim),
        "shared_memory": json.dumps(needs.shared_memory),
        "runtime": json.dumps(needs.runtime),
    }
    if kind in _POD_INDENTS:
        values["pod"] = indent(fill_template("pod.yaml", values).rstrip(), " " * _POD_INDENTS[kind])
    verb = "create" if kind == "trainjob" else "apply"
    return SubmissionFile(
        path=path, text=fill_template(f"{kind}.yaml", values), command=f"kubectl {verb} -f {values['path']}"
    )


def _amounts(amounts: dict[str, str]) -> str:
    return ", ".join(f"{name}: {json.dumps(value)}" for name, value in amounts.items())
