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

    @property
    def lhs(self) -> fx.Node:
        """The operand [..., M, K]; the image of a 1x1 convolution."""
        return self.node.args[self.positions[0]]  # type: ignore[return-value]

    @property
    def rhs(self) -> fx.Node:
        """The operand [..., K, N]; the filter of a 1x1 convolution."""
        return self.node.args[self.positions[1]]  # type: ignore[return-value]


@dataclasses.dataclass
class Context:
    """One compile's state, made anew for each graph Dynamo hands over."""

    options: Options
    static_inputs: frozenset[int] = frozenset()
    """Positions of parameters and buffers among the Dynamo graph's inputs."""
    weights: Mapping[int, Tensor] = dataclasses.field(default_factory=dict)
    """The parameters and buffers themselves, by position; for scores made at compile time."""
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

    @property
    def plan(self) -> Plan:
        """Every decision of this compile."""
        return Plan(tuple(self.decisions.values()))
