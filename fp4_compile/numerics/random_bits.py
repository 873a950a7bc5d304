"""Random bytes for stochastic rounding: a function of a seed, a stream and a place, and of nothing else.

Philox4x32-10 ("Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). The key is the 64-bit seed; the counter is
(block, block >> 32, stream, 0), and its four words are the bytes of one block of 16 elements, in order, the low
byte first. So any thread can have the bytes of its elements, rows and columns and layers get independent ones by
their stream, and the same seed gives the same bytes on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp4_compile.numerics.checks import require_dtype

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW = 0xFFFFFFFF


def philox_bytes(seed: Tensor, stream: int, blocks: int) -> Tensor:
    """Return uniform uint8 ``[blocks, 16]``.

    ``seed``: int64, 0-d, any value; ``stream``: 0..2**32 - 1; ``blocks``: how many blocks of 16 elements, counted
    from 0 in row-major order of the padded tensor.
    """
    require_dtype("seed", seed, torch.int64)
    index = torch.arange(blocks, dtype=torch.int64, device=seed.device)
    words = [index & _LOW, index >> 32, torch.full_like(index, stream), torch.zeros_like(index)]
    keys = [seed & _LOW, (seed >> 32) & _LOW]
    for _ in range(_ROUNDS):
        # The low 64 bits of the products are right although int64 is signed; only the shift has to be masked.
        first, second = words[0] * _MULTIPLIERS[0], words[2] * _MULTIPLIERS[1]
        words = [
            ((second >> 32) & _LOW) ^ words[1] ^ keys[0],
            second & _LOW,
            ((first >> 32) & _LOW) ^ words[3] ^ keys[1],
            first & _LOW,
        ]
        keys = [(key + step) & _LOW for key, step in zip(keys, _KEY_STEPS, strict=True)]
    shifts = torch.tensor([0, 8, 16, 24], device=seed.device)
    return ((torch.stack(words, -1).unsqueeze(-1) >> shifts) & 255).to(torch.uint8).flatten(-2)
