"""Calibration and exact measurement: what is scored, how right it is, and what happens to bad data."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import nvfp4
from torch import nn

import fp4_compile
from fp4_compile.errors import CalibrationError
from fp4_compile.planner.scores import Scores
from fp4_compile.sensitivity import accumulated
from fp4_compile.sensitivity.calibrated import calibrate, sums_of_runs
from fp4_compile.sensitivity.exact import ChosenSites, cosine_distance, exact_scores, kl_divergence


class Classifier(nn.Module):
    """Layers of very different importance: what passes `small` hardly reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 96), nn.Linear(96, 96)
        self.small, self.head = nn.Linear(64, 96), nn.Linear(96, 48)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + 0.02 * torch.tanh(self.small(x))
        return self.head(h + torch.relu(self.second(h)))


def batches(count: int = 6, rows: int = 64) -> list[torch.Tensor]:
    return [torch.randn(rows, 64) for _ in range(count)]


def output_error(output: torch.Tensor, reference: torch.Tensor, _: object) -> torch.Tensor:
    return (output - reference).square().sum() / reference.square().sum()


def test_scores_predict_the_output_error() -> None:
    model, data = Classifier(), batches(rows=1024)
    scores = calibrate(model, data)
    exact = exact_scores(model, data, output_error)
    assert scores.unit == "output"
    assert scores.batches == 6
    assert set(scores.values) == set(exact.values) == {f"{n}:mm.fprop" for n in ("first", "second", "small", "head")}
    for key, score in scores.values.items():
        assert score.loss == pytest.approx(exact.values[key].loss, rel=0.5), key
        assert 0.008 < score.error < 0.04, key
    assert min(scores.values, key=lambda k: scores.values[k].loss) == "small:mm.fprop"
    assert scores.everything == pytest.approx(exact.everything, rel=0.2)


def test_errors_that_neighbouring_rows_share_add_up_before_they_are_squared() -> None:
    assert sums_of_runs(torch.arange(40.0).reshape(5, 8)).tolist() == [120.0, 376.0, 284.0]
    assert sums_of_runs(torch.ones(3)).tolist() == [3.0]


class AveragesTokens(nn.Module):
    """One layer whose weight's error is the same in all tokens, one whose tokens count one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.averaged, self.single = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.averaged(x).mean(1, keepdim=True)
        return torch.cat([mean.expand_as(x), self.single(x)], -1)


def test_a_mean_over_tokens_does_not_average_a_weights_error_out() -> None:
    # Tokens that are alike but for a little: rounding them differs, the weight's error does not.
    data = [torch.randn(64, 1, 64) + 0.3 * torch.randn(64, 16, 64) for _ in range(4)]
    model = AveragesTokens()
    scores, exact = calibrate(model, data), exact_scores(model, data, output_error)
    for key, score in scores.values.items():
        assert score.loss == pytest.approx(exact.values[key].loss, rel=0.4), key


def test_scores_predict_the_increase_of_a_loss() -> None:
    """The targets are the model's own outputs, so that the loss is at its minimum and only curvature counts."""
    model = Classifier()
    data = [(x, model(x).detach()) for x in batches()]
    called = [(x,) for x, _ in data]
    targets = {id(batch): y for batch, (_, y) in zip(called, data, strict=True)}

    def loss_fn(output: torch.Tensor, batch: object) -> torch.Tensor:
        return (output + 1e-2 * torch.randn(output.shape) - targets[id(batch)]).square().mean()

    scores = calibrate(model, called, loss_fn)
    exact = exact_scores(model, called, lambda o, r, _: (o - r).square().mean())
    order = [sorted(s.values, key=lambda k: s.values[k].loss) for s in (scores, exact)]
    assert order[0][0] == order[1][0] == "small:mm.fprop"
    assert scores.unit == "loss"
    assert scores.baseline == pytest.approx(1e-4, rel=0.2)
    # What the predictions add up to is what all sites together were measured to do.
    assert sum(s.loss for s in scores.values.values()) == pytest.approx(scores.everything - scores.baseline, rel=1e-6)


def test_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Dropout(0.5), nn.Linear(64, 64))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    calibrate(model, batches(2), lambda output, _: output.square().mean())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert all(module.training for module in model.modules())


def test_a_frozen_model_is_scored_too() -> None:
    scores = calibrate(Classifier().requires_grad_(False), batches(1), lambda output, _: output.square().mean())
    assert len(scores.values) == 4


def test_the_same_batches_give_the_same_scores() -> None:
    model, data = Classifier(), batches(2)
    assert calibrate(model, data).to_json() == calibrate(model, data).to_json()


def test_batches_of_any_form() -> None:
    model, data = Classifier(), batches(1)
    forms = [data[0], (data[0],), [data[0]], {"x": data[0]}]
    results = {calibrate(model, [form]).to_json() for form in forms}
    assert len(results) == 1


def test_chosen_sites_compute_what_the_compiled_model_computes() -> None:
    model, x = Classifier().eval(), batches(1)[0]
    sites = ChosenSites(model)
    plain = sites(x)
    sites.chosen = {entry.key for entry in sites.survey if entry.advised}
    with torch.no_grad():
        torch.testing.assert_close(plain, model(x))
        torch.testing.assert_close(sites(x), nvfp4(model)(x), rtol=1e-4, atol=1e-5)


