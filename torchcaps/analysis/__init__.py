"""Analyses of trained networks: each a function of a model and images, a figure, and a declaration.

The functions take images as the model takes them. `run_analysis` runs an analysis by name on a network and a
`torchcaps.data.Loader`; ``torchcaps analyze`` does so for a run directory. `torchcaps.training.load_run` returns a
trained network with its preprocessing.

>>> import torch, torchcaps
>>> from torchcaps.analysis import logit_change
>>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
>>> result = logit_change(model, torch.rand(2, 1, 28, 28), iterations=3)
>>> result.layers, result.measured, list(result.change.shape)
(('digit',), ('logits',), [1, 3])
"""

from torchcaps.analysis.acgan import GAN, train_acgan
from torchcaps.analysis.adversarial import AttackResult, attack, draw_attack
from torchcaps.analysis.affine import AffineSweep, affine_sweep, draw_affine, transform
from torchcaps.analysis.alignment import (
    Alignment,
    alignment_ratio,
    measure_alignment,
    random_reference,
)
from torchcaps.analysis.alignment_figures import draw_alignment, draw_cosines
from torchcaps.analysis.attacks import bim, fgsm, pgd
from torchcaps.analysis.couplings import CouplingMaps, LayerCouplings, coupling_maps, draw_couplings
from torchcaps.analysis.dead import DeadCapsules, DeadLayer, dead_capsules, draw_dead
from torchcaps.analysis.gan import Generalization, draw_generalization, draw_generated, measure_generalization
from torchcaps.analysis.logits import LogitChange, draw_logit_change, logit_change
from torchcaps.analysis.perturbation import Perturbation, draw_perturbation, perturb
from torchcaps.analysis.pixel_network import PixelNetwork
from torchcaps.analysis.predictions import Predictions, draw_predictions, predict_images
from torchcaps.analysis.reconstruction import Reconstructions, draw_reconstructions, reconstruct
from torchcaps.analysis.registry import (
    ANALYSES,
    Analysis,
    AnalysisReport,
    Column,
    Subject,
    Summary,
    list_analyses,
    register_analysis,
    run_analysis,
)
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment
from torchcaps.analysis.trajectories import Trajectories, draw_trajectories, find_trajectories
from torchcaps.analysis.universal import UniversalPerturbation, train_universal
from torchcaps.analysis.universal_figures import draw_universal, draw_universal_sizes

__all__ = [
    "ANALYSES",
    "GAN",
    "AffineSweep",
    "Alignment",
    "Analysis",
    "AnalysisReport",
    "AttackResult",
    "Column",
    "CouplingMaps",
    "DeadCapsules",
    "DeadLayer",
    "Generalization",
    "LayerCouplings",
    "LogitChange",
    "Perturbation",
    "PixelNetwork",
    "Predictions",
    "Reconstructions",
    "Segmentation",
    "Subject",
    "Summary",
    "Trajectories",
    "UniversalPerturbation",
    "affine_sweep",
    "alignment_ratio",
    "attack",
    "bim",
    "coupling_maps",
    "dead_capsules",
    "draw_affine",
    "draw_alignment",
    "draw_attack",
    "draw_cosines",
    "draw_couplings",
    "draw_dead",
    "draw_generalization",
    "draw_generated",
    "draw_logit_change",
    "draw_perturbation",
    "draw_predictions",
    "draw_reconstructions",
    "draw_segmentation",
    "draw_trajectories",
    "draw_universal",
    "draw_universal_sizes",
    "fgsm",
    "find_trajectories",
    "intersection_over_union",
    "list_analyses",
    "logit_change",
    "measure_alignment",
    "measure_generalization",
    "perturb",
    "pgd",
    "predict_images",
    "random_reference",
    "reconstruct",
    "register_analysis",
    "run_analysis",
    "segment",
    "train_acgan",
    "train_universal",
    "transform",
]
