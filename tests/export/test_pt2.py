"""Saved torch.export programs: loaded in a new process, with torchcaps imported or without it."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.models.narrow import narrow
from tests.tolerances import SAME, relative_rms
from torchcaps.export import ParityError, to_pt2
from torchcaps.export.program import all_nodes
from torchcaps.nn import ConvCapsules, DenseCapsules
from torchcaps.routing import Equilibrium

SCRIPT = """
import sys
{first}
import torch
program = torch.export.load(sys.argv[1]).module()
found = program(torch.load(sys.argv[2]))
torch.save(found if isinstance(found, dict) else found.scores, sys.argv[3])
"""


def run_in_new_process(program: Path, inputs: torch.Tensor, first: str) -> object:
    """Return the output of a program that a new process loads after the line ``first``."""
    given, found = program.with_suffix(".input"), program.with_suffix(".output")
    torch.save(inputs, given)
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT.format(first=first), program, given, found]
    subprocess.run(command, check=True, capture_output=True, cwd=program.parent, timeout=850)
    return torch.load(found)


def test_program_with_streamed_votes_loads_after_importing_torchcaps_alone(tmp_path: Path) -> None:
    """The program contains our operators and, exported by hand, our output types."""
    model = narrow("capsnet_small", streamed=True).eval()
    images = torch.rand(4, *model.spec.image)
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (images,), dynamic_shapes={"images": {0: batch}})
    assert any(str(node.target).startswith("torchcaps") for node in all_nodes(program))
    torch.export.save(program, tmp_path / "model.pt2")
    found = run_in_new_process(tmp_path / "model.pt2", images, "import torchcaps")
    assert isinstance(found, torch.Tensor)
    assert relative_rms(found, model(images).scores) < SAME[torch.float32]


def test_plain_program_loads_without_torchcaps(tmp_path: Path) -> None:
    layer = ConvCapsules(2, 4, 3, 4, 2, routing="inverted_attention", streamed=True)
    pose = torch.randn(2, 3, 3, 2, 4)
    result = to_pt2(layer, tmp_path / "layer.pt2", example=pose, trace=True, plain=True)
    assert result.parity.difference < 1e-5
    found = run_in_new_process(tmp_path / "layer.pt2", pose, "sys.modules['torchcaps'] = None")
    assert isinstance(found, dict)
    assert tuple(found) == result.outputs
    assert relative_rms(found["parent_pose"], layer(pose).pose) < SAME[torch.float32]


@pytest.mark.parametrize("plain", [False, True])
def test_solver_with_streamed_votes(plain: bool, tmp_path: Path) -> None:
    routing = Equilibrium(max_steps=2)
    layer = DenseCapsules(3, 2, 2, 2, routing=routing, streamed=True)
    assert to_pt2(layer, tmp_path / "layer.pt2", example=torch.randn(2, 3, 2), plain=plain).parity.difference < 1e-5


def test_disagreement_leaves_no_file(tmp_path: Path) -> None:
    layer = DenseCapsules(3, 2, 2, 2, routing="uniform")
    with pytest.raises(ParityError):
        to_pt2(layer, tmp_path / "layer.pt2", example=torch.randn(2, 3, 2), limit=-1.0)
    assert list(tmp_path.iterdir()) == []
