"""Parameter counts: published figures, counts rebuilt from the papers' tables, and those of the built modules.

`test_registered_counts` covers every registered model: its exact count, and the figure that the paper prints, are
literals in its registration. The table below has variants: other figures that a paper prints for the same network, and
readings of a paper that do not give its figure.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch

import torchcaps
from tests.models.narrow import EVERY, narrow
from tests.tolerances import assert_equal
from torchcaps.capsules import Capsules
from torchcaps.models import Network
from torchcaps.models.registry import MODELS
from torchcaps.routing import InvertedAttention


class Variant(NamedTuple):
    """A model with other field values, the printed figure, and the count rebuilt from the paper's tables."""

    name: str
    changes: dict[str, Any]
    published: str
    rebuilt: int
    rule: str = "rounded"  # "rounded", "truncated", "unmatched"; "" if nothing is printed
    keras: bool = False  # with the moving averages of batch normalisation, as Keras counts


NO_DECODER = {"reconstruction": False}
VARIANTS = [
    # Sabour 2017
    Variant("sabour2017_mnist", NO_DECODER, "6.8M", 6_804_224),
    Variant("sabour2017_mnist", NO_DECODER | {"preset": "official"}, "6.8M", 6_804_384),
    Variant("sabour2017_mnist", {"preset": "official"}, "8.2M", 8_215_728),
    Variant("sabour2017_multimnist", NO_DECODER, "11.36M", 9_425_664, "unmatched"),
    Variant("sabour2017_cnn_mnist", {"padding": "valid"}, "35.4M", 13_277_970, "unmatched"),
    Variant("sabour2017_cnn_multimnist", {"preset": "official"}, "24.56M", 24_535_306, "unmatched"),
    Variant("sabour2017_cifar10", {"padding": "valid"}, "", 11_990_528, ""),
    # Choi 2019
    Variant("choi2019_mnist", NO_DECODER, "", 4_483_584, "", keras=True),
    Variant("choi2019_cifar10", {"depth": 0, "dim": 16}, "7.3M", 7_293_408, keras=True),
    Variant("choi2019_cifar10", {"depth": 0, "dim": 32}, "12.6M", 12_637_568, keras=True),
    Variant("choi2019_cifar10", {"depth": 1, "dim": 16}, "3.5M", 3_520_096, keras=True),
    Variant("choi2019_cifar10", {"depth": 1, "dim": 32}, "7.7M", 7_716_480, keras=True),
    Variant("choi2019_cifar10", {"depth": 2, "dim": 16}, "3.7M", 3_678_944, keras=True),
    Variant("choi2019_cifar10", {"depth": 2, "dim": 32}, "8.4M", 8_333_184, "unmatched", keras=True),
    Variant("choi2019_cifar10", {"depth": 3, "dim": 16}, "3.8M", 3_837_792, keras=True),
    Variant("choi2019_cifar10", {"depth": 3, "dim": 32}, "8.9M", 8_949_888, keras=True),
    Variant("choi2019_cifar10", {"depth": 4, "dim": 16}, "4.0M", 3_996_640, keras=True),
    Variant("sabour2017_mnist", {"image": (3, 32, 32)}, "11.74M", 11_749_120, "truncated"),
    Variant("sabour2017_mnist", {}, "8.21M", 8_215_568, "truncated"),
    # Tsai 2020
    Variant("tsai2020_cifar10", {"dense": (10,)}, "0.56M", 562_929),
    Variant("tsai2020_dynamic_resnet_cifar10", {"width": 128}, "12.45M", 6_616_128, "unmatched"),
    Variant("tsai2020_diverse_cnn_fc", {"image": (3, 36, 36)}, "42.49M", 42_509_194, "unmatched"),
    # Chen 2019
    Variant("chen2019_fc_mnist", NO_DECODER, "6.8M", 6_815_744),
    Variant("chen2019_conv_mnist", NO_DECODER, "5.5M", 5_525_504),
    Variant("chen2019_conv_mnist", NO_DECODER | {"preset": "official"}, "5.5M", 5_088_256, "unmatched"),
    Variant("chen2019_fc_cifar10", {"dim": 16}, "2.67M", 3_984_896, "unmatched"),
    Variant("chen2019_cnn_mnist", {"preset": "official"}, "35.4M", 13_277_970, "unmatched"),
    # Yang 2021: the weights; the coefficients are buffers
    Variant("yang2021_cifar10", {"image": (3, 32, 32), "padding": "valid"}, "", 15_922_688, ""),
    Variant("yang2021_cifar10", {"padding": "valid"}, "", 11_990_528, ""),
    # Mazzia 2021: printed counts were not available; rebuilt from the layers of the authors' code
    Variant("mazzia2021_mnist", {"reconstruction": True}, "", 161_824 + 1_411_344, ""),
    Variant("mazzia2021_mnist", {}, "", 162_400, "", keras=True),
    Variant("mazzia2021_mnist", {"classes": 11}, "", 161_824 + 2_064, ""),
    # Hinton 2018
    Variant("hinton2018_smallnorb", {"width": 64, "primary_types": 8, "types": 16}, "", 67_154, ""),
]


