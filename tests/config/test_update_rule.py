"""The text of `--update` survives a round trip, or is refused with the line to type."""

import pytest
import torch

import paceline as pl
from paceline.cli import main
from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.update_rule import UpdateKind, parse_update
from paceline.errors import JobError, LayoutError, PacelineError, Problems
from paceline.planner.layout.update_rule_checks import rule_planning
from paceline.trainer.checks.check_job import check_job


@pytest.mark.parametrize(
    "text",
    [
        "local,every=1000000",
        "ps,staleness=3000000",
        "diloco,every=500,lr=0.12345678",
        "diloco,every=500,momentum=0.9999999",
        "diloco,every=500,mix=0.3333333333333333",
    ],
)
def test_no_digit_is_lost_on_the_way_to_a_rank(text: str) -> None:
    assert str(parse_update(text)) == text and parse_update(str(parse_update(text))) == parse_update(text)


def test_spaces_are_no_part_of_a_name() -> None:
    assert parse_update(" DiLoCo , every = 4, lr = 0.5 ") == parse_update("diloco,every=4,lr=0.5")


@pytest.mark.parametrize(
    ("text", "what", "cause", "hint"),
    [
        ("async", "is not an update rule", "did you mean 'sync'", "--update sync"),
        ("diloko", "is not an update rule", "did you mean 'diloco'", "--update diloco"),
        (
            "easgd",
            "is not an update rule",
            "the rules: sync, pipedream, 2bw, hogwild, local, diloco, ps",
            "--update sync",
        ),
        (
            "local,lr=0.7",
            "no option 'lr'",
            "it is an option of diloco; options of local: every",
            "--update diloco,lr=0.7",
        ),
        ("ps,stalenes=2", "no option 'stalenes'", "did you mean 'staleness'", "--update ps,staleness=2"),
        ("ps,stalenes=-2", "no option 'stalenes'", "did you mean 'staleness'", "--update ps,staleness=4"),
        ("diloco,dely=x", "no option 'dely'", "did you mean 'delay'", "--update diloco,delay=1"),
        ("ps,workers=2", "no option 'workers'", "its options: servers, staleness", "--update ps,servers=1"),
        ("pipedream,vertical=true", "vertical takes no value", "", "--update pipedream,vertical"),
        (
            "2bw,vertical",
            "no option 'vertical'",
            "it is an option of pipedream; options of 2bw: none",
            "--update pipedream,vertical",
        ),
        ("diloco,lr=1e9", "above 0, at most 1,000,000", "", "--update diloco,lr=0.7"),
    ],
)
def test_a_mistyped_rule_says_what_to_type(text: str, what: str, cause: str, hint: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_update(text)
    assert what in caught.value.what and cause in caught.value.cause and caught.value.hint == hint
    parse_update(caught.value.hint.removeprefix("--update "))


def test_every_rule_is_read_by_its_word_alone() -> None:
    assert [parse_update(kind).kind for kind in UpdateKind] == [*UpdateKind]


def refused(*words: str) -> PacelineError:
    """What the command says of these words, before any process starts."""
    common = {name.strip("-").replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    ranks = int(common.pop("ranks", "1"))
    with pytest.raises(PacelineError) as caught:
        make_task("train", "paceline.examples.text", RunOptions(ranks=ranks, **common), [])
    return caught.value


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("--update", "pipedream"), "--layout pp --ranks 2 --update pipedream"),
        (("--update", "2bw", "--layout", "pp"), "--layout pp --ranks 2 --update 2bw"),
        (("--update", "2bw", "--layout", "ddp", "--ranks", "3"), "--layout pp --ranks 3 --update 2bw"),
        (("--update", "local"), "--ranks 2 --update local,every=8"),
        (
            ("--update", "diloco,every=4", "--layout", "fsdp", "--ranks", "2"),
            "--layout dp_replicate=2,dp_shard=2 --ranks 4 --update diloco,every=4",
        ),
        (
            ("--update", "ps", "--layout", "dp=4", "--ranks", "4"),
            "--layout ddp --ranks 5 --update ps,staleness=4, or --layout dp_replicate=3",
        ),
    ],
)
def test_the_line_to_type_is_not_refused_again(words: tuple[str, ...], hint: str) -> None:
    assert refused(*words).hint == hint
    typed = hint.partition(", or ")[0].split()
    common = {name.strip("-"): value for name, value in zip(typed[::2], typed[1::2], strict=True)}
    make_task("train", "paceline.examples.text", RunOptions(ranks=int(common.pop("ranks")), **common), [])


def test_no_line_to_type_asks_for_a_pipeline_of_one_stage() -> None:
    error = refused("--update", "2bw", "--layout", "fsdp", "--ranks", "2")
    assert isinstance(error, Problems)
    assert [one.hint for one in error.problems] == [
        "--layout pp --ranks 2 --update 2bw",
        "--layout pp=2,dp_replicate=N --update 2bw, or --update sync",
    ]


def test_a_table_of_rows_is_sent_to_the_servers() -> None:
    job = pl.Job(
        model=lambda: torch.nn.Embedding(3, 2, sparse=True),
        train_data=[],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=4,
    )
    check_job(job, job.model(), takes_sparse=True)
    with pytest.raises(JobError) as caught:
        check_job(job, job.model())
    assert "only --update ps takes sparse" in caught.value.cause and "--update ps" in caught.value.hint


def test_a_rank_that_serves_is_told() -> None:
    error = refused("--update", "ps", "--layout", "dp=4", "--ranks", "4")
    assert error.what == "dp_replicate=4 needs 4 workers, you have 3: of 4 ranks 1 is a server."
    assert refused("--update", "ps").cause == "the first rank holds the parameters, the others compute gradients"


def test_the_replicas_that_are_asked_for_are_workers_and_servers_come_beside_them() -> None:
    task = make_task("train", "paceline.examples.text", RunOptions(layout="dp=4", update="ps,servers=2"), [])
    job = pl.Job(
        model=lambda: torch.nn.Linear(2, 1),
        train_data=[],
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        global_batch_size=4,
    )
    assert task.ranks == pl.Run(job, layout="dp=4", update="ps,servers=2")._task.ranks == 6


def test_an_update_rule_is_no_layout() -> None:
    error = refused("--layout", "diloco,every=4", "--ranks", "2")
    assert (error.cause, error.hint) == ("it is an update rule", "--update diloco,every=4")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["train", "job.py", "--staleness", "4"], "--update ps,staleness=4"),
        (["train", "job.py", "--every=16"], "--update local,every=16"),
        (["train", "job.py", "--hogwild"], "--update hogwild"),
        (["train", "job.py", "--ratio", "0.1"], "--compress topk,ratio=0.1"),
        (["verify", "job.py", "--topk"], "--compress topk"),
        (["compare", "job.py", "--layouts", "ddp", "pp", "--updates", "sync"], "paceline compare RUN RUN"),
    ],
)
def test_an_option_of_a_rule_stands_behind_its_word(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err


def test_a_run_that_is_over_before_its_sites_meet_is_told_so() -> None:
    def told(text: str, total: int | None) -> str:
        update = parse_update(text)
        return "".join(rule_planning(update).length_notes(update, total_steps=total))

    assert told("diloco,lr=0.5", 200).endswith("they do so every 500 updates; --update diloco,every=20,lr=0.5")
    assert told("diloco,fragments=4,delay=1", 9).endswith("--update diloco,every=4,fragments=4,delay=1")
    assert told("local", 8) == told("diloco", None) == told("diloco", 500) == told("sync", 3) == ""
