"""Checks of Kubernetes files without a cluster: what the API server, its webhooks and Kubeflow would refuse.

The rules here need nothing installed. `crd_checks` adds the schema of the cluster's own resource definition.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline.submit.submission import IMAGE_EXAMPLE, is_image_reference

_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_LABEL = 63
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(\d+\.?\d*|\.\d+))(?P<unit>Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?\d+)?", re.ASCII
)
_UNITS = {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3} | {
    letter + binary: float((1024 if binary else 1000) ** power)
    for power, letter in enumerate("KMGTPE", start=1)
    for binary in ("", "i")
}
_RULE_NAME = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_FAILURE_REASONS = (
    "BackoffLimitExceeded", "DeadlineExceeded", "FailedIndexes", "MaxFailedIndexesExceeded", "PodFailurePolicy",
)  # fmt: skip
_TRAINER_VARIABLES = ("PET_NNODES", "PET_NPROC_PER_NODE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")

Fields = Mapping[str, Any]


def check_kubernetes(document: Fields) -> list[str]:
    """Return what is wrong with a document, each with the path of the field; an empty list if nothing is."""
    kind, spec = document.get("kind"), document.get("spec", {})
    if kind == "Job":
        return [*_check_name(document), *check_kubernetes_job(spec, at="spec")]
    if kind == "JobSet":
        return list(_check_jobset(document))
    if kind == "TrainJob":
        return [*_check_name(document), *_check_trainjob(spec)]
    return _check_name(document)


def _check_name(document: Fields) -> list[str]:
    name = document.get("metadata", {}).get("name", "")
    return [] if _is_label(name) else [f"metadata.name: {name!r} must be {_LABEL_TEXT}"]


_LABEL_TEXT = f"at most {_MAX_LABEL} small letters, digits and dashes, a letter first"


def _is_label(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= _MAX_LABEL and _LABEL.fullmatch(text) is not None


def check_kubernetes_job(spec: Fields, *, at: str) -> list[str]:
    """Return what is wrong with the specification of a Job."""
    pod = spec.get("template", {}).get("spec", {})
    found = []
    restart = pod.get("restartPolicy")
    if restart not in ("Never", "OnFailure"):
        found.append(f"{at}.template.spec.restartPolicy: {restart!r}; a Job takes Never or OnFailure")
    elif "podFailurePolicy" in spec and restart != "Never":
        found.append(f"{at}.template.spec.restartPolicy: must be Never, because there is a podFailurePolicy")
    if spec.get("completionMode") == "Indexed" and not isinstance(spec.get("completions"), int):
        found.append(f"{at}.completions: an indexed Job needs a number")
    containers = pod.get("containers", [])
    names = [container.get("name") for container in containers]
    rules = spec.get("podFailurePolicy", {}).get("rules", [])
    for number, rule in enumerate(rules):
        found += _check_exit_rule(rule, names, at=f"{at}.podFailurePolicy.rules[{number}]")
    volumes = {volume.get("name") for volume in pod.get("volumes", [])}
    for number, volume in enumerate(pod.get("volumes", [])):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and not _is_label(claim):
            found.append(f"{at}.template.spec.volumes[{number}]: the claim {claim!r} must be {_LABEL_TEXT}")
    for number, container in enumerate(containers):
        found += _check_container(container, volumes, at=f"{at}.template.spec.containers[{number}]")
    for number, volume in enumerate(pod.get("volumes", [])):
        found += _check_memory_volume(volume, containers, at=f"{at}.template.spec.volumes[{number}]")
    return found


def _check_exit_rule(rule: Fields, containers: Sequence[Any], *, at: str) -> Iterator[str]:
    exits = rule.get("onExitCodes")
    if (exits is None) == ("onPodConditions" not in rule):
        yield f"{at}: needs either onExitCodes or onPodConditions"
    if exits is None:
        return
    codes = exits.get("values", [])
    if exits.get("operator") == "In" and 0 in codes:
        yield f"{at}.onExitCodes.values: 0 is no failure"
    if codes != sorted(set(codes)):
        yield f"{at}.onExitCodes.values: {codes} must be in order, each once"
    if exits.get("containerName") not in (None, *containers):
        yield f"{at}.onExitCodes.containerName: {exits['containerName']!r} is none of {containers}"


def _check_container(container: Fields, volumes: set[Any], *, at: str) -> Iterator[str]:
    for field in ("name", "image"):
        if not container.get(field):
            yield f"{at}.{field}: is missing"
    yield from _check_image(container, at=at)
    for number, mount in enumerate(container.get("volumeMounts", [])):
        if mount.get("name") not in volumes:
            yield f"{at}.volumeMounts[{number}].name: there is no volume {mount.get('name')!r}"
    yield from _check_amounts(container.get("resources", {}), at=f"{at}.resources")


def _check_image(container: Fields, *, at: str) -> Iterator[str]:
    image = container.get("image")
    if image and not (isinstance(image, str) and is_image_reference(image)):
        yield f"{at}.image: {image!r} is no image, such as {IMAGE_EXAMPLE}"


def _check_memory_volume(volume: Fields, containers: Sequence[Fields], *, at: str) -> Iterator[str]:
    """Return whether a volume in memory, which counts to the memory of its container, has room there."""
    size = volume.get("emptyDir", {}).get("sizeLimit")
    if size is None:
        return
    num_bytes = count_amount(size) or 0.0
    if num_bytes <= 0:
        yield f"{at}.emptyDir.sizeLimit: {size!r} is no amount above 0, such as 16Gi"
    for container in containers if volume["emptyDir"].get("medium") == "Memory" else ():
        limit = container.get("resources", {}).get("limits", {}).get("memory")
        limit_bytes = (
            None if str(limit).isdecimal() else count_amount(limit)
        )  # without a unit, the limit itself is wrong
        if limit_bytes is not None and num_bytes > limit_bytes:
            yield (
                f"{at}.emptyDir.sizeLimit: {size!r} in memory is more than the memory of the container, {limit!r}, to "
                "which it counts"
            )


def count_amount(text: object) -> float | None:
    """Return an amount in Kubernetes' spelling, such as 1024.0 for "1Ki"; None if it can't be read."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, unit = match["number"], match["unit"] or ""
    return float(f"{number}{unit}") if unit[:1] in ("e", "E") and unit[1:] else float(number) * _UNITS[unit]


