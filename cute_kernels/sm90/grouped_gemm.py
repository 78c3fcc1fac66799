"""Grouped GEMM on Hopper: NVFP4 weights decoded in registers, bf16 rows, wgmma with the operands
swapped.

    out[r, f] = epilogue( sum_k x[r, k] * code(w[e, f, k]) * scale(w[e, f, k // 16]) )     e =
    expert of row r

Weights are M and come from registers; routed rows (tokens) are N and come from shared memory.
"""

import dataclasses
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.memory
import cutlass.utils.hopper_helpers as sm90_utils
from cutlass import BFloat16, Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from cute_kernels.compile import Ptr
from cute_kernels.device.ptx import allow_next_kernel, wait_for_previous_kernel
from cute_kernels.sm90 import layout
from cute_kernels.sm90.config import Sm90Config
from cute_kernels.sm90.dequant import decode_step
from cute_kernels.sm90.epilogues import StoreRows
from cute_kernels.sm90.finish import Combine, make_finish, num_chunks
from cute_kernels.sm90.loads import ContiguousRows, GatheredRows
from cute_kernels.sm90.scheduler import TILE_WORDS, Tile, TokenSplit, load_tile
from cute_kernels.sm90.warp_loop import WarpLoop

TILE_SLOTS = 4  # tiles announced ahead
WORDS = layout.BLOCK_BYTES // 4


class Args(NamedTuple):
    """Run-time arguments, all addresses and sizes.

    blob       uint8, `weights.Sm90Weight.blob`
    x          bf16 (num_rows, k), or (tokens, k) with row_token
    row_token  int32 (num_rows,) or None: row of x of each routed row
    out        bf16 or fp32 (num_rows, out_features)
    offsets    int32 (num_experts + 1,)
    counters   int32 (2,), zeros before the first launch; every launch leaves zeros: next unit, CTAs
               done
    partial    fp32 (chunks, num_rows, padded weight rows), only with split_k
    """

    blob: Any
    x: Any
    row_token: Any
    out: Any
    offsets: Any
    counters: Any
    partial: Any
    num_experts: Any
    num_rows: Any
    k: Any
    weight_rows: Any
    chunk_steps: Any  # k128 steps of a chunk
    ctas: Any


class Shared(NamedTuple):
    """Shared memory of one CTA: tensors and mbarriers."""

    rows: Any  # bf16 (max_tokens, 64, slab of all stages) swizzled
    codes: Any  # uint32 (4, 128, block)
    scales: Any  # uint32 (2, 32, block)
    tiles: Any  # int32 (TILE_WORDS, TILE_SLOTS)
    staging: Any  # address
    ab_full: Any
    ab_empty: Any
    tile_full: Any
    tile_empty: Any


class Geometry(NamedTuple):
    """Sizes that follow from Args."""

    k64: Int32  # k64 blocks of the packed weight, even
    tiles128: Int32  # 128-row tiles of the packed weight
    row_tiles: Int32  # CTA tiles along the weight rows
    chunks: Int32


