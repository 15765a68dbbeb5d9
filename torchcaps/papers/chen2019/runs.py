"""Training runs of Chen 2019: G-CapsNets, CapsNet with dynamic routing and CNNs, on MNIST and CIFAR-10."""

from typing import Any

from torchcaps.models.schedules import Exponential, Inverse
from torchcaps.reproduce.scales import CPU_CIFAR, CPU_DIGITS, NARROW_CAPSNET, NARROW_CNN
from torchcaps.reproduce.schema import Run

__all__ = [
    "CIFAR_CNN",
    "CIFAR_CONV",
    "CIFAR_DYNAMIC",
    "CIFAR_FC",
    "CIFAR_MULTI",
    "CNN",
    "CONV",
    "CONV_PLAIN",
    "DYNAMIC",
    "DYNAMIC_PLAIN",
    "FC",
    "FC_PLAIN",
    "LENET",
]

# The scale long has the published 10,000 steps and learning rates, with the widths of the scale cpu: a run takes 25 to
# 45 minutes on one thread (0.16 s per step of a narrow MNIST network).
_LONG: dict[str, Any] = {"max_train_images": None, "max_test_images": None, "steps": 10_000}
LONG_MNIST = {**_LONG, "lr_schedule": Inverse(1e-4, 0.75)}
LONG_CIFAR = {**_LONG, "lr_schedule": Exponential(0.6, 8000, staircase=True)}

CAPSNET = {**CPU_DIGITS, **NARROW_CAPSNET}
CNN = Run("chen2019_cnn_mnist", cpu={**CPU_DIGITS, **NARROW_CNN}, long=LONG_MNIST)
DYNAMIC = Run("chen2019_dynamic_mnist", cpu=CAPSNET, long=LONG_MNIST)
FC = Run("chen2019_fc_mnist", cpu=CAPSNET, long=LONG_MNIST)
CONV = Run("chen2019_conv_mnist", cpu=CAPSNET, long=LONG_MNIST)
FC_PLAIN, CONV_PLAIN = FC.replace(reconstruction=False), CONV.replace(reconstruction=False)
DYNAMIC_PLAIN = DYNAMIC.replace(reconstruction=False)
LENET = Run("chen2019_lenet", cpu=CPU_DIGITS, long=LONG_MNIST)

SMALL = {**CPU_CIFAR, "width": 32, "types": 16}
CIFAR_CNN = Run("chen2019_cnn_cifar10", cpu={**CPU_CIFAR, "width": 32, "channels": 128}, long=LONG_CIFAR)
CIFAR_DYNAMIC = Run("chen2019_dynamic_cifar10", cpu=SMALL, long=LONG_CIFAR)
CIFAR_FC = Run("chen2019_fc_cifar10", cpu=SMALL, long=LONG_CIFAR)
CIFAR_CONV = Run("chen2019_conv_cifar10", cpu=SMALL, long=LONG_CIFAR)
CIFAR_MULTI = Run("chen2019_multi_cifar10", cpu=CPU_CIFAR, long=LONG_MNIST)  # Adam, as on MNIST; 20,000 steps published
