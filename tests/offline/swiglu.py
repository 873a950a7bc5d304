"""A block as language models have it, small."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn


class SwiGlu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(256)
        self.gate, self.up = nn.Linear(256, 512), nn.Linear(256, 512, bias=False)
        self.down = nn.Linear(512, 256, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
