"""Results of the explorer's API compared with the network itself, for every routing and kind of model."""

import base64
import dataclasses
import io
from typing import Any

import pytest
import torch

from tests.explorer.helpers import SAMPLE, array, post, request, small_run, untrained_run
from torchcaps.analysis.attacks import frozen
from torchcaps.analysis.common import capsule_layers
from torchcaps.explorer import ExploredRun, create_app
from torchcaps.explorer.statistics import Statistics
from torchcaps.routing.base import ROUTINGS

# Models of every kind that the page must open: convolutional layers, several objects, no decoder, no capsules.
MODELS: dict[str, dict[str, Any]] = {
    "tsai2020_cifar10": {},
    "tsai2020_em_cifar10": {},
    "hinton2018_smallnorb": {},
    "choi2019_mnist": {},
    "chen2019_conv_mnist": {},
    "sabour2017_multimnist": {},
    "tsai2020_diverse_matrix": {},
    "chen2019_lenet": {},
}


@pytest.fixture(scope="module")
def run() -> ExploredRun:
    return small_run()


@pytest.fixture(scope="module")
def app(run: ExploredRun) -> Any:
    return create_app([run], statistics=False)


def smoke_run(model: str) -> ExploredRun:
    from torchcaps.models import MODELS as REGISTERED

    return untrained_run(model, **REGISTERED.get(model).spec.smoke_changes())


def test_forward_has_the_values_of_the_network(app: Any, run: ExploredRun) -> None:
    result = post(app, "/api/forward", {"image": SAMPLE})
    images, labels = run.sample([3])
    with torch.no_grad():
        output = run.model(images, trace=True)
    assert torch.equal(array(result["image"])[None], images)
    assert result["labels"] == labels.tolist()
    torch.testing.assert_close(torch.tensor(result["scores"]), output.scores[0])
    assert result["predicted"] == [int(output.scores.argmax())] == result["order"][:1]
    assert torch.equal(array(result["capsules"]["pose"]), output.capsules.pose[0])
    assert torch.equal(array(result["reconstruction"]["images"])[0], output.reconstruction[0])
    (layer,) = result["layers"]
    expected = torch.stack([coupling[0] for coupling in output.trace[0].couplings])
    assert torch.equal(array(layer["couplings"]), expected)
    lengths = torch.stack([state.capsules().length()[0] for state in output.trace[0].states])
    torch.testing.assert_close(array(layer["activity"]), lengths)
    poses = [state.pose for state in output.trace[0].states]
    torch.testing.assert_close(layer["residual"][1], float((poses[1] - poses[0]).norm() / poses[1].norm()))
    assert layer["sums"][0] == pytest.approx([1, 1, 1])


def test_iterations_change_the_routing_for_one_request(app: Any, run: ExploredRun) -> None:
    longer = post(app, "/api/forward", {"image": SAMPLE, "iterations": 5})
    assert longer["layers"][0]["iterations"] == 5
    layer = next(iter(capsule_layers(run.model).values()))
    original = layer.routing
    layer.routing = dataclasses.replace(original, iterations=5)
    with torch.no_grad():
        expected = run.model(run.sample([3])[0]).scores[0]
    layer.routing = original
    torch.testing.assert_close(torch.tensor(longer["scores"]), expected)
    assert post(app, "/api/forward", {"image": SAMPLE})["layers"][0]["iterations"] == 3


def assert_opens(explored: ExploredRun) -> None:
    """Request everything that the page shows."""
    app = create_app([explored], statistics=False)
    info = request(app, "GET", "/api/info").json()["runs"][0]
    channels, height, width = info["shape"]
    pixels = base64.b64encode(bytes(n % 251 for n in range(channels * height * width))).decode()
    image = {"source": {"pixels": pixels}, "placement": {"rotation": 10.0}}
    result = post(app, "/api/forward", {"image": image, "iterations": 2})
    assert len(result["scores"]) == len(info["classes"])
    assert len(result["layers"]) == len(info["layers"])
    assert request(app, "GET", "/api/training").status == 200
    credit = post(app, "/api/credit", {"image": image, "target": 1})
    assert array(credit["gradient"]).shape == (height, width)
    if credit["coupling"] is not None:
        assert array(credit["coupling"]).shape == (height, width)
    if "capsules" in info["missing"]:  # the gradient needs none
        assert (credit["coupling"], credit["why"]) == (None, info["missing"]["capsules"])
        parent = {"image": image, "layer": 0, "parent": 0, "iteration": 0}
        assert "capsules" in post(app, "/api/parent", parent, 400)["error"]
        return
    for n, layer in enumerate(result["layers"]):
        assert layer["edges"], layer["name"]
        assert info["layers"][n]["equation"], info["layers"][n]["algorithm"]
        body = {"image": image, "layer": n, "parent": 0, "iteration": layer["iterations"] - 1, "iterations": 2}
        parent = post(app, "/api/parent", body)
        # The largest coupling of the table is that of the heat map.
        to_parent = array(layer["couplings"])[-1, :, 0]
        if not layer["merged_types"]:
            assert abs(parent["children"][0]["coupling"]) == pytest.approx(float(to_parent.abs().max()), rel=1e-5)


