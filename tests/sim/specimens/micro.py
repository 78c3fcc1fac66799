"""One kernel per feature: clusters, DSMEM, cp.async, reductions, gather4, CLC, two launches."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator


class ClusterGather:
    """out[block, r] = value of block r of the same cluster, read from its shared memory.

    x (blocks,) int32, out (blocks, cluster). Each block publishes x[block] in its shared memory;
    thread r reads block r's copy through a mapped address. `omit`: "arrive_wait" leaves out the
    cluster barrier before the reads, "exit_sync" the one that keeps the peers alive.
    """

    def __init__(self, cluster: int = 4, omit: str | None = None):
        self.cluster = cluster
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX, mOut).launch(
            grid=(mX.shape[0], 1, 1),
            block=(32, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        value = smem.allocate_array(cutlass.Int32, num_elems=1)
        if tid == 0:
            value.store(mX[block])
        if cutlass.const_expr(self.omit != "arrive_wait"):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        if tid < self.cluster:
            peer = cute.arch.map_dsmem_ptr(value, tid)
            mOut[block, tid] = peer.load()
        if cutlass.const_expr(self.omit != "exit_sync"):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()


class RemoteStores:
    """out[block] = sum over the cluster of x, delivered by st.async into every peer with tx counts.

    Each block sends x[block] to slot `rank` of all peers; an mbarrier per block counts the bytes.
    `omit="wait"` reads without waiting for the bytes.
    """

    cluster = 4

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX, mOut).launch(
            grid=(mX.shape[0], 1, 1),
            block=(32, 1, 1),
            cluster=(self.cluster, 1, 1),
            stream=stream,
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        rank = cute.arch.block_idx_in_cluster()
        smem = SmemAllocator()
        bar = smem.allocate_array(cutlass.Int64, num_elems=1)
        slots = smem.allocate_array(cutlass.Int32, num_elems=self.cluster)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(bar, 4 * self.cluster)
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()
        if tid < self.cluster:
            cute.arch.store_async_dsmem(slots + rank, mX[block], bar, tid)
        if cutlass.const_expr(self.omit != "wait"):
            cute.arch.mbarrier_wait(bar, 0)
        if tid == 0:
            total = cutlass.Int32(0)
            for i in cutlass.range_constexpr(self.cluster):
                total += (slots + i).load()
            mOut[block] = total
        cute.arch.cluster_arrive()
        cute.arch.cluster_wait()


class AsyncCopy:
    """out = reversed rows of x through cp.async: x, out (blocks, 128, 4) fp32.

    `omit`: "wait_group" or "barrier".
    """

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mX, mOut).launch(grid=(mX.shape[0], 1, 1), block=(128, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, mX: cute.Tensor, mOut: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        sX = smem.allocate_tensor(cutlass.Float32, cute.make_layout((128, 4), stride=(4, 1)), 16)
        atom = cute.make_copy_atom(cpasync.CopyG2SOp(), cutlass.Float32, num_bits_per_copy=128)
        source = cute.make_tensor(
            cute.make_ptr(
                cutlass.Float32,
                (mX.iterator + (block * 128 + tid) * 4).toint(),
                cute.AddressSpace.gmem,
                assumed_align=16,
            ),
            cute.make_layout(4),
        )
        cute.copy(atom, source, sX[tid, None])
        cute.arch.cp_async_commit_group()
        if cutlass.const_expr(self.omit != "wait_group"):
            cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.omit != "barrier"):
            cute.arch.sync_threads()
        for i in cutlass.range_constexpr(4):
            mOut[block, tid, i] = sX[127 - tid, i]


class BulkReduce:
    """out (32,) fp32 += sum over blocks of x (blocks, 32), by TMA reductions from shared memory.

    `omit`: "proxy_fence" or "barrier".
    """

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
        layout = cute.make_layout((1, 32), stride=(32, 1))
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD), mOut, layout, (1, 32)
        )
        self.kernel(mX, atom, tensor).launch(
            grid=(mX.shape[0], 1, 1), block=(64, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mX: cute.Tensor, atom: cute.CopyAtom, mOut: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        smem = SmemAllocator()
        sX = smem.allocate_tensor(cutlass.Float32, cute.make_layout((1, 32), stride=(32, 1)), 128)
        if warp == 1:
            sX[0, tid - 32] = mX[block, tid - 32]
            if cutlass.const_expr(self.omit != "proxy_fence"):
                cute.arch.fence_view_async_shared()
        if cutlass.const_expr(self.omit != "barrier"):
            cute.arch.sync_threads()
        if warp == 0:
            tile = cute.group_modes(cute.local_tile(mOut, (1, 32), (0, 0)), 0, 2)
            tXsX, tXgO = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), tile
            )
            cute.copy(atom, tXsX, tXgO)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class Gather4:
    """out[i] = x[index[i]] by TMA gather4; rows with an index out of range become zeros.

    x (rows, 64) fp16, index (n,) int32, out (n, 64); n a multiple of 32.
    """

    rows, columns = 32, 64

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(
        self, mX: cute.Tensor, mIndex: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream
    ):
        n = mIndex.shape[0]
        gI = cute.make_tensor(mIndex.iterator, cute.make_layout((n, self.columns), stride=(1, 0)))
        layout = cute.make_layout((self.rows, self.columns), stride=(self.columns, 1))
        atom, tensor = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensor2DGather4G2SOp(),
            mX,
            layout,
            (self.rows, self.columns),
            gmem_coord_tensor=gI,
        )
        self.kernel(atom, tensor, gI, mOut).launch(
            grid=(n // self.rows, 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, mX: cute.Tensor, gI: cute.Tensor, mOut: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        tile = (self.rows, self.columns)
        smem = SmemAllocator()
        bar = smem.allocate_array(cutlass.Int64, num_elems=1)
        sX = smem.allocate_tensor(
            cutlass.Float16, cute.make_layout(tile, stride=(self.columns, 1)), 128
        )
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        # each ((rows, columns), column tiles): the mode beyond the tile is required
        gX = cute.group_modes(cute.local_tile(mX, tile, (0, None)), 0, 2)
        tI = cute.group_modes(cute.local_tile(gI, tile, (block, None)), 0, 2)
        tXsX, tXgX, tXgI = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(sX, 0, 2), [gX, tI]
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(bar, self.rows * self.columns * 2)
        cute.copy(atom, [tXgX[(None, 0)], tXgI[(None, 0)]], tXsX, tma_bar_ptr=bar)
        if cutlass.const_expr(self.omit != "wait"):
            cute.arch.mbarrier_wait(bar, 0)
        for i in cutlass.range(self.columns, unroll=1):
            mOut[block * self.rows + tid, i] = sX[tid, i]


class WorkStealing:
    """out[tile] += 1 for every tile of a grid, tiles taken over with clusterlaunchcontrol.

    Launched as one block per tile; a running block cancels waiting ones and does their work.
    `omit="wait"` reads the response before it has arrived.
    """

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mOut: cute.Tensor, mTaken: cute.Tensor, stream: cuda.CUstream):
        self.kernel(mOut, mTaken).launch(
            grid=(mOut.shape[0], 1, 1), block=(32, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, mOut: cute.Tensor, mTaken: cute.Tensor):
        tid, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        smem = SmemAllocator()
        response = smem.allocate_array(cutlass.Int32, num_elems=4, byte_alignment=16)
        bar = smem.allocate_array(cutlass.Int64, num_elems=1)
        if tid == 0:
            cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        tile = block
        phase = cutlass.Int32(0)
        more = cutlass.Int32(1)
        while more == 1:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(bar, 16)
                cute.arch.issue_clc_query(bar, response, multicast=False)
            if tid == 0:
                mOut[tile] = mOut[tile] + 1
                mTaken[tile] = block
            if cutlass.const_expr(self.omit != "wait"):
                cute.arch.mbarrier_wait(bar, phase)
            tile, _, _, more = cute.arch.clc_response(response)
            phase = phase ^ 1
            # the next response must not overwrite one that is still being read
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()


class DependentLaunch:
    """Two launches, the second one before the first has ended: y = x + 1, then z = 2 * y.

    x, y, z (n,) int32, n a multiple of 64. `omit="wait"` leaves out griddepcontrol.wait, `"one"`
    that of the second warp.
    """

    def __init__(self, omit: str | None = None):
        self.omit = omit

    @cute.jit
    def __call__(self, mX: cute.Tensor, mY: cute.Tensor, mZ: cute.Tensor, stream: cuda.CUstream):
        grid = (mX.shape[0] // 64, 1, 1)
        self.first(mX, mY).launch(grid=grid, block=(64, 1, 1), stream=stream)
        self.second(mY, mZ).launch(grid=grid, block=(64, 1, 1), stream=stream, use_pdl=True)

    @cute.kernel
    def first(self, mX: cute.Tensor, mY: cute.Tensor):
        i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
        cute.arch.griddepcontrol_launch_dependents()
        mY[i] = mX[i] + 1

    @cute.kernel
    def second(self, mY: cute.Tensor, mZ: cute.Tensor):
        i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
        if cutlass.const_expr(self.omit == "one"):
            if cute.arch.thread_idx()[0] < 32:
                cute.arch.griddepcontrol_wait()
        elif cutlass.const_expr(self.omit != "wait"):
            cute.arch.griddepcontrol_wait()
        mZ[i] = 2 * mY[i]
