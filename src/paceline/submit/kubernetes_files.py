"""The files for Kubernetes: a JobSet, a TrainJob of Kubeflow, or an indexed Job where neither is installed."""

import json
import math
import shlex
from textwrap import indent

from paceline.submit.kubernetes_checks import count_amount
from paceline.submit.submission import MAX_RESTARTS, Submission, SubmissionFile, fill_template
from paceline.submit.target_options import KubernetesOptions

_POD_INDENTS = {"jobset": 14, "job": 6}
_JOB_RESTARTS = 20
_SHARED_GIBIBYTES, _MEBIBYTE = 16, 1 << 20


def kubernetes_file(submission: Submission, needs: KubernetesOptions) -> SubmissionFile:
    """Return the file of the kind that the options name."""
    kind = needs.kind
    path = submission.folder / f"{kind}.yaml"
    name = submission.name
    head = {"jobset": f"{name}-node-0-0.{name}", "job": f"{name}-0.{name}"}.get(kind)
    more = [] if head is None else ["--nodes", f"{submission.num_nodes}:{head}"]
    if kind == "job":
        more += submission.default_setting("nodes.restarts", MAX_RESTARTS)
    gpus = {"nvidia.com/gpu": str(submission.ranks_per_node)} if submission.uses_gpus else {}
    values = {
        **submission.values(),
        "path": shlex.quote(str(path)),
        "image": _as_yaml(submission.image),
        "command": _as_yaml(submission.train_command(*more)),
        "max_restarts": str(_JOB_RESTARTS if kind == "jobset" else _JOB_RESTARTS * submission.num_nodes),
        "limits": _amounts({**gpus, "memory": needs.memory}),
        "requests": _amounts({**gpus, "cpu": needs.cpus, "memory": needs.memory}),
        "seconds": str(math.ceil(submission.hours * 3600)),
        "claim": _as_yaml(needs.claim),
        "shared_memory": _as_yaml(needs.shared_memory or _default_shared_memory(needs.memory)),
        "runtime": _as_yaml(needs.runtime),
    }
    if kind in _POD_INDENTS:
        values["pod"] = indent(fill_template("pod.yaml", values).rstrip(), " " * _POD_INDENTS[kind])
    verb = "create" if kind == "trainjob" else "apply"
    return SubmissionFile(
        path=path, text=fill_template(f"{kind}.yaml", values), command=f"kubectl {verb} -f {values['path']}"
    )


def _default_shared_memory(memory: str) -> str:
    """Return the size of /dev/shm for an amount of memory, to which it counts."""
    half = (count_amount(memory) or 0.0) / 2 / _MEBIBYTE
    return f"{int(half)}Mi" if 1 <= half < _SHARED_GIBIBYTES * 1024 else f"{_SHARED_GIBIBYTES}Gi"


def _as_yaml(value: str | list[str]) -> str:
    """Return a text, or a list of texts, as YAML on one line."""
    return json.dumps(value, ensure_ascii=False)


def _amounts(amounts: dict[str, str]) -> str:
    return ", ".join(f"{name}: {_as_yaml(value)}" for name, value in amounts.items())
