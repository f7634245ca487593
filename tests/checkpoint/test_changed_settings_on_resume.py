"""Each setting is in one of three tables that state what a resume does when it changes."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import open_checkpoint
from paceline.checkpoint.resume_checks import describe_changes, record_settings
from paceline.config.merge_settings import JOB, known_settings
from paceline.config.resume_allowances import ALLOWED_DIFFERENCES, COMPARED_SETTINGS, FREE_SETTINGS, REPORTED_SETTINGS
from paceline.config.settings import Settings, Train
from paceline.errors import PacelineError, ResumeError
from tests.checkpoint.test_untrusted_files import rewrite
from tests.trainer.test_edge_cases_of_a_run import job, trained

pytestmark = pytest.mark.one_worker

BEFORE = {"train_global_batch_size": 4}
OTHER: dict[str, Any] = {
    "seed": 5, "train_global_batch_size": 8, "train_micro_batch_size": 2, "train_gradient_accumulation_steps": 2,
    "train_max_grad_norm": 0.5, "train_precision": "bf16", "train_lr_scaling": "linear",
    "train_buffers": "mean", "data_drop_last": True, "data_sample_seeds": "always",
}  # fmt: skip


def test_every_setting_says_what_a_resume_does_with_another_value() -> None:
    """A new setting is red here until it stands in a table of `config/resume_allowances.py`."""
    tables = (COMPARED_SETTINGS, REPORTED_SETTINGS, FREE_SETTINGS)
    assert sorted(name for table in tables for name in table) == sorted(known_settings())
    assert {name for name in COMPARED_SETTINGS.values() if name} <= set(ALLOWED_DIFFERENCES)
    assert {name.replace(".", "_", 1) for name, difference in COMPARED_SETTINGS.items() if difference} == {
        *OTHER,
        "train_exact",  # which starts processes of its own
        "train_sequence_shards",  # only in exact mode
        "train_tensor_shards",  # only in exact mode
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("begun")
    trained(job(), folder, train_steps=2, **BEFORE)
    return folder


@pytest.mark.parametrize("name", OTHER)
def test_a_setting_that_is_compared_is_refused_by_its_name(begun: Path, name: str) -> None:
    difference = COMPARED_SETTINGS[name.replace("_", ".", 1)]
    with pytest.raises(
        PacelineError, match=rf"this run differs from the one that was saved: .*\b{difference}: "
    ) as refused:
        trained(job(), begun, train_steps=4, **{**BEFORE, name: OTHER[name]})
    assert f"--allow {difference}" in refused.value.hint or f",{difference}" in refused.value.hint


def forget(body: dict[str, Any]) -> None:
    del body["state"]["settings"]
    for name in ("buffers", "drop_last", "sample_seeds"):
        del body["state"]["identity"][name]


def test_a_checkpoint_of_before_they_were_recorded_goes_on(tmp_path: Path) -> None:
    trained(job(), tmp_path, train_steps=2)
    for path in (tmp_path / "checkpoints").glob("step-*"):
        rewrite(path, forget)
    run = trained(job(), tmp_path, train_steps=4, train_buffers="mean", data_sample_seeds="always")
    assert run.exit_code == 0
    with pytest.raises(ResumeError, match="buffers: was mean, is fold"):
        trained(job(), tmp_path, train_steps=6, data_sample_seeds="always")


def test_a_setting_that_is_told_stands_in_the_events_and_a_free_one_does_not(tmp_path: Path) -> None:
    trained(job(), tmp_path, train_steps=2)
    more = {"log_every": 1, "eval_every": 1, "checkpoint_keep": 1, "data_workers": 0, "train_check_every": 1}
    run = trained(job(), tmp_path, train_steps=4, train_on_nonfinite="skip", train_on_empty="zero", **more)
    assert run.exit_code == 0
    notes = [
        event["text"]
        for event in map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        if event.get("level") == "warning"
    ]
    assert [note.partition(":")[0] for note in notes] == [
        "train.on_nonfinite was stop in the checkpoint and is skip now",
        "train.on_empty was stop in the checkpoint and is zero now",
    ]
    assert open_checkpoint(tmp_path / "checkpoints" / "step-00000004").state["settings"]["train.on_nonfinite"] == "skip"


def test_parameters_of_a_job_are_told_and_secrets_are_not_recorded() -> None:
    before = Settings(job={"smoothing": 0.0, "api_key": "one", "gone": 1})
    now = Settings(job={"smoothing": 0.1, "api_key": "two", "new": 2}, train=Train(compile=True))
    saved = json.loads(json.dumps(record_settings(before)))
    assert "one" not in saved.values()
    assert [line.partition(":")[0] for line in describe_changes(saved, now)] == [
        "train.compile was False in the checkpoint and is True now",
        f"{JOB}.smoothing was 0.0 in the checkpoint and is 0.1 now",
        f"{JOB}.gone was 1 in the checkpoint and is the job's own now",
        f"{JOB}.new was the job's own in the checkpoint and is 2 now",
    ]
    assert describe_changes(saved, before) == describe_changes(None, now) == []