@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_every_routing_opens(routing: str) -> None:
    assert_opens(small_run(routing=routing))


@pytest.mark.parametrize("model", MODELS)
def test_models_of_every_kind_open(model: str) -> None:
    assert_opens(smoke_run(model))


def test_parent_explains_the_pose(app: Any, run: ExploredRun) -> None:
    """The sum of coupled votes of dynamic routing, squashed, is the pose."""
    parent = post(app, "/api/parent", {"image": SAMPLE, "layer": 0, "parent": 4, "iteration": 2})
    total = array(parent["sum"])
    length = total.norm()
    torch.testing.assert_close(array(parent["pose"]), total * length / (1 + length**2))
    assert parent["sum_length"] == pytest.approx(float(length))
    for body in ({"layer": 1, "parent": 0, "iteration": 0}, {"layer": 0, "parent": 10, "iteration": 0}):
        assert "below" in post(app, "/api/parent", {"image": SAMPLE, **body}, 400)["error"]


def test_credit_is_coupling_times_activity_averaged_over_receptive_fields(app: Any, run: ExploredRun) -> None:
    credit = post(app, "/api/credit", {"image": SAMPLE, "target": 2})
    with torch.no_grad():
        output = run.model(run.sample([3])[0], trace=True)
        primary = run.model.front(run.sample([3])[0])
    by_child = output.trace[0].couplings[-1][0, :, 2] * primary.flatten().length()[0]
    positions = by_child.view(6, 6, 2).sum(-1)
    total = weight = 0.0
    for row in range(6):
        for column in range(6):  # receptive fields of 17x17 pixels with centres 8, 10, ..., 18
            distances = abs(8 + 2 * row - 11), abs(8 + 2 * column - 20)
            window = max(0, 1 - distances[0] / 9) * max(0, 1 - distances[1] / 9)
            total, weight = total + window * float(positions[row, column]), weight + window
    assert float(array(credit["coupling"])[11, 20]) == pytest.approx(total / weight, rel=1e-5)
    images = run.sample([3])[0].requires_grad_()
    (gradient,) = torch.autograd.grad(run.model(images).scores[0, 2], images)
    torch.testing.assert_close(array(credit["gradient"]), gradient[0, 0])


def test_decode_equals_the_decoder(app: Any, run: ExploredRun) -> None:
    capsules = torch.randn(3, 10, 4)
    data = base64.b64encode(capsules.numpy().tobytes()).decode()
    body = {"capsules": {"shape": [3, 10, 4], "dtype": "float32", "data": data}}
    with torch.no_grad():
        expected = run.capsules.decoder.layers(capsules.flatten(1)).view(3, 1, 28, 28)
    torch.testing.assert_close(array(post(app, "/api/decode", body)["images"]), expected)
    empty = [{"shape": shape, "data": ""} for shape in ([0, 10, 4], [0, *[10**6] * 5])]
    for change in ({"shape": [3, 10, 5]}, {"data": "AAAA"}, {"data": "@"}, *empty):
        assert post(app, "/api/decode", {"capsules": {**body["capsules"], **change}}, 400)["error"]
    plain = create_app([small_run(reconstruction=False)], statistics=False)
    assert "decoder" in post(plain, "/api/decode", body, 400)["error"]


def test_attack_stays_within_eps_and_is_cached_by_input(app: Any) -> None:
    for method in ("fgsm", "pgd"):
        image = {**SAMPLE, "attack": {"method": method, "eps": 0.1, "steps": 2}}
        result = post(app, "/api/forward", {"image": image})
        change = array(result["image"]) - array(result["clean"])
        assert 0.05 < float(change.abs().max()) <= 0.1 + 1e-6
    assert post(app, "/api/forward", {"image": SAMPLE})["clean"] is None


