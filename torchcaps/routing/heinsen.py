"""Heinsen routing of 2022: vectors in sequences, with credit assignment."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from torchcaps._core.values import check_value, index_of_first, is_readable
from torchcaps.capsules import Capsules
from torchcaps.routing.base import Coefficient, Geometry, Routing, State, Trace
from torchcaps.routing.gaussian import child_activations
from torchcaps.votes import Votes

__all__ = ["Heinsen", "chain_credit"]


@dataclass(frozen=True)
class Heinsen(Routing):
    """Heinsen routing of 2022, after the authors' code ("efficient vector routing").

    Each parent predicts its children; children choose the parents that predict them best. With children ``x_i`` of size
    ``K``, votes ``v_ij``, and ``LN`` a layer normalisation without gain (none for ``D = 1``)::

        f_i   = sigmoid(<x_i, W_A_i> / sqrt(I) + B_A_i)
        p_j   = LN(x_j) G1 * G2_j + B_G_j                               elementwise product
        s_ij  = log sigmoid(<x_i, p_j> W_S_ij + B_S_ij)
        r_i   = softmax_j(s_i)                                          1/J in the first iteration
        phi_ij = beta_use_ij f_i r_ij - beta_ign_ij (f_i - f_i r_ij)
        x_j   = Σ_i phi_ij v_ij                                         LN(x_j) after the last iteration

    ``phi_ij``, the couplings in the trace, is the credit of child ``i`` for parent ``j``; `chain_credit` multiplies the
    credits of several layers. The activations of the children, if given, multiply ``f``: an activation of 0 removes a
    child, so that images with fewer children can be padded.

    Args:
        iterations: number of iterations.
        normalize: normalise the parents after the last iteration.
        mask: have a buffer ``mask`` of shape ``[I, J]``, 1 (initially) if a child may route to a parent, else 0. A
            child needs at least one parent; otherwise a ValueError is raised.

    Domain: votes up to `torchcaps.routing.base.vote_limit`; larger ones raise a ValueError.

    Deviation: the authors' votes are ``(x_i / sqrt(I) * F1_j) F2 + B_F_j``, one factored matrix per parent for all
    children; here they are those of the layer, and `route` accepts any. The authors' code computes an image with a row
    of zeros in the mask to NaN.

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> layer = DenseCapsules(32, 8, 10, 16, routing=Heinsen())
    >>> layer(torch.randn(2, 32, 8)).pose.shape
    torch.Size([2, 10, 16])
    """

    paper = "Heinsen 2022"
    equation = "efficient vector routing, from the authors' code"
    coupling_axis = None
    reads_children = True
    presence = None  # the layer normalisation fixes the length of every pose

    iterations: int = 2
    normalize: bool = True
    mask: bool = False

    def coefficients(self, geometry: Geometry) -> dict[str, Coefficient]:
        """Return the weights of the equations; without an axis of children if these share their matrices."""
        child = () if geometry.shared else ("I",)
        k, d = geometry.child_dim, geometry.dim
        coefficients = {
            "score_weight": Coefficient((*child, "K"), _Normal(2 / k**0.5)),
            "score_bias": Coefficient(child, 0.0),
            "prediction": Coefficient(("D", "K"), _Normal(d**-0.5)),
            "prediction_gain": Coefficient(("J", "K"), _Normal(1.0)),
            "prediction_bias": Coefficient(("J", "K"), 0.0),
            "similarity_weight": Coefficient((*child, "J"), _Normal(k**-0.5)),
            "similarity_bias": Coefficient((*child, "J"), 0.0),
            "beta_use": Coefficient((*child, "J"), _Normal(1.0)),
            "beta_ign": Coefficient((*child, "J"), _Normal(1.0)),
        }
        if self.iterations == 1:  # couplings stay uniform: without these
            unused = ("prediction", "similarity")
            coefficients = {name: c for name, c in coefficients.items() if not name.startswith(unused)}
        if self.mask:
            coefficients["mask"] = Coefficient(("I", "J"), 1.0, learned=False)
        return coefficients

    def init_weight(self, weight: Tensor, geometry: Geometry) -> None:
        """Initialise with the variance of the authors' factored votes: ``4 / (X I)``."""
        weight.normal_(0, 2 / (geometry.columns * geometry.slots) ** 0.5)

    def step(self, coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules, state: State, t: int) -> State:
        """Compare the children with the predictions of the parents (except at first), then update the parents."""
        mask = self._mask(coefficients)
        parents, inputs = (None, None) if state.memory is None else state.memory
        # what does not depend on the parents is computed once
        pose, available = inputs or self._available(coefficients, votes, children)
        inputs = pose, available
        if parents is None:
            logits = None if mask is None else torch.zeros_like(mask).expand(votes.shape[:-1])
        else:
            predicted = self._predict(coefficients, parents)
            similarity = torch.matmul(pose, predicted.transpose(-1, -2))  # [B, *L, I, J]
            similarity = similarity * coefficients["similarity_weight"] + coefficients["similarity_bias"]
            logits = F.logsigmoid(similarity)
        if mask is not None:
            assert logits is not None
            logits = logits.masked_fill(mask == 0, -torch.inf)
            available = available * mask
        chosen = votes.uniform(children.pose) if logits is None else votes.softmax(logits)
        # beta_use f r - beta_ign (f - f r), with fewer products
        gain = coefficients["beta_use"] + coefficients["beta_ign"]
        credit = available * (gain * chosen - coefficients["beta_ign"])
        total = votes.sum(credit.expand(votes.shape[:-1]))
        parents = _layer_norm(total) if self.normalize and t >= self.iterations - 1 else total
        return State(pose=parents, coupling=credit, logits=logits, memory=(total, inputs))

    def pack(self, state: State) -> tuple[Tensor, ...]:
        """Return the parents before their normalisation."""
        return (state.memory[0],)

    def unpack(self, tensors: tuple[Tensor, ...]) -> State:
        """Return the state of these parents."""
        return State(pose=_layer_norm(tensors[0]) if self.normalize else tensors[0], memory=(tensors[0], None))

    @staticmethod
    def _available(coefficients: Mapping[str, Tensor], votes: Votes, children: Capsules) -> tuple[Tensor, Tensor]:
        """Return the children of all slots, ``[B, *L, I, K]``, and their scores ``f``, ``[B, *L, I, 1]``."""
        pose = votes.wiring.gather(children.pose)
        score = (pose * coefficients["score_weight"]).sum(-1) * votes.shape[-3] ** -0.5 + coefficients["score_bias"]
        return pose, (score.sigmoid() * child_activations(votes, children)).unsqueeze(-1)

    @staticmethod
    def _predict(coefficients: Mapping[str, Tensor], parents: Tensor) -> Tensor:
        """Return the child that each parent predicts: ``[B, *L, J, D] -> [B, *L, J, K]``."""
        prediction = torch.matmul(_layer_norm(parents), coefficients["prediction"])
        return prediction * coefficients["prediction_gain"] + coefficients["prediction_bias"]

    def _mask(self, coefficients: Mapping[str, Tensor]) -> Tensor | None:
        """Return the mask, if enabled; raise a ValueError if it leaves a child without parent."""
        if not self.mask:
            return None
        mask = coefficients["mask"]
        if is_readable(mask):
            check_value(lambda: index_of_first((mask == 0).all(-1)), _describe_orphan, mask.device, required=True)
        return mask


