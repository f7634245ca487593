"""What each process of the pool does with a case."""

import gc
import os
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.console import output as talk
from paceline.data.order.cursor import Cursor
from paceline.errors import ExitCode, PacelineError, Problems
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import PreparedJob, prepare
from paceline.verification.compare_in_lockstep import LockstepComparison, build_layout_loader
from paceline.verification.precision import build_in_precision
from paceline.verification.reference.float64_mode import keep_float64
from paceline.verification.reference.reference import RunPosition
from paceline.verification.rung_result import BITWISE, VERDICTS
from paceline.verification.verify_worker import build_reference, select_steps
from tests.matrix.matrix_cases import Case
from tests.zoo import JOBS, Rows

SAMPLES = 17  # two batches of eight, and a last one of one sample
_DTYPES = {"float64": torch.float64, "fp32": None}
_CAN: dict[str, bool] = {}


def join(rank: int, *, ranks: int, port: int, timeout_seconds: float) -> World:
    """The pool's own world: cases share it."""
    torch.set_num_threads(1)
    talk.print_line = _nothing  # type: ignore[assignment]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    place = LaunchInfo(rank=rank, world_size=ranks, local_rank=rank, port=port)
    return World.join(launch_info=place, device_type="cpu", backend="gloo", timeout_seconds=timeout_seconds)


def work(case: Case, world: World) -> dict[str, Any]:
    """The case's answer as this rank has it."""
    try:
        if len({str(told) for told in world.gather_json(case.as_json())}) > 1:
            raise RuntimeError("the ranks of the pool are at different cases")
        found = {"state": "done", **_run(case, world)}
    except PacelineError as error:
        refused = error.exit_code == ExitCode.REFUSED
        found = {"state": "refused" if refused else "failed", "why": _words(error), "text": traceback.format_exc()}
    except BaseException as error:
        found = {"state": "failed", "why": _line(error), "text": traceback.format_exc()}
    return {**found, "at": time.monotonic(), "rank": world.rank}


def ready_of(case: Case) -> PreparedJob:
    """The case as a user would ask for it."""
    job = JOBS[case.model](**case.params)
    data = job.train_data
    assert isinstance(data, Rows)
    job = replace(job, train_data=Rows(data.make, SAMPLES))
    settings = {"train.micro_batch_size": case.micro} if case.micro else {}
    task = Task(
        verb="verify",
        job=f"tests/zoo.py:{case.model}",
        layout=case.layout,
        ranks=case.ranks,
        settings={**settings, **case.settings},
    )
    return prepare(task, job=job)


def _run(case: Case, world: World) -> dict[str, Any]:
    ready = ready_of(case)
    found: dict[str, Any] = {"verdict": BITWISE, "layout": ready.plan.layout, "parts": {}}
    if "start" in case.checks or "final" in case.checks:
        built = build_in_precision(ready, world, None)
        found["start"] = weights_digest(sorted(wholes(built).items()))
        if "final" in case.checks:
            for given in islice(_feed(built), case.steps):
                built.step.run(given)
            found["final"] = weights_digest(sorted(wholes(built).items()))
        _leave(built)
    for name in _precisions(case, ready, world):
        with keep_float64(active=name == "float64"):
            _merge(found, name, _lockstep(case, ready, world, _DTYPES[name]))
    gc.collect()
    return found


def _precisions(case: Case, ready: PreparedJob, world: World) -> list[str]:
    """Those that were asked for; fp32 in place of a float64 that the model can't do in one process either."""
    asked = [name for name in case.checks if name in _DTYPES]
    if "float64" in asked and world.is_main and case.model not in _CAN:
        try:
            with keep_float64():
                build_reference(ready, torch.float64).compute_gradient(
                    RunPosition(steps_done=0, epoch=0, batch_start=0)
                )
            _CAN[case.model] = True
        except RuntimeError:
            _CAN[case.model] = False
    can = "float64" not in asked or world.share_json(_CAN.get(case.model))
    return asked if can else sorted({*asked, "fp32"} - {"float64"})


def _lockstep(case: Case, ready: PreparedJob, world: World, dtype: torch.dtype | None) -> dict[str, Any]:
    built = build_in_precision(ready, world, dtype)
    alone = build_reference(ready, dtype) if world.is_main else None
    rung_result = LockstepComparison(setup=built, reference=alone, report_progress=_nothing).run(
        select_steps(ready, case.steps)
    )
    _leave(built)
    return vars(rung_result)


def _merge(found: dict[str, Any], name: str, rung_result: dict[str, Any]) -> None:
    found["parts"][name] = {key: rung_result[key] for key in ("verdict", "max_difference", "noise_floor", "compared")}
    found["verdict"] = max(found["verdict"], rung_result["verdict"], key=VERDICTS.index)
    if rung_result["first_difference"] is not None:
        found.setdefault("first_difference", {"precision": name, **rung_result["first_difference"]})


def wholes(built: TrainingSetup) -> dict[str, torch.Tensor]:
    """Parameters and buffers, whole, on every rank."""
    holding = built.weights
    return dict(holding.gather_full_tensors({name: held.tensor for name, held in holding.local_tensors.items()}))


def _feed(built: TrainingSetup) -> Iterator[Any]:
    feed = build_layout_loader(built, Cursor())
    try:
        yield from feed
    finally:
        feed.close()


def _leave(built: TrainingSetup) -> None:
    built.close()


def _words(error: PacelineError) -> str:
    return " · ".join(p.what for p in error.problems) if isinstance(error, Problems) else error.what


def _line(error: BaseException) -> str:
    here = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(here[-1].filename).name}:{here[-1].lineno})" if here else ""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}{where}"


def _nothing(*_: Any, **__: Any) -> None:
    return None
