"""Training runs of Yang 2021, by data set and variant of the routing."""

from torchcaps.reproduce.scales import CPU_CIFAR, CPU_DIGITS, LONG_CIFAR, LONG_DIGITS, NARROW_CAPSNET
from torchcaps.reproduce.schema import Run
from torchcaps.routing import Dynamic

__all__ = [
    "CIFAR10_VARIANTS",
    "ERROR",
    "FASHION",
    "MNIST",
    "MULTIMNIST_VARIANTS",
    "QUADRATIC",
    "routing_variants",
]

ERROR = "test error, %"
QUADRATIC = ("L2", "L1", "L2/FC", "L1/FC")  # the variants with quadratic-program routing

SHORT = {**CPU_DIGITS, **NARROW_CAPSNET}
# The paper trains MNIST with 32 images per step if there is no reconstruction. The scale long takes 12 to 16 minutes
# per run on MNIST, twice that on Fashion-MNIST and about 30 minutes on CIFAR-10, on one thread.
MNIST = Run("yang2021_mnist", cpu={**SHORT, "batch_size": 128}, long=LONG_DIGITS)
FASHION = Run("yang2021_fashion_mnist", cpu=SHORT, long={**LONG_DIGITS, "epochs": 20})
_CIFAR10 = Run("yang2021_cifar10", cpu={**CPU_CIFAR, **NARROW_CAPSNET}, long={**LONG_CIFAR, "epochs": 20})
_MULTIMNIST = Run(
    "yang2021_multimnist",
    cpu={"steps": 1_500, "max_test_images": 5_000, "lr_schedule": CPU_DIGITS["lr_schedule"], **NARROW_CAPSNET},
    long={"steps": 6_000, "max_test_images": None},
)


def routing_variants(run: Run) -> dict[str, Run]:
    """Return three routings with reconstruction and, "/FC", without; the paper's table lacks one of the six."""
    return {
        "Dynamic": run.replace(routing=Dynamic(3)),
        "L2": run,
        "L1": run.replace(penalty="l1"),
        "Dynamic/FC": run.replace(routing=Dynamic(3), reconstruction=False),
        "L2/FC": run.replace(reconstruction=False),
        "L1/FC": run.replace(penalty="l1", reconstruction=False),
    }


# The CIFAR-10 network has no reconstruction; the paper prints dynamic routing in the row "Dynamic".
CIFAR10_VARIANTS = {
    "Dynamic": _CIFAR10.replace(routing=Dynamic(3, leak=True)),
    "L2/FC": _CIFAR10,
    "L1/FC": _CIFAR10.replace(penalty="l1"),
}
MULTIMNIST_VARIANTS = {
    "Dynamic": _MULTIMNIST.replace(routing=Dynamic(3)),
    "L2": _MULTIMNIST,
    "L1": _MULTIMNIST.replace(penalty="l1"),
}
