"""The memory traffic that a compiler leaves of a block, on chains whose bytes are counted by hand."""

import torch

from paceline.profiling.model_tracing.compile_fusion import Fusion

KIB = 256  # elements of float32


def test_a_chain_reads_and_writes_once() -> None:
    x, a, b, c = (torch.zeros(KIB) for _ in range(4))
    found = Fusion()
    assert found.add_operation([x], [a]) == 1024  # read
    assert found.add_operation([a, x], [b]) == 0  # both are in registers
    assert found.add_operation([b], [c]) == 0
    assert found.add_matmul([c], [torch.zeros(KIB)]) == 1024  # written
    assert found.end_chain([a, b, c]) == 2048  # somebody wants the others: c is there already


def test_what_is_used_behind_a_product_is_written_and_read_again() -> None:
    x, normed, product, total = (torch.zeros(KIB) for _ in range(4))
    found = Fusion()
    assert found.add_operation([x], [normed]) == 1024
    assert found.add_matmul([normed], [product]) == 1024
    assert found.add_operation([product, x], [total]) == 2048  # a product's result is there, and x once more
    assert found.add_operation([normed], [torch.zeros(KIB)]) == 1024  # it was written for the product
    assert found.end_chain([total]) == 1024


def test_a_number_that_many_rows_share_is_read_once() -> None:
    scale = torch.zeros(8)
    assert Fusion().add_operation([scale.expand(100, 8)], []) == 8 * 4


def test_views_and_writes_in_place_are_one_memory() -> None:
    x, made = torch.zeros(KIB), torch.zeros(KIB)
    found = Fusion()
    assert found.add_operation([x], [made]) == 1024
    assert found.add_operation([made.view(2, -1)], [made]) == 0
    assert found.add_matmul([made[:4]], []) == 1024
    assert found.add_matmul([made], []) == 0