def opaque(value: Int32) -> Int32:
    """The same value, computed here and nowhere earlier as far as the compiler knows."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


@dataclasses.dataclass(frozen=True)
class Sm90GroupedGemm:
    """Persistent, warp-specialised: one or two warpgroups of consumers, 1 producer warp, and the
    warps that the load adds.

    CTA tile        128 * row_tiles weight rows x up to max_tokens routed rows; of two warpgroups,
                    w has the w-th m64 of every 128 rows, one alone has both. N of the wgmma is the
                    smallest of token_sizes that holds the tile: a run-time choice between inlined
                    main loops.
    Stage           row_tiles x stage_k64 x 4608 bytes of weights (one bulk copy per row tile) and
                    max_tokens x 64 bf16 per k64, of which those of the token size are loaded
    Pipelines       ab_full[stage]: 1 arrival (producer, with the bytes) and those of the load's
                    warps; ab_empty[stage]: every consumer thread; tile_full[slot]: 1 (producer);
                    tile_empty[slot]: one per consumer warp and per warp of the load
    Main loop       few tokens: `warp_loop`. More: per block of 64 x 64, start its wgmma, wait
                    until those of the block before are done, load 16 + 8 bytes of the next block
                    and decode them into the fragment that is free now. A stage is released as
                    soon as its last block is known to be done.
    Split K         partial sums, then `finish.Combine` in the same launch
    Limits          K a multiple of 16, output features a multiple of 8, sm_90a.
    """

    load: ContiguousRows | GatheredRows
    epilogue: StoreRows
    config: Sm90Config
    tile_slots = TILE_SLOTS

    @property
    def name(self) -> str:
        return f"sm90_w4a16_{self.config.name}_{self.load.name}{self.epilogue.name}"

    @property
    def arguments(self) -> tuple[Any, ...]:
        i32 = "i32"
        args = Args(
            Ptr("Uint8", 128),
            Ptr("BFloat16", 16),
            self.load.row_token,
            Ptr(self.epilogue.dtype, 16),
            Ptr("Int32", 4),
            Ptr("Int32", 4),
            Ptr("Float32", 16),
            i32,
            i32,
            i32,
            i32,
            i32,
            i32,
        )
        return args, self.epilogue.arguments

    @property
    def consumer_warps(self) -> int:
        return 4 * self.config.warpgroups

    @property
    def split(self) -> TokenSplit:
        return TokenSplit(self.config.max_tokens, self.config.token_step)

    @cute.jit
    def __call__(self, args: Any, epilogue_args: Any, stream: Any):
        self.kernel.set_name_prefix(self.name)
        self.kernel(self.load.make_tma(self, args), args, epilogue_args).launch(
            grid=[args.ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,
            use_pdl=True,
            stream=stream,
        )
        if cutlass.const_expr(self.config.split_k):
            Combine(self.epilogue).launch(args, epilogue_args, self.name + "_combine", stream)

    def rows_layout(self, *shape: int) -> cute.ComposedLayout:
        """(rows, 64[, slab]) of routed rows: 128 bytes each, 128-byte swizzle."""
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
        shape = (shape[0], layout.BLOCK_K, *shape[1:])
        return cute.tile_to_shape(atom, shape, order=tuple(range(len(shape))))

    def slabs(self, shared: Any, size: int) -> cute.Tensor:
        """The first ``size`` rows of every slab: (size, 64, slab)."""
        c = self.config
        shape = (size, layout.BLOCK_K, c.num_stages * c.stage_k64)
        stride = (layout.BLOCK_K, 1, c.max_tokens * layout.BLOCK_K)
        return cute.make_tensor(shared.rows.iterator, cute.make_layout(shape, stride=stride))

    @cute.kernel
    def kernel(self, tma: Any, args: Any, epilogue_args: Any):
        tidx, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        shared = self._allocate()
        if warp == 0:
            with cute.arch.elect_one():
                for s in cutlass.range_constexpr(self.config.num_stages):
                    cute.arch.mbarrier_init(shared.ab_full + s, 1 + self.load.arrivals)
                    cute.arch.mbarrier_init(shared.ab_empty + s, 32 * self.consumer_warps)
                for s in cutlass.range_constexpr(TILE_SLOTS):
                    cute.arch.mbarrier_init(shared.tile_full + s, 1)
                    waiting = self.consumer_warps + self.load.warps
                    cute.arch.mbarrier_init(shared.tile_empty + s, waiting)
                cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        wait_for_previous_kernel()
        geometry = self._geometry(args)
        if warp >= self.consumer_warps:
            cute.arch.setmaxregister_decrease(self.config.producer_registers)
            if warp == self.consumer_warps:
                self.produce(tma, args, geometry, shared)
            elif warp <= self.consumer_warps + self.load.warps:
                self.load.run(self, args, geometry, shared)
        else:
            cute.arch.setmaxregister_increase(self.config.consumer_registers)
            self.consume(tidx, args, epilogue_args, geometry, shared)

    def _allocate(self) -> Shared:
        c = self.config
        smem = cutlass.memory.SmemAllocator()
        rows_layout = self.rows_layout(c.max_tokens, c.num_stages * c.stage_k64)
        rows = smem.allocate_tensor(BFloat16, rows_layout.outer, 1024, rows_layout.inner)
        blocks = c.num_stages * c.weight_stage_bytes // layout.BLOCK_BYTES
        weights = smem.allocate_tensor(Uint32, cute.make_layout(blocks * WORDS), 128)
        codes = cute.make_tensor(
            weights.iterator, cute.make_layout((4, 128, blocks), stride=(1, 4, WORDS))
        )
        scales = cute.make_tensor(
            weights.iterator + layout.CODE_BYTES // 4,
            cute.make_layout((2, 32, blocks), stride=(1, 2, WORDS)),
        )
        staging = None
        if not c.split_k:
            words = c.warpgroups * c.staging_bytes // 4
            staging = smem.allocate_tensor(Uint32, cute.make_layout(words), 128)
            staging = Int32(staging.iterator.toint())
        tiles = smem.allocate_tensor(Int32, cute.make_layout((TILE_WORDS, TILE_SLOTS)), 16)
        bars = [
            smem.allocate_array(cutlass.Int64, n) for n in (c.num_stages,) * 2 + (TILE_SLOTS,) * 2
        ]
        return Shared(rows, codes, scales, tiles, staging, *bars)

    @cute.jit
    def _geometry(self, args: Any) -> Geometry:
        k64 = (args.k + (layout.TILE_K - 1)) // layout.TILE_K * (layout.TILE_K // layout.BLOCK_K)
        tiles128 = (args.weight_rows + (layout.TILE_ROWS - 1)) // layout.TILE_ROWS
        row_tiles = (tiles128 + (self.config.row_tiles - 1)) // self.config.row_tiles
        chunks = num_chunks(args) if cutlass.const_expr(self.config.split_k) else Int32(1)
        return Geometry(k64, tiles128, row_tiles, chunks)

    def first_step(self, args: Any, chunk: Int32) -> Int32:
        return chunk * args.chunk_steps if self.config.split_k else Int32(0)

    @cute.jit
    def _steps(self, args: Any, geometry: Any, chunk: Int32):
        """First k128 step of a chunk, and how many."""
        first, count = Int32(0), geometry.k64 // 2
        if cutlass.const_expr(self.config.split_k):
            first = self.first_step(args, chunk)
            count = cutlass.min(args.chunk_steps, count - first)
        return first, count

    # ---- producer

    @cute.jit
    def produce(self, tma: Any, args: Any, geometry: Any, shared: Any):
        """One warp: finds tiles, announces them, loads their stages."""
        lane = cute.arch.lane_idx()
        offsets = args.offsets.toint()
        unit, _, _ = cute.arch.block_idx()
        base = (Int32(0), Int32(0))
        stage, phase, slot, slot_phase = Int32(0), Int32(1), Int32(0), Int32(1)
        more = cutlass.Boolean(True)
        while more:
            tile, base = self.split.find(
                offsets, args.num_experts, geometry.row_tiles, geometry.chunks, unit, base
            )
            cute.arch.mbarrier_wait(shared.tile_empty + slot, slot_phase)
            if lane == 0:
                values = (*tile[:-1], self._steps(args, geometry, tile.chunk)[1])
                for i in cutlass.range_constexpr(len(values)):
                    shared.tiles[i, slot] = values[i]
                cute.arch.mbarrier_arrive(shared.tile_full + slot)
            slot += 1
            if slot == TILE_SLOTS:
                slot = Int32(0)
                slot_phase ^= 1
            more = tile.expert >= 0
            if more:
                following = Int32(0)
                if lane == 0:
                    following = args.ctas + cute.arch.atomic_add(
                        args.counters.llvm_ptr, Int32(1), sem="relaxed", scope="gpu"
                    )
                low = 0
                for i, size in enumerate(self.load.sizes(self.config)):
                    if tile.n > low and tile.n <= size:
                        stage, phase = self.load_stages(
                            size, tma[i], args, geometry, shared, tile, (stage, phase)
                        )
                    low = size
                unit = cute.arch.shuffle_sync(following, 0)
        allow_next_kernel()
        if lane == 0:  # the last CTA to stop leaves the counters as it found them
            done = cute.arch.atomic_add(
                (args.counters + 1).llvm_ptr, Int32(1), sem="acq_rel", scope="gpu"
            )
            if done == args.ctas - 1:
                args.counters[0] = Int32(0)
                args.counters[1] = Int32(0)

    @cute.jit
    def load_stages(
        self,
        size: cutlass.Constexpr,
        tma: Any,
        args: Any,
        geometry: Any,
        shared: Any,
        tile: Any,
        state: tuple[Int32, Int32],
    ):
        """The stages of one tile, whose token size is ``size``. Returns (stage, phase)."""
        c = self.config
        stage, phase = state
        run = c.stage_k64 * 2 * layout.BLOCK_BYTES  # bytes of a 128-row tile in a stage
        tile_bytes = Int64(geometry.k64) * (2 * layout.BLOCK_BYTES)
        first, steps = self._steps(args, geometry, tile.chunk)
        source = args.blob.toint() + Int64(tile.expert) * geometry.tiles128 * tile_bytes
        second = cutlass.min(
            tile.m * c.row_tiles + 1, geometry.tiles128 - 1
        )  # past the end: any rows will do
        sources = [source + tile.m * c.row_tiles * tile_bytes, source + second * tile_bytes]
        expected = self.load.stage_bytes(c, size) + c.row_tiles * run
        copy = self.load.copy_fn(self, size, tma, shared, tile)
        weights = Int32(shared.codes.iterator.toint())
        for k64 in cutlass.range(first * 2, (first + steps) * 2, c.stage_k64, unroll=1):
            full = shared.ab_full + stage
            cute.arch.mbarrier_wait(shared.ab_empty + stage, phase)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, expected)
                for i in cutlass.range_constexpr(c.row_tiles):
                    cute.arch.inline_ptx(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                        f"[{{$r0}}], [{{$r1}}], {run}, [{{$r2}}];",
                        read_only_args=[
                            weights + (stage * c.row_tiles + i) * run,
                            sources[i] + Int64(k64) * (2 * layout.BLOCK_BYTES),
                            Int32(full.toint()),
                        ],
                    )
            copy(k64, stage, full)
            stage += 1
            if stage == c.num_stages:
                stage = Int32(0)
                phase ^= 1
        return stage, phase

    # ---- consumers

    @cute.jit
    def consume(self, tidx: Int32, args: Any, epilogue_args: Any, geometry: Any, shared: Any):
        """All consumer warps: wait for a tile, run the main loop of its size, finish."""
        c = self.config
        lane = cute.arch.lane_idx()
        finish = make_finish(self)
        stage, phase, slot, slot_phase = Int32(0), Int32(0), Int32(0), Int32(0)
        more = cutlass.Boolean(True)
        while more:
            cute.arch.mbarrier_wait(shared.tile_full + slot, slot_phase)
            rows = cute.arch.make_warp_uniform(shared.tiles[Tile._fields.index("n"), slot])
            steps = cute.arch.make_warp_uniform(shared.tiles[Tile._fields.index("steps"), slot])
            more = rows > 0
            if more:
                low = 0
                for n in c.token_sizes:
                    if rows > low and rows <= n:
                        accs, stage, phase = self.mainloop(
                            n, opaque(tidx), steps, stage, phase, shared
                        )
                        # read the tile and the thread index anew: what follows from them must not
                        # be computed before the main loop and kept in registers through it (ptxas
                        # then serialises the wgmma, its note C7512)
                        tile = load_tile(shared, slot)
                        finish(
                            n,
                            accs,
                            opaque(tidx),
                            args,
                            epilogue_args,
                            geometry,
                            tile,
                            shared.staging,
                        )
                    low = n
            cute.arch.sync_warp()
            if lane == 0:
                cute.arch.mbarrier_arrive(shared.tile_empty + slot)
            slot += 1
            if slot == TILE_SLOTS:
                slot = Int32(0)
                slot_phase ^= 1

    def mainloop(self, n: int, *state: Any) -> Any:
        """The main loop for n tokens: steps k128 of one tile. Returns (one accumulator per 128
        weight rows, stage, phase)."""
        few = n <= self.config.warp_tokens
        return (WarpLoop(self) if few else self.wgmma_loop)(n, *state)

    @cute.jit
    def wgmma_loop(
        self,
        n: cutlass.Constexpr,
        tidx: Int32,
        steps: Int32,
        stage: Int32,
        phase: Int32,
        shared: Any,
    ):
        c = self.config
        stage = cute.arch.make_warp_uniform(stage)
        mma = sm90_utils.make_trivial_tiled_mma(
            BFloat16,
            BFloat16,
            OperandMajorMode.K,
            OperandMajorMode.K,
            Float32,
            (1, 1, 1),
            (64, n),
            warpgroup.OperandSource.RMEM,
        )
        thread, half = tidx % 128, cute.arch.make_warp_uniform(tidx // 128)
        sB = self.slabs(shared, n)
        tB = mma.make_fragment_B(mma.get_slice(0).partition_B(sB))  # (MMA, MMA_N, MMA_K, slab)
        accs = [
            cute.make_rmem_tensor(mma.partition_shape_C((64, n)), Float32)
            for _ in range(c.blocks64)
        ]
        fragments = [
            cute.make_rmem_tensor(mma.partition_shape_A((64, layout.BLOCK_K)), BFloat16)
            for _ in range(2)
        ]
        for acc in accs:
            acc.fill(0.0)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        # in a register, and unknown to the assembler: lop3 takes one immediate
        exponent = Uint32(layout.SCALE_EXPONENT) | Uint32(steps >> 30)
        codes, scales = shared.codes[None, thread, None], shared.scales[None, thread // 4, None]
        per_stage = c.blocks64 * c.stage_k64
        blocks = 2 * c.blocks64  # of one step of 128 k
        self.wait_full(shared, stage, phase)
        word = cute.make_rmem_tensor((4,), Uint32)
        scale = cute.make_rmem_tensor((2,), Uint32)
        self.load_block(0, 0, stage, half, codes, scales, word, scale)
        for k16 in cutlass.range_constexpr(4):
            self._decode(k16, word, scale, exponent, fragments[0])
        for step in cutlass.range(steps, unroll=1):
            for q in cutlass.range_constexpr(blocks):
                fragment, acc = fragments[q % 2], accs[q % c.blocks64]
                slab = stage * c.stage_k64 + q // c.blocks64 % c.stage_k64
                self._multiply(range(c.burst), mma, acc, fragment, tB, slab)
                warpgroup.wait_group(
                    1
                )  # block q - 1 is done: its fragment is free, and its stage when it was the last
                if cutlass.const_expr(q > 0 and q % per_stage == 0):
                    self.release(self._before(stage), shared)
                if cutlass.const_expr((q + 1) % per_stage == 0):
                    stage += 1
                    if stage == c.num_stages:
                        stage = Int32(0)
                        phase ^= 1
                # After the last block nothing is loaded: its stage is released below, perhaps
                # before a load that nobody waits for has read it. The old words are decoded again.
                if q + 1 < blocks or step + 1 < steps:
                    if cutlass.const_expr((q + 1) % per_stage == 0):
                        self.wait_full(shared, stage, phase)
                    k64, block = divmod((q + 1) % blocks, c.blocks64)
                    self.load_block(k64, block, stage, half, codes, scales, word, scale)
                for k16 in cutlass.range_constexpr(4):
                    if cutlass.const_expr(k16 >= c.burst):
                        self._multiply((k16,), mma, acc, fragment, tB, slab)
                    self._decode(k16, word, scale, exponent, fragments[(q + 1) % 2])
            # Nothing may be in flight where the loop turns: ptxas would keep the fragments of every
            # inlined main loop in registers of their own and serialise all wgmma (C7512).
            warpgroup.wait_group(0)
            self.release(self._before(stage), shared)
        return accs, stage, phase

    @cute.jit
    def wait_full(self, shared: Any, stage: Int32, phase: Int32):
        cute.arch.mbarrier_wait(shared.ab_full + stage, phase)
        if cutlass.const_expr(
            self.load.arrivals > 0 and self.config.max_tokens > self.config.warp_tokens
        ):
            # rows came through the generic proxy, wgmma reads through the async one
            cute.arch.fence_view_async_shared()

    @cute.jit
    def _multiply(
        self, steps: cutlass.Constexpr, mma: Any, acc: Any, fragment: Any, tB: Any, slab: Int32
    ):
        """acc += some k16 steps of the fragment (64 x 64) times those of slab ``slab`` of the
        rows."""
        warpgroup.fence()
        for k16 in steps:
            cute.gemm(mma, acc, fragment[None, None, k16], tB[None, None, k16, slab], acc)
        warpgroup.commit_group()

    @cute.jit
    def load_block(
        self,
        k64: cutlass.Constexpr,
        block: cutlass.Constexpr,
        stage: Int32,
        half: Int32,
        codes: Any,
        scales: Any,
        word: Any,
        scale: Any,
    ):
        """Codes (4 words) and scales (2 words) of a warpgroup's block of 64 rows, at ``k64`` of the
        step that lies in ``stage``."""
        c = self.config
        row_tile, half = (block, half) if c.warpgroups == 2 else divmod(block, 2)
        at = ((stage * c.row_tiles + row_tile) * c.stage_k64 + k64 % c.stage_k64) * 2 + half
        cute.autovec_copy(codes[None, at], word)
        cute.autovec_copy(scales[None, at], scale)

    @cute.jit
    def _decode(
        self, k16: cutlass.Constexpr, word: Any, scale: Any, exponent: Uint32, fragment: Any
    ):
        """Step k16 of a block -> four registers of the fragment."""
        registers = cute.recast_tensor(fragment, Uint32)
        first = k16 // 2 * 2
        decoded = decode_step((word[first], word[first + 1]), scale[k16 // 2], exponent, k16 % 2)
        for i in cutlass.range_constexpr(4):
            registers[4 * k16 + i] = decoded[i]

    @cute.jit
    def _before(self, stage: Int32):
        at = stage - 1
        if at < 0:
            at += self.config.num_stages
        return at

    def release(self, stage: Int32, shared: Any) -> None:
        """Every lane gives the stage back for itself: no slower than one lane behind a warp
        barrier, and a race checker, which does not see that barrier, can follow."""
        cute.arch.mbarrier_arrive(shared.ab_empty + stage)
