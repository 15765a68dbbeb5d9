"""Measure the effect of each known mistake on the embedded digits, for docs/mistakes.md.

    python tools/mistakes.py [EPOCHS]

Trains the minimal CapsNet of tests/audit/mistakes.py, correct and with each mistake that changes training, and prints
Markdown. Single thread; the numbers are functions of the seed.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.audit.mistakes import MISTAKES, CapsNet, LeakedLabels
from torchcaps.data import create_dataset
from torchcaps.losses import MarginLoss

BATCH_SIZE = 50
TRAINED = (
    "softmax over children",
    "images of a batch mixed",
    "poses scrambled by a view",
    "primary capsules across positions",
    "dropout in evaluation",
    "children detached",
    "no squash",
)


def load(split: str) -> tuple[Tensor, Tensor]:
    dataset = create_dataset("digits", split)
    batch = dataset.get_batch(torch.arange(len(dataset)))
    return batch.images.float() / 255, batch.labels


def train(network: type[CapsNet], epochs: int, seed: int = 0) -> CapsNet:
    torch.manual_seed(seed)
    model = network().train()
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    images, labels = load("train")
    margin = MarginLoss()
    for _ in range(epochs):
        for part in torch.randperm(len(images)).split(BATCH_SIZE):
            lengths, reconstruction = model(images[part], labels[part])
            target = F.one_hot(labels[part], 10).float()
            loss = margin(lengths, target) + 0.0005 * (reconstruction - images[part].flatten(1)).square().sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: CapsNet, images: Tensor, labels: Tensor, batch_size: int = BATCH_SIZE) -> float:
    correct = [
        model(x)[0].argmax(1) == y for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True)
    ]
    return float(torch.cat(correct).float().mean())


def main(epochs: int = 4) -> None:
    torch.set_num_threads(1)
    images, labels = load("test")
    reference = train(CapsNet, epochs)
    print(f"correct network: {100 * accuracy(reference, images, labels):.1f} %", flush=True)
    for name in TRAINED:
        model = train(MISTAKES[name][0], epochs)
        found = f"{name}: {100 * accuracy(model, images, labels):.1f} %"
        if name == "images of a batch mixed":
            alone = accuracy(model, images, labels, 1)
            order = labels.argsort()
            by_class = accuracy(model, images[order], labels[order])
            found += f"; one image at a time {100 * alone:.1f} %, in batches of one class {100 * by_class:.1f} %"
        if name == "dropout in evaluation":
            second = accuracy(model, images, labels)
            found += f", and {100 * second:.1f} % in a second evaluation"
        if name == "no squash":
            found += f"; lengths up to {float(model(images)[0].detach().max()):.2f}"
        print(found, flush=True)
    print_leak(reference, images, labels)
    print_nan(images)


@torch.no_grad()
def print_leak(model: CapsNet, images: Tensor, labels: Tensor) -> None:
    """Print the reconstruction error of misclassified digits by the predicted capsule and by the true one."""
    leaking = LeakedLabels()
    leaking.load_state_dict(model.state_dict())
    wrong = model(images)[0].argmax(1) != labels
    errors = [
        float((net.eval()(images[wrong], labels[wrong])[1] - images[wrong].flatten(1)).square().sum(1).mean())
        for net in (model, leaking)
    ]
    print(
        f"labels in evaluation: reconstruction error of {int(wrong.sum())} misclassified digits {errors[0]:.1f}, "
        f"with the leaked label {errors[1]:.1f}"
    )


def print_nan(images: Tensor) -> None:
    """Print how many weights are NaN after one step with a black image among the digits."""
    torch.manual_seed(0)
    model = MISTAKES["NaN at zero"][0]().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()  # as Keras initialises
    batch = torch.cat([images[:49], torch.zeros(1, 1, 28, 28)])
    model(batch, torch.zeros(50, dtype=torch.int64))[0].sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.001 * parameter.grad
    n_nan = sum(int(p.isnan().sum()) for p in model.parameters())
    print(f"NaN at zero: {n_nan:,} of {sum(p.numel() for p in model.parameters()):,} weights are NaN after one step")


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