def chain_credit(*traces: Trace) -> Tensor:
    """Return the credit of the children of the first dense layer for the parents of the last one.

    Args:
        traces: traces of consecutive dense layers with `Heinsen` routing, from bottom to top.

    Shapes:
        ``-> [B, I, J]``, children of the first and parents of the last layer

    >>> import torch
    >>> from torchcaps.nn import DenseCapsules
    >>> first, second = (DenseCapsules(*sizes, routing="heinsen") for sizes in [(8, 4, 5, 4), (5, 4, 3, 4)])
    >>> capsules, lower = first(torch.randn(2, 8, 4), trace=True)
    >>> chain_credit(lower, second(capsules, trace=True)[1]).shape
    torch.Size([2, 8, 3])
    """
    credits = [trace.couplings[-1] for trace in traces if trace.states]
    if len(credits) != len(traces) or not credits:
        raise ValueError("traces must be those of layers called with trace=True, got an empty one")
    result = credits[0]
    assert result is not None
    for upper in credits[1:]:
        assert upper is not None
        result = torch.matmul(result, upper)
    return result


def _describe_orphan(child: float) -> Exception | None:
    """Return the error for the first child without parent; -1 if there is none."""
    if child < 0:
        return None
    return ValueError(f"mask must leave each child at least one parent, got none for child {int(child)}")


def _layer_norm(vectors: Tensor) -> Tensor:
    """Apply layer normalisation without gain; vectors of size 1 are unchanged."""
    return vectors if vectors.shape[-1] == 1 else F.layer_norm(vectors, vectors.shape[-1:])


@dataclass(frozen=True)
class _Normal:
    """Initialiser: a normal distribution with mean 0."""

    std: float

    def __call__(self, tensor: Tensor) -> None:
        tensor.normal_(0, self.std)
