"""The real `datasets.IterableDataset`: the same protocol, with its own shuffle buffer and state."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.data.stream_replicas import joined, read_together

datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed: pip install datasets")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.parametrize("kind", ["arrow", "generator", "shuffled", "interleaved"]),
]
STEPS, BATCH, MICRO = 60, 12, 4


def rows(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        for number in range(60 + 5 * (shard % 4)):
            yield {"a": 1000 * shard + number}


def dataset(kind: str) -> Any:
    datasets.logging.set_verbosity_error()
    if kind == "arrow":
        table = datasets.Dataset.from_dict({"a": list(range(700))}).to_iterable_dataset(num_shards=5)
        return table.map(lambda row: {"a": row["a"] * 3}).filter(lambda row: row["a"] % 4 != 0).with_format("torch")
    plain = datasets.IterableDataset.from_generator(rows, gen_kwargs={"shards": list(range(7))})
    if kind == "interleaved":
        return datasets.interleave_datasets([plain, plain.map(lambda row: {"a": -row["a"]})])
    return plain.shuffle(seed=1, buffer_size=10) if kind == "shuffled" else plain


def numbers(found: list[Any]) -> torch.Tensor:
    return torch.tensor([int(row["a"]) for row in found])


@pytest.fixture
def make(kind: str) -> Callable[[], Any]:
    return lambda: dataset(kind)


def test_replicas_workers_and_resumes_change_nothing(kind: str, make: Callable[[], Any]) -> None:
    alone = read_together(make, replicas=1, steps=STEPS, batch=BATCH, micro=MICRO, collate=numbers)
    assert any("virtual shards" in note for note in alone[0].notes)
    whole, said = joined(alone), ""
    again = read_together(make, replicas=2, steps=STEPS, batch=BATCH, micro=MICRO, workers=2, collate=numbers)
    assert joined(again) == whole
    for stop, before, after in ((25, 2, 3), (33, 3, 1)):
        first = read_together(make, replicas=before, steps=stop, batch=BATCH, micro=MICRO, collate=numbers)
        state = json.loads(json.dumps(first[0].state))
        rest = read_together(
            make, replicas=after, steps=STEPS - stop, batch=BATCH, micro=MICRO, collate=numbers,
            cursor=first[0].cursor, state=state,
        )  # fmt: skip
        assert joined(rest) == {place: row for place, row in whole.items() if place[0] > stop}
        said += " ".join(note for told in rest for note in told.notes)
    assert ("shuffle buffer" in said) == (kind == "shuffled")


def test_an_epoch_holds_every_sample_once(kind: str, make: Callable[[], Any]) -> None:
    found = joined(
        read_together(make, replicas=2, steps=80, batch=BATCH, micro=MICRO, drop_last=False, collate=numbers)
    )
    place = {step for (step, _), (positions, _) in found.items() if 0 in positions}
    first = sorted(v for (step, _), (_, values) in found.items() if step < sorted(place)[1] for v in values)
    shards = [make().shard(num_shards=make().num_shards, index=k) for k in range(make().num_shards)]
    assert first == sorted(int(row["a"]) for shard in shards for row in shard)
    if kind != "interleaved":  # which ends with its first exhausted part, in each shard anew
        assert first == sorted(int(row["a"]) for row in make())
