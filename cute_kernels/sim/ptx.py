"""Parser of PTX text: text -> Module of Functions of Instrs, with line numbers and source lines.

The grammar is the subset of the PTX ISA that NVVM and inline assembly emit: module directives,
one or
more functions, nested scopes with their own registers and labels, instructions. Nothing is
evaluated
here; `decode.py` lowers the result for the interpreter.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from cute_kernels.sim.ptx_text import (
    FUNCTION,
    LINE_DIRECTIVE,
    PtxError,
    split_list,
    statements,
    strip_comments,
)


@dataclass(frozen=True, slots=True)
class Reg:
    """A virtual register: `id` is its row in the register file of a warp, `type` is "pred",
    "b32", ..."""

    id: int
    type: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Imm:
    """A literal as 64 raw bits: integers are two's complement, `0f`/`0d` literals their IEEE
    bits."""

    bits: int


@dataclass(frozen=True, slots=True)
class Sym:
    """The name of a variable, parameter, function or label."""

    name: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register such as %tid.x, without the percent sign."""

    name: str


@dataclass(frozen=True, slots=True)
class Sink:
    """The destination `_` that discards a result."""


@dataclass(frozen=True, slots=True)
class Not:
    """A negated predicate source, `!%p`."""

    reg: Reg


@dataclass(frozen=True, slots=True)
class Addr:
    """`[base + offset]`."""

    base: Reg | Sym | Imm
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Vec:
    """`{a, b, ...}`; also the parenthesised lists of `call`."""

    items: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """`a|b`: two destinations, the second one a predicate."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class TensorAddr:
    """`[map, {c0, c1, ...}]`: the tensor map's address and the coordinates of a tensor copy."""

    map: Addr
    coords: tuple[Operand, ...]


Operand = Reg | Imm | Sym | Special | Sink | Not | Addr | Vec | Pair | TensorAddr


@dataclass(slots=True)
class Instr:
    """One instruction. `mods` are the dotted parts after `base`; `guard` is (predicate register,
    negated)."""

    index: int
    base: str
    mods: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[int, bool] | None
    line: int
    text: str
    source: tuple[str, int] | None = None
    target: int = -1  # instruction index of a branch
    targets: tuple[int, ...] = ()  # of brx.idx

    @property
    def opcode(self) -> str:
        return ".".join((self.base, *self.mods))

    def has(self, *mods: str) -> bool:
        """True if every one of `mods` is among the modifiers."""
        return all(m in self.mods for m in mods)


@dataclass(frozen=True, slots=True)
class Variable:
    """A declared variable: `space` is param, shared, global, local or const; `size` in bytes (0
    if extern)."""

    name: str
    space: str
    align: int
    size: int
    data: bytes | None = None
    extern: bool = False


@dataclass(slots=True)
class Function:
    """`num_regs` counts the rows of the register file; `params` and `returns` are in declaration
    order."""

    name: str
    entry: bool
    params: list[Variable]
    returns: list[Variable]
    instrs: list[Instr] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    regs: list[Reg] = field(default_factory=list)
    directives: dict[str, tuple[int, ...]] = field(default_factory=dict)
    line: int = 0

    @property
    def num_regs(self) -> int:
        return len(self.regs)


@dataclass(slots=True)
class Module:
    """All functions and module-scope variables of one PTX text."""

    text: str
    target: str
    functions: dict[str, Function]
    variables: dict[str, Variable]

    def entries(self) -> list[Function]:
        return [f for f in self.functions.values() if f.entry]


TYPE_BYTES = {
    "pred": 1, "b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "bf16": 2,
    "b32": 4, "u32": 4, "s32": 4, "f32": 4, "f16x2": 4, "bf16x2": 4, "b64": 8, "u64": 8, "s64": 8,
    "f64": 8, "b128": 16,
}  # fmt: skip
_NAME = r"[A-Za-z$_%.][\w$.]*"
_LOC = re.compile(r"\.loc\s+(\d+)\s+(\d+)")
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_GUARD = re.compile(r"@(!?)\s*([%\w$]+)\s+")
_REG_DECL = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", re.S)
_VAR = re.compile(
    r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(param|shared|global|local|const)\b\s*(.*)", re.S
)
_ATTRIBUTES = re.compile(
    r"\.(?:ptr|align\s+\d+|global|const|shared|local|generic|attribute\([^)]*\))(?!\w)"
)
_INT = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)[uU]?$")


