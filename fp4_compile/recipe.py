"""The training recipe: what ``options={"training": {...}}`` takes. The defaults are arXiv:2509.25149's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from typing_extensions import get_type_hints

from fp4_compile.errors import OptionError
from fp4_compile.numerics import HADAMARD_SIZE, HADAMARD_SIZES, MXFP4_BLOCK

Format = Literal["nvfp4", "mxfp4", "bf16"]
TrainingBlock = Literal["16x16", "1x16"]


@dataclasses.dataclass(frozen=True)
class Training:
    """How layers are trained. Each part can be switched off, as ablations do."""

    forward: Format = "nvfp4"
    """What the layers' forward GEMMs run in; counts for graphs without a backward too."""

    backward: Format = "nvfp4"
    """What their dgrad and wgrad GEMMs run in; ``"bf16"``: as the model wrote them, the gradient passing straight
    through the forward's quantizers."""

    stochastic_rounding: bool = True
    """Round gradients up or down at random, so that they are right on average (section 4.4)."""

    hadamard: int | None = None
    """Size of the random Hadamard transform on both operands of wgrad (section 4.2): 16, 32, 64, 128, or 0 for none.
    None: the format's block, 16 for NVFP4 and 32 for MXFP4."""

    weight_block: TrainingBlock = "16x16"
    """Elements that share a block scale in an NVFP4 weight: ``"16x16"``, so that the forward and dgrad see the same
    weight (section 4.3), or ``"1x16"`` along each GEMM's own contraction. MXFP4 weights have blocks of 1x32."""

    bf16_share: float = 0.15
    """The share of a graph's linear layers, rounded down, that stays in BF16; the last ones (section 4.1). Not
    applied where a ``budget`` decides."""

    @classmethod
    def parse(cls, given: object) -> Training:
        """Check a user's dictionary.

        Raises:
            OptionError: an unknown key, or a value it does not take.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise OptionError(f"option 'training' is {given!r} of type {type(given).__name__}; it takes a dict")
        names = [field.name for field in dataclasses.fields(cls)]
        for key, value in given.items():
            if key not in names:
                from fp4_compile.options import suggest

                raise OptionError(f"unknown key {key!r} in option 'training'{suggest(str(key), names)}; it has {names}")
            _check(key, value, get_type_hints(cls)[key])
        return cls(**given)

    def hadamard_size(self, precision: str) -> int:
        """The transform's size for wgrad in this format; 0 for none."""
        if self.hadamard is not None:
            return self.hadamard
        return MXFP4_BLOCK if precision == "mxfp4" else HADAMARD_SIZE

    def as_dict(self) -> dict[str, Any]:
        """What `parse` takes."""
        return dataclasses.asdict(self)

    def key(self) -> tuple[Any, ...]:
        """All that changes generated code."""
        return dataclasses.astuple(self)


def _check(key: str, value: object, hint: object) -> None:
    if hint in (Format, TrainingBlock):
        right, takes = value in get_args(hint), f"one of {list(get_args(hint))}"
    elif key == "stochastic_rounding":
        right, takes = isinstance(value, bool), "True or False"
    elif key == "hadamard":
        right = value is None or (not isinstance(value, bool) and value in (0, *HADAMARD_SIZES))
        takes = f"0, one of {list(HADAMARD_SIZES)}, or None"
    else:
        right = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
        takes = "a number from 0 to 1"
    if not right:
        raise OptionError(f"{key!r} in option 'training' is {value!r}; it takes {takes}")
