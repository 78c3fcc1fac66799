"""Cuts PTX text into statements."""

from __future__ import annotations

import re
from collections.abc import Iterator

_LABEL = re.compile(r"\s*([A-Za-z$_%][\w$]*)\s*:(?!:)")
LINE_DIRECTIVE = re.compile(r"\.(loc|file|version|target|address_size)\b")
FUNCTION = re.compile(r"((?:\.(?:visible|weak|extern|common)\s+)*)\.(entry|func)\b\s*(.*)", re.S)


class PtxError(ValueError):
    """The text is not PTX that this parser understands; the message names the line."""


def strip_comments(text: str) -> str:
    """Blanks comments, keeping the line structure."""
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def statements(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, piece): statements without `;`, "{" and "}" of scopes, "name:" labels, line
    directives."""
    start, depth, buffer = 0, 0, ""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw
        if not buffer and LINE_DIRECTIVE.match(line.lstrip()):
            yield number, line.strip()
            continue
        while line:
            if not buffer:
                line = line.lstrip()
                if not line:
                    break
                start = number
                if line[0] in "{}":
                    yield number, line[0]
                    line = line[1:]
                    continue
                label = _LABEL.match(line)
                if label:
                    yield number, label.group(1) + ":"
                    line = line[label.end() :]
                    continue
            end, depth = _statement_end(line, depth, buffer)
            if end < 0:
                buffer += line + "\n"
                break
            buffer += line[:end]
            if line[end] == ";":
                yield start, buffer.strip()
                line = line[end + 1 :]
            else:  # "{" opens the body of a function or section
                yield start, buffer.strip()
                line = line[end:]
            buffer = ""
    if buffer.strip():
        raise PtxError(f"line {start}: the text ends inside {buffer.strip()[:60]!r}: truncated PTX")


def _statement_end(line: str, depth: int, buffer: str) -> tuple[int, int]:
    """Position of the `;` or of the `{` that ends the statement, or -1, and the new bracket
    depth."""
    head = (buffer + line).lstrip()
    opens_body = bool(FUNCTION.match(head)) or head.startswith(".section")
    quoted = False
    for i, c in enumerate(line):
        if c == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif c == ";":
            return i, 0
        elif c in "([":
            depth += 1
        elif c in ")]":
            depth -= 1
        elif c == "{" and opens_body and depth == 0:
            return i, 0
    return -1, depth


def split_list(text: str) -> list[str]:
    """Splits at top-level commas."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    tail = text[start:].strip()
    if tail:
        parts.append(tail)
    return parts
