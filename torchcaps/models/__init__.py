"""The models of the papers and their baselines, by name.

>>> import torch, torchcaps
>>> model = torchcaps.create_model("sabour2017_mnist", classes=3)
>>> model(torch.rand(2, 1, 28, 28)).scores.shape
torch.Size([2, 3])
"""

from torchcaps.models.baselines import (
    ChenCNN,
    ChenFlatCNN,
    FlatCNN,
    LeNet,
    PooledCNN,
    ResNet18,
    TsaiCNN,
    TsaiDiverseCNN,
)
from torchcaps.models.byerly2021 import Byerly2021
from torchcaps.models.chen2019 import Chen2019, Chen2019Dynamic, Chen2019Multi
from torchcaps.models.choi2019 import Choi2019
from torchcaps.models.hahn2019 import Hahn2019, HahnPool
from torchcaps.models.heads import Output
from torchcaps.models.hinton2018 import Hinton2018
from torchcaps.models.mazzia2021 import Mazzia2021
from torchcaps.models.network import CapsuleNetwork, ConvNetwork, Network
from torchcaps.models.pretrained import list_pretrained, model_card
from torchcaps.models.recipe import LossConfig, Objective, OptimizerConfig, Recipe
from torchcaps.models.registry import MODELS, create_model, list_models, register_model
from torchcaps.models.ribeiro2020 import NormalizedConvCapsules, Ribeiro2020
from torchcaps.models.sabour2017 import Sabour2017
from torchcaps.models.spec import CapsuleSpec, ModelSpec
from torchcaps.models.tsai2020 import Tsai2020, Tsai2020Diverse, Tsai2020Dynamic, Tsai2020EM
from torchcaps.models.yang2021 import Yang2021

__all__ = [
    "Byerly2021",
    "CapsuleNetwork",
    "CapsuleSpec",
    "Chen2019",
    "Chen2019Dynamic",
    "Chen2019Multi",
    "ChenCNN",
    "ChenFlatCNN",
    "Choi2019",
    "ConvNetwork",
    "FlatCNN",
    "Hahn2019",
    "HahnPool",
    "Hinton2018",
    "LeNet",
    "LossConfig",
    "Mazzia2021",
    "ModelSpec",
    "Network",
    "NormalizedConvCapsules",
    "Objective",
    "OptimizerConfig",
    "Output",
    "PooledCNN",
    "Recipe",
    "ResNet18",
    "Ribeiro2020",
    "Sabour2017",
    "Tsai2020",
    "Tsai2020Diverse",
    "Tsai2020Dynamic",
    "Tsai2020EM",
    "TsaiCNN",
    "TsaiDiverseCNN",
    "Yang2021",
    "create_model",
    "list_models",
    "list_pretrained",
    "model_card",
    "register_model",
]


def __getattr__(name: str) -> type[ModelSpec]:
    """Find the spec class of a registered model in a file that is not imported above."""
    if not name.startswith("_"):
        for entry in MODELS.values():
            cls = type(entry.spec)
            if cls.__name__ == name and cls.__module__.startswith(f"{__name__}."):
                return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
