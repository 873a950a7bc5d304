"""The default policy, one test a reason: found by structure, never by name."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4_compile
from fp4_compile import Precision, Reason
from fp4_compile.plan import Role


def decide(model, *inputs, grad=False, **options):
    """Reason of each forward site, by key."""
    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        plan = fp4_compile.explain(model, *inputs, options=options).plan
    for d in plan:
        assert (d.precision is Precision.NVFP4) == (d.reason is Reason.QUANTIZED)
    return {d.site.key: d.reason for d in plan if d.site.role is Role.FPROP}


def test_a_plain_mlp_runs_in_fp4():
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
    assert decide(model, torch.randn(5, 64)) == {"0:mm.fprop": Reason.QUANTIZED, "2:mm.fprop": Reason.QUANTIZED}


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_products_are_found_through_scales_masks_and_casts(scale, masked):
    def attention(q, k, v):
        scores = (q @ k.transpose(-1, -2)) * scale
        if masked:
            scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), float("-inf"))
        return F.dropout(scores.float().softmax(-1), 0.1, training=False).to(q.dtype) @ v

    for shape in ((2, 4, 8, 64), (8, 64)):  # heads, and a single one whose products are plain mm
        reasons = decide(attention, *(torch.randn(shape, dtype=torch.bfloat16) for _ in range(3)))
        assert list(reasons.values()) == [Reason.ATTENTION, Reason.ATTENTION]


def test_a_batched_product_of_two_activations_stays():
    reasons = decide(lambda q, k: torch.bmm(q, k), torch.randn(2, 64, 64), torch.randn(2, 64, 64))
    assert list(reasons.values()) == [Reason.TWO_ACTIVATIONS]


def test_stacked_experts_are_weights():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 64, 96))

        def forward(self, x):
            return torch.bmm(x, self.w)

    assert decide(Experts(), torch.randn(4, 8, 64)) == {"top:bmm.fprop": Reason.QUANTIZED}


def test_a_router_stays_whatever_its_width():
    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.anything, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x):
            weights, experts = self.anything(x).softmax(-1).topk(2)
            return self.down(x) * weights.sum(-1, keepdim=True), experts

    reasons = decide(Router(), torch.randn(8, 64))
    assert reasons == {"anything:mm.fprop": Reason.ROUTER, "down:mm.fprop": Reason.QUANTIZED}


class Tied(nn.Module):
    """A language model's ends: the same table embeds and scores."""

    def __init__(self, tied=True, vocabulary=512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 64)
        self.body = nn.Linear(64, 64)
        self.out = nn.Linear(64, vocabulary, bias=False)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids):
        return self.out(torch.tanh(self.body(self.embed(ids))))


def test_a_projection_tied_to_an_embedding_stays():
    reasons = decide(Tied(), torch.arange(7))
    assert reasons == {"body:mm.fprop": Reason.QUANTIZED, "out:mm.fprop": Reason.VOCABULARY}


def test_an_untied_vocabulary_is_known_by_its_width():
    assert decide(Tied(False, 8192), torch.arange(7))["out:mm.fprop"] is Reason.VOCABULARY
    assert decide(Tied(False, 512), torch.arange(7))["out:mm.fprop"] is Reason.QUANTIZED


def test_a_wide_layer_inside_a_model_is_no_vocabulary():
    model = nn.Sequential(nn.Linear(64, 8192), nn.GELU(), nn.Linear(8192, 64))
    assert set(decide(model, torch.randn(3, 64)).values()) == {Reason.QUANTIZED}


@pytest.mark.parametrize(
    "end",
    [
        lambda y, t: F.cross_entropy(y, t),
        lambda y, t: y.softmax(-1),
        lambda y, t: y.argmax(-1),
        lambda y, t: F.log_softmax(y.float(), -1),
    ],
    ids=["cross_entropy", "softmax", "argmax", "log_softmax"],
)
def test_scores_are_known_by_what_follows(end):
    model = nn.Linear(64, 100)
    reasons = decide(lambda x, t: end(model(x), t), torch.randn(6, 64), torch.arange(6))
    assert list(reasons.values()) == [Reason.VOCABULARY]


def test_scores_are_known_in_training_too():
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 100))
    reasons = decide(
        lambda x, t: F.cross_entropy(model(x), t), torch.randn(6, 64, requires_grad=True), torch.arange(6), grad=True
    )
    assert list(reasons.values()) == [Reason.QUANTIZED, Reason.VOCABULARY]


@pytest.mark.parametrize(
    ("k", "n", "reason"),
    [
        (64, 31, Reason.FEW_OUTPUTS),
        (64, 1, Reason.FEW_OUTPUTS),
        (64, 32, Reason.QUANTIZED),
        (64, 33, Reason.QUANTIZED),
        (16, 64, Reason.SHORT_CONTRACTION),
        (5, 64, Reason.SHORT_CONTRACTION),
        (33, 64, Reason.PADDING),
        (40, 64, Reason.PADDING),
        (100, 64, Reason.QUANTIZED),
        (127, 64, Reason.QUANTIZED),
    ],
)
def test_sizes(k, n, reason):
    assert list(decide(nn.Linear(k, n), torch.randn(3, k)).values()) == [reason]


def test_a_dynamic_contraction_stays():
    x, w = torch.randn(8, 64), torch.randn(64, 96)
    torch._dynamo.mark_dynamic(x, 1)
    torch._dynamo.mark_dynamic(w, 0)
    assert list(decide(torch.mm, x, w).values()) == [Reason.DYNAMIC_CONTRACTION]


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.int64])
def test_other_dtypes_stay(dtype):
    x = torch.ones(8, 64).to(dtype)
    assert set(decide(torch.mm, x, x.t().contiguous()).values()) <= {Reason.DTYPE}


def test_backward_products_are_named_after_their_layer_and_follow_it():
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))
    plan = fp4_compile.explain(model, torch.randn(32, 64, requires_grad=True)).plan
    assert {d.site.key for d in plan} == {f"{i}:mm.{r}" for i in (0, 2) for r in ("fprop", "dgrad", "wgrad")}
    assert plan["0:mm.dgrad"].site.shape == "32x64x96"
    assert {plan["2:mm.wgrad"].site.m, plan["2:mm.wgrad"].site.n} == {64, 96}
    assert all(d.reason is Reason.QUANTIZED for d in plan)
    plan = fp4_compile.explain(model, torch.randn(32, 64, requires_grad=True), options={"pins": {"0": "bf16"}}).plan
    assert {d.site.module for d in plan if d.reason is Reason.PINNED} == {"0"}
    assert {d.site.module for d in plan.select(fp4_compile.Precision.NVFP4)} == {"2"}


def test_a_one_by_one_convolution_is_a_linear_layer_and_others_are_not_listed():
    model = nn.Sequential(nn.Conv2d(32, 64, 1), nn.Conv2d(64, 64, 3, padding=1), nn.Conv1d(64, 64, 1, stride=2))
    x = torch.randn(2, 32, 6, 6)
    reasons = decide(lambda x: model[2](model[1](model[0](x)).flatten(2)), x)
    assert list(reasons.values()) == [Reason.QUANTIZED]


def test_keys_stay_the_same_across_shapes_modes_and_recompiles():
    model = Tied()
    with torch.no_grad():
        keys = [{d.site.key for d in fp4_compile.explain(model, torch.arange(n)).plan} for n in (3, 7, 50)]
    training = {d.site.key for d in fp4_compile.explain(model, torch.arange(5)).plan if d.site.role is Role.FPROP}
    assert keys[0] == keys[1] == keys[2] == training