def _integer(text: str) -> int:
    text = text.strip().rstrip("uU")
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("+-")
    if len(text) > 1 and text[0] == "0" and text[1] not in "xXbB":
        return sign * int(text, 8)
    return sign * int(text, 0)


@dataclass(slots=True)
class _Scope:
    parent: _Scope | None
    regs: dict[str, Reg] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)  # "%r" -> type of %r<n>
    vectors: dict[str, Vec] = field(default_factory=dict)  # .reg .v4 .b32 name;
    labels: dict[str, int] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def label(self, name: str) -> int | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        return None

    def table(self, name: str) -> tuple[str, ...] | None:
        scope: _Scope | None = self
        while scope is not None:
            if name in scope.tables:
                return scope.tables[name]
            scope = scope.parent
        return None


def _parse_variable(line: int, text: str) -> Variable:
    match = _VAR.match(text)
    if match is None:
        raise PtxError(f"line {line}: expected a variable declaration, got {text[:80]!r}")
    linkage, space, rest = match.groups()
    # behind .ptr it is the alignment of what the parameter points to
    align = None if ".ptr" in rest else re.search(r"\.align\s+(\d+)", rest)
    pointer_free = _ATTRIBUTES.sub(" ", rest)
    head, _, init = pointer_free.partition("=")
    declared = re.match(
        rf"\s*(?:\.(v2|v4)\s+)?\.(\w+)\s+({_NAME})\s*((?:\[[^\]]*\])*)\s*$", head, re.S
    )
    if declared is None:
        raise PtxError(f"line {line}: cannot read the declaration {text[:80]!r}")
    vector, kind, name, dims = declared.groups()
    unit = TYPE_BYTES.get(kind)
    if unit is None:
        raise PtxError(f"line {line}: unknown type .{kind} in {text[:80]!r}")
    unit *= int(vector[1:]) if vector else 1
    size, unsized = unit, False
    for dim in re.findall(r"\[([^\]]*)\]", dims):
        unsized |= not dim.strip()
        size *= _integer(dim) if dim.strip() else 0
    data = _initializer(line, kind, init) if init.strip() else None
    if unsized and data is not None:
        size = len(data)
    return Variable(
        name, space, int(align.group(1)) if align else unit, size, data, "extern" in linkage
    )


def _initializer(line: int, kind: str, text: str) -> bytes:
    out = bytearray()
    for item in split_list(text.strip().strip("{}").replace("{", "").replace("}", "")):
        if not _INT.match(item) and not re.match(r"0[fFdD][0-9a-fA-F]+$", item):
            raise PtxError(
                f"line {line}: initialiser {item!r} is not a literal (addresses are unsupported)"
            )
        bits = _literal(item, line)
        out += (bits & ((1 << 8 * TYPE_BYTES[kind]) - 1)).to_bytes(TYPE_BYTES[kind], "little")
    return bytes(out)


def _literal(text: str, line: int) -> int:
    low = text.lower()
    if re.match(r"0f[0-9a-f]{8}$", low):
        return int(low[2:], 16)
    if re.match(r"0d[0-9a-f]{16}$", low):
        return int(low[2:], 16)
    if _INT.match(text):
        return _integer(text) & 0xFFFFFFFFFFFFFFFF
    if re.match(r"[+-]?\d*\.\d+(e[+-]?\d+)?$", low):
        return int.from_bytes(struct.pack("<d", float(low)), "little")
    raise PtxError(f"line {line}: {text!r} is no literal")


