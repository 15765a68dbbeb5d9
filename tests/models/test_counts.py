"""The whole table of parameter counts: what a paper prints, what its layers were rebuilt to, and ours.

``pytest tests/models/test_counts.py -s`` prints it. A published figure either rounds from ours or is marked as not to
be matched by any reading; both ways are checked.
"""

import re
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import torchcaps
from torchcaps.capsules import Capsules
from torchcaps.models import ModelSpec
from torchcaps.models.registry import REGISTRY
from torchcaps.routing import InvertedAttention


class Count(NamedTuple):
    """A row: the model and its changes, the printed figure, the rebuilt one; how the printed one comes about."""

    name: str
    changes: dict[str, Any]
    published: str
    rebuilt: int
    verdict: str = "rounds"  # "rounds", "truncates", "no" (does not match), "" (nothing is printed)
    keras: bool = False  # counted with the moving averages of batch norms, as Keras does


NO_DECODER = {"reconstruction": False}
COUNTS = [
    # Sabour 2017
    Count("sabour2017_mnist", NO_DECODER, "6.8M", 6_804_224),
    Count("sabour2017_mnist", {}, "8.2M", 8_215_568),
    Count("sabour2017_mnist", NO_DECODER | {"preset": "official"}, "6.8M", 6_804_384),
    Count("sabour2017_mnist", {"preset": "official"}, "8.2M", 8_215_728),
    Count("sabour2017_multimnist", {}, "11.36M", 11_361_808),
    Count("sabour2017_multimnist", NO_DECODER, "11.36M", 9_425_664, "no"),
    Count("sabour2017_cnn_mnist", {}, "35.4M", 35_445_522),
    Count("sabour2017_cnn_mnist", {"padding": "valid"}, "35.4M", 13_277_970, "no"),
    Count("sabour2017_cnn_multimnist", {}, "24.56M", 24_563_978),
    Count("sabour2017_cnn_multimnist", {"preset": "official"}, "24.56M", 24_535_306, "no"),
    Count("sabour2017_cifar10", {"padding": "valid"}, "", 11_990_528, ""),
    Count("sabour2017_cifar10", {}, "", 22_476_288, ""),
    Count("sabour2017_smallnorb", {}, "", 6_661_120, ""),
    Count("sabour2017_svhn", {}, "", 1_004_896, ""),
    Count("sabour2017_affnist", {}, "", 11_227_904, ""),
    # Choi 2019
    Count("choi2019_mnist", {}, "5.31M", 5_312_784, keras=True),
    Count("choi2019_mnist", NO_DECODER, "", 4_483_584, "", keras=True),
    Count("choi2019_cifar10", {"depth": 0, "dim": 16}, "7.3M", 7_293_408, keras=True),
    Count("choi2019_cifar10", {"depth": 0, "dim": 32}, "12.6M", 12_637_568, keras=True),
    Count("choi2019_cifar10", {"depth": 1, "dim": 16}, "3.5M", 3_520_096, keras=True),
    Count("choi2019_cifar10", {"depth": 1, "dim": 32}, "7.7M", 7_716_480, keras=True),
    Count("choi2019_cifar10", {"depth": 2, "dim": 16}, "3.7M", 3_678_944, keras=True),
    Count("choi2019_cifar10", {"depth": 2, "dim": 32}, "8.4M", 8_333_184, "no", keras=True),
    Count("choi2019_cifar10", {"depth": 3, "dim": 16}, "3.8M", 3_837_792, keras=True),
    Count("choi2019_cifar10", {"depth": 3, "dim": 32}, "8.9M", 8_949_888, keras=True),
    Count("choi2019_cifar10", {"depth": 4, "dim": 16}, "4.0M", 3_996_640, keras=True),
    Count("choi2019_cifar10", {}, "9.6M", 9_566_592, keras=True),
    Count("choi2019_affnist", {}, "", 3_501_088, "", keras=True),
    Count("sabour2017_mnist", {"image": (3, 32, 32)}, "11.74M", 11_749_120, "truncates"),
    Count("sabour2017_mnist", {}, "8.21M", 8_215_568, "truncates"),
    # Tsai 2020
    Count("tsai2020_cifar10", {}, "0.56M", 561_297),
    Count("tsai2020_cifar100", {}, "1.46M", 1_462_989),
    Count("tsai2020_resnet_cifar10", {}, "1.83M", 1_828_817),
    Count("tsai2020_resnet_cifar100", {}, "2.80M", 2_799_629),
    Count("tsai2020_cifar10", {"dense": (10,)}, "0.56M", 562_929),
    Count("tsai2020_dynamic_cifar10", {}, "7.99M", 7_992_576),
    Count("tsai2020_dynamic_cifar100", {}, "31.59M", 31_585_536),
    Count("tsai2020_dynamic_resnet_cifar10", {"width": 128}, "12.45M", 6_616_128, "no"),
    Count("tsai2020_dynamic_resnet_cifar10", {}, "12.45M", 12_451_136),
    Count("tsai2020_dynamic_resnet_cifar100", {}, "36.04M", 36_044_096),
    Count("tsai2020_em_cifar10", {}, "0.45M", 453_044),
    Count("tsai2020_em_cifar100", {}, "0.50M", 499_304),
    Count("tsai2020_em_resnet_cifar10", {}, "1.71M", 1_710_580),
    Count("tsai2020_em_resnet_cifar100", {}, "1.76M", 1_756_840),
    Count("tsai2020_cnn_cifar10", {}, "18.92M", 18_919_434),
    Count("tsai2020_cnn_cifar100", {}, "19.01M", 19_011_684),
    Count("tsai2020_resnet18_cifar10", {}, "11.17M", 11_173_962),
    Count("tsai2020_resnet18_cifar100", {}, "11.22M", 11_220_132),
    Count("tsai2020_diverse_cnn_fc", {}, "42.49M", 42_490_762),
    Count("tsai2020_diverse_cnn_fc", {"image": (3, 36, 36)}, "42.49M", 42_509_194, "no"),
    Count("tsai2020_diverse_cnn", {}, "", 19_553_162, ""),
    Count("tsai2020_diverse_vector", {}, "", 42_478_017, ""),
    Count("tsai2020_diverse_matrix", {}, "", 9_963_969, ""),
    Count("tsai2020_diverse_matrix42m", {}, "42M", 41_593_281),
    # Chen 2019
    Count("chen2019_fc_mnist", NO_DECODER, "6.8M", 6_815_744),
    Count("chen2019_fc_mnist", {}, "8.2M", 8_227_088),
    Count("chen2019_conv_mnist", NO_DECODER, "5.5M", 5_525_504),
    Count("chen2019_conv_mnist", {}, "6.9M", 6_895_888),
    Count("chen2019_conv_mnist", NO_DECODER | {"preset": "official"}, "5.5M", 5_088_256, "no"),
    Count("chen2019_fc_cifar10", {}, "2.67M", 2_674_176),
    Count("chen2019_conv_cifar10", {}, "2.67M", 2_674_176),
    Count("chen2019_dynamic_mnist", {}, "8.2M", 8_215_568),
    Count("chen2019_dynamic_cifar10", {}, "2.67M", 2_653_696, "no"),
    Count("chen2019_fc_cifar10", {"dim": 16}, "2.67M", 3_984_896, "no"),
    Count("chen2019_cnn_cifar10", {}, "9.6M", 9_737_226, "no"),
    Count("chen2019_cnn_mnist", {}, "35.4M", 35_445_522),
    Count("chen2019_cnn_mnist", {"preset": "official"}, "35.4M", 13_277_970, "no"),
    Count("chen2019_lenet", {}, "", 431_080, ""),
    Count("chen2019_multi_cifar10", {}, "716K", 750_816, "no"),
    # Yang 2021: the weights; the coefficients are buffers
    Count("yang2021_mnist", {}, "", 8_215_568, ""),
    Count("yang2021_fashion_mnist", {}, "", 8_215_568, ""),
    Count("yang2021_cifar10", {"image": (3, 32, 32), "padding": "valid"}, "", 15_922_688, ""),
    Count("yang2021_cifar10", {"padding": "valid"}, "", 11_990_528, ""),
    Count("yang2021_cifar10", {}, "", 22_476_288, ""),
    Count("yang2021_multimnist", {}, "", 9_425_664, ""),
    # Hinton 2018
    Count("hinton2018_smallnorb", {}, "", 316_394, ""),
    Count("hinton2018_smallnorb", {"width": 64, "primary_types": 8, "types": 16}, "", 67_154, ""),
]


