"""A kill while several ranks write a checkpoint leaves the older one valid; the pieces have any shape."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint.files.checkpoint_folder import find_newest_usable, open_checkpoint, prune_checkpoints
from paceline.checkpoint.files.manifest import file_kind, rank_file, write_files, write_manifest
from paceline.checkpoint.files.resharding_reader import check_coverage
from paceline.checkpoint.files.safetensors_io import LazyTensor, TensorBytes, TensorEntry, write_tensors
from paceline.checkpoint.files.two_phase_commit import commit_checkpoint, create_staging_folder
from paceline.errors import CheckpointError
from tests.checkpoint.test_damaged_checkpoints import STATE

Shape = tuple[int, ...]


def cut(at: Shape, size: Shape, rng: random.Random) -> list[tuple[Shape, Shape]]:
    """A box in pieces that cover it, cut at random and again."""
    dims = [dim for dim, length in enumerate(size) if length > 1]
    if not dims or rng.random() < 0.25:
        return [(at, size)]
    dim = rng.choice(dims)
    here = rng.randrange(1, size[dim])
    left = tuple(here if d == dim else n for d, n in enumerate(size))
    right = tuple(n - here if d == dim else n for d, n in enumerate(size))
    moved = tuple(n + here if d == dim else n for d, n in enumerate(at))
    return [*cut(at, left, rng), *cut(moved, right, rng)]


def elements(at: Shape, size: Shape, whole: Shape) -> bytes:
    """Each element is its own number in the whole tensor, in row-major order, two bytes each."""
    found = [0]
    for begin_, length, extent in zip(at, size, whole, strict=True):
        found = [base * extent + begin_ + i for base in found for i in range(length)]
    return b"".join(number.to_bytes(2, "little") for number in found)


def ranks_write(folder: Path, *, step: int, whole: Shape, ranks: int, rng: random.Random) -> Path:
    """As ranks do it: one begins, each writes, one commits."""
    pieces: list[list[TensorBytes]] = [[] for _ in range(ranks)]
    for at, size in cut((0,) * len(whole), whole, rng):
        where = {} if size == whole else {"at": at, "whole": whole}
        data = memoryview(elements(at, size, whole))
        rng.choice(pieces).append(TensorBytes(name="a@b", dtype="I16", shape=size, data=data, **where))  # type: ignore[arg-type]
    files = [{rank_file("model.safetensors", rank): own} for rank, own in enumerate(pieces)]
    aside = create_staging_folder(folder, step=step, num_bytes=0)
    listed: dict[str, object] = {}
    for own in files:
        listed |= write_files(aside, own)
    write_manifest(aside, file_entries=listed, state={**STATE, "step": step}, step=step)  # type: ignore[arg-type]
    return commit_checkpoint(folder, aside, step=step)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=4), st.integers(1, 4), st.integers(0, 10_000))
def test_any_boxes_come_out_of_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], ranks: int, seed: int
) -> None:
    whole, rng = tuple(shape), random.Random(seed)
    path = ranks_write(tmp_path_factory.mktemp("run"), step=1, whole=whole, ranks=ranks, rng=rng)
    stored = open_checkpoint(path).files["model.safetensors"]
    start = (0,) * len(whole)
    assert bytes(stored["a@b"].data) == elements(start, whole, whole)
    for at, size in cut(start, whole, rng):
        assert bytes(stored.read_boxes("a@b", shape=size, boxes=[(at, start, size)]).data) == elements(at, size, whole)
    if whole:  # two boxes side by side, the second first, as of a fused projection
        boxes = cut(start, whole, rng)[:2]
        rows = [size[0] for _, size in boxes]
        if len(boxes) == 2 and boxes[0][1][1:] == boxes[1][1][1:]:
            asked = [(boxes[1][0], start, boxes[1][1]), (boxes[0][0], (rows[1], *start[1:]), boxes[0][1])]
            right = b"".join(elements(boxes[i][0], boxes[i][1], whole) for i in (1, 0))
            found = stored.read_boxes("a@b", shape=(sum(rows), *boxes[0][1][1:]), boxes=asked)
            assert bytes(found.data) == right


def test_files_of_ranks_are_told_from_others() -> None:
    assert rank_file("model.safetensors", 3) == "model.rank-0003.safetensors"
    assert file_kind("model.rank-0003.safetensors") == file_kind("model.rank-12345.safetensors") == "model.safetensors"
    assert file_kind("model.safetensors") == "model.safetensors"


@pytest.mark.parametrize(
    ("spans", "words"),
    [
        ([(0, 4), (4, 3)], "hold 14 of its 16"),
        ([(0, 5), (4, 4)], "overlaps another shard"),
        ([(0, 4), (5, 4)], "reaches beyond"),
        ([(0, 4), (0, 4)], "overlaps another shard"),
        ([(0, 8), (0, 8)], "overlaps another shard"),
    ],
)
def test_pieces_that_do_not_cover_a_tensor_once_are_refused(spans: list[tuple[int, int]], words: str) -> None:
    entries = [
        TensorEntry(name="w", dtype="F32", shape=(n, 2), at=(at, 0), whole=(8, 2), start=0, stop=8 * n, digest="")
        for at, n in spans
    ]
    with pytest.raises(CheckpointError, match=words):
        check_coverage("w", entries)


def test_a_kill_while_ranks_write_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    code = (
        "import random, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2])\n"
        "from tests.checkpoint.test_checkpoint_of_several_ranks import ranks_write\n"
        "step = int(sys.argv[3]); print('go', flush=True)\n"
        "while True:\n"
        "    ranks_write(Path(sys.argv[1]), step=step, whole=(40, 30), ranks=4, rng=random.Random(step)); step += 1\n"
    )
    root = str(Path(__file__).resolve().parents[2])
    rng, newest = random.Random(1), 1
    ranks_write(tmp_path, step=1, whole=(40, 30), ranks=4, rng=rng)
    interrupted = 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), root, str(newest + 1)], stdout=-1)
        assert process.stdout is not None and process.stdout.readline() == b"go\n"
        time.sleep(rng.random() * 0.03)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        path, refused = find_newest_usable(tmp_path)
        assert path is not None and all("interrupted" in each.reason for each in refused)
        interrupted += bool(refused)
        found = open_checkpoint(path)
        assert found.step >= newest and bytes(found.files["model.safetensors"]["a@b"].data) == elements(
            (0, 0), (40, 30), (40, 30)
        )
        newest = found.step
        prune_checkpoints(tmp_path, keep=3)
    assert interrupted


def test_a_missing_or_foreign_file_of_one_rank_is_named(tmp_path: Path) -> None:
    older = ranks_write(tmp_path, step=1, whole=(9, 4), ranks=3, rng=random.Random(3))
    path = ranks_write(tmp_path, step=2, whole=(9, 4), ranks=3, rng=random.Random(4))
    file = path / "model.rank-0002.safetensors"
    good = file.read_bytes()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model\.rank-0002\.safetensors is missing from step-00000002"):
        open_checkpoint(path)
    file.write_bytes((older / file.name).read_bytes())
    assert find_newest_usable(tmp_path)[0] == older
    file.write_bytes(good)
    assert find_newest_usable(tmp_path) == (path, [])


def test_of_tensors_that_are_made_later_one_is_there_at_a_time(tmp_path: Path) -> None:
    living, most = [0], [0]

    class Counted(bytearray):
        def __del__(self) -> None:
            living[0] -= 1

    def make() -> memoryview:
        living[0] += 1
        most[0] = max(most[0], living[0])
        return memoryview(Counted(1 << 17))

    tensors = [LazyTensor(name=f"t{i}", dtype="U8", shape=(1 << 17,), load_data=make) for i in range(6)]
    write_tensors(tmp_path / "x.safetensors", tensors)
    assert living[0] == 0 and most[0] <= 2  # the one that is written, and the next, which is made as it is let go of
