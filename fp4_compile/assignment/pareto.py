"""The Pareto front of two metrics: the lower convex hull of all choices, by parametric minimum cuts.

A component's hull is found from its two ends inwards: the line through two known points gives the weights for the
next cut, which finds a point below the line or shows that there is none (Eisner and Severance, J. ACM 23, 1976).
Components do not touch, so the whole hull is their segments, sorted by slope.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from fractions import Fraction

from fp4_compile.assignment.min_cut import best_choice
from fp4_compile.assignment.problem import Component, Exact, Problem, exact


@dataclasses.dataclass(frozen=True)
class Corner:
    """A choice in one component and its exact (x, y)."""

    chosen: frozenset[int]
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Segment:
    """From one corner of a component's hull to the next: x falls, y rises."""

    component: int
    corner: int
    """Which corner it leads to."""
    dx: int
    dy: int


@dataclasses.dataclass(frozen=True)
class Hull:
    """Every component's corners, from least y to least x, and all segments, the cheapest first."""

    problem: Exact
    corners: tuple[tuple[Corner, ...], ...]
    segments: tuple[Segment, ...]

    @property
    def start(self) -> tuple[int, int]:
        """(x, y) with every component at its least y."""
        x, y = self.problem.base
        return x + sum(c[0].x for c in self.corners), y + sum(c[0].y for c in self.corners)

    def chosen(self, steps: int) -> frozenset[str]:
        """Keys chosen after so many segments."""
        return self.keys(corners[i].chosen for corners, i in zip(self.corners, self.positions(steps), strict=True))

    def positions(self, steps: int) -> list[int]:
        """Which corner each component is at after so many segments."""
        at = [0] * len(self.corners)
        for segment in self.segments[:steps]:
            at[segment.component] = segment.corner
        return at

    def keys(self, chosen: Iterable[frozenset[int]]) -> frozenset[str]:
        """Keys of a choice of units in every component, pinned ones included."""
        found = set(self.problem.fixed)
        for component, units in zip(self.problem.components, chosen, strict=True):
            found.update(key for i in units for key in component.units[i].keys)
        return frozenset(found)


@dataclasses.dataclass(frozen=True)
class Step:
    """A point of the front. ``totals`` has the two metrics; ``chosen`` is put together when asked for."""

    totals: dict[str, float]
    count: int
    """Items chosen."""
    _hull: Hull = dataclasses.field(repr=False, compare=False)
    _steps: int = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def chosen(self) -> frozenset[str]:
        """Keys of the items chosen."""
        return self._hull.chosen(self._steps)


def front(problem: Problem, x: str, y: str) -> list[Step]:
    """The choices that are best for some trade-off of two metrics, from least y to least x.

    Raises:
        ValueError: pins that contradict each other.
    """
    hull = find_hull(exact(problem, x, y))
    at_x, at_y = hull.start
    sizes = [
        [sum(len(component.units[i].keys) for i in corner.chosen) for corner in corners]
        for component, corners in zip(hull.problem.components, hull.corners, strict=True)
    ]
    count = len(hull.problem.fixed) + sum(size[0] for size in sizes)
    unit_x, unit_y = hull.problem.units
    points = [Step({x: float(at_x * unit_x), y: float(at_y * unit_y)}, count, hull, 0)]
    for steps, segment in enumerate(hull.segments, 1):
        at_x, at_y = at_x + segment.dx, at_y + segment.dy
        count += sizes[segment.component][segment.corner] - sizes[segment.component][segment.corner - 1]
        points.append(Step({x: float(at_x * unit_x), y: float(at_y * unit_y)}, count, hull, steps))
    return points


def find_hull(problem: Exact) -> Hull:
    """The hull of every component, and their segments by slope; of equal slopes in the order of components."""
    corners = tuple(_corners(component) for component in problem.components)
    segments = [
        Segment(i, j, after.x - before.x, after.y - before.y)
        for i, found in enumerate(corners)
        for j, (before, after) in enumerate(itertools.pairwise(found), 1)
    ]
    segments.sort(key=lambda s: (Fraction(s.dy, -s.dx), s.component, s.corner))
    return Hull(problem, corners, tuple(segments))


def _corners(component: Component) -> tuple[Corner, ...]:
    least_y, least_x = _solve(component, 0, 1), _solve(component, 1, 0)
    found = {(c.x, c.y): c for c in (least_y, least_x)}
    pending = [(least_y, least_x)]
    while pending:
        left, right = pending.pop()
        weight_x, weight_y = right.y - left.y, left.x - right.x
        if weight_x <= 0 or weight_y <= 0:
            # Ends that tie in one metric: one more cut, with both, finds what dominates.
            weight_x, weight_y = max(weight_x, 1), max(weight_y, 1)
        corner = _solve(component, weight_x, weight_y)
        value = weight_x * corner.x + weight_y * corner.y
        if value < min(weight_x * c.x + weight_y * c.y for c in (left, right)) and (corner.x, corner.y) not in found:
            found[corner.x, corner.y] = corner
            pending += [(left, corner), (corner, right)]
    return lower_hull(list(found.values()))


def _solve(component: Component, weight_x: int, weight_y: int) -> Corner:
    chosen = best_choice(component, weight_x, weight_y)
    return Corner(chosen, *component.totals(chosen))


def lower_hull(corners: Sequence[Corner]) -> tuple[Corner, ...]:
    """The corners of the lower left convex hull, from least y to least x."""
    kept: list[Corner] = []
    for corner in sorted(corners, key=lambda c: (c.y, c.x, len(c.chosen), sorted(c.chosen))):
        if kept and corner.x >= kept[-1].x:
            continue
        while len(kept) > 1 and _above(kept[-2], kept[-1], corner):
            kept.pop()
        kept.append(corner)
    return tuple(kept)


def _above(left: Corner, middle: Corner, right: Corner) -> bool:
    """Whether the middle corner lies on or above the line through the others."""
    return (middle.y - left.y) * (left.x - right.x) >= (right.y - left.y) * (left.x - middle.x)
