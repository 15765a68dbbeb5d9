"""Layer lists written like the tables of the papers; sizes are propagated from layer to layer."""

from typing import Any, Literal

from torch import nn

from torchcaps.models.init import squash_std
from torchcaps.nn import ConvCapsules, DenseCapsules, ImageDropout, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.nn.sizes import Pair, resolve_padding
from torchcaps.routing import Routing

__all__ = ["ImageTooSmallError", "Layers"]

Padding = int | Literal["same"]

# Initial length of the weighted vote sum before squashing, relative to the length of the children. Class capsules start
# well below 1. In hidden layers 2 is the smallest gain for which lengths do not decay from layer to layer: a sum of
# length 2 x 0.5 is squashed to 0.5.
CLASS_GAIN, HIDDEN_GAIN = 0.7, 2.0


class ImageTooSmallError(ValueError):
    """A window is larger than the grid that the preceding layers produce."""


class Layers:
    """Layers of a network, in order. Each method appends a layer and updates the size of its output.

    Args:
        image: image size ``(channels, height, width)``.
        streamed: vote storage of all capsule layers, see `torchcaps.nn.ConvCapsules`.

    Attributes:
        channels, grid: channels and ``(height, width)`` of the current output.
        types, dim: capsule types (dense layers: capsules) and pose size of the current output.
        front: modules up to the primary capsules, or all modules of a convolutional network.
        capsules: capsule layers.
    """

    def __init__(self, image: tuple[int, int, int], streamed: bool | Literal["auto"] = "auto") -> None:
        self.channels, self.grid = image[0], (image[1], image[2])
        self.streamed: bool | Literal["auto"] = streamed
        self.types, self.dim = 0, 0
        self.front: dict[str, nn.Module] = {}
        self.capsules: dict[str, CapsuleLayer] = {}

    # Convolutional networks -------------------------------------------------------------------------------

    def add(self, name: str, module: nn.Module, channels: int | None = None) -> None:
        """Append a module that keeps the grid."""
        self.front[name] = module
        self.channels = self.channels if channels is None else channels

    def conv(
        self, name: str, channels: int, kernel: int, stride: int = 1, padding: int = 0, *, bias: bool = True
    ) -> nn.Conv2d:
        """Append a convolution and return it."""
        module = nn.Conv2d(self.channels, channels, kernel, stride, padding, bias=bias)
        self._update_grid(name, kernel, stride, padding)
        self.add(name, module, channels)
        return module

    def block(self, name: str, module: nn.Module, channels: int, stride: int) -> None:
        """Append a block with padded convolutions, which only its stride makes smaller."""
        self.grid = (-(-self.grid[0] // stride), -(-self.grid[1] // stride))
        self.add(name, module, channels)

    def relu(self, slope: float = 0.0) -> None:
        """Append a ReLU, or a leaky ReLU with this slope."""
        self._add_after("relu", nn.LeakyReLU(slope) if slope else nn.ReLU())

    def batch_norm(self, **options: Any) -> None:
        """Append a batch normalisation."""
        self._add_after("norm", nn.BatchNorm2d(self.channels, **options))

    def instance_norm(self, **options: Any) -> None:
        """Append an instance normalisation with scale and shift, initialised as in Keras' ``random_uniform``."""
        if self.grid == (1, 1):
            raise ImageTooSmallError("an instance normalisation needs more than one position")
        module = nn.InstanceNorm2d(self.channels, affine=True, **options)
        for parameter in module.parameters():
            nn.init.uniform_(parameter, -0.05, 0.05)
        self._add_after("norm", module)

    def max_pool(self, size: int) -> None:
        """Append max pooling over windows that do not overlap."""
        self._update_grid("pool", size, size, 0)
        self._add_after("pool", nn.MaxPool2d(size))

    def avg_pool(self, size: int | None = None) -> None:
        """Append average pooling over windows that do not overlap, or over the complete grid."""
        window = self.grid if size is None else (size, size)
        self._update_grid("pool", window, window, 0)
        self._add_after("pool", nn.AvgPool2d(window))

    def flatten(self) -> None:
        """Flatten channels and grid to a vector."""
        self._add_after("flatten", nn.Flatten())
        self.channels, self.grid = self.channels * self.grid[0] * self.grid[1], (1, 1)

    def linear(self, name: str, features: int) -> None:
        """Append a fully-connected layer; the input must be flat."""
        self.add(name, nn.Linear(self.channels, features), features)

    def dropout(self, rate: float) -> None:
        """Append dropout."""
        self._add_after("dropout", ImageDropout(rate))

    # Capsules ---------------------------------------------------------------------------------------------

    def primary(
        self, types: int, dim: int, kernel: int | Pair, stride: int = 1, padding: Padding = 0, **options: Any
    ) -> PrimaryCapsules:
        """Append the primary capsules, the last module of the front, and return them."""
        module = PrimaryCapsules(self.channels, types, dim, kernel, stride, padding, **options)
        self._update_grid("primary", kernel, stride, padding)
        self.front["primary"] = module
        self.types, self.dim = types, dim
        return module

    def conv_capsules(
        self,
        name: str,
        types: int,
        dim: int,
        kernel: int | Pair,
        stride: int = 1,
        padding: Padding = 0,
        *,
        routing: Routing,
        layer_class: type[ConvCapsules] = ConvCapsules,
        **options: Any,
    ) -> None:
        """Append a convolutional capsule layer, an instance of ``layer_class``."""
        grid = self.grid
        self._update_grid(name, kernel, stride, padding)
        window = (kernel, kernel) if isinstance(kernel, int) else kernel
        gain = HIDDEN_GAIN if self.grid != (1, 1) else CLASS_GAIN
        options.setdefault("init", squash_std(routing, self.types * window[0] * window[1], types, dim, gain))
        self.capsules[name] = layer_class(
            self.types,
            self.dim,
            types,
            dim,
            kernel,
            stride,
            padding,
            routing=routing,
            grid=grid,
            streamed=self.streamed,
            **options,
        )
        self.types, self.dim = types, dim

    def dense_capsules(self, name: str, parents: int, dim: int, *, routing: Routing, **options: Any) -> None:
        """Append a fully-connected capsule layer over all capsules of the grid."""
        children = self.types * self.grid[0] * self.grid[1]
        options.setdefault("init", squash_std(routing, children, parents, dim, CLASS_GAIN))
        sizes = (children, self.dim, parents, dim)
        self.capsules[name] = DenseCapsules(*sizes, routing=routing, streamed=self.streamed, **options)
        self.types, self.dim, self.grid = parents, dim, (1, 1)

    # ------------------------------------------------------------------------------------------------------

    def _add_after(self, name: str, module: nn.Module) -> None:
        """Append a module that belongs to the preceding one and is named after it: ``conv1_relu``."""
        previous = next(reversed(self.front), "").split("_")[0]
        full = f"{previous}_{name}" if previous else name
        count = sum(other.startswith(full) for other in self.front)  # two poolings after one convolution
        self.front[f"{full}{count + 1}" if count else full] = module

    def _update_grid(self, name: str, kernel: int | Pair, stride: int | Pair, padding: Padding) -> None:
        """Set the grid to the output of a window; raise an `ImageTooSmallError` if the window does not fit."""
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        stride = (stride, stride) if isinstance(stride, int) else stride
        padding_pair = (padding, padding) if isinstance(padding, int) else padding
        top, bottom, left, right = resolve_padding(padding_pair, self.grid, kernel, stride)
        size = (self.grid[0] + top + bottom, self.grid[1] + left + right)
        if size[0] < kernel[0] or size[1] < kernel[1]:
            raise ImageTooSmallError(
                f"the {kernel[0]}x{kernel[1]} window of layer {name!r} is larger than its {size[0]}x{size[1]} input"
            )
        self.grid = ((size[0] - kernel[0]) // stride[0] + 1, (size[1] - kernel[1]) // stride[1] + 1)
