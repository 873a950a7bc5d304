"""The models of benchmarks/offline.py: a Llama-style block, a Mamba-2 block in plain PyTorch, a sentence encoder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))


class LlamaBlock(nn.Module):
    """Grouped-query attention and SwiGLU, sizes as in Llama 3 8B; without rotary embedding, which no GEMM sees."""

    def __init__(self, width: int = 4096, heads: int = 32, kv_heads: int = 8, hidden: int = 14336) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width]."""
        y = self.attention_norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mamba2Block(nn.Module):
    """State-space duality in chunks (arXiv:2405.21060, listing 1), sizes as in Mamba-2 2.7B."""

    def __init__(self, width: int = 2560, state: int = 128, head: int = 64, chunk: int = 256) -> None:
        super().__init__()
        self.inner, self.state, self.head, self.chunk = 2 * width, state, head, chunk
        self.heads = self.inner // head
        self.norm, self.gated_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(self.inner, eps=1e-5)
        self.in_proj = nn.Linear(width, 2 * self.inner + 2 * state + self.heads, bias=False)
        mixed = self.inner + 2 * state
        self.conv = nn.Conv1d(mixed, mixed, 4, groups=mixed, padding=3)
        self.dt_bias, self.decay = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(self.heads))
        self.skip = nn.Parameter(torch.ones(self.heads))
        self.out_proj = nn.Linear(self.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width], tokens a multiple of the chunk."""
        tokens = x.shape[1]
        z, mixed, dt = self.in_proj(self.norm(x)).split([self.inner, self.inner + 2 * self.state, self.heads], dim=-1)
        mixed = F.silu(self.conv(mixed.transpose(1, 2))[..., :tokens].transpose(1, 2))
        u, b, c = mixed.split([self.inner, self.state, self.state], dim=-1)
        u = u.unflatten(-1, (self.heads, self.head))
        dt = F.softplus(dt.float() + self.dt_bias.float())
        y = self._scan(u.float() * dt.unsqueeze(-1), -torch.exp(self.decay.float()) * dt, b.float(), c.float())
        y = (y + u * self.skip.unsqueeze(-1)).flatten(-2).to(x.dtype)
        return x + self.out_proj(self.gated_norm(y * F.silu(z)))

    def _scan(self, u: Tensor, log_decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        u, log_decay, b, c = (t.unflatten(1, (-1, self.chunk)) for t in (u, log_decay, b, c))
        log_decay = log_decay.permute(0, 3, 1, 2)  # batch, head, chunk, token
        total = log_decay.cumsum(-1)
        within = torch.einsum("bcln,bcsn,bhcls,bcshp->bclhp", c, b, torch.exp(_segment_sums(log_decay)), u)
        states = torch.einsum("bcln,bhcl,bclhp->bchpn", b, torch.exp(total[..., -1:] - total), u)
        states = torch.cat([torch.zeros_like(states[:, :1]), states], dim=1)
        between = torch.exp(_segment_sums(F.pad(total[..., -1], (1, 0))))
        states = torch.einsum("bhzc,bchpn->bzhpn", between, states)[:, :-1]
        carried = torch.einsum("bcln,bchpn,bhcl->bclhp", c, states, torch.exp(total))
        return (within + carried).flatten(1, 2)


def _segment_sums(x: Tensor) -> Tensor:
    """[..., i, j]: the sum of x from j+1 to i, and minus infinity above the diagonal."""
    total = x.cumsum(-1)
    sums = total.unsqueeze(-1) - total.unsqueeze(-2)
    mask = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool, device=x.device).tril()
    return sums.masked_fill(~mask, float("-inf"))


def make(name: str, tokens: int, narrow: bool = False) -> tuple[nn.Module, Any]:
    """A model in BF16 and its inputs; weights are zeros: only shapes matter here. ``narrow``: a Llama block of 512."""
    if name == "encoder":
        from minilm import load_encoder

        ids = torch.zeros(tokens // 32, 32, dtype=torch.int64)
        return load_encoder(torch.bfloat16), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with torch.device("meta"):
        llama = LlamaBlock(512, 8, 2, 1536) if narrow else LlamaBlock()
        model: nn.Module = llama if name == "llama" else Mamba2Block()
    width = {"llama": 512 if narrow else 4096, "mamba2": 2560}[name]
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model, torch.zeros(1, tokens, width, dtype=torch.bfloat16)


NAMES = ("llama", "mamba2", "encoder")
