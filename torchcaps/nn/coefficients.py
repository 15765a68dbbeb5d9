"""The tensors that a routing adds to its layer."""

import torch
from torch import Tensor, nn

from torchcaps.routing.base import Geometry, Routing

__all__ = ["Coefficients"]


class Coefficients(nn.Module):
    """The tensors that a routing adds to a layer: parameters if learned, otherwise buffers."""

    def __init__(
        self,
        routing: Routing,
        geometry: Geometry,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._names = []
        for name, coefficient in routing.coefficients(geometry).items():
            tensor = torch.empty(geometry.size(coefficient.axes), device=device, dtype=coefficient.dtype or dtype)
            if coefficient.learned:
                self.register_parameter(name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)
            self._names.append(name)

    def __getitem__(self, name: str) -> Tensor:
        return getattr(self, name)

    def named(self) -> dict[str, Tensor]:
        """Return all tensors by name, as `Routing.step` takes them."""
        return {name: self[name] for name in self._names}
