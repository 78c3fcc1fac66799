"""Every SM90 kernel compiles for sm_90a without a GPU, and the generated code is what the design
counts on."""

import dataclasses
import re
import struct

import pytest

from cute_kernels import compile as compiler
from cute_kernels import toolchain
from cute_kernels.activations import ReLU2, SwiGLU
from cute_kernels.sm90 import config as configs

pytestmark = pytest.mark.skipif(
    not toolchain.check_compiler(toolchain.installed()), reason="needs the CuTe DSL 4.8.1"
)

# opcodes of sm_90 SASS: the low 12 bits of an instruction of 16 bytes
HGMMA, WARPGROUP, LDL, STL = 0xDF0, 0x9C5, 0x983, 0x387
HMMA = 0x23C
CONFIGS = configs.CONFIGS


def gemm(config: configs.Sm90Config, epilogue: str = "store", gathered: bool = False) -> object:
    from cute_kernels.sm90.epilogues import Activate, StoreRows
    from cute_kernels.sm90.grouped_gemm import Sm90GroupedGemm
    from cute_kernels.sm90.loads import ContiguousRows, GatheredRows

    made = {
        "store": StoreRows(),
        "store+": StoreRows(row_scale=True, bias=True, indexed=gathered),
        "swiglu": Activate(activation=SwiGLU(limit=10.0)),
        "relu2": Activate(activation=ReLU2()),
        "swiglu_f32": Activate(
            True, True, gathered, dtype="Float32", activation=SwiGLU(limit=10.0)
        ),
        "swiglu_nvfp4": Activate(True, True, gathered, rounded=True, activation=SwiGLU(limit=10.0)),
        "relu2_nvfp4": Activate(True, rounded=True, activation=ReLU2()),
        "by_expert": StoreRows(bias=True, by_expert=True),
    }
    load = GatheredRows() if gathered else ContiguousRows()
    return Sm90GroupedGemm(load, made[epilogue], config)


