"""The files for Kubernetes: what `submit` writes is accepted, and each planted mistake is found, with its field.

`jobset_crd.json` is the resource definition of JobSet (kubernetes-sigs/jobset, Apache License 2.0), without its
descriptions. An API server checks with it, too.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.errors import UsageError
from paceline.submit.crd_checks import check_against_schema, read_crd_schema
from paceline.submit.kubernetes_checks import check_kubernetes, count_amount
from paceline.submit.kubernetes_files import kubernetes_file
from paceline.submit.submission import Submission, is_image_reference
from paceline.submit.target_options import KUBERNETES_KINDS, KubernetesOptions

CRD = Path(__file__).parent / "jobset_crd.json"
SUBMISSION = Submission(
    job="digits_cnn.py", words=("--layout", "fsdp", "--train.steps", "10"), run="/runs/first", folder=Path("runs/first/submit"),
    num_nodes=2, ranks_per_node=8, hours=1.0, uses_gpus=True, image="registry.example/paceline:1",
)  # fmt: skip
Change = Callable[[dict[str, Any]], object]


def documents(kind: str, **changed: Any) -> list[dict[str, Any]]:
    submission = Submission(**{**{f: getattr(SUBMISSION, f) for f in SUBMISSION.__dataclass_fields__}, **changed})
    return list(yaml.safe_load_all(kubernetes_file(submission, KubernetesOptions(kind=kind)).text))


def problems_of(document: dict[str, Any]) -> list[str]:
    found = check_kubernetes(document)
    return (
        found
        if document["kind"] != "JobSet"
        else [*found, *check_against_schema(document, read_crd_schema(CRD, "JobSet", version="v1alpha2"))]
    )


@pytest.mark.parametrize("kind", KUBERNETES_KINDS)
@pytest.mark.parametrize("uses_gpus", [True, False])
def test_what_is_written_is_accepted(kind: str, uses_gpus: bool) -> None:
    run = "/runs/ a \"run\": 'x' \U0001f600"
    for document in documents(kind, uses_gpus=uses_gpus, image="host:5000/a_b/c-d:V1.2", run=run):
        assert problems_of(document) == []
        if document["kind"] == "JobSet":
            assert run in container(document)["command"]


def job(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["spec"]["replicatedJobs"][0]["template"]["spec"]
    return found


def pod(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job(value)["template"]["spec"]
    return found


def container(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = pod(value)["containers"][0]
    return found


def pod_of_job(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["spec"]["template"]["spec"]
    return found


def codes(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = job(value)["podFailurePolicy"]["rules"][2]["onExitCodes"]
    return found


def two_orders(value: dict[str, Any]) -> None:
    value["spec"]["startupPolicy"] = {"startupPolicyOrder": "InOrder"}
    other = {**copy.deepcopy(value["spec"]["replicatedJobs"][0]), "name": "b"}
    value["spec"]["replicatedJobs"].append({**other, "dependsOn": [{"name": "node", "status": "Ready"}]})


PLANTS: list[tuple[str, Change, str]] = [
    ("jobset", lambda v: container(v).update(commands=["x"]), "commands"),
    ("jobset", lambda v: job(v).update(parallelism="2"), "parallelism: '2' is not of type 'integer'"),
    ("jobset", lambda v: pod(v).update(restartPolicy="Sometimes"), "restartPolicy: 'Sometimes'"),
    ("jobset", lambda v: pod(v).update(restartPolicy="Always"), "restartPolicy: 'Always'"),
    ("jobset", lambda v: pod(v).update(restartPolicy="OnFailure"), "restartPolicy: must be Never"),
    ("jobset", lambda v: container(v).pop("name"), "containers[0].name: is missing"),
    ("jobset", lambda v: container(v)["resources"]["limits"].update(memory="lots"), "limits.memory: 'lots' is no amount"),
    ("jobset", lambda v: container(v)["resources"]["requests"].update({"nvidia.com/gpu": "4"}), "requests.nvidia.com/gpu: '4', and the limit is '8'"),
    ("jobset", lambda v: v["spec"]["failurePolicy"].update(restartStrategy="Soon"), "restartStrategy: 'Soon'"),
    ("jobset", lambda v: codes(v).update(values=[0]), "rules[2].onExitCodes.values: 0 is no failure"),
    ("jobset", lambda v: codes(v).update(values=[4, 2]), "[4, 2] must be in order"),
    ("jobset", lambda v: codes(v).update(containerName="main"), "containerName: 'main' is none of ['paceline']"),
    ("jobset", lambda v: pod(v).update(volumes=[]), "there is no volume 'runs'"),
    ("jobset", lambda v: container(v).update(image="https://a/b"), "containers[0].image: 'https://a/b' is no image"),
    ("jobset", lambda v: pod(v)["volumes"][1]["emptyDir"].update(sizeLimit="65536.5Mi"), "volumes[1].emptyDir.sizeLimit: '65536.5Mi' in memory is more"),
    ("job", lambda v: pod_of_job(v)["volumes"][1]["emptyDir"].update(sizeLimit="69G"), "volumes[1].emptyDir.sizeLimit: '69G' in memory is more"),
    ("trainjob", lambda v: v["spec"]["trainer"].update(image="a b"), "spec.trainer.image: 'a b' is no image"),
    ("jobset", lambda v: v["spec"]["replicatedJobs"][0].update(name="n" * 60), "the name of its last pod"),
    ("jobset", lambda v: v["spec"]["failurePolicy"]["rules"][0].update(name="is-stopped"), "rules[0].name: 'is-stopped'"),
    ("jobset", lambda v: v["spec"]["failurePolicy"]["rules"][1].update(onJobFailureReasons=["ExitCode2"]), "'ExitCode2' is none of"),
    ("jobset", lambda v: v["spec"]["failurePolicy"].pop("rules"), "a command that is refused starts again 20 times"),
    ("jobset", two_orders, "StartupPolicy and DependsOn APIs are mutually exclusive"),
    ("trainjob", lambda v: v["metadata"].update(name="Digits"), "metadata.name: 'Digits'"),
    ("trainjob", lambda v: v["spec"]["trainer"].update(numProcPerNode="auto"), "numProcPerNode: 'auto' must be a number"),
    ("trainjob", lambda v: v["spec"]["trainer"].update(numProcPerNode=0), "numProcPerNode: 0 must be a number"),
    ("trainjob", lambda v: v["spec"]["trainer"].update(env=[{"name": "PET_NNODES", "value": "2"}]), "PET_NNODES is for Kubeflow"),
    ("trainjob", lambda v: v["spec"]["trainer"].update(nodes=2), "a trainer has no such field"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "plant", "says"), PLANTS, ids=[says[:30] for _, _, says in PLANTS])
def test_a_planted_mistake_is_found_and_its_field_is_named(kind: str, plant: Change, says: str) -> None:
    document = copy.deepcopy(documents(kind)[-1])
    plant(document)
    assert any(says in problem for problem in problems_of(document)), problems_of(document)


@pytest.mark.parametrize(
    ("memory", "size"),
    [("64Gi", "16Gi"), ("1Ti", "16Gi"), ("32Gi", "16Gi"), ("8Gi", "4096Mi"), ("8G", "3814Mi"), ("1Mi", "16Gi")],
)
def test_the_default_of_dev_shm_leaves_half_of_the_memory(memory: str, size: str) -> None:
    [document] = yaml.safe_load_all(kubernetes_file(SUBMISSION, KubernetesOptions(memory=memory)).text)
    assert pod(document)["volumes"][1]["emptyDir"]["sizeLimit"] == size
    assert bool(problems_of(document)) is (memory == "1Mi")


@pytest.mark.parametrize(
    ("text", "amount"),
    [("1", 1.0), ("1Ki", 1024.0), ("2k", 2000.0), (".5Gi", 2.0**29), ("1E", 1e18), ("1e3", 1000.0), ("-1m", -1e-3),
     ("1K", None), ("lots", None), ("nan", None), (None, None)],
)  # fmt: skip
def test_amounts_are_read_as_kubernetes_reads_them(text: str | None, amount: float | None) -> None:
    assert count_amount(text) == amount


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("x", True),
        ("a/b__c:latest", True),
        ("123456789012.dkr.ecr.eu-west-1.amazonaws.com/train:1", True),
        ("localhost:5000/a@sha256:" + "0" * 64, True),
        ("my image", False),
        ("a:b:c", False),
        ("a/B", False),
        ("a//b", False),
        ("a:", False),
        ("a@sha256:12", False),
        ("docker://a/b", False),
        ("é", False),
    ],
)
def test_a_reference_of_an_image_is_told_from_other_texts(text: str, is_one: bool) -> None:
    assert is_image_reference(text) is is_one


def test_a_job_alone_is_checked_by_the_same_rules() -> None:
    document = documents("job")[1]
    document["spec"]["podFailurePolicy"]["rules"][2]["onExitCodes"]["values"] = [4, 2]
    assert any("[4, 2] must be in order" in problem for problem in problems_of(document))
    del document["spec"]["completions"]
    assert any("spec.completions" in problem for problem in problems_of(document))


def test_the_first_node_has_the_name_that_kubernetes_gives_it() -> None:
    name = SUBMISSION.name
    assert name == "digits-cnn-first"
    [jobset] = documents("jobset")
    assert f"2:{name}-node-0-0.{name}" in container(jobset)["command"]
    service, job_alone = documents("job")
    command = job_alone["spec"]["template"]["spec"]["containers"][0]["command"]
    assert f"2:{name}-0.{name}" in command and service["metadata"]["name"] == name


def test_a_version_that_is_not_defined_is_an_error() -> None:
    with pytest.raises(UsageError, match="no JobSet of version v1"):
        read_crd_schema(CRD, "JobSet", version="v1")


def test_a_file_without_a_definition_of_the_kind_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("kind: Pod\n")
    for path, says in ((tmp_path / "a.yaml", "defines no JobSet"), (tmp_path / "b.yaml", "can't be read")):
        with pytest.raises(UsageError, match=says):
            read_crd_schema(path, "JobSet", version="v1alpha2")
