"""Which cluster does what: identical bits over schedules of the simulator, a dynamic schedule,
dependent launches."""

from __future__ import annotations

import dataclasses
from unittest import mock

import pytest
import torch
from cutlass import cute

from cute_kernels import compile as compiler
from cute_kernels import nvfp4, sim
from cute_kernels.activations import SwiGLU
from cute_kernels.config import GemmConfig
from cute_kernels.device import ptx
from cute_kernels.device.epilogues import ActivationQuantize, StoreRows
from cute_kernels.sm100.grouped_gemm import Sm100GroupedGemm
from tests.sm100.configs import DECODE, MAIN, OTHER, names
from tests.sm100.harness import CHECKS, Data, Problem, equal_bits, store_rows

# the smallest shapes with more stages than fit, a second row tile, a second item per cluster
SMALL = {c: Problem((3, c.tile_rows + 1), n=c.tile_columns, k=320, gathered=True) for c in MAIN}


@pytest.mark.parametrize("part", range(5))
@pytest.mark.parametrize("config", MAIN, ids=names)
def test_fifty_schedules_give_the_same_bits(config: GemmConfig, part: int) -> None:
    data = Data(SMALL[config])
    for seed in range(10 * part, 10 * part + 10):
        out, want, _ = store_rows(data, config, seed=seed, schedule="random")
        assert equal_bits(out, want), f"seed {seed}"


@pytest.mark.parametrize("config", OTHER, ids=names)
def test_five_schedules_of_the_others(config: GemmConfig) -> None:
    data = Data(Problem((3, config.tile_rows + 1), n=config.tile_columns, k=320, gathered=True))
    for seed in range(5):
        out, want, _ = store_rows(data, config, seed=seed, schedule="random")
        assert equal_bits(out, want), f"seed {seed}"


class Hasty(Sm100GroupedGemm):
    """Load warps leave without waiting for the last releases of their stages."""

    def drain(self, bars: object, step: object) -> None:
        pass


@pytest.mark.parametrize("config", [OTHER[2], MAIN[3]], ids=names)
def test_a_release_that_finds_its_cta_gone_is_noticed(config: GemmConfig) -> None:
    """Nothing but `drain` orders the releases by one pair before the end of another."""
    data = Data(Problem((3, config.tile_rows + 1), n=config.tile_columns, k=320))
    right = data.kernel(config, StoreRows("Float32"))
    hasty = Hasty(right.load, right.epilogue, config)
    out, one = torch.empty_like(data.acc), torch.ones(2)
    noticed = 0
    for seed in range(12):
        try:
            with sim.Simulator(seed=seed, schedule="random"):
                data.call(hasty, [out.data_ptr(), one.data_ptr()])
        except sim.SimError as error:
            assert "whose CTA has ended" in str(error)
            noticed += 1
    assert noticed


class Unfenced(Sm100GroupedGemm):
    """Compiled without the fence behind the initialisation of the barriers."""


def test_barriers_without_their_fence_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(Problem((3,), n=128, k=256))
    right = data.kernel(DECODE, StoreRows("Float32"))
    kernel = Unfenced(right.load, right.epilogue, right.config)
    monkeypatch.setattr(cute.arch, "mbarrier_init_fence", lambda: None)
    out, one = torch.empty_like(data.acc), torch.ones(1)
    with pytest.raises(sim.SimError, match="used by a copy"), sim.Simulator(checks=CHECKS):
        data.call(kernel, [out.data_ptr(), one.data_ptr()])


class NoBefore(Sm100GroupedGemm):
    """Compiled without tcgen05.fence::before_thread_sync."""


class NoAfter(Sm100GroupedGemm):
    """Compiled without tcgen05.fence::after_thread_sync."""


class NoAfterEmpty(Sm100GroupedGemm):
    """Compiled without the tcgen05.fence::after_thread_sync of the MMA warp."""

    def mma_loop(self, *args):
        with mock.patch.object(ptx, "after_thread_sync", lambda: None):
            return Sm100GroupedGemm.mma_loop(self, *args)


@pytest.mark.parametrize("config", [DECODE, MAIN[-1]], ids=names)
@pytest.mark.parametrize(
    ("kind", "patched", "message"),
    [
        (NoBefore, "before_thread_sync", "before_thread_sync is missing before its signal"),
        (NoAfter, "after_thread_sync", "after_thread_sync is missing behind the wait"),
        (NoAfterEmpty, None, "overwrites or frees .*after_thread_sync is missing"),
    ],
    ids=["before", "after", "mma"],
)
def test_tcgen05_fences_left_out_are_noticed(kind, patched, message, config, monkeypatch) -> None:
    """PTX ISA, canonical synchronization patterns of tcgen05: mma, commit | wait, fence, ld; and
    ld, wait::ld, fence, arrive | wait, fence, mma. In every order of the asynchronous work."""
    rows = 3 * config.tile_rows  # the accumulators come round
    data = Data(Problem((rows,), n=3 * config.tile_columns, k=64))
    right = data.kernel(config, StoreRows("Float32"))
    kernel = kind(right.load, right.epilogue, right.config)
    if patched:
        monkeypatch.setattr(ptx, patched, lambda: None)
    out, one = torch.empty_like(data.acc), torch.ones(1)
    for schedule, seed in (("lazy", 0), ("eager", 0), ("random", 1)):
        simulator = sim.Simulator(seed, schedule, checks=CHECKS)
        with pytest.raises(sim.SimError, match=message), simulator:
            data.call(kernel, [out.data_ptr(), one.data_ptr()])