def opcodes(cubin: bytes) -> list[int]:
    """Opcode of every instruction in the .text sections of an ELF64 file."""
    start, size, count, names = (
        *struct.unpack_from("<Q", cubin, 0x28),
        *struct.unpack_from("<HHH", cubin, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    strings = sections[names][4]
    found = []
    for name, _, _, _, offset, length in sections:
        if cubin[strings + name :].startswith(b".text."):
            found += [
                struct.unpack_from("<H", cubin, offset + i)[0] & 0xFFF for i in range(0, length, 16)
            ]
    return found


def check_multiplications(config: configs.Sm90Config, ptx: str, code: list[int]) -> None:
    """The instructions of every inlined main loop, and none that ptxas adds when it gives up."""
    blocks = 2 * config.blocks64
    warp = [n for n in config.token_sizes if n <= config.warp_tokens]
    sizes = config.token_sizes[len(warp) :]
    assert code.count(HMMA) == sum(blocks * 4 * n // 8 for n in warp)
    assert ("mma.sync.aligned.m16n8k16" in ptx) == bool(warp)
    assert code.count(HGMMA) == len(sizes) * blocks * 4
    for n in sizes:
        # A from registers: the second operand is a list of four, not a descriptor
        kind = rf"wgmma\.mma_async\.sync\.aligned\.m64n{n}k16\.f32\.bf16\.bf16 "
        operands = r"\{[^}]*\}, \{(%r\d+,? ?){4}\}"
        assert re.search(kind + operands, ptx), f"no wgmma of N {n} with A from registers"
    # one arrive per group, one wait per block and one per step: more means that ptxas has
    # serialised the wgmma
    groups = blocks * (4 if config.burst == 1 else 1)
    assert code.count(WARPGROUP) == len(sizes) * (groups + blocks + 1)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "epilogue, gathered", [("store", False), ("swiglu", False), ("swiglu", True)]
)
def test_code(config: configs.Sm90Config, epilogue: str, gathered: bool) -> None:
    """Every main loop once, then the smallest and the largest: those between differ in N alone."""
    if epilogue != "store":
        config = dataclasses.replace(config, token_sizes=(config.token_step, config.max_tokens))
    dump = compiler.dump(gemm(config, epilogue, gathered), "sm_90a")
    load = "gather_" if gathered else ""
    assert f".entry sm90_w4a16_{config.name}_{load}{epilogue}" in dump.ptx.replace(".visible ", "")
    assert (
        f".reqntid {config.threads}" in dump.ptx
        and f".minnctapersm {config.ctas_per_sm}" in dump.ptx
    )
    # each kernel waits for the one before, and lets the next one start
    for how in ("wait", "launch_dependents"):
        assert dump.ptx.count(f"griddepcontrol.{how}") == 1 + config.split_k
    assert "cp.async.bulk.shared::cluster.global" in dump.ptx
    # rows by TMA: one instruction per 64 k, in a loop for each token size
    boxes = 0 if gathered else len(config.token_sizes) * config.stage_k64
    assert dump.ptx.count("cp.async.bulk.tensor.2d") == boxes
    assert ("cp.async.cg.shared.global" in dump.ptx) == gathered
    # rows written by cp.async and read by wgmma: a proxy fence behind every wait for them
    fenced = "fence.proxy.async.shared::cta" in dump.ptx
    assert fenced == (gathered and config.max_tokens > config.warp_tokens)
    code = opcodes(dump.cubin)
    check_multiplications(config, dump.ptx, code)
    assert code.count(LDL) == code.count(STL) == 0, "registers were spilled"


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
@pytest.mark.parametrize(
    "epilogue", ["store+", "relu2", "swiglu_f32", "swiglu_nvfp4", "relu2_nvfp4", "by_expert"]
)
def test_other_epilogues_compile(config: configs.Sm90Config, epilogue: str) -> None:
    # smallest and largest instance: the inlined main loops in between differ in N alone
    config = dataclasses.replace(config, token_sizes=(config.token_step, config.max_tokens))
    dump = compiler.dump(gemm(config, epilogue, "+" in epilogue or "swiglu" in epilogue), "sm_90a")
    code = opcodes(dump.cubin)
    check_multiplications(config, dump.ptx, code)
    assert code.count(LDL) == code.count(STL) == 0, "registers were spilled"


def test_too_many_registers_would_be_seen() -> None:
    """Meta-test: 64 tokens x 256 rows do not fit 104 registers; the counts above tell."""
    greedy = dataclasses.replace(configs.MIDDLE, name="greedy", token_sizes=(64,), num_stages=2)
    code = opcodes(compiler.dump(gemm(greedy), "sm_90a").cubin)
    assert code.count(WARPGROUP) > 21 or code.count(STL) > 0


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.name)
def test_shared_memory_fits(config: configs.Sm90Config) -> None:
    assert config.ctas_per_sm * (config.smem_bytes + 1024) <= configs.SMEM_SM


def test_config_refuses_what_cannot_launch() -> None:
    with pytest.raises(ValueError, match="launch would fail"):
        dataclasses.replace(configs.PREFILL, num_stages=7)
    with pytest.raises(ValueError, match="multiples of 8"):
        dataclasses.replace(configs.DECODE, token_sizes=(8, 12))
    with pytest.raises(ValueError, match="a tile of 32 rows would fit none"):
        dataclasses.replace(configs.DUO, token_sizes=(16, 24))
    with pytest.raises(ValueError, match="no eight tokens"):
        dataclasses.replace(configs.DUO, epilogue_tokens=24)


def test_chunks_depend_on_k_alone() -> None:
    assert configs.chunk_steps(7168, configs.DECODE) == 14
    assert configs.chunk_steps(4096, configs.DECODE) == 8
    assert configs.chunk_steps(3072, configs.DECODE) == 8
    assert configs.chunk_steps(2880, configs.DECODE) == 8
    assert configs.chunk_steps(768, configs.DECODE) == 6
    assert configs.chunk_steps(7168, configs.PREFILL) == 56
    assert configs.choose_config(6, 48) is configs.DECODE
    assert configs.choose_config(384, 48) is configs.MIDDLE
    assert configs.choose_config(48 * 48, 48) is configs.TRIO
    assert configs.choose_config(64 * 48, 48) is configs.DUO
    assert configs.choose_config(24576, 48) is configs.PREFILL
    assert configs.choose_config(6, 48, batch_invariant=True) is configs.MIDDLE


@pytest.mark.parametrize(
    ("most", "config", "above"),
    [
        (36, configs.MIDDLE, configs.TRIO),
        (54, configs.TRIO, configs.DUO),
        (150, configs.DUO, configs.PREFILL),
    ],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_borders_of_the_measured_table(most: int, config: object, above: object) -> None:
    """Rows per expert, README.md."""
    assert configs.choose_config(48 * most, 48) is config
    assert configs.choose_config(48 * most + 1, 48) is above
