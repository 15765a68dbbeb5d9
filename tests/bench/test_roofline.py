"""Counted bytes and operations of layers, and the table in docs/gpu.md."""

from pathlib import Path

import pytest

from tests.sampling import sample
from torchcaps.bench.cases import LAYER_CASES
from torchcaps.bench.roofline import GPUS, PATHS, Gpu, Traffic, count_traffic, roofline_rows, roofline_table

DOCS = Path(__file__).parents[2] / "docs/gpu.md"


def test_an_operation_takes_the_longer_of_its_bytes_and_flops() -> None:
    traffic = Traffic([(100, 10), (10, 400)])
    assert (traffic.n_bytes, traffic.flops) == (110, 410)
    assert traffic.seconds(Gpu(bandwidth=10, throughput=100)) == 100 / 10 + 400 / 100


@pytest.mark.parametrize("name", sample(LAYER_CASES, 1, seed=1))
def test_documented_numbers_are_those_of_the_layers(name: str) -> None:
    counted = {path: count_traffic(name, path) for path in PATHS}
    assert counted["Triton kernels"].n_bytes < 0.1 * counted["stored votes"].n_bytes
    rows = [row for row in roofline_rows(lambda case, path: counted[path]) if row["case"] == name]
    for line in roofline_table(rows).splitlines():
        assert line in DOCS.read_text()
    assert {gpu for row in rows for gpu in row["seconds"]} == set(GPUS)
