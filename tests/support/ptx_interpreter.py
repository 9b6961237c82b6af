"""Runs the few PTX instructions that hand-written kernels consist of, thread after thread."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

_STATEMENT = re.compile(r"^(?:@(%\w+)\s+)?([\w.]+)\s*(.*);$")


def _statements(ptx: str) -> tuple[list[str], list[str], dict[str, int]]:
    """Names of parameters, instructions, and labels by the instruction that follows."""
    text = re.sub(r"//.*", "", ptx)
    parameters = re.findall(r"\.param \.\w+ (\w+)", text)
    body = text[text.index("{") + 1 : text.rindex("}")]
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in (line.strip() for line in body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(code)
        elif line and not line.startswith(".reg"):
            code.append(line)
    return parameters, code, labels


class _Thread:
    """Registers, over memory that all threads have."""

    def __init__(self, memory: NDArray[np.uint8], registers: dict[str, int]) -> None:
        self._memory, self.registers = memory, registers

    def value(self, operand: str) -> int:
        return self.registers[operand] if operand.startswith("%") else int(operand)

    def read(self, at: str, size: int) -> NDArray[np.uint8]:
        address = self.value(at.strip("[] "))
        assert address % size == 0
        assert 0 <= address <= len(self._memory) - size
        return self._memory[address : address + size]

    def step(self, name: str, operands: list[str]) -> None:
        kind, _, rest = name.partition(".")
        target = operands[0]
        if name.endswith("global.v4.u32"):  # operands are braced lists, which were split
            at = operands[-1] if kind == "ld" else operands[0]
            names = operands[:4] if kind == "ld" else operands[1:]
            words = self.read(at, 16).view(np.uint32)
            for index, each in enumerate(one.strip("{} ") for one in names):
                if kind == "ld":
                    self.registers[each] = int(words[index])
                else:
                    words[index] = self.registers[each]
        elif kind == "ld":
            dtype = {"u64": np.uint64, "s32": np.int32}[name.split(".")[-1]]
            self.registers[target] = int(
                self.read(operands[1], np.dtype(dtype).itemsize).view(dtype)[0]
            )
        elif kind == "setp":
            left, right = map(self.value, operands[1:])
            self.registers[target] = {"ge": left >= right, "lt": left < right}[rest.split(".")[0]]
        else:
            values = [self.value(each) for each in operands[1:]]
            left, right = values[0], values[-1]
            self.registers[target] = {
                "mov": left, "cvt": left, "cvta": left, "add": left + right, "mul": left * right,
                "shl": left << right if 0 <= right < 64 else 0,
                "div": left // right if right else 0, "rem": left % right if right else 0,
            }[kind]  # fmt: skip


def launch(
    ptx: str, parameters: list[int], memory: NDArray[np.uint8], blocks: int, threads: int
) -> None:
    """Run a kernel whose pointers are offsets into `memory`."""
    names, code, labels = _statements(ptx)
    given = dict(zip(names, parameters, strict=True))
    for block in range(blocks):
        for thread in range(threads):
            special = {"%ctaid.x": block, "%tid.x": thread, "%ntid.x": threads}
            _run(_Thread(memory, special), code, labels, given)


def _run(thread: _Thread, code: list[str], labels: dict[str, int], given: dict[str, int]) -> None:
    at = 0
    while True:
        match = _STATEMENT.match(code[at])
        assert match is not None, code[at]
        condition, name, rest = match.groups()
        operands = [each.strip() for each in rest.split(",")]
        at += 1
        if condition is not None and not thread.registers[condition]:
            continue
        if name == "ret":
            return
        if name == "bra":
            at = labels[operands[0]]
        elif name.startswith("ld.param"):
            thread.registers[operands[0]] = given[operands[1].strip("[]")]
        else:
            thread.step(name, operands)
