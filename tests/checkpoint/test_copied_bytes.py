"""A tensor that is copied into memory has the bytes that it has in a file."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.files.memory_slots import MemorySlots
from paceline.checkpoint.files.safetensors_io import Writable, sha256_digest
from paceline.checkpoint.tensor_bytes import DTYPES, lazy_tensor, to_bytes

TENSORS: dict[str, Tensor] = {
    **{f"{name}": torch.arange(12).reshape(3, 4).to(dtype) for name, dtype in DTYPES.items()},
    "empty": torch.empty(0, 3),
    "number": torch.tensor(3.5),
    "column": torch.arange(12.0).reshape(3, 4)[:, 1],
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "parameter": torch.nn.Parameter(torch.ones(5)),
}


def lazy(name: str, tensor: Tensor) -> Writable:
    return lazy_tensor(name, dtype=tensor.dtype, shape=tuple(tensor.shape), get_tensor=lambda: tensor)


@pytest.mark.parametrize("name", TENSORS)
def test_a_copy_has_the_bytes_of_the_tensor(name: str) -> None:
    tensor = TENSORS[name]
    for writable in (lazy(name, tensor), to_bytes(name, tensor)):
        target = bytearray(b"x" * writable.num_bytes)
        with memoryview(target) as view:
            writable.copy_into(view)
        assert bytes(target) == bytes(to_bytes(name, tensor).data) == bytes(writable.data)


def test_memory_of_another_size_is_not_filled() -> None:
    with pytest.raises(ValueError, match="1 bytes for 4 bytes"):
        lazy("flag", torch.tensor(True)).copy_into(memoryview(bytearray(4)))


def test_the_layout_of_a_file_follows_its_tensors(tmp_path: Path) -> None:
    slots = MemorySlots(tmp_path / "slots")
    shapes: list[list[int]] = []
    for number, size in enumerate((4, 4, 6)):
        staging = tmp_path / str(number)
        staging.mkdir()
        tensor = torch.full((size,), float(number))
        written = slots.write(staging, {"model": [lazy("weight", tensor)]})["model"]
        (entry,) = written.with_digests()["tensors"]
        shapes.append(list(entry["shape"]))
        assert entry["digest"] == sha256_digest(to_bytes("weight", tensor).data)
    assert shapes == [[4], [4], [6]]
