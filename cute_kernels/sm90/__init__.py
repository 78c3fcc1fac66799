"""NVFP4 weights x bf16 rows on Hopper (wgmma). `host.sm90_grouped_gemm` is the entry; see
README.md."""