def build(count: Count) -> nn.Module:
    with torch.device("meta"):
        return torchcaps.create_model(count.name, **count.changes)


def ours(count: Count) -> int:
    model = build(count)
    averages = [buffer for name, buffer in model.named_buffers() if re.search(r"running_(mean|var)$", name)]
    return sum(p.numel() for p in model.parameters()) + count.keras * sum(b.numel() for b in averages)


def as_printed(number: int, like: str, truncate: bool) -> str:
    """Write a number as a paper does, with as many places as it takes."""
    unit = {"M": 1e6, "K": 1e3}[like[-1]]
    places = len(like[:-1].partition(".")[2])
    scaled = number / unit * 10**places
    return f"{(int(scaled) if truncate else round(scaled)) / 10**places:.{places}f}{like[-1]}"


def test_the_whole_table() -> None:
    wrong = []
    lines = [f"{'model':34} {'changes':58} {'published':>9} {'rebuilt':>12} {'ours':>12}"]
    for count in COUNTS:
        found = ours(count)
        changes = ", ".join(f"{key}={value!r}" for key, value in count.changes.items())
        lines.append(
            f"{count.name:34} {changes:58} {count.published:>9} {count.rebuilt:>12,} {found:>12,} {count.verdict}"
        )
        if found != count.rebuilt:
            wrong.append(lines[-1])
    print("\n".join(lines))  # shown with -s
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("count", [c for c in COUNTS if c.published], ids=lambda c: f"{c.name}-{c.rebuilt}")
def test_the_printed_figure_comes_out_of_the_rebuilt_one(count: Count) -> None:
    printed = {as_printed(count.rebuilt, count.published, truncate) for truncate in (False, True)}
    if count.verdict == "no":
        assert count.published not in printed
    else:
        assert as_printed(count.rebuilt, count.published, count.verdict == "truncates") == count.published


