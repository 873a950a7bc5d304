"""The best choice under a budget, exactly: the hull gives a bound and a start, dynamic programming closes the gap.

At the segment of the hull that crosses the budget, its slope is the budget's price. Charged with it, every choice
in a component has a reduced cost, 0 at the component's best; a whole solution whose reduced costs add up to more
than the gap between start and bound cannot be better. Few choices are left, and are searched.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from fractions import Fraction

from fp4_compile.assignment.min_cut import best_choice
from fp4_compile.assignment.pareto import Corner, Hull, find_hull
from fp4_compile.assignment.problem import Component, Problem, exact
from fp4_compile.errors import BudgetError

MOST_UNITS = 12
"""Units of a component up to which all its choices are looked at; beyond, the corners of its hull."""
MOST_OPEN = 60
"""Components that are searched at a time; with more, those whose second choice is nearest to the first."""
ROUNDING_BITS = 40
"""Bits of a limit that count, relative to the sum of all changes."""
MOST_STATES = 5_000
"""Partial solutions that are kept at a time; if there are more, the result may not be the optimum, and says so."""

_State = tuple[int, int, int, tuple[int, ...]]
"""x, y, reduced cost, and which option each component searched so far has."""


@dataclasses.dataclass(frozen=True)
class Solution:
    """A choice, what it does to every metric, and how good it can be at best."""

    chosen: frozenset[str]
    totals: Mapping[str, float]
    bound: float
    """No choice that meets the budget has less of the metric that was minimized."""
    gap: float
    """How far above the bound the choice is, relative; 0 if it is proven to be an optimum."""
    proven: bool


def unconstrained(problem: Problem, weights: Mapping[str, float]) -> Solution:
    """The choice that minimizes a weighted sum of metrics, weights 0 or more: one minimum cut.

    Raises:
        ValueError: pins that contradict each other.
    """

    def weighed(change: Mapping[str, float]) -> dict[str, float]:
        return {"sum": math.fsum(weight * change.get(metric, 0.0) for metric, weight in weights.items())}

    combined = Problem(
        tuple(dataclasses.replace(item, change=weighed(item.change)) for item in problem.items),
        tuple(dataclasses.replace(shared, change=weighed(shared.change)) for shared in problem.shared),
        problem.groups,
        problem.pinned,
    )
    reduced = exact(combined, "sum", "sum")
    chosen = set(reduced.fixed)
    for component in reduced.components:
        for i in best_choice(component, 1, 0):
            chosen.update(component.units[i].keys)
    totals = total_changes(problem, frozenset(chosen))
    return Solution(frozenset(chosen), totals, math.fsum(w * totals.get(m, 0.0) for m, w in weights.items()), 0.0, True)


def solve(problem: Problem, minimize: str, subject_to: str, at_most: float) -> Solution:
    """The choice with the least of one metric whose change of another is at most a limit.

    Raises:
        BudgetError: no choice comes so low; ``closest`` is the least there is.
        ValueError: pins that contradict each other.
    """
    hull = find_hull(exact(problem, subject_to, minimize))
    unit_x, unit_y = hull.problem.units
    # A limit that was added up in floating point is met by what it was added up from.
    size = sum(abs(unit.x) for component in hull.problem.components for unit in component.units)
    limit = math.floor(Fraction(at_most) / unit_x) + (size + abs(hull.problem.base[0]) >> ROUNDING_BITS)
    x, y = hull.start
    steps = 0
    while x > limit and steps < len(hull.segments):
        x, y = x + hull.segments[steps].dx, y + hull.segments[steps].dy
        steps += 1
    if x > limit:
        closest = float(x * unit_x)
        raise BudgetError(f"{subject_to} cannot be as low as {at_most:g}; the closest is {closest:g}", closest)
    if steps == 0:
        return _solution(problem, hull.chosen(0), minimize, y, Fraction(y), unit_y, True)
    last = hull.segments[steps - 1]
    price = Fraction(last.dy, -last.dx)
    bound = y - price * (limit - x)
    chosen, best, proven = _close_gap(hull, steps, limit, price, bound, (x, y))
    return _solution(problem, chosen, minimize, best, bound, unit_y, proven)


def _close_gap(
    hull: Hull, steps: int, limit: int, price: Fraction, bound: Fraction, start: tuple[int, int]
) -> tuple[frozenset[str], int, bool]:
    """The best choice, its y, and whether that is proven."""
    options = [_options(c, corners, price) for c, corners in zip(hull.problem.components, hull.corners, strict=True)]
    at = hull.positions(steps)
    picked = [corners[i] for corners, i in zip(hull.corners, at, strict=True)]
    best = _improve(picked, options, limit - start[0], start[1])
    gap = math.floor((best - bound) * price.denominator)
    found = [[option for option in each if option[0] <= gap] or each[:1] for each in options]
    several = sorted((i for i, each in enumerate(found) if len(each) > 1), key=lambda i: (found[i][1][0], i))
    proven = len(several) <= MOST_OPEN
    searched = sorted(several[:MOST_OPEN])
    for i in several[MOST_OPEN:]:
        found[i] = found[i][:1]
    settled = [each[0][1] for i, each in enumerate(found) if i not in set(searched)]
    # The least x that the components still to come can add: a state beyond that can never meet the limit.
    rest = [0, *itertools.accumulate(min(o[1].x for o in found[i]) for i in reversed(searched))][::-1]
    states: list[_State] = [
        (hull.problem.base[0] + sum(c.x for c in settled), hull.problem.base[1] + sum(c.y for c in settled), 0, ())
    ]
    for position, i in enumerate(searched):
        states = _nondominated(
            [
                (x + corner.x, y + corner.y, reduced + cost, (*picks, j))
                for x, y, reduced, picks in states
                for j, (cost, corner) in enumerate(found[i])
                if reduced + cost <= gap and x + corner.x + rest[position + 1] <= limit
            ]
        )
        if len(states) > MOST_STATES:
            states, proven = sorted(states, key=lambda s: (s[2], s[0]))[:MOST_STATES], False
    done = min((s for s in states if s[0] <= limit), key=lambda s: (s[1], s[0]), default=None)
    if done is None or done[1] >= best:
        return hull.keys(corner.chosen for corner in picked), best, proven
    picks = dict(zip(searched, done[3], strict=True))
    return hull.keys(each[picks.get(i, 0)][1].chosen for i, each in enumerate(found)), done[1], proven


def _improve(picked: list[Corner], options: list[list[tuple[int, Corner]]], slack: int, y: int) -> int:
    """Use up what is left of the budget, one component at a time, the largest gain first; returns the new y."""
    while True:
        moves = (
            (corner.y - here.y, corner.x - here.x, i, corner)
            for i, (here, each) in enumerate(zip(picked, options, strict=True))
            for _, corner in each
            if corner.y < here.y and corner.x - here.x <= slack
        )
        best = min(moves, key=lambda move: move[:3], default=None)
        if best is None:
            return y
        dy, dx, i, picked[i] = best
        slack, y = slack - dx, y + dy


def _options(component: Component, corners: tuple[Corner, ...], price: Fraction) -> list[tuple[int, Corner]]:
    """A component's choices with their reduced costs (in units of the price's denominator), the best first."""
    choices = list(corners)
    count = len(component.units)
    if count <= MOST_UNITS:
        subsets = (s for size in range(count + 1) for s in itertools.combinations(range(count), size))
        choices += [Corner(frozenset(s), *component.totals(s)) for s in subsets]
    unique: dict[tuple[int, int], Corner] = {}
    for corner in choices:
        unique.setdefault((corner.x, corner.y), corner)
    charged = [(corner.y * price.denominator + price.numerator * corner.x, corner) for corner in unique.values()]
    least = min(value for value, _ in charged)
    return sorted(((value - least, c) for value, c in charged), key=lambda o: (o[0], len(o[1].chosen), o[1].y))


def _nondominated(states: list[_State]) -> list[_State]:
    kept: list[_State] = []
    for state in sorted(states, key=lambda s: (s[0], s[1])):
        if not kept or state[1] < kept[-1][1]:
            kept.append(state)
    return kept


def _solution(
    problem: Problem, chosen: frozenset[str], minimized: str, value: int, bound: Fraction, unit: Fraction, proven: bool
) -> Solution:
    # Integers: a bound that is no integer is the next one up.
    least = Fraction(value) if proven else Fraction(math.ceil(bound))
    gap = 0.0 if value == least else float((value - least) / max(abs(Fraction(value)), abs(least)))
    return Solution(chosen, total_changes(problem, chosen), float(least * unit), gap, proven or gap == 0.0)


def total_changes(problem: Problem, chosen: frozenset[str]) -> dict[str, float]:
    """What a choice changes in every metric, shared costs included."""
    items = [item for item in problem.items if item.key in chosen]
    needed = frozenset().union(*(item.needs for item in items))
    changes = [item.change for item in items] + [s.change for s in problem.shared if s.key in needed]
    return {metric: math.fsum(change.get(metric, 0.0) for change in changes) for metric in problem.metrics}
