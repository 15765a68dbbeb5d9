"""Small networks to start from, for digits and for photographs."""

from torchcaps.models.recipe import OptimizerConfig
from torchcaps.models.registry import register_model
from torchcaps.models.sabour2017 import Sabour2017
from torchcaps.models.schedules import OneCycle
from torchcaps.models.tsai2020 import Tsai2020

__all__: list[str] = []

# CapsNet with a quarter of the channels and capsule types; trains in about a minute on two cores.
register_model(
    "capsnet_small",
    Sabour2017(width=64, types=8, hidden=(256, 512)),
    data="digits",
    augmentation="sabour2017.mnist",
    optimizer=OptimizerConfig("adam", 3e-3),
    lr_schedule=OneCycle(),
    batch_size=64,
    steps=None,
    epochs=16,
    val_fraction=0.1,
)
# ResNet backbone for photographs: a 16x16 grid for 64x64 images, with few and narrow capsules.
register_model(
    "capsnet_images",
    Tsai2020(
        image=(3, 64, 64),
        backbone="resnet",
        stages=((32, 2), (64, 2)),
        width=128,
        blocks=2,
        types=16,
    ),
    data="folder",
    augmentation="",
    optimizer=OptimizerConfig("adam", 2e-3),
    lr_schedule=OneCycle(),
    batch_size=64,
    epochs=30,
)
