"""Benchmarks and measurements. Nothing here is imported by the packages."""
