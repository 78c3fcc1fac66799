"""Other projects' published SM100 kernels, unmodified, in the simulator: `make conformance`.

The peers are installed from PyPI into a virtual environment of their own; nothing of them is here.
"""
