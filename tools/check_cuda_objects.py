#!/usr/bin/env python3
"""Checks the machine code of CUDA kernels as nvcc compiled it, which no test on a machine without a GPU runs.

    tools/check_cuda_objects.py OBJECT...

Reads the cubins in object files (or cubins themselves) without tools of the CUDA toolkit. Prints one line for each
problem and exits with 1 if there is one:

- a trap (the instruction BPT): nvcc compiles device code that reads a host variable to one, without a warning;
- local memory: registers that were spilled, or an array that is indexed at run time;
- more registers than the kernel's budget: fewer threads fit on a multiprocessor;
- fewer registers than a kernel can do its work with: an empty body, or one that the compiler could remove;
- narrow accesses, few bytes on their way to a thread, many instructions, or fp64 in the loop of a kernel that memory should
  limit (WIDE);
- an object without machine code, or architectures that do not have the same kernels.
"""
import collections
import pathlib
import re
import struct
import sys

# A multiprocessor has 65536 registers and takes 2048 threads (compute capability 8.0 and 9.0). 64 registers leave room for
# 1024 threads, four of Semitone's blocks: half of it.
BUDGET = 64
# Kernels with a larger one, by a part of their name, and why.
BUDGETS = {
    "moments_of_rows": 80,  # three sums and a mean of each of eight channels, in fp64 at the end
    "gradients_of_rows": 80,  # two or three tensors, and up to five numbers of each of eight channels
    "elements_of_rows": 80,  # five numbers of each of eight channels
    "gradient_of_rows": 80,  # two rows in 32 registers; three blocks, each thread with up to 128 bytes on their way
    "4poolINS0_4Fp32ELj8E": 80,  # eight maxima, their places, and eight elements on their way
}
# Launch parameters, an index, an address and a value take more than this; the smallest kernel today has 18.
LEAST = 16

# Kernels that memory should limit, by a regular expression for their mangled names. Their loop must have a load of so many
# bytes, must ask for so many bytes before it waits for the first of them, and may have so many fp64 instructions, and so many
# of all kinds for each 16 bytes that it moves.
Wide = collections.namedtuple("Wide", "load_bytes bytes_in_flight fp64 instructions", defaults=(0, 120))
WIDE = {
    r"update_table.*UsualSpansINS0_4Bf16ES3_S3_E": Wide(8, 32, 0, 70),  # split masters with bf16 state: four elements of each tensor
    r"update_table.*UsualSpansINS0_4Bf16ES3_NS0_4Fp32E.*SgdMathILj0E": Wide(8, 24),  # no state
    r"update_table.*UsualSpans.*SgdMathILj0E": Wide(16, 24),
    r"update_table.*UsualSpans": Wide(16, 40),
    r"move_moments.*UsualSpans": Wide(16, 56, 0, 80),  # two sums of squares
    r"unscale_table|reduce_table.*LargestMagnitude|elements_of_(rows|runs)": Wide(16, 32),
    r"reduce_table.*SumOfSquares": Wide(16, 64, 0, 88),  # without loss of digits
    r"gelu_cu.*(values|gradients)I|(values_with_bias|gradients_by_column).*Lj8E": Wide(16, 16, 0, 90),
    r"(normalize|gradient_of)_rows.*RowShapeILj8E": Wide(16, 48, 48),  # sums of a row, between its threads
    r"(normalize|gradient_of)_long_row": Wide(16, 48, 0, 30),
    r"cross_entropy_cu.*loss_of_row.*Lb0E": Wide(16, 16, 0, 75),
    r"cross_entropy_cu.*loss_of_row": Wide(16, 16, 0, 88),  # two sums, of the logits too
    r"cross_entropy_cu.*gradient_of_row": Wide(16, 16, 0, 40),
    r"(moments|gradients)_of_(rows|planes).*Lj8E": Wide(16, 32, 0, 90),
    r"column_sums.*Lj8E": Wide(16, 40, 0, 45),
    r"pool(_backward)?I.*Lj8E": Wide(16, 24, 0, 60),
    r"dropout_cu.*4dropI": Wide(16, 32, 0, 60),
}

# Objects that only query devices.
WITHOUT_KERNELS = ["has_cuda.cu.o"]

ELF_CUDA = 190
# The lower 12 bits of a 16-byte instruction, compute capability 7.0 and later.
BPT = 0x95C
BRANCH = 0x947
LOADS = {0x381, 0x981}  # from global memory: LDG
STORES = {0x386, 0x986}
# DMUL, DADD, DSETP and DFMA, and conversions from and to fp64, with all kinds of operands.
FP64 = {form | kind for form in (0x28, 0x29, 0x2A, 0x2B) for kind in (0x200, 0x400, 0x800, 0xA00, 0xC00, 0xE00)}
FP64 |= {0x310, 0xB10, 0xD10}
ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16, 16)  # by bits 73 to 75
ATTRIBUTE_REGISTERS = 0x2F
ATTRIBUTE_FRAME = 0x11
ATTRIBUTE_LEAST_STACK = 0x12