def test_pointwise_convolutions_and_batched_weights_are_scored() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Conv2d(48, 64, 1)
            self.experts = nn.Parameter(torch.randn(4, 64, 64) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(self.mix(x).flatten(2).mT, self.experts)

    scores = calibrate(Model(), [torch.randn(4, 48, 4, 4)])
    exact = exact_scores(Model(), [torch.randn(4, 48, 4, 4)], output_error)
    assert len(scores.values) == len(exact.values) == 2
    for key, score in scores.values.items():
        assert score.loss == pytest.approx(exact.values[key].loss, rel=0.8), key


def test_a_calibration_goes_on_where_it_stopped(tmp_path) -> None:
    model, data = Classifier(), batches(4)
    whole = calibrate(model, data, path=str(tmp_path / "whole.json"))
    path = tmp_path / "scores.json"

    def loss_fn(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return output.square().mean()

    bad = [*data[:2], torch.full((64, 64), math.nan), *data[3:]]
    with pytest.raises(CalibrationError, match="batch 2: the loss is nan"):
        calibrate(model, bad, loss_fn, path=str(path))
    assert json.loads((tmp_path / "scores.json.partial").read_text())["batches"] == 2

    seen = []

    def counting(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        seen.append(batch)
        return loss_fn(output, batch)

    counting.__qualname__ = loss_fn.__qualname__
    resumed = calibrate(model, data, counting, path=str(path))
    assert [id(batch) for batch in seen] == [id(batch) for batch in data[2:]]
    assert resumed.to_json() == calibrate(model, data, loss_fn).to_json()
    assert Scores.load(path).to_json() == resumed.to_json()
    assert not (tmp_path / "scores.json.partial").exists()
    assert Scores.load(tmp_path / "whole.json").to_json() == whole.to_json()


def test_another_models_sums_are_not_gone_on_with(tmp_path) -> None:
    path, data = str(tmp_path / "scores.json"), batches(2)
    with pytest.raises(CalibrationError):
        calibrate(Classifier(), [*data, torch.full((64, 64), math.nan)], lambda o, _: o.mean(), path=path)
    other = Classifier()
    assert calibrate(other, data, path=path).to_json() == calibrate(other, data).to_json()


def test_a_broken_partial_file_is_left_behind(tmp_path, caplog) -> None:
    path = tmp_path / "scores.json"
    (tmp_path / "scores.json.partial").write_text("{")
    scores = calibrate(Classifier(), batches(1), path=str(path))
    assert scores.batches == 1


@pytest.mark.parametrize(
    ("data", "loss_fn", "says"),
    [
        ([], None, "there are no batches"),
        ([{"y": torch.zeros(2, 64)}], None, "batch 0 does not fit the model"),
        ([torch.zeros(2, 64), (1, 2, 3)], None, "batch 1 does not fit the model"),
        ([torch.zeros(2, 63)], None, "shapes cannot be multiplied"),
        ([torch.full((2, 64), math.nan)], lambda o, _: o.mean(), "the loss is nan"),
        ([torch.zeros(2, 64)], lambda o, _: o, r"the loss is of shape \(2, 48\)"),
        ([torch.zeros(2, 64)], lambda o, _: 1.0, "the loss is a float"),
        ([torch.zeros(2, 64)], lambda o, _: o.detach().mean(), "does not depend on any matmul"),
    ],
)
def test_bad_data(data: list[object], loss_fn, says: str) -> None:
    with pytest.raises(CalibrationError, match=says):
        calibrate(Classifier(), data, loss_fn)


def test_a_model_without_a_matmul() -> None:
    with pytest.raises(CalibrationError, match="no matrix multiplication"):
        calibrate(nn.LayerNorm(64), batches(1))


def test_dynamic_batch_sizes() -> None:
    scores = calibrate(Classifier(), [torch.randn(rows, 64) for rows in (5, 17, 32, 9)])
    assert scores.batches == 4
    assert len(scores.values) == 4


def test_ranks_get_the_same_sums(monkeypatch) -> None:
    """Two ranks' sums, gathered, are one rank's over all batches."""
    model, data = Classifier(), batches(4)
    parts = []
    for half in (data[:2], data[2:]):
        found = accumulated.Accumulated("model")
        monkeypatch.setattr(accumulated.Accumulated, "resume", classmethod(lambda cls, *_, found=found: found))
        calibrate(model, half)
        parts.append(found)
    monkeypatch.undo()
    dist = torch.distributed
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        dist, "all_gather_object", lambda out, _: out.__setitem__(slice(None), [part._to_dict() for part in parts])
    )
    parts[0].reduce_over_ranks()
    assert parts[0].batches == 4
    monkeypatch.undo()
    together = parts[0].scores("output")
    whole = calibrate(model, data)
    for key, score in whole.values.items():
        # The probes of batches 2 and 3 were drawn as 0 and 1 on the second rank.
        assert together.values[key].loss == pytest.approx(score.loss, rel=0.5)
        assert together.values[key].error == pytest.approx(score.error, rel=1e-9)


def test_distances() -> None:
    logits = torch.randn(2, 5, 7)
    assert kl_divergence(logits, logits).item() == pytest.approx(0, abs=1e-6)
    other = torch.randn(2, 5, 7)
    want = F.kl_div(other.log_softmax(-1), logits.softmax(-1), reduction="none").sum(-1).mean()
    assert kl_divergence(other, logits).item() == pytest.approx(want.item(), rel=1e-5)
    assert cosine_distance(2 * logits, logits).item() == pytest.approx(0, abs=1e-6)


def test_exact_scores_refuse_what_is_not_finite() -> None:
    with pytest.raises(CalibrationError, match="the distance is nan"):
        exact_scores(Classifier(), [torch.full((2, 64), math.nan)], output_error)
    with pytest.raises(CalibrationError, match="no batches"):
        exact_scores(Classifier(), [], output_error)


def test_calibrate_is_public() -> None:
    assert fp4_compile.calibrate is calibrate
