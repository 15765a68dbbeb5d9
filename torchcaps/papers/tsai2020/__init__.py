"""Tsai, Srivastava, Goh, Salakhutdinov 2020: Capsules with inverted dot-product attention routing.

`PAPER` has the paper's claims, the cost and our deviations; its items are in `cifar`, `variants` and `diverse`. Run an
item with ``torchcaps reproduce tsai2020 fig4 --scale cpu``.
"""

from torchcaps.papers import PAPERS
from torchcaps.papers.tsai2020.cifar import COST, FIG_4, TABLE_1
from torchcaps.papers.tsai2020.diverse import FIG_5
from torchcaps.papers.tsai2020.variants import ABLATIONS, INITIAL_POSES, LOSSES, VARIANCE
from torchcaps.reproduce.schema import Paper

__all__ = ["PAPER"]

PAPER = Paper(
    "tsai2020",
    "Y.-H. H. Tsai, N. Srivastava, H. Goh, R. Salakhutdinov: Capsules with Inverted Dot-Product Attention Routing. "
    "ICLR 2020, arXiv:2002.04764.",
    summary=(
        "Inverted attention with layer normalisation and concurrent iterations is more accurate than dynamic and EM "
        "routing on CIFAR-10 and CIFAR-100 with fewer parameters, matches ResNet-18 with a ResNet backbone, and "
        "recognises overlapping digits better than CNNs."
    ),
    cost="350 epochs of 50,000 images; the simple backbone takes 5 minutes per epoch on two cores, ResNets far more.",
    cpu_scale=(
        "64 channels and 8 capsule types (the paper: 256 and 32), the CNN with 256 channels (1,024), ResNets "
        "narrower; 10,000 images, 5 epochs, tested on 5,000; one-cycle learning rates up to the paper's. "
        "DiverseMultiMNIST: 64 neurons per position in every layer (1,024), 4 types of 16 dimensions (16 of 64; 24 "
        "types for the large network, which has as many parameters as the one with vectors), 20,000 images per epoch, "
        "4 epochs (628 steps). Scale long: the same networks on all images, 6 epochs of CIFAR (2,346 steps, 6 to 75 "
        "minutes on one thread; EM routing with more than two iterations 2 to 3 hours), 12 epochs of DiverseMultiMNIST "
        "(5,628 steps, 10 to 30 minutes)."
    ),
    deviations=(
        "Agreements are divided by the root of D, as in the authors' code but not in the paper's equation.",
        "Windows are unfolded in the correct order; the code released first scrambles them.",
    ),
    items=(TABLE_1, FIG_4, ABLATIONS, INITIAL_POSES, LOSSES, VARIANCE, COST, FIG_5),
)
PAPERS.register(PAPER.name, PAPER)
