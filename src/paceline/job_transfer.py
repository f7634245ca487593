"""Transfer of a `Job` that was made in Python to the processes that run it.

A job from a file is imported by every rank. A job that exists only as an object, in a script or a notebook, is written
to an anonymous file in memory, whose descriptor the ranks inherit. Nothing is read from a path, so another user can't
replace the file. cloudpickle sends lambdas, local functions and classes of `__main__` by value, and the rest by name.
"""

import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import cloudpickle
import torch

from paceline.errors import JobError
from paceline.job import Job, refuse_job

_CHUNK_BYTES = 1 << 26
_END_OF_PATH = b"\n"  # ends the module path (`sys.path`), which comes before the job


@contextmanager
def open_job_file(job: Job) -> Iterator[int]:
    """Write the job to an anonymous file, and yield the file descriptor from which `receive_job` reads it.

    The file is closed at the end of the context.

    Raises:
        JobError: a field of the job can't be sent to another process; the message names the field.
    """
    refuse_job(job, where=job.name or "the Job")
    content = _dumps(job)
    with os.fdopen(os.memfd_create("paceline-job"), "wb") if _has_memfd() else tempfile.TemporaryFile() as file:
        file.write(json.dumps([os.path.abspath(folder) for folder in sys.path]).encode() + _END_OF_PATH)  # noqa: PTH100
        file.write(content)
        file.flush()
        yield file.fileno()


def receive_job(handle: int) -> Job:
    """Return the job that `open_job_file` wrote, in a process that inherited its file descriptor."""
    module_path, _, content = _read(handle).partition(_END_OF_PATH)
    sys.path += [folder for folder in json.loads(module_path) if folder not in sys.path]
    job = torch.load(io.BytesIO(content), weights_only=False)  # safe: no other user can have written these bytes
    assert isinstance(job, Job)
    return job


def _has_memfd() -> bool:
    return hasattr(os, "memfd_create")


def _dumps(value: object) -> bytes:
    """Return the value's bytes; tensors that share memory share it again after loading."""
    try:
        buffer = io.BytesIO()
        torch.save(value, buffer, pickle_module=cloudpickle)
        return buffer.getvalue()
    except Exception as error:  # each type may raise anything when it refuses to be pickled
        if not isinstance(value, Job):
            raise
        raise _transfer_error(value, error) from error


def _transfer_error(job: Job, error: Exception) -> JobError:
    """Return the error for a job that can't be pickled, with the name of the first field that can't."""
    culprit = "the job"
    for job_field in fields(job):
        try:
            _dumps(getattr(job, job_field.name))
        except Exception as field_error:  # as above
            culprit, error = f"{job_field.name}=", field_error
            break
    return JobError(
        f"this Job can't be sent to the processes that run it: {culprit} can't be pickled.",
        cause=f"{type(error).__name__}: {error}".splitlines()[0],
        hint="open files, locks and connections inside a function:  train_data=lambda: MyData(path); "
        'or give the file: pl.verify("job.py")',
    )


def _read(handle: int) -> bytes:
    """Read without moving the file offset, which all ranks share."""
    chunks, offset = list[bytes](), 0
    while chunk := os.pread(handle, _CHUNK_BYTES, offset):
        chunks.append(chunk)
        offset += len(chunk)
    return b"".join(chunks)
