"""Cross-compiling a Triton or Gluon kernel on a machine without a GPU, to read what the compiler made of it.

A kernel that no longer builds, spills registers, loses its tensor-core instruction or needs twice the instructions
shows here in seconds. The disassembler comes with Triton. Left out: anything that has to run.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ARCHITECTURES = (90, 100)  # Hopper, Blackwell

_ADDRESSED = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA\b.*?(0x[0-9a-f]+)")


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture."""

    ptx: str
    sass: str
    registers: int  # per thread
    stack: int  # bytes per thread; above 0 an array went to memory, or registers spilled
    local: int  # bytes per thread
    shared: int  # bytes per program

    @cached_property
    def instructions(self) -> list[str]:
        """The SASS instructions in order, without addresses."""
        return [text.strip() for _, text in _ADDRESSED.findall(self.sass)]

    def count(self, pattern: str) -> int:
        """How many instructions match the regular expression `pattern`, such as "HGMMA" or "LDG.*128"."""
        return sum(re.search(pattern, text) is not None for text in self.instructions)

    @property
    def spills(self) -> bool:
        return self.stack > 0 or self.local > 0 or self.count(r"\b(LDL|STL)\b") > 0

    def loop(self, around: str = "") -> list[str]:
        """The instructions of the longest backward branch: the body of the main loop. Empty where there is none.

        With `around`, a regular expression, the shortest body with an instruction that it matches: a compiler that
        moves unlikely code to the end makes longer ones that are no loops.
        """
        lines = [(int(at, 16), text) for at, text in _ADDRESSED.findall(self.sass)]
        places = {at: i for i, (at, _) in enumerate(lines)}
        bodies = [
            lines[places[int(target[1], 16)] : i + 1]
            for i, (at, text) in enumerate(lines)
            if (target := _BRANCH.search(text)) is not None and int(target[1], 16) < at and int(target[1], 16) in places
        ]
        if around:
            inner = [body for body in bodies if any(re.search(around, text) for _, text in body)]
            return [text.strip() for _, text in min(inner, key=len, default=[])]
        return [text.strip() for _, text in max(bodies, key=len, default=[])]


def compiled(
    kernel: Any,
    signature: dict[str, str],
    constants: dict[str, Any],
    arch: int,
    num_warps: int,
    num_stages: int = 2,
    aligned: tuple[str, ...] | None = None,
    **options: Any,
) -> Compiled:
    """Compile the jitted `kernel` for sm_`arch`.

    `signature` gives the Triton type of each argument that is no constant ("*bf16", "i32", "fp32"), `constants` the
    values of the others; None is a constant too. Arguments are taken to be divisible by 16, as pointers and most sizes
    are: all, or those named in `aligned`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    missing = [name for name in names if name not in signature and name not in constants]
    if missing:
        raise ValueError(f"{kernel.__name__}: neither a type nor a value for {', '.join(missing)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    integral = [name for name in signature if signature[name].startswith(("*", "i", "u"))]
    chosen = integral if aligned is None else aligned
    attrs: dict[Any, Any] = {(names.index(name),): [["tt.divisibility", 16]] for name in chosen}
    make = GluonASTSource if kernel.is_gluon() else ASTSource
    source = make(kernel, types, constants, attrs)
    built = triton.compile(
        source,
        target=GPUTarget("cuda", arch, 32),
        options={"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": True, **options},
    )
    return _read(built.asm["ptx"], built.asm["cubin"], built.metadata.shared)


def _read(ptx: str, cubin: bytes, shared: int) -> Compiled:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        sass, usage = _cuobjdump("--dump-sass", path), _cuobjdump("--dump-resource-usage", path)
    found = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    return Compiled(ptx, sass, found["REG"], found["STACK"], found["LOCAL"], shared)


def _cuobjdump(what: str, path: Path) -> str:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([program, what, path], check=True, capture_output=True, text=True).stdout
