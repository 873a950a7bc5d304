"""What the planner knows of a model's matmuls: sizes, what they share, and which must be decided alike."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import fx

from fp4_compile.cost_model.gemm import gemm_flops
from fp4_compile.passes.context import Matmul
from fp4_compile.passes.policy import uneven, unsupported
from fp4_compile.passes.relations import Relations, first_of
from fp4_compile.plan import Decision, Precision, Role, Site, decision_from_dict, decision_to_dict

DYNAMIC_SIZE = 1024
"""What a dynamic dimension counts as where a number is needed and nothing better is known."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One forward matmul: its default decision, and what it has in common with others.

    ``reads`` and ``weight`` are names: the key of the first site with the same activation tensor, and of the
    first with the same weight (None where the right operand is an activation). ``possible`` says whether
    NVFP4 can be asked for at all; the default policy may still advise against it. ``backward`` names the products
    of its backward that would follow it into FP4; None in inference.
    """

    default: Decision
    possible: bool
    reads: str
    weight: str | None
    backward: tuple[Role, ...] | None = None

    @property
    def site(self) -> Site:
        """The matmul."""
        return self.default.site

    @property
    def key(self) -> str:
        """The site's key."""
        return self.default.site.key

    @property
    def advised(self) -> bool:
        """Whether the default policy runs it in NVFP4."""
        return self.default.precision is Precision.NVFP4

    @property
    def rows(self) -> int:
        """Rows of the left operand over all batches, dynamic sizes as `DYNAMIC_SIZE`: never what a call happens
        to have, or the first call would decide for all that follow."""
        return int(number(self.site.batch * self.site.m))

    @property
    def elements(self) -> int:
        """Elements of the right operand."""
        return int(number(self.site.batch * self.site.n * self.site.k))

    @property
    def flops(self) -> float:
        """Floating-point operations of one call."""
        return number(gemm_flops(self.site.batch, self.site.m, self.site.n, self.site.k))


@dataclasses.dataclass(frozen=True)
class Survey:
    """The forward matmuls of one or more graphs, in graph order, and the groups that must be decided alike."""

    entries: tuple[Entry, ...]
    groups: tuple[frozenset[str], ...]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @functools.cached_property
    def consumers(self) -> Counter[str]:
        """How many matmuls that the default policy quantizes read an activation, by its name (`Entry.reads`)."""
        return Counter(entry.reads for entry in self.entries if entry.advised)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        sites = [
            {
                **decision_to_dict(e.default),
                "possible": e.possible,
                "reads": e.reads,
                "weight": e.weight,
                "backward": None if e.backward is None else [role.value for role in e.backward],
            }
            for e in self.entries
        ]
        return {"sites": sites, "groups": [sorted(group) for group in self.groups]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Survey:
        """What `to_dict` made.

        Raises:
            KeyError, TypeError, ValueError, PlanError: it is not that.
        """
        entries = tuple(
            Entry(
                decision_from_dict(e),
                bool(e["possible"]),
                str(e["reads"]),
                None if e["weight"] is None else str(e["weight"]),
                None if e.get("backward") is None else tuple(map(Role, e["backward"])),
            )
            for e in data["sites"]
        )
        return cls(entries, tuple(frozenset(map(str, group)) for group in data["groups"]))


def survey(
    graph: fx.Graph,
    matmuls: Sequence[Matmul],
    defaults: Sequence[Decision],
    parameters: set[fx.Node],
    backward: Mapping[fx.Node, tuple[Role, ...]] | None = None,
) -> Survey:
    """Look at the forward matmuls of a graph.

    Args:
        graph: an ATen graph, forward or joint.
        matmuls: its matrix multiplications.
        defaults: the default policy's decision for each.
        parameters: the nodes that depend on parameters alone.
        backward: in training, `Entry.backward` of each forward matmul's node.
    """
    forward = [i for i, m in enumerate(matmuls) if m.site.role is Role.FPROP]
    relations = Relations(graph, matmuls, parameters)
    keys = [matmuls[i].site.key for i in forward]
    reads = first_of(keys, [relations.reads(matmuls[i]) for i in forward])
    weights = first_of(keys, [relations.weight(matmuls[i]) for i in forward])
    entries = tuple(
        Entry(
            defaults[i],
            can_run_in_nvfp4(matmuls[i]),
            read or key,
            weight,
            None if backward is None else backward.get(matmuls[i].node, ()),
        )
        for i, key, read, weight in zip(forward, keys, reads, weights, strict=True)
    )
    return Survey(entries, relations.groups())


def can_run_in_nvfp4(matmul: Matmul) -> bool:
    """Whether a plan or a pin may ask for it, whatever the default policy advises."""
    return unsupported(matmul) is None and uneven(matmul) is None


def merge_surveys(surveys: Iterable[Survey]) -> Survey:
    """One survey of several graphs'; a site met again keeps its first entry."""
    entries: dict[str, Entry] = {}
    groups: dict[frozenset[str], None] = {}
    for each in surveys:
        for entry in each:
            entries.setdefault(entry.key, entry)
        groups.update(dict.fromkeys(each.groups))
    return Survey(tuple(entries.values()), tuple(groups))


def number(size: sympy.Expr) -> float:
    """A size with `DYNAMIC_SIZE` for its symbols."""
    size = sympy.sympify(size)
    return float(size.subs(dict.fromkeys(size.free_symbols, DYNAMIC_SIZE)))
