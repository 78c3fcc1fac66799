"""The parser of PTX text."""

# ruff: noqa: E501 (PTX and tables)
from __future__ import annotations

import pytest

from cute_kernels.sim import ptx
from cute_kernels.sim.ptx import (
    Addr,
    Imm,
    Not,
    Pair,
    PtxError,
    Reg,
    Sink,
    Special,
    Sym,
    TensorAddr,
    Vec,
)

HEAD = ".version 9.0\n.target sm_100a, debug\n.address_size 64\n"


def parse_body(body: str, extra: str = "") -> ptx.Function:
    text = (
        f"{HEAD}{extra}.visible .entry k(\n.param .align 64 .b8 k_param_0[128],\n.param .u32 k_param_1\n)\n"
        f".reqntid 128, 1, 1\n.maxntid 256\n{{\n.reg .pred %p<9>;\n.reg .b32 %r<99>;\n.reg .b64 %rd<9>;\n{body}\n}}\n"
    )
    return ptx.parse(text).functions["k"]


def only(body: str) -> ptx.Instr:
    (instr,) = parse_body(body).instrs
    return instr


def names(operands: object) -> list[str]:
    return [o.name for o in operands if isinstance(o, Reg)]  # type: ignore[attr-defined]


def test_header() -> None:
    module = ptx.parse(HEAD + ".visible .entry e()\n{\nret;\n}\n")
    assert module.target == "sm_100a"
    assert [f.name for f in module.entries()] == ["e"]


def test_parameters_and_directives() -> None:
    function = parse_body("ret;")
    assert [(v.name, v.space, v.align, v.size) for v in function.params] == [
        ("k_param_0", "param", 64, 128), ("k_param_1", "param", 4, 4)]  # fmt: skip
    assert function.directives["reqntid"] == (128, 1, 1)
    assert function.directives["maxntid"] == (256,)


def test_operands() -> None:
    add = only("add.s32 %r1, %r2, -5;")
    assert (add.base, add.mods) == ("add", ("s32",))
    assert isinstance(add.operands[0], Reg) and add.operands[0].type == "b32"
    assert add.operands[2] == Imm(2**64 - 5)
    assert only("mov.b32 %r1, 0f3F800000;").operands[1] == Imm(0x3F800000)
    assert only("mov.b64 %rd1, 0d3FF0000000000000;").operands[1] == Imm(0x3FF0000000000000)
    assert only("mov.b32 %r1, 0x1F;").operands[1] == Imm(31)
    assert only("mov.b32 %r1, 017;").operands[1] == Imm(15)
    assert only("mov.u32 %r1, %tid.x;").operands[1] == Special("tid.x")
    assert only("mov.b64 %rd1, k_param_0;").operands[1] == Sym("k_param_0")
    assert isinstance(only("mov.b32 {_, %r1}, %rd1;").operands[0], Vec)
    assert only("mov.b32 {_, %r1}, %rd1;").operands[0].items[0] == Sink()  # type: ignore[union-attr]


def test_addresses() -> None:
    for text, offset in (("[%rd1]", 0), ("[%rd1+16]", 16), ("[%rd1+-16]", -16), ("[%rd1 + 0x10]", 16),
                         ("[%rd1-4]", -4)):  # fmt: skip
        address = only(f"ld.global.b32 %r1, {text};").operands[1]
        assert isinstance(address, Addr) and address.offset == offset, text
    symbol = only("ld.param.b32 %r1, [k_param_0+8];").operands[1]
    assert symbol == Addr(Sym("k_param_0"), 8)
    tensor = only("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
                  "[%r1], [%rd1, {%r2, %r3}], [%r4];")  # fmt: skip
    assert isinstance(tensor.operands[1], TensorAddr)
    assert names(tensor.operands[1].coords) == ["%r2", "%r3"]
    assert "mbarrier::complete_tx::bytes" in tensor.mods


def test_predicates_and_pairs() -> None:
    instr = only("@!%p1 setp.lt.and.s32 %p2|%p3, %r1, %r2, !%p4;")
    assert instr.guard is not None and instr.guard[1]
    assert isinstance(instr.operands[0], Pair) and isinstance(instr.operands[3], Not)
    elect = only("elect.sync _|%p1, 0xffffffff;")
    assert isinstance(elect.operands[0], Pair) and elect.operands[0].first == Sink()


