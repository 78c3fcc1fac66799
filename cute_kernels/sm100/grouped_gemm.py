"""The block-scaled grouped GEMM of SM100: one mainloop, composed with a load and an epilogue.

    acc[r, n] = sum_k A[r, k] SFA[r, k/16] * W[e, n, k] SFW[e, n, k/16],  e the expert that owns row
                                                                          r

NVFP4 operands, fp32 accumulators in TMEM, tcgen05.mma kind::mxf4nvf4 with block16 scales.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05

from cute_kernels.compile import Ptr
from cute_kernels.config import TMEM_COLUMNS, GemmConfig
from cute_kernels.device import ptx
from cute_kernels.device.scheduler import find_tile
from cute_kernels.sm100.loads import WeightArgs, WeightTiles
from cute_kernels.sm100.operands import SF_VEC
from cute_kernels.sm100.plans import DECODE, PREFILL
from cute_kernels.sm100.schedule import (
    DEPTH,
    WORDS,
    Ring,
    init_ring,
    next_item,
    publish,
    reset,
    take,
)

EPILOGUE_WARPS = 4
MMA_WARP = 4
LOAD_WARP = 5  # and the following, if the load needs more
ALIGN = 1024  # the swizzle pattern repeats every 1024 bytes and descriptors assume offset 0


class Problem(NamedTuple):
    """Sizes, and the counter of a dynamic schedule: int32 (1,), 0 before and after a launch."""

    experts: Any
    n: Any
    k: Any
    counter: Any


@dataclasses.dataclass(frozen=True)
class Sm100GroupedGemm:
    """Persistent, warp-specialised, one cluster per work item at a time.

    load      where the rows come from: `cute_kernels.sm100.loads`
    epilogue  what happens to the accumulator: `cute_kernels.device.epilogues`
    config    `GemmConfig`; its plan decides which side of the MMA the rows are on:
              `cute_kernels.sm100.plans`
    pdl       programmatic dependent launch: set up while the previous kernel still runs

    Shapes  rows: see the load. W (E, N, K) K-major; N a multiple of 16, K of 32. expert_offsets
            int32 (E+1,). All sizes are run-time values: one compile serves every shape.
    Warps   0-3 epilogue (a thread owns a row of the M side), 4 scale copies and MMAs, in the first
            CTA of a pair; 5.. loads; the last one finds work items, in the first CTA of a cluster

    | barrier    | arrivals               | by                                                    |
    |------------|------------------------|-------------------------------------------------------|
    | ab_full    | `full_arrivals` + bytes | load warp of the leader CTA arms; bytes of both CTAs |
    | ab_empty   | MMA issuers of cluster | their commits, multicast to the whole cluster         |
    | acc_full   | 1                      | commit of the MMA issuer, multicast over its pair     |
    | acc_empty  | 4 * ctas               | one arrival per epilogue warp, at the leader          |
    | work_full  | 1 + bytes              | scheduler warp of the cluster                         |
    | work_empty | `takers`               | every warp that took the item, at the first CTA       |

    Two accumulators alternate. With 256 columns they share the columns that the scales need
    (`GemmConfig`): then one pair of accumulator barriers serves both, and an accumulator is
    released as soon as its shared columns are in registers.
    """

    load: Any
    epilogue: Any
    config: GemmConfig
    pdl: bool = True

    @property
    def name(self) -> str:
        return f"sm100_gemm_{self.load.name}_{self.epilogue.name}_{self.config.name}"

    @property
    def arguments(self) -> tuple:
        fp4, fp8 = Ptr("Float4E2M1FN"), Ptr("Float8E4M3FN")
        return (
            self.load.arguments,
            WeightArgs(fp4, fp8),
            Ptr("Int32", 4),
            self.epilogue.arguments,
            Problem("i32", "i32", "i32", Ptr("Int32", 4) if self.config.dynamic else None),
            "i32",
        )

    # ---- set-up

    first_load_warp = LOAD_WARP

    @property
    def plan(self) -> Any:
        return DECODE if self.config.decode else PREFILL

    @property
    def loads(self) -> tuple:
        """(load, side of the MMA) of the rows and of the weights."""
        return (self.load, self.plan.rows_side), (WeightTiles(), self.plan.weights_side)

    @property
    def tiler(self) -> tuple[int, int, int]:
        c = self.config
        return (128 * c.ctas, c.tile_n, c.tile_k)

    @property
    def cta_group(self) -> Any:
        return tcgen05.CtaGroup.TWO if self.config.ctas == 2 else tcgen05.CtaGroup.ONE

    @property
    def schedule_warp(self) -> int:
        return LOAD_WARP + self.load.warps

    @property
    def threads(self) -> int:
        return (self.schedule_warp + 1) * 32

    @property
    def full_arrivals(self) -> int:
        """Load warps that arrive at ab_full. One is enough where every warp brings bytes to every
        stage. A warp without a box in a decode tile must arrive instead: nothing else would keep
        the others from lapping it, and after two laps it could not tell the phases apart."""
        return self.load.warps if self.config.decode else 1

    @property
    def takers(self) -> int:
        """Warps of a cluster that take work items: an MMA warp per pair, all others per CTA."""
        c = self.config
        return (EPILOGUE_WARPS + self.load.warps) * c.cluster + c.pairs * c.columns

    @property
    def acc_stages(self) -> int:
        """Pairs of accumulator barriers."""
        return 1 if self.config.overlapped else 2

    def _mma(self, cta_group: Any, m: int, n: int) -> cute.TiledMma:
        fp4, k = cutlass.Float4E2M1FN, OperandMajorMode.K
        return sm100.make_blockscaled_trivial_tiled_mma(
            fp4, fp4, k, k, cutlass.Float8E4M3FN, SF_VEC, cta_group, (m, n)
        )

    def tiled_mmas(self) -> tuple[cute.TiledMma, cute.TiledMma]:
        """The MMA, and the one-CTA MMA over whole scale tiles that partitions the weight scales."""
        m, n, _ = self.tiler
        scales = self._mma(tcgen05.CtaGroup.ONE, 128, self.config.sfb_rows)
        return self._mma(self.cta_group, m, n), scales

    def _layouts(self, tiled_mma: cute.TiledMma) -> tuple:
        """Shared memory of A, B, SFA, SFB: each (MMA, MMA_MN, MMA_K, STAGE)."""
        stages, fp4 = self.config.stages, cutlass.Float4E2M1FN
        return (
            sm100.make_smem_layout_a(tiled_mma, self.tiler, fp4, stages),
            sm100.make_smem_layout_b(tiled_mma, self.tiler, fp4, stages),
            blockscaled.make_smem_layout_sfa(tiled_mma, self.tiler, SF_VEC, stages),
            blockscaled.make_smem_layout_sfb(tiled_mma, self.tiler, SF_VEC, stages),
        )

    def cluster_layouts(self, mma: cute.TiledMma, scales_mma: cute.TiledMma) -> tuple:
        """(V, M, N, K) of the CTAs, for the operands and for whole scale tiles of the N side."""
        c = self.config
        cluster = cute.make_layout((c.ctas * c.pairs, c.columns, 1))
        return (
            cute.tiled_divide(cluster, (mma.thr_id.shape,)),
            cute.tiled_divide(cluster, (scales_mma.thr_id.shape,)),
        )

    def column_mask(self, rank: Any) -> Any:
        """CTAs that share the rows of CTA ``rank``."""
        vmnk, _ = self.cluster_layouts(*self.tiled_mmas())
        return cpasync.create_tma_multicast_mask(vmnk, vmnk.get_flat_coord(rank), mcast_mode=2)

    @cute.jit
    def __call__(self, rows, weights, offsets, epilogue, problem, clusters, stream):
        c = self.config
        shape = (cute.assume(problem.n, 16), cute.assume(problem.k, 32), problem.experts)
        mma, _ = self.tiled_mmas()
        stage = [cute.slice_(x, (None, None, None, 0)) for x in self._layouts(mma)]
        atoms, views = [], []
        for (load, side), args in zip(self.loads, (rows, weights), strict=True):
            for atom, view in load.make_atoms(self, side, args, shape, stage):
                atoms.append(atom)
                views.append(view)
        self.kernel.set_name_prefix(self.name, remove_cutlass_symbol=True, keep_mangled_name=False)
        self.kernel(
            tuple(atoms),
            tuple(views),
            self.load.device_args(rows),
            offsets,
            epilogue,
            problem,
        ).launch(
            grid=(clusters * c.cluster, 1, 1),
            block=(self.threads, 1, 1),
            cluster=(c.cluster, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,  # shared memory allows no more: nothing to spill for
            use_pdl=self.pdl,
        )

    @cute.kernel
    def kernel(self, atoms, tensors, rows, offsets, epilogue, problem):
        """Device entry: storage, barriers, TMEM, then one method per warp role."""
        c = self.config
        mma, _ = self.tiled_mmas()
        layouts = self._layouts(mma)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        if warp == LOAD_WARP:
            for atom in atoms:
                cpasync.prefetch_descriptor(atom)

        smem = cutlass.memory.SmemAllocator()
        bars = smem.allocate_array(cutlass.Int64, num_elems=2 * c.stages + 2 * self.acc_stages)
        ring = Ring(
            smem.allocate_array(cutlass.Int64, num_elems=2 * DEPTH),
            smem.allocate_tensor(Int32, cute.make_layout((WORDS, DEPTH)), 16),
        )
        holder = smem.allocate_array(cutlass.Int32, num_elems=1)
        fp4, fp8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
        operands = (
            smem.allocate_tensor(fp4, layouts[0].outer, ALIGN, layouts[0].inner),
            smem.allocate_tensor(fp4, layouts[1].outer, ALIGN, layouts[1].inner),
            smem.allocate_tensor(fp8, layouts[2], ALIGN),
            smem.allocate_tensor(fp8, layouts[3], ALIGN),
        )
        scratch = None
        if cutlass.const_expr(self.plan.scratch):
            size = EPILOGUE_WARPS * self.plan.scratch
            scratch = smem.allocate_tensor(Float32, cute.make_layout(size), 16).iterator
        if warp == LOAD_WARP:
            self.init_barriers(bars, ring)
        self.sync()
        if warp == 0:
            cute.arch.alloc_tmem(TMEM_COLUMNS, holder, is_two_cta=c.ctas == 2)
        cute.arch.barrier(barrier_id=2, number_of_threads=self.threads)
        tmem = cute.arch.retrieve_tmem_ptr(Float32, 16, holder)
        if cutlass.const_expr(self.pdl):
            ptx.wait_for_previous_kernel()

        first = self.find(offsets, problem, cute.arch.block_idx()[0] // c.cluster)
        items = (first, ring)
        if warp == self.schedule_warp:
            if rank == 0:
                self.schedule_loop(items, offsets, problem)
        elif warp >= LOAD_WARP:
            self.load_loop((atoms, tensors), operands, bars, items, rows, problem.k)
        elif warp == MMA_WARP:
            if rank % c.ctas == 0:
                self.mma_loop(operands, tmem, bars, items, problem.k)
        else:
            self.epilogue_loop(tmem, bars, items, scratch, epilogue, problem.n)

        ptx.before_thread_sync()  # loads behind the last release, before the columns are freed
        self.sync()
        if cutlass.const_expr(self.pdl):
            ptx.allow_next_kernel()
        if warp == 0:
            ptx.after_thread_sync()
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=c.ctas == 2)
            cute.arch.dealloc_tmem(tmem, TMEM_COLUMNS, is_two_cta=c.ctas == 2)

    @cute.jit
    def init_barriers(self, bars, ring):
        """ab_full[], ab_empty[], acc_full[], acc_empty[], in this order, then those of the ring."""
        c = self.config
        with cute.arch.elect_one():
            for s in cutlass.range_constexpr(c.stages):
                cute.arch.mbarrier_init(bars + s, self.full_arrivals)
                cute.arch.mbarrier_init(bars + c.stages + s, c.pairs * c.columns)
            for s in cutlass.range_constexpr(self.acc_stages):
                cute.arch.mbarrier_init(bars + 2 * c.stages + s, 1)
                acc_empty = bars + 2 * c.stages + self.acc_stages + s
                cute.arch.mbarrier_init(acc_empty, EPILOGUE_WARPS * c.ctas)
            init_ring(ring, self.takers)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def sync(self):
        """All threads of the cluster: at the start the barriers exist before anyone uses them, at
        the end no CTA frees its TMEM or leaves while a peer may still signal it."""
        if cutlass.const_expr(self.config.cluster > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

    # ---- schedule

    @cute.jit
    def find(self, offsets, problem, item):
        """The `Tile` of a work item of this kernel's clusters."""
        columns = self.config.tile_columns
        n_tiles = (problem.n + (columns - 1)) // columns
        tile_rows = self.config.tile_rows
        return find_tile(offsets.toint(), problem.experts, item, n_tiles, tile_rows)

    @cute.jit
    def schedule_loop(self, items, offsets, problem):
        """Find the items of this cluster after the first, which every warp finds by itself, one
        after another, and publish them; the last one does not exist."""
        c = self.config
        tile, ring = items
        clusters = cute.arch.grid_dim()[0] // c.cluster
        item = cute.arch.block_idx()[0] // c.cluster
        count = Int32(0)
        while tile.found:
            item = next_item(item, clusters, problem.counter)
            tile = self.find(offsets, problem, item)
            publish(ring, count, tile, c.cluster)
            count += 1
        if cutlass.const_expr(c.dynamic):
            reset(item, clusters, problem.counter, tile.items)

    # ---- loads

    @cute.jit
    def load_loop(self, maps, operands, bars, items, rows, k):
        """Fill the stages: rows, weights and both scales of one K tile; the leader arms ab_full.
        ``items``: the first `Tile`, and the ring of those after it."""
        c = self.config
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        (row_load, row_side), (weight_load, weight_side) = self.loads
        maps = list(zip(*maps))  # (TMA atom, its view) of the row codes, row scales, weights, ...
        k_tiles = (k + (c.tile_k - 1)) // c.tile_k
        arms = rank % c.ctas == 0 and warp == LOAD_WARP
        step = Int32(0)
        count = Int32(0)
        work, ring = items
        while work.found:
            tile = self.plan.tile(c, work, rank)
            copy_rows, copy_row_scales = row_load.copy_fn(
                self, row_side, maps[:2], operands, rows, tile
            )
            copy_weights, copy_weight_scales = weight_load.copy_fn(
                self, weight_side, maps[2:], operands, None, tile
            )
            tx = c.stage_bytes * c.ctas
            if cutlass.const_expr(c.decode):
                tx = c.fixed_bytes + c.step_bytes * tile.boxes
            for k_tile in cutlass.range(k_tiles, unroll=1):
                s, phase = step % c.stages, (step // c.stages) & 1
                full, empty = bars + s, bars + c.stages + s
                cute.arch.mbarrier_wait(empty, phase ^ 1)
                if arms:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, tx)
                copy_rows(k_tile, s, full)
                if cutlass.const_expr(self.full_arrivals > 1):  # noqa: SIM102
                    if not arms:
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(full)
                if warp == LOAD_WARP:
                    copy_row_scales(k_tile, s, full)
                    copy_weights(k_tile, s, full)
                    copy_weight_scales(k_tile, s, full)
                step += 1
            work = take(ring, count, c.cluster)
            count += 1
        if cutlass.const_expr(c.cluster > 1):  # noqa: SIM102 (one is compile-time)
            if warp == LOAD_WARP:
                self.drain(bars, step)

    @cute.jit
    def drain(self, bars, step):
        """Wait for the releases of all stages. They come from every pair of the cluster, and no
        accumulator that is awaited here tells that those of the others have arrived: one that is
        late would arrive in the shared memory of a CTA that has left."""
        stages = self.config.stages
        for i in cutlass.range(step, step + stages, unroll=1):
            cute.arch.mbarrier_wait(bars + stages + i % stages, (i // stages & 1) ^ 1)

    # ---- MMA

    def _tmem_tensors(self, mma: cute.TiledMma, tmem: cute.Pointer) -> tuple:
        """Both accumulators (MMA, MMA_M, MMA_N, 2) from column 0, then SFA and SFB."""
        c = self.config
        layouts = self._layouts(mma)
        shape = mma.partition_shape_C(self.tiler[:2])
        two = mma.make_fragment_C(cute.append(shape, 2)).layout
        column = two.stride[0][1]
        stride = (*two.stride[:3], c.acc_stride * column)
        acc = cute.make_tensor(tmem, cute.make_layout(two.shape, stride=stride))
        args = (mma, self.tiler, SF_VEC)
        one = (None, None, None, 0)
        sfa_layout = blockscaled.make_tmem_layout_sfa(*args, cute.slice_(layouts[2], one))
        sfb_layout = blockscaled.make_tmem_layout_sfb(*args, cute.slice_(layouts[3], one))
        fp8 = cutlass.Float8E4M3FN
        sfa_columns = 128 // 32 * (c.tile_k // 64)
        sfa_ptr = cute.recast_ptr(tmem + c.acc_columns, dtype=fp8)
        sfb_ptr = cute.recast_ptr(tmem + (c.acc_columns + sfa_columns), dtype=fp8)
        return acc, cute.make_tensor(sfa_ptr, sfa_layout), cute.make_tensor(sfb_ptr, sfb_layout)

    def _scales_to_tmem(self, sSF: cute.Tensor, tSF: cute.Tensor) -> tuple:
        """Tiled copy of one stage of scales to TMEM, with its source and destination views."""
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.cta_group), cutlass.Float8E4M3FN)
        source, destination = cute.filter_zeros(sSF), cute.filter_zeros(tSF)
        copy = tcgen05.make_s2t_copy(atom, destination)
        part = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source))
        return copy, descriptors, part.partition_D(destination)

    @cute.jit
    def mma_loop(self, operands, tmem, bars, items, k):
        """Scale copies and MMAs; commits free the stages and announce the accumulator."""
        c = self.config
        mma, _ = self.tiled_mmas()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tCrA = mma.make_fragment_A(operands[0])  # (MMA, MMA_M, MMA_K, STAGE)
        tCrB = mma.make_fragment_B(operands[1])  # (MMA, MMA_N, MMA_K, STAGE)
        tCtAccs, tCtSFA, tCtSFB = self._tmem_tensors(mma, tmem)
        fragments = (tCrA, tCrB, tCtSFA, tCtSFB)
        columns = self.plan.mma_columns(c)
        copy_a, source_a, tmem_a = self._scales_to_tmem(operands[2], tCtSFA)
        copy_b, source_b, tmem_b = self._scales_to_tmem(operands[3], tCtSFB)
        all_mask = None
        pair_mask = None
        if cutlass.const_expr(c.cluster > 1):
            all_mask = (1 << c.cluster) - 1
        if cutlass.const_expr(c.ctas == 2):
            pair_mask = Int32(3) << rank
        k_tiles = (k + (c.tile_k - 1)) // c.tile_k
        step = Int32(0)
        count = Int32(0)
        work, ring = items
        while work.found:
            acc_full, acc_empty, phase = self.acc_barriers(bars, count)
            cute.arch.mbarrier_wait(acc_empty, phase ^ 1)
            ptx.after_thread_sync()
            tCtAcc = tCtAccs[(None, None, None, count & 1)]
            tile = self.plan.tile(c, work, rank)
            # a tile of fewer than 128 rows begins inside a scale tile: 4 scales a column of 32 rows
            sfb_shift = self.plan.sfb_row(tile) % 128 // 32 * 4
            for k_tile in cutlass.range(k_tiles, unroll=1):
                s, ab_phase = step % c.stages, (step // c.stages) & 1
                cute.arch.mbarrier_wait(bars + s, ab_phase)
                s2t = (None, None, None, None, s)
                cute.copy(copy_a, source_a[s2t], tmem_a)
                cute.copy(copy_b, source_b[s2t], tmem_b)
                if cutlass.const_expr(len(columns) == 1):
                    self.multiply(columns[0], tCtAcc, fragments, sfb_shift, k_tile, s)
                else:
                    for i in cutlass.range_constexpr(len(columns)):
                        if tile.boxes == i + 1:
                            self.multiply(columns[i], tCtAcc, fragments, sfb_shift, k_tile, s)
                with cute.arch.elect_one():
                    tcgen05.commit(bars + c.stages + s, all_mask, self.cta_group)
                step += 1
            with cute.arch.elect_one():
                tcgen05.commit(acc_full, pair_mask, self.cta_group)
            work = take(ring, count, c.cluster)
            count += 1

    @cute.jit
    def multiply(self, n: cutlass.Constexpr, tCtAcc, fragments, sfb_shift, k_tile, stage):
        """The MMAs of one K tile, of ``n`` columns each."""
        tCrA, tCrB, tCtSFA, tCtSFB = fragments
        mma = self._mma(self.cta_group, self.tiler[0], n)
        for k_block in cutlass.range_constexpr(self.tiler[2] // 64):
            sf = (None, None, k_block)
            sfb = tCtSFB[sf].iterator
            if cutlass.const_expr(self.config.tile_n < 128):
                sfb = sfb + sfb_shift
            accumulate = k_tile > 0 if cutlass.const_expr(k_block == 0) else True
            mma.set(tcgen05.Field.ACCUMULATE, accumulate)
            mma.set(tcgen05.Field.SFA, tCtSFA[sf].iterator)
            mma.set(tcgen05.Field.SFB, sfb)
            crd = (None, None, k_block, stage)
            cute.gemm(mma, tCtAcc, tCrA[crd], tCrB[crd], tCtAcc)

    @cute.jit
    def acc_barriers(self, bars, count):
        """(acc_full, acc_empty, parity) of the ``count``-th accumulator."""
        first = bars + 2 * self.config.stages
        if cutlass.const_expr(self.acc_stages == 1):
            return first, first + 1, count & 1
        return first + (count & 1), first + 2 + (count & 1), (count >> 1) & 1

    # ---- epilogue

    @cute.jit
    def epilogue_loop(self, tmem, bars, items, scratch, args, n):
        """TMEM -> registers, ``width`` columns at a time; thread t of the CTA owns accumulator row
        t. The first use of a loaded register waits for its load (ptxas sees to it); the release of
        the accumulator uses none, so it alone needs tcgen05.wait::ld."""
        c, plan = self.config, self.plan
        width = plan.width(self.epilogue)
        mma, _ = self.tiled_mmas()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        tid = cute.arch.thread_idx()[0]
        tCtAccs = self._tmem_tensors(mma, tmem)[0]
        # (128, width, 1, N / width, 2)
        steps = cute.flat_divide(tCtAccs[((None, None), 0, 0, None)], (128, width))
        repeat = getattr(tcgen05.Repetition, f"x{width}")
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(repeat), Float32)
        tmem_copy = tcgen05.make_tmem_copy(load, steps[(None, None, 0, 0, 0)])
        tTR = tmem_copy.get_slice(tid).partition_S(steps)  # (T2R, 1, 1, 1, N / width, 2)
        rAcc = cute.make_rmem_tensor(((width, 1), 1, 1), Float32)
        values = cute.make_tensor(rAcc.iterator, cute.make_layout(width))
        if cutlass.const_expr(plan.scratch):
            scratch = scratch + tid // 32 * plan.scratch
        leader = rank // c.ctas * c.ctas
        lane_row = rank % c.ctas * 128 + tid
        count = Int32(0)
        work, ring = items
        while work.found:
            acc_full, acc_empty, phase = self.acc_barriers(bars, count)
            tile = plan.tile(c, work, rank)
            where = (work, tile, lane_row, n)
            num_steps = plan.steps(c, self.epilogue, tile)
            # steps after which the columns that the next accumulator uses are in registers
            release_after = -(-c.sf_columns // width) if c.overlapped else num_steps
            begun = plan.begin(self.epilogue, args, where)
            cute.arch.mbarrier_wait(acc_full, phase)
            ptx.after_thread_sync()
            for i in cutlass.range(num_steps, unroll=1):
                j = i
                if cutlass.const_expr(c.overlapped):  # noqa: SIM102 (one is compile-time)
                    if count & 1 == 0:  # accumulator 0 ends in the shared columns
                        j = num_steps - 1 - i
                cute.copy(tmem_copy, tTR[(None, None, None, 0, j, count & 1)], rAcc)
                if i == release_after - 1:
                    self.release_accumulator(acc_empty, leader)
                plan.store(self.epilogue, args, begun, values, where, j, scratch)
            work = take(ring, count, c.cluster)
            count += 1

    @cute.jit
    def release_accumulator(self, acc_empty, leader):
        """What the MMA may overwrite next is in this warp's registers."""
        cute.arch.fence_view_async_tmem_load()
        ptx.before_thread_sync()
        with cute.arch.elect_one():
            if cutlass.const_expr(self.config.ctas == 1):
                cute.arch.mbarrier_arrive(acc_empty)
            else:
                cute.arch.mbarrier_arrive(acc_empty, leader)
