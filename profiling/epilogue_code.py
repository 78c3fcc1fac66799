"""Machine instructions of the epilogues per accumulator element, by kind, ours and the peers'.

    python -m profiling.epilogue_code --peers PYTHON [--ptxas ptxas] [--json FILE]

PTX is not what runs: a copy between registers costs nothing after assembly, a division costs ten
instructions. So every kernel computes one output tile of a cluster in the simulator, which counts
how often each line of its PTX runs in the warps that read the accumulator, from the moment it is
ready. One ptxas assembles the PTX of all kernels with these lines attached; a basic block of the
machine code runs as often as most of its lines did. Nothing is timed. The slow path of a division
is not taken. PYTHON is an interpreter with the peers installed (tests/conformance/README.md).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from profiling.specimens import PEERS, ROOT, Specimen

K = 512  # the epilogue does not depend on it
PREFILL = [
    Specimen("ours", "bf16", 256, 256, 256, 256, K),
    Specimen("lightmoe", "bf16", 256, 256, 256, 256, K),
    Specimen("fi_l2", "bf16", 256, 256, 256, 256, K),
    Specimen("ours", "fp4", 256, 256, 256, 256, K),
    Specimen("lightmoe", "fp4", 256, 256, 256, 256, K),
    Specimen("fi_l1", "fp4", 256, 256, 256, 256, K),
]
DECODE = [
    Specimen(source, output, 128, 64, 64, 128, K, decode=True)
    for output in ("bf16", "fp4")
    for source in ("ours", "lightmoe")
]
KINDS: dict[str, tuple[str, ...]] = {
    "read the accumulator": ("LDTM",),
    "arithmetic": ("FMUL", "FMUL2", "FADD", "FADD2", "FFMA", "FFMA2", "HADD2", "HFMA2", "HMUL2"),
    "maximum": ("FMNMX", "FMNMX3", "HMNMX2", "VHMNMX"),
    "special function": ("MUFU",),
    "conversion": ("F2FP", "F2F", "F2I", "I2F", "I2FP"),
    "exchange": ("SHFL", "STS", "LDS", "STSM", "LDSM", "MOVM", "REDUX"),
    "memory": ("STG", "LDG", "LD", "ST", "RED", "REDG", "UTMASTG", "UTMACMDFLUSH", "UBLKCP"),
    "select, copy": ("FSEL", "SEL", "USEL", "MOV", "UMOV", "PRMT", "UPRMT", "R2UR"),
    "control, order": (
        "BRA", "BSSY", "BSYNC", "NOP", "BAR", "SYNCS", "MEMBAR", "FENCE", "ELECT", "DEPBAR",
        "EXIT", "CALL", "RET", "WARPSYNC", "NANOSLEEP", "UCGABAR_ARV", "UCGABAR_WAIT", "CCTL",
        "ERRBAR", "CGAERRBAR", "PREEXIT", "ACQBULK", "S2R", "S2UR", "YIELD", "VOTEU", "BREAK",
    ),
}  # fmt: skip
OTHER = "address, index, predicate"


class Record(NamedTuple):
    """One simulated tile: the PTX, how often each of its lines ran in the epilogue, summed over the
    warps, and the elements of the tile."""

    ptx: str
    hits: dict[int, int]
    elements: int


# ---- counting lines


def record(specimen: Specimen) -> Record:
    """Runs a specimen in the simulator of this process."""
    from cute_kernels import sim
    from cute_kernels.sim.launch import preparation
    from cute_kernels.sim.program import ALU, Program
    from cute_kernels.sim.trace import Trace
    from cute_kernels.sim.warp import Warp

    if specimen.source == "ours":
        from profiling.specimens_own import launcher
    else:
        from tests.conformance.specimens import launcher
    counts: dict[Any, Counter[tuple[int, int]]] = {}  # of a warp, by line and instruction
    reads: set[Any] = set()

    class Lines(Trace):
        """Counts what the interpreter leaves to the host, and starts anew at every wait before the
        first read of the accumulator."""

        def host(self, warp: Any, instr: Any) -> None:
            mine = counts.setdefault(warp, Counter())
            name = ".".join((instr.base, *instr.mods[:2]))
            if name.startswith("tcgen05.ld"):
                reads.add(warp)
            elif name.startswith(("mbarrier.try_wait", "mbarrier.test_wait")) and warp not in reads:
                mine.clear()
            mine[instr.line, instr.index] += 1

    class Counting(sim.Simulator):
        def warps(self, function: Any) -> Callable[[Any, int, int], Any]:
            program = Program(function)
            for i, (kind, op) in enumerate(zip(program.kinds, program.ops)):
                if kind == ALU:
                    program.ops[i] = counted(op, (program.instrs[i].line, i))
            return lambda cta, warp_id, lanes: Warp(cta, warp_id, program, lanes)

    def counted(op: Any, key: tuple[int, int]) -> Any:
        def run(warp: Any, mask: Any) -> None:
            counts.setdefault(warp, Counter())[key] += 1
            op(warp, mask)

        return run

    launch = launcher(specimen)
    with Counting(schedule="lazy", resident=64, core="numpy") as s:
        s.trace = Lines()
        launch()
        name = s.launches[-1].name
    text = next(t for t in preparation().known.values() if re.search(rf"\.entry {name}\b", t))
    hits: dict[int, int] = {}
    for (line, _), n in sum((counts[w] for w in reads), Counter()).items():
        hits[line] = max(hits.get(line, 0), n)  # a line may hold several instructions
    return Record(text, hits, specimen.rows * specimen.n)


def records(specimens: Iterable[Specimen], peers: str | None) -> dict[Specimen, Record]:
    """Each kind in its interpreter; without ``peers`` only ours."""
    found = {}
    for specimen in specimens:
        python = peers if specimen.source in PEERS else sys.executable
        if python is None:
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "record.json"
            order = json.dumps(dataclasses.asdict(specimen))
            command = [python, "-m", "profiling.epilogue_code", "--record", order, str(path)]
            subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
            ptx, hits, elements = json.loads(path.read_text())
        found[specimen] = Record(ptx, {int(line): n for line, n in hits.items()}, elements)
    return found


# ---- machine code


def with_lines(ptx: str) -> str:
    """PTX whose instructions carry their line number. The version is lowered to what a ptxas of
    CUDA 13.0 takes; it refuses instructions that are newer."""
    out, body, ready = [], False, False
    for number, line in enumerate(ptx.splitlines(), 1):
        text = line.strip()
        if text.startswith(".version"):
            line = ".version " + min(text.split()[1], "9.0")
        elif text.startswith(".address_size"):
            line += '\n.file 1 "kernel.ptx"'
        elif ".entry" in text or ".func" in text:
            body, ready = True, False
        elif body and ready and text and text != "{":
            label = re.fullmatch(r"[\w$]+:", text)
            if not label and not text.startswith((".", "//", "}", ")")):
                out.append(f".loc 1 {number} 1")
        out.append(line)
        if text and not text.startswith("//"):
            ready = text.endswith((";", "{", "}", ":"))
    return "\n".join(out) + "\n"


def assemble(ptx: str, ptxas: str) -> str:
    """Machine code as text, with line numbers of ``ptx``."""
    from cutlass.base_dsl import env_manager

    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(with_lines(ptx))
        options = ["-arch=sm_100a", "-O3", "-lineinfo", "-o", str(cubin), str(source)]
        subprocess.run([ptxas, *options], check=True)
        command = [env_manager._find_nvdisasm_binary(), "-g", "-c", str(cubin)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Instruction(NamedTuple):
    name: str
    line: int


def blocks(sass: str) -> Iterator[list[Instruction]]:
    """Basic blocks of the kernel itself; its internal functions follow it and are left out."""
    targets = set(re.findall(r"`\((\.L_\w+)\)", sass))
    block: list[Instruction] = []
    line = 0
    for text in sass.splitlines():
        if re.match(r"\$__internal", text):
            break
        if label := re.match(r"(\.L_\w+):", text):
            if label[1] in targets and block:
                yield block
                block = []
        elif number := re.search(r'//## File "kernel.ptx", line (\d+)', text):
            line = int(number[1])
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?\s*([A-Z0-9_]+)", text):
            block.append(Instruction(found[1], line))
            if found[1] in ("BRA", "EXIT", "RET", "CALL", "BRX", "JMP"):
                yield block
                block = []
    if block:
        yield block


def instructions(sass: str, hits: dict[int, int]) -> Counter[str]:
    """Warp instructions by name. A block that calls is the slow path of a division, which ends
    with a jump back."""
    total: Counter[str] = Counter()
    slow = False
    for block in blocks(sass):
        back, slow = slow and len(block) == 1, any(i.name == "CALL" for i in block)
        if back or slow:
            continue
        votes = Counter(hits.get(i.line, 0) for i in block)
        runs = max(votes, key=lambda n: (votes[n], n))
        for i in block:
            total[i.name] += runs
    return +total


def by_kind(names: Counter[str]) -> dict[str, int]:
    """Counts by the kinds of `KINDS`, the rest as `OTHER`."""
    kind_of = {name: kind for kind, members in KINDS.items() for name in members}
    kinds = dict.fromkeys((*KINDS, OTHER), 0)
    for name, n in names.items():
        kinds[kind_of.get(name, OTHER)] += n
    return kinds


# ---- report


def per_element(found: Record, ptxas: str) -> dict[str, float]:
    """Threads' instructions per element of the tile, by kind."""
    names = instructions(assemble(found.ptx, ptxas), found.hits)
    return {kind: 32 * n / found.elements for kind, n in by_kind(names).items()}


