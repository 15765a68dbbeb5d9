"""The convolutional networks that the papers compare with."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchcaps._core.validation import check_range
from torchcaps.models import init
from torchcaps.models.blocks import add_resnet
from torchcaps.models.builder import Layers
from torchcaps.models.network import ConvNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import by_preset, register
from torchcaps.models.schedules import Exponential, Inverse
from torchcaps.models.spec import Image, ModelSpec
from torchcaps.models.tsai2020 import tsai_recipe

__all__ = ["ChenCNN", "ChenFlatCNN", "FlatCNN", "LeNet", "PooledCNN", "ResNet18", "TsaiCNN", "TsaiDiverseCNN"]

SABOUR = Recipe(
    LossConfig("cross_entropy"), OptimizerConfig("adam", 1e-3), Exponential(0.96, 2000, floor=1e-3), steps=300_000
)


@dataclass(frozen=True, kw_only=True)
class FlatCNN(ModelSpec):
    """The MNIST baseline: Sabour 2017, section 5.1. No pooling.

    Three 5x5 convolutions of 256, 256 and 128 channels, ReLU; fully-connected 328 and 192, dropout, the classes. The
    printed 35.4M are 35,445,522 with SAME padding; unpadded it would have 13,277,970.
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "features": (24, 16)}

    image: Image = (1, 28, 28)
    width: int = 256
    features: tuple[int, int] = (328, 192)
    dropout: float = 0.5
    padding: Literal["same", "valid"] = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "dropout", 0, 1)

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        padding = 2 if self.padding == "same" and not self.official else 0
        for number, channels in enumerate((self.width, self.width, max(1, self.width // 2)), start=1):
            layers.conv(f"conv{number}", channels, 5, padding=padding)
            layers.relu()
        layers.flatten()
        for number, features in enumerate(self.features, start=1):
            layers.linear(f"fc{number}", features)
            layers.relu()
        layers.dropout(self.dropout)
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """Adam and a cross-entropy; the paper gives no more."""
        return SABOUR


@dataclass(frozen=True, kw_only=True)
class ChenFlatCNN(FlatCNN):
    """The same baseline in Chen 2019, table 2, drawn as Caffe draws: 35.4M.

    Official: the released net is unpadded. Not followed: it takes its softmax over the 192 units and lacks the last
    layer (13,276,040 parameters).
    """

    presets = ("paper", "official")

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        model = super().build_network()
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """As the capsule nets of the paper."""
        return Recipe(SABOUR.loss, SABOUR.optimizer, Inverse(1e-4, 0.75), batch_size=100, steps=10_000)


@dataclass(frozen=True, kw_only=True)
class PooledCNN(ModelSpec):
    """The MultiMNIST baseline: Sabour 2017, section 6; and a narrower one for affNIST, which the paper leaves open.

    9x9 with 512 channels, ReLU, maximum over 2x2; 5x5 with 256, the same; fully-connected 1024, the classes. The
    printed 24.56M are 24,563,978 with SAME padding. For affNIST ("similar number of parameters", "MaxPooling and
    DropOut") the fully-connected layer is reduced to 320, with dropout before the classes: 11,514,570 beside
    CapsNet's 11,227,904.

    Official: the released net has 5x5 in its first layer, 24,535,306 parameters. That its loss halves the labels is not
    followed.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "features": 32}

    image: Image = (1, 36, 36)
    width: int = 512
    features: int = 1024
    dropout: float = 0.0
    n_objects: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "dropout", 0, 1)

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        for number, (channels, kernel) in enumerate([(self.width, 5 if self.official else 9), (self.width // 2, 5)]):
            layers.conv(f"conv{number + 1}", max(1, channels), kernel, padding=kernel // 2)
            layers.relu()
            layers.max_pool(2)
        layers.flatten()
        layers.linear("fc1", self.features)
        layers.relu()
        if self.dropout:
            layers.dropout(self.dropout)
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers, self.n_objects)

    def recipe(self) -> Recipe:
        """Adam; a cross-entropy for one object in an image, one for each class for several."""
        loss = LossConfig("cross_entropy" if self.n_objects == 1 else "binary")
        return Recipe(loss, SABOUR.optimizer, SABOUR.lr_schedule, steps=SABOUR.steps)


@dataclass(frozen=True, kw_only=True)
class TsaiCNN(ModelSpec):
    """The CIFAR baseline: Tsai 2020, tables 2 and 3.

    Three 3x3 convolutions of stride 2 with 1024 channels and ReLU, the last two with batch norm after it, each of those
    followed by a mean over 2x2; the classes. 18,919,434 (18.92M) and 19,011,684 (19.01M) parameters.

    Deviation: the last mean is over what is left of the grid, 2x2 for CIFAR, so that larger images need no more
    weights.

    Official: the same; of this net there is no code.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16}

    image: Image = (3, 32, 32)
    width: int = 1024

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        layers.conv("conv1", self.width, 3, stride=2, padding=1)
        layers.relu()
        for number in (2, 3):
            layers.conv(f"conv{number}", self.width, 3, stride=2, padding=1)
            layers.relu()
            layers.batch_norm()
            layers.avg_pool(2 if number == 2 else None)
        layers.flatten()
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """As the capsule nets of the paper."""
        return tsai_recipe(LossConfig("cross_entropy"))


@dataclass(frozen=True, kw_only=True)
class ResNet18(ModelSpec):
    """ResNet-18 with a stem for CIFAR (3x3, no pooling): He 2016, as in Tsai 2020, table 1.

    11,173,962 (11.17M) and 11,220,132 (11.22M) parameters.

    Args:
        width: channels of the first stage; every further one doubles them.

    Official: the same.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 4}

    image: Image = (3, 32, 32)
    width: int = 64

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        add_resnet(layers, tuple((self.width * factor, 2) for factor in (1, 2, 4, 8)), stem=self.width)
        layers.avg_pool()
        layers.flatten()
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """As the capsule nets of the paper."""
        return tsai_recipe(LossConfig("cross_entropy"))


@dataclass(frozen=True, kw_only=True)
class TsaiDiverseCNN(ModelSpec):
    """The DiverseMultiMNIST baselines: Tsai 2020, table 12.

    Three 3x3 convolutions of 1024 channels (stride 2, 2 and 1; ReLU, the last two with batch norm), then 640
    features: at every place, averaged over the grid (19,553,162 parameters), or fully connected (42,490,762; 42.49M).
    Both from one input channel; with the three that the table prints the second would have 42,509,194.

    Args:
        features: what the convolutions lead to.
        pool: average the features over the grid, or connect all of it.

    Official: the same; of these nets there is no code.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "features": 32}

    image: Image = (1, 36, 36)
    width: int = 1024
    features: int = 640
    pool: bool = True

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        for number, (stride, padding) in enumerate(((2, 1), (2, 0), (1, 0)), start=1):
            layers.conv(f"conv{number}", self.width, 3, stride=stride, padding=padding)
            layers.relu()
            if number > 1:
                layers.batch_norm()
        if self.pool:
            layers.conv("features", self.features, 1)
            layers.avg_pool()
            layers.flatten()
        else:
            layers.flatten()
            layers.linear("features", self.features)
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers, n_objects=None)

    def recipe(self) -> Recipe:
        """As the capsule nets of the paper."""
        return tsai_recipe(LossConfig("binary"))


