"""Choi, Seo, Im, Kang 2019: Attention routing between capsules.

`PAPER` has the paper's claims, the cost and our deviations. Run an item with
``torchcaps reproduce choi2019 table3 --scale cpu``.
"""

from torchcaps.papers import PAPERS
from torchcaps.papers.choi2019.accuracy import COST, TABLE_1, TABLE_2
from torchcaps.papers.choi2019.capsules import FIG_3, FIG_4, FIG_5, TABLE_3
from torchcaps.reproduce.schema import Paper

__all__ = ["PAPER"]

PAPER = Paper(
    "choi2019",
    "J. Choi, H. Seo, S. Im, M. Kang: Attention Routing Between Capsules. ICCV workshops 2019, arXiv:1907.01750.",
    summary=(
        "Attention instead of iterations, and a capsule activation, match CapsNet on MNIST with 0.65 of the "
        "parameters and a fifth of the time, are much more accurate on CIFAR-10, and give capsules that move along "
        "one direction per transformation."
    ),
    cost="MNIST: 20 epochs of 60,000 images, about 4 minutes each on two cores; CIFAR-10: 200 epochs.",
    cpu_scale=(
        "a quarter of the channels and half of the capsule types (16 and 4; CapsNet 64 and 8), 20,000 training "
        "images of which a tenth is the validation set, 4 epochs; CIFAR-10 10,000 images, 5 epochs; one-cycle learning "
        "rates; alignment "
        "on 1,000 test digits."
    ),
    deviations=(
        "The class capsules are not mixed with each other; the last reshape of the authors' code mixes them.",
        "Sub-pixel shifts, rotation about the centre: see the augmentation pipelines.",
    ),
    items=(TABLE_1, TABLE_2, COST, FIG_3, TABLE_3, FIG_4, FIG_5),
)
PAPERS.register(PAPER.name, PAPER)