class _FunctionParser:
    """Turns the statements of one function body into instructions."""

    def __init__(self, function: Function, files: dict[int, str]) -> None:
        self.function = function
        self.files = files
        self.root = _Scope(None)
        self.scope = self.root
        self.source: tuple[str, int] | None = None
        self.branches: list[tuple[Instr, _Scope, str]] = []

    def location(self, text: str) -> None:
        match = _LOC.match(text)
        if match:
            self.source = (self.files.get(int(match.group(1)), "?"), int(match.group(2)))

    def open(self) -> None:
        self.scope = _Scope(self.scope)

    def close(self) -> bool:
        """Leaves a scope; True when the function body is over."""
        if self.scope.parent is None:
            return True
        self.scope = self.scope.parent
        return False

    def label(self, name: str) -> None:
        self.scope.labels[name] = len(self.function.instrs)

    def declare_regs(self, line: int, text: str) -> None:
        match = _REG_DECL.match(text)
        if match is None:
            raise PtxError(f"line {line}: cannot read {text[:80]!r}")
        width, kind, names = match.groups()
        for name in split_list(names):
            if width:
                parts = {
                    f"{name}.{c}": self._new(f"{name}.{c}", kind) for c in "xyzw"[: int(width)]
                }
                self.scope.regs.update(parts)
                self.scope.vectors[name] = Vec(tuple(parts.values()))
                continue
            family = re.match(r"(%?[\w$]+?)<(\d+)>$", name)
            if family:
                self.scope.families[family.group(1)] = kind
            else:
                self.scope.regs[name] = self._new(name, kind)

    def _new(self, name: str, kind: str) -> Reg:
        reg = Reg(len(self.function.regs), kind, name)
        self.function.regs.append(reg)
        if kind == "b128":  # two rows: low and high 64 bits
            self.function.regs.append(Reg(reg.id + 1, "b64", name + ".hi"))
        return reg

    def reg(self, name: str) -> Reg | None:
        scope: _Scope | None = self.scope
        prefix = name.rstrip("0123456789")
        while scope is not None:
            found = scope.regs.get(name)
            if found is not None:
                return found
            if prefix != name and prefix in scope.families:
                made = self._new(name, scope.families[prefix])
                scope.regs[name] = made
                return made
            scope = scope.parent
        return None

    def vector(self, name: str) -> Vec | None:
        """A register declared with .v2 or .v4: all of its components."""
        scope: _Scope | None = self.scope
        while scope is not None:
            if name in scope.vectors:
                return scope.vectors[name]
            scope = scope.parent
        return None

    def operand(self, text: str, line: int) -> Operand:
        first = text[:1]
        if first == "[":
            return self._address(text[1:-1].strip(), line)
        if first in "{(":
            return Vec(tuple(self.operand(t, line) for t in split_list(text[1:-1])))
        if text == "_":
            return Sink()
        if "|" in text:
            left, right = text.split("|", 1)
            return Pair(self.operand(left.strip(), line), self.operand(right.strip(), line))
        if first == "!":
            reg = self.reg(text[1:].strip())
            if reg is None:
                raise PtxError(f"line {line}: unknown predicate in {text!r}")
            return Not(reg)
        if first.isdigit() or first in "+-." or text[:2].lower() in ("0f", "0d"):
            return Imm(_literal(text, line))
        reg = self.reg(text) or self.vector(text)
        if reg is not None:
            return reg
        if first == "%":
            return Special(text[1:])
        if text == "WARP_SZ":
            return Imm(32)
        return Sym(text)

    def _address(self, text: str, line: int) -> Addr | TensorAddr:
        parts = split_list(text)
        if len(parts) > 1:
            base = self._address(parts[0], line)
            coords = self.operand(parts[1], line)
            assert isinstance(base, Addr)
            if len(parts) > 2 or not isinstance(coords, Vec):
                raise PtxError(f"line {line}: cannot read the address [{text}]")
            return TensorAddr(base, coords.items)
        match = re.match(r"(.*?[^\s+-])\s*([+-])\s*(-?\w+)$", text)
        if match and _INT.match(match.group(3).lstrip("-") or "x"):
            offset = _integer(match.group(3)) * (-1 if match.group(2) == "-" else 1)
            base_text = match.group(1)
        else:
            offset, base_text = 0, text
        operand = self.operand(base_text, line)
        if not isinstance(operand, Reg | Sym | Imm):
            raise PtxError(f"line {line}: cannot read the address [{text}]")
        return Addr(operand, offset)

    def statement(self, line: int, text: str) -> None:
        if text.startswith("."):
            self._directive(line, text)
            return
        guard, body = None, text
        match = _GUARD.match(text)
        if match:
            reg = self.reg(match.group(2))
            if reg is None:
                raise PtxError(f"line {line}: unknown guard predicate in {text!r}")
            guard, body = (reg.id, bool(match.group(1))), text[match.end() :]
        mnemonic, _, rest = body.replace("\t", " ").replace("\n", " ").strip().partition(" ")
        base, *mods = mnemonic.split(".")
        # "shared::cta" and the like contain no dot, so a plain split is enough
        operands = tuple(self.operand(t, line) for t in split_list(rest))
        instr = Instr(
            len(self.function.instrs), base, tuple(mods), operands, guard, line,
            " ".join(text.split()), self.source,
        )  # fmt: skip
        self.function.instrs.append(instr)
        if base in ("bra", "brx"):
            name = operands[-1]
            if not isinstance(name, Sym):
                raise PtxError(f"line {line}: branch without a label: {text!r}")
            self.branches.append((instr, self.scope, name.name))

    def _directive(self, line: int, text: str) -> None:
        if text.startswith(".reg"):
            self.declare_regs(line, text)
        elif text.startswith(".branchtargets"):
            # belongs to the label just before it
            names = tuple(split_list(text[len(".branchtargets") :]))
            label = next(reversed(self.scope.labels))
            self.scope.tables[label] = names
        elif text.startswith((".pragma", ".callprototype")):
            pass
        elif _VAR.match(text):
            self.function.variables.append(_parse_variable(line, text))
        else:
            raise PtxError(f"line {line}: unknown directive {text[:80]!r}")

    def finish(self) -> None:
        for instr, scope, name in self.branches:
            if instr.base == "brx":
                table = scope.table(name)
                if table is None:
                    raise PtxError(f"line {instr.line}: no .branchtargets {name!r}")
                instr.targets = tuple(self._target(instr, scope, t) for t in table)
            else:
                instr.target = self._target(instr, scope, name)

    @staticmethod
    def _target(instr: Instr, scope: _Scope, name: str) -> int:
        target = scope.label(name)
        if target is None:
            raise PtxError(f"line {instr.line}: branch to unknown label {name!r}: truncated PTX?")
        return target


