"""The best choice in one component for given weights of two metrics: project selection, solved as a minimum cut.

Choosing a unit earns its profit and obliges to pay for the shared things it needs. In the network the source
feeds every unit with its profit, a unit is tied to what it needs without limit, and that drains its cost into the
sink; what stays on the source's side of a minimum cut is the best choice (Picard, Management Science 22, 1976).
"""

from __future__ import annotations

from collections import deque

import networkx as nx

from fp4_compile.assignment.problem import Component

_SOURCE, _SINK = "source", "sink"


def best_choice(component: Component, weight_x: int, weight_y: int) -> frozenset[int]:
    """Indices of the units that minimize ``weight_x * x + weight_y * y``; of equal choices the smallest.

    Both weights are 0 or more, so that shared costs stay costs.
    """
    profits = {i: -(weight_x * u.x + weight_y * u.y) for i, u in enumerate(component.units)}
    costs = {key: weight_x * x + weight_y * y for key, (x, y) in component.costs.items()}
    earning = [i for i, profit in profits.items() if profit > 0]
    if all(len(component.units[i].needs) <= 1 for i in earning) and len(costs) <= 1:
        alone = [i for i in earning if not component.units[i].needs]
        together = [i for i in earning if component.units[i].needs]
        pays = sum(profits[i] for i in together) > sum(costs.values())
        return frozenset(alone + (together if pays else []))
    return _cut(component, {i: profits[i] for i in earning}, costs)


def _cut(component: Component, profits: dict[int, int], costs: dict[str, int]) -> frozenset[int]:
    network = nx.DiGraph()
    network.add_nodes_from([_SOURCE, _SINK])
    for i, profit in profits.items():
        network.add_edge(_SOURCE, i, capacity=profit)
        for key in component.units[i].needs:
            network.add_edge(i, ("shared", key))
    for key, cost in costs.items():
        network.add_edge(("shared", key), _SINK, capacity=cost)
    residual = nx.algorithms.flow.preflow_push(network, _SOURCE, _SINK)
    # The smallest source side: what the source still reaches. networkx's own cut gives the largest.
    reached: set[object] = {_SOURCE}
    waiting: deque[object] = deque([_SOURCE])
    while waiting:
        for node, edge in residual[waiting.popleft()].items():
            if node not in reached and edge["flow"] < edge["capacity"]:
                reached.add(node)
                waiting.append(node)
    return frozenset(i for i in profits if i in reached)
