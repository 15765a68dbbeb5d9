"""Votes as an operator: what a routing may ask of them, stored or streamed."""

from torchcaps.votes.base import Votes
from torchcaps.votes.dense import DenseVotes
from torchcaps.votes.streaming import StreamedVotes
from torchcaps.votes.wiring import Wiring, same_padding

__all__ = ["DenseVotes", "StreamedVotes", "Votes", "Wiring", "same_padding"]