def test_scopes_have_their_own_registers_and_labels() -> None:
    function = parse_body(
        "{ .reg .pred p; setp.eq.s32 p, %r1, 0; WAIT: @p bra WAIT; @!p bra DONE; DONE: }\n"
        "{ .reg .pred p; WAIT: setp.ne.s32 p, %r1, 0; @p bra WAIT; }\nret;"
    )
    first, loop, out, second, again, ret = function.instrs
    assert first.operands[0] != second.operands[0]
    assert (loop.target, out.target, again.target) == (1, 3, 3)
    assert loop.guard == (first.operands[0].id, False)  # type: ignore[union-attr]
    assert ret.base == "ret"


def test_several_instructions_on_one_line_keep_their_line() -> None:
    function = parse_body("mov.b32 %r1, 1; mov.b32 %r2, 2;\nadd.s32 %r3,\n   %r1, %r2;")
    assert [i.line - function.instrs[0].line for i in function.instrs] == [0, 0, 1]
    assert function.instrs[2].text == "add.s32 %r3, %r1, %r2"


def test_lines_of_the_source() -> None:
    body = ".loc 1 42 7\nmov.b32 %r1, 1;\n.loc 2 5 1, function_name $L, inlined_at 1 9 9\nmov.b32 %r2, 2;\nret;"
    function = parse_body(body + "\n", '.file 1 "/a/kernel.py"\n.file 2 "/a/other.py"\n')
    assert [i.source for i in function.instrs] == [
        ("/a/kernel.py", 42), ("/a/other.py", 5), ("/a/other.py", 5)]  # fmt: skip


def test_variables() -> None:
    module = ptx.parse(
        HEAD + ".extern .shared .align 1024 .b8 dynamic[];\n"
        ".global .align 1 .b8 text[4] = {104, 105, 10, 0};\n.global .align 4 .u32 table[2] = {7, 0xFFFFFFFF};\n"
        ".visible .entry k()\n{\n.local .align 16 .b8 depot[48];\n.shared .align 8 .b64 bars[3];\nret;\n}\n"
    )
    assert module.variables["dynamic"].extern and module.variables["dynamic"].align == 1024
    assert module.variables["text"].data == b"hi\n\0"
    assert module.variables["table"].data == b"\7\0\0\0\xff\xff\xff\xff"
    assert {v.name: (v.space, v.size) for v in module.functions["k"].variables} == {
        "depot": ("local", 48), "bars": ("shared", 24)}  # fmt: skip


def test_sections_and_comments_are_skipped() -> None:
    text = (
        HEAD + "// a comment { ;\n/* another\n one */\n.visible .entry k()\n{\nret; // end }\n}\n"
        ".section .debug_info\n{\n.b8 1, 2;\n{ .b8 3; }\n}\n"
    )
    assert [i.base for i in ptx.parse(text).functions["k"].instrs] == ["ret"]


def test_branch_tables() -> None:
    function = parse_body("T: .branchtargets A, B;\nbrx.idx %r1, T;\nA: ret;\nB: ret;")
    assert function.instrs[0].targets == (1, 2)


def test_a_b128_register_takes_two_rows() -> None:
    function = parse_body(".reg .b128 %q<2>; mov.b128 %q1, {%rd1, %rd2}; mov.b64 %rd3, %rd1;")
    high = function.instrs[0].operands[0]
    assert isinstance(high, Reg) and function.regs[high.id + 1].type == "b64"
    assert function.instrs[1].operands[0].id > high.id + 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no .target"), ("hello", "expected a directive|ends inside"),
     (HEAD + ".visible .entry k()\n{\nadd.s32 %r1", "truncated"),
     (HEAD + ".visible .entry k()\n{\nret;\n", "truncated"),
     (HEAD + ".visible .entry k()\n{\nbra NOWHERE;\n}\n", "unknown label"),
     (HEAD + ".visible .entry k()\n{\n@%p9 ret;\n}\n", "guard"),
     (HEAD + ".visible .entry k()\n{\n.frob 7;\n}\n", "unknown directive")],
)  # fmt: skip
def test_bad_text_is_a_clear_error(text: str, message: str) -> None:
    with pytest.raises(PtxError, match=message):
        ptx.parse(text)
