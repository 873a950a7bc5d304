"""The solver against brute force, at every magnitude, and what it refuses."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator

import pytest

from fp4_compile.assignment import Item, Problem, Shared, front, solve, unconstrained
from fp4_compile.assignment.budgeted import MOST_UNITS
from fp4_compile.errors import BudgetError

SEEDS = range(150)


def random_problem(rng: random.Random, most: int = 12) -> Problem:
    """Up to ``most`` items with sharing, groups and pins; changes of few values, so that ties are common."""
    count, shared = rng.randint(1, most), rng.randint(0, 4)

    def loss() -> float:
        return rng.choice([0.0, 0.25, 0.5, 1.0, rng.uniform(-0.2, 2), 10 ** rng.uniform(-6, 0)])

    def seconds() -> float:
        return -rng.choice([0.0, 0.5, 1.0, rng.uniform(-0.5, 2), 10 ** rng.uniform(-6, 0)])

    items = tuple(
        Item(
            f"i{i}",
            {"loss": loss(), "seconds": seconds()},
            frozenset(rng.sample([f"q{j}" for j in range(shared)], rng.randint(0, min(2, shared)))),
        )
        for i in range(count)
    )
    costs = tuple(Shared(f"q{j}", {"seconds": rng.choice([0.0, 0.5, rng.uniform(0, 2)])}) for j in range(shared))
    keys = [item.key for item in items]
    groups = tuple(frozenset(rng.sample(keys, min(count, rng.randint(2, 3)))) for _ in range(rng.randint(0, 2)))
    free = [key for key in keys if not any(key in group for group in groups)]
    return Problem(items, costs, groups, {key: rng.random() < 0.5 for key in free if rng.random() < 0.2})


def choices(problem: Problem) -> Iterator[tuple[frozenset[str], float, float]]:
    """Every choice that keeps the groups and pins, with its loss and seconds."""
    keys = [item.key for item in problem.items]
    for taken in itertools.product((False, True), repeat=len(keys)):
        chosen = frozenset(itertools.compress(keys, taken))
        if any(0 < len(group & chosen) < len(group) for group in problem.groups):
            continue
        if any((key in chosen) is not pin for key, pin in problem.pinned.items()):
            continue
        yield chosen, *(total(problem, chosen, metric) for metric in ("loss", "seconds"))


def total(problem: Problem, chosen: frozenset[str], metric: str) -> float:
    items = [item for item in problem.items if item.key in chosen]
    needed = {key for item in items for key in item.needs}
    costs = [shared for shared in problem.shared if shared.key in needed]
    return math.fsum(each.change.get(metric, 0.0) for each in (*items, *costs))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_budget_is_met_as_well_as_brute_force_meets_it(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    everything = list(choices(problem))
    least = min(seconds for _, _, seconds in everything)
    limit = rng.choice([least, 0.0, rng.uniform(least, 0.1), rng.uniform(least, 0.1)])
    if limit < least:
        limit = least
    best = min(loss for _, loss, seconds in everything if seconds <= limit + 1e-12)
    found = solve(problem, minimize="loss", subject_to="seconds", at_most=limit)
    assert found.proven
    assert found.gap == 0
    assert found.chosen in {chosen for chosen, _, _ in everything}
    assert found.totals.get("loss", 0.0) == pytest.approx(best, abs=1e-12)
    assert found.totals.get("seconds", 0.0) <= limit + 1e-10
    assert found.bound == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cut_is_the_best_of_all_choices(seed: int) -> None:
    rng = random.Random(seed)
    problem = random_problem(rng)
    weights = {"loss": rng.choice([0.0, 1.0, 10 ** rng.uniform(-3, 3)]), "seconds": rng.choice([1.0, rng.random()])}
    found = unconstrained(problem, weights)
    best = min(weights["loss"] * loss + weights["seconds"] * seconds for _, loss, seconds in choices(problem))
    assert weights["loss"] * found.totals.get("loss", 0.0) + weights["seconds"] * found.totals.get(
        "seconds", 0.0
    ) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_front_is_the_hull_of_all_choices(seed: int) -> None:
    problem = random_problem(random.Random(seed), most=9)
    everything = {(seconds, loss) for _, loss, seconds in choices(problem)}
    points = front(problem, "seconds", "loss")
    for point in points:
        totals = (point.totals["seconds"], point.totals["loss"])
        assert totals == pytest.approx((total(problem, point.chosen, "seconds"), total(problem, point.chosen, "loss")))
        assert point.count == len(point.chosen)
    # For every trade-off some point of the front is as good as the best choice.
    for price in (0.0, 1e-3, 0.1, 0.5, 1.0, 3.0, 1e3):
        best = min(loss + price * seconds for seconds, loss in everything)
        assert min(p.totals["loss"] + price * p.totals["seconds"] for p in points) == pytest.approx(best, abs=1e-9)
    assert points[0].totals["loss"] == pytest.approx(min(loss for _, loss in everything), abs=1e-12)
    assert points[-1].totals["seconds"] == pytest.approx(min(seconds for seconds, _ in everything), abs=1e-12)


def scaled(problem: Problem, metric: str, factor: float) -> Problem:
    def change(each: Item | Shared) -> dict[str, float]:
        return {name: value * (factor if name == metric else 1.0) for name, value in each.change.items()}

    items = tuple(dataclasses.replace(item, change=change(item)) for item in problem.items)
    return dataclasses.replace(
        problem, items=items, shared=tuple(dataclasses.replace(s, change=change(s)) for s in problem.shared)
    )


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**-10, 1e-3, 1e-9, 1e12])
def test_the_scale_of_the_loss_does_not_matter(factor: float) -> None:
    """An integer program on raw scores gave up to 9 times the optimum where they were small."""
    for seed in range(20):
        rng = random.Random(seed)
        items = tuple(
            Item(f"i{i}", {"loss": 10 ** rng.uniform(-2, 0), "bits": -11.5 * rng.choice([65536, 131072, 196608])})
            for i in range(9)
        )
        problem = Problem(items)
        limit = 0.5 * sum(item.change["bits"] for item in items)
        want = solve(problem, minimize="loss", subject_to="bits", at_most=limit)
        assert want.proven
        assert solve(scaled(problem, "loss", factor), "loss", "bits", limit).chosen == want.chosen


def test_the_order_of_the_items_does_not_matter() -> None:
    for seed in range(30):
        rng = random.Random(seed)
        problem = random_problem(rng)
        mixed = dataclasses.replace(problem, items=tuple(rng.sample(problem.items, len(problem.items))))
        least = min(seconds for _, _, seconds in choices(problem))
        assert solve(problem, "loss", "seconds", least / 2 if least < 0 else least).chosen == (
            solve(mixed, "loss", "seconds", least / 2 if least < 0 else least).chosen
        )


def test_of_equal_choices_the_smaller_is_taken() -> None:
    problem = Problem((Item("a", {"loss": 0.0, "seconds": 0.0}), Item("b", {"loss": 1.0, "seconds": -1.0})))
    assert unconstrained(problem, {"loss": 1.0, "seconds": 1.0}).chosen == frozenset()
    assert unconstrained(problem, {"loss": 0.5, "seconds": 1.0}).chosen == {"b"}


def test_a_shared_cost_is_paid_once_and_only_if_it_pays() -> None:
    items = tuple(Item(key, {"seconds": -1.0}, frozenset({"q"})) for key in "abc")
    assert unconstrained(Problem(items, (Shared("q", {"seconds": 2.5}),)), {"seconds": 1.0}).chosen == set("abc")
    assert unconstrained(Problem(items, (Shared("q", {"seconds": 3.0}),)), {"seconds": 1.0}).chosen == frozenset()
    pinned = Problem(items, (Shared("q", {"seconds": 9.0}),), pinned={"a": True, "c": False})
    found = unconstrained(pinned, {"seconds": 1.0})
    assert found.chosen == {"a", "b"}
    assert found.totals == {"seconds": 7.0}


def test_a_budget_that_cannot_be_met_says_what_can() -> None:
    problem = Problem((Item("a", {"loss": 1.0, "seconds": -1.0}),), pinned={"a": False})
    with pytest.raises(BudgetError, match="the closest is 0") as caught:
        solve(problem, "loss", "seconds", -0.5)
    assert caught.value.closest == 0.0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Problem((Item("a", {"loss": math.nan}),)), "a: the change of loss is nan"),
        (lambda: Problem((Item("a", {"loss": math.inf}),)), "a: the change of loss is inf"),
        (lambda: Problem((), (Shared("q", {"seconds": -1.0}),)), "q: a shared cost is negative"),
        (lambda: Problem((Item("a", {}), Item("a", {}))), "same key"),
        (lambda: Problem((Item("a", {}, frozenset("q")),)), "unknown keys"),
        (lambda: Problem((Item("a", {}),), groups=(frozenset("ab"),)), "unknown keys"),
    ],
)
def test_what_is_no_problem_is_refused(make, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


def test_pins_that_contradict_each_other() -> None:
    problem = Problem((Item("a", {}), Item("b", {})), groups=(frozenset("ab"),), pinned={"a": True, "b": False})
    with pytest.raises(ValueError, match="must agree, and are pinned to differ"):
        unconstrained(problem, {"loss": 1.0})


def test_an_empty_problem() -> None:
    assert unconstrained(Problem(()), {"loss": 1.0}).chosen == frozenset()
    assert [point.count for point in front(Problem(()), "seconds", "loss")] == [0]
    assert solve(Problem(()), "loss", "seconds", 0.0).chosen == frozenset()


def test_ten_thousand_sites_are_within_a_hair_of_the_bound() -> None:
    rng = random.Random(0)
    costs = tuple(Shared(f"q{i}", {"seconds": rng.uniform(0, 0.5)}) for i in range(4_000))
    items = tuple(
        Item(f"i{i:05}", {"loss": 10 ** rng.uniform(-6, -2), "seconds": -rng.random()}, frozenset({f"q{i % 4_000}"}))
        for i in range(10_000)
    )
    problem = Problem(items, costs)
    points = front(problem, "seconds", "loss")
    assert [p.totals["seconds"] for p in points] == sorted((p.totals["seconds"] for p in points), reverse=True)
    limit = 0.5 * points[-1].totals["seconds"]
    found = solve(problem, "loss", "seconds", limit)
    assert found.totals["seconds"] <= limit
    assert 0 <= found.gap < 1e-4
    assert (found.totals["loss"] - found.bound) / found.totals["loss"] == pytest.approx(found.gap, abs=1e-9)


def test_a_large_component_is_solved_by_its_corners() -> None:
    """More items on one quantizer than are enumerated."""
    rng = random.Random(1)
    count = MOST_UNITS + 30
    items = tuple(
        Item(f"i{i:02}", {"loss": rng.random(), "seconds": -rng.random()}, frozenset("q")) for i in range(count)
    )
    found = solve(Problem(items, (Shared("q", {"seconds": 1.0}),)), "loss", "seconds", -5.0)
    assert found.totals["seconds"] <= -5.0
    assert found.gap < 0.1
