"""The request for SageMaker: what `submit` writes is accepted by the service's own model, and mistakes are found."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.submit.sagemaker_request import check_sagemaker, sagemaker_file
from paceline.submit.submission import Submission
from paceline.submit.target_options import SageMakerOptions

IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/paceline:1"
FILE_SYSTEM = {"storage": "fsx://fs-0123456789abcdef0/runs", "network": "subnet-0123,sg-0123", "mount": "abcdefgh"}


def request(num_nodes: int = 1, **changed: str) -> dict[str, Any]:
    submission = Submission(
        job="digits_cnn.py", words=("--layout", "fsdp"), run="runs/first", folder=Path("runs/first/submit"),
        num_nodes=num_nodes, ranks_per_node=8, hours=1.5, uses_gpus=True, image=IMAGE,
    )  # fmt: skip
    options = {
        "role": "arn:aws:iam::123456789012:role/Train", "instance": "ml.p4d.24xlarge", "storage": "s3://bucket/runs",
        "output": "s3://bucket/output",
    }  # fmt: skip
    text = sagemaker_file(submission, SageMakerOptions(**{**options, **changed})).text
    content: dict[str, Any] = json.loads(text)
    return content


@pytest.mark.parametrize("spot", ["true", "false"])
@pytest.mark.parametrize(("num_nodes", "options"), [(1, {}), (4, FILE_SYSTEM), (1, FILE_SYSTEM)])
def test_what_is_written_is_accepted(num_nodes: int, options: dict[str, str], spot: str) -> None:
    assert check_sagemaker(request(num_nodes, **options, spot=spot)) == []


def test_several_machines_need_a_file_system_and_its_network() -> None:
    with pytest.raises(UsageError, match="not enough for several machines"):
        request(2)
    with pytest.raises(UsageError, match="reached only from its network"):
        request(2, storage=FILE_SYSTEM["storage"])
    with pytest.raises(UsageError, match="mount name of the file system is missing") as caught:
        request(2, **{**FILE_SYSTEM, "mount": ""})
    assert "aws fsx describe-file-systems --file-system-ids fs-0123456789abcdef0 --query" in caught.value.hint
    with pytest.raises(UsageError, match="mount=/abcdefgh is no mount name"):
        request(2, **{**FILE_SYSTEM, "mount": "/abcdefgh"})
    with pytest.raises(UsageError, match="no S3 folder and no file system"):
        request(storage="/data")


@pytest.mark.parametrize(
    ("storage", "mount", "path"),
    [
        ("fsx://fs-0123456789abcdef0/runs", "abcdefgh", "/abcdefgh/runs"),
        ("fsx://fs-0123456789abcdef0/abcdefgh/runs", "abcdefgh", "/abcdefgh/runs"),
        ("fsx://fs-0123456789abcdef0/abcdefghi", "abcdefgh", "/abcdefgh/abcdefghi"),
        ("fsx://fs-0123456789abcdef0", "fsx", "/fsx"),
        ("efs://fs-0123456789abcdef0/runs", "", "/runs"),
        ("efs://fs-0123456789abcdef0", "", "/"),
    ],
)
def test_a_path_on_fsx_begins_with_its_mount_name(storage: str, mount: str, path: str) -> None:
    made = request(2, storage=storage, mount=mount, network=FILE_SYSTEM["network"])
    assert made["InputDataConfig"][0]["DataSource"]["FileSystemDataSource"]["DirectoryPath"] == path


def test_the_same_job_gets_another_name_each_time_and_the_same_run_folder() -> None:
    """The names of an account's jobs are never free again; a job that is handed in again resumes its run."""
    first, second = (request(2, **FILE_SYSTEM) for _ in range(2))
    assert first["TrainingJobName"] != second["TrainingJobName"]
    assert first["TrainingJobName"].startswith("digits-cnn-first-") and check_sagemaker(first) == []
    assert first["AlgorithmSpecification"] == second["AlgorithmSpecification"]
    assert check_sagemaker({**first, "TrainingJobName": "n" * 40 + first["TrainingJobName"][16:]}) == []


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("ResourceConfig", {"InstanceType": "ml.p99.24xlarge", "InstanceCount": 1, "VolumeSizeInGB": 1}, "ResourceConfig.InstanceType: 'ml.p99"),
        ("TrainingJobName", "digits_cnn.py", "TrainingJobName: 'digits_cnn.py' does not match"),
        ("TrainingJobName", "a" * 80, "TrainingJobName: 80 characters"),
        ("ResourceConfig", {"InstanceType": "ml.p4d.24xlarge", "InstanceCount": 0, "VolumeSizeInGB": 1}, "at least one machine"),
        ("RetryStrategy", {"MaximumRetryAttempts": 31}, "RetryStrategy.MaximumRetryAttempts: 31; allowed are 1 to 30"),
        ("StoppingCondition", {"MaxRuntimeInSeconds": 86400, "MaxWaitTimeInSeconds": 100}, "100 is less than MaxRuntimeInSeconds"),
        ("StoppingCondition", {"MaxRuntimeInSeconds": 86400}, "spot training needs it"),
        ("AlgorithmSpecification", {"TrainingInputMode": "FastFile"}, "TrainingImage: is missing"),
        ("AlgorithmSpecification", {"TrainingInputMode": "File", "TrainingImage": "my image"}, "TrainingImage: 'my image' is no image"),
        ("AlgorithmSpecification", {"TrainingInputMode": "File", "TrainingImage": IMAGE, "ContainerArguments": ["x" * 300]}, "ContainerArguments[0]: 300 characters"),
        ("ResourceConfigs", {}, "ResourceConfigs"),
        ("Environment", {"a-b": "1"}, "a-b"),
    ],
)  # fmt: skip
def test_a_planted_mistake_is_found_and_its_field_is_named(field: str, value: object, says: str) -> None:
    found = check_sagemaker({**request(spot="true"), field: value})
    assert any(says in problem for problem in found), found
