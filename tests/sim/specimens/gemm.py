"""A small warp-specialised NVFP4 GEMM in which every synchronisation can be left out.

    D[m, n] = sum_k A[m, k] * SFA[m, k / 16] * B[n, k] * SFB[n, k / 16]

It is made to be broken: barriers are bare mbarriers, each wait, arrival, fence and commit stands on
its own line behind a name, and `omit=NAME` compiles the kernel without that line.
"""

from typing import Any

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.blockscaled_layout as blockscaled
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

SF_VEC = 16
EPILOGUE_WARPS = 4
MMA_WARP = 4
LOAD_WARP = 5
THREADS = 192
STORE_COLUMNS = 32

OMISSIONS: dict[str, str] = {
    "ab_full_wait": "the MMA warp does not wait for the loads",
    "ab_empty_wait": "the loads do not wait for the MMAs that read the stage",
    "ab_empty_commit": "the MMA warp never releases a stage",
    "ab_empty_early": "a stage is released by a plain arrival, before its MMAs are done",
    "acc_full_wait": "the epilogue does not wait for the accumulator",
    "acc_full_commit": "the accumulator is never announced",
    "acc_full_early": "the accumulator is announced by a plain arrival, before its MMAs are done",
    "acc_empty_wait": "the MMA warp does not wait for the epilogue before it overwrites",
    "acc_empty_arrive": "the epilogue never releases the accumulator",
    "tmem_wait_ld": "the accumulator is released before its tcgen05.ld are waited for",
    "proxy_fence": "no fence between shared-memory writes and the TMA store that reads them",
    "store_barrier": "no barrier between shared-memory writes and the TMA store",
    "store_read_wait": "the store buffer is overwritten while a TMA store may still read it",
    "store_reuse_barrier": "only the storing thread knows that the store buffer is free",
    "tmem_pointer_barrier": "the TMEM address is read without waiting for the allocation",
    "tx_short": "the full barrier expects 16 bytes too few",
    "tx_long": "the full barrier expects 16 bytes too many",
    "full_parity": "the consumer of the loads starts with the wrong parity",
    "empty_parity": "the producer of the loads starts with the wrong parity",
    "acc_empty_parity": "the MMA warp starts with the wrong parity on the free accumulator",
    "init_barrier": "the barriers are used by other warps before their initialisation is ordered",
    "init_twice": "the full barriers are initialised again while in use",
    "dealloc": "TMEM is not freed",
    "dealloc_early": "TMEM is freed before the epilogue is done",
    "final_store_wait": "the kernel ends with a TMA store that was never waited for",
    "scale_copy_b": "the scales of B are not copied to TMEM",
}

PAIR_OMISSIONS: dict[str, str] = {
    "cluster_sync": "no cluster barrier between initialisation and the first remote arrival",
    "exit_sync": "a CTA may leave, and free TMEM, while its peer still needs it",
    "peer_acc_release": "only the leader's epilogue releases the accumulator",
    "commit_mask": "the release of a stage is not multicast to the peer CTA",
    "drain": "a CTA may leave before the releases by the other pair have arrived",
}


