"""What capsules know: analyses of a trained model, each a function of a model and images, with one that draws it.

Images are those that the model takes. `torchcaps.training.load_run` gives a trained model with its pipeline.

>>> import torch, torchcaps
>>> from torchcaps.analysis import logit_change
>>> model = torchcaps.create_model("capsnet_small", width=4, types=2, hidden=(8,))
>>> found = logit_change(model, torch.rand(2, 1, 28, 28), iterations=3)
>>> found.layers, found.measured, list(found.change.shape)
(('digit',), ('logits',), [1, 3])
"""

from torchcaps.analysis.affine import AffineSweep, affine_sweep, draw_affine, transformed
from torchcaps.analysis.alignment import (
    Alignment,
    align,
    alignment_ratio,
    draw_alignment,
    draw_cosines,
    random_reference,
)
from torchcaps.analysis.attacks import AttackResult, attack, bim, draw_attack, fgsm, pgd
from torchcaps.analysis.couplings import CouplingMaps, LayerCouplings, coupling_maps, draw_couplings
from torchcaps.analysis.dead import DeadCapsules, DeadLayer, dead_capsules, draw_dead
from torchcaps.analysis.directions import Directions, directions, draw_directions
from torchcaps.analysis.gan import (
    GAN,
    Generalisation,
    draw_generalisation,
    draw_generated,
    generalisation,
    train_acgan,
)
from torchcaps.analysis.logits import LogitChange, draw_logit_change, logit_change
from torchcaps.analysis.perturbation import Perturbation, draw_perturbation, perturb
from torchcaps.analysis.pixels import PixelNetwork
from torchcaps.analysis.reconstruction import Reconstructions, draw_reconstructions, reconstruct
from torchcaps.analysis.segmentation import Segmentation, draw_segmentation, intersection_over_union, segment
from torchcaps.analysis.universal import Universal, draw_universal, draw_universal_sizes, train_universal

__all__ = [
    "GAN",
    "AffineSweep",
    "Alignment",
    "AttackResult",
    "CouplingMaps",
    "DeadCapsules",
    "DeadLayer",
    "Directions",
    "Generalisation",
    "LayerCouplings",
    "LogitChange",
    "Perturbation",
    "PixelNetwork",
    "Reconstructions",
    "Segmentation",
    "Universal",
    "affine_sweep",
    "align",
    "alignment_ratio",
    "attack",
    "bim",
    "coupling_maps",
    "dead_capsules",
    "directions",
    "draw_affine",
    "draw_alignment",
    "draw_attack",
    "draw_cosines",
    "draw_couplings",
    "draw_dead",
    "draw_directions",
    "draw_generalisation",
    "draw_generated",
    "draw_logit_change",
    "draw_perturbation",
    "draw_reconstructions",
    "draw_segmentation",
    "draw_universal",
    "draw_universal_sizes",
    "fgsm",
    "generalisation",
    "intersection_over_union",
    "logit_change",
    "perturb",
    "pgd",
    "random_reference",
    "reconstruct",
    "segment",
    "train_acgan",
    "train_universal",
    "transformed",
]
