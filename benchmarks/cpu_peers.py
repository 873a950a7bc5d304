"""ggml's (llama.cpp's) 4-bit products on a CPU. torchao 0.18 refuses its NVFP4 there, and torch its product."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TYPES = {"q4_0": 2, "mxfp4": 39, "nvfp4": 40}
"""ggml's 4-bit types, by the numbers of its ``ggml_type``."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class Ggml:
    """Products of ggml's CPU backend, from the folder of its shared libraries."""

    def __init__(self, folder: str) -> None:
        mode = ctypes.RTLD_GLOBAL
        self.base, self.cpu = (ctypes.CDLL(str(Path(folder) / f"libggml-{n}.so"), mode) for n in ("base", "cpu"))
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        signatures: dict[str, tuple[Any, list[Any]]] = {
            "ggml_init": (pointer, [_InitParams]),
            "ggml_new_tensor_2d": (pointer, [pointer, ctypes.c_int, number, number]),
            "ggml_get_data": (pointer, [pointer]),
            "ggml_mul_mat": (pointer, [pointer, pointer, pointer]),
            "ggml_new_graph": (pointer, [pointer]),
            "ggml_build_forward_expand": (None, [pointer, pointer]),
            "ggml_quantize_chunk": (ctypes.c_size_t, [ctypes.c_int, pointer, pointer, number, number, number, pointer]),
            "ggml_free": (None, [pointer]),
        }
        for name, (result, arguments) in signatures.items():
            function = getattr(self.base, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]

    def products(
        self, kind: str, weight: Tensor, x: Tensor, count: int
    ) -> tuple[Callable[[], object], Callable[[], object]]:
        """``count`` products of fp32 ``x`` [M, K] with copies of ``weight`` [N, K] of a 4-bit type.

        Returns what runs them all, and what frees their memory.
        """
        (n, k), rows = weight.shape, x.shape[0]
        context = self.base.ggml_init(
            _InitParams(count * (n * k * 5 // 8 + rows * n * 4 + 4096) + (1 << 27), None, False)
        )
        right = self.base.ggml_new_tensor_2d(context, 0, k, rows)
        x = x.float().contiguous()
        ctypes.memmove(self.base.ggml_get_data(right), x.data_ptr(), x.nbytes)
        graph, size, first = self.base.ggml_new_graph(context), 0, None
        plain = weight.float().contiguous()
        for _ in range(count):
            left = self.base.ggml_new_tensor_2d(context, TYPES[kind], k, n)
            data = self.base.ggml_get_data(left)
            if first is None:
                size = self.base.ggml_quantize_chunk(TYPES[kind], plain.data_ptr(), data, 0, n, k, None)
                first = data
            else:
                ctypes.memmove(data, first, size)
            self.base.ggml_build_forward_expand(graph, self.base.ggml_mul_mat(context, left, right))
        compute = partial(self.cpu.ggml_graph_compute_with_ctx, context, graph, torch.get_num_threads())
        return compute, partial(self.base.ggml_free, context)
