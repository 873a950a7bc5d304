"""Bytes that the blocks of a hybrid language model keep for the backward: Inductor in BF16, and NVFP4."""

from __future__ import annotations

from collections import Counter
from typing import Any

import hybrid_lm
import torch
from torch import Tensor, nn

WIDTH, TOKENS, ROWS = 384, 256, 8


def kept(module: nn.Module, call: Any, x: Tensor) -> Counter[str]:
    """Bytes kept by dtype, without parameters; what one storage holds counts once."""
    own = {p.untyped_storage().data_ptr() for p in module.parameters()}
    seen: dict[int, tuple[str, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = str(tensor.dtype).removeprefix("torch."), storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call(x)
    del y
    total: Counter[str] = Counter()
    for dtype, size in seen.values():
        total[dtype] += size
    return total


def linear_inputs(module: nn.Module, x: Tensor) -> int:
    """Bytes in BF16 of what the linear layers read, each tensor once."""
    seen: dict[int, Tensor] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_pre_hook(lambda _, args: seen.update({args[0].data_ptr(): args[0]}))
    module(x)
    return sum(2 * t.numel() for t in seen.values())


def measure() -> dict[str, Any]:
    """Both compiles of each kind of block, [8, 256, 384] in BF16."""
    result: dict[str, Any] = {"blocks": {}}
    codes = inputs = 0
    for name, kind in hybrid_lm.KINDS.items():
        torch.manual_seed(0)
        block = kind(WIDTH).bfloat16()
        x = torch.randn(ROWS, TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        plain = kept(block, torch.compile(block), x)
        ours = kept(block, torch.compile(block, backend="nvfp4", options={"training": {"bf16_share": 0}}), x)
        read = linear_inputs(block, x)
        fp4 = ours["uint8"] + ours["float8_e4m3fn"]
        codes, inputs = codes + fp4, inputs + read
        result["blocks"][name] = {
            "bf16": plain.total(),
            "nvfp4": ours.total(),
            "ratio": ours.total() / plain.total(),
            "inputs": read,
            "codes": fp4,
        }
    result["linear_inputs"] = {"bf16": inputs, "nvfp4": codes, "ratio": codes / inputs}
    return result


def table(found: dict[str, Any]) -> str:
    """One line a block, MiB."""
    mib = 2**20
    lines = [
        f"kept for the backward, MiB, [{ROWS}, {TOKENS}, {WIDTH}]; codes: of linear inputs, and of weights for dgrad",
        "block        BF16  NVFP4  ratio | linear inputs BF16  codes  ratio",
    ]
    for name, row in found["blocks"].items():
        lines.append(
            f"{name:10} {row['bf16'] / mib:6.1f} {row['nvfp4'] / mib:6.1f}  {row['ratio']:5.2f} |"
            f" {row['inputs'] / mib:18.1f} {row['codes'] / mib:6.1f}  {row['codes'] / row['inputs']:5.2f}"
        )
    return "\n".join([*lines, f"all blocks' linear inputs: {found['linear_inputs']['ratio']:.3f}"])
