"""A network written down layer by layer, as the papers' tables do, while the sizes follow by themselves."""

from typing import Any, Literal

from torch import nn

from torchcaps.models.init import steady_std
from torchcaps.nn import ConvCapsules, DenseCapsules, PrimaryCapsules
from torchcaps.nn.layers import CapsuleLayer
from torchcaps.nn.sizes import Pair, resolve_padding
from torchcaps.routing import Routing

__all__ = ["ImageTooSmall", "Layers"]

Padding = int | Literal["same"]

# What squashed sums start from, in children's lengths: a class capsule well below 1; in between, 2 is the least with
# which a length can pass from layer to layer without dying away (0.5 then gives 0.5).
CLASS_GAIN, HIDDEN_GAIN = 0.7, 2.0


class ImageTooSmall(ValueError):
    """A window does not fit into what the layers before it leave of the image."""


class Layers:
    """The layers of a network, in order. Each method adds one and follows the image's size through it.

    Args:
        image: ``(channels, height, width)``.
        streamed: of all capsule layers.

    After the last layer ``channels`` and ``grid`` (and ``types``, ``dim`` of capsules) tell what comes out.
    """

    def __init__(self, image: tuple[int, int, int], streamed: bool | Literal["auto"] = "auto") -> None:
        self.channels, self.grid = image[0], (image[1], image[2])
        self.streamed: bool | Literal["auto"] = streamed
        self.types, self.dim = 0, 0
        self.front: dict[str, nn.Module] = {}
        self.capsules: dict[str, CapsuleLayer] = {}

    # Convolutional networks -------------------------------------------------------------------------------

    def add(self, name: str, module: nn.Module, channels: int | None = None) -> None:
        """Add a module that keeps the grid."""
        self.front[name] = module
        self.channels = self.channels if channels is None else channels

    def conv(
        self, name: str, channels: int, kernel: int, stride: int = 1, padding: int = 0, *, bias: bool = True
    ) -> nn.Conv2d:
        """Add a convolution."""
        module = nn.Conv2d(self.channels, channels, kernel, stride, padding, bias=bias)
        self._shrink(name, kernel, stride, padding)
        self.add(name, module, channels)
        return module

    def block(self, name: str, module: nn.Module, channels: int, stride: int) -> None:
        """Add a block that sees the grid through padded windows: only its stride shrinks it."""
        self.grid = (-(-self.grid[0] // stride), -(-self.grid[1] // stride))
        self.add(name, module, channels)

    def relu(self, slope: float = 0.0) -> None:
        """Add a ReLU, or a leaky one."""
        self._then("relu", nn.LeakyReLU(slope) if slope else nn.ReLU())

    def norm(self, **options: Any) -> None:
        """Add a batch normalisation."""
        self._then("norm", nn.BatchNorm2d(self.channels, **options))

    def max_pool(self, size: int) -> None:
        """Add a maximum over windows that don't overlap."""
        self._shrink("pool", size, size, 0)
        self._then("pool", nn.MaxPool2d(size))

    def mean_pool(self, size: int | None = None) -> None:
        """Add a mean over windows that don't overlap, or over the whole grid."""
        window = self.grid if size is None else (size, size)
        self._shrink("pool", window, window, 0)
        self._then("pool", nn.AvgPool2d(window))

    def flatten(self) -> None:
        """Read all channels of all places as one vector."""
        self._then("flatten", nn.Flatten())
        self.channels, self.grid = self.channels * self.grid[0] * self.grid[1], (1, 1)

    def linear(self, name: str, features: int) -> None:
        """Add a fully-connected layer to a flat vector."""
        self.add(name, nn.Linear(self.channels, features), features)

    def dropout(self, rate: float) -> None:
        """Add dropout."""
        self._then("dropout", nn.Dropout(rate))

    # Capsules ---------------------------------------------------------------------------------------------

    def primary(
        self, types: int, dim: int, kernel: int, stride: int = 1, padding: Padding = 0, **options: Any
    ) -> PrimaryCapsules:
        """Add the primary capsules, which end the convolutional part."""
        module = PrimaryCapsules(self.channels, types, dim, kernel, stride, padding, **options)
        self._shrink("primary", kernel, stride, padding)
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
        **options: Any,
    ) -> None:
        """Add a convolutional capsule layer."""
        grid = self.grid
        self._shrink(name, kernel, stride, padding)
        window = (kernel, kernel) if isinstance(kernel, int) else kernel
        gain = HIDDEN_GAIN if self.grid != (1, 1) else CLASS_GAIN
        options.setdefault("init", steady_std(routing, self.types * window[0] * window[1], types, dim, gain))
        self.capsules[name] = ConvCapsules(
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
        """Add a fully-connected capsule layer over all capsules of the grid."""
        children = self.types * self.grid[0] * self.grid[1]
        options.setdefault("init", steady_std(routing, children, parents, dim, CLASS_GAIN))
        sizes = (children, self.dim, parents, dim)
        self.capsules[name] = DenseCapsules(*sizes, routing=routing, streamed=self.streamed, **options)
        self.types, self.dim, self.grid = parents, dim, (1, 1)

    # ------------------------------------------------------------------------------------------------------

    def _then(self, name: str, module: nn.Module) -> None:
        """Add a module that belongs to the one before it, and is named after it."""
        before = next(reversed(self.front), "").split("_")[0]
        self.front[f"{before}_{name}" if before else name] = module

    def _shrink(self, name: str, kernel: int | Pair, stride: int | Pair, padding: Padding) -> None:
        kernel = (kernel, kernel) if isinstance(kernel, int) else kernel
        stride = (stride, stride) if isinstance(stride, int) else stride
        around = (padding, padding) if isinstance(padding, int) else padding
        top, bottom, left, right = resolve_padding(around, self.grid, kernel, stride)
        size = (self.grid[0] + top + bottom, self.grid[1] + left + right)
        if size[0] < kernel[0] or size[1] < kernel[1]:
            raise ImageTooSmall(
                f"the {kernel[0]}x{kernel[1]} window of {name!r} does not fit into the {size[0]}x{size[1]} that is left"
            )
        self.grid = ((size[0] - kernel[0]) // stride[0] + 1, (size[1] - kernel[1]) // stride[1] + 1)
