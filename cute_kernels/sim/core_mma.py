"""The product of an MMA, compiled: numpy hands it to a threaded BLAS, which on a busy machine
spends ten
times the work on waiting for its threads."""

from __future__ import annotations

import numpy as np

from cute_kernels.sim.core_bits import jit


@jit
def product(a, b):
    """(m, k) and (n, k) float64 -> a @ b.T, summed in the order of k."""
    m, k = a.shape
    n = b.shape[0]
    columns = np.ascontiguousarray(b.T)
    out = np.zeros((m, n))
    for i in range(m):
        for q in range(k):
            x = a[i, q]
            for j in range(n):
                out[i, j] += x * columns[q, j]
    return out
