"""`torchcaps.lightning`: the recipe under Lightning's Trainer, torchmetrics over batches, and the missing extra."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchcaps
from tests.tolerances import assert_equal
from torchcaps.metrics import coupling_entropy, dead_fraction, exact_set_match, top_k_set_match
from torchcaps.models.registry import find_model
from torchcaps.routing import EM, Quadratic

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises more workers, other devices, ...
X = torch.rand(12, 1, 28, 28, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3


def make_network(name: str) -> torchcaps.models.Network:
    torch.manual_seed(0)
    return torchcaps.create_model(name, **find_model(name).spec.smoke_changes() | {"classes": 3, "image": (1, 28, 28)})


def trainer(**options):
    import lightning

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return lightning.Trainer(accelerator="cpu", enable_model_summary=False, **quiet, **options)


@pytest.mark.parametrize("name", ["capsnet_small", "yang2021_mnist"])
def test_training_equals_a_plain_loop(name: str) -> None:
    """Loss, optimiser, schedule (per step and per epoch) and ascent of the recipe; 3 epochs of 3 steps."""
    from torchcaps.lightning import CapsuleModule

    loader = DataLoader(TensorDataset((255 * X).byte(), Y), 4)
    module = CapsuleModule(make_network(name))
    run = trainer(max_epochs=3)
    run.fit(module, loader, DataLoader(TensorDataset(X, Y), 5))
    network = make_network(name)
    recipe, loss = network.recipe, network.loss()
    optimizer = recipe.optimizer.make(network.parameters())
    for step in range(9):
        images, labels = (255 * X).byte()[step % 3 * 4 :][:4] / 255, Y[step % 3 * 4 :][:4]
        factor = recipe.lr_schedule.factor(step, step // 3, 9)
        optimizer.param_groups[0]["lr"] = recipe.optimizer.lr * factor
        optimizer.zero_grad()
        loss(network(images, labels), labels, images, step).backward()
        optimizer.step()
        if recipe.ascents:
            Quadratic.ascend(network, images, labels, None, None, factor)
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(module.network.state_dict()[key], tensor, rtol=1e-6, atol=1e-7, msg=key)
    with torch.no_grad():
        network.eval()
        expected = network.is_correct(network(X), Y).float().mean()
    assert float(run.callback_metrics["val_accuracy"]) == pytest.approx(float(expected))
    (result,) = run.test(module, loader, verbose=False)
    assert result["test_accuracy"] == pytest.approx(float(expected))
    predicted = torch.cat(run.predict(module, loader))  # type: ignore[arg-type]
    assert_equal(predicted, network.predict(network((255 * X).byte() / 255)))


def test_checkpoints_are_restored_without_the_arguments(tmp_path: Path) -> None:
    """A model by name with plain changes; networks and objects are passed again."""
    from torchcaps.lightning import CapsuleModule

    changes = {"classes": 3, "width": 4, "types": 2, "hidden": (8,)}
    named = CapsuleModule("capsnet_small", **changes)
    routed = CapsuleModule("capsnet_small", routing=EM(1), **changes)
    first, second = (torchcaps.create_model("capsnet_small", **changes) for _ in range(2))
    cases = (named, {}), (routed, {"routing": EM(1)}), (CapsuleModule(first), {"model": second})
    for module, options in cases:
        run = trainer(max_steps=1)
        run.fit(module, DataLoader(TensorDataset(X, Y), 4))
        run.save_checkpoint(tmp_path / "module.ckpt")
        found = CapsuleModule.load_from_checkpoint(tmp_path / "module.ckpt", **options)
        assert found.network.spec == module.network.spec
        for key, tensor in module.state_dict().items():
            assert_equal(found.state_dict()[key], tensor)


def test_module_by_name_and_invalid_arguments() -> None:
    from torchcaps.lightning import CapsuleModule

    assert CapsuleModule("capsnet_small", classes=3).network.spec.classes == 3
    with pytest.raises(ValueError, match="by name only"):
        CapsuleModule(make_network("capsnet_small"), classes=3)
    with pytest.raises(TypeError, match=r"\(images, labels\)"):
        CapsuleModule(make_network("capsnet_small")).training_step(X, 0)  # type: ignore[arg-type]


def test_metrics_over_batches_equal_the_metrics_of_all_images() -> None:
    from torchcaps.lightning import Accuracy, CouplingEntropy, DeadFraction, ExactSetMatch, TopKSetMatch

    scores, coupling = torch.rand(12, 4), torch.rand(12, 5, 4)
    hot = (scores > 0.4).int()
    network = make_network("capsnet_small")
    cases = [
        (TopKSetMatch(2), (scores, hot), top_k_set_match(scores, hot, 2).float().mean()),
        (ExactSetMatch(0.4), (scores, hot), exact_set_match(scores, hot, 0.4).float().mean()),
        (CouplingEntropy(-2), (coupling,), coupling_entropy(coupling, -2).mean()),
        (DeadFraction(0.9), (scores,), dead_fraction(scores, 0.9)),
        (Accuracy(network), (scores[:, :3], Y), network.is_correct(scores[:, :3], Y).float().mean()),
    ]
    for metric, arguments, expected in cases:
        for start, stop in ((0, 5), (5, 12)):
            metric.update(*(argument[start:stop] for argument in arguments))
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-6, atol=1e-6)
        metric.reset()
        metric.update(*arguments)
        torch.testing.assert_close(metric.compute(), expected, rtol=1e-6, atol=1e-6)
    assert not list(Accuracy(network).parameters())


def test_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "torchcaps.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install 'torchcaps\[lightning\]'"):
        importlib.import_module("torchcaps.lightning")