@dataclass(frozen=True, kw_only=True)
class ChenCNN(ModelSpec):
    """The CIFAR-10 baseline: Chen 2019, table 2.

    9x9 with 64 channels, 9x9 stride 2 with 256, ReLU; fully-connected 512 with dropout, the classes: 9,737,226
    parameters, where the paper prints 9.6M. No reading of it has that many.

    Official: the same.
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "channels": 16, "features": 32}

    image: Image = (3, 32, 32)
    width: int = 64
    channels: int = 256
    features: int = 512

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        layers.conv("conv1", self.width, 9)
        layers.relu()
        layers.conv("conv2", self.channels, 9, stride=2)
        layers.relu()
        layers.flatten()
        layers.linear("fc1", self.features)
        layers.relu()
        layers.dropout(0.5)
        layers.linear("classes", self.classes)
        model = ConvNetwork(self, layers)
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """As the capsule nets that it is compared with: SGD, times 0.6 for every 8,000 steps."""
        optimizer, schedule = OptimizerConfig("sgd", 1e-3, momentum=0.9), Exponential(0.6, 8000, staircase=True)
        return Recipe(LossConfig("cross_entropy"), optimizer, schedule, batch_size=100, steps=10_000)


@dataclass(frozen=True, kw_only=True)
class LeNet(ModelSpec):
    """LeNet as Caffe's MNIST example has it: the net that Chen 2019 takes the gradients of its black-box attack from.

    5x5 with 20 channels, maximum over 2x2; 5x5 with 50, the same; fully-connected 500, ReLU, the classes: 431,080
    parameters. The convolutions are not padded and have no ReLU behind them.
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 4, "features": 32}

    image: Image = (1, 28, 28)
    width: int = 20
    channels: int = 50
    features: int = 500

    def build_network(self) -> ConvNetwork:
        """Build the layers."""
        layers = Layers(self.image)
        for number, channels in enumerate((self.width, self.channels), start=1):
            layers.conv(f"conv{number}", channels, 5)
            layers.max_pool(2)
        layers.flatten()
        layers.linear("fc1", self.features)
        layers.relu()
        layers.linear("classes", self.classes)
        model = ConvNetwork(self, layers)
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """As the nets that it attacks; the paper does not say."""
        return ChenFlatCNN().recipe()


