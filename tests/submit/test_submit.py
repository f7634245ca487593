"""The command `submit`: the file that it writes, what it refuses, and following a job."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.submit.submission import Submission, format_time
from tests.conftest import Ended, Shop

SLURM = """#!/bin/sh
case "$0 $*" in
*sbatch*) echo 7 > state; echo "7;cluster" ;;
*scontrol*) read n < state; n=$((n - 1)); echo $n > state
    [ $n = 5 ] && exit 1
    echo "line $n" >> runs/a/submit/slurm-7.out
    [ $n -gt 4 ] && echo "JobId=7 JobState=RUNNING ExitCode=0:0" || echo "JobId=7 $END" ;;
esac
exit 0
"""


def submit(shop: Shop, *words: str) -> Ended:
    return shop.run("submit", "job.py", "--run-dir", "runs/a", *words)


def test_the_script_for_slurm_is_a_script_and_runs_the_same_command_on_each_node(shop: Shop) -> None:
    done = submit(
        shop, "--nodes", "2", "--ranks-per-node", "4", "--hours", "0.5", "--layout", "fsdp", "--train.steps", "9",
        "--using", "partition=gpu", "mail-user=me@example.org", "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    path = Path(json.loads(done.out)["file"])
    text = (shop.path / path).read_text()
    assert subprocess.run(["sh", "-n", str(shop.path / path)], check=False).returncode == 0
    assert (
        "srun --mpi=none --wait=60 --kill-on-bad-exit=0 paceline train job.py --ranks-per-node 4 --run-dir runs/a --layout fsdp --device cuda --train.steps 9"
        in text
    )
    for line in (
        "--nodes=2 --ntasks-per-node=1 --gpus-per-node=4",
        "--time=00:30:00",
        "--partition=gpu",
        "--mail-user=me@example.org",
    ):
        assert f"#SBATCH {line}" in text
    assert json.loads(done.out)["command"] == "sbatch runs/a/submit/job.sh"


def test_the_script_asks_for_a_requeue_after_75_only(shop: Shop) -> None:
    """Run by a shell, with commands of Slurm that only write down what they were asked."""
    assert submit(shop, "--device", "cpu").code == 0
    bin_folder = shop.path / "bin"
    bin_folder.mkdir()
    for name in ("srun", "scontrol", "sleep"):
        (bin_folder / name).write_text(
            f'#!/bin/sh\necho "{name} $*" >> called\n[ {name} = srun ] && exit $CODE\nexit 0\n'
        )
        (bin_folder / name).chmod(0o755)
    for code, restarts, is_requeued in ((75, 0, True), (75, 50, False), (1, 0, False), (0, 0, False)):
        (shop.path / "called").write_text("")
        environ = shop.environ({"CODE": str(code), "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)})
        environ["PATH"] = f"{bin_folder}:/usr/bin:/bin"
        text = (shop.path / "runs/a/submit/job.sh").read_text()
        lines = "\n".join(line for line in text.splitlines() if not line.startswith("source "))
        done = subprocess.run(["bash", "-c", lines], env=environ, cwd=shop.path, check=False)
        assert done.returncode == code
        assert ("scontrol requeue 7" in (shop.path / "called").read_text()) is is_requeued


def test_each_task_of_an_array_has_its_own_run_folder_and_number(shop: Shop) -> None:
    shop.write("job.py", "import paceline as pl\ndef make_job(file: str = '') -> pl.Job: ...\n")
    done = submit(shop, "--array", "1-3", "--seed", "{task}", "--job.file", "my data-{task}.bin", "--price", "1")
    assert done.code == 0 and "at most 72.00 for each start: 3 times 1 machine for 24 h" in done.out, done.err
    text = (shop.path / "runs/a/submit/job.sh").read_text()
    assert '--run-dir runs/a/"$SLURM_ARRAY_TASK_ID"' in text and '--seed "$SLURM_ARRAY_TASK_ID"' in text
    assert """--job.file 'my data-'"$SLURM_ARRAY_TASK_ID"'.bin'""".replace("'.bin'", ".bin") in text
    assert "#SBATCH --array=1-3" in text and "slurm-%A-%a.out" in text
    # the SLURM_JOB_ID of one of the tasks is also the number of the array, whose requeue starts all of them again
    assert 'scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in text and "$SLURM_JOB_ID" not in text


@pytest.mark.parametrize(
    "target",
    [
        ("k8s", "--image", "a/b:1", "--using", "kind=job"),
        ("sagemaker", "--image", "a/b:1", "--using", "role=arn:aws:iam::123456789012:role/a", "instance=ml.p4d.24xlarge",
         "storage=efs://fs-0123456789abcdef0/runs", "network=subnet-0123,sg-0123", "output=s3://bucket/output"),
    ],
    ids=["k8s", "sagemaker"],
)  # fmt: skip
@pytest.mark.parametrize("in_file", [False, True], ids=["typed", "in a file"])
def test_a_setting_of_the_user_replaces_the_one_of_the_scheduler(
    shop: Shop, target: tuple[str, ...], in_file: bool
) -> None:
    shop.write("run.toml", "[nodes]\nrestarts = 5\n")
    own = ("--config", "run.toml") if in_file else ("--nodes.restarts", "5")
    texts = [
        (shop.path / json.loads(done.out)["file"]).read_text()
        for done in (submit(shop, "--nodes", "2", "--to", *target, *more, "--json") for more in (own, ()))
    ]
    assert texts[0].count('"--nodes.restarts"') == (0 if in_file else 1), texts[0]
    assert texts[1].count('"--nodes.restarts"') == 1 and '"5"' not in texts[1], texts[1]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--to", "slrum"), "did you mean 'slurm'"),
        (("--to", "k8s"), "needs a container image"),
        (("--nodes", "0"), "--nodes 0 must be a number of machines, 1 or more.\n  to do: --nodes 1\n"),
        (("--array", "1-"), "--array 1- can't be read"),
        (("--array", "1-3", "--follow"), "--follow is for one job of Slurm or Kubernetes"),
        (("--device", "gpu"), "--device gpu"),
        (("--array", "1-3,2-4", "--price", "1", "--budget", "24"), "may cost 96.00, and the budget is 24.00"),
        (("--layout", "tp=3", "--nodes", "2"), "tp=3 needs"),
        (("--layout", "auto"), "--layout auto can't be handed in"),
        (("--train.stepz", "3"), "train.stepz"),
        (("--using", "partition"), "--using partition is not NAME=VALUE"),
        (("--using", "time=2-0"), "--using time=: the script sets this option itself"),
        (("--hours", "0.01"), "--hours 0.01 is too short"),
        (("--to", "k8s", "--image", "x", "--using", "memory=200"), "'200' is in bytes; with a unit: 200Gi"),
        (("--to", "k8s", "--image", "x", "--using", "claim=My_Runs"), "the claim 'My_Runs' must be"),
        (("--to", "k8s", "--image", "x", "--using", "clame=a"), "did you mean 'claim'"),
        (("--to", "k8s", "--image", "x", "--using", "memory=lots"), "limits.memory: 'lots' is no amount"),
        (("--to", "ray", "--image", "x"), "--image is not for Ray"),
        (("--to", "ray", "--nodes", "4:2"), "--nodes 4:2 must be"),
        (("--to", "ray", "--nodes", "2:3", "--ranks-per-node", "2", "--layout", "pp=4,dp=-1"), "pp=4"),
        (("--to", "ray", "--using", "cpu=2"), "did you mean 'cpus'"),
        (("--to", "ray", "--using", "cpus=many"), "--using cpus=many is no number above 0"),
        (("--nodes", "2:4"), "--nodes 2:4: only Ray changes the number of machines"),
        (("--to", "sagemaker", "--image", "x"), "SageMaker needs role, instance, storage, output"),
        (("--budget", "10"), "--budget needs the price"),
        (("--budget", "10", "--price", "2", "--nodes", "2", "--hours", "3"), "may cost 12.00, and the budget is 10.00"),
        (("--budget", "10", "--price", "3", "--nodes", "2", "--hours", "2"), "to do: --hours 1.66\n"),
        (("--budget", "1", "--price", "30"), "may cost 720.00, and the budget is 1.00.\n  to do: --budget 720.00\n"),
        (("--price", "-3", "--budget", "5"), "--price -3 must be above 0"),
        (("--price", "0"), "--price 0 must be above 0"),
        (
            ("--price", "3", "--budget", "-1"),
            "--budget -1 must be above 0, and at most 1e+12.\n  to do: --budget 100\n",
        ),
        (("--price", "1e300", "--budget", "1e300"), "--price 1e+300 must be above 0, and at most 1e+12"),
        (("--hours", "1e9"), "--hours 1e+09 must be above 0, and at most a year"),
        (("--hours", "-1"), "--hours -1 must be above 0"),
        (("--job.file", "data-{task}"), "data-{task} needs --array, which says which numbers the tasks have"),
        (("--seed", "{task}", "--to", "ray"), "to do: one submit for each training; only Slurm has arrays"),
        (("--run-dir", "runs/{task}"), "runs/{task} needs --array"),
        (("--array", "3-1"), "--array 3-1 can't be read"),
        (("--array", "1-3,9-7"), "--array 1-3,9-7 can't be read"),
        (("--array", "1-9999999999"), "--array 1-9999999999 can't be read"),
        (("--array", "4000001"), "--array 4000001 can't be read"),
        (("--array", "1-4%0"), "--array 1-4%0 can't be read"),
        (("--to", "k8s", "--image", "my image"), "image: 'my image' is no image, such as registry.example/train:1"),
        (
            ("--to", "k8s", "--image", "Train:1", "--using", "kind=trainjob"),
            "spec.trainer.image: 'Train:1' is no image",
        ),
        (("--image", "my image"), "--image 'my image' is no image and no path"),
        (
            ("--to", "k8s", "--image", "x", "--using", "memory=8Gi", "shared_memory=16Gi"),
            "sizeLimit: '16Gi' in memory is more than the memory of the container, '8Gi', to which it counts",
        ),
        (("--to", "k8s", "--image", "x", "--using", "shared_memory=lots"), "sizeLimit: 'lots' is no amount above 0"),
        (("--to", "k8s", "--image", "x", "--using", "memory=-8Gi"), "limits.memory: '-8Gi' must be above 0"),
        (("--layout", "tp=3", "--nodes", "2"), "to do: --nodes 1 --ranks-per-node 3, or --layout tp=2\n"),
        (("--layout", "tp=3", "--ranks-per-node", "2"), "to do: --ranks-per-node 3, or --layout tp=2\n"),
        (
            ("--to", "ray", "--nodes", "2:3", "--layout", "pp=2,dp_shard=-1"),
            "where: 3 nodes, of --nodes 2:3\n  likely cause: the nearest layouts that fit: pp=3 · dp_shard=3\n"
            "  to do: --nodes 2, or --ranks-per-node 2\n",
        ),
        (("--to", "ray", "--nodes", "1:4", "--layout", "tp=2,dp_shard=2"), "to do: --nodes 4\n"),
        (("--to", "ray", "--nodes", "3:5", "--layout", "fsdp", "--compress", "bf16"), "to do: --layout ddp\n"),
        (("--to", "ray", "--nodes", "2:900000000"), "on at most 1000 numbers of machines.\n  to do: --nodes 2:1001\n"),
        (("--to", "ray", "--nodes", "100000:100001"), "100,001 ranks: at most 100,000 are allowed"),
    ],
)
def test_what_would_be_refused_is_refused_before_it_is_handed_in(
    shop: Shop,
    words: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shop.path)
    assert main(["submit", "job.py", "--run-dir", "runs/a", *words]) == 2
    text = capsys.readouterr().err
    assert says in text, text
    assert not (shop.path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("submit", "job.py", "--hours"),
        ("submit", "job.py", "--price"),
        ("submit", "job.py", "--price", "1", "--budget"),
        ("doctor", "--wait"),
        ("plan", "job.py", "--seconds"),
        ("simulate", "job.py", "--restart-seconds"),
    ],
    ids=lambda words: words[0] + words[-1],
)
@pytest.mark.parametrize("number", ["nan", "inf", "1e400", "-Infinity"])
def test_an_option_refuses_a_number_that_is_not_finite(
    words: tuple[str, ...], number: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words[:-1], f"{words[-1]}={number}"]) == 2
    assert f"{words[-1]} {number}: expected a finite number" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "1e9"])
@pytest.mark.parametrize(("verb", "command"), [("doctor", ()), ("check", ("--", "true"))], ids=["doctor", "check"])
def test_nobody_waits_forever(
    verb: str, command: tuple[str, ...], seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([verb, f"--wait={seconds}", *command]) == 2
    expected = "expected a finite number" if seconds == "nan" else "must be above 0, and at most a year, 31536000"
    assert expected in capsys.readouterr().err


def test_the_number_of_a_task_is_filled_in_only_on_the_command_line(shop: Shop) -> None:
    shop.write("run.toml", '[job]\nfile = "data-{task}"\n')
    done = submit(shop, "--array", "1-2", "--config", "run.toml")
    assert done.code == 2 and "job.file = 'data-{task}': {task} is the number of a task only on the" in done.err, (
        done.err
    )
    assert "to do: --job.file data-{task}" in done.err


@pytest.mark.parametrize("word", ["runs/a\rb", "runs/a\u2028b"], ids=["carriage return", "line separator"])
def test_a_line_break_of_any_kind_is_refused(shop: Shop, word: str) -> None:
    done = shop.run("submit", "job.py", "--run-dir", word)
    assert done.code == 2 and "a line break is in the job, the run folder" in done.err, done.err


def test_a_line_break_in_the_working_folder_is_refused(shop: Shop) -> None:
    folder = shop.path / "a\nb"
    folder.mkdir()
    (folder / "job.py").write_text((shop.path / "job.py").read_text())
    done = Shop(folder).run("submit", "job.py")
    assert done.code == 2 and "or the working folder" in done.err, done.err


def test_a_dry_run_writes_the_file_and_hands_nothing_in(shop: Shop) -> None:
    done = submit(shop, "--dry-run", "--follow")
    assert done.code == 0 and done.out.endswith("To hand it in: sbatch runs/a/submit/job.sh\n"), done.err
    assert (shop.path / "runs/a/submit/job.sh").exists()


@pytest.mark.parametrize(
    ("storage", "run", "stored"),
    [
        ("efs://fs-0123456789abcdef0/runs", "/opt/ml/input/data/runs/job-a", "efs://fs-0123456789abcdef0/runs/job-a"),
        ("s3://bucket/runs/", "/opt/ml/checkpoints/run", "s3://bucket/runs/job-a/files/run"),
    ],
    ids=["file system", "S3"],
)
def test_sagemaker_says_where_the_run_folder_is(shop: Shop, storage: str, run: str, stored: str) -> None:
    words = ("--to", "sagemaker", "--image", "a/b:1", "--using", "role=arn:aws:iam::123456789012:role/a",
             "instance=ml.p4d.24xlarge", f"storage={storage}", "network=subnet-0123,sg-0123", "output=s3://bucket/output")  # fmt: skip
    done = submit(shop, *words)
    assert done.code == 0 and f"\nrun folder on the machines: {run}, which is {stored}\n" in done.out, done.text
    made = json.loads(submit(shop, *words, "--json").out)
    assert made["run"] == run and f'"{run}"' in (shop.path / made["file"]).read_text()


def test_the_help_of_submit_is_there(shop: Shop) -> None:
    done = shop.run("submit", "--help")
    assert done.code == 0 and "--ranks-per-node" in done.out and "paceline submit job.py --to slurm" in done.out
    assert "submit JOB" in shop.run("--help").out


def test_the_largest_possible_cost_is_printed(shop: Shop) -> None:
    done = submit(shop, "--nodes", "2", "--hours", "24", "--price", "3.2", "--budget", "160")
    assert done.code == 0 and "at most 153.60 for each start: 2 machines for 24 h at 3.2 each" in done.out


def test_a_job_is_followed_until_it_ends_with_its_exit_code(shop: Shop) -> None:
    """With commands of Slurm that answer as Slurm does."""
    bin_folder = shop.path / "bin"
    bin_folder.mkdir()
    for name in ("sbatch", "scontrol"):
        (bin_folder / name).write_text(SLURM)
        (bin_folder / name).chmod(0o755)
    path = {"PATH": f"{bin_folder}:/usr/bin:/bin"}
    command = shop.command("submit", "job.py", "--run-dir", "runs/a", "--follow")
    for end, code in (
        ("JobState=FAILED ExitCode=75:0", 75),
        ("JobState=CANCELLED ExitCode=0:15", 143),
        ("JobState=TIMEOUT ExitCode=0:0", 1),
        ("JobState=COMPLETED ExitCode=0:0", 0),
    ):
        done = shop.call(command, environ={**path, "END": end})
        assert done.code == code, done.err
        assert "job 7: running" in done.out and done.out.index("line 6") < done.out.index("line 4")
    missing = shop.call(command, environ={"PATH": "/nowhere"})
    assert missing.code == 3 and "sbatch is not installed here" in missing.err


def test_names_fit_every_scheduler() -> None:
    def name(job: str, run: str) -> str:
        submission = Submission(
            job=job, words=(), run=run, folder=Path(), num_nodes=1, ranks_per_node=1, hours=1.0, uses_gpus=False
        )
        return submission.name

    assert name("digits_cnn.py", "runs/A_b.C") == "digits-cnn-a-b-c"
    assert name("my.pkg:make", "/runs/1") == "pkg-1"
    assert name("7.py", "runs/" + "x" * 100).startswith("job-7-") and len(name("7.py", "x" * 100)) <= 40
    assert [format_time(hours) for hours in (0.001, 1.5, 100)] == ["00:01:00", "01:30:00", "100:00:00"]


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (("--nodes", "2"), ["note: one GPU of each node is used; --ranks-per-node 8 for eight"]),
        ((), ["note: one GPU of one node is used; --nodes 2 --ranks-per-node 8 for two nodes with eight each"]),
        (("--ranks-per-node", "8"), ["note: 1 node; --nodes 2 for two"]),
        (("--nodes", "2", "--ranks-per-node", "1"), []),
        (("--nodes", "1", "--ranks-per-node", "8"), []),
        (("--nodes", "2", "--device", "cpu"), []),
        (("--nodes", "2", "--to", "ray"), ["note: one GPU of each node is used; --ranks-per-node 8 for eight"]),
    ],
    ids=["ranks", "both", "nodes", "none", "one node", "cpu", "ray"],
)
def test_what_is_not_typed_is_said(shop: Shop, words: tuple[str, ...], notes: list[str]) -> None:
    done = submit(shop, *words)
    assert done.code == 0, done.err
    assert [line for line in done.out.splitlines() if line.startswith("note: ")] == notes
    assert done.out.splitlines()[-1].startswith("To hand it in: ")


def test_the_script_says_how_many_nodes_and_why_they_are_whole(shop: Shop) -> None:
    assert submit(shop, "--ranks-per-node", "8").code == 0
    text = (shop.path / "runs/a/submit/job.sh").read_text()
    assert "# Trains job.py on 1 node with 8 processes. Hand it in" in text
    explained = re.search(r"\n# (.*)\n(#SBATCH --exclusive --mem=0)\n", text)
    assert explained is not None and "whole node" in explained[1] and "Delete" in explained[1]
    assert submit(shop, "--nodes", "2", "--ranks-per-node", "1").code == 0
    text = (shop.path / "runs/a/submit/job.sh").read_text()
    assert "# Trains job.py on 2 nodes with 1 process each. Hand it in" in text


def test_options_of_the_scheduler_that_are_given_one_by_one_all_count(shop: Shop) -> None:
    assert submit(shop, "--using", "partition=gpu", "--hours", "2", "--using=account=me").code == 0
    text = (shop.path / "runs/a/submit/job.sh").read_text()
    assert "#SBATCH --partition=gpu" in text and "#SBATCH --account=me" in text and "--time=02:00:00" in text
