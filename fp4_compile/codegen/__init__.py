"""What the fp4 operators run as on a device: kernels, tested against `fp4_compile.numerics` byte for byte."""

from __future__ import annotations