Kernel = collections.namedtuple("Kernel", "name registers local_bytes traps loop", defaults=(None,))
# The loop of a kernel that loads most bytes in one pass, or the whole kernel if no loop loads any. waits: how often a pass
# waits for memory, with loads that are asked for together counted once.
Loop = collections.namedtuple("Loop", "instructions loads stores loads_in_flight bytes_in_flight waits fp64")
Instruction = collections.namedtuple("Instruction", "operation bytes target scoreboard waits")
Cubin = collections.namedtuple("Cubin", "architecture kernels")


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def instructions_of(code: bytes, architecture: int):
    """What the report needs to know of each instruction. The encoding is not documented. For kernels of this library, the
    accesses, branches and fp64 instructions that are found here were compared with nvdisasm's (CUDA 13.5)."""
    found = []
    for position in range(0, len(code), 16):
        lower, upper = struct.unpack_from("<QQ", code, position)
        operation = lower & 0xFFF
        size = ACCESS_BYTES[upper >> 9 & 7] if operation in LOADS | STORES else 0
        target = None
        if operation == BRANCH:
            # Bits 34 to 81: a signed distance from the next instruction, in units of four bytes. Since compute capability
            # 9.0, bits 16 to 23 have its lowest eight bits.
            distance = lower >> 34 | (upper & 0x3FFFF) << 30
            distance -= (distance >> 47) << 48
            if architecture >= 90:
                distance = distance << 8 | lower >> 16 & 0xFF
            target = (position + 16 + 4 * distance) // 16
        # A load announces its result on one of six scoreboards (7: none); its users wait for that one.
        found.append(Instruction(operation, size, target, upper >> 46 & 7, upper >> 52 & 0x3F))
    return found


def measured(instructions) -> Loop:
    """A straight pass through instructions."""
    waited_for = collections.defaultdict(list)
    loads_in_flight = bytes_in_flight = waits = 0
    has_waited = True
    for one in instructions:
        for scoreboard in range(6):
            if one.waits >> scoreboard & 1 and waited_for[scoreboard]:
                waited_for[scoreboard].clear()
                has_waited = True
        if one.operation in LOADS:
            waits += has_waited
            has_waited = False
            waited_for[one.scoreboard].append(one.bytes)
        sizes = [size for of_scoreboard in waited_for.values() for size in of_scoreboard]
        if sum(sizes) > bytes_in_flight:
            loads_in_flight, bytes_in_flight = len(sizes), sum(sizes)
    return Loop(
        len(instructions),
        [one.bytes for one in instructions if one.operation in LOADS],
        [one.bytes for one in instructions if one.operation in STORES],
        loads_in_flight,
        bytes_in_flight,
        waits,
        sum(one.operation in FP64 for one in instructions),
    )


def hot_loop(instructions) -> Loop:
    loops = []
    for position, one in enumerate(instructions):
        if one.target is not None and 0 <= one.target < position:
            loops.append((one.target, position + 1))
    # Innermost ones: a loop around another one is not a pass.
    inner = [one for one in loops if not any(one != other and one[0] <= other[0] and other[1] <= one[1] and has_access(instructions, other) for other in loops)]
    passes = [measured(instructions[begin:end]) for begin, end in inner]
    passes = [one for one in passes if one.loads] or [measured(instructions)]
    return max(passes, key=lambda one: (sum(one.loads), sum(one.stores), -one.instructions))


def has_access(instructions, loop) -> bool:
    return any(one.operation in LOADS | STORES for one in instructions[loop[0] : loop[1]])


