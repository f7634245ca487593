"""Checkpoints written in shards of any shape load on ranks with other shards."""

import json
import random
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.checkpoint import collective_write as phases
from paceline.checkpoint.collective_write import write_checkpoint
from paceline.checkpoint.consolidate import consolidate_weights
from paceline.checkpoint.files.checkpoint_folder import check_checkpoint, find_newest_usable, open_checkpoint
from paceline.checkpoint.files.resharding_reader import StoredShard
from paceline.checkpoint.files.safetensors_io import TensorBytes
from paceline.checkpoint.state_dict_view import view_state_dict
from paceline.checkpoint.state_outside_state_dict import state_dict_tensors
from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.checkpoint.train_state import MODEL, collect_files, load_model, load_update
from paceline.comm.process_group import World
from paceline.commands import ckpt
from paceline.errors import CheckpointError, SaveError
from paceline.parallel.module_access.shard_spec import ShardSpec
from tests.checkpoint.random_shard_ranks import Cuts, Model, Truth, check, cuts, hollow, play, rank_of, truth
from tests.checkpoint.test_damaged_checkpoints import STATE

FOUND = truth()
SAME = {"optimizer": [{"options": [{}, {}]}], "schedule": []}


def pair(ranks: int, seed: int, *, whole: bool = False) -> tuple[Cuts, Cuts]:
    rng = random.Random(seed)
    return tuple(cuts(FOUND.model, ranks=ranks, rng=rng, whole=whole) for _ in range(2))  # type: ignore[return-value]


def save(folder: Path, held: tuple[Cuts, Cuts], ranks: int, *, step: int = 5, found: Truth = FOUND) -> Path:
    def work(world: World) -> Path:
        made = rank_of(found, weights=held[0], kept=held[1], world=world)
        files, state = collect_files(made)
        return write_checkpoint(world, folder=folder, step=step, files=files, state={**STATE, **state})

    paths = play(ranks, work)
    assert len(set(paths)) == 1
    return paths[0]


def resume(path: Path, held: tuple[Cuts, Cuts], ranks: int) -> None:
    loaded = open_checkpoint(path)

    def work(world: World) -> None:
        made = hollow(weights=held[0], kept=held[1], world=world)
        load_model(loaded, made)
        load_update(loaded, made, saved_identity=SAME, current_identity=SAME)
        check(made, FOUND)

    play(ranks, work)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_saved_under_any_cut_loads_under_any_other(a: int, b: int, seed: int, whole_a: bool, whole_b: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder), pair(a, seed, whole=whole_a), a)
        check_checkpoint(path)
        resume(path, pair(b, seed + 1, whole=whole_b), b)


def test_where_ranks_hold_everything_the_files_are_those_of_one_rank(tmp_path: Path) -> None:
    one = save(tmp_path / "one", pair(1, 0, whole=True), 1)
    three = save(tmp_path / "three", pair(3, 0, whole=True), 3)
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in three.iterdir())
    assert all((one / name).read_bytes() == (three / name).read_bytes() for name in names if name != "manifest.json")
    body = json.loads(json.loads((three / "manifest.json").read_text())["body"])
    assert body["format"] == "paceline-checkpoint-1"
    entries = [entry for file in body["files"].values() for entry in file["tensors"]]
    assert all(set(entry) == {"name", "dtype", "shape", "start", "stop", "digest"} for entry in entries)


def test_a_piece_is_named_so_that_nobody_takes_it_for_the_tensor(tmp_path: Path) -> None:
    from safetensors import safe_open

    held = pair(2, 0, whole=True)
    held[0]["blocks.0.fused.weight"] = [
        ShardSpec.from_ranges((18, 6), dim=1, ranges=[(3 * r, 3 * r + 3)]) for r in range(2)
    ]  # type: ignore[index]
    path = save(tmp_path, held, 2)
    with safe_open(path / "model.rank-0001.safetensors", "pt") as file:
        assert file.keys() == ["blocks.0.fused.weight@0.3"]
        right = FOUND.model.get_parameter("blocks.0.fused.weight")[:, 3:]
        assert torch.equal(file.get_tensor("blocks.0.fused.weight@0.3"), right)
    assert (path / "optimizer.safetensors").exists()


def test_every_flipped_bit_is_refused_by_every_rank(tmp_path: Path) -> None:
    path = save(tmp_path, pair(3, 4), 3)
    rng = random.Random(1)
    for file in sorted(path.glob("*.safetensors")):
        good = file.read_bytes()
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        file.write_bytes(bad)
        with pytest.raises(CheckpointError, match="differs from what was written"):
            check_checkpoint(path)
        assert find_newest_usable(tmp_path)[0] is None
        with pytest.raises(CheckpointError, match="differs from what was written"):
            resume(path, pair(2, 9), 2)
        file.write_bytes(good)
    resume(path, pair(2, 9), 2)


