"""NVFP4 kernels and the format they share. Importing this needs neither a GPU nor the CuTe DSL."""