def dynamic(config: GemmConfig) -> GemmConfig:
    return dataclasses.replace(config, dynamic=True)


@pytest.mark.parametrize("config", [GemmConfig(1, 128), MAIN[-2], DECODE], ids=names)
def test_dynamic_schedule_and_its_counter(config: GemmConfig) -> None:
    """Exact, and the counter is 0 again (the harness compares it): a second launch needs no reset.
    Empty experts, fewer items than clusters, no items at all."""
    for counts in ((5, 0, 2 * config.tile_rows + 1, 0, 1), (0, 0), (1,), (0, 3)):
        data = Data(Problem(counts, n=config.tile_columns + 64, k=320))
        for seed in range(4):
            out, want, _ = store_rows(data, dynamic(config), seed=seed, schedule="random")
            assert equal_bits(out, want), f"{counts}, seed {seed}"


@pytest.mark.parametrize("clusters", [1, 3, 7])
@pytest.mark.parametrize("config", [DECODE, dynamic(DECODE)], ids=names)
def test_any_number_of_clusters(config: GemmConfig, clusters: int) -> None:
    data = Data(Problem((5, 0, 70, 1), n=272, k=128))
    out = torch.full((76, 272), float("nan"))
    one = torch.ones(4)
    kernel = data.kernel(config, StoreRows("Float32"))
    with sim.Simulator(seed=clusters, schedule="random"):
        for _ in range(2):
            data.call(kernel, [out.data_ptr(), one.data_ptr()], clusters)
    assert equal_bits(out, data.acc)
    assert not data.counter.any()


def test_items_of_a_dynamic_schedule_are_all_done_once() -> None:
    """As many MMAs as with the static schedule: no tile twice, none left out."""
    data = Data(Problem((200, 3, 129), n=256, k=256))
    count = {}
    for config in (GemmConfig(1, 128), dynamic(GemmConfig(1, 128))):
        _, _, launch = store_rows(data, config, seed=1, schedule="random")
        count[config.dynamic] = launch.counters.total()["mma"]
    assert count[True] == count[False] == (2 + 1 + 2) * 2 * 4


@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "no_pdl"])
def test_a_dependent_kernel_sees_what_the_previous_one_wrote(pdl: bool) -> None:
    """L1 with activation and quantiser, then L2 on its output, in one stream. With dependent launch
    the simulator starts a kernel on the memory as it was before its predecessor."""
    first = Data(Problem((5, 33), n=256, k=128))
    second = Data(Problem((5, 33), n=192, k=128, seed=1))
    second.inputs.clear()  # overwritten by the first kernel
    g13, gh = torch.full((2, 2), 1e-3), torch.full((2,), 1e-3)
    out = torch.full((38, 192), float("nan"))
    one = torch.ones(2)
    l1 = first.kernel(DECODE, ActivationQuantize(SwiGLU(), indexed=False), pdl)
    l2 = second.kernel(DECODE, StoreRows("Float32"), pdl)
    for kernel in (l1, l2):
        ptx = compiler.dump(kernel, "sm_100a").ptx
        assert ("griddepcontrol.wait" in ptx) == pdl
        assert ("griddepcontrol.launch_dependents" in ptx) == pdl
    h = [t.data_ptr() for t in (second.rows, second.scale, g13, first.gx, gh)]
    for seed in range(4):
        second.rows.zero_()
        with sim.Simulator(seed=seed, schedule="random" if seed else "lazy"):
            first.call(l1, h)
            second.call(l2, [out.data_ptr(), one.data_ptr()])
        scale = nvfp4.unswizzle(second.scale, *second.scale.shape)
        real = nvfp4.grouped_rows(second.offsets, 38)
        rows = nvfp4.Nvfp4Tensor(second.rows, scale[real][:, :8].contiguous(), torch.ones(()))
        a = nvfp4.decode(rows, torch.float64)
        b = nvfp4.decode(second.w, torch.float64)
        want = torch.cat([a[:5] @ b[0].t(), a[5:] @ b[1].t()]).float()
        assert a.any()
        assert equal_bits(out, want), f"seed {seed}"