def test_a_bit_that_one_rank_reads_is_refused_by_all(tmp_path: Path) -> None:
    held = pair(2, 0, whole=True)
    rows = [ShardSpec.from_ranges((18, 6), dim=0, ranges=[(9 * r, 9 * r + 9)]) for r in range(2)]
    held[0]["blocks.0.fused.weight"] = rows  # type: ignore[index]
    path = save(tmp_path, held, 2)
    file = path / "model.rank-0001.safetensors"
    bad = bytearray(file.read_bytes())
    bad[-1] ^= 1
    file.write_bytes(bad)
    loaded = open_checkpoint(path)

    def work(world: World) -> str:
        made = hollow(weights=held[0], kept=held[1], world=world)
        try:
            load_model(loaded, made)
        except CheckpointError as error:
            return f"{error.what} {error.where}"
        return "loaded"

    said = play(2, work)
    assert all("fused.weight@9.0 in model.rank-0001" in text for text in said) and "(rank 1)" in said[0]


@pytest.mark.parametrize(
    ("rows", "words"), [((0, 8, 9), "hold 102 of its 108"), ((0, 10, 9), "overlaps another shard")]
)
def test_a_layout_that_loses_or_repeats_an_element_is_refused(
    tmp_path: Path, rows: tuple[int, ...], words: str
) -> None:
    older = save(tmp_path, pair(2, 0, whole=True), 2)
    held = pair(2, 0, whole=True)
    start, stop, other = rows
    held[0]["blocks.0.fused.weight"] = [  # type: ignore[index]
        ShardSpec.from_ranges((18, 6), dim=0, ranges=[(start, stop)]),
        ShardSpec.from_ranges((18, 6), dim=0, ranges=[(other, 18)]),
    ]
    with pytest.raises(CheckpointError, match=words) as caught:
        save(tmp_path, held, 2, step=6)
    assert "blocks.0.fused.weight" in caught.value.what and "model.safetensors" in caught.value.where
    assert find_newest_usable(tmp_path) == (older, [])


def test_what_one_rank_cannot_write_no_rank_has_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older = save(tmp_path, pair(3, 2), 3)
    real = phases.write_files

    def full(aside: Path, files: object) -> object:
        if any("rank-0002" in name for name in files):  # type: ignore[attr-defined]
            raise OSError(28, "No space left on device")
        return real(aside, files)  # type: ignore[arg-type]

    monkeypatch.setattr(phases, "write_files", full)
    held = pair(3, 2)

    def work(world: World) -> str:
        files, state = collect_files(rank_of(FOUND, weights=held[0], kept=held[1], world=world))
        try:
            write_checkpoint(world, folder=tmp_path, step=6, files=files, state={**STATE, **state})
        except SaveError as error:
            return error.what
        return "saved"

    said = play(3, work)
    assert said == ["the shards of rank 2 could not be written: No space left on device."] * 3
    assert find_newest_usable(tmp_path) == (older, []) and not list(tmp_path.glob(".saving-*"))


def test_free_space_is_asked_for_what_all_ranks_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from paceline.filesystem import disk_full

    monkeypatch.setattr(disk_full, "_SPARE_BYTES", 0)
    held = pair(2, 0)
    stored = open_checkpoint(save(tmp_path / "a", held, 2)).files.values()
    needed = sum(piece.entry.num_bytes for each in stored for name in each for piece in each.shards(name))
    monkeypatch.setattr(disk_full, "free_bytes", lambda folder: needed)
    save(tmp_path / "b", held, 2)
    monkeypatch.setattr(disk_full, "free_bytes", lambda folder: needed - 1)
    with pytest.raises(SaveError, match=r"a checkpoint needs \S+ \S+ and \S+ \S+ to spare, .* are free"):
        save(tmp_path / "c", held, 2)
    assert find_newest_usable(tmp_path / "c")[0] is None


def test_a_rank_reads_only_the_pieces_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = pair(3, 0, whole=True)
    rows = [ShardSpec.from_ranges((18, 6), dim=0, ranges=[(6 * r, 6 * r + 6)]) for r in range(3)]
    held[0]["blocks.0.fused.weight"] = rows  # type: ignore[index]
    loaded = open_checkpoint(save(tmp_path, held, 3))
    read: list[str] = []
    real = StoredShard.read

    def note(self: StoredShard) -> TensorBytes:
        read.append(self.entry.key)
        return real(self)

    monkeypatch.setattr(StoredShard, "read", note)
    stored = loaded.files[MODEL]
    assert not read
    stored.read_boxes("blocks.0.fused.weight", shape=(4, 6), boxes=[((7, 0), (0, 0), (4, 6))])
    assert read == ["blocks.0.fused.weight@6.0"]


