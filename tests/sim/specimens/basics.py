"""Small kernels without tensor cores: element-wise, a block reduction, a TMA ring."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

THREADS = 128


@cute.kernel
def _axpy_kernel(mX: cute.Tensor, mY: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
    if i < n:
        mY[i] = a * mX[i] + mY[i]


@cute.jit
def axpy(mX: cute.Tensor, mY: cute.Tensor, a: cutlass.Float32, stream: cuda.CUstream):
    """y = fma(a, x, y) over fp32 vectors; the last block is partial."""
    n = mX.shape[0]
    _axpy_kernel(mX, mY, a, n).launch(
        grid=((n + THREADS - 1) // THREADS, 1, 1), block=(THREADS, 1, 1), stream=stream
    )


class RowSum:
    """out[row] = sum of a row of 2 * 128 fp32 values, by a tree in shared memory.

    One block per row. `omit="barrier"` leaves out the barriers between the levels of the tree.
    """

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX, mOut).launch(grid=(mX.shape[0], 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, row = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        sums = smem.allocate_tensor(cutlass.Float32, cute.make_layout(THREADS), 16)
        sums[tid] = mX[row, tid] + mX[row, tid + THREADS]
        for level in cutlass.range_constexpr(7):
            if cutlass.const_expr(self.omit != "barrier"):
                cute.arch.sync_threads()
            half = 64 >> level
            if tid < half:
                sums[tid] = sums[tid] + sums[tid + half]
        if tid == 0:
            mOut[row] = sums[0]


class TmaRing:
    """out = 2 * x + 1 through a ring: TMA load, shared memory, TMA store.

    x, out (M, N) fp32, M a multiple of 64, N of 32. One block per 64 rows walks the columns 32 at a
    time. Warp 4 loads, warps 0-3 compute in place, warp 0 stores. A stage goes load -> `full` ->
    compute -> store -> `empty`. `omit` removes one of: full_wait, empty_wait, proxy_fence,
    store_barrier, store_read_wait.
    """

    rows, columns, stages = 64, 32, 3

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        tile = (self.rows, self.columns)
        layout = cute.make_layout(tile, stride=(self.columns, 1))
        load = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), mX, layout, tile)
        store = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), mOut, layout, tile)
        self.kernel(load[0], load[1], store[0], store[1]).launch(
            grid=(mX.shape[0] // self.rows, 1, 1), block=(160, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, load: cute.CopyAtom, mX, store: cute.CopyAtom, mOut):
        tid = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        tile = (self.rows, self.columns)
        smem = SmemAllocator()
        full = smem.allocate_array(cutlass.Int64, num_elems=self.stages)
        empty = smem.allocate_array(cutlass.Int64, num_elems=self.stages)
        ring = cute.make_layout(
            (*tile, self.stages), stride=(self.columns, 1, self.rows * self.columns)
        )
        sX = smem.allocate_tensor(cutlass.Float32, ring, 128)
        if tid == 0:
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(full + stage, 1)
                cute.arch.mbarrier_init(empty + stage, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        block = cute.arch.block_idx()[0]
        one, grouped = cute.make_layout(1), cute.group_modes(sX, 0, 2)
        gX = cute.group_modes(cute.local_tile(mX, tile, (block, None)), 0, 2)
        gOut = cute.group_modes(cute.local_tile(mOut, tile, (block, None)), 0, 2)
        tXsX, tXgX = cpasync.tma_partition(load, 0, one, grouped, gX)
        tOsX, tOgO = cpasync.tma_partition(store, 0, one, grouped, gOut)
        count = mX.shape[1] // self.columns

        if warp == 4:
            for i in cutlass.range(count, unroll=1):
                stage, phase = i % self.stages, (i // self.stages) & 1
                if cutlass.const_expr(self.omit != "empty_wait"):
                    cute.arch.mbarrier_wait(empty + stage, phase ^ 1)
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(
                        full + stage, self.rows * self.columns * 4
                    )
                cute.copy(load, tXgX[(None, i)], tXsX[(None, stage)], tma_bar_ptr=full + stage)
        else:
            for i in cutlass.range(count, unroll=1):
                stage, phase = i % self.stages, (i // self.stages) & 1
                if cutlass.const_expr(self.omit != "full_wait"):
                    cute.arch.mbarrier_wait(full + stage, phase)
                for row in cutlass.range(warp, self.rows, 4, unroll=1):
                    column = tid % 32
                    sX[row, column, stage] = 2.0 * sX[row, column, stage] + 1.0
                if cutlass.const_expr(self.omit != "proxy_fence"):
                    cute.arch.fence_view_async_shared()
                if cutlass.const_expr(self.omit != "store_barrier"):
                    cute.arch.barrier(barrier_id=1, number_of_threads=THREADS)
                if warp == 0:
                    cute.copy(store, tOsX[(None, stage)], tOgO[(None, i)])
                    cute.arch.cp_async_bulk_commit_group()
                    if cutlass.const_expr(self.omit != "store_read_wait"):
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(empty + stage)
            if warp == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