def _check_amounts(resources: Fields, *, at: str) -> Iterator[str]:
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    for field, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            size = count_amount(amount)
            if size is None:
                yield f"{at}.{field}.{name}: {amount!r} is no amount, such as 200Gi"
            elif size <= 0:
                yield f"{at}.{field}.{name}: {amount!r} must be above 0"
            elif name == "memory" and str(amount).isdecimal():
                yield f"{at}.{field}.{name}: {amount!r} is in bytes; with a unit: {amount}Gi"
    for name, amount in requests.items():
        if name.endswith("/gpu") and str(limits.get(name)) != str(amount):
            limit = limits.get(name)
            yield f"{at}.requests.{name}: {amount!r}, and the limit is {limit!r}; for GPUs, they must be equal"


def _check_jobset(document: Fields) -> Iterator[str]:
    spec, name = document.get("spec", {}), document.get("metadata", {}).get("name", "")
    jobs = spec.get("replicatedJobs", [])
    for number, job in enumerate(jobs):
        at = f"spec.replicatedJobs[{number}]"
        inner = job.get("template", {}).get("spec", {})
        last_pod = inner.get("completions", 1)
        last_pod = last_pod - 1 if isinstance(last_pod, int) else 0
        pod = f"{name}-{job.get('name')}-{job.get('replicas', 1) - 1}-{last_pod}-abcde"
        if not _is_label(pod):
            yield f"{at}.name: the name of its last pod, {pod}, must be {_LABEL_TEXT}"
        yield from check_kubernetes_job(inner, at=f"{at}.template.spec")
    subdomain = spec.get("network", {}).get("subdomain", name)
    if not _is_label(subdomain):
        yield f"spec.network.subdomain: {subdomain!r} must be {_LABEL_TEXT}"
    policy = spec.get("failurePolicy", {})
    yield from _check_failure_policy(policy, [job.get("name") for job in jobs])
    may_fail_job = any(
        rule.get("action") == "FailJob"
        for job in jobs
        for rule in job.get("template", {}).get("spec", {}).get("podFailurePolicy", {}).get("rules", [])
    )
    if may_fail_job and not any(rule.get("action") == "FailJobSet" for rule in policy.get("rules", [])):
        times = policy.get("maxRestarts", 0)
        yield f"spec.failurePolicy.rules: without a FailJobSet, a command that is refused starts again {times} times"


def _check_failure_policy(policy: Fields, jobs: Sequence[Any]) -> Iterator[str]:
    rules = policy.get("rules", [])
    for number, rule in enumerate(rules):
        at = f"spec.failurePolicy.rules[{number}]"
        if not _RULE_NAME.fullmatch(str(rule.get("name"))):
            yield f"{at}.name: {rule.get('name')!r} may have letters, digits, and _ , :"
        for job in rule.get("targetReplicatedJobs", []):
            if job not in jobs:
                yield f"{at}.targetReplicatedJobs: there is no job {job!r}"
        for reason in rule.get("onJobFailureReasons", []):
            if reason not in _FAILURE_REASONS:
                yield f"{at}.onJobFailureReasons: {reason!r} is none of {', '.join(_FAILURE_REASONS)}"
    names = [rule.get("name") for rule in rules]
    if len(set(names)) < len(names):
        yield "spec.failurePolicy.rules: two of them have the same name"


def _check_trainjob(spec: Fields) -> Iterator[str]:
    trainer = spec.get("trainer", {})
    known = ("image", "command", "args", "env", "numNodes", "numProcPerNode", "resourcesPerNode")
    for field in trainer:
        if field not in known:
            yield f"spec.trainer.{field}: a trainer has no such field"
    yield from _check_image(trainer, at="spec.trainer")
    for field in ("numNodes", "numProcPerNode"):
        value = trainer.get(field)
        if not isinstance(value, int) or value < 1:
            yield f"spec.trainer.{field}: {value!r} must be a number, at least 1"
    for variable in trainer.get("env", []):
        if variable.get("name") in _TRAINER_VARIABLES:
            yield f"spec.trainer.env: {variable['name']} is for Kubeflow to set"
    if not spec.get("runtimeRef", {}).get("name"):
        yield "spec.runtimeRef.name: is missing"
    yield from _check_amounts(trainer.get("resourcesPerNode", {}), at="spec.trainer.resourcesPerNode")
