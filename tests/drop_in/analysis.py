"""Accuracy on darkened images."""

from dataclasses import dataclass

from torchcaps._core.plotting import new_figure, save_figure
from torchcaps.analysis.common import evaluate_predictions
from torchcaps.analysis.registry import Analysis, Column, Summary, register_analysis


@dataclass(frozen=True)
class DarknessOptions:
    """Options.

    Args:
        factor: factor on the pixels.
    """

    factor: float = 0.5


def run(subject, options):
    batch = subject.batch()
    return evaluate_predictions(subject.model, batch.images * options.factor, batch.labels)[0]


def summarize(correct, classes):
    rows = {"all": {"accuracy": float(correct.double().mean())}}
    return Summary("accuracy", len(correct), "images", {"accuracy": Column("accuracy", "percent")}, rows)


def draw(correct, out, title, classes):
    figure = new_figure(2, 2)
    figure.suptitle(title)
    save_figure(figure, out)


register_analysis(
    Analysis("darkness", "accuracy on darkened images", run, summarize, draw, DarknessOptions, n_images=6)
)
