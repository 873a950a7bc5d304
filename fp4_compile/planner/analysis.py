"""What stood behind a plan: the trade-off it was chosen from, and what it is predicted to do."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class FrontPoint:
    """One choice on the Pareto front: how many sites run in NVFP4, and what that is predicted to give."""

    sites: int
    loss: float
    flops_share: float
    seconds: float | None


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The predictions of a planned model. Times are of its matmuls with their quantizers, per call.

    They are the forward's, and where a training step is compiled with a target the backward's too.
    """

    depth: str
    unit: str
    target: str | None
    budget: str | None
    """The budget and its value as text, ``effective_bits = 5``."""
    loss: float
    """Predicted increase, in the scores' unit."""
    flops_share: float
    """Share of the forward matmuls' FLOPs in NVFP4."""
    effective_bits: float
    bf16_seconds: float | None
    """All in BF16, on the target."""
    seconds: float | None
    """As planned."""
    gap: float
    """How far from the proven bound the choice may be, relative; 0 where it is the proven optimum."""
    traded: str
    """The metric that the front trades against error: ``seconds``, ``flops``, ``bits`` or ``params``."""
    front: tuple[FrontPoint, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Analysis:
        """What `to_dict` made.

        Raises:
            KeyError, TypeError: it is not that.
        """
        points = tuple(FrontPoint(**point) for point in data["front"])
        return cls(**{**data, "front": points})

    def summary(self) -> str:
        """A line or two for people."""
        bits = f"{self.effective_bits:.2f} bits a weight"
        parts = [f"{self.depth} scores: predicted {self.unit} error {self.loss:.3g}, {bits}"]
        if self.seconds is not None and self.bf16_seconds is not None and self.seconds > 0:
            parts.append(
                f"{self.target}: {1e6 * self.bf16_seconds:.4g} us of matmuls in BF16, {1e6 * self.seconds:.4g} us "
                f"planned, {self.bf16_seconds / self.seconds:.2f}x"
            )
        if self.budget is not None:
            proof = "the proven optimum" if self.gap == 0 else f"within {100 * self.gap:.2g}% of the bound"
            parts.append(f"budget {self.budget}: {proof}")
        return "\n".join(parts)
