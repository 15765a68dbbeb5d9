"""Data sets of the papers, real and generated, your own images, and batches of them that are repeatable bit by bit."""

from torchcaps.data.base import Dataset, ImageSet
from torchcaps.data.batch import Batch
from torchcaps.data.colour import Brightness, Contrast, MeanImage, Normalize, Standardize
from torchcaps.data.datasets.affnist import AffNIST
from torchcaps.data.datasets.affnist_style import AffNISTStyle
from torchcaps.data.datasets.cifar import CIFAR10, CIFAR100
from torchcaps.data.datasets.digits import Digits
from torchcaps.data.datasets.expanded_mnist import ExpandedMNIST
from torchcaps.data.datasets.folder import Folder
from torchcaps.data.datasets.mnist import MNIST, FashionMNIST
from torchcaps.data.datasets.multimnist import DiverseMultiMNIST, MultiMNIST
from torchcaps.data.datasets.norb import SmallNORB
from torchcaps.data.datasets.svhn import SVHN
from torchcaps.data.errors import DataError, MissingData
from torchcaps.data.geometry import Affine, CenterCrop, Flip, PadTo, RandomCrop, Shift
from torchcaps.data.loader import Loader
from torchcaps.data.pipelines import Pipeline, create_pipeline, list_pipelines
from torchcaps.data.registry import create_dataset, list_datasets, register
from torchcaps.data.spec import DataSpec, Request
from torchcaps.data.transforms import Pixels, Step

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "MNIST",
    "SVHN",
    "AffNIST",
    "AffNISTStyle",
    "Affine",
    "Batch",
    "Brightness",
    "CenterCrop",
    "Contrast",
    "DataError",
    "DataSpec",
    "Dataset",
    "Digits",
    "DiverseMultiMNIST",
    "ExpandedMNIST",
    "FashionMNIST",
    "Flip",
    "Folder",
    "ImageSet",
    "Loader",
    "MeanImage",
    "MissingData",
    "MultiMNIST",
    "Normalize",
    "PadTo",
    "Pipeline",
    "Pixels",
    "RandomCrop",
    "Request",
    "Shift",
    "SmallNORB",
    "Standardize",
    "Step",
    "create_dataset",
    "create_pipeline",
    "list_datasets",
    "list_pipelines",
    "register",
]
