"""The decision as data: which matrix multiplications run in NVFP4, and why each was decided so."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy

from fp4_compile.cost_model.gemm import gemm_flops
from fp4_compile.errors import PlanError
from fp4_compile.planner.analysis import Analysis

log = logging.getLogger(__name__)

SCHEMA = 1


class Precision(enum.Enum):
    """What a matmul runs in."""

    NVFP4 = "nvfp4"
    """Both operands in NVFP4, accumulated in FP32."""
    MXFP4 = "mxfp4"
    """Both operands in MXFP4, to compare with; only the training recipe's options ask for it."""
    BF16 = "bf16"
    """Left as the model wrote it: BF16 in a BF16 model or under autocast, FP32 in an FP32 model."""


class Role(enum.Enum):
    """Which of a layer's three GEMMs a site is."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Reason(enum.Enum):
    """Why a site got its precision. The value is the short name a plan prints."""

    QUANTIZED = "quantized"
    PLAN = "given plan"
    PINNED = "pinned"
    SENSITIVE = "sensitive"
    SLOWER = "not faster"
    UNSCORED = "not scored"
    ATTENTION = "attention product"
    TWO_ACTIVATIONS = "two activations"
    ROUTER = "router"
    VOCABULARY = "vocabulary or scores"
    FEW_OUTPUTS = "few outputs"
    SHORT_CONTRACTION = "short contraction"
    FEW_TOKENS = "few tokens"
    PADDING = "padding"
    DYNAMIC_CONTRACTION = "dynamic contraction"
    DTYPE = "dtype"
    LAST_LAYERS = "last layers"
    RECIPE = "recipe"
    BACKWARD = "backward"
    NO_KERNEL = "no kernel"
    FAILED = "failed"


ADVICE = {
    Reason.FEW_OUTPUTS: "layers with few outputs gain nothing in FP4: leave them, or merge parallel ones into one",
    Reason.SHORT_CONTRACTION: "widen the layer's input: FP4 needs K >= 32 to pay for its scales",
    Reason.FEW_TOKENS: "wgrad sums over the tokens of a step, and they are few: give it more",
    Reason.PADDING: "make the layer's input width a multiple of 16",
    Reason.DYNAMIC_CONTRACTION: "make the contraction static: do not mark that dimension dynamic",
    Reason.DTYPE: "run the model in bfloat16, float16 or float32",
    Reason.FAILED: "report it, with TORCH_LOGS=+fp4_compile's output: it is a fault of fp4_compile",
    Reason.SENSITIVE: "the budget spends its error elsewhere: raise it, or pin the site",
    Reason.SLOWER: "NVFP4 would be no faster here: more rows a call, or wider layers",
    Reason.UNSCORED: "calibrate with batches that reach it, and outputs that carry its gradient",
    Reason.LAST_LAYERS: "the recipe keeps the last layers in BF16; options={'training': {'bf16_share': 0}} does not",
}
"""What a user can change to get a site into FP4; a reason that is not here is right as it is."""


@dataclasses.dataclass(frozen=True)
class Site:
    """One matrix multiplication ``[batch, M, K] @ [batch, K, N]`` of a model.

    ``key`` names it the same way in every compile of the model: module path, kind of operation, role, and an
    ordinal where one module has several. Sizes are sympy expressions; symbols are dynamic dimensions.
    """

    module: str
    op: str
    role: Role
    ordinal: int
    batch: sympy.Expr
    m: sympy.Expr
    n: sympy.Expr
    k: sympy.Expr
    dtype: str

    @property
    def key(self) -> str:
        """For instance ``encoder.layer.0.output.dense:mm.fprop`` or ``attn:bmm.fprop#1``."""
        ordinal = f"#{self.ordinal}" if self.ordinal else ""
        return f"{self.module}:{self.op}.{self.role.value}{ordinal}"

    @property
    def shape(self) -> str:
        """``MxNxK``, or ``B*MxNxK`` for a batched product."""
        batch = "" if self.batch == 1 else f"{self.batch}*"
        return batch + "x".join(f"({e})" if e.is_Add else str(e).replace(" ", "") for e in (self.m, self.n, self.k))

    @property
    def flops(self) -> float:
        """Floating-point operations of one call, dynamic sizes taken as 1024."""
        flops = gemm_flops(self.batch, self.m, self.n, self.k)
        return float(flops.subs(dict.fromkeys(flops.free_symbols, 1024)))


