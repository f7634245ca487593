"""The request for a SageMaker training job, and what the service would refuse of it."""

import json
import math
import re
import secrets
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from paceline.errors import UsageError
from paceline.submit.submission import IMAGE_EXAMPLE, Submission, SubmissionFile, is_image_reference
from paceline.submit.target_options import SageMakerOptions

_CHECKPOINT_FOLDER = "/opt/ml/checkpoints"
_CHANNEL = "runs"
_MOUNT = f"/opt/ml/input/data/{_CHANNEL}"
_FILE_SYSTEM = re.compile(r"(?P<kind>efs|fsx)://(?P<id>fs-[0-9a-f]+)(?P<folder>/.*)?")
_MOUNT_NAME = re.compile(r"[A-Za-z0-9_-]{1,8}")
_NAME_BYTES = 2
_STORAGE_HINT = "--using storage=efs://fs-0123/runs or fsx://fs-0123/runs; for one machine also s3://bucket/runs"
_SECONDS_PER_HOUR = 3600
_MAX_RETRIES, _DISK_GB = 30, 200


def sagemaker_file(submission: Submission, needs: SageMakerOptions) -> SubmissionFile:
    """Return the request as a file.

    SageMaker starts the command on each machine, and describes the machines in a file that Paceline reads. A spot
    interruption starts the job again. Exit code 75 would be a failed job, so nodes wait for each other instead
    (`nodes.restarts`).

    Raises:
        UsageError: the storage does not fit the number of machines, or can't be read.
    """
    path, is_spot = submission.folder / "sagemaker.json", needs.spot == "true"
    seconds = math.ceil(submission.hours * _SECONDS_PER_HOUR)
    stop = {"MaxRuntimeInSeconds": seconds, **({"MaxWaitTimeInSeconds": 2 * seconds} if is_spot else {})}
    file_system = _FILE_SYSTEM.fullmatch(needs.storage)
    words = submission.default_setting("nodes.restarts", _MAX_RETRIES)
    if file_system is None:
        _refuse_storage(submission, needs.storage)
        remote = f"{needs.storage.rstrip('/')}/{submission.name}"
        own, storage = replace(submission, run=f"{_CHECKPOINT_FOLDER}/run"), f"{remote}/files/run"
        words += submission.default_setting("checkpoint.remote", remote)
        stores: dict[str, Any] = {
            "CheckpointConfig": {"S3Uri": f"{remote}/files", "LocalPath": _CHECKPOINT_FOLDER},
        }
    else:
        own = replace(submission, run=f"{_MOUNT}/{submission.name}")
        storage = f"{needs.storage.rstrip('/')}/{submission.name}"
        stores = _file_system_fields(file_system, needs)
    program, *arguments = own.train_command(*words)
    name = f"{submission.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(_NAME_BYTES)}"  # new in the account
    request = {
        "TrainingJobName": name,
        "AlgorithmSpecification": {
            "TrainingImage": submission.image,
            "TrainingInputMode": "File",
            "ContainerEntrypoint": [program],
            "ContainerArguments": arguments,
        },
        "RoleArn": needs.role,
        "OutputDataConfig": {"S3OutputPath": needs.output},
        **stores,
        "ResourceConfig": {
            "InstanceType": needs.instance, "InstanceCount": submission.num_nodes, "VolumeSizeInGB": _DISK_GB,
        },
        "StoppingCondition": stop,
        "EnableManagedSpotTraining": is_spot,
        "RetryStrategy": {"MaximumRetryAttempts": _MAX_RETRIES},
    }  # fmt: skip
    command = f"aws sagemaker create-training-job --cli-input-json {shlex.quote(f'file://{path}')}"
    text = json.dumps(request, indent=2) + "\n"
    return SubmissionFile(path=path, text=text, command=command, job_name=name, run=own.run, storage=storage)


def _refuse_storage(submission: Submission, storage: str) -> None:
    """Refuse a storage that is no S3 folder, or one for several machines, which would not see each other's files.

    Raises:
        UsageError
    """
    if not storage.startswith("s3://"):
        raise UsageError(f"storage={storage} is no S3 folder and no file system.", hint=_STORAGE_HINT)
    if submission.num_nodes > 1:
        cause = "each machine has its own /opt/ml/checkpoints, and the ranks read and write one run folder"
        raise UsageError(f"storage={storage} is not enough for several machines.", cause=cause, hint=_STORAGE_HINT)


