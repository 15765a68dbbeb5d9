"""The queue: the items that are run at the scale ``long``, in the order in which they are run.

``torchcaps reproduce queue`` runs it, ``torchcaps reproduce status`` shows its state; see docs/reproduction.md.
"""

from dataclasses import dataclass

__all__ = ["QUEUE", "QueueEntry"]


@dataclass(frozen=True)
class QueueEntry:
    """A table or figure in the queue, or a part of it.

    Args:
        paper, item: names of the paper and of its table or figure.
        rows, columns: selectors as for ``--rows`` and ``--columns``; all by default.
        seeds: number of seeds.
    """

    paper: str
    item: str
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: int = 2


QUEUE = (
    # 1. Routing by agreement on digits, and its robustness.
    QueueEntry("sabour2017", "table1", columns=("MNIST",), seeds=3),
    QueueEntry("sabour2017", "table1", columns=("MultiMNIST",)),
    QueueEntry("sabour2017", "sec52"),
    # 2. Inverted attention against other routings and against ResNet-18.
    QueueEntry("tsai2020", "fig5"),
    QueueEntry("tsai2020", "table1", rows=("simple", "Baseline CNN"), columns=("CIFAR-10",)),
    QueueEntry("tsai2020", "table1", rows=("Inverted attention, ResNet", "ResNet-18"), columns=("CIFAR-10",)),
    QueueEntry("tsai2020", "fig4"),
    # 3. The other tables.
    QueueEntry("chen2019", "table2", columns=("MNIST", "CIFAR-10")),
    QueueEntry("yang2021", "table2", columns=("MNIST", "Fashion-MNIST", "CIFAR-10")),
    QueueEntry("choi2019", "table1", rows=("CapsuleNet", "AR CapsNet"), columns=("C10", "C10+")),
    QueueEntry("choi2019", "table2", rows=("L = 0", "L = 4"), columns=("C10", "C10+")),
    QueueEntry("sabour2017", "sec7", rows=("CIFAR-10, one model", "without none-of-the-above")),
    QueueEntry("sabour2017", "figa2"),
    # If time allows: six networks in addition to one of those above.
    QueueEntry("sabour2017", "sec7", rows=("CIFAR-10, 7 models",), seeds=1),
)