def test_every_published_count_of_the_registry_stands_in_the_table() -> None:
    defaults = {count.name: count for count in COUNTS if not count.changes and count.published}
    for name, entry in REGISTRY.items():
        if entry.published:
            assert name in defaults, name
            assert entry.published in {c.published for c in COUNTS if c.name == name and not c.changes}


def test_every_model_of_a_paper_stands_in_the_table() -> None:
    """But for those whose size no paper gives and nobody has rebuilt."""
    open_ones = {"sabour2017_cnn_affnist": 11_514_570, "tsai2020_diverse_dynamic": 42_477_633}
    assert all(isinstance(entry.spec, ModelSpec) for entry in REGISTRY.values())
    missing = {name for name in REGISTRY if not name.startswith("capsnet")} - {count.name for count in COUNTS}
    assert missing == set(open_ones)
    for name, number in open_ones.items():
        assert ours(Count(name, {}, "", number)) == number


def test_the_layers_of_chens_multi_layer_net() -> None:
    """Supplement, table 1: which of its rows hold, and the two that can't."""
    layers = dict(build(Count("chen2019_multi_cifar10", {}, "", 0)).named_parameters())
    sizes = {name.removeprefix("capsules.layers."): p.numel() for name, p in layers.items()}
    assert sizes["front.conv1.weight"] == 9_408
    assert sizes["front.primary.pose.weight"] == 401_408
    assert sizes["caps1.weight"] == 131_072
    assert sizes["caps1.coefficients.coupling"] == 100_352  # printed 56.4K: (3, 3, 16) x (7, 7, 8) for a 4x4 window
    assert sizes["caps2.weight"] == 4_608
    assert sizes["caps2.coefficients.coupling"] == 10_368
    assert sizes["classes.weight"] == 92_160
    assert sizes["classes.coefficients.coupling"] == 1_440  # printed 11.5K: one for each number of a pose
    assert sum(sizes.values()) == 750_816


def test_coefficients_of_yang_are_buffers() -> None:
    for name, shape in {
        "yang2021_mnist": (1152, 10),
        "yang2021_cifar10": (9216, 10),
        "yang2021_multimnist": (3200, 10),
    }.items():
        buffers = dict(build(Count(name, {}, "", 0)).named_buffers())
        assert buffers["capsules.layers.classes.coefficients.coefficient"].shape == shape


def test_trap_33_the_classifier_is_shared_by_the_classes() -> None:
    """Linear(d, 1): d + 1 parameters, and permuting class capsules permutes logits."""
    model = torchcaps.create_model("tsai2020_cifar10", width=8, types=4)
    assert sum(p.numel() for p in model.head.parameters()) == 16 + 1
    capsules, order = torch.randn(2, 10, 16), torch.randperm(10)
    logits = model.head(Capsules(capsules))
    assert torch.equal(model.head(Capsules(capsules[:, order])), logits[:, order])
    assert isinstance(model.spec.routing, InvertedAttention)
