"""What the scale ``cpu`` changes, where several papers change the same: one place, so that their rows compare.

Rates follow `OneCycle` up to the paper's own and down again, since a decay laid out for hundreds of thousands of steps
would not have begun when these runs are over.
"""

from typing import Any

from torchcaps.models.schedules import OneCycle

__all__ = ["CIFAR", "DIGITS", "NARROW_CAPSNET", "NARROW_CNN"]

DIGITS: dict[str, Any] = {"max_train_images": 20_000, "epochs": 4, "lr_schedule": OneCycle()}
CIFAR: dict[str, Any] = {"max_train_images": 10_000, "epochs": 5, "lr_schedule": OneCycle(), "max_test_images": 5_000}
NARROW_CAPSNET: dict[str, Any] = {"width": 64, "types": 8}  # a quarter of the channels and of the capsule types
NARROW_CNN: dict[str, Any] = {"width": 32}  # an eighth of the channels
