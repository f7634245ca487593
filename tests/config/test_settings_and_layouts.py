"""Layouts, settings with their origins, and jobs that are checked without importing them."""

import re
from itertools import product
from math import ceil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cli import split_settings
from paceline.commands.common.resume_command import build_resume_command
from paceline.commands.config import config
from paceline.commands.plan import plan
from paceline.config.job_reference import job_defaults, parse_jobref, short_name, source_name
from paceline.config.layout import LayoutKind, parse_layout
from paceline.config.merge_settings import RequestedSettings, as_toml, merge, read_requested_settings
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.errors import LayoutError, PacelineError, Problems, UsageError
from paceline.faults import Fault, parse_faults
from paceline.launch.launcher_variables import detect_world
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.planner.layout.mesh import AXIS_ORDER, Mesh, layout_label, nearest_meshes, resolve_mesh


def test_settings_come_from_file_then_command_line(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('seed = 3\n[train]\nsteps = 10\nprecision = "bf16"\n[job]\nlr = 0.1\n')
    asked = read_requested_settings(
        file=file, overrides=["--train.steps", "20", "--train.exact", "--watch.to", "console,jsonl"]
    )
    settings = merge(asked)
    assert (settings.seed, settings.train.steps, settings.train.precision) == (3, 20, "bf16")
    assert settings.train.exact and settings.watch.to == ("console", "jsonl") and settings.job == {"lr": 0.1}
    assert asked.origins["train.steps"] == "command line" and asked.origins["seed"] == f"file {file}"
    again = tmp_path / "again.toml"
    again.write_text(as_toml(asked))
    assert merge(read_requested_settings(file=again, overrides=[])) == settings


def test_the_job_lies_under_what_was_asked() -> None:
    asked = read_requested_settings(file=None, overrides=["--train.steps=5"]).layered_over(
        {"train.steps": 9, "train.epochs": 2.0}, origin="job"
    )
    assert merge(asked).train.steps == 5 and merge(asked).train.epochs == 2.0
    assert asked.origins == {"train.epochs": "job", "train.steps": "command line"}


def test_all_problems_at_once() -> None:
    with pytest.raises(Problems) as caught:
        read_requested_settings(file=None, overrides=["--train.stps", "1", "--seed", "x", "--train.precision", "fp8"])
    text = str(caught.value)
    assert "did you mean 'train.steps'" in text and "seed" in text and "fp8" in text


def test_a_list_may_be_text_with_commas_wherever_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('watch.to = "console, jsonl"\n')
    words = ["--watch.to", "console,jsonl"]
    python = RequestedSettings().layered_over(
        {"watch": {"to": "console,jsonl"}, "run_dir": tmp_path}, origin="Run(settings=)"
    )
    for asked in (
        read_requested_settings(file=file, overrides=[]),
        read_requested_settings(file=None, overrides=words),
        python,
    ):
        assert merge(asked).watch.to == ("console", "jsonl") and asked.values["watch.to"] == ["console", "jsonl"]
    assert python.values["run_dir"] == str(tmp_path)


def test_what_python_sets_is_checked_as_well() -> None:
    wrong = {"train.stps": 1, "log.every": "often", "job.lr": 0.1, "wotch.to": "jsonl"}
    with pytest.raises(Problems) as caught:
        RequestedSettings().layered_over(wrong, origin="Run(settings=)")
    first, second, third, fourth = caught.value.problems
    assert first.cause == "did you mean 'train.steps'?" and first.hint.startswith("one of train.steps, train.epochs")
    assert "log.every = 'often'" in second.what and "make_job(lr=0.1)" in third.hint and "watch" in fourth.hint
    assert {problem.where for problem in caught.value.problems} == {"Run(settings=)"}
    assert "paceline config JOB" not in str(caught.value)


def test_what_the_job_brings_has_its_range_too() -> None:
    with pytest.raises(Problems) as caught:
        RequestedSettings().layered_over({"train.max_grad_norm": -1.0, "train.stps": 3, "log.every": 0}, origin="job")
    assert [(problem.where, problem.what) for problem in caught.value.problems] == [
        ("job", "train.max_grad_norm = -1.0: expected a number, above 0."),
        ("job", "there is no setting 'train.stps'."),
        ("job", "log.every = 0: expected a number, 1 or more."),
    ]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("train.steps", [0, 10**18], [-1, 10**18 + 1, 0.5]),
        ("train.epochs", ["1e-9", 0.5, 1], [0, -1, "nan", "inf"]),
        ("train.max_grad_norm", [1, "0.1", "inf"], [0, -1, "nan", "-inf"]),
        ("train.timeout_seconds", [0.5, 600], [0, -1, "nan", "inf", 1e12]),
        ("train.threads", [1, 1024], [0, -1, 1025]),
        ("data.workers", [0, 3], [-1, 2.5]),
        ("checkpoint.keep", [1], [0, -1]),
        ("seed", [-1, 0, 2**64 - 1, -(2**63)], [0.5, "nan", 2**64, 10**30]),
    ],
)
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        merge(RequestedSettings(values={name: value}))
    for value in bad:
        with pytest.raises(UsageError, match=re.escape(f"{name} = {value!r}: expected")) as caught:
            merge(RequestedSettings(values={name: value}, origins={name: "somewhere"}))
        assert caught.value.where == "somewhere" and caught.value.hint


