"""Routing, section 5 of the contract: against loops over plain numbers, and bit for bit in any
batch."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from moe import MoEConfig
from moe.router import route, router_logits, scores

F32 = np.float32
SCORINGS = ("softmax", "sigmoid", "sqrtsoftplus")


def config(experts: int, top_k: int, **options) -> MoEConfig:
    return MoEConfig(32, 32, experts, top_k, **options)


def logits_of(tokens: int, experts: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=gen) * scale


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


# ---- the loop that `route` must agree with -------------------------------------------------------


def choose_by_hand(biased: list[float], cfg: MoEConfig) -> list[int]:
    """Best experts of one token, ties to the lower id; plain Python."""
    size = cfg.num_experts // cfg.num_groups
    allowed = set(range(cfg.num_experts))
    if cfg.num_groups > 1:
        value = []
        for g in range(cfg.num_groups):
            best = sorted(biased[g * size : (g + 1) * size], reverse=True)[:2]
            value.append(float(np.sum(np.array(best, F32), dtype=F32)))
        best_groups = sorted(range(cfg.num_groups), key=lambda g: (-value[g], g))[: cfg.top_groups]
        allowed = {e for g in best_groups for e in range(g * size, (g + 1) * size)}
    return sorted(allowed, key=lambda e: (-biased[e], e))[: cfg.top_k]


def route_by_hand(s: np.ndarray, cfg: MoEConfig, bias: np.ndarray | None = None) -> tuple:
    """fp32 scores (T, E) -> ids (T, K), weights (T, K)."""
    ids, weights = [], []
    for row in s:
        biased = row if bias is None else row + bias  # fp32
        chosen = choose_by_hand([float(v) for v in biased], cfg)
        picked = [F32(row[e]) for e in chosen]
        if cfg.renormalize:
            total = picked[0]
            for w in picked[1:]:
                total = F32(total + w)
            picked = [F32(0) if total == 0 else F32(w / total) for w in picked]
        ids.append(chosen)
        weights.append(picked)
    return np.array(ids, np.int32), np.array(weights, F32)


CONFIGS = [
    config(e, k, scoring=s, renormalize=r)
    for e, k in ((1, 1), (8, 2), (60, 4), (128, 8))
    for s in SCORINGS
    for r in (True, False)
] + [
    config(32, 4, scoring="sigmoid", num_groups=8, top_groups=4),
    config(32, 6, scoring="softmax", num_groups=4, top_groups=2, renormalize=False),
    config(16, 8, scoring="sqrtsoftplus", num_groups=8, top_groups=4),
    config(8, 3, scoring="sigmoid", num_groups=8, top_groups=5),  # groups of one expert
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("cfg", CONFIGS, ids=lambda c: f"{c.scoring}-{c.num_experts}-{c.top_k}")
def test_route_equals_a_plain_loop(cfg: MoEConfig, biased: bool) -> None:
    logits = logits_of(40, cfg.num_experts)
    bias = logits_of(1, cfg.num_experts, seed=1, scale=0.3)[0] if biased else None
    ids, weights = route(logits, cfg, selection_bias=bias)
    s = scores(logits, cfg.scoring).numpy()
    want_ids, want = route_by_hand(s, cfg, None if bias is None else bias.numpy())
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    np.testing.assert_array_equal(ids.numpy(), want_ids)
    np.testing.assert_array_equal(weights.numpy(), want)


@pytest.mark.parametrize("cfg", [c for c in CONFIGS if c.num_experts >= 8])
def test_ties_go_to_the_lower_id(cfg: MoEConfig) -> None:
    """Only three different logits: nearly every choice is a tie."""
    gen = torch.Generator().manual_seed(3)
    logits = torch.randint(0, 3, (50, cfg.num_experts), generator=gen).float()
    ids, weights = route(logits, cfg)
    want_ids, want = route_by_hand(scores(logits, cfg.scoring).numpy(), cfg)
    np.testing.assert_array_equal(ids.numpy(), want_ids)
    np.testing.assert_array_equal(weights.numpy(), want)


def test_all_equal_logits_choose_the_first_experts() -> None:
    ids, weights = route(torch.zeros(2, 96), config(96, 5))
    assert ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert weights.tolist() == [[float(F32(1) / F32(5))] * 5] * 2


def test_dropped_groups_lose_even_with_negative_scores_and_biases() -> None:
    """Group 1 is dropped though its members beat those of the kept group one by one."""
    cfg = config(4, 2, scoring="sigmoid", num_groups=2, top_groups=1, renormalize=False)
    logits = torch.zeros(1, 4)
    bias = torch.tensor([-9.0, -1.0, -5.5, -5.0])  # sums of two: -10 + 1 and -10.5 + 1
    ids, weights = route(logits, cfg, selection_bias=bias)
    assert ids.tolist() == [[1, 0]]  # expert 0 (biased -8.5) although 2 and 3 have more
    assert weights.tolist() == [[0.5, 0.5]]


# ---- scores --------------------------------------------------------------------------------------


def exact_scores(logits: np.ndarray, scoring: str) -> np.ndarray:
    x = logits.astype(np.float64)
    if scoring == "softmax":
        e = np.exp(x - x.max(axis=-1, keepdims=True))
        return e / e.sum(axis=-1, keepdims=True)
    with np.errstate(over="ignore"):
        if scoring == "sigmoid":
            return 1.0 / (1.0 + np.exp(-x))
        return np.sqrt(np.maximum(x, 0.0) + np.log1p(np.exp(-np.abs(x))))


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("scale", [0.1, 3.0, 25.0])
def test_scores_match_fp64(scoring: str, scale: float) -> None:
    logits = logits_of(50, 64, scale=scale)
    got = scores(logits, scoring).double().numpy()
    want = exact_scores(logits.numpy(), scoring)
    tiny = 2.0**-63 if scoring == "sqrtsoftplus" else 2.0**-126  # the root of a subnormal
    normal = want > tiny
    relative = np.abs(got - want)[normal] / want[normal]
    # exp(a) carries the rounding of a, half an ulp: |a| * 2^-24 relative
    argument = np.ptp(logits.numpy(), axis=-1).max() if scoring == "softmax" else 0.0
    assert relative.max() < (8 + argument) * 2.0**-24
    assert np.abs(got - want)[~normal].max(initial=0.0) < tiny


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_at_the_ends_of_the_range(scoring: str) -> None:
    logits = torch.tensor([[-math.inf, -1e4, -120.0, 0.0, 120.0, 1e4]])
    got = scores(logits, scoring)[0]
    assert torch.isfinite(got).all()
    assert got[0] == 0 and got[1] == 0
    assert (got.diff() >= 0).all()
    assert scores(torch.tensor([[math.nan, 0.0]]), scoring)[0, 0].isnan()


@pytest.mark.parametrize("experts", [1, 3, 8, 60, 128])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_route_gives_a_token_the_same_bits_in_any_batch(scoring: str, experts: int) -> None:
    """A vectorised loop and its remainder may not differ: torch.sigmoid on a CPU does."""
    cfg = config(experts, min(4, experts), scoring=scoring, renormalize=False)
    logits = logits_of(64, experts)
    ids, weights = route(logits, cfg)
    for size in range(1, 64):
        for start in (0, 64 - size):
            part_ids, part = route(logits[start : start + size].clone(), cfg)
            assert same_bits(part_ids, ids[start : start + size])
            assert same_bits(part, weights[start : start + size])


# ---- biases, renormalisation, factor, hash routing -----------------------------------------------


def test_h11_sigmoid_scores_that_underflow_keep_their_weights() -> None:
    """H11: the score is not recovered as (score + bias) - bias, and 0/0 gives no NaN."""
    cfg = config(4, 4, scoring="sigmoid")
    bias = torch.full((4,), 12.0)
    ids, weights = route(torch.tensor([[-16.0, -17, -18, -19]]), cfg, selection_bias=bias)
    order = ids[0].argsort()
    want = torch.tensor([0.64391, 0.23688, 0.08714, 0.03206])
    torch.testing.assert_close(weights[0][order], want, rtol=0, atol=1e-5)
    _, weights = route(torch.full((1, 4), -120.0), cfg, selection_bias=bias)
    assert weights.tolist() == [[0.0] * 4]


def test_h12_selection_bias_chooses_but_does_not_weigh() -> None:
    """H12: chosen {2, 0} because of the bias; weights from the unbiased scores."""
    cfg = config(4, 2, scoring="sigmoid")
    logits = torch.logit(torch.tensor([[0.9, 0.8, 0.1, 0.2]]))
    ids, weights = route(logits, cfg, selection_bias=torch.tensor([0.0, 0.0, 2.0, 0.0]))
    assert ids.tolist() == [[2, 0]]
    torch.testing.assert_close(weights, torch.tensor([[0.1, 0.9]]), rtol=1e-6, atol=0)


def test_renormalise_of_nothing_is_zero() -> None:
    """Every chosen score is 0 in fp32: 0/0 gives 0."""
    for scoring in ("sigmoid", "sqrtsoftplus"):
        cfg = config(6, 3, scoring=scoring)
        ids, weights = route(torch.full((2, 6), -1000.0), cfg)
        assert ids.tolist() == [[0, 1, 2]] * 2
        assert weights.tolist() == [[0.0] * 3] * 2


def test_weights_sum_to_one_with_renormalise_and_are_scores_without() -> None:
    logits = logits_of(30, 20)
    cfg = config(20, 5, scoring="sigmoid")
    ids, weights = route(logits, cfg)
    torch.testing.assert_close(weights.sum(-1), torch.ones(30), rtol=0, atol=1e-6)
    plain_ids, plain = route(logits, dataclasses.replace(cfg, renormalize=False))
    assert torch.equal(ids, plain_ids)
    assert torch.equal(plain, scores(logits, "sigmoid").gather(-1, ids.long()))


@pytest.mark.parametrize("factor", [1.0, 2.5])
def test_route_does_not_apply_the_scaling_factor(factor: float) -> None:
    """H13, the router's part: the factor is applied in MoE.forward, once."""
    logits = logits_of(5, 8)
    _, weights = route(logits, config(8, 2, routed_scaling_factor=factor))
    assert torch.equal(weights, route(logits, config(8, 2))[1])


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
def test_hash_routing_takes_ids_from_the_table_and_weights_from_the_scores(id_type) -> None:
    cfg = config(16, 3, scoring="sqrtsoftplus")
    gen = torch.Generator().manual_seed(4)
    table = torch.stack([torch.randperm(16, generator=gen)[:3] for _ in range(50)]).to(id_type)
    tokens = torch.tensor([[3, 49], [0, 3]], dtype=id_type)  # any shape: one id per token
    logits = logits_of(4, 16)
    bias = torch.linspace(-5, 5, 16)  # may not matter: nothing is chosen
    ids, weights = route(logits, cfg, selection_bias=bias, tid2eid=table, input_ids=tokens)
    s = scores(logits, cfg.scoring).numpy()
    for t, token in enumerate(tokens.flatten().tolist()):
        chosen = table[token].tolist()
        assert ids[t].tolist() == chosen
        picked = [F32(s[t, e]) for e in chosen]
        total = F32(F32(picked[0] + picked[1]) + picked[2])
        assert weights[t].tolist() == [float(F32(w / total)) for w in picked]


