"""Devices: every figure has a source, a wrong name gets a suggestion, measurements survive a file and no edit."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from fp4_compile import cost_model
from fp4_compile.cost_model import DEVICES, Device, device, load, measure
from fp4_compile.cost_model.devices import FIGURES
from fp4_compile.errors import DeviceError

NAMES = ["sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_120-pro6000", "sm_121", "cpu", "cpu-bf16"]


def test_the_table():
    assert list(DEVICES) == NAMES
    assert all(name == known.name == device(name).name for name, known in DEVICES.items())
    assert {n for n in NAMES if device(n).nvfp4_flops is None} == {"sm_80", "sm_89", "sm_90"}


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_source(name):
    known = device(name)
    assert set(known.sources) == set(FIGURES)
    assert all(len(source) > 5 for source in known.sources.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [("sm100", "did you mean 'sm_100'"), ("sm_12", "did you mean 'sm_12"), ("tpu v9", "the devices are")],
)
def test_an_unknown_name_gets_a_suggestion(name, message):
    with pytest.raises(DeviceError, match=message):
        device(name)


OTHER = {
    "name": "other",
    "title": "Other",
    "sms": 149,
    "quantizer_passes": 2,
    "bf16_tile": (64, 128),
    "nvfp4_tile": (64, 128),
    "sources": dict.fromkeys(FIGURES, "another source"),
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Device)])
def test_the_digest_changes_with_any_field(field):
    b200 = device("sm_100")
    value = OTHER[field] if field in OTHER else getattr(b200, field) * 0.99
    assert dataclasses.replace(b200, **{field: value}).digest() != b200.digest()
    assert dataclasses.replace(b200).digest() == b200.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": 0.0}, "memory is 0.0"),
        ({"memory": float("nan")}, "memory is nan"),
        ({"launch": -1e-6}, "launch is -1e-06"),
        ({"launch": "2e-6"}, "launch is '2e-6'"),
        ({"bf16_fraction": 1.01}, "bf16_fraction is 1.01"),
        ({"bf16_flops": None}, "bf16_flops is None"),
        ({"nvfp4_flops": None}, "nvfp4_fraction is 0.62"),
        ({"nvfp4_fraction": None}, "nvfp4_fraction is None"),
        ({"sms": 1.5}, "sms is 1.5"),
        ({"bf16_tile": (64,)}, "bf16_tile is"),
        ({"nvfp4_tile": (0, 64)}, "nvfp4_tile is"),
        ({"sources": {}}, "no source"),
    ],
)
def test_impossible_figures_are_refused(change, message):
    with pytest.raises(DeviceError, match=message):
        dataclasses.replace(device("sm_100"), **change)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured") / "cpu.json"
    return measure(path, quick=True), path


def test_measuring_gives_a_device_that_a_file_keeps(measured):
    found, path = measured
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    assert found.name.startswith(f"measured-{kind}-")
    assert len(found.name) == len(f"measured-{kind}-") + 8
    assert load(path) == found
    assert load(path).digest() == found.digest()
    assert all(f"torch {torch.__version__}" in source for source in found.sources.values())
    seconds = cost_model.evaluate(found, 1, 256, 256, 256)
    assert 0 < seconds.bf16 < 10
    assert 0 < seconds.nvfp4 < 10


def test_measuring_leaves_random_numbers_alone(measured, monkeypatch):
    from fp4_compile.cost_model import measurement

    torch.manual_seed(5)
    expected = torch.randn(3)
    torch.manual_seed(5)
    measurement._Timer("cpu", 0.0).gemm((2, 16, 16))
    assert torch.equal(torch.randn(3), expected)


def edited(text, change):
    data = json.loads(text)
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lambda text: text[: len(text) // 2], "cannot read"),
        (lambda text: "[]", "schema None"),
        (lambda text: edited(text, lambda d: d.update(schema=99)), "schema 99; this version reads 1"),
        (lambda text: edited(text, lambda d: d["device"].update(launch=1e-3)), "digest does not match"),
        (lambda text: edited(text, lambda d: d["device"].update(launch=-1)), "launch is -1"),
        (lambda text: edited(text, lambda d: d["device"].update(launch=[1])), "launch is"),
        (lambda text: edited(text, lambda d: d["device"].update(speed=1)), "'speed'"),
        (lambda text: edited(text, lambda d: d["device"].update(sources=3)), "wrong type"),
        (lambda text: edited(text, lambda d: d["device"].pop("memory")), "'memory'"),
        (lambda text: edited(text, lambda d: d.pop("device")), "holds no measured device"),
        (lambda text: edited(text, lambda d: d.update(device=[])), "holds no measured device"),
        (lambda text: edited(text, lambda d: d.update(digest="0")), "digest does not match"),
    ],
)
def test_a_file_that_is_not_as_written_is_refused(measured, tmp_path, corrupt, message):
    path = tmp_path / "edited.json"
    path.write_text(corrupt(measured[1].read_text()))
    with pytest.raises(DeviceError, match=message):
        load(path)


def test_files_that_cannot_be_read_or_written(measured, tmp_path):
    from fp4_compile.cost_model.measurement import _save

    with pytest.raises(DeviceError, match="cannot read"):
        load(tmp_path / "absent.json")
    with pytest.raises(DeviceError, match="cannot write"):
        _save(measured[0], tmp_path / "absent" / "file.json")


def test_importing_does_no_work():
    code = (
        "import sys; before = set(sys.modules); import fp4_compile.cost_model as c; "
        "assert not {'torch', 'sympy'} & (set(sys.modules) - before), 'imported'; c.device; "
        "assert 'fp4_compile.cost_model.measurement' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert all(hasattr(cost_model, name) for name in cost_model.__all__)
    with pytest.raises(AttributeError):
        cost_model.nothing  # noqa: B018
