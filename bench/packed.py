"""Reads the PTX in crates/gqa-cuda/ptx/, whose files crates/gqa-ptx/src/packed.rs describes."""

import collections
import json
import lzma
import pathlib
import re

SHIPPED = pathlib.Path(__file__).parent.parent / "crates/gqa-cuda/ptx"


def modules(folder):
    """The modules of the folder's manifest: kernels that were compiled together."""
    return json.loads((folder / "manifest.json").read_text())["modules"]


def number(arch):
    """100 for sm_100f."""
    return int(arch[3:].rstrip("af"))


def runs_on(arch, sm):
    """Whether GPUs of that compute capability, times ten, run modules for the target."""
    if arch.endswith("a"):
        return number(arch) == sm
    return number(arch) <= sm and not (arch.endswith("f") and number(arch) // 10 != sm // 10)


def ptx(folder, module, kernel):
    """The PTX of one kernel, with its module's header."""
    row = next(row for row in module["kernels"] if row["name"] == kernel)
    # Manifests of older versions name no file: each kernel had its own.
    packed = (folder / row.get("file", f"{module['arch']}/{kernel}.ptx.packed")).read_bytes()
    text = absolute(lzma.decompress(packed, lzma.FORMAT_ALONE).decode())
    twin = row.get("twin", kernel)
    # A file holds the concatenated texts of several modules.
    own = [f"\n.target {module['arch']}\n", f"\n.visible .entry {twin}("]
    texts = re.split(r"(?m)^(?=\.version )", text)
    text = next(text for text in texts if all(part in text for part in own))
    header, *entries = re.split(r"(?m)^(?=\.visible \.entry )", text)
    text = header + next(text for text in entries if text.startswith(f".visible .entry {twin}("))
    return text if twin == kernel else as_f16(text)


# Statements for bfloat16 and what replaces them for float16, as in crates/gqa-ptx/src/twin.rs.
TWINS = [
    ("{ .reg .b32 bf16; cvt.u32.u16 bf16, #1; shl.b32 #0, bf16, 16; }", "cvt.f32.f16 #0, #1;"),
    (
        "{ .reg .b32 bf16; mov.b32 bf16, #1; shl.b32 #0, bf16, 16; }",
        "{ .reg .b16 low, high; mov.b32 {low, high}, #1; cvt.f32.f16 #0, low; }",
    ),
    (
        "{ .reg .b32 bf16; mov.b32 bf16, #1; and.b32 #0, bf16, 0xffff0000; }",
        "{ .reg .b16 low, high; mov.b32 {low, high}, #1; cvt.f32.f16 #0, high; }",
    ),
    (
        "{ .reg .b32 bf16; .reg .b16 low; .reg .pred nan; setp.nan.f32 nan, #1, #1; "
        "bfe.u32 bf16, #1, 16, 1; "
        "add.u32 bf16, bf16, 0x7fff; add.u32 bf16, bf16, #1; selp.b32 bf16, 0x7fffffff, bf16, nan; "
        "mov.b32 {low, #0}, bf16; }",
        "cvt.rn.f16.f32 #0, #1;",
    ),
    (
        "{ .reg .b32 bf16, f16; mov.b32 f16, #2; mov.b32 bf16, #1; mov.b32 #0, bf16; }",
        "mov.b32 #0, #2;",
    ),
]


def as_f16(text):
    """Rewrites the text of a bfloat16 kernel as its float16 twin's."""
    for bf16, f16 in TWINS:
        operands = set()

        def operand(match):
            number = match[1]
            first = number not in operands
            operands.add(number)
            return f"(?P<o{number}>[%\\w]+)" if first else f"(?P=o{number})"

        pattern = re.sub("#(.)", operand, re.escape(bf16).replace("\\#", "#"))
        text = re.sub(pattern, re.sub("#(.)", r"\\g<o\1>", f16), text)
    return text.replace("bf16", "f16")


def absolute(text):
    """The text with relative register numbers made absolute."""
    last = collections.Counter()

    def number(match):
        name, distance = match.groups()
        if distance in (None, "="):
            return name
        last[name] += int(distance)
        return f"{name}{last[name]}"

    return re.sub(r"([%$]\w*)(=|[+-]\d+)?", number, text)


def folded(text, kernel, constants):
    """The text with loads of known parameter bytes replaced by constants, as
    crates/gqa-ptx/src/fold.rs does. `constants` are (parameter, offset, byte)."""
    known = {(parameter, offset): byte for parameter, offset, byte in constants}
    pattern = rf"ld\.param\.b(\d+) \t(%\w+), \[({kernel}_param_(\d+))(?:\+(\d+))?\];"

    def number(parameter, offset, size):
        found = [known.get((parameter, offset + i)) for i in range(size)]
        return None if None in found else int.from_bytes(found, "little")

    def moved(match):
        size, register, name = int(match[1]) // 8, match[2], match[3]
        place = int(match[4]), int(match[5] or 0)
        if (whole := number(*place, size)) is not None:
            bits = {"%rs": 16, "%r": 32, "%rd": 64}[register.rstrip("0123456789")]
            return f"mov.b{bits} {register}, {whole:#x};"
        halves = [number(place[0], place[1] + half, 4) for half in (0, 4)]
        if size < 8 or halves == [None, None]:
            return match[0]
        load = lambda half: f"ld.param.b32 h{half}, [{name}+{place[1] + 4 * half}];"
        moves = [
            load(i) if half is None else f"mov.b32 h{i}, {half:#x};"
            for i, half in enumerate(halves)
        ]
        return f"{{ .reg .b32 h0, h1; {' '.join(moves)} mov.b64 {register}, {{h0, h1}}; }}"

    return re.sub(pattern, moved, text)
