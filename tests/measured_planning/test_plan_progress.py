"""A plan that takes long reports its progress."""

import re
import time
from pathlib import Path

import pytest

from paceline.commands.plan import report_progress
from paceline.run_folder.plan_file import read_activity, write_activity
from tests.conftest import SMALL_JOB, Shop


def test_what_a_plan_does_is_said_now_and_then_until_it_is_done(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with report_progress(tmp_path, every=0.05):
        time.sleep(0.2)
        write_activity(tmp_path, "searching layouts")
        time.sleep(0.2)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "planning: starting processes; 0 s so far"
    assert said[-1] == "planning: searching layouts; 0 s so far"
    time.sleep(0.1)
    assert not capsys.readouterr().err
    write_activity(tmp_path, "")
    assert read_activity(tmp_path) == "starting processes" and not list(tmp_path.iterdir())
    write_activity(tmp_path / "gone", "no folder is no error")


def test_a_plan_tells_where_it_is_and_an_answer_for_a_script_has_nothing_of_it(
    shop: Shop,
) -> None:
    shop.write("job.py", SMALL_JOB)
    often = "import sys, paceline.commands.plan as p; p.report_progress.__wrapped__.__kwdefaults__['every'] = 0.02"
    code = f"{often}; from paceline.cli import main; sys.exit(main())"
    plan = [*Shop.command()[:1], "-c", code, "plan", "job.py", "--cluster", "4xA100-80G", "--run-dir"]
    ended = shop.call([*plan, "plan"])
    assert ended.code == 0, ended.text
    assert re.search(r"planning: profiling the model.*; \d+ s so far", ended.err), ended.text
    assert "planning: searching layouts of 4 ranks" in ended.err and "so far" not in ended.out
    assert not (shop.path / "plan" / "doing.txt").exists()
    assert "so far" not in shop.call([*plan, "quiet", "--json"]).text