@pytest.mark.parametrize("id_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("renormalize", [True, False])
def test_negative_token_ids_reach_no_expert(id_type, renormalize: bool) -> None:
    """-1 must not be the last row of the table, and other tokens do not change."""
    cfg = config(16, 3, scoring="sigmoid", renormalize=renormalize)
    table = torch.arange(30).reshape(10, 3) % 16
    tokens = torch.tensor([4, -1, 9, -100, 0], dtype=id_type)
    logits = logits_of(5, 16)
    ids, weights = route(logits, cfg, tid2eid=table, input_ids=tokens)
    assert ids[[1, 3]].eq(-1).all() and weights[[1, 3]].eq(0).all()
    real = [0, 2, 4]
    alone = route(logits[real], cfg, tid2eid=table, input_ids=tokens[real])
    assert same_bits(ids[real], alone[0]) and same_bits(weights[real], alone[1])
    assert torch.equal(ids[real], table[tokens[real].long()].int())


def test_hash_routing_needs_one_id_per_token() -> None:
    cfg = config(4, 1)
    table = torch.zeros(9, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="input_ids"):
        route(torch.zeros(2, 4), cfg, tid2eid=table)
    with pytest.raises(ValueError, match="3 for 2"):
        route(torch.zeros(2, 4), cfg, tid2eid=table, input_ids=torch.zeros(3, dtype=torch.int64))


def test_wrong_logits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(T, 8\)"):
        route(torch.zeros(2, 7), config(8, 2))
    with pytest.raises(ValueError, match="scoring"):
        scores(torch.zeros(2, 7), "softplus")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 9}, "top_k"),
        ({"top_k": 0}, "top_k"),
        ({"scoring": "relu"}, "scoring"),
        ({"num_groups": 3}, "num_groups"),
        ({"num_groups": 4, "top_groups": 5}, "top_groups"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "do not fit"),
        ({"weight_on_input": True}, "weight_on_input"),
        ({"hidden": 40}, "hidden"),
        ({"intermediate": 0}, "intermediate"),
        ({"activation": "silu"}, "activation"),
    ],
)
def test_impossible_configurations_are_refused(options: dict, message: str) -> None:
    fields = {"hidden": 32, "intermediate": 32, "num_experts": 8, "top_k": 2} | options
    with pytest.raises(ValueError, match=message):
        MoEConfig(**fields)


