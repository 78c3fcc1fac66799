"""A functional simulator of compiled SM100 kernels on a CPU. See the README beside this file."""

from __future__ import annotations

from cute_kernels.sim.checks import Checks, SimError
from cute_kernels.sim.simulator import LaunchResult, Simulator

__all__ = ["Checks", "LaunchResult", "SimError", "Simulator"]
