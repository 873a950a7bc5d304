"""What a pass is given besides the graph, and what it hands to the next one."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping

from torch import Tensor, fx

from fp4_compile.options import Options
from fp4_compile.plan import Decision, Plan, Role, Site


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matrix multiplication in a graph: the site, its node, and where the node has its operands."""

    site: Site
    node: fx.Node
    positions: tuple[int, int]
    owner: Matmul | None = None
    """In the backward: the forward matmul whose gradient this is, if one was found."""

    @property
    def lhs(self) -> fx.Node:
        """The operand [..., M, K]; the image of a 1x1 convolution."""
        return self.node.args[self.positions[0]]  # type: ignore[return-value]

    @property
    def rhs(self) -> fx.Node:
        """The operand [..., K, N]; the filter of a 1x1 convolution."""
        return self.node.args[self.positions[1]]  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class ParallelGroup:
    """A process group whose ranks hold parts of this graph's tensors: ``size`` ranks, ``stride`` apart."""

    name: str
    size: int
    stride: int


@dataclasses.dataclass
class Context:
    """One compile's state, made anew for each graph Dynamo hands over."""

    options: Options
    static_inputs: frozenset[int] = frozenset()
    """Positions of parameters and buffers among the Dynamo graph's inputs."""
    weights: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    """The parameters and buffers themselves, by position; for scores made at compile time."""
    parallel_groups: tuple[ParallelGroup, ...] = ()
    """The tensor-parallel groups of the graph's parameters."""
    sm: int | None = None
    """Compute capability of the GPU that kernels are written for, 100 for sm_100; None: the CPU."""
    matmuls: list[Matmul] = dataclasses.field(default_factory=list)
    """What `find_matmuls` found in the graph at hand."""
    decisions: dict[str, Decision] = dataclasses.field(default_factory=dict)
    """What `assign` decided, by site key; grows if the pipeline runs over several (sub)graphs."""

    ordinals: Counter[tuple[str, str, Role]] = dataclasses.field(default_factory=Counter)
    """How many sites of one module, kind and role were found so far."""

    def next_ordinal(self, module: str, op: str, role: Role) -> int:
        """A number that tells apart sites which nothing else does; counted over all (sub)graphs of a compile."""
        self.ordinals[module, op, role] += 1
        return self.ordinals[module, op, role] - 1

    streams: int = 0
    """How many streams of random bits are taken."""

    def next_stream(self) -> int:
        """A number that no other rounding of this compile has."""
        self.streams += 1
        return self.streams - 1

    @property
    def plan(self) -> Plan:
        """Every decision of this compile."""
        return Plan(tuple(self.decisions.values()))
