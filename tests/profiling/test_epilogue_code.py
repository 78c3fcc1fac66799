"""Machine instructions by kind: the parsers on known text, the counts on a kernel."""

from __future__ import annotations

import re

from profiling import epilogue_code
from profiling.specimens import Specimen

PTX = """.version 9.4
.target sm_100a
.address_size 64
.visible .entry kernel(
	.param .u64 a
)
{
	.reg .b32 	%r<4>;
	// a comment
	mov.b32 	%r1, 0;
LOOP:
	{ .reg .b16 h; cvt.u16.u32 h, %r1; }
	add.s32 	%r1, %r1, 1;
	ret;
}
"""

SASS = """
	//## File "kernel.ptx", line 10
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, RZ ;
.L_x_1:
	//## File "kernel.ptx", line 12
        /*0010*/                   FMUL2 R4, R4.F32x2.HI_LO, R38.reuse.F32 ;
        /*0020*/              @!P0 MUFU.RCP R5, R6 ;
.L_x_9:
	//## File "kernel.ptx", line 99
        /*0030*/                   NOP ;
	//## File "kernel.ptx", line 12
        /*0040*/               @P0 BRA `(.L_x_2) ;
        /*0050*/                   MOV R2, 0x70 ;
        /*0060*/                   CALL.REL.NOINC `($__internal_0_$__rcp) ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_2:
	//## File "kernel.ptx", line 13
        /*0080*/                   VIADD R7, R7, 0x1 ;
        /*0090*/               @P1 BRA `(.L_x_1) ;
	//## File "kernel.ptx", line 14
        /*00a0*/                   EXIT ;
$__internal_0_$__rcp:
	//## File "kernel.ptx", line 12
        /*00b0*/                   FMUL R1, R1, R1 ;
"""
HITS = {10: 1, 12: 8, 13: 8}


def test_every_instruction_gets_its_line_and_nothing_else_does() -> None:
    text = epilogue_code.with_lines(PTX).splitlines()
    numbers = [int(m[1]) for line in text if (m := re.match(r"\.loc 1 (\d+) 1", line))]
    assert numbers == [10, 12, 13, 14]
    assert text[0] == ".version 9.0"
    assert [line for line in text if not line.startswith((".loc", ".file", ".version"))] == (
        PTX.splitlines()[1:]
    )


def test_a_block_runs_as_often_as_most_of_its_lines() -> None:
    got = epilogue_code.instructions(SASS, HITS)
    assert got == {"IMAD": 1, "FMUL2": 8, "MUFU": 8, "NOP": 8, "BRA": 16, "VIADD": 8}


def test_kinds_keep_every_instruction() -> None:
    got = epilogue_code.by_kind(epilogue_code.instructions(SASS, HITS))
    assert sum(got.values()) == 49
    assert got["arithmetic"] == 8 and got["special function"] == 8
    assert got["control, order"] == 24 and got[epilogue_code.OTHER] == 9
    members = [name for kind in epilogue_code.KINDS.values() for name in kind]
    assert len(members) == len(set(members))


def test_lines_of_a_decode_tile() -> None:
    """64 rows: four warps, four steps of 16 rows each, every lane stores 32 bytes a step."""
    specimen = Specimen("ours", "bf16", 128, 64, 64, 128, 256, decode=True)
    ptx, hits, elements = epilogue_code.record(specimen)
    lines = ptx.splitlines()
    runs = dict.fromkeys(("tcgen05.ld", "st.global.v8", "cvt.rn.bf16x2", "tcgen05.mma"), 0)
    for line, n in hits.items():
        for kind in runs:
            runs[kind] += n if lines[line - 1].strip().startswith(kind) else 0
    assert elements == 64 * 128
    assert runs == {
        "tcgen05.ld": 16, "st.global.v8": 16, "cvt.rn.bf16x2": 128, "tcgen05.mma": 0,
    }  # fmt: skip