def read_cubin(elf: bytes) -> Cubin:
    """The kernels of an ELF file for CUDA devices."""
    sections_at, flags = struct.unpack_from("<QI", elf, 40)
    size, count, names_in = struct.unpack_from("<HHH", elf, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", elf, sections_at + i * size) for i in range(count)]
    by_name = {text_at(elf, sections[names_in][4] + one[0]): one for one in sections}

    table = by_name[".symtab"]
    strings_at = sections[table[6]][4]
    symbols = [text_at(elf, strings_at + struct.unpack_from("<I", elf, table[4] + i)[0]) for i in range(0, table[5], 24)]

    # {symbol: {attribute: number}}. An entry is its format, its attribute and 16 bits, which are a size where the format is 4.
    attributes = collections.defaultdict(dict)
    position, end = by_name[".nv.info"][4], by_name[".nv.info"][4] + by_name[".nv.info"][5]
    while position < end:
        form, attribute, length = struct.unpack_from("<BBH", elf, position)
        position += 4
        if form != 4:
            continue
        if length == 8:
            symbol, number = struct.unpack_from("<II", elf, position)
            attributes[symbols[symbol]][attribute] = number
        position += length

    # The number of the architecture, 80 or 90, is in other bits since CUDA 13.
    architecture = (flags >> 8) & 0xFF if elf[8] >= 8 else flags & 0xFF

    kernels = []
    for section, one in by_name.items():
        if not section.startswith(".text."):
            continue
        name = section[len(".text.") :]
        instructions = instructions_of(elf[one[4] : one[4] + one[5]], architecture)
        known = attributes[name]
        kernels.append(
            Kernel(
                name,
                known.get(ATTRIBUTE_REGISTERS, 0),
                max(known.get(ATTRIBUTE_FRAME, 0), known.get(ATTRIBUTE_LEAST_STACK, 0)),
                sum(one.operation == BPT for one in instructions),
                hot_loop(instructions),
            )
        )
    return Cubin(architecture, kernels)


def cubins_of(data: bytes):
    """The kernels of an object file, which nvcc does not compress by default."""
    cubins = []
    for match in re.finditer(b"\x7fELF\x02\x01", data):
        elf = data[match.start() :]
        if len(elf) >= 64 and struct.unpack_from("<H", elf, 18)[0] == ELF_CUDA:
            cubins.append(read_cubin(elf))
    return cubins


def short(name: str) -> str:
    """A mangled name without the file's own namespace."""
    return re.sub(r"^_ZN8semitone7kernels\d+_GLOBAL__N__[0-9a-f]{8}_\d+_\w+?_cu_[0-9a-f]{8}(_\d+)?", "", name)


def narrow(kernel: Kernel):
    wide = next((wide for pattern, wide in WIDE.items() if re.search(pattern, kernel.name)), None)
    loop = kernel.loop
    if wide is None or loop is None:
        return
    widest = max(loop.loads, default=0)
    if widest < wide.load_bytes:
        yield f"its widest load has {widest} bytes, less than {wide.load_bytes}"
    if loop.bytes_in_flight < wide.bytes_in_flight:
        yield f"{loop.bytes_in_flight} bytes on their way to a thread, less than {wide.bytes_in_flight}"
    moved = sum(loop.loads) + sum(loop.stores)
    if moved > 0 and 16 * loop.instructions > wide.instructions * moved:
        yield f"{16 * loop.instructions / moved:.0f} instructions in its loop for each 16 bytes, more than {wide.instructions}"
    if loop.fp64 > wide.fp64:
        yield f"{loop.fp64} fp64 instructions in its loop, more than {wide.fp64}"


def problems_in(cubins, where: str):
    problems = []
    if not cubins:
        problems.append(f"{where}: no machine code was found; is it compressed?")
    for cubin in cubins:
        at = f"{where}, sm_{cubin.architecture}"
        if not cubin.kernels and where not in WITHOUT_KERNELS:
            problems.append(f"{at}: no kernels")
        for kernel in cubin.kernels:
            name = short(kernel.name)
            budget = next((most for part, most in BUDGETS.items() if part in name), BUDGET)
            if kernel.traps > 0:
                problems.append(f"{at}: {name}: a trap: does it read a constexpr array at namespace scope, or call what only a host has?")
            if kernel.local_bytes > 0:
                problems.append(f"{at}: {name}: {kernel.local_bytes} bytes of local memory: spilled registers, or an indexed array")
            if kernel.registers > budget:
                problems.append(f"{at}: {name}: {kernel.registers} registers, more than its budget of {budget}")
            if kernel.registers < LEAST:
                problems.append(f"{at}: {name}: {kernel.registers} registers, less than {LEAST}: is its body empty?")
            problems += [f"{at}: {name}: {problem}" for problem in narrow(kernel)]
    names = [sorted(short(kernel.name) for kernel in cubin.kernels) for cubin in cubins]
    if any(of_one != names[0] for of_one in names[1:]):
        problems.append(f"{where}: the architectures have different kernels")
    return problems


def check(paths):
    problems = []
    for path in paths:
        problems += problems_in(cubins_of(path.read_bytes()), path.name)
    return problems


if __name__ == "__main__":
    objects = [pathlib.Path(name) for name in sys.argv[1:]]
    if not objects:
        sys.exit(__doc__)
    found = check(objects)
    for problem in found:
        print(problem)
    sys.exit(1 if found else 0)
