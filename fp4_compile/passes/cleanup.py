"""Remove what the rewrite left without a reader, and leave the graph in order.

before  %2 = permute(%w, [1, 0])     (read by nothing: the quantizer reads %w)
after   gone

Only views and the fp4 operations are removed: they have no effect, whereas a graph that still mutates its
inputs may hold other nodes whose results nobody reads on purpose.
"""

from __future__ import annotations

import operator

from torch import fx

from fp4_compile import ops
from fp4_compile.passes.context import Context
from fp4_compile.passes.graph import is_view

_OURS = (ops.amax, ops.quantize, ops.quantize_rows, ops.mx_quantize, ops.scaled_mm, operator.getitem)


def cleanup(graph: fx.Graph, context: Context) -> None:
    """Erase unread views and fp4 operations, and check the graph is well formed."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users and (is_view(node) or node.target in _OURS):
            graph.erase_node(node)
    graph.lint()
