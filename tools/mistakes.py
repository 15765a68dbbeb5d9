"""Measure the effect of each known mistake on the embedded digits, for docs/mistakes.md.

    python tools/mistakes.py [EPOCHS] [SEEDS]

Trains the minimal CapsNet of tests/audit/mistakes.py, correct and with each mistake that changes training, once per
seed; writes results/bench/mistakes.json after each training, continues an interrupted measurement, and prints Markdown.
Single thread; the numbers are functions of the seeds.
"""

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.audit.mistakes import MISTAKES, CapsNet, LeakedLabels, ScrambledWindowsNet, WindowedNet
from torchcaps._core.stats import NORMAL_QUANTILE, student_quantile
from torchcaps.data import create_dataset
from torchcaps.losses import MarginLoss

RECORD = Path(__file__).resolve().parent.parent / "results" / "bench" / "mistakes.json"
BATCH_SIZE = 50
CORRECT = "correct network"
WINDOWED, SCRAMBLED = "correct network with a capsule convolution", "windows unfolded with the wrong axes"
NETWORKS = {CORRECT: CapsNet, WINDOWED: WindowedNet, SCRAMBLED: ScrambledWindowsNet}
REFERENCES = {SCRAMBLED: WINDOWED}  # of all others: CORRECT
TRAINED = (
    CORRECT,
    "softmax over children",
    "images of a batch mixed",
    "poses scrambled by a view",
    "primary capsules across positions",
    "dropout in evaluation",
    "children detached",
    "no squash",
    WINDOWED,
    SCRAMBLED,
)


def load(split: str) -> tuple[Tensor, Tensor]:
    """Return all images and labels of a split of the embedded digits."""
    dataset = create_dataset("digits", split)
    batch = dataset.get_batch(torch.arange(len(dataset)))
    return batch.images.float() / 255, batch.labels


def train(network: type[CapsNet], epochs: int, seed: int = 0) -> CapsNet:
    """Return a trained network."""
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
def errors(model: CapsNet, images: Tensor, labels: Tensor, batch_size: int = BATCH_SIZE) -> list[int]:
    """Return the indices of the misclassified images."""
    batches = zip(images.split(batch_size), labels.split(batch_size), strict=True)
    wrong = torch.cat([model(x)[0].argmax(1) != y for x, y in batches])
    return wrong.nonzero().flatten().tolist()


def measure(name: str, epochs: int, seed: int) -> dict[str, Any]:
    """Train one network; return its errors on the test digits and the numbers that belong to its mistake."""
    images, labels = load("test")
    model = train(NETWORKS.get(name) or MISTAKES[name][0], epochs, seed)
    row: dict[str, Any] = {"name": name, "epochs": epochs, "seed": seed, "errors": errors(model, images, labels)}
    if name == CORRECT:
        row["leak"] = measure_leak(model, images, labels)
    if name == "images of a batch mixed":
        order = labels.argsort()
        row["n_errors_alone"] = len(errors(model, images, labels, 1))
        row["n_errors_by_class"] = len(errors(model, images[order], labels[order]))
    if name == "dropout in evaluation":
        row["n_errors_second"] = len(errors(model, images, labels))
    if name == "no squash":
        row["largest_length"] = float(model(images)[0].detach().max())
    return row


@torch.no_grad()
def measure_leak(model: CapsNet, images: Tensor, labels: Tensor) -> list[float]:
    """Return the reconstruction error of misclassified digits by the predicted capsule, and by the leaked label's."""
    leaking = LeakedLabels().eval()
    leaking.load_state_dict(model.state_dict())
    wrong = model(images)[0].argmax(1) != labels
    images, labels = images[wrong], labels[wrong]
    return [float((net(images, labels)[1] - images.flatten(1)).square().sum(1).mean()) for net in (model, leaking)]


def count_nan() -> tuple[int, int]:
    """Return how many weights are NaN after one step with a black image among the digits, and the number of weights."""
    images, _ = load("test")
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
    return sum(int(p.isnan().sum()) for p in model.parameters()), sum(p.numel() for p in model.parameters())


def interval(rows: list[dict[str, Any]], reference: list[dict[str, Any]], n_images: int) -> tuple[float, float]:
    """Return the mean difference in accuracy of the same seeds, and half of its 95 % interval.

    The interval contains both the randomness of the trainings (Student's t over the seeds) and that of the test images
    (normal approximation), as independent contributions.
    """
    by_seed = [(len(b["errors"]) - len(a["errors"])) / n_images for a, b in zip(rows, reference, strict=True)]
    by_image = [0.0] * n_images
    for sign, networks in ((-1, rows), (1, reference)):
        for network in networks:
            for index in network["errors"]:
                by_image[index] += sign / len(rows)
    n_seeds = len(rows)
    of_seeds = student_quantile(n_seeds - 1) * statistics.stdev(by_seed) / math.sqrt(n_seeds) if n_seeds > 1 else 1.0
    of_images = NORMAL_QUANTILE * statistics.stdev(by_image) / math.sqrt(n_images)
    return statistics.mean(by_seed), math.hypot(of_seeds, of_images)


def show(rows: list[dict[str, Any]], n_images: int) -> None:
    """Print Markdown: accuracies, and differences from the correct network."""
    print("\n| network | accuracy of each seed | difference from the correct network, 95 % interval |\n|---|---|---|")
    for name in TRAINED:
        own = [row for row in rows if row["name"] == name]
        accuracies = ", ".join(f"{100 * (1 - len(row['errors']) / n_images):.1f}" for row in own)
        text = ""
        if name not in (CORRECT, WINDOWED):
            seeds = {row["seed"] for row in own}
            correct = REFERENCES.get(name, CORRECT)
            reference = [row for row in rows if row["name"] == correct and row["seed"] in seeds]
            mean, half = interval(own, reference, n_images)
            text = f"{100 * mean:+.1f} ({100 * (mean - half):+.1f} to {100 * (mean + half):+.1f})"
        print(f"| {name} | {accuracies} % | {text} |")
    extras = ("leak", "n_errors_alone", "n_errors_by_class", "n_errors_second", "largest_length")
    for key in extras:
        print(f"{key}: {[row[key] for row in rows if key in row]}")
    print("NaN at zero: {:,} of {:,} weights are NaN after one step".format(*count_nan()))


def main(epochs: int = 4, seeds: int = 3) -> None:
    """Measure what the record does not contain yet, and print it."""
    torch.set_num_threads(1)
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows = [row for row in record.get("rows", []) if row["epochs"] == epochs and row["seed"] < seeds]
    done = {(row["name"], row["seed"]) for row in rows}
    n_images = len(load("test")[0])
    for seed in range(seeds):
        for name in TRAINED:
            if (name, seed) in done:
                continue
            rows.append(measure(name, epochs, seed))
            n_errors = len(rows[-1]["errors"])
            print(f"seed {seed}, {name}: {100 * (1 - n_errors / n_images):.1f} %", flush=True)
            record = {"torch": torch.__version__, "test_images": n_images, "rows": rows}
            RECORD.write_text(json.dumps(record) + "\n")
    show(rows, n_images)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