@dataclasses.dataclass(frozen=True)
class Decision:
    """A site, the precision it runs in, why, and a sentence with the numbers behind the reason."""

    site: Site
    precision: Precision
    reason: Reason
    detail: str
    loss: float | None = None
    """Predicted part in the model's error if the site runs in NVFP4; the plan's `Analysis` has the unit."""
    seconds: tuple[float, float] | None = None
    """Predicted seconds a call in BF16, and in NVFP4 with its quantizer, on the plan's target."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Every decision taken for one or more graphs. Immutable; prints, saves, loads, compares."""

    decisions: tuple[Decision, ...]
    analysis: Analysis | None = None
    """What stood behind a plan that was made from scores."""

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __len__(self) -> int:
        return len(self.decisions)

    def __getitem__(self, key: str) -> Decision:
        """The decision of the site with this key.

        Raises:
            KeyError: no site has it.
        """
        for decision in self.decisions:
            if decision.site.key == key:
                return decision
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return any(decision.site.key == key for decision in self.decisions)

    def __str__(self) -> str:
        return self.render()

    def select(self, precision: Precision) -> tuple[Decision, ...]:
        """The decisions for one precision."""
        return tuple(d for d in self.decisions if d.precision is precision)

    def fp4_share(self) -> float | None:
        """Share of the plan's matmul FLOPs that runs in NVFP4, 0..1; None without any matmul.

        Dynamic sizes are taken as 1024: they cancel where all sites share them.
        """
        total = sum(d.site.flops for d in self.decisions)
        fp4 = sum(d.site.flops for d in self.decisions if d.precision is not Precision.BF16)
        return fp4 / total if total else None

    def advice(self) -> tuple[str, ...]:
        """What to change to get more into FP4, most matmuls first."""
        kept = Counter(d.reason for d in self.select(Precision.BF16) if d.reason in ADVICE)
        return tuple(f"{count} x {reason.value}: {ADVICE[reason]}" for reason, count in kept.most_common())

    def summary(self) -> str:
        """How many matmuls run in NVFP4, what share of the FLOPs that is, and what the planner predicts."""
        share = self.fp4_share()
        flops = "" if share is None else f", {100 * share:.1f}% of the matmul FLOPs"
        counts = f"{len(self.select(Precision.NVFP4))} of {len(self)} matmuls in NVFP4{flops}"
        return counts if self.analysis is None else f"{counts}\n{self.analysis.summary()}"

    def render(self, width: int = 100) -> str:
        """A table of at most ``width`` columns (60 or more), one line a site, and the summary."""
        rows = [(d.site.key, d.site.shape, precision_name(d), f"{d.reason.value}: {d.detail}") for d in self.decisions]
        rows.insert(0, ("site", "MxNxK", "precision", "reason"))
        site, shape, reason = (max(len(row[i]) for row in rows) for i in (0, 1, 3))
        shape = min(shape, 26)
        free = width - shape - len("precision") - 6
        if site + reason > free:
            site = min(site, max(free // 2, free - reason))
            reason = free - site
        lines = [
            f"{_clip(s, site, left=True):<{site}}  {_clip(x, shape):<{shape}}  {p:<9}  {_clip(r, reason)}".rstrip()
            for s, x, p, r in rows
        ]
        return "\n".join([*lines, self.summary()])

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives an equal plan back."""
        data: dict[str, Any] = {"schema": SCHEMA, "sites": [decision_to_dict(decision) for decision in self.decisions]}
        if self.analysis is not None:
            data["analysis"] = self.analysis.to_dict()
        return json.dumps(data, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: the text is not a plan, or of a schema this version does not know.
        """
        try:
            data = json.loads(text)
            if data.get("schema") != SCHEMA:
                raise PlanError(f"the plan has schema {data.get('schema')!r}; this version reads {SCHEMA}")
            analysis = Analysis.from_dict(data["analysis"]) if "analysis" in data else None
            return cls(tuple(decision_from_dict(entry) for entry in data["sites"]), analysis)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(f"not a plan: {error!r}; a plan is what Plan.to_json wrote") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a saved plan.

        Raises:
            PlanError: the file is missing or is not a plan.
        """
        try:
            with open(path, encoding="utf-8") as file:
                return cls.from_json(file.read())
        except OSError as error:
            raise PlanError(f"cannot read the plan {os.fspath(path)!r}: {error.strerror}") from error

    def digest(self) -> str:
        """Hex digest of what the plan decides (sites and precisions; not reasons)."""
        decided = sorted((d.site.key, d.precision.value) for d in self.decisions)
        return hashlib.sha256(json.dumps(decided).encode()).hexdigest()

    def report(self, folder: str | os.PathLike[str]) -> str:
        """Write ``index.html``, self-contained, and its pictures as PNGs into a folder; returns the page's path.

        Raises:
            PlanError: matplotlib is not installed, or the folder cannot be written.
        """
        from fp4_compile.report import write_report

        return write_report(self, folder)

    def require_fit(self, sites: Sequence[Site]) -> None:
        """Check that the plan was made for a model with these sites.

        Raises:
            PlanError: it names none of them.
        """
        keys = [site.key for site in sites]
        missing = [key for key in keys if key not in self]
        if len(missing) == len(keys):
            first = self.decisions[0].site.key if self.decisions else "nothing"
            raise PlanError(
                f"the given plan names none of the {len(keys)} matmuls (the first is {keys[0]!r}, the plan's first is "
                f"{first!r}): it was made for another model; make one with fp4_compile.explain(model, ...).plan"
            )
        absent = len(self) - (len(keys) - len(missing))
        if missing or absent:
            log.info(
                "%d matmuls are not in the given plan and follow the default policy, %d of the plan's are not here",
                len(missing),
                absent,
            )

    def diff(self, other: Plan) -> str:
        """What ``other`` decides otherwise, one line a site; empty if the two decide alike."""
        mine, theirs = ({d.site.key: d.precision.value for d in p} for p in (self, other))
        keys = dict.fromkeys([*mine, *theirs])
        return "\n".join(
            f"{key}: {mine.get(key, 'absent')} -> {theirs.get(key, 'absent')}"
            for key in keys
            if mine.get(key) != theirs.get(key)
        )


def merge(plans: Iterable[Plan]) -> Plan:
    """One plan of several graphs' plans; a site met again keeps its first decision."""
    decisions: dict[str, Decision] = {}
    for plan in plans:
        for decision in plan:
            decisions.setdefault(decision.site.key, decision)
    return Plan(tuple(decisions.values()))


def precision_name(decision: Decision) -> str:
    """What the table prints: ``nvfp4``, or the dtype the site was left in."""
    return decision.site.dtype if decision.precision is Precision.BF16 else decision.precision.value


def decision_to_dict(decision: Decision) -> dict[str, Any]:
    """The decision as JSON has it."""
    s = decision.site
    predicted: dict[str, Any] = {}
    if decision.loss is not None:
        predicted["loss"] = decision.loss
    if decision.seconds is not None:
        predicted["seconds"] = list(decision.seconds)
    return {
        "key": s.key,
        "module": s.module,
        "op": s.op,
        "role": s.role.value,
        "ordinal": s.ordinal,
        "batch": str(s.batch),
        "m": str(s.m),
        "n": str(s.n),
        "k": str(s.k),
        "dtype": s.dtype,
        "precision": decision.precision.value,
        "reason": decision.reason.name.lower(),
        "detail": decision.detail,
        **predicted,
    }


def decision_from_dict(entry: dict[str, Any]) -> Decision:
    """What `decision_to_dict` made.

    Raises:
        KeyError, TypeError, ValueError, PlanError: it is not that.
    """
    sizes = {name: _size(entry[name]) for name in ("batch", "m", "n", "k")}
    site = Site(
        module=str(entry["module"]),
        op=str(entry["op"]),
        role=Role(entry["role"]),
        ordinal=int(entry["ordinal"]),
        dtype=str(entry["dtype"]),
        **sizes,
    )
    seconds = entry.get("seconds")
    return Decision(
        site,
        Precision(entry["precision"]),
        Reason[entry["reason"].upper()],
        str(entry["detail"]),
        None if entry.get("loss") is None else float(entry["loss"]),
        None if seconds is None else (float(seconds[0]), float(seconds[1])),
    )


def _size(text: str) -> sympy.Expr:
    """A size from its text. Sympy evaluates what it parses, so only sizes get that far: a plan may be anybody's."""
    words = set(re.findall(r"[A-Za-z_]\w*", text))
    names = {word for word in words if re.fullmatch(r"[su]\d+", word)}
    symbols = {name: sympy.Symbol(name, integer=True, nonnegative=True) for name in names}
    if not re.fullmatch(r"[\w\s+*/%(),-]*", text) or words - names - {"FloorDiv", "Mod", "Max", "Min"}:
        raise PlanError(f"{text!r} is not a size")
    return sympy.sympify(text, locals=symbols)


def _clip(text: str, width: int, left: bool = False) -> str:
    if len(text) <= width:
        return text
    return "…" + text[len(text) - width + 1 :] if left else text[: width - 1] + "…"