def test_the_consolidated_folder_and_the_digest_are_the_whole_models(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    wanted = state_dict_tensors(FOUND.model)
    right = weights_digest((name, wanted[name]) for name in sorted(wanted))
    for seed, ranks in ((0, 1), (1, 2), (2, 3), (3, 4)):
        held = pair(ranks, seed)
        folder = tmp_path / str(ranks)

        def work(world: World, held: tuple[Cuts, Cuts] = held, folder: Path = folder) -> str:
            made = rank_of(FOUND, weights=held[0], kept=held[1], world=world)
            listing = view_state_dict(made.model, weights=made.weights, world=world)
            consolidate_weights(listing, folder, config=None, world=world, max_bytes=600)
            return weights_digest(listing.full_tensors(sorted(listing.entries)))

        assert play(ranks, work) == [right] * ranks
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(wanted)
        assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in wanted.values())
        for name, file in index["weight_map"].items():
            assert torch.equal(load_file(folder / file)[name], wanted[name]), name


def test_a_disk_that_fills_up_while_it_is_consolidated_hangs_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from paceline.checkpoint.files import hf_folder as export

    real, calls = export.write_tensors, []

    def full(path: Path, tensors: object) -> object:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(path, tensors)  # type: ignore[arg-type]

    monkeypatch.setattr(export, "write_tensors", full)
    held = pair(3, 5)

    def work(world: World) -> str:
        made = rank_of(FOUND, weights=held[0], kept=held[1], world=world)
        listing = view_state_dict(made.model, weights=made.weights, world=world)
        try:
            consolidate_weights(listing, tmp_path / "out", config=None, world=world, max_bytes=600)
        except SaveError as error:
            return error.what
        return "written"

    assert play(3, work) == ["the consolidated weights could not be written: No space left on device."] * 3
    assert not list(tmp_path.iterdir())


def test_ckpt_reads_what_ranks_wrote(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = tmp_path / "run"
    first = save(run / "checkpoints", pair(3, 6), 3)
    second = save(run / "checkpoints", pair(2, 7), 2, step=6)
    assert all(row.good for row in ckpt.describe_checkpoints(str(run))) and ckpt.verify_checkpoint(str(run)).step == 6
    assert ckpt.diff_checkpoints(str(first), str(second)).is_empty
    made = ckpt.consolidate(str(first), to=tmp_path / "raw", raw=True)
    assert made.step == 5
    whole = state_dict_tensors(FOUND.model)
    for name, tensor in load_file(tmp_path / "raw" / "model.safetensors").items():
        assert torch.equal(tensor, whole.pop(name))
    assert not whole
    ckpt.consolidate(str(second), to=tmp_path / "average")
    found = load_file(tmp_path / "average" / "model.safetensors")
    assert torch.equal(found["head.weight"], FOUND.averages["embed.weight"])
    assert torch.equal(found["blocks.1.mean"], FOUND.model.get_buffer("blocks.1.mean"))


def test_ckpt_diff_names_what_is_not_the_same(tmp_path: Path) -> None:
    other = truth()
    with torch.no_grad():
        other.model.get_parameter("blocks.1.fused.bias")[17] += 1
    run = tmp_path / "run"
    first = save(run / "checkpoints", pair(3, 6), 3)
    second = save(run / "checkpoints", pair(2, 8), 2, step=6, found=other)
    found = ckpt.diff_checkpoints(str(first), str(second))
    assert found.tensors == {"model.safetensors": ["blocks.1.fused.bias"]} and not found.only
    assert "1 tensor differs: blocks.1.fused.bias" in ckpt.summarize_differences(found)
    gone = ckpt.prune(str(run), keep=1)
    assert gone == [first] and find_newest_usable(run / "checkpoints")[0] == second


def test_another_model_is_told_in_words_on_every_rank(tmp_path: Path) -> None:
    path = save(tmp_path, pair(2, 0), 2)
    wider = Model(width=8)
    held = [cuts(wider, ranks=3, rng=random.Random(0)) for _ in range(2)]

    def work(world: World) -> str:
        try:
            load_model(open_checkpoint(path), hollow(weights=held[0], kept=held[1], world=world, model=Model(width=8)))
        except CheckpointError as error:
            return f"{error.what} {error.cause}"
        return "loaded"

    said = play(3, work)
    assert all("embed.weight, head.weight differ" in text for text in said)
    assert all("float32[11, 6] in the checkpoint and float32[11, 8] in the model" in text for text in said)
