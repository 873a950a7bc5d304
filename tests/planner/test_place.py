"""What a matmul does in its block is read from the graph, however attention is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp4_compile.sensitivity import static
from fp4_compile.sensitivity.place import Place, places
from fp4_compile.sensitivity.static import score_statically


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v


class Block(nn.Module):
    """Pre-norm attention with rotated queries and keys, and SwiGLU; attention fused or written out."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.query, self.key, self.val, self.mix = (nn.Linear(64, 64) for _ in range(4))
        self.left, self.right, self.narrow = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, 32)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x, x.shape[-1:])
        q, k, v = (self.heads(layer(h)) for layer in (self.query, self.key, self.val))
        q, k = (torch.cat([t[..., 16:], t[..., :16]], -1) * 0.6 + t * 0.8 for t in (q, k))
        attend = F.scaled_dot_product_attention if self.fused else written_out
        x = x + self.mix(attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.silu(self.left(x)) * self.right(x))


class Mlp(nn.Module):
    """GELU between two layers: no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(x)))


def found_in(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> dict[str, Place]:
    seen: dict[str, Place] = {}

    def look(graph: torch.fx.Graph, matmuls: Sequence) -> dict[str, Place]:
        result = places(graph, matmuls)
        seen.update({key.partition(":")[0]: place for key, place in result.items()})
        return result

    monkeypatch.setattr(static, "places", look)
    score_statically(model, torch.randn(2, 8, 64))
    return seen


@pytest.mark.parametrize("fused", [True, False])
def test_places_of_a_transformer_block(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = found_in(Block(fused), monkeypatch)
    named = {name: found[name] for name in ("query", "key", "val", "mix", "left", "right", "narrow")}
    assert named == {
        "query": Place.QUERY_OR_KEY,
        "key": Place.QUERY_OR_KEY,
        "val": Place.VALUE,
        "mix": Place.AFTER_ATTENTION,
        "left": Place.GATE,
        "right": Place.PLAIN,
        "narrow": Place.NARROWING,
    }


def test_an_activation_alone_is_no_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found_in(Mlp(), monkeypatch) == {"wide": Place.PLAIN, "narrow": Place.NARROWING}


def test_a_score_is_the_error_times_the_place() -> None:
    scores = score_statically(nn.Sequential(*(Mlp() for _ in range(12))), torch.randn(2, 8, 64))
    middle = scores.values["6.narrow:mm.fprop"]
    assert middle.loss == pytest.approx(middle.error * 0.95)
