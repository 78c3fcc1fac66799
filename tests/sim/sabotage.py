"""Run sabotaged specimens over many schedules and say what the simulator made of each.

python -m tests.sim.sabotage > table.md
"""

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from cute_kernels.sim import SimError
from tests.sim import programs

RIGHT, DIFFERS = "right", "wrong result"


@dataclass
class Outcome:
    """How many of the schedules ended how: an error class, "wrong result" or "right"."""

    counts: Counter[str] = field(default_factory=Counter)
    example: str = ""

    @property
    def detected(self) -> bool:
        return any(name != RIGHT for name in self.counts)

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.most_common())


def observe(program: programs.Program, schedules: int) -> Outcome:
    """Run the program under `schedules` schedules; every one counts, none stops the others."""
    outcome = Outcome()
    for seed, policy in programs.schedules(schedules):
        try:
            program.run(seed, policy)
        except SimError as error:
            outcome.counts[type(error).__name__] += 1
            outcome.example = outcome.example or str(error)
            continue
        mismatch = program.mismatch()
        outcome.counts[DIFFERS if mismatch else RIGHT] += 1
        outcome.example = outcome.example or (mismatch or "")
    return outcome


GEMM = programs.GemmCase(m=128, n=256, k=768)
PAIR = programs.GemmCase(m=256, n=256, k=768, pair=True)
QUAD = programs.GemmCase(m=512, n=256, k=768, pair=True, cluster_m=4)


def gemm_cases() -> Iterator[tuple[str, programs.GemmCase, str]]:
    """(label, case, what is missing) of every sabotage of the GEMM specimens."""
    from dataclasses import replace

    from tests.sim.specimens.gemm import OMISSIONS, PAIR_OMISSIONS

    for name, meaning in OMISSIONS.items():
        yield f"gemm:{name}", replace(GEMM, omit=name), meaning
    for name, meaning in PAIR_OMISSIONS.items():
        base = QUAD if name in ("commit_mask", "drain") else PAIR
        yield f"gemm pair:{name}", replace(base, omit=name), meaning


def main() -> None:
    """Write the table of all sabotages, 12 schedules each."""
    torch.set_num_threads(1)
    sys.stdout.write("| specimen, omission | missing | outcome of 12 schedules |\n|---|---|---|\n")
    for label, case, meaning in gemm_cases():
        outcome = observe(programs.gemm(case), 12)
        sys.stdout.write(f"| {label} | {meaning} | {outcome} |\n")
        sys.stdout.flush()
    for name, omissions in programs.SMALL_OMISSIONS.items():
        for omit in omissions:
            outcome = observe(programs.SMALL[name](omit), 12)
            sys.stdout.write(f"| {name}: {omit} | | {outcome} |\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
