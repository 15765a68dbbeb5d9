# %%
# # Train and look at reconstructions
#
# Train a small CapsNet on 4,000 real digits, then look at what its class capsules represent. About 20 seconds of
# CPU time.

import sys
from pathlib import Path

import torchcaps
from torchcaps.analysis import (
    coupling_maps,
    draw_couplings,
    draw_perturbation,
    draw_reconstructions,
    perturb,
    reconstruct,
)
from torchcaps.data import Loader, create_dataset

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "tutorial-output")
OUT.mkdir(parents=True, exist_ok=True)

# %%
# ## Training
#
# `fit` takes a model by name and a data set by name (or your tensors). `epochs` shortens the recipe, which has 16.
# The result is also a run directory that all commands accept.

run = torchcaps.fit("capsnet_small", "digits", epochs=6, num_threads=1, out=OUT / "run", quiet=True, figures=False)
assert run.test is not None
print(f"correct: {100 * run.test.accuracy:.1f} % of {run.test.n} test digits")
assert run.test.accuracy > 0.9

# %%
# ## Reconstructions
#
# The decoder sees the pose of the predicted class capsule alone, 16 numbers, and draws the digit.

digits = next(Loader(create_dataset("digits", "test"), 1000).epoch(0))  # 100 of each class, in order
images, labels = digits.images[::16], digits.labels[::16]
result = reconstruct(run.network, images, labels)
draw_reconstructions(result, OUT / "2_reconstructions.png")

# %%
# ![Digits and their reconstructions](../images/tutorials/2_reconstructions.png)
#
# ## Dimensions of a capsule
#
# Each row varies one dimension of the pose: some change the slant, some the width of the stroke.

perturbation = perturb(run.network, images[31:32], labels[31:32])
draw_perturbation(perturbation, OUT / "2_dimensions.png")

# %%
# ![Each dimension of a capsule varied and decoded](../images/tutorials/2_dimensions.png)
#
# ## Couplings
#
# Where in the image are the capsules that are coupled to the class?

maps = coupling_maps(run.network, images, labels)
draw_couplings(maps, OUT / "2_couplings.png")

# %%
# ![Maps of the couplings over the digits, and their entropy](../images/tutorials/2_couplings.png)
