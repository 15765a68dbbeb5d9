"""Votes as an operator: the reductions that routing algorithms need, with stored or streamed votes."""

from torchcaps.votes.base import Votes
from torchcaps.votes.dense import DenseVotes
from torchcaps.votes.streaming import StreamedVotes
from torchcaps.votes.wiring import Wiring, same_padding

__all__ = ["DenseVotes", "StreamedVotes", "Votes", "Wiring", "same_padding"]
