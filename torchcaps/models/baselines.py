"""Convolutional baselines of the papers."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torchcaps._core.validation import check_range
from torchcaps.models import init
from torchcaps.models.blocks import add_resnet
from torchcaps.models.builder import Layers
from torchcaps.models.network import ConvNetwork
from torchcaps.models.recipe import LossConfig, OptimizerConfig, Recipe
from torchcaps.models.registry import by_preset, register_model
from torchcaps.models.schedules import Exponential, Inverse
from torchcaps.models.spec import Image, ModelSpec
from torchcaps.models.tsai2020 import tsai_recipe

__all__ = ["ChenCNN", "ChenFlatCNN", "FlatCNN", "LeNet", "PooledCNN", "ResNet18", "TsaiCNN", "TsaiDiverseCNN"]

SABOUR = Recipe(
    LossConfig("cross_entropy"), OptimizerConfig("adam", 1e-3), Exponential(0.96, 2000, floor=1e-3), steps=300_000
)


@dataclass(frozen=True, kw_only=True)
class FlatCNN(ModelSpec):
    """Baseline for MNIST, without pooling: Sabour 2017, section 5.

    Three 5x5 convolutions of 256, 256 and 128 channels with ReLU; fully-connected layers of 328 and 192 units, dropout,
    and the class layer. Parameters: 35,445,522 with SAME padding (printed 35.4M); without padding 13,277,970.

    >>> FlatCNN(classes=3).recipe().loss.name
    'cross_entropy'
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
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        padding = 2 if self.padding == "same" and not self.official else 0
        for layer, channels in enumerate((self.width, self.width, max(1, self.width // 2)), start=1):
            layers.conv(f"conv{layer}", channels, 5, padding=padding)
            layers.relu()
        layers.flatten()
        for layer, features in enumerate(self.features, start=1):
            layers.linear(f"fc{layer}", features)
            layers.relu()
        layers.dropout(self.dropout)
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """Adam and cross-entropy; the paper specifies nothing else, so the rest follows its capsule network."""
        return SABOUR


@dataclass(frozen=True, kw_only=True)
class ChenFlatCNN(FlatCNN):
    """The same baseline in Chen 2019, table 2, with Caffe's Xavier initialisation (35.4M).

    Official: the released network has no padding. Not followed: it has no class layer and applies the softmax to the
    192 units (13,276,040 parameters).

    >>> ChenFlatCNN(classes=3).recipe().loss.name
    'cross_entropy'
    """

    presets = ("paper", "official")

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        model = super().build_network()
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """The settings of the paper's capsule networks."""
        return Recipe(SABOUR.loss, SABOUR.optimizer, Inverse(1e-4, 0.75), batch_size=100, steps=10_000)


@dataclass(frozen=True, kw_only=True)
class PooledCNN(ModelSpec):
    """Baseline for MultiMNIST: Sabour 2017, section 6; and a narrower one for affNIST.

    A 9x9 convolution of 512 channels and a 5x5 convolution of 256, each with ReLU and 2x2 max pooling; a
    fully-connected layer of 1024 units with ReLU, and the class layer. Parameters: 24,563,978 with SAME padding
    (printed 24.56M).

    Deviation: for affNIST the paper only states "similar number of parameters" and "MaxPooling and DropOut" (section
    5.2). Here the fully-connected layer has 320 units, with dropout before the class layer: 11,514,570 parameters
    (CapsNet: 11,227,904).

    Official: the released network has a 5x5 kernel in its first layer: 24,535,306 parameters. Not followed: its loss
    halves the labels.

    >>> PooledCNN(classes=3).recipe().loss.name
    'binary'
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
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        sizes = ((self.width, 5 if self.official else 9), (self.width // 2, 5))
        for layer, (channels, kernel) in enumerate(sizes, start=1):
            layers.conv(f"conv{layer}", max(1, channels), kernel, padding=kernel // 2)
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
        """Adam; cross-entropy for one object per image, binary cross-entropy for several."""
        loss = LossConfig("cross_entropy" if self.n_objects == 1 else "binary")
        return Recipe(loss, SABOUR.optimizer, SABOUR.lr_schedule, steps=SABOUR.steps)


@dataclass(frozen=True, kw_only=True)
class TsaiCNN(ModelSpec):
    """Baseline for CIFAR: Tsai 2020, tables 2 and 3.

    Three 3x3 convolutions of stride 2 with 1024 channels and ReLU, the last two followed by batch normalisation and
    2x2 average pooling; the class layer. Parameters: 18,919,434 (printed 18.92M), CIFAR-100 19,011,684 (19.01M).

    Deviation: the last pooling covers the remaining grid, 2x2 for CIFAR, so that larger images do not need more
    parameters.

    Official: the same network; its code was not released.

    >>> TsaiCNN(classes=3).recipe().loss.name
    'cross_entropy'
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16}

    image: Image = (3, 32, 32)
    width: int = 1024

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        layers.conv("conv1", self.width, 3, stride=2, padding=1)
        layers.relu()
        for layer in (2, 3):
            layers.conv(f"conv{layer}", self.width, 3, stride=2, padding=1)
            layers.relu()
            layers.batch_norm()
            layers.avg_pool(2 if layer == 2 else None)
        layers.flatten()
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """The settings of the paper's capsule networks."""
        return tsai_recipe(LossConfig("cross_entropy"))


@dataclass(frozen=True, kw_only=True)
class ResNet18(ModelSpec):
    """ResNet-18 with a stem for CIFAR (3x3, no pooling): He 2016, as in Tsai 2020, table 1.

    Parameters: 11,173,962 (printed 11.17M), CIFAR-100 11,220,132 (11.22M).

    Args:
        width: channels of the first stage; each further stage doubles them.

    Official: the same network.

    >>> ResNet18(classes=3).recipe().loss.name
    'cross_entropy'
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 4}

    image: Image = (3, 32, 32)
    width: int = 64

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        add_resnet(layers, tuple((self.width * factor, 2) for factor in (1, 2, 4, 8)), stem=self.width)
        layers.avg_pool()
        layers.flatten()
        layers.linear("classes", self.classes)
        return ConvNetwork(self, layers)

    def recipe(self) -> Recipe:
        """The settings of the paper's capsule networks."""
        return tsai_recipe(LossConfig("cross_entropy"))


@dataclass(frozen=True, kw_only=True)
class TsaiDiverseCNN(ModelSpec):
    """Baselines for DiverseMultiMNIST: Tsai 2020, table 12.

    Three 3x3 convolutions of 1024 channels with strides 2, 2 and 1 and ReLU, the last two with batch normalisation;
    then 640 features and the class layer. The features are computed per position and averaged over the grid
    (19,553,162 parameters), or by a fully-connected layer (42,490,762, printed 42.49M). Both have one input channel;
    with the three channels of the table the second network would have 42,509,194 parameters.

    Args:
        width: channels of the convolutions.
        features: number of features.
        pool: average the features over the grid instead of connecting the complete grid.

    Official: the same network; its code was not released.

    >>> TsaiDiverseCNN(classes=3).recipe().loss.name
    'binary'
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 16, "features": 32}

    image: Image = (1, 36, 36)
    width: int = 1024
    features: int = 640
    pool: bool = True

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        for layer, (stride, padding) in enumerate(((2, 1), (2, 0), (1, 0)), start=1):
            layers.conv(f"conv{layer}", self.width, 3, stride=stride, padding=padding)
            layers.relu()
            if layer > 1:
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
        """The settings of the paper's capsule networks."""
        return tsai_recipe(LossConfig("binary"))


@dataclass(frozen=True, kw_only=True)
class ChenCNN(ModelSpec):
    """Baseline for CIFAR-10: Chen 2019, table 2.

    A 9x9 convolution of 64 channels and one of 256 with stride 2, both with ReLU; a fully-connected layer of 512 units
    with ReLU and dropout; the class layer. Parameters: 9,737,226. The paper prints 9.6M, which no reading gives.

    Official: the same network.

    >>> ChenCNN(classes=3).recipe().loss.name
    'cross_entropy'
    """

    smoke_fields: ClassVar[dict[str, Any]] = {"width": 8, "channels": 16, "features": 32}

    image: Image = (3, 32, 32)
    width: int = 64
    channels: int = 256
    features: int = 512

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
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
        """The settings of the capsule networks it is compared with: SGD, lr multiplied by 0.6 per 8,000 steps."""
        optimizer, schedule = OptimizerConfig("sgd", 1e-3, momentum=0.9), Exponential(0.6, 8000, staircase=True)
        return Recipe(LossConfig("cross_entropy"), optimizer, schedule, batch_size=100, steps=10_000)


@dataclass(frozen=True, kw_only=True)
class LeNet(ModelSpec):
    """LeNet of Caffe's MNIST example: substitute model of the black-box attack in Chen 2019, section 4.3.

    Two 5x5 convolutions of 20 and 50 channels, each with 2x2 max pooling and without padding and ReLU; a
    fully-connected layer of 500 units with ReLU; the class layer. Parameters: 431,080.

    >>> LeNet(classes=3).recipe().loss.name
    'cross_entropy'
    """

    presets = ("paper",)
    smoke_fields: ClassVar[dict[str, Any]] = {"width": 4, "features": 32}

    image: Image = (1, 28, 28)
    width: int = 20
    channels: int = 50
    features: int = 500

    def build_network(self) -> ConvNetwork:
        """Build the layers in the order of the class docstring."""
        layers = Layers(self.image)
        for layer, channels in enumerate((self.width, self.channels), start=1):
            layers.conv(f"conv{layer}", channels, 5)
            layers.max_pool(2)
        layers.flatten()
        layers.linear("fc1", self.features)
        layers.relu()
        layers.linear("classes", self.classes)
        model = ConvNetwork(self, layers)
        init.init_layers(model, init.caffe_xavier)
        return model

    def recipe(self) -> Recipe:
        """The settings of the attacked networks; the paper does not specify them."""
        return ChenFlatCNN().recipe()


register_model(
    "sabour2017_cnn_mnist", FlatCNN(), "35.4M", n_parameters=35_445_522, data="mnist", augmentation="sabour2017.mnist"
)
register_model(
    "sabour2017_cnn_multimnist",
    PooledCNN(),
    "24.56M",
    n_parameters=24_563_978,
    data=by_preset("multimnist", "multimnist-official"),
    augmentation="sabour2017.multimnist",
    lr_schedule=Exponential(0.96, 20_000, floor=1e-3),
)
register_model(
    "sabour2017_cnn_affnist",
    PooledCNN(image=(1, 40, 40), features=320, dropout=0.5, n_objects=1),
    n_parameters=11_514_570,
    data="expanded-mnist",
    test_data="affnist",
    augmentation="sabour2017.expanded-mnist",
    note="the paper stops training at 99.22 % accuracy on the test set of expanded MNIST",
)
for _data, _classes, _cnn, _resnet in (
    ("cifar10", 10, ("18.92M", 18_919_434), ("11.17M", 11_173_962)),
    ("cifar100", 100, ("19.01M", 19_011_684), ("11.22M", 11_220_132)),
):
    _recipe: dict[str, Any] = {"data": _data, "augmentation": f"tsai2020.{_data}"}
    register_model(f"tsai2020_cnn_{_data}", TsaiCNN(classes=_classes), _cnn[0], n_parameters=_cnn[1], **_recipe)
    register_model(
        f"tsai2020_resnet18_{_data}", ResNet18(classes=_classes), _resnet[0], n_parameters=_resnet[1], **_recipe
    )
register_model("tsai2020_diverse_cnn", TsaiDiverseCNN(), n_parameters=19_553_162, data="diverse-multimnist")
register_model(
    "tsai2020_diverse_cnn_fc", TsaiDiverseCNN(pool=False), "42.49M", n_parameters=42_490_762, data="diverse-multimnist"
)
register_model(
    "chen2019_cnn_mnist", ChenFlatCNN(), "35.4M", n_parameters=35_445_522, data="mnist", augmentation="chen2019.mnist"
)
register_model("chen2019_lenet", LeNet(), n_parameters=431_080, data="mnist", augmentation="chen2019.mnist")
register_model(
    "chen2019_cnn_cifar10",
    ChenCNN(),
    "9.6M",
    n_parameters=9_737_226,
    published_rule="unmatched",
    data="cifar10",
    augmentation="chen2019.cifar10",
)
