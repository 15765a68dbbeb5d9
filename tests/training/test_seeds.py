"""Seeds of a run: initial weights and the validation split."""

import torch

from tests.training.helpers import assert_bit_equal, different_tensors, small_spec
from torchcaps.data import Dataset
from torchcaps.training.setup import build_network, open_data


def pixels(dataset: Dataset) -> set[bytes]:
    images = dataset.get_batch(torch.arange(len(dataset))).images
    return {image.numpy().tobytes() for image in images}


def test_seed_determines_initial_weights() -> None:
    first, again, other = (dict(build_network(small_spec(seed=seed)).state_dict()) for seed in (0, 0, 1))
    assert_bit_equal(again, first)
    assert different_tensors(other, first) != []


def test_validation_and_training_images_are_disjoint_and_depend_on_the_seed() -> None:
    all_images = pixels(open_data(small_spec()).train)
    assert len(all_images) == 70  # all images differ, so that pixels identify them
    validation_sets = []
    for seed in (0, 0, 1):
        data = open_data(small_spec(val_fraction=0.3, seed=seed))
        assert data.val is not None
        train, val = pixels(data.train), pixels(data.val)
        assert len(val) == 21
        assert train & val == set()
        assert train | val == all_images
        validation_sets.append(val)
    assert validation_sets[0] == validation_sets[1]
    assert validation_sets[0] != validation_sets[2]