def table(columns: dict[str, dict[str, float]]) -> str:
    """One column per kernel, one row per kind of instruction."""
    out = [f"{'':28s}" + "".join(f"{name:>16s}" for name in columns)]
    for kind in (*KINDS, OTHER):
        out.append(f"{kind:28s}" + "".join(f"{c[kind]:>16.3f}" for c in columns.values()))
    out.append(f"{'all':28s}" + "".join(f"{sum(c.values()):>16.3f}" for c in columns.values()))
    return "\n".join(out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m profiling.epilogue_code",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--peers", metavar="PYTHON", help="interpreter with the peers installed")
    parser.add_argument("--ptxas", default="ptxas", help="of CUDA 13.0 or newer")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    parser.add_argument("--record", nargs=2, metavar=("SPECIMEN", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.record:
        from cute_kernels import compile as compiler

        compiler.enable_simulator()
        Path(args.record[1]).write_text(json.dumps(record(Specimen(**json.loads(args.record[0])))))
        return
    everything = {}
    for title, specimens in (
        ("output tiles of 256 x 256, a CTA pair", PREFILL),
        ("decode tiles of 64 rows, weights on M", DECODE),
    ):
        found = records(specimens, args.peers)
        columns = {f"{s.source} {s.output}": per_element(r, args.ptxas) for s, r in found.items()}
        sys.stdout.write(f"machine instructions per accumulator element, {title}\n")
        sys.stdout.write(table(columns) + "\n\n")
        everything[title] = columns
    if args.json:
        args.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
