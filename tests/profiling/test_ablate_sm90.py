"""`profiling.ablate_sm90`: what is left out of the kernel is gone from its code, the rest stays."""

from __future__ import annotations

import dataclasses
import io
from typing import Any

import pytest
import torch
from rich.console import Console

from cute_kernels import compile as compiler
from cute_kernels import toolchain
from cute_kernels.sm90 import config as configs
from profiling import ablate_sm90

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
dsl = pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()), reason="needs the CuTe DSL 4.8.1"
)
HMUL2_BF16 = 0x232  # low 12 bits of the SASS word, with a register as second factor


def dump(keep: tuple[str, ...] | None) -> Any:
    from cute_kernels.sm90.epilogues import StoreRows
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
    from cute_kernels.sm90.loads import ContiguousRows
    from profiling.ablated_sm90 import AblatedGemm

    config = ablate_sm90.one_size(configs.DUO, 64)
    parts = ContiguousRows(), StoreRows(), config
    made = Sm90GroupedGemm(*parts) if keep is None else AblatedGemm(*parts, keep)
    return compiler.dump(made, "sm_90a")


@dsl
@pytest.mark.parametrize("keep", ablate_sm90.KEPT, ids="-".join)
def test_parts_left_out_are_gone(keep: tuple[str, ...]) -> None:
    from tests.sm90.test_kernels_compile import HGMMA, LDL, STL, WARPGROUP, opcodes

    whole, part = dump(None), dump(keep)
    code, plain = opcodes(part.cubin), opcodes(whole.cubin)
    if keep == ablate_sm90.PARTS:
        assert code == plain
    loads = part.ptx.count("cp.async.bulk.shared::cluster")
    assert loads == (whole.ptx.count("cp.async.bulk.shared::cluster") if "loads" in keep else 0)
    assert part.ptx.count("cp.async.bulk.tensor.2d") == int("loads" in keep)
    assert code.count(HGMMA) == plain.count(HGMMA) // (1 if "products" in keep else 4)
    assert code.count(HMUL2_BF16) == (plain.count(HMUL2_BF16) if "decode" in keep else 0)
    assert plain.count(HMUL2_BF16) >= 5 * 16
    # not serialised, nothing spilled: the times are those of the parts
    assert code.count(WARPGROUP) == plain.count(WARPGROUP)
    assert code.count(LDL) == code.count(STL) == 0


@dsl
def test_what_cannot_be_left_out_is_refused() -> None:
    from cute_kernels.sm90.epilogues import StoreRows
    from cute_kernels.sm90.loads import ContiguousRows
    from profiling.ablated_sm90 import AblatedGemm

    parts = ContiguousRows(), StoreRows()
    with pytest.raises(ValueError, match="one or more of"):
        AblatedGemm(*parts, configs.DUO, ())
    with pytest.raises(ValueError, match="one or more of"):
        AblatedGemm(*parts, configs.DUO, ("stores",))
    with pytest.raises(ValueError, match="middle multiplies 1 k16 step"):
        AblatedGemm(*parts, configs.MIDDLE)


def test_one_size() -> None:
    config = ablate_sm90.one_size(configs.PREFILL, 48)
    assert config == dataclasses.replace(configs.PREFILL, name="prefill48", token_sizes=(48,))
    with pytest.raises(ValueError, match="not of 40"):
        ablate_sm90.one_size(configs.PREFILL, 40)


def test_a_size_without_a_tile_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        ablate_sm90.main(["--rows-per-expert", "64", "65"])
    assert "duo has tiles of" in capsys.readouterr().err


def test_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    times = {" + ".join(kept): 100.0 + i for i, kept in enumerate(ablate_sm90.KEPT)}
    row = {"case": "qwen-L1", "rows_per_expert": 64, "config": "duo", "us": times}
    text = io.StringIO()
    Console(file=text, width=150).print(ablate_sm90.table([row]))
    assert "a GPU" in text.getvalue() and len(times) == 7
    line = next(line for line in text.getvalue().splitlines() if "qwen-L1" in line)
    assert [float(v) for v in line.replace("│", " ").split()[3:]] == list(times.values())


@pytest.mark.sm90
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate_sm90.main(["--cases", "qwen-L2", "--rows-per-expert", "16"]) == 0
    assert "loads + decode + products" in capsys.readouterr().out
