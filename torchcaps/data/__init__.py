"""Data sets of the papers, directories of images, augmentation pipelines, and a loader with bit-exact batches."""

from torchcaps.data.base import Batch, Dataset, DataSpec, ImageSet, LoadRequest
from torchcaps.data.datasets.affnist import AffNIST, AffNISTStyle
from torchcaps.data.datasets.cifar import CIFAR10, CIFAR100
from torchcaps.data.datasets.digits import Digits
from torchcaps.data.datasets.expanded_mnist import ExpandedMNIST
from torchcaps.data.datasets.folder import Folder
from torchcaps.data.datasets.mnist import MNIST, FashionMNIST
from torchcaps.data.datasets.multimnist import DiverseMultiMNIST, MultiMNIST
from torchcaps.data.datasets.norb import SmallNORB
from torchcaps.data.datasets.svhn import SVHN
from torchcaps.data.geometry import (
    CenterCrop,
    PadTo,
    RandomAffine,
    RandomCrop,
    RandomHorizontalFlip,
    RandomRelativeShift,
    RandomShift,
)
from torchcaps.data.loader import Loader
from torchcaps.data.pipelines import Pipeline, create_pipeline, list_pipelines
from torchcaps.data.registry import create_dataset, list_datasets, register_dataset
from torchcaps.data.storage import DataError, DownloadError, MissingDataError
from torchcaps.data.transforms import (
    Normalize,
    RandomBrightness,
    RandomContrast,
    ScalePixels,
    Standardize,
    SubtractMeanImage,
    Transform,
)

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SVHN",
    "AffNIST",
    "AffNISTStyle",
    "Batch",
    "CenterCrop",
    "DataError",
    "DataSpec",
    "Dataset",
    "Digits",
    "DiverseMultiMNIST",
    "DownloadError",
    "ExpandedMNIST",
    "FashionMNIST",
    "Folder",
    "ImageSet",
    "LoadRequest",
    "Loader",
    "MissingDataError",
    "MultiMNIST",
    "Normalize",
    "PadTo",
    "Pipeline",
    "RandomAffine",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomRelativeShift",
    "RandomShift",
    "ScalePixels",
    "SmallNORB",
    "Standardize",
    "SubtractMeanImage",
    "Transform",
    "create_dataset",
    "create_pipeline",
    "list_datasets",
    "list_pipelines",
    "register_dataset",
]
