"""The kinds of ``torchcaps analyze``: each asks an analysis, and says which of its numbers matter."""

from torchcaps.cli.kinds.decoding import perturbation, reconstruction, segmentation
from torchcaps.cli.kinds.job import Found, Job, Kind
from torchcaps.cli.kinds.moving import alignment, cosines, directions
from torchcaps.cli.kinds.robustness import affine, attack, gan, universal
from torchcaps.cli.kinds.routing import couplings, dead, logits

__all__ = ["KINDS", "Found", "Job", "Kind"]

KINDS: dict[str, Kind] = {
    "perturbation": Kind(perturbation, "what each dimension of a capsule does to the image", 100, ("class",)),
    "reconstruction": Kind(reconstruction, "decodes by label and by prediction, and of what is taken wrong", 1_000),
    "segmentation": Kind(segmentation, "two overlapping objects told apart by their decodes", 500, ("threshold",)),
    "alignment": Kind(alignment, "whether turns and shifts move a capsule along one direction", 200, ("before_tanh",)),
    "cosines": Kind(cosines, "whether turns to both sides move a capsule apart", 200, ("before_tanh",)),
    "directions": Kind(directions, "the capsules that do so best and least, on their way", 100, ("before_tanh",)),
    "logits": Kind(logits, "how much routing still changes in each iteration", 100, ("iterations",), True),
    "affine": Kind(affine, "recognition of turned, scaled, sheared and shifted images", 500, (), True),
    "attack": Kind(
        attack, "recognition of images changed to mislead", 1_000, ("method", "eps", "iterations", "source"), True
    ),
    "universal": Kind(
        universal, "one change that misleads on any image", 500, ("eps", "iterations", "train_images"), True
    ),
    "gan": Kind(
        gan, "recognition of images made by a GAN, trained here", 100, ("epochs", "width", "train_images"), True
    ),
    "couplings": Kind(couplings, "who listens to whom, and where in the image", 100),
    "dead": Kind(dead, "capsules that never wake up", 500, ("threshold",)),
}