@pytest.mark.parametrize(
    ("text", "kind", "ranks"),
    [
        ("ddp", LayoutKind.DDP, None),
        ("DP=4", LayoutKind.AXES, 4),
        ("dp_replicate=-1", LayoutKind.AXES, None),
        ("single", LayoutKind.SINGLE, None),
        ("threads", LayoutKind.THREADS, None),
        ("Threads=4", LayoutKind.THREADS, 4),
        ("fsdp,remat=full", LayoutKind.FSDP, None),
        ("hsdp,dp_shard=2", LayoutKind.HSDP, 2),
        ("pp=2,dp_shard=-1,tp=2,schedule=zb_h1,virtual=2", LayoutKind.AXES, None),
        ("pp=2,schedule=Mine.txt", LayoutKind.AXES, 2),
        ("dp_shard=2,tp=2,sequence=true,offload=optimizer+parameters", LayoutKind.AXES, 4),
        ("ep=2,dp=2", LayoutKind.AXES, 2),
        ("tp", LayoutKind.TP, None),
    ],
)
def test_layouts_are_read_and_written_alike(text: str, kind: LayoutKind, ranks: int | None) -> None:
    layout = parse_layout(text)
    assert (layout.kind, layout.ranks) == (kind, ranks) and parse_layout(str(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fdsp", "did you mean 'fsdp'"),
        ("auto", "auto can't be combined"),
        ("atuo", "did you mean 'auto'"),
        ("dp=0", "needs a count, got '0'"),
        ("dp=x", "needs a count, got 'x'"),
        ("wide=3", "is not an axis"),
        ("pp=2,dp_shard", "dp_shard in 'pp=2,dp_shard' has no size"),
        ("pp=2,zero", "zero in 'pp=2,zero' has no value"),
        ("pp=2,dp", "in 'pp=2,dp' has no size"),
        ("", "is not a layout"),
        ("threads=0", "needs a count"),
        ("threads=2,dp=2", "threads with something else"),
        ("dp=2,threads=2", "threads with something else"),
        ("single,tp=2", "single with something else"),
        ("fsdp,tp=-1", "one axis may be -1"),
        ("ddp,schedule=1f1b", "schedule=1f1b is an option of pp, and the layout has no pp"),
        ("pp=2,zero=2", "zero=2 is an option of dp_shard, and the layout has no dp_shard"),
        ("dp_shard=2,zero=4", "zero=4 is not valid"),
        ("dp_shard=2,offload=disk", "'disk' is not valid"),
        ("pp=2,virtual=none", "not a number of stages"),
    ],
)
def test_layouts_that_can_not_be_had_say_so(text: str, words: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert caught.value.hint and words in f"{caught.value.what} {caught.value.cause}"


@pytest.mark.parametrize(
    ("text", "ranks", "mesh", "name"),
    [
        ("ddp", 4, "dp_replicate=4", "ddp"),
        ("dp=4", 4, "dp_replicate=4", "ddp"),
        ("fsdp,tp=2", 4, "dp_shard=2,tp=2", "dp_shard=2,tp=2"),
        ("hsdp", 8, "dp_replicate=2,dp_shard=4", "hsdp"),
        ("hsdp,dp_shard=2", 8, "dp_replicate=4,dp_shard=2", "hsdp"),
        ("dp_shard=3,zero=1", 3, "dp_shard=3", "zero1"),
        ("ep", 4, "dp_replicate=4,ep=4", "ep"),
        ("ep,tp=2", 8, "dp_replicate=4,tp=2,ep=4", "dp_replicate=4,tp=2,ep=4"),
        ("dp=4,ep=2", 4, "dp_replicate=4,ep=2", "dp_replicate=4,ep=2"),
        ("pp=-1,dp=2,schedule=gpipe", 6, "pp=3,dp_replicate=2", "pp=3,dp_replicate=2,schedule=gpipe"),
    ],
)
def test_a_layout_becomes_a_mesh(text: str, ranks: int, mesh: str, name: str) -> None:
    problems: list[PacelineError] = []
    layout = parse_layout(text)
    found = resolve_mesh(layout, ranks=ranks, problems=problems)
    assert not problems and (str(found), layout_label(layout, found), found.ranks) == (mesh, name, ranks)
    for axes in (("tp",), ("pp",), ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard", "cp")):
        assert sorted(rank for group in found.groups(axes) for rank in group) == list(range(ranks))


@pytest.mark.parametrize(
    ("text", "ranks", "words"),
    [
        ("pp=2,dp_shard=3,tp=2", 8, "pp=2 × dp_shard=3 × tp=2 needs 12 ranks, you have 8."),
        ("pp=2,dp_shard=-1,tp=3", 8, "8 ranks are not divisible by 6, the product of the other axes"),
        ("hsdp", 2, "dp_replicate=2 × dp_shard=2 needs 4 ranks, you have 2."),
        ("single", 2, "layout single is one process, you have 2 ranks."),
        ("threads=2", 3, "threads=2 needs 2 ranks, you have 3."),
        ("dp=4,ep=3", 4, "ep=3 does not divide 4 replicas."),
    ],
)
def test_a_mesh_that_does_not_fit_names_the_nearest(text: str, ranks: int, words: str) -> None:
    problems: list[PacelineError] = []
    resolve_mesh(parse_layout(text), ranks=ranks, problems=problems)
    assert problems[0].what.startswith(words) and problems[0].hint


@given(axes=st.lists(st.integers(1, 4), min_size=5, max_size=5), ranks=st.integers(1, 16))
def test_what_is_near_fits(axes: list[int], ranks: int) -> None:
    asked = Mesh(**dict(zip(AXIS_ORDER, axes, strict=True)))
    found = nearest_meshes(asked, ranks=ranks)
    assert found and all(mesh.ranks == ranks for mesh in found) and len({str(mesh) for mesh in found}) == len(found)
    assert asked.ranks != ranks or str(found[0]) == str(asked) or asked.ranks == 1


FORMS = ("{}=3", "fsdp,{}", "tp=2,{}=3", "{}=3,tp=2", "{}=0", "single,{}", "threads,{}")


def test_a_line_that_is_proposed_is_accepted() -> None:
    proposed = 0
    for form, word in product(FORMS, [str(kind) for kind in LayoutKind if kind is not LayoutKind.AXES]):
        for line in lines_proposed(form.format(word)):
            layout = parse_layout(line)
            problems: list[PacelineError] = []
            resolve_mesh(layout, ranks=layout.ranks or (1 if line == "single" else 4), problems=problems)
            assert not problems, line
            proposed += 1
    assert proposed >= 40, "so many refusals name a line"


def lines_proposed(text: str) -> list[str]:
    """The layouts that the refusal of this one names; none where it is accepted."""
    try:
        parse_layout(text)
    except PacelineError as error:
        every = error.problems if isinstance(error, Problems) else [error]
        return [line for told in every for line in re.findall(r"--layout ([^\s,|]+(?:,[^\s|]+)*)", told.hint)]
    return []


@pytest.mark.parametrize("text", ["pp=100001", "tp=" + "9" * 5000, "tp=2,pp=100000,dp=9", "pp=2,virtual=1001", "tp=²"])
def test_sizes_are_bounded_before_anything_is_made_of_them(text: str) -> None:
    problems: list[PacelineError] = []
    try:
        resolve_mesh(parse_layout(text), ranks=2, problems=problems)
    except PacelineError as error:
        problems.append(error)
    assert len(problems) == 1 and len(str(problems[0])) < 300 and problems[0].hint
    assert "at most" in str(problems[0]) or "²" in text


def test_threads_are_replicas_of_one_process() -> None:
    facts = JobFacts(global_batch_size=64)
    cluster = Resources(ranks=3, cores=8)
    plan = make_execution_plan(layout=parse_layout("threads"), update=UpdateRule(), resources=cluster, facts=facts)
    assert (plan.processes, plan.replicas, plan.backend, plan.threads, plan.num_micro) == (1, 3, "none", 2, 3)
    with pytest.raises(LayoutError, match="threads=2 needs 2 ranks, you have 3") as caught:
        make_execution_plan(layout=parse_layout("threads=2"), update=UpdateRule(), resources=cluster, facts=facts)
    assert caught.value.hint == "--ranks 2, or --layout threads=3"


def test_micro_batches_are_derived_and_disagreement_is_refused() -> None:
    plan = make_execution_plan(
        layout=parse_layout("ddp"),
        update=UpdateRule(),
        resources=Resources(ranks=3, cores=8),
        facts=JobFacts(global_batch_size=64),
    )
    assert (plan.micro_batch_size, plan.num_micro, plan.replicas, plan.threads) == (22, 3, 3, 2)
    with pytest.raises(UsageError, match="8 × 3 replicas × 2 accumulation steps = 48, but global_batch_size is 64"):
        make_execution_plan(
            layout=parse_layout("ddp"),
            update=UpdateRule(),
            resources=Resources(ranks=3),
            facts=JobFacts(global_batch_size=64, micro_batch_size=8, accumulation=2),
        )


def _planned(total: int, ranks: int, rounds: int, micro: int | None = None) -> tuple[int, int]:
    """Return the microbatch size and the microbatches per replica."""
    facts = JobFacts(global_batch_size=total, micro_batch_size=micro, accumulation=rounds)
    plan = make_execution_plan(
        layout=parse_layout("ddp"), update=UpdateRule(), resources=Resources(ranks=ranks), facts=facts
    )
    return plan.micro_batch_size, -(-plan.num_micro // plan.replicas)


@pytest.mark.parametrize("total", range(1, 34))
def test_accumulation_steps_are_what_the_plan_has_or_are_refused(total: int) -> None:
    for ranks in range(1, 6):
        possible = {ceil(ceil(total / micro) / ranks) for micro in range(1, total + 1)}
        for rounds in range(1, 12):
            if rounds in possible:
                assert _planned(total, ranks, rounds)[1] == rounds, (total, ranks, rounds)
                continue
            with pytest.raises(UsageError, match=f"gradient_accumulation_steps {rounds} × {ranks} replica") as refused:
                _planned(total, ranks, rounds)
            nearest = int(refused.value.hint.split(",")[0].split()[1])
            assert _planned(total, ranks, nearest)[1] == nearest


def test_accumulation_steps_that_disagree_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(UsageError) as refused:
        _planned(32, 2, 5)
    assert refused.value.what == (
        "gradient_accumulation_steps 5 × 2 replicas = 10 microbatches, "
        "but global_batch_size 32 is 8 microbatches of at most 4 samples: 4 per replica."
    )
    assert refused.value.hint.startswith("--train.gradient_accumulation_steps 4, ")
    with pytest.raises(UsageError, match="4 × 2 replicas × 5 accumulation steps = 40, but global_batch_size is 32"):
        _planned(32, 2, 5, micro=4)
    assert _planned(32, 2, 4, micro=4) == _planned(32, 2, 4) == (4, 4)
    assert _planned(30, 2, 4) == (4, 4), "the last microbatch has 2 samples"
    assert _planned(32, 1, 5) == (7, 5) and _planned(32, 4, 1) == (8, 1)


def test_a_job_is_checked_without_importing_it(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text("import nowhere\ndef make_job(lr=0.1, *, width: int = 3):\n    pass\n")
    assert job_defaults(parse_jobref(str(job))) == {"lr": "0.1", "width": "3"}
    for text, word in (("def f(:\n", "valid Python"), ("x = 1\n", "make_job"), ("\0", "Python")):
        job.write_text(text)
        with pytest.raises(PacelineError, match=word):
            parse_jobref(str(job))


def test_a_file_that_is_not_there_is_told_with_the_one_that_was_meant(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("job = 1")
    for typed, hint in (("jobb.py:job", str(tmp_path / "job.py")), ("else.py", "paceline new text")):
        with pytest.raises(PacelineError, match="does not exist") as refused:
            parse_jobref(str(tmp_path / typed))
        assert refused.value.hint == hint


def test_a_name_that_only_a_function_keeps_to_itself_is_no_job(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "def make_job():\n    mk = [1]\n    return mk\ntry:\n    from a import job\nexcept ImportError:\n    job = None\n"
    )
    with pytest.raises(PacelineError, match=r"job\.py defines no mk") as refused:
        parse_jobref(f"{job}:mk")
    assert "one of make_job" in refused.value.hint
    with pytest.raises(PacelineError, match=r"defines no make_jb") as refused:
        parse_jobref(f"{job}:make_jb")
    assert refused.value.cause == "did you mean 'make_job'?"
    assert [parse_jobref(f"{job}:{name}").name for name in ("make_job", "job")] == ["make_job", "job"]
    job.write_text("def set_up():\n    global job\n    job = 1\nset_up()\n")
    assert parse_jobref(str(job)).name is None


def test_settings_and_options_are_told_apart() -> None:
    own, settings = split_settings(
        ["--train.steps", "5", "job.py", "--nproc-per-node=2", "--seed", "1", "--json", "--train.exact"]
    )
    assert own == ["job.py", "--ranks=2", "--json"]
    assert settings == ["--train.steps", "5", "--seed", "1", "--train.exact"]


def test_faults_are_data() -> None:
    text = "kill rank=2 step=50; nan rank=1 step=70 attempt=2; slow rank=0 step=9 point=save seconds=0.5; disk_full rank=0 step=8"
    assert parse_faults(text) == (
        Fault(kind="kill", rank=2, step=50),
        Fault(kind="nan", rank=1, step=70, attempt=2),
        Fault(kind="slow", rank=0, step=9, point="save", seconds=0.5),
        Fault(kind="disk_full", rank=0, step=8, point="save"),
    )
    assert "; ".join(map(str, parse_faults(text))) == text.replace(" seconds=0.5", "")


@pytest.mark.parametrize(
    "text",
    [
        "melt rank=1 step=1",
        "nan rank=1 step=7 point=save",
        "slow rank=0 step=1 seconds=-1",
        "kill rank=0 step=1 seconds=2",
    ],
)
def test_a_fault_that_cannot_happen_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not understood"):
        parse_faults(text)


def test_two_faults_at_one_moment_are_refused() -> None:
    with pytest.raises(UsageError, match="two faults happen at the same moment: nan rank=1 step=7"):
        parse_faults("nan rank=1 step=7; slow rank=1 step=7")
    assert len(parse_faults("nan rank=1 step=7; slow rank=0 step=7; slow rank=1 step=7 point=save")) == 3


WORLDS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
    "mpirun": {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
               "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
    "mpiexec": {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
    "srun": {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_ID": "0",
             "SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2"},
    "environment": {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
}  # fmt: skip


@pytest.mark.parametrize("kind", WORLDS)
def test_worlds_of_others_are_found(kind: str) -> None:
    found = detect_world(WORLDS[kind])
    assert found is not None
    assert (found.kind, found.rank, found.world_size, found.local_rank, found.local_world_size) == (kind, 1, 4, 1, 2)
    assert not found.is_one_node


def test_contradicting_worlds_are_refused() -> None:
    assert detect_world({}) is None
    with pytest.raises(UsageError, match="contradict"):
        detect_world({"TORCHELASTIC_RUN_ID": "x", "RANK": "4", "WORLD_SIZE": "4"})
    with pytest.raises(UsageError, match="can't be read"):
        detect_world({"TORCHELASTIC_RUN_ID": "x", "RANK": "a", "WORLD_SIZE": "4"})


@pytest.mark.parametrize(
    ("text", "said", "servers", "staleness"),
    [
        ("ps", "ps,staleness=4", 1, 4),
        ("ps,servers=3,staleness=0", "ps,servers=3,staleness=0", 3, 0),
        ("ps,staleness=none", "ps,staleness=none", 1, float("inf")),
    ],
)
def test_a_parameter_server_is_read_and_said_again(text: str, said: str, servers: int, staleness: float) -> None:
    update = parse_update(text)
    assert (update.servers, update.staleness, str(update)) == (servers, staleness, said)
    assert parse_update(said) == update and update.layout == "ddp"


@pytest.mark.parametrize(
    ("text", "path", "name", "short"),
    [
        ("job.py", "job.py", None, "job"),
        ("job.py:make", "job.py", "make", "job"),
        ("12:30/job.py", "12:30/job.py", None, "job"),
        ("12:30/job.py:make", "12:30/job.py", "make", "job"),
    ],
)
def test_a_path_may_have_colons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, path: str, name: str | None, short: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text("def make(): ...\ndef make_job(): ...\n")
    found = parse_jobref(text)
    assert (str(found.path), found.name, found.short) == (path, name, short)
    assert Task(verb="train", job=text).with_absolute_paths(Path("/there")).job == f"/there/{text}"


@pytest.mark.parametrize("text", ["pkg.jobs:make", "object:gpt-2.5", "gpt-2.5", "runs"])
def test_the_name_of_a_jobs_runs(text: str) -> None:
    assert short_name(text) == {"pkg.jobs:make": "jobs"}.get(text, text.removeprefix("object:"))


@pytest.mark.parametrize(
    ("name", "folder"), [("../esc", "esc"), ("a/b", "b"), ("v1.py", "v1"), ("a.py:b", "a.py:b"), ("..", "run")]
)
def test_an_object_s_name_stays_inside_the_folder_of_the_runs(name: str, folder: str) -> None:
    assert short_name(f"object:{name}") == folder and source_name(f"object:{name}") == ""


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfdef make_job(): ...\n",
        b"# coding: latin-1\n# \xe9\ndef make_job(): ...\n",
        b"#!/usr/bin/python\n# -*- coding: cp1252 -*-\n# \x80\ndef make_job(): ...\n",
    ],
)
def test_a_job_is_read_as_python_reads_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.py").write_bytes(content)
    assert job_defaults(parse_jobref(str(tmp_path / "job.py"))) == {}


@pytest.mark.parametrize(
    "value", ["a\nb", 'a"\nseed = 99  # command line\nx = "b', "tab\t, bell\x07, del\x7f", "\\n", "ü语"]
)
def test_a_setting_of_any_text_comes_back_from_the_runs_own_config(tmp_path: Path, value: str) -> None:
    asked = RequestedSettings(
        values={"job.note": value, "job.list": [value, "b"], "seed": 1}, origins={"job.note": "file a\nseed = 3"}
    )
    written = tmp_path / "config.toml"
    written.write_text(as_toml(asked))
    found = read_requested_settings(file=written, overrides=[])
    assert found.values["job.note"] == value and found.values["job.list"] == [value, "b"]
    assert found.values["seed"] == 1 and set(found.values) == {"job.note", "job.list", "seed"}


def test_text_of_another_encoding_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match=r"job.data is not UTF-8 text: '/data/caf\\udce9'"):
        read_requested_settings(
            file=None, overrides=["--job.data", b"/data/caf\xe9".decode("utf-8", "surrogateescape")]
        )


@pytest.mark.parametrize(("gpus", "device", "is_named"), [(1, "cpu", True), (1, "cuda", False), (0, "cpu", False)])
def test_the_resume_command_names_a_device_that_auto_would_not_choose(
    gpus: int, device: str, is_named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.commands.common.devices.visible_gpus", lambda: gpus)
    command = build_resume_command(Task(verb="train", job="job.py", run="r", ranks=4, device=device))
    assert ("--device cpu" in command) == is_named and "--ranks 4" in command


def test_a_secret_is_not_said_again() -> None:
    task = Task(verb="train", job="job.py", run="r", settings={"job.api_key": "hush", "job.lr": "1"},
                origins=dict.fromkeys(("job.api_key", "job.lr"), "command line"))  # fmt: skip
    words = build_resume_command(task)
    assert "hush" not in words and "--job.api_key" in words and "--job.lr 1" in words


def test_the_dots_of_a_secret_are_no_value_of_any_option(tmp_path: Path) -> None:
    """What the line to go on with shows for a secret would else be what the job gets."""
    file = tmp_path / "run.toml"
    file.write_text('[job]\napi_key = "•••"\n')
    for words, source in ((["--job.api_key", "•••"], None), (["--run_dir=•••"], None), ([], file)):
        with pytest.raises(UsageError, match="placeholder for a hidden secret") as refused:
            read_requested_settings(file=source, overrides=words)
        assert refused.value.exit_code == 2 and "VALUE" in refused.value.hint
    for mask in ("***", "********", "[REDACTED]", "<hidden>", "••••"):
        with pytest.raises(UsageError, match="placeholder for a hidden secret"):
            read_requested_settings(file=None, overrides=[f"--job.token={mask}"])
    for name, value in (("job.api_key", "hush"), ("job.api_key", "*"), ("job.glob", "***"), ("job.kind", "hidden")):
        assert read_requested_settings(file=None, overrides=[f"--{name}", value]).values == {name: value}


def test_config_shows_no_secret(tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import paceline as pl\ndef make_job(api_key='', lr=0.1, token='t0'):\n    return pl.Job(model=lambda: None, "
        "train_data=[1], optimizer=lambda named: None, loss=lambda o, b: o, global_batch_size=1)\n"
    )
    shown = {one.name: one.value for one in config(str(job), overrides=["--job.api_key=hush", "--job.lr=3"])}
    assert (shown["job.api_key"], shown["job.lr"], shown["job.token"]) == ("•••", "3", "•••")


def test_a_module_that_is_nowhere_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("nosuchcfg", "nosuchcfg:make_job", "no.such.cfg"):
        with pytest.raises(UsageError, match=" no such file, folder or module") as refused:
            parse_jobref(name)
        hints = ("config.json", "transformers:", "job.py")
        assert refused.value.exit_code == 2 and all(word in refused.value.hint for word in hints)
    with pytest.raises(UsageError, match="nosuchcfg"):
        plan("nosuchcfg", cluster="8xH100-80G")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.py").write_text("")
    assert [parse_jobref(name).module for name in ("mine", "json:tool", "mine:make")] == ["mine", "json", "mine"]


@pytest.mark.parametrize(("batch", "micro", "said"), [(1, None, "global_batch_size is 1"), (8, 8, "4 would use all")])
def test_replicas_without_samples_are_told_what_would_help(batch: int, micro: int | None, said: str) -> None:
    plan = make_execution_plan(
        layout=parse_layout("ddp"),
        update=UpdateRule(),
        resources=Resources(ranks=2, device="cpu", cores=2),
        facts=JobFacts(global_batch_size=batch, micro_batch_size=micro, built_in_backends=("gloo",)),
    )
    (note,) = [note for note in plan.notes if "get no samples" in note]
    assert note.startswith("warning: 1 of 2 replicas") and note.endswith(said)