def _file_system_fields(file_system: re.Match[str], needs: SageMakerOptions) -> dict[str, Any]:
    """Return the fields of a request whose machines mount a file system.

    Raises:
        UsageError: the network is missing, or the mount name of FSx.
    """
    subnet, comma, group = needs.network.partition(",")
    if not comma:
        hint = "--using network=SUBNET,SECURITY_GROUP"
        raise UsageError(f"{file_system[0]} is reached only from its network.", hint=hint)
    is_fsx, folder = file_system["kind"] == "fsx", file_system["folder"] or "/"
    if is_fsx and not _MOUNT_NAME.fullmatch(needs.mount):
        raise UsageError(
            f"{file_system[0]}: the mount name of the file system is missing."
            if not needs.mount
            else f"--using mount={needs.mount} is no mount name.",
            cause="on FSx for Lustre, every path begins with it; AWS chooses it",
            hint=f"--using mount=NAME, from: aws fsx describe-file-systems --file-system-ids {file_system['id']} "
            "--query 'FileSystems[0].LustreConfiguration.MountName'",
        )
    if is_fsx and not f"{folder}/".startswith(f"/{needs.mount}/"):
        folder = f"/{needs.mount}{folder}".rstrip("/")
    source = {
        "FileSystemId": file_system["id"],
        "FileSystemAccessMode": "rw",
        "FileSystemType": "FSxLustre" if is_fsx else "EFS",
        "DirectoryPath": folder,
    }
    channel = {"ChannelName": _CHANNEL, "DataSource": {"FileSystemDataSource": source}}
    return {
        "InputDataConfig": [channel],
        "VpcConfig": {"Subnets": [subnet], "SecurityGroupIds": [group]},
    }


def check_sagemaker(request: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a request, each with the path of the field.

    The types, lengths, patterns and known values are those of the service's own model, if botocore is installed (the
    extra `aws`).
    """
    return [*_check_together(request), *_check_by_model(request)]


def _check_together(request: Mapping[str, Any]) -> Iterator[str]:
    """Return what the service says about two fields together."""
    stop, resources = request.get("StoppingCondition", {}), request.get("ResourceConfig", {})
    wait, runtime = stop.get("MaxWaitTimeInSeconds"), stop.get("MaxRuntimeInSeconds")
    if request.get("EnableManagedSpotTraining"):
        if wait is None:
            yield "StoppingCondition.MaxWaitTimeInSeconds: spot training needs it"
        elif runtime is not None and wait < runtime:
            yield f"StoppingCondition.MaxWaitTimeInSeconds: {wait} is less than MaxRuntimeInSeconds, {runtime}"
        if "CheckpointConfig" not in request and "InputDataConfig" not in request:
            yield "CheckpointConfig: without it, spot training loses everything at the first interruption"
        if resources.get("KeepAlivePeriodInSeconds"):
            yield "ResourceConfig.KeepAlivePeriodInSeconds: spot training has no warm pool"
    elif wait is not None:
        yield "StoppingCondition.MaxWaitTimeInSeconds: is for spot training only"
    if not resources.get("InstanceCount") and not resources.get("InstanceGroups"):
        yield "ResourceConfig.InstanceCount: needs at least one machine"
    image = request.get("AlgorithmSpecification", {}).get("TrainingImage")
    if not image:
        yield "AlgorithmSpecification.TrainingImage: is missing; --image"
    elif not is_image_reference(image):
        yield f"AlgorithmSpecification.TrainingImage: {image!r} is no image, such as {IMAGE_EXAMPLE}; --image"


def _check_by_model(request: Mapping[str, Any]) -> list[str]:
    try:
        session, validate = import_module("botocore.session"), import_module("botocore.validate")
    except ImportError:
        return []
    model = session.Session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    report = validate.ParamValidator().validate(request, shape).generate_report()
    return [*filter(None, report.split("\n")), *_check_values(request, shape, at="")]


def _check_values(value: Any, shape: Any, *, at: str) -> Iterator[str]:
    """Return which values are outside the limits of the model, which botocore itself does not check."""
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, inner in value.items():
            if name in shape.members:
                yield from _check_values(inner, shape.members[name], at=f"{at}.{name}".lstrip("."))
    elif shape.type_name == "list" and isinstance(value, Sequence):
        yield from _check_size(len(value), shape, at=at, unit="entries")
        for number, inner in enumerate(value):
            yield from _check_values(inner, shape.member, at=f"{at}[{number}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        yield from _check_size(len(value), shape, at=at, unit="entries")
        for name, inner in value.items():
            yield from _check_values(name, shape.key, at=f"{at} (the name {name})")
            yield from _check_values(inner, shape.value, at=f"{at}.{name}")
    elif shape.type_name == "string" and isinstance(value, str):
        yield from _check_size(len(value), shape, at=at, unit="characters")
        known, pattern = getattr(shape, "enum", None), shape.metadata.get("pattern")
        if known and value not in known:
            yield f"{at}: {value!r} is none of the {len(known)} known values"
        if pattern and not re.fullmatch(pattern, value):
            yield f"{at}: {value!r} does not match {pattern}"
    elif shape.type_name in ("integer", "long") and isinstance(value, int):
        yield from _check_size(value, shape, at=at, unit="")


def _check_size(size: int, shape: Any, *, at: str, unit: str) -> Iterator[str]:
    least, most = shape.metadata.get("min"), shape.metadata.get("max")
    if (least is not None and size < least) or (most is not None and size > most):
        yield f"{at}: {size} {unit}".rstrip() + f"; allowed are {least} to {most}"