def _parse_signature(line: int, text: str) -> Function:
    match = FUNCTION.match(text)
    assert match is not None
    _, kind, rest = match.groups()
    header = re.match(
        rf"(\([^)]*\)\s*)?({_NAME})\s*(\((?:[^()]|\([^)]*\))*\))?\s*(.*)$", rest, re.S
    )
    if header is None:
        raise PtxError(f"line {line}: cannot read the function header {text[:80]!r}")
    returns, name, params, attributes = header.groups()

    def variables(group: str | None) -> list[Variable]:
        return [_parse_variable(line, v) for v in split_list(group.strip()[1:-1])] if group else []

    directives: dict[str, tuple[int, ...]] = {}
    for key, values in re.findall(r"\.(\w+)\s*((?:[\d]+\s*,?\s*)*)", attributes):
        directives[key] = tuple(int(v) for v in re.findall(r"\d+", values))
    return Function(name, kind == "entry", variables(params), variables(returns),
                    directives=directives, line=line)  # fmt: skip


def parse(text: str) -> Module:
    """Parses PTX text.

    Raises:
        PtxError: for text that is truncated or not PTX; the message names the line.
    """
    files = {int(n): path for n, path in _FILE.findall(text)}
    functions: dict[str, Function] = {}
    variables: dict[str, Variable] = {}
    target = ""
    pending: Function | None = None
    body: _FunctionParser | None = None
    skip = 0  # depth of a .section
    section = False
    clean = strip_comments(text)
    for line, piece in statements(clean):
        if section or skip:
            section = False
            skip += (piece == "{") - (piece == "}")
        elif body is not None:
            if piece == "{":
                body.open()
            elif piece == "}":
                if body.close():
                    body.finish()
                    body = None
            elif piece.endswith(":"):
                body.label(piece[:-1])
            elif LINE_DIRECTIVE.match(piece):
                body.location(piece)
            else:
                body.statement(line, piece)
        elif piece == "{":
            if pending is None:
                raise PtxError(f"line {line}: '{{' without a function")
            body = _FunctionParser(pending, files)
            functions[pending.name] = pending
            pending = None
        elif piece.startswith(".target"):
            target = piece.split(None, 1)[1].split(",")[0].strip()
        elif piece.startswith(".section"):
            section = True
        elif FUNCTION.match(piece):
            pending = _parse_signature(line, piece)
        elif _VAR.match(piece):
            variable = _parse_variable(line, piece)
            variables[variable.name] = variable
        elif not piece.startswith((".version", ".address", ".file", ".loc", ".pragma", ".alias")):
            raise PtxError(f"line {line}: expected a directive, got {piece[:80]!r}")
    if body is not None:
        raise PtxError(f"function {body.function.name!r} has no end: truncated PTX")
    if not target:
        raise PtxError("no .target directive: this is not PTX")
    return Module(text, target, functions, variables)