class Nvfp4Gemm:
    """NVFP4 x NVFP4 -> fp32 GEMM, both operands K-major, one M tile per cluster, all N tiles.

    Shapes: A (M, K), B (N, K) packed E2M1; SFA, SFB UE4M3 in 128x4 tiles (SWIZZLE_32_4_4); D (M, N)
    fp32. M a multiple of 128 * cluster_m, N of `tile_n`, K of `tile_k`.

    Warps: 0-3 epilogue (one accumulator row per thread), 4 TMEM, scale copies and MMAs, 5 loads.

    | barrier   | arrivals | by                                                        |
    |-----------|----------|-----------------------------------------------------------|
    | ab_full   | 1 + tx   | load warp of the leader (arms), TMA bytes of both CTAs      |
    | ab_empty  | pairs    | one commit per MMA issuer in the cluster, multicast         |
    | acc_full  | 1        | commit of the MMA issuer, multicast over its pair           |
    | acc_empty | 4 * ctas | one arrival per epilogue warp, at the leader                |

    `pair` uses cta_group::2 (M = 256 over two CTAs). `cluster_m` > CTAs per MMA multicasts B and
    its scales over the cluster. `omit` names one entry of OMISSIONS or PAIR_OMISSIONS.
    """

    def __init__(
        self,
        tile_n: int = 128,
        tile_k: int = 256,
        num_ab_stage: int = 2,
        pair: bool = False,
        cluster_m: int | None = None,
        omit: str | None = None,
    ):
        self.ctas = 2 if pair else 1
        self.cluster_m = self.ctas if cluster_m is None else cluster_m
        if tile_n not in (128, 256):
            raise ValueError(f"tile_n must be 128 or 256 (whole tiles of scales), got {tile_n}")
        if self.cluster_m % self.ctas:
            raise ValueError(f"cluster_m must be a multiple of {self.ctas}, got {self.cluster_m}")
        known = OMISSIONS | (PAIR_OMISSIONS if self.cluster_m > 1 else {})
        if omit is not None and omit not in known:
            raise ValueError(f"omit must be one of {sorted(known)}, got {omit!r}")
        self.omit = omit
        self.num_ab_stage = num_ab_stage
        self.mma_tiler = (128 * self.ctas, tile_n, tile_k)
        self.cta_group = tcgen05.CtaGroup.TWO if pair else tcgen05.CtaGroup.ONE
        self.tmem_columns = 2 * tile_n  # accumulator and scales
        # the even CTA's epilogue is enough to release the accumulator, if the odd one does not
        peers = self.ctas if self.has("peer_acc_release") else 1
        self.acc_arrivals = EPILOGUE_WARPS * peers
        cta_bytes = (128 + tile_n // self.ctas) * tile_k // 2
        cta_bytes += (128 + tile_n) * tile_k // SF_VEC
        self.tx_bytes = cta_bytes * self.ctas + {"tx_short": -16, "tx_long": 16}.get(omit or "", 0)

    def has(self, name: str) -> bool:
        """Whether the synchronisation `name` is compiled in."""
        return self.omit != name

    def _mma(self, cta_group: Any, m: int, n: int) -> cute.TiledMma:
        return sm100.make_blockscaled_trivial_tiled_mma(
            cutlass.Float4E2M1FN,
            cutlass.Float4E2M1FN,
            OperandMajorMode.K,
            OperandMajorMode.K,
            cutlass.Float8E4M3FN,
            SF_VEC,
            cta_group,
            (m, n),
        )

    def _layouts(self, tiled_mma: cute.TiledMma) -> tuple:
        stages, fp4 = self.num_ab_stage, cutlass.Float4E2M1FN
        return (
            sm100.make_smem_layout_a(tiled_mma, self.mma_tiler, fp4, stages),
            sm100.make_smem_layout_b(tiled_mma, self.mma_tiler, fp4, stages),
            blockscaled.make_smem_layout_sfa(tiled_mma, self.mma_tiler, SF_VEC, stages),
            blockscaled.make_smem_layout_sfb(tiled_mma, self.mma_tiler, SF_VEC, stages),
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        sfa: cute.Pointer,
        sfb: cute.Pointer,
        d: cute.Pointer,
        problem: tuple[cutlass.Int32, cutlass.Int32, cutlass.Int32],
        stream: cuda.CUstream,
    ):
        m, n, k = problem
        k = cute.assume(k, 32)
        n = cute.assume(n, 32)
        mA = cute.make_tensor(a, cute.make_layout((m, k, 1), stride=(k, 1, 0)))
        mB = cute.make_tensor(b, cute.make_layout((n, k, 1), stride=(k, 1, 0)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        mSFA = cute.make_tensor(sfa, blockscaled.tile_atom_to_shape_SF(mA.shape, SF_VEC))
        mSFB = cute.make_tensor(sfb, blockscaled.tile_atom_to_shape_SF(mB.shape, SF_VEC))

        tiler = self.mma_tiler
        tiled_mma = self._mma(self.cta_group, tiler[0], tiler[1])
        sfb_mma = self._mma(tcgen05.CtaGroup.ONE, 128, tiler[1])
        sfb_tiler = (128, tiler[1], tiler[2])
        cluster = (self.cluster_m, 1, 1)
        vmnk = cute.tiled_divide(cute.make_layout(cluster), (tiled_mma.thr_id.shape,))
        sfb_vmnk = cute.tiled_divide(cute.make_layout(cluster), (sfb_mma.thr_id.shape,))
        layouts = self._layouts(tiled_mma)
        stage = [cute.slice_(layout, (None, None, None, 0)) for layout in layouts]

        load_a = cpasync.CopyBulkTensorTileG2SOp(self.cta_group)
        load_b = sm100.cluster_shape_to_tma_atom_B(cluster, tiled_mma.thr_id)
        load_sfb = sm100.cluster_shape_to_tma_atom_SFB(cluster, tiled_mma.thr_id)
        make_a, make_b = cute.nvgpu.make_tiled_tma_atom_A, cute.nvgpu.make_tiled_tma_atom_B
        int16 = cutlass.Int16
        tma_a = make_a(load_a, mA, stage[0], tiler, tiled_mma, vmnk.shape)
        tma_b = make_b(load_b, mB, stage[1], tiler, tiled_mma, vmnk.shape)
        tma_sfa = make_a(load_a, mSFA, stage[2], tiler, tiled_mma, vmnk.shape, internal_type=int16)
        tma_sfb = make_b(
            load_sfb, mSFB, stage[3], sfb_tiler, sfb_mma, sfb_vmnk.shape, internal_type=int16
        )
        store_layout = cute.make_layout((128, STORE_COLUMNS), stride=(STORE_COLUMNS, 1))
        tma_d = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileS2GOp(), mD, store_layout, (128, STORE_COLUMNS)
        )
        self.kernel(
            (tma_a[0], tma_b[0], tma_sfa[0], tma_sfb[0], tma_d[0]),
            (tma_a[1], tma_b[1], tma_sfa[1], tma_sfb[1], tma_d[1]),
            (m, n, k),
        ).launch(
            grid=(m // 128, 1, 1),
            block=(THREADS, 1, 1),
            cluster=cluster,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, problem: tuple):
        """Device entry: storage, barriers, TMEM, then one method per warp role."""
        tiler = self.mma_tiler
        tiled_mma = self._mma(self.cta_group, tiler[0], tiler[1])
        layouts = self._layouts(tiled_mma)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        num_tiles = (problem[1] // tiler[1], problem[2] // tiler[2])  # (N tiles, K tiles)

        smem = SmemAllocator()
        bars = smem.allocate_array(cutlass.Int64, num_elems=2 * self.num_ab_stage + 2)
        holder = smem.allocate_array(cutlass.Int32, num_elems=1)
        fp4, fp8 = cutlass.Float4E2M1FN, cutlass.Float8E4M3FN
        operands = (
            smem.allocate_tensor(fp4, layouts[0].outer, 1024, layouts[0].inner),
            smem.allocate_tensor(fp4, layouts[1].outer, 1024, layouts[1].inner),
            smem.allocate_tensor(fp8, layouts[2], 1024),
            smem.allocate_tensor(fp8, layouts[3], 1024),
        )
        columns = STORE_COLUMNS
        store = cute.make_layout((128, columns, 2), stride=(columns, 1, 128 * columns))
        sD = smem.allocate_tensor(cutlass.Float32, store, 1024)

        if warp == LOAD_WARP:
            self.init_barriers(bars)
        self.sync_init()
        if warp == MMA_WARP:
            cute.arch.alloc_tmem(self.tmem_columns, holder, is_two_cta=self.ctas == 2)
        if cutlass.const_expr(self.has("tmem_pointer_barrier")):  # noqa: SIM102
            if warp != LOAD_WARP:
                cute.arch.barrier(barrier_id=2, number_of_threads=THREADS - 32)

        if warp == LOAD_WARP:
            self.load_loop(atoms, tensors, operands, bars, rank, num_tiles)
        else:
            tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
            if warp == MMA_WARP and rank % self.ctas == 0:
                self.mma_loop(operands, tmem, bars, rank, num_tiles)
            if warp < EPILOGUE_WARPS:
                self.epilogue_loop(atoms[4], tensors[4], sD, tmem, bars, rank, num_tiles)

        self.sync_exit()
        if warp == MMA_WARP:
            cute.arch.relinquish_tmem_alloc_permit(is_two_cta=self.ctas == 2)
            if cutlass.const_expr(self.has("dealloc")):
                tmem = cute.arch.retrieve_tmem_ptr(cutlass.Float32, 16, holder)
                cute.arch.dealloc_tmem(tmem, self.tmem_columns, is_two_cta=self.ctas == 2)

    @cute.jit
    def init_barriers(self, bars: cute.Pointer):
        """One thread initialises ab_full[], ab_empty[], acc_full and acc_empty, in this order."""
        stages = self.num_ab_stage
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(stages):
                cute.arch.mbarrier_init(bars + stage, 1)
                cute.arch.mbarrier_init(bars + stages + stage, self.cluster_m // self.ctas)
            cute.arch.mbarrier_init(bars + 2 * stages, 1)
            cute.arch.mbarrier_init(bars + 2 * stages + 1, self.acc_arrivals)
        cute.arch.mbarrier_init_fence()

    @cute.jit
    def sync_init(self):
        """The barriers are initialised before any warp of the cluster uses them."""
        if cutlass.const_expr(self.cluster_m > 1 and self.has("cluster_sync")):
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        elif cutlass.const_expr(self.has("init_barrier")):
            cute.arch.sync_threads()

    @cute.jit
    def sync_exit(self):
        """No CTA frees its TMEM, or leaves, while the pair or the cluster still needs it."""
        if cutlass.const_expr(self.cluster_m > 1 and self.has("exit_sync")):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        elif cutlass.const_expr(self.has("dealloc_early")):
            cute.arch.sync_threads()

    @cute.jit
    def load_loop(self, atoms, tensors, operands, bars, rank, num_tiles):
        """Fill the stages: A, B and both scales of one K tile each; the leader arms ab_full."""
        tiler, stages = self.mma_tiler, self.num_ab_stage
        cluster = cute.make_layout((self.cluster_m, 1, 1))
        tiled_mma = self._mma(self.cta_group, tiler[0], tiler[1])
        sfb_mma = self._mma(tcgen05.CtaGroup.ONE, 128, tiler[1])
        vmnk = cute.tiled_divide(cluster, (tiled_mma.thr_id.shape,))
        sfb_vmnk = cute.tiled_divide(cluster, (sfb_mma.thr_id.shape,))
        coord, sfb_coord = vmnk.get_flat_coord(rank), sfb_vmnk.get_flat_coord(rank)
        b_mask = None
        sfb_mask = None
        if cutlass.const_expr(self.cluster_m > self.ctas):
            b_mask = cpasync.create_tma_multicast_mask(vmnk, coord, mcast_mode=1)
        if cutlass.const_expr(self.cluster_m > 1):
            sfb_mask = cpasync.create_tma_multicast_mask(sfb_vmnk, sfb_coord, mcast_mode=1)

        thr_mma, thr_sfb = tiled_mma.get_slice(coord[0]), sfb_mma.get_slice(0)
        mk, nk = (tiler[0], tiler[2]), (tiler[1], tiler[2])
        everything = (None, None, None)
        # each (MMA, MMA_MN, MMA_K, REST_MN, REST_K, 1)
        gA = thr_mma.partition_A(cute.local_tile(tensors[0], mk, everything))
        gB = thr_mma.partition_B(cute.local_tile(tensors[1], nk, everything))
        gSFA = thr_mma.partition_A(cute.local_tile(tensors[2], mk, everything))
        gSFB = thr_sfb.partition_B(cute.local_tile(tensors[3], nk, everything))
        one = cute.make_layout(1)
        peers = cute.make_layout(cute.slice_(vmnk, (0, None, 0, 0)).shape)
        sfb_peers = cute.make_layout(cute.slice_(sfb_vmnk, (0, None, 0, 0)).shape)
        # each (TMA, STAGE) and (TMA, REST_MN, REST_K, 1)
        tAsA, tAgA = self._partition(atoms[0], 0, one, operands[0], gA)
        tBsB, tBgB = self._partition(atoms[1], coord[1], peers, operands[1], gB)
        tAsSFA, tAgSFA = self._partition(atoms[2], 0, one, operands[2], gSFA)
        tBsSFB, tBgSFB = self._partition(atoms[3], sfb_coord[1], sfb_peers, operands[3], gSFB)
        tAsSFA, tAgSFA = cute.filter_zeros(tAsSFA), cute.filter_zeros(tAgSFA)
        tBsSFB, tBgSFB = cute.filter_zeros(tBsSFB), cute.filter_zeros(tBgSFB)

        m_tile = cute.arch.block_idx()[0] // self.ctas
        first = 0 if cutlass.const_expr(not self.has("empty_parity")) else 1
        step = cutlass.Int32(0)
        for n_tile in cutlass.range(num_tiles[0], unroll=1):
            for k_tile in cutlass.range(num_tiles[1], unroll=1):
                stage, phase = step % stages, (step // stages) & 1
                full, empty = bars + stage, bars + stages + stage
                if cutlass.const_expr(self.has("ab_empty_wait")):
                    cute.arch.mbarrier_wait(empty, phase ^ first)
                if cutlass.const_expr(not self.has("init_twice")):
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_init(full, 1)
                if coord[0] == 0:
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(full, self.tx_bytes)
                src = (None, m_tile, k_tile, 0)
                nsrc, dst = (None, n_tile, k_tile, 0), (None, stage)
                cute.copy(atoms[0], tAgA[src], tAsA[dst], tma_bar_ptr=full)
                cute.copy(atoms[1], tBgB[nsrc], tBsB[dst], tma_bar_ptr=full, mcast_mask=b_mask)
                cute.copy(atoms[2], tAgSFA[src], tAsSFA[dst], tma_bar_ptr=full)
                cute.copy(
                    atoms[3],
                    tBgSFB[nsrc],
                    tBsSFB[dst],
                    tma_bar_ptr=full,
                    mcast_mask=sfb_mask,
                )
                step += 1
        if cutlass.const_expr(self.cluster_m > self.ctas and self.has("drain")):
            for i in cutlass.range(step, step + stages, unroll=1):
                phase = (i // stages) & 1
                cute.arch.mbarrier_wait(bars + stages + i % stages, phase ^ 1)

    def _partition(self, atom, coord, layout, s, g):
        return cpasync.tma_partition(
            atom, coord, layout, cute.group_modes(s, 0, 3), cute.group_modes(g, 0, 3)
        )

    def _scales_to_tmem(self, sSF: cute.Tensor, tSF: cute.Tensor):
        """Tiled copy of one stage of scales to TMEM, with its source and destination views."""
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.cta_group), cutlass.Float8E4M3FN)
        source, destination = cute.filter_zeros(sSF), cute.filter_zeros(tSF)
        copy = tcgen05.make_s2t_copy(atom, destination)
        part = copy.get_slice(0)
        descriptors = tcgen05.get_s2t_smem_desc_tensor(copy, part.partition_S(source))
        return copy, descriptors, part.partition_D(destination)

    def _tmem_tensors(self, tiled_mma: cute.TiledMma, tmem: cute.Pointer):
        """Accumulator, SFA and SFB in TMEM, one after the other from column 0."""
        layouts = self._layouts(tiled_mma)
        shape = tiled_mma.partition_shape_C(self.mma_tiler[:2])
        acc = cute.make_tensor(tmem, tiled_mma.make_fragment_C(shape).layout)
        fp8 = cutlass.Float8E4M3FN
        sf_args = (tiled_mma, self.mma_tiler, SF_VEC)
        stage = (None, None, None, 0)
        offset = tcgen05.find_tmem_tensor_col_offset(acc)
        sfa = cute.make_tensor(
            cute.recast_ptr(tmem + offset, dtype=fp8),
            blockscaled.make_tmem_layout_sfa(*sf_args, cute.slice_(layouts[2], stage)),
        )
        offset += tcgen05.find_tmem_tensor_col_offset(sfa)
        sfb = cute.make_tensor(
            cute.recast_ptr(tmem + offset, dtype=fp8),
            blockscaled.make_tmem_layout_sfb(*sf_args, cute.slice_(layouts[3], stage)),
        )
        return acc, sfa, sfb

    @cute.jit
    def mma_loop(self, operands, tmem, bars, rank, num_tiles):
        """Scale copies and MMAs, one accumulator per N tile; commits free and announce."""
        tiler, stages = self.mma_tiler, self.num_ab_stage
        tiled_mma = self._mma(self.cta_group, tiler[0], tiler[1])
        tCrA, tCrB = tiled_mma.make_fragment_A(operands[0]), tiled_mma.make_fragment_B(operands[1])
        tCtAcc, tCtSFA, tCtSFB = self._tmem_tensors(tiled_mma, tmem)
        copy_a, source_a, tmem_a = self._scales_to_tmem(operands[2], tCtSFA)
        copy_b, source_b, tmem_b = self._scales_to_tmem(operands[3], tCtSFB)
        acc_full, acc_empty = bars + 2 * stages, bars + 2 * stages + 1
        all_mask = None
        pair_mask = None
        if cutlass.const_expr(self.cluster_m > 1):
            all_mask = (1 << self.cluster_m) - 1
            if cutlass.const_expr(not self.has("commit_mask")):
                all_mask = cutlass.Int32(1) << rank
        if cutlass.const_expr(self.ctas == 2):
            pair_mask = cutlass.Int32(3) << rank

        full_first = 1 if cutlass.const_expr(not self.has("full_parity")) else 0
        acc_first = 0 if cutlass.const_expr(not self.has("acc_empty_parity")) else 1
        step = cutlass.Int32(0)
        for n_tile in cutlass.range(num_tiles[0], unroll=1):
            if cutlass.const_expr(self.has("acc_empty_wait")):
                cute.arch.mbarrier_wait(acc_empty, (n_tile & 1) ^ acc_first)
            for k_tile in cutlass.range(num_tiles[1], unroll=1):
                stage, phase = step % stages, (step // stages) & 1
                if cutlass.const_expr(self.has("ab_full_wait")):
                    cute.arch.mbarrier_wait(bars + stage, phase ^ full_first)
                s2t = (None, None, None, None, stage)
                cute.copy(copy_a, source_a[s2t], tmem_a)
                if cutlass.const_expr(self.has("scale_copy_b")):
                    cute.copy(copy_b, source_b[s2t], tmem_b)
                for k_block in cutlass.range_constexpr(tiler[2] // 64):
                    crd = (None, None, k_block, stage)
                    sf = (None, None, k_block)
                    accumulate = k_tile > 0 if cutlass.const_expr(k_block == 0) else True
                    tiled_mma.set(tcgen05.Field.ACCUMULATE, accumulate)
                    tiled_mma.set(tcgen05.Field.SFA, tCtSFA[sf].iterator)
                    tiled_mma.set(tcgen05.Field.SFB, tCtSFB[sf].iterator)
                    cute.gemm(tiled_mma, tCtAcc, tCrA[crd], tCrB[crd], tCtAcc)
                with cute.arch.elect_one():
                    if cutlass.const_expr(not self.has("ab_empty_early")):
                        cute.arch.mbarrier_arrive(bars + stages + stage)
                    elif cutlass.const_expr(self.has("ab_empty_commit")):
                        tcgen05.commit(bars + stages + stage, all_mask, self.cta_group)
                step += 1
            with cute.arch.elect_one():
                if cutlass.const_expr(not self.has("acc_full_early")):
                    cute.arch.mbarrier_arrive(acc_full)
                elif cutlass.const_expr(self.has("acc_full_commit")):
                    tcgen05.commit(acc_full, pair_mask, self.cta_group)

    @cute.jit
    def epilogue_loop(self, atom, mD, sD, tmem, bars, rank, num_tiles):
        """TMEM -> registers -> shared -> TMA store, 32 columns at a time, one row per thread."""
        tiler, stages, columns = self.mma_tiler, self.num_ab_stage, STORE_COLUMNS
        tiled_mma = self._mma(self.cta_group, tiler[0], tiler[1])
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        acc_full, acc_empty = bars + 2 * stages, bars + 2 * stages + 1
        tCtAcc = self._tmem_tensors(tiled_mma, tmem)[0]
        # (128, 32, 1, N / 32)
        steps = cute.flat_divide(tCtAcc[((None, None), 0, 0)], (128, columns))
        load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition.x32), cutlass.Float32)
        tmem_copy = tcgen05.make_tmem_copy(load, steps[(None, None, 0, 0)])
        tTR = tmem_copy.get_slice(tid).partition_S(steps)  # (T2R, 1, 1, 1, N / 32)
        # a warp reads 32 rows at once, a thread one of them
        rAcc = cute.make_rmem_tensor(((columns, 1), 1, 1), cutlass.Float32)
        gD = cute.local_tile(mD, (128, columns), (cute.arch.block_idx()[0], None))
        tDsD, tDgD = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        leader = rank // self.ctas * self.ctas
        num_steps = tiler[1] // columns

        for n_tile in cutlass.range(num_tiles[0], unroll=1):
            if cutlass.const_expr(self.has("acc_full_wait")):
                cute.arch.mbarrier_wait(acc_full, n_tile & 1)
            for i in cutlass.range(num_steps, unroll=1):
                cute.copy(tmem_copy, tTR[(None, None, None, 0, i)], rAcc)
                if i == num_steps - 1:
                    self.release_acc(acc_empty, leader, rank)
                if cutlass.const_expr(self.has("store_read_wait")):  # noqa: SIM102
                    if warp == 0:
                        # one group, the other buffer's, may still be on its way
                        cute.arch.cp_async_bulk_wait_group(1, read=True)
                if cutlass.const_expr(self.has("store_reuse_barrier")):
                    cute.arch.barrier(barrier_id=1, number_of_threads=128)
                buffer = i & 1
                row = cute.make_tensor(rAcc.iterator, cute.make_layout(columns))
                cute.autovec_copy(row, sD[(tid, None, buffer)])
                if cutlass.const_expr(self.has("proxy_fence")):
                    cute.arch.fence_view_async_shared()
                if cutlass.const_expr(self.has("store_barrier")):
                    cute.arch.barrier(barrier_id=1, number_of_threads=128)
                if warp == 0:
                    cute.copy(atom, tDsD[(None, buffer)], tDgD[(None, n_tile * num_steps + i)])
                    cute.arch.cp_async_bulk_commit_group()
        if cutlass.const_expr(self.has("final_store_wait")):  # noqa: SIM102
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def release_acc(self, acc_empty: cute.Pointer, leader, rank):
        """This warp has the last columns in registers: the accumulator may be overwritten."""
        if cutlass.const_expr(self.has("tmem_wait_ld")):
            cute.arch.fence_view_async_tmem_load()
        if cutlass.const_expr(not self.has("peer_acc_release")):
            if rank == leader:
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(acc_empty)
        elif cutlass.const_expr(self.has("acc_empty_arrive")):
            with cute.arch.elect_one():
                if cutlass.const_expr(self.ctas == 1):
                    cute.arch.mbarrier_arrive(acc_empty)
                else:
                    cute.arch.mbarrier_arrive(acc_empty, leader)
