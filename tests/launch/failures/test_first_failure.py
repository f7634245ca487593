"""The first failure is found from the records of the ranks."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.agent.rank_activity import ActivityReporter, activity_path
from paceline.launch.agent.restart_policy import has_external_cause
from paceline.launch.failures.failure_record import Failure, failure_from_status, read_failure, write_failure
from paceline.launch.failures.first_failure import exit_code, first_failure
from paceline.launch.failures.stuck_rank import SilentRank, hang_failure, mutual_wait_failure

MS = 1_000_000


def failure(rank: int, kind: str, at_ms: float, message: str = "") -> Failure:
    return Failure(rank=rank, kind=kind, message=message, monotonic_ns=int(at_ms * MS) + 10**12)


LOST = "Connection closed by peer [127.0.0.1]:4711"
TABLE = {
    "one": ([failure(2, "ValueError", 5)], 2),
    "the earlier of two": ([failure(0, "ValueError", 9), failure(1, "KeyError", 5)], 1),
    "an echo came first": ([failure(0, "RuntimeError", 1, LOST), failure(1, "KeyError", 5)], 1),
    "a kill is noticed late": ([failure(0, "ValueError", 5), failure(1, "signal", 40)], 1),
    "a kill long after": ([failure(0, "ValueError", 5), failure(1, "signal", 90)], 0),
    "a kill and its echoes": (
        [failure(0, "RuntimeError", 1, LOST), failure(2, "DistNetworkError", 2), failure(1, "signal", 30)],
        1,
    ),
    "only echoes": ([failure(3, "RuntimeError", 7, LOST), failure(1, "DistBackendError", 3)], 1),
    "an exit beside an echo": ([failure(0, "DistStoreError", 1), failure(1, "exit", 9)], 1),
    "a RuntimeError of the user's own": (
        [failure(0, "RuntimeError", 9, LOST), failure(1, "RuntimeError", 12, "boom")],
        1,
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_first_is_named(name: str) -> None:
    failures, rank = TABLE[name]
    for order in (failures, failures[::-1]):
        found = first_failure(order)
        assert found is not None and found.rank == rank


@pytest.mark.parametrize("others", [(), (1,), (1, 2)])
def test_a_loss_that_is_not_finite_is_that_of_the_rank_that_computed_it(others: tuple[int, ...]) -> None:
    """All ranks raise it in the same step; the record of the rank at fault may come later, or not at all."""
    said = {"ranks": [1, 2]}
    heard = [replace(failure(rank, "NonFiniteError", 5 + rank), said=said) for rank in (0, *others)]
    found = first_failure(heard)
    assert found is not None and (found.rank, found.kind) == (1, "NonFiniteError")
    assert found.told_by == (None if others else 0)
    echo = first_failure([heard[0], failure(1, "RuntimeError", 9, LOST)])
    assert echo is not None and (echo.rank, echo.kind, echo.told_by) == (1, "NonFiniteError", 0)
    own = first_failure([replace(failure(2, "NonFiniteError", 1), said=said), *heard])
    assert own is not None and own.rank == 2


CLOSED = "[pair.cc:460] Application timeout caused pair closure"
LATE = "[unbound_buffer.cc:84] Timed out waiting 4000ms for recv operation to complete"


def test_who_waited_in_vain_names_the_silent_rank_and_how_long_it_waited() -> None:
    """One of two exchanges that run at once times out, and closes the connection under the other."""
    silent = SilentRank(rank=1, pid=4711, step=20, seconds=5.0, state="T")
    for words in ((LOST, CLOSED, LATE), (CLOSED, LATE, LOST), (LATE, LOST, CLOSED)):
        heard = [failure(rank, "RuntimeError", rank, text) for rank, text in zip((0, 2, 3), words, strict=True)]
        first = first_failure(heard)
        assert first is not None and first.is_lost_connection
        found = hang_failure(heard, [silent])
        assert found.told_by == (0, 2, 3)[words.index(LATE)] and found.rank == 1 and found.step == 21
        assert found.message.startswith("no answer from rank 1 within 4 s: nothing from it since step 20"), found
        assert "--train.timeout_seconds 8" in found.screen
    nobody_says = hang_failure([failure(0, "RuntimeError", 0, LOST), failure(2, "RuntimeError", 1, CLOSED)], [silent])
    assert nobody_says.message.startswith("no answer from rank 1: nothing") and nobody_says.told_by == 2


def test_nothing_failed() -> None:
    assert first_failure([]) is None
    assert exit_code({0: 0, 1: 0}, None) == 0
    assert exit_code({0: 75, 1: 75}, None) == 75
    assert exit_code({0: 75, 1: 0}, None) == 75  # as with a server, whose workers end with 0
    assert exit_code({}, None) == 0


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [(Mute(), "is not available"), (ValueError("x" * 10**6), "xxx ..."), (ValueError("a\n" * 500), "492 more lines")],
)
def test_any_exception_can_be_written_down(tmp_path: Path, error: Exception, text: str) -> None:
    write_failure(tmp_path, rank=1, error=error)
    found = read_failure(tmp_path, 1)
    assert found is not None and text in found.message and len(found.message) < 5000


def test_a_folder_that_can_not_be_written_hides_nothing(tmp_path: Path) -> None:
    write_failure(tmp_path / "gone", rank=1, error=ValueError("x"))
    assert read_failure(tmp_path / "gone", 1) is None


def test_a_torn_file_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "failure-0.json").write_text('{"rank": 0, "kin')
    assert read_failure(tmp_path, 0) is None


def test_signals_are_told_by_name() -> None:
    assert (
        "SIGKILL" in failure_from_status(0, status=-9).message and "memory" in failure_from_status(0, status=-9).message
    )
    assert failure_from_status(0, status=-64).kind == "signal" and failure_from_status(0, status=3).kind == "exit"


def test_a_rank_that_gave_up_in_native_code_is_explained() -> None:
    assert "ranks do different things" in failure_from_status(1, status=-int(signal.SIGABRT)).message


def test_a_lost_connection_is_said_in_words() -> None:
    """The text of gloo names a source file, an address and a joke."""
    text = "[/x/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error: Software caused connection abort. GLHF!"
    lost = replace(failure(1, "RuntimeError", 1, text), step=19)
    assert lost.summary == "rank 1 lost the connection to another rank at step 19"
    assert replace(lost, is_users_own=True).summary.startswith("rank 1 failed at step 19: RuntimeError: ")


FOURTH = "all_reduce of [8] float, number 4 in its group"


@pytest.mark.parametrize(
    ("exchanges", "kind"),
    [
        ((FOURTH, FOURTH), "connection"),
        ((FOURTH, "barrier, number 4 in its group"), "apart"),
        ((FOURTH, None), "apart"),
        ((None, None), "apart"),
    ],
)
def test_ranks_that_wait_in_the_same_exchange_have_lost_the_network_and_not_their_way(
    tmp_path: Path, exchanges: tuple[str | None, str | None], kind: str
) -> None:
    for rank, exchange in enumerate(exchanges):
        reporter = ActivityReporter()
        reporter._unfinished = (exchange,) if exchange else ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reporter, "_update_unfinished", lambda _: None)
            reporter.start(activity_path(tmp_path, rank))
        reporter.stop()
    timeout = "gloo: Timed out waiting 15000ms for recv operation to complete"
    failures = [replace(failure(rank, "RuntimeError", 1, timeout), step=17) for rank in (0, 1)]
    found = mutual_wait_failure(failures, folder=tmp_path)
    assert found.kind == kind and has_external_cause(found) == (kind == "connection")
    if kind == "connection":
        assert found.summary == f"all ranks waited for each other in the same {FOURTH}, for 15 s at step 17"
        assert "to do: check the connection between these ranks" in found.screen


def test_a_first_error_that_only_looks_like_a_lost_connection_keeps_its_message() -> None:
    found = failure(1, "DistBackendError", 1, "NCCL error: Duplicate GPU detected")
    assert found.summary == "rank 1 failed: DistBackendError: NCCL error: Duplicate GPU detected"
