"""Export of a trained run with its preprocessing."""

import os
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from torchcaps.data import Batch, Dataset
from torchcaps.data.registry import names_image_folder
from torchcaps.data.transforms import Transform
from torchcaps.export.metadata import Metadata, split_preprocessing
from torchcaps.export.onnx_file import DecoderPlacement, Exported, to_onnx
from torchcaps.export.parity import MAX_DIFFERENCE, ParityError
from torchcaps.export.program import BATCH_SIZES, Program
from torchcaps.export.pt2 import to_pt2
from torchcaps.training.inference import TrainedRun
from torchcaps.training.prediction import unprocessed_shape

__all__ = ["ExportFormat", "export_run"]

ExportFormat = Literal["onnx", "pt2"]


def export_run(
    run: TrainedRun,
    path: str | os.PathLike[str] | None = None,
    format: ExportFormat = "onnx",
    *,
    dataset: Dataset | None = None,
    trace: bool = False,
    plain: bool = False,
    decoder: DecoderPlacement = "inside",
) -> Exported:
    """Export the network of a run, with crops, padding and standardisation of its preprocessing as part of the graph.

    Args:
        run: the trained run.
        path: the file to write; default: ``model.onnx`` or ``model.pt2`` in the run directory.
        format: ``"onnx"`` or ``"pt2"``.
        dataset: images to compare the outputs with; default: random images.
        trace: add the couplings of every layer and iteration as outputs.
        plain: pt2 only, see `to_pt2`.
        decoder: ONNX only, see `to_onnx`.

    >>> import tempfile
    >>> from torchcaps.training import fit, load_run
    >>> images, labels = torch.rand(40, 1, 20, 20), torch.arange(40) % 2
    >>> with tempfile.TemporaryDirectory() as out:
    ...     fitted = fit("capsnet_small", (images, labels), epochs=1, out=out, quiet=True, figures=False)
    ...     exported = export_run(load_run(fitted.path), f"{out}/model.onnx")
    >>> exported.outputs
    ('scores', 'capsules', 'reconstruction')
    """
    if format not in ("onnx", "pt2"):
        raise ValueError(f"format must be 'onnx' or 'pt2', got {format!r}")
    if plain and format != "pt2":
        raise ValueError("plain applies to format='pt2' only: ONNX files never contain operators of torchcaps")
    if decoder != "inside" and format != "onnx":
        raise ValueError(f"decoder={decoder!r} applies to format='onnx' only")
    path = run.path / f"model.{format}" if path is None else Path(path).expanduser()
    scale, normalize, transforms = split_preprocessing(run.pipeline)
    shape = unprocessed_shape(run)
    folder = names_image_folder(run.spec.recipe.data)
    values = {
        "classes": run.classes,
        "image": shape,
        "scale": scale.scale,
        "data": "" if folder else run.spec.recipe.data,
        "fit": run.spec.data_options.get("fit") or ("crop" if folder else ""),
    }
    if normalize is not None:
        values |= {"mean": tuple(normalize.mean), "std": tuple(normalize.std)}
    metadata = Metadata.of(run.model, **values)
    example = _example(run, dataset, shape)
    pixels = example.float() / metadata.scale
    mean, std = (torch.tensor(x)[:, None, None] for x in (metadata.mean, metadata.std))
    images = (pixels - mean) / std
    _check_preprocessing(run, example, images, transforms)
    if format == "pt2":
        return to_pt2(
            run.model, path, example=images, trace=trace, plain=plain, metadata=metadata, transforms=transforms
        )
    return to_onnx(
        run.model, path, example=images, trace=trace, decoder=decoder, metadata=metadata, transforms=transforms
    )


def _example(run: TrainedRun, dataset: Dataset | None, shape: tuple[int, int, int]) -> Tensor:
    """Return bytes of the first images of a data set, or random ones."""
    n_images = max(BATCH_SIZES)
    if dataset is None:
        return torch.randint(256, (n_images, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    if tuple(dataset.shape) != shape:
        expected, got = ("x".join(map(str, size)) for size in (shape, dataset.shape))
        raise ValueError(f"{run.path} expects images of shape {expected}, {dataset.name} has {got}")
    return dataset.get_batch(torch.arange(min(n_images, len(dataset)))).images


def _check_preprocessing(run: TrainedRun, example: Tensor, images: Tensor, transforms: list[Transform]) -> None:
    """Raise a `ParityError` if the exported preprocessing differs from that of the run."""
    labels = torch.zeros(len(example), dtype=torch.int64)
    expected = run.pipeline(Batch(example, labels, example, labels), train=False).images
    found = Program(run.model, transforms=transforms).transforms(images)
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= MAX_DIFFERENCE:
        raise ParityError(f"the exported preprocessing differs by {difference:.1e} from that of {run.path}")
