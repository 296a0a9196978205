#!/usr/bin/env python3
"""Checks the machine code of CUDA kernels as nvcc compiled it, which no test on a machine without a GPU runs.

    tools/check_cuda_objects.py OBJECT...

Reads the cubins in object files (or cubins themselves) without tools of the CUDA toolkit. Prints one line for each
problem and exits with 1 if there is one:

- a trap (the instruction BPT): nvcc compiles device code that reads a host variable to one, without a warning;
- local memory: registers that were spilled, or an array that is indexed at run time;
- more registers than the kernel's budget: fewer threads fit on a multiprocessor;
- fewer registers than a kernel can do its work with: an empty body, or one that the compiler could remove;
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
    "gradient_of_rows": 80,  # two rows in 32 registers; three blocks, each thread with up to 128 bytes on their way
    "pool_backward": 80,  # 64-bit places in five dimensions; three blocks of 256 threads
}
# Launch parameters, an index, an address and a value take more than this; the smallest kernel today has 18.
LEAST = 16

# Objects that only query devices.
WITHOUT_KERNELS = ["has_cuda.cu.o"]

ELF_CUDA = 190
BPT = 0x95C  # the lower 12 bits of a 16-byte instruction, compute capability 7.0 and later
ATTRIBUTE_REGISTERS = 0x2F
ATTRIBUTE_FRAME = 0x11
ATTRIBUTE_LEAST_STACK = 0x12

Kernel = collections.namedtuple("Kernel", "name registers local_bytes traps")
Cubin = collections.namedtuple("Cubin", "architecture kernels")


def text_at(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


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

    kernels = []
    for section, one in by_name.items():
        if not section.startswith(".text."):
            continue
        name = section[len(".text.") :]
        code = elf[one[4] : one[4] + one[5]]
        operations = [struct.unpack_from("<H", code, i)[0] & 0xFFF for i in range(0, len(code), 16)]
        known = attributes[name]
        kernels.append(
            Kernel(
                name,
                known.get(ATTRIBUTE_REGISTERS, 0),
                max(known.get(ATTRIBUTE_FRAME, 0), known.get(ATTRIBUTE_LEAST_STACK, 0)),
                operations.count(BPT),
            )
        )
    # The numbers of the architecture, 80 or 90, are in other bits since CUDA 13.
    version = elf[8]
    return Cubin((flags >> 8) & 0xFF if version >= 8 else flags & 0xFF, kernels)


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
