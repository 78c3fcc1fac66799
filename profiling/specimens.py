"""Kernels on small problems, for recording: ours, and the peers' of the conformance suite.

    python -m profiling.specimens SPECIMENS.json FOLDER

records one event stream per specimen into FOLDER, under a name that depends on its fields and on
the kernel sources. A stream that is already there is kept. Peers run in an interpreter that has
them installed (tests/conformance/README.md says which); ours in that of the project. Operands are
zeros: the kernels' results are the business of other tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("lightmoe", "fi_masked", "fi_l1", "fi_l2")


@dataclasses.dataclass(frozen=True)
class Specimen:
    """One kernel on one small problem with one expert.

    source  ours, lightmoe, or flashinfer's fi_masked, fi_l1 (gather, SwiGLU, FP4), fi_l2 (finalise)
    output  bf16, or fp4: SwiGLU over pairs of columns and requantisation
    tile_m  M of one MMA: 128 (one CTA) or 256 (a CTA pair)
    tile_n  N of one MMA
    rows    routed rows
    n, k    of the weights
    sms     CTAs that run: tiles beyond them are done one after another
    pairs   MMA tiles of a cluster that share the N operand by multicast (ours)
    columns MMA tiles of a cluster that share the M operand by multicast (ours)
    decode  weights on M, rows on N (ours)
    """

    source: str
    output: str
    tile_m: int
    tile_n: int
    rows: int
    n: int
    k: int
    sms: int = 0
    pairs: int = 1
    columns: int = 1
    decode: bool = False

    @property
    def cluster(self) -> int:
        return self.tile_m // 128 * self.pairs * self.columns

    @property
    def ctas(self) -> int:
        return self.sms or self.cluster

    @property
    def label(self) -> str:
        shared = "rows" if self.columns > 1 else ""
        plan = f" decode {self.rows} rows" if self.decode else ""
        tile = f"{self.tile_m}x{self.tile_n} c{self.cluster}{shared}"
        return f"{self.source} {self.output} {tile}{plan}"

    def file(self, folder: Path) -> Path:
        """Where its stream is kept."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True) + _sources(self.source)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return folder / f"{self.source}_{self.output}_{digest}.json.gz"


def _sources(source: str) -> str:
    """What the stream of our kernels depends on besides the fields; peers do not change."""
    if source != "ours":
        return ""
    digest = hashlib.sha256()
    for part in ("sm100", "device", "config.py"):
        path = ROOT / "cute_kernels" / part
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def collect(
    specimens: Iterable[Specimen], folder: Path, peers_python: str | None
) -> list[Specimen]:
    """Records what is missing, each kind in its interpreter; returns the specimens that have a
    stream: without ``peers_python`` the peers that were recorded before."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(specimens))
    for python, mine in ((sys.executable, ("ours",)), (peers_python, PEERS)):
        missing = [s for s in wanted if s.source in mine and not s.file(folder).exists()]
        if not missing or python is None:
            continue
        order = folder / f"order_{'ours' if mine == ('ours',) else 'peers'}.json"
        order.write_text(json.dumps([dataclasses.asdict(s) for s in missing]))
        command = [python, "-m", "profiling.specimens", str(order), str(folder)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return [s for s in wanted if s.file(folder).exists()]


def record(specimen: Specimen) -> Any:
    """Runs it in the simulator of this process and returns its `profiling.events.Stream`."""
    from cute_kernels import sim
    from profiling.events import Recorder

    if specimen.source == "ours":
        from profiling.specimens_own import launcher
    else:
        from tests.conformance.specimens import launcher
    launch = launcher(specimen)
    with sim.Simulator(schedule="lazy", resident=64) as s:
        recorder = Recorder(s)
        launch()
    return recorder.finish()[-1]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m profiling.specimens", description=__doc__)
    parser.add_argument("specimens", type=Path, help="JSON list of the fields of Specimen")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()

    from cute_kernels import compile as compiler

    compiler.enable_simulator()
    for raw in json.loads(args.specimens.read_text()):
        specimen = Specimen(**raw)
        stream = record(specimen)
        target = specimen.file(args.folder)
        part = target.with_suffix(".part")
        stream.save(part)
        part.rename(target)  # a stream is whole or absent
        sys.stdout.write(f"{specimen.label} N{specimen.n} K{specimen.k}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
