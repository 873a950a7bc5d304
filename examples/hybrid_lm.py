"""A small hybrid language model, Mamba-2 and attention blocks in plain PyTorch, and English text to train it on."""

from __future__ import annotations

import hashlib
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256
"""Bytes."""
BLOCKS = ("mamba", "mlp", "attention", "mlp", "mamba", "mlp")
"""The blocks of the model, in order; each adds to the residual stream."""


class Attention(nn.Module):
    """Causal attention with rotary positions and fewer heads for keys and values."""

    def __init__(self, width: int, heads: int = 3, groups: int = 1) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, groups * self.size, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        q, k, v = (
            layer(x).unflatten(-1, (heads, self.size)).transpose(1, 2)
            for layer, heads in ((self.q, self.heads), (self.k, self.groups), (self.v, self.groups))
        )
        q, k = rotate(q), rotate(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of [B, H, T, D]."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[-2], device=x.device).unsqueeze(1) * frequency
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1).to(x.dtype)


class Mamba2(nn.Module):
    """A state-space layer in the form of a masked product (arXiv:2405.21060, section 3), one chunk a sequence."""

    def __init__(self, width: int, state: int = 32, head: int = 32) -> None:
        super().__init__()
        self.inner, self.state, self.heads = 2 * width, state, 2 * width // head
        self.inward = nn.Linear(width, 2 * self.inner + 2 * state + self.heads, bias=False)
        channels = self.inner + 2 * state
        self.convolution = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)
        self.decay = nn.Parameter(torch.arange(1, self.heads + 1).float().log())
        self.step_bias = nn.Parameter(torch.full((self.heads,), -4.0))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.norm = nn.RMSNorm(self.inner)
        self.outward = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        tokens = x.shape[1]
        gate, mixed, step = self.inward(x).split([self.inner, self.inner + 2 * self.state, self.heads], -1)
        mixed = F.silu(self.convolution(mixed.transpose(1, 2))[..., :tokens].transpose(1, 2))
        values, keys, queries = mixed.split([self.inner, self.state, self.state], -1)
        values = values.unflatten(-1, (self.heads, -1))
        step = F.softplus(step.float() + self.step_bias)
        total = (-self.decay.exp() * step).cumsum(1)  # log of what is left of the state
        between = (total.unsqueeze(2) - total.unsqueeze(1)).permute(0, 3, 1, 2)  # [B, H, T, T]
        past = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        weights = torch.where(past, between, -torch.inf).exp() * (queries @ keys.mT).float().unsqueeze(1)
        driven = (values * step.unsqueeze(-1)).transpose(1, 2)
        y = (weights.to(x.dtype) @ driven.to(x.dtype)).transpose(1, 2) + values * self.skip.unsqueeze(-1)
        return self.outward(self.norm(y.flatten(2).to(x.dtype) * F.silu(gate)))


class Mlp(nn.Module):
    """Two layers with a squared ReLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        return self.down(F.relu(self.up(x)).square())


KINDS = {"mamba": Mamba2, "mlp": Mlp, "attention": Attention}


class HybridLM(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(KINDS[kind](width) for kind in BLOCKS)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in BLOCKS)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What ends in the residual stream starts smaller, the more of it there is.
                scale = (2 * len(BLOCKS)) ** -0.5 if name.split(".")[-2] in ("out", "outward", "down") else 1.0
                nn.init.normal_(parameter, std=scale * parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """[B, T] bytes and the bytes after them -> mean cross-entropy, nats."""
        x = self.embedding(ids)
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = x + block(norm(x).to(x.dtype))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class Text:
    """The language reference that every CPython carries for its help(): training and validation windows of bytes."""

    def __init__(self, tokens: int = 64) -> None:
        self.tokens = tokens
        train: list[bytes] = []
        held: list[bytes] = []
        for name in sorted(topics):
            # One topic in ten is held out, by its name, so that no sentence is in both.
            chosen = held if int(hashlib.sha256(name.encode()).hexdigest(), 16) % 10 == 0 else train
            chosen.append(topics[name].encode())
        self.train, self.held = (
            torch.frombuffer(bytearray(b"\n\n".join(part)), dtype=torch.uint8).long() for part in (train, held)
        )

    def batch(self, step: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Random windows; the same for the same step and seed, whatever was drawn before."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        starts = torch.randint(0, len(self.train) - self.tokens - 1, (rows,), generator=generator)
        window = self.train[starts.unsqueeze(1) + torch.arange(self.tokens + 1)]
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def validation(self, rows: int, count: int) -> list[tuple[Tensor, Tensor]]:
        """The first windows of the held-out text, side by side."""
        size = rows * self.tokens
        ids, targets = self.held[: size * count], self.held[1 : size * count + 1]
        return [
            (a.view(rows, self.tokens), b.view(rows, self.tokens))
            for a, b in zip(ids.split(size), targets.split(size), strict=True)
        ]
