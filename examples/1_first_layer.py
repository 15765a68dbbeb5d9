# %%
# # A first capsule layer
#
# Votes, couplings and parents of one layer, step by step, on random children. No training.

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import torch

import torchcaps
from torchcaps.nn import DenseCapsules
from torchcaps.routing import Dynamic

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "tutorial-output")
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %%
# ## Children
#
# Two images with 12 child capsules each, whose poses have 8 numbers. All children but the last four have nearly the
# same pose.

common = torch.randn(2, 1, 8)
children = common + 0.1 * torch.randn(2, 12, 8)
children[:, 8:] = torch.randn(2, 4, 8)

# %%
# ## The layer
#
# It connects 12 children to 3 parents with poses of 4 numbers. Each child has a matrix for each parent. Here all
# children share it, so that equal children have equal votes.

layer = DenseCapsules(12, 8, 3, 4, routing=Dynamic(iterations=4), shared=True)
parents, trace = layer(3 * children, trace=True)
print("poses", tuple(parents.pose.shape), "lengths", parents.length()[0].tolist())

# %%
# ## Votes
#
# `layer.votes` is an operator; `dense()` is the tensor: image, child, parent, pose.

votes = layer.votes(3 * children)
print("votes", tuple(votes.dense().shape))

# %%
# ## Couplings
#
# The couplings of a child sum to 1 over the parents, in every iteration. They start equal. The eight children that
# agree move to one parent together.

couplings = torch.stack(trace.couplings)  # [iteration, image, child, parent]
assert torch.allclose(couplings.sum(-1), torch.ones(()))
assert torch.allclose(couplings[0], torch.tensor(1 / 3))

figure = plt.figure(figsize=(8, 2.4), dpi=150, layout="constrained")
for t, axes in enumerate(figure.subplots(1, 4)):
    axes.imshow(couplings[t, 0].T.detach(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
    axes.set_title(f"iteration {t + 1}", fontsize=9)
    axes.set_xlabel("child")
    axes.set_ylabel("parent" if t == 0 else "")
figure.savefig(OUT / "1_couplings.png")

# %%
# ![Couplings of 12 children to 3 parents in four iterations](../images/tutorials/1_couplings.png)
#
# ## By hand
#
# The same in plain torch (Sabour 2017, Procedure 1). This is what the tests of torchcaps do for every routing.

v = votes.dense()
logits = torch.zeros(2, 12, 3)
for _ in range(4):
    c = logits.softmax(-1)
    s = torch.einsum("bij,bijd->bjd", c, v)
    pose = torchcaps.nn.squash(s)
    logits = logits + torch.einsum("bijd,bjd->bij", v, pose)
assert torch.allclose(pose, parents.pose, atol=1e-5)
print("equal to the equations")