# ---- empty batches and NaN -----------------------------------------------------------------------


@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (256, 8), (512, 10)])
@pytest.mark.parametrize("groups", [1, 4])
def test_h02_router_takes_zero_tokens(experts: int, top_k: int, groups: int) -> None:
    """H02: 0 is a number of tokens, for expert counts that are powers of two and others."""
    for scoring in SCORINGS:
        cfg = config(experts, top_k, scoring=scoring, num_groups=groups, top_groups=groups)
        ids, weights = route(torch.zeros(0, experts), cfg)
        assert ids.shape == weights.shape == (0, top_k)
        assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert router_logits(torch.zeros(0, 64), torch.zeros(experts, 64)).shape == (0, experts)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [1, 8])
def test_h10_nan_rows_give_valid_ids_and_touch_no_other_row(scoring: str, groups: int) -> None:
    """H10: ids stay in range and distinct whatever the row holds."""
    logits = logits_of(4, 128)
    logits[1] = math.nan
    logits[2, 5] = math.nan
    logits[3] = -math.inf
    bias = torch.linspace(0, 1, 128) if scoring == "sigmoid" else None
    cfg = config(128, 8, scoring=scoring, num_groups=groups, top_groups=max(1, groups // 2))
    ids, weights = route(logits, cfg, selection_bias=bias)
    assert ((ids >= 0) & (ids < 128)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())
    alone_ids, alone = route(logits[:1], cfg, selection_bias=bias)
    assert same_bits(ids[:1], alone_ids) and same_bits(weights[:1], alone)
    assert torch.isfinite(weights[0]).all()
    if scoring == "sigmoid":  # -inf is a score of 0, not NaN
        assert weights[3].tolist() == [0.0] * 8


# ---- router_logits -------------------------------------------------------------------------------


def heavy_tailed(rows: int, k: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=gen)
    x[:, ::37] *= 40  # outlier channels, as hidden states have
    return x.to(dtype)


@pytest.mark.parametrize("hidden", [48, 1000, 4096])
def test_logits_are_batch_invariant_bit_for_bit(hidden: int) -> None:
    """Every size 1..64 at two positions, rows in another order, other neighbours."""
    x, w = heavy_tailed(64, hidden, 0), heavy_tailed(24, hidden, 1, torch.float32) * 0.02
    bias = heavy_tailed(1, 24, 2, torch.float32)[0]
    whole = router_logits(x, w, bias)
    for size in range(1, 65):
        for start in {0, (64 - size) // 2, 64 - size}:
            part = router_logits(x[start : start + size], w, bias)
            assert same_bits(part, whole[start : start + size]), (size, start)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    assert same_bits(router_logits(x[order], w, bias), whole[order])
    half = router_logits(x, w[::2].contiguous(), bias[::2])  # nor on the other experts
    assert same_bits(half, whole[:, ::2].contiguous())


def logits_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The rounding that the docstring describes: w to 22 bits of its row's largest, x to 32 bits
    of its row's largest, one fp32 rounding (added by the caller)."""
    err_w = np.abs(w).max(axis=1) * 2.0**-21 / 2  # (E,)
    err_x = np.abs(x).max(axis=1) * 2.0**-31 / 2  # (T,)
    return (
        np.abs(x).sum(axis=1)[:, None] * err_w[None]
        + err_x[:, None] * np.abs(w).sum(axis=1)[None]
        + x.shape[1] * err_x[:, None] * err_w[None]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_logits_are_near_fp64(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    x, w = heavy_tailed(20, 2048, 0, dtype), (heavy_tailed(32, 2048, 1) * 0.02).to(weight_dtype)
    got = router_logits(x, w).double().numpy()
    xn, wn = x.double().numpy(), w.double().numpy()
    want = xn @ wn.T
    error = np.abs(got - want)
    assert (error <= logits_bound(xn, wn) + np.abs(want) * 2.0**-24).all()
    # far inside of what a sum of fp32 products gives at this size
    assert (error / (np.abs(xn) @ np.abs(wn).T)).max() < 2.0**-24


def test_logits_of_exact_operands_are_exact() -> None:
    """Small integers times powers of two: nothing rounds, in x or in the weights."""
    gen = np.random.default_rng(0)
    x = gen.integers(-100, 100, (9, 160)).astype(F32) * F32(2.0**-30)
    w = gen.integers(-100, 100, (7, 160)).astype(F32) * F32(2.0**20)
    want = (x.astype(np.float64) @ w.astype(np.float64).T).astype(F32)
    got = router_logits(torch.from_numpy(x), torch.from_numpy(w))
    np.testing.assert_array_equal(got.numpy(), want)


def test_the_linear_bias_is_added_in_fp32() -> None:
    x, w = heavy_tailed(5, 64, 0), heavy_tailed(6, 64, 1)
    bias = torch.linspace(-3, 3, 6)
    assert same_bits(router_logits(x, w, bias), router_logits(x, w) + bias)
    assert same_bits(router_logits(x, w, bias.bfloat16()), router_logits(x, w) + bias.bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_element_spoils_its_own_row_only(bad: float) -> None:
    x, w = heavy_tailed(6, 256, 0), heavy_tailed(10, 256, 1)
    clean = router_logits(x, w)
    x[2, 100] = bad
    got = router_logits(x, w)
    assert got[2].isnan().all()
    keep = [0, 1, 3, 4, 5]
    assert same_bits(got[keep], clean[keep])
    w[4, 7] = bad  # and a bad weight its own expert only
    got = router_logits(x, w)
    assert got[:, 4].isnan().all()
    columns = [e for e in range(10) if e != 4]
    assert same_bits(got[keep][:, columns], clean[keep][:, columns])


@pytest.mark.parametrize("exponent", [-149, -140, -126, -60, 0, 60, 126])
def test_logits_over_the_whole_range_of_fp32(exponent: int) -> None:
    """Rows of subnormals and of huge values: scaled powers of two give scaled logits."""
    gen = np.random.default_rng(1)
    x = gen.integers(-1, 2, (4, 64)).astype(np.float64)
    w = gen.integers(-3, 4, (5, 64)).astype(np.float64)
    scaled = torch.from_numpy((x * 2.0**exponent).astype(F32))
    with np.errstate(over="ignore"):
        want = ((x @ w.T) * 2.0**exponent).astype(F32)
    got = router_logits(scaled, torch.from_numpy(w.astype(F32)))
    np.testing.assert_array_equal(got.numpy(), want)


def test_zero_rows_and_zero_weights_give_zero_logits() -> None:
    x, w = heavy_tailed(3, 64, 0), heavy_tailed(4, 64, 1)
    x[1] = 0
    w[2] = 0
    got = router_logits(x, w)
    assert got[1].tolist() == [0.0] * 4
    assert got[:, 2].tolist() == [0.0] * 3


def test_logits_refuse_shapes_they_cannot_sum_exactly() -> None:
    with pytest.raises(ValueError, match=r"\(T, H\)"):
        router_logits(torch.zeros(2, 8), torch.zeros(3, 9))
    with pytest.raises(ValueError, match=r"\(T, H\)"):
        router_logits(torch.zeros(1, 2, 8), torch.zeros(3, 8))
    with pytest.raises(ValueError, match="16384"):
        router_logits(torch.zeros(1, 2**14 + 16), torch.zeros(3, 2**14 + 16))
