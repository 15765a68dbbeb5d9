# %%
# # Write a routing
#
# A routing of your own: couplings by cosine similarity with a temperature. One class makes it work in dense and
# convolutional layers, stored and streamed.

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

import torchcaps
from torchcaps.metrics import coupling_entropy
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import Routing, State

OUT = Path(sys.argv[1] if len(sys.argv) > 1 else "tutorial-output")
OUT.mkdir(parents=True, exist_ok=True)
torch.manual_seed(0)

# %%
# ## The class
#
# `step` computes one iteration. It uses reductions of the votes (`dot`, `softmax`, `sum`), never the tensor, so
# that votes need not be stored. Fields of the dataclass are the options: they become flags of the command line.


@dataclass(frozen=True)
class Cosine(Routing):
    """Routing by the cosine of vote and parent. Not published."""

    paper = "none"
    equation = "none"

    iterations: int = 3
    temperature: float = 1.0

    def step(self, coefficients, votes, children, state, t):
        """Compute couplings by agreement with the previous parents, then the parents."""
        coupling = votes.uniform(children.pose)
        if t > 0:
            coupling = votes.softmax(votes.dot(state.pose) / self.temperature)
        return State(pose=F.normalize(votes.sum(coupling), dim=-1), coupling=coupling)


# %%
# ## It works everywhere

votes = torch.randn(2, 20, 5, 8)
print(torchcaps.route(votes, Cosine()).pose.shape)
conv = ConvCapsules(4, 8, 6, 8, kernel_size=3, stride=2, routing=Cosine(iterations=2))
print(conv(torch.randn(2, 9, 9, 4, 8)).pose.shape)

# %%
# Streamed votes give the same values and gradients as stored ones:

stored = DenseCapsules(20, 8, 5, 8, routing=Cosine(), streamed=False)
streamed = DenseCapsules(20, 8, 5, 8, routing=Cosine(), streamed=True)
streamed.load_state_dict(stored.state_dict())
children = torch.randn(3, 20, 8)
target = torch.randn(3, 5, 8)
for layer in (stored, streamed):
    (layer(children).pose * target).sum().backward()
assert torch.allclose(stored.weight.grad, streamed.weight.grad, atol=1e-4)

# %%
# ## Check it against loops
#
# The definition, written with loops for one image. Do this first for any new routing: a softmax over the wrong axis
# trains almost as well.


def by_loops(v: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return the parents ``[J, D]`` of votes ``[I, J, D]``."""
    n_children, n_parents, _ = v.shape
    c = torch.full((n_children, n_parents), 1 / n_parents)
    parents: list[torch.Tensor] = []
    for t in range(iterations):
        if t > 0:
            for i in range(n_children):
                agreement = torch.stack([v[i, j] @ parents[j] for j in range(n_parents)])
                c[i] = agreement.exp() / agreement.exp().sum()
        sums = [sum(c[i, j] * v[i, j] for i in range(n_children)) for j in range(n_parents)]
        parents = [s / s.norm() for s in sums]
    return torch.stack(parents)


for image in range(2):
    assert torch.allclose(by_loops(votes[image], 3), torchcaps.route(votes, Cosine()).pose[image], atol=1e-5)

# %%
# ## Look at it
#
# A lower temperature gives sharper couplings.

figure = plt.figure(figsize=(5, 3), dpi=150, layout="constrained")
axes = figure.subplots()
for temperature in (2.0, 1.0, 0.5):
    _, trace = torchcaps.route(votes, Cosine(iterations=6, temperature=temperature), trace=True)
    entropies = [coupling_entropy(c).mean().item() for c in trace.couplings]
    axes.plot(range(1, 7), entropies, marker="o", label=f"temperature {temperature:g}")
axes.set_xlabel("iteration")
axes.set_ylabel("entropy of the couplings")
axes.legend(frameon=False, fontsize=8)
figure.savefig(OUT / "3_entropy.png")

# %%
# ![Entropy of the couplings by iteration and temperature](../images/tutorials/3_entropy.png)
#
# On the command line it is `torchcaps train --routing my_module.Cosine --routing.temperature 0.5`.
