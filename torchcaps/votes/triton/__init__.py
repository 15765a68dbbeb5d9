"""GPU kernels in Triton for the reductions of votes, an optional dependency (the extra ``gpu``)."""
