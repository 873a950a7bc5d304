"""Programs for GPUs on a machine without one."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from swiglu import SwiGlu
from torch import nn

import fp4_compile
from fp4_compile.cost_model import device
from fp4_compile.errors import DeviceError, DumpError, OptionError, TargetError
from fp4_compile.offline.compile_for import compile_for
from fp4_compile.offline.generate import Launch
from fp4_compile.offline.machine import find_target, offline_device
from fp4_compile.offline.predict import predict
from fp4_compile.plan import Precision

EVERYTHING = {"target": None}  # small layers do not pay on any device


def block_input():
    return SwiGlu().bfloat16(), torch.randn(200, 256).bfloat16()


def gpu_state():
    """What torch and Triton answer about the GPU, and where the answers come from."""
    from torch._dynamo import device_interface
    from triton.runtime import driver

    names = ("is_available", "device_count", "current_device", "get_device_properties", "get_device_capability")
    device_interface.init_device_reg()  # fills the table, the first time
    return (
        [getattr(torch.cuda, name) for name in (*names, "is_initialized", "get_device_name", "_lazy_init")],
        dict(device_interface.device_interfaces),
        driver._active,
        torch.cuda.is_available(),
    )


@pytest.fixture(scope="module")
def inference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sm_100")
    before = gpu_state()
    with torch.no_grad():
        result = fp4_compile.compile_for(*block_input(), target="sm_100", out=folder, options=EVERYTHING)
    return result, folder, before, gpu_state()


def test_every_product_runs_on_fp4_tensor_cores(inference):
    result = inference[0]
    gemms = [k for k in result.summary.kernels if k.role == "fp4 gemm"]
    assert sum(k.launches for k in gemms) == 3 == len(result.plan.select(Precision.NVFP4))
    assert all(k.instructions["tcgen05.mma mxf4nvf4"] and k.instructions["tcgen05.cp"] for k in gemms)
    assert not any("tcgen05.mma f16" in k.instructions for k in result.summary.kernels)
    assert result.summary.flops == {"nvfp4": 2 * 200 * 256 * 512 * 3}


def test_no_kernel_fails_spills_or_reads_in_small_pieces(inference):
    summary = inference[0].summary
    assert not summary.failed
    assert [(k.name, k.faults) for k in summary.kernels if k.faults] == []
    assert all(k.spills == 0 == k.stack and k.tensor_memory <= 512 for k in summary.kernels)
    for kernel in (k for k in summary.kernels if k.role == "quantizer"):
        assert kernel.load_widths[16] >= 4
        assert kernel.instructions["cvt e2m1"]


@pytest.mark.slow
def test_an_epilogue_with_two_results_does_not_spill():
    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(384, 1536), nn.Linear(1536, 384)

        def forward(self, x):
            return self.narrow(F.gelu(self.wide(x)))

    x = torch.zeros(2048, 384).bfloat16().requires_grad_()
    options = {**EVERYTHING, "training": {"bf16_share": 0.0}}
    summary = compile_for(Mlp().bfloat16(), x, "sm_100", options=options).summary
    assert sum(k.launches for k in summary.kernels if k.role == "fp4 gemm") == 6
    assert [(k.name, k.faults) for k in summary.kernels if k.faults] == []


def test_producers_and_consumers_are_inside_the_kernels(inference):
    [program] = [p for p in inference[0].programs if p.part == "inference"]
    # norm, quantize, up, gate with its bias, SiLU and product, quantize, down with the residual
    assert len(program.launches) == 6
    assert [launch.quantizes for launch in program.launches if launch.quantizes] == [(200, 256), (200, 512)]
    down = program.kernels[program.launches[-1].kernel]
    assert "in_out_ptr" in down or "in_ptr" in down
    product = program.launches[-1]
    assert product.gemm == (200, 256, 512)
    codes, scales, amaxes = (200 + 256) * 256, (256 + 256) * 32, 4 * (200 + 256)
    assert product.bytes == codes + scales + amaxes + 2 * 2 * 200 * 256  # and it reads and writes the residual stream


def test_weights_are_quantized_apart(inference):
    summary = inference[0].summary
    once = summary.of("weight_prologue")
    assert sum(k.launches for k in once.kernels) == 3
    assert {k.role for k in once.kernels} == {"quantizer"}
    assert summary.each_call.launches == 6


def test_predictions_stay_below_the_roofline(inference):
    summary = inference[0].summary
    assert all(0 < k.roofline_share <= 1 and k.seconds > 0 for k in summary.kernels)
    assert summary.worst in summary.kernels
    assert all(k.why for k in summary.kernels)
    assert f"most time lost: {summary.each_call.worst.explanation}" in str(summary)


def test_a_prediction_says_what_holds_a_kernel_back():
    b200 = device("sm_100")
    few_tiles = Launch("k", True, 10**6, {"nvfp4": 2 * 384 * 384 * 65536}, gemm=(384, 384, 65536))
    assert (
        "9 tiles of 128x128 keep 6% of 148 SMs busy (waves: 1), at 62% of the peak rate" in predict(few_tiles, b200).why
    )
    library = Launch("mm", False, 10**6, {"bf16": 2 * 4096**3}, product=(1, 4096, 4096, 4096))
    assert (
        "4096 tiles of 64x64 keep 99% of 148 SMs busy (waves: 28), at 66% of the peak rate"
        in predict(library, b200).why
    )
    quantizer = Launch("k", True, 10**9, {}, quantizes=(4096, 4096))
    assert "1000 MB at 53% of the memory's peak" in predict(quantizer, b200).why
    assert "starting it takes 2 us, its work 0.00016 us" in predict(Launch("k", True, 1000, {}), b200).why


def test_the_folder_holds_programs_kernels_plan_and_summary(inference):
    result, folder = inference[:2]
    assert {"plan.json", "summary.json", "summary.txt", "graph_000"} == {p.name for p in folder.iterdir()}
    for program in result.programs:
        home = folder / "graph_000"
        assert (home / f"{program.part}_program.py").read_text() == program.source
        for name, source in program.kernels.items():
            kernel = home / program.part / name
            assert kernel.with_suffix(".py").read_text() == source
            assert ".target sm_100a" in kernel.with_suffix(".ptx").read_text()
            assert kernel.with_suffix(".cubin").read_bytes()[:4] == b"\x7fELF"
    table = json.loads((folder / "summary.json").read_text())
    assert table["target"] == "sm_100" and len(table["kernels"]) == len(result.summary.kernels)
    assert str(result.summary) + "\n" == (folder / "summary.txt").read_text()
    [graph] = (path.read_text() for path in (folder / "graph_000").glob("*_tensor_cores.txt"))
    assert graph.count("fp4.quantize_rows") == 5  # three weights, two activations


def test_the_process_is_as_before(inference):
    *_, before, after = inference
    assert before == after
    model, x = block_input()
    with torch.no_grad():
        expected = torch.compile(model, backend="nvfp4")(x)
        torch._dynamo.reset()
        compile_for(nn.Linear(64, 32).bfloat16(), x[:, :64], "sm_90", options={"pins": {"*": "bf16"}})
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="nvfp4")(x), expected)


def test_the_process_is_as_before_after_an_error():
    before = gpu_state()
    with pytest.raises(RuntimeError, match="stop"), offline_device(find_target("sm_120")):
        assert torch.cuda.get_device_capability() == (12, 0)
        raise RuntimeError("stop")
    assert gpu_state() == before


@pytest.mark.slow
def test_a_training_step_has_forward_and_backward():
    model = nn.Sequential(nn.Linear(256, 128, bias=False), nn.GELU(), nn.Linear(128, 256, bias=False)).bfloat16()
    result = compile_for(model, torch.randn(128, 256).bfloat16(), "sm_120", options=EVERYTHING)
    assert [p.part for p in result.programs] == ["forward", "backward"]
    assert not result.summary.failed
    for part, count in (("forward", 2), ("backward", 3)):  # the model's input needs no gradient
        gemms = [k for k in result.summary.of(part).kernels if k.role == "fp4 gemm"]
        assert sum(k.launches for k in gemms) == count
        assert all(k.instructions["mma.sync mxf4nvf4"] and not k.faults for k in gemms)
    # What is left to libraries draws the step's seed.
    [seed] = [k for k in result.summary.kernels if k.role == "library"]
    assert (seed.name, seed.launches) == ("fp4.draw_seed.default", 1)


def test_an_older_gpu_reads_packed_weights():
    with torch.no_grad():
        result = compile_for(nn.Linear(512, 256).bfloat16(), torch.randn(64, 512).bfloat16(), "sm_90", None, EVERYTHING)
    [product] = result.summary.of("inference").kernels
    assert product.role == "weight gemm" and product.faults == () and product.instructions["wgmma"]
    assert product.bytes < 2 * 64 * 512 + 0.6 * 256 * 512 + 2 * 64 * 256 + 4096


def test_what_does_not_pay_on_the_target_stays():
    """The target decides unless the user gives another: two small products lose on a B200."""
    with torch.no_grad():
        result = compile_for(nn.Linear(256, 256).bfloat16(), torch.randn(64, 256).bfloat16(), "sm_100")
    assert not result.plan.select(Precision.NVFP4)


def test_mistakes_are_named(tmp_path):
    model, x = nn.Linear(64, 64), torch.randn(4, 64)
    with pytest.raises(DeviceError, match="sm_999"):
        compile_for(model, x, "sm_999")
    with pytest.raises(TargetError, match="no GPU"):
        compile_for(model, x, "cpu")
    for name in ("max_autotune", "combo_kernels"):
        with pytest.raises(OptionError, match=name):
            compile_for(model, x, "sm_100", options={"inductor": {name: True}})
    (tmp_path / "file").write_text("")
    with pytest.raises(DumpError, match="file"):
        compile_for(model, x, "sm_100", out=tmp_path / "file")


def test_an_old_triton_is_a_typed_error(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.4.0")
    with pytest.raises(TargetError, match=r"Triton 3\.4\.0 is too old"):
        find_target("sm_100")


def test_the_backend_writes_for_the_gpu_its_inputs_are_on(monkeypatch):
    """What decides it; kernels for it are the same as `compile_for`'s."""
    from torch._subclasses import FakeTensorMode

    from fp4_compile.backend import gpu

    with FakeTensorMode():
        inputs = [3, torch.empty(2), torch.empty(2, device="cuda")]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for capability, sm in (((10, 3), 103), ((8, 0), 80), ((7, 5), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, answer=capability: answer)
        assert gpu(inputs) == sm
    assert gpu(inputs[:2]) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert gpu(inputs) is None