def build(name: str, **changes: Any) -> Network:
    with torch.device("meta"):
        return torchcaps.create_model(name, **changes)


def count(model: Network, keras: bool = False) -> int:
    """Return the number of parameters; with ``keras`` including moving averages of batch normalisation."""
    averages = [buffer for name, buffer in model.named_buffers() if re.search(r"running_(mean|var)$", name)]
    return model.n_parameters + keras * sum(buffer.numel() for buffer in averages)


def as_printed(number: int, like: str, truncate: bool = False) -> str:
    """Return a count in the unit and with the decimals of a printed figure such as ``"8.2M"``."""
    unit = {"M": 1e6, "K": 1e3}[like[-1]]
    decimals = len(like[:-1].partition(".")[2])
    scaled = number / unit * 10**decimals
    return f"{(int(scaled) if truncate else round(scaled)) / 10**decimals:.{decimals}f}{like[-1]}"


@EVERY
def test_registered_counts(name: str) -> None:
    entry, model = MODELS.get(name), build(name)
    if entry.paper:
        assert entry.n_parameters is not None, f"{name}: state n_parameters={model.n_parameters:_}"
    if entry.n_parameters is not None:
        assert model.n_parameters == entry.n_parameters
    if not entry.published:
        assert entry.published_rule == "rounded"
    elif entry.published_rule == "unmatched":
        numbers = [count(model, keras) for keras in (False, True)]
        printed = {as_printed(number, entry.published, truncate) for number in numbers for truncate in (False, True)}
        assert entry.published not in printed
    else:
        assert as_printed(count(model, entry.published_rule == "keras"), entry.published) == entry.published


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.name}-{v.rebuilt}")
def test_variants(variant: Variant) -> None:
    assert count(build(variant.name, **variant.changes), variant.keras) == variant.rebuilt
    if not variant.published:
        return
    if variant.rule == "unmatched":
        printed = {as_printed(variant.rebuilt, variant.published, truncate) for truncate in (False, True)}
        assert variant.published not in printed
    else:
        assert as_printed(variant.rebuilt, variant.published, variant.rule == "truncated") == variant.published


@EVERY
def test_smoke_sizes_are_small(name: str) -> None:
    """A smoke test builds and trains the model in a moment; the spec declares ``smoke_fields``."""
    smoke, full = narrow(name), build(name)
    assert smoke.n_parameters < max(300_000, full.n_parameters // 5)
    assert smoke.spec.classes == MODELS.get(name).spec.classes


def test_layers_of_the_multi_layer_net_of_chen2019() -> None:
    """Supplement, table 1: its rows match, except for the couplings of caps1 and of the class layer."""
    layers = dict(build("chen2019_multi_cifar10").named_parameters())
    sizes = {name.removeprefix("capsules.layers."): p.numel() for name, p in layers.items()}
    assert sizes["front.conv1.weight"] == 9_408
    assert sizes["front.primary.pose.weight"] == 401_408
    assert sizes["caps1.weight"] == 131_072
    assert sizes["caps1.coefficients.coupling"] == 100_352  # printed 56.4K: (3, 3, 16) x (7, 7, 8) for a 4x4 window
    assert sizes["caps2.weight"] == 4_608
    assert sizes["caps2.coefficients.coupling"] == 10_368
    assert sizes["classes.weight"] == 92_160
    assert sizes["classes.coefficients.coupling"] == 1_440  # printed 11.5K: one per pose entry
    assert sum(sizes.values()) == 750_816


def test_coefficients_of_yang2021_are_buffers() -> None:
    for name, shape in {
        "yang2021_mnist": (1152, 10),
        "yang2021_cifar10": (9216, 10),
        "yang2021_multimnist": (3200, 10),
    }.items():
        buffers = dict(build(name).named_buffers())
        assert buffers["capsules.layers.classes.coefficients.coefficient"].shape == shape


def test_trap_33_classifier_is_shared_by_all_classes() -> None:
    """Linear(d, 1): d + 1 parameters, and permuting class capsules permutes logits."""
    model = torchcaps.create_model("tsai2020_cifar10", width=8, types=4)
    assert sum(p.numel() for p in model.head.parameters()) == 16 + 1
    capsules, order = torch.randn(2, 10, 16), torch.randperm(10)
    logits = model.head(Capsules(capsules))
    assert_equal(model.head(Capsules(capsules[:, order])), logits[:, order])
    assert isinstance(model.spec.routing, InvertedAttention)