register(
    "sabour2017_cnn_mnist", FlatCNN(), "35.4M", n_parameters=35_445_522, data="mnist", augmentation="sabour2017.mnist"
)
register(
    "sabour2017_cnn_multimnist",
    PooledCNN(),
    "24.56M",
    n_parameters=24_563_978,
    data=by_preset("multimnist", "multimnist-official"),
    augmentation="sabour2017.multimnist",
    lr_schedule=Exponential(0.96, 20_000, floor=1e-3),
)
register(
    "sabour2017_cnn_affnist",
    PooledCNN(image=(1, 40, 40), features=320, dropout=0.5, n_objects=1),
    n_parameters=11_514_570,
    data="expanded-mnist",
    test_data="affnist",
    augmentation="sabour2017.expanded-mnist",
    note="the paper stops early, at 99.22 % on the expanded MNIST's test images",
)
for _data, _classes, _cnn, _resnet in (
    ("cifar10", 10, ("18.92M", 18_919_434), ("11.17M", 11_173_962)),
    ("cifar100", 100, ("19.01M", 19_011_684), ("11.22M", 11_220_132)),
):
    _recipe: dict[str, Any] = {"data": _data, "augmentation": f"tsai2020.{_data}"}
    register(f"tsai2020_cnn_{_data}", TsaiCNN(classes=_classes), _cnn[0], n_parameters=_cnn[1], **_recipe)
    register(f"tsai2020_resnet18_{_data}", ResNet18(classes=_classes), _resnet[0], n_parameters=_resnet[1], **_recipe)
register("tsai2020_diverse_cnn", TsaiDiverseCNN(), n_parameters=19_553_162, data="diverse-multimnist")
register(
    "tsai2020_diverse_cnn_fc", TsaiDiverseCNN(pool=False), "42.49M", n_parameters=42_490_762, data="diverse-multimnist"
)
register(
    "chen2019_cnn_mnist", ChenFlatCNN(), "35.4M", n_parameters=35_445_522, data="mnist", augmentation="chen2019.mnist"
)
register("chen2019_lenet", LeNet(), n_parameters=431_080, data="mnist", augmentation="chen2019.mnist")
register(
    "chen2019_cnn_cifar10",
    ChenCNN(),
    "9.6M",
    n_parameters=9_737_226,
    published_rule="unmatched",
    data="cifar10",
    augmentation="chen2019.cifar10",
)