def test_second_image_and_placement(app: Any, run: ExploredRun) -> None:
    both = post(app, "/api/forward", {"image": {**SAMPLE, "second": {"sample": 5}}})
    images, labels = run.sample([3, 5])
    torch.testing.assert_close(array(both["image"]), torch.maximum(images[0], images[1]))
    assert both["labels"] == sorted(set(labels.tolist()))
    assert len(both["reconstruction"]["classes"]) == 2
    moved = post(app, "/api/forward", {"image": {**SAMPLE, "placement": {"right": 0.25, "down": 0.25}}})
    torch.testing.assert_close(array(moved["image"])[:, 7:, 7:], images[0][:, :-7, :-7])


def test_second_run_gets_the_same_input_in_its_own_size() -> None:
    wide = small_run(image=(1, 32, 32), name="wide")
    app = create_app([small_run(), wide], statistics=False)
    results = [post(app, "/api/forward", {"run": n, "image": SAMPLE}) for n in (0, 1)]
    assert [result["image"]["shape"] for result in results] == [[1, 28, 28], [1, 32, 32]]
    assert float(array(results[1]["image"]).mean()) == pytest.approx(float(array(results[0]["image"]).mean()), rel=0.05)
    assert (
        "run" in post(create_app([wide], statistics=False), "/api/forward", {"run": 1, "image": SAMPLE}, 400)["error"]
    )


def test_upload_converts_image_files(app: Any) -> None:
    from PIL import Image, ImageDraw

    photo = Image.new("L", (120, 90), 235)
    ImageDraw.Draw(photo).line([(60, 10), (60, 80)], fill=20, width=10)
    content = io.BytesIO()
    photo.save(content, "PNG")
    headers = {"content-type": "image/png"}
    reply = request(app, "POST", "/api/upload", content.getvalue(), headers)
    assert reply.status == 200, reply.body
    pixels = base64.b64decode(reply.json()["pixels"])
    assert len(pixels) == 28 * 28
    assert max(pixels) > 200 > 20 > pixels[0]
    assert "centred" in reply.json()["note"]
    large = io.BytesIO()
    Image.new("1", (5000, 5000)).save(large, "PNG")
    for body in (b"", b"not an image", content.getvalue()[:60], large.getvalue()):
        reply = request(app, "POST", "/api/upload", body, headers)
        assert reply.status == 400
        assert reply.json()["error"].startswith("the upload")
    assert request(app, "POST", "/api/upload", b"", {"content-type": "text/plain"}).status == 415


def test_statistics_count_every_image_and_sort_samples(run: ExploredRun) -> None:
    statistics = Statistics(run)
    assert statistics.order("error") == list(range(40))
    statistics.wait()
    summary = statistics.describe()["summary"]
    assert sum(map(sum, summary["confusion"]["counts"])) == summary["n"] == 40
    assert sum(summary["histogram"]["present"]) == 40
    assert [layer["name"] for layer in summary["dead"]] == ["primary", "digit"]
    errors = statistics.error()
    ordered = errors[statistics.order("error")]
    assert bool((ordered[:-1] >= ordered[1:]).all())
    assert bool((errors > 0)[~statistics.true[:, :].eq(statistics.predicted).all(1)].all())
    uncertain = statistics.margin()[statistics.order("uncertainty")]
    assert bool((uncertain[:-1] <= uncertain[1:]).all())
    label, predicted = (int(rows[7].nonzero()[0]) for rows in (statistics.true, statistics.predicted))
    assert 7 in statistics.order("index", label, predicted)


def test_statistics_end_between_two_batches_if_the_server_stops(run: ExploredRun) -> None:
    statistics = Statistics(run)
    yield_lock = statistics._yield_lock

    def stop() -> None:
        statistics._stop.set()
        yield_lock()

    statistics._yield_lock = stop  # type: ignore[method-assign]
    statistics.wait()
    assert statistics.n_done == run.n_samples
    assert statistics.describe()["summary"] is None
    assert statistics.problem == ""


def test_tables_do_not_depend_on_requests_that_freeze_the_weights() -> None:
    """The credit's gradient freezes the parameters while another request may compute the layer table."""
    explored = small_run()
    with frozen(explored.pixels):
        assert explored.training["memory"]["total"] > 0
    assert explored.training["table"][-1][3] == f"{explored.model.n_parameters:,}"


def test_parts_that_a_model_lacks_are_named() -> None:
    assert "without a decoder" in small_run(reconstruction=False).missing_parts()["decoder"]
    assert "one pass" in small_run(routing="trainable").missing_parts()["iterations"]
    assert "without capsules" in smoke_run("chen2019_lenet").missing_parts()["capsules"]
