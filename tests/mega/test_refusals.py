"""Calls that cannot be honoured raise before anything is written: y and the statistics keep every
byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe import mega
from tests.mega import data
from tests.mega.data import E, H, I, K, T
from tests.mega.test_call import buffer_of, scales_of, weights_of

Args = dict[str, Any]
MARK = 7.0


def arguments() -> Args:
    of, t = data.layer(), data.tokens()
    l1, l2 = weights_of(of)
    return {
        "y": torch.full((T, H), MARK, dtype=torch.bfloat16),
        "l1_weights": l1,
        "l2_weights": l2,
        "sym_buffer": buffer_of(t),
        "cumulative_local_expert_recv_stats": torch.full((E,), 3, dtype=torch.int32),
        "recipe": (1, 1, 16),
        "activation": "swiglu",
        **scales_of(of),
        "a2_scales": torch.full((E,), 2e-3),
    }


def y_in_the_buffer(a: Args) -> Tensor:
    return a["sym_buffer"].buffer[: 4 * H * 2].view(torch.bfloat16).view(4, H)


def y_in_the_weights(a: Args) -> Tensor:
    return a["l1_weights"].data.flatten()[: T * H * 2].view(torch.bfloat16).view(T, H)


def stats_in_the_alphas(a: Args) -> Tensor:
    return a["l2_alphas"].view(torch.int32)


def stats_in_y(a: Args) -> Tensor:
    return a["y"].view(torch.int32).flatten()[10 : 10 + E]


def with_data(w: mega.MegaWeights, change: Callable[[Tensor], Tensor]) -> mega.MegaWeights:
    return mega.MegaWeights(w.projection, change(w.data), w.scale)


Change = Callable[[Args], Any]
STATS = "cumulative_local_expert_recv_stats"
CASES: list[tuple[str, Change, type[Exception], str]] = [
    ("y", lambda a: a["y"].float(), TypeError, "y must be a bfloat16 tensor"),
    ("y", lambda a: a["y"][:, 1:], ValueError, "y must be contiguous"),
    ("y", lambda a: a["y"].t().contiguous().t(), ValueError, "y must be contiguous"),
    ("y", lambda a: a["y"][:1].expand(T, H), ValueError, "y must be contiguous"),
    ("y", lambda a: a["y"].repeat(2, 1), ValueError, "y has 18 tokens, the buffer holds 12"),
    ("y", lambda a: a["y"].to("meta"), ValueError, "y is on meta"),
    ("y", y_in_the_buffer, ValueError, "y shares memory with an input"),
    ("y", y_in_the_weights, ValueError, "y shares memory with an input"),
    ("y", lambda a: None, TypeError, "y must be a bfloat16 tensor"),
    ("sym_buffer", lambda a: a["sym_buffer"].buffer, TypeError, "must be a SymmBuffer"),
    ("recipe", lambda a: (1, 1, 32), ValueError, "recipe must be"),
    ("activation", lambda a: "situ", ValueError, "activation is 'situ'"),
    ("recipe", lambda a: None, ValueError, "recipe must be"),
    ("activation_clamp", lambda a: "10", TypeError, "activation_clamp must be a Python number"),
    ("activation_clamp", lambda a: torch.ones(()), TypeError, "must be a Python number"),
    ("activation_clamp", lambda a: True, TypeError, "must be a Python number"),
    ("routed_scaling_factor", lambda a: None, TypeError, "routed_scaling_factor must be a Python"),
    ("activation_clamp", lambda a: 0.0, ValueError, "activation_clamp must be positive"),
    ("activation_clamp", lambda a: -1.0, ValueError, "activation_clamp must be positive"),
    ("activation_clamp", lambda a: float("nan"), ValueError, "activation_clamp must be positive"),
    ("fast_math", lambda a: "yes", TypeError, "fast_math must be a bool"),
    ("routed_scaling_factor", lambda a: float("inf"), ValueError, "must be finite"),
    ("l1_weights", lambda a: data.published(data.gate_up(data.layer())), TypeError, "plain pair"),
    ("l1_weights", lambda a: a["l2_weights"], ValueError, "holds the projection l2"),
    ("l1_weights", lambda a: with_data(a["l1_weights"], lambda t: t[1:]),
     ValueError, "must be 6 experts of 128 x 128"),
    ("l2_weights", lambda a: with_data(a["l2_weights"], lambda t: t.to("meta")),
     ValueError, "are on meta"),
    ("l1_alphas", lambda a: a["l1_alphas"].double(), TypeError, "l1_alphas must be torch.float32"),
    ("l1_alphas", lambda a: a["l1_alphas"][:, 0], ValueError, "l1_alphas must be contiguous"),
    ("l1_alphas", lambda a: a["l1_alphas"].t().contiguous().t(), ValueError, "strides"),
    ("l1_alphas", lambda a: a["l1_alphas"].to("meta"), ValueError, "l1_alphas is on meta"),
    ("l2_alphas", lambda a: a["l1_alphas"], ValueError, "l2_alphas must be contiguous"),
    ("a2_scales", lambda a: a["a2_scales"][1:], ValueError, "one row per local expert"),
    ("a2_scales", lambda a: a["a2_scales"] * 0, ValueError, "got 0.0 for local expert 0"),
    ("a2_scales", lambda a: a["a2_scales"] * torch.tensor([1, 1, 1, -1, 1, 1]),
     ValueError, "for local expert 3"),
    ("a2_scales", lambda a: a["a2_scales"] / 0, ValueError, "got inf for local expert 0"),
    (STATS, lambda a: a[STATS].long(), TypeError, "must be torch.int32"),
    (STATS, lambda a: a[STATS][1:], ValueError, "one row per local expert"),
    (STATS, lambda a: a[STATS].repeat_interleave(2)[::2], ValueError, "must be contiguous"),
    (STATS, stats_in_the_alphas, ValueError, "shares memory with an input"),
    (STATS, stats_in_y, ValueError, "recv_stats shares memory with an input"),
    ("x_bf16", lambda a: torch.zeros(T, H, dtype=torch.bfloat16), ValueError, "missing"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "error", "match"), CASES, ids=[f"{i}-{c[0]}" for i, c in enumerate(CASES)]
)
def test_refused_before_anything_is_written(
    name: str, change: Change, error: type[Exception], match: str
) -> None:
    given = arguments()
    y, stats, buffer = given["y"], given[STATS], given["sym_buffer"]
    before = buffer.buffer.clone()
    given[name] = change(given)
    with pytest.raises(error, match=match):
        mega.fp4_fp4_mega_moe(**given)
    assert (y == MARK).all()
    assert (stats == 3).all()
    assert torch.equal(buffer.buffer, before)


def test_the_unchanged_arguments_are_accepted() -> None:
    given = arguments()
    mega.fp4_fp4_mega_moe(**given)
    assert not (given["y"] == MARK).all()
    assert not (given[STATS] == 3).all()


def test_scales_given_twice() -> None:
    given, of = arguments(), data.layer()
    given["l1_weights"], given["l2_weights"] = mega.finalize_weights(
        *data.gate_up(of), *data.down(of)
    )
    with pytest.raises(ValueError, match="l1_alphas are given and l1_weights hold"):
        mega.fp4_fp4_mega_moe(**given)
    given["l1_alphas"] = None
    with pytest.raises(ValueError, match="l2_alphas are given and l2_weights hold"):
        mega.fp4_fp4_mega_moe(**given)


def test_weights_of_another_layer() -> None:
    """Shapes of a buffer bind: a layer of other sizes does not slip through."""
    given = arguments()
    given["sym_buffer"] = mega.SymmBuffer(None, E, T, K, H, 2 * I)
    with pytest.raises(ValueError, match="must be 6 experts of 256 x 128 for this buffer"):
        mega.fp4_fp4_mega_moe(**given)


def test_shared_experts_that_do_not_fit() -> None:
    given = arguments()
    x = torch.zeros(T, H, dtype=torch.bfloat16)
    shared = mega.transform_weights_for_mega_moe(
        torch.zeros(2 * I, H, dtype=torch.bfloat16), torch.zeros(H, I, dtype=torch.bfloat16)
    )
    apart = torch.zeros(2 * T, H, dtype=torch.bfloat16)
    names = ("shared_l1_weights", "shared_l2_weights", "x_bf16")
    given |= dict(zip(names, (*shared, x)))
    with pytest.raises(ValueError, match=r"must be \(0, 128\) for 0 shared experts"):
        mega.fp4_fp4_mega_moe(**given)
    given["sym_buffer"] = buffer_of(data.tokens(), num_shared_experts=1)
    for change, error, match in (
        ({"x_bf16": x[1:]}, ValueError, "for 9 tokens"),
        ({"x_bf16": x.float()}, TypeError, "x_bf16 must be bfloat16"),
        ({"x_bf16": x.to("meta")}, ValueError, "x_bf16 is on meta"),
        ({"shared_l1_weights": shared[1]}, TypeError, "must come from transform"),
        ({"shared_l2_weights": torch.zeros(H, I)}, TypeError, "must come from transform"),
        ({"shared_l1_weights": None}, ValueError, "shared_l1_weights missing"),
        ({"y": given["x_bf16"]}, ValueError, "y shares memory with an input"),
        # rows of x lie between those of y: only the last of them are in y
        ({"x_bf16": apart[::2], "y": apart[T:].copy_(given["y"])}, ValueError, "y shares memory"),
        ({"y": shared[0].weight[:T]}, ValueError, "y shares memory with an input"),
    ):
        with pytest.raises(error, match=match):
            mega.fp4_fp4_mega_moe(**(given | change))
    assert (given["y"] == MARK).all()


def made_in_inference_mode(like: Tensor) -> Tensor:
    with torch.inference_mode():
        return like.clone()


@pytest.mark.parametrize("name", ["y", STATS])
def test_a_result_of_inference_mode(name: str) -> None:
    """torch refuses to write it, but only after everything was computed."""
    given = arguments()
    kept = {n: given[n] for n in ("y", STATS)}
    given[name] = made_in_inference_mode(given[name])
    with pytest.raises(ValueError, match=f"{name} was made in inference mode"):
        mega.fp4_fp4_mega_moe(**given)
    assert (kept["y"] == MARK).all() and (kept[STATS] == 3).all()
    with torch.inference_mode():
        mega.fp4_fp4_mega_moe(**given)
    assert not (given["y"] == MARK).all() and not (given[STATS] == 3).all()


def test_a_token_scale_of_nan_is_a_value() -> None:
    given = arguments()
    given["sym_buffer"].x_sf.view(torch.uint8)[4, 5] = 0x7F
    mega.fp4_fp4_mega_moe(**given)
    assert given["y"].isnan().any(dim=1).nonzero().flatten().tolist() == [4]


def test_a_base_that_does_not_fit_the_options() -> None:
    sizes, base = (E, T, K, H, I), mega.SymmBuffer(None, E, T, K, H, I, device="cpu")
    assert mega.SymmBuffer(None, *sizes, base=base, device="cpu").device.type == "cpu"
    with pytest.raises(ValueError, match="device is meta, base lies on cpu"):
        mega.SymmBuffer(None, *sizes, base=base, device="meta")
    with pytest.raises(TypeError, match="base must be a SymmBuffer or None, got Tensor"):
        mega.SymmBuffer(None, *sizes, base=base.buffer)


def test_a_destroyed_buffer() -> None:
    given = arguments()
    given["sym_buffer"].destroy()
    assert given["sym_buffer"].x is None and given["sym_buffer"].group is None
    with pytest.raises(RuntimeError, match="was destroyed"):
        mega.fp4_fp4_mega_moe(**given)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mma_type": "fp8xfp4"}, "mma_type must be 'fp4xfp4'"),
        ({"activation": "situ"}, "activation must be 'swiglu'"),
        ({"use_fp8_dispatch": True}, "use_fp8_dispatch=True is not offered"),
        ({"num_max_tokens_per_rank": 0}, "num_max_tokens_per_rank must be positive"),
        ({"hidden": 96}, "hidden must be a positive multiple of 64"),
        ({"intermediate_hidden": 40}, "intermediate must be a positive multiple of 16"),
        ({"num_topk": 7}, "top_k must be in 1..num_experts"),
        ({"num_shared_experts": -1}, "num_shared_experts must not be negative"),
    ],
)
def test_buffers_that_cannot_be(options: Args, match: str) -> None:
    sizes = {"num_experts": E, "num_max_tokens_per_rank": T, "num_topk": K}
    sizes |= {"hidden": H, "intermediate_hidden": I}
    with pytest.raises(ValueError, match=match):
        mega.get_symm_buffer_for_mega_moe(None, **(sizes | options))
    assert mega.get_symm_buffer_for_mega_moe(None, **sizes, use_fp8_dispatch=False)


def test_names_that_are_not_offered_say_why() -> None:
    for name in ("fp8_fp4_mega_moe", "bf16_mega_moe", "fp8_nvfp4_mega_moe", "fp8_mega_moe"):
        with pytest.raises(AttributeError, match=f"{name} is not offered"):
            getattr(mega, name)
    with pytest.raises(AttributeError, match="has no attribute 'mega_gate'"):
        _ = mega.mega_gate
    buffer = mega.SymmBuffer(None, E, T, K, H, I)
    for name in ("l1_acts", "l2_acts_sf", "shared_l1_acts"):
        with pytest.raises(AttributeError, match=f"{name} is a ring of DeepGEMM's kernel"):
            getattr(buffer, name)
    with pytest.raises(AttributeError, match="no attribute 'num_sms'"):
        _ = buffer.num_sms


def test_no_environment_flag_returns_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGA_MOE_STATIC", "MEGA_MOE_DEBUG", "DG_COMM_KERNEL_DEBUG"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MEGA_MOE_USE_CUTLASS", "0")
    given = arguments()
    mega.fp4_fp4_mega_moe(**given)
    assert given["y"].any()
    assert given["sym_buffer"].buffer.any()
