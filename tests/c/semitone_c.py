"""The functions of semitone/c/semitone.h for the tests, with ctypes alone: neither PyTorch nor NumPy.

Every test needs the path of the library in the environment variable SEMITONE_C_LIBRARY.
"""
import ctypes
import os
import struct

FLOAT16, FLOAT32, INT64 = 5, 6, 4
OK, ERROR, FILE_ERROR, COMM_ERROR, DIVERGED_ERROR, LIBTORCH_ERROR = range(6)

library = ctypes.CDLL(os.environ["SEMITONE_C_LIBRARY"])
Pointer = ctypes.c_void_p
for text in ("semitone_last_error", "semitone_version", "semitone_libtorch_version"):
    getattr(library, text).restype = ctypes.c_char_p
library.semitone_free.restype = None


class SemitoneError(Exception):
    def __init__(self, status, message):
        super().__init__(message)
        self.status = status


class Option(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_double)]


class Of(ctypes.Union):
    _fields_ = [("tensor", Pointer), ("integer", ctypes.c_int64), ("real", ctypes.c_double), ("string", ctypes.c_char_p),
                ("tensors", ctypes.POINTER(Pointer)), ("integers", ctypes.POINTER(ctypes.c_int64)),
                ("reals", ctypes.POINTER(ctypes.c_double))]


class Value(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("count", ctypes.c_size_t), ("value", Of)]


def call(name, *arguments):
    """Calls a function that returns a status. Strings and handles are converted."""
    converted = []
    for argument in arguments:
        if isinstance(argument, str):
            argument = ctypes.c_char_p(argument.encode())
        elif isinstance(argument, (Tensor, Handle)):
            argument = argument.pointer
        converted.append(argument)
    status = getattr(library, name)(*converted)
    if status != OK:
        raise SemitoneError(status, library.semitone_last_error().decode())


class Handle:
    """An object of the library."""

    def __init__(self, kind, *arguments, end="destroy", create="create"):
        self.kind, self.end, self.pointer = kind, end, Pointer()
        call(f"semitone_{kind}_{create}", *arguments, ctypes.byref(self.pointer))

    def __getattr__(self, name):
        return lambda *arguments: call(f"semitone_{self.kind}_{name}", self.pointer, *arguments)

    def get(self, name, kind, *arguments):
        result = kind()
        call(f"semitone_{self.kind}_{name}", self.pointer, *arguments, ctypes.byref(result))
        return result.value

    def saved(self):
        data, size = Pointer(), ctypes.c_size_t()
        call(f"semitone_{self.kind}_save", self.pointer, ctypes.byref(data), ctypes.byref(size))
        content = ctypes.string_at(data, size.value)
        library.semitone_free(data)
        return content

    def close(self):
        if self.pointer:
            call(f"semitone_{self.kind}_{self.end}", self.pointer)
            self.pointer = Pointer()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()


class Tensor:
    def __init__(self, pointer):
        self.pointer = pointer

    def __del__(self):
        library.semitone_tensor_destroy(self.pointer)

    @staticmethod
    def of(data, dtype, *sizes):
        pointer = Pointer()
        call("semitone_tensor_create", data, ctypes.c_size_t(len(data or b"")), ctypes.c_int32(dtype),
             (ctypes.c_int64 * len(sizes))(*sizes), ctypes.c_size_t(len(sizes)), ctypes.byref(pointer))
        return Tensor(pointer)

    @staticmethod
    def floats(values, *sizes):
        return Tensor.of(struct.pack(f"{len(values)}f", *values), FLOAT32, *(sizes or [len(values)]))

    @property
    def sizes(self):
        dims = ctypes.c_size_t()
        call("semitone_tensor_sizes", self, None, ctypes.c_size_t(0), ctypes.byref(dims))
        sizes = (ctypes.c_int64 * dims.value)()
        call("semitone_tensor_sizes", self, sizes, dims, ctypes.byref(dims))
        return list(sizes)

    @property
    def dtype(self):
        dtype = ctypes.c_int32()
        call("semitone_tensor_dtype", self, ctypes.byref(dtype))
        return dtype.value

    def bytes(self):
        count = 1
        for size in self.sizes:
            count *= size
        data = ctypes.create_string_buffer(count * {FLOAT16: 2, FLOAT32: 4, INT64: 8}[self.dtype])
        call("semitone_tensor_read", self, data, ctypes.c_size_t(len(data)))
        return data.raw

    def values(self):
        data = self.bytes()
        code, size = {FLOAT16: ("e", 2), FLOAT32: ("f", 4), INT64: ("q", 8)}[self.dtype]
        return list(struct.unpack(f"{len(data) // size}{code}", data))

    def require_grad(self):
        call("semitone_tensor_set_requires_grad", self, ctypes.c_int32(1))
        return self

    @property
    def grad(self):
        pointer = Pointer()
        call("semitone_tensor_grad", self, ctypes.byref(pointer))
        return Tensor(pointer) if pointer else None

    @grad.setter
    def grad(self, value):
        call("semitone_tensor_set_grad", self, value and value.pointer)

    def backward(self):
        call("semitone_tensor_backward", self)


def tensor_list(tensors):
    """The arguments (list, count). The list keeps the tensors alive."""
    pointers = (Pointer * len(tensors))(*[tensor.pointer for tensor in tensors])
    pointers.tensors = tensors
    return pointers, ctypes.c_size_t(len(tensors))


def names_list(names):
    return (ctypes.c_char_p * len(names))(*[name.encode() for name in names])


def options_list(**options):
    return (Option * len(options))(*[Option(name.encode(), value) for name, value in options.items()]), ctypes.c_size_t(len(options))


def value_of(argument):
    value = Value()
    if isinstance(argument, Tensor):
        value.kind, value.value.tensor = 1, argument.pointer
    elif isinstance(argument, bool):
        value.kind, value.value.integer = 4, argument
    elif isinstance(argument, int):
        value.kind, value.value.integer = 2, argument
    elif isinstance(argument, float):
        value.kind, value.value.real = 3, argument
    elif isinstance(argument, str):
        value.kind, value.value.string = 5, argument.encode()
    elif isinstance(argument, list):
        value.count = len(argument)
        if argument and isinstance(argument[0], Tensor):
            value.kind, value.value.tensors = 6, tensor_list(argument)[0]
        elif argument and isinstance(argument[0], float):
            value.kind, value.value.reals = 8, (ctypes.c_double * len(argument))(*argument)
        else:
            value.kind, value.value.integers = 7, (ctypes.c_int64 * len(argument))(*argument)
    return value


def op(name, *arguments, capacity=1):
    """Calls an operator. Returns its results, or the single one."""
    values = (Value * len(arguments))(*[value_of(argument) for argument in arguments])
    results, count = (Pointer * capacity)(), ctypes.c_size_t()
    call("semitone_call", name, values, ctypes.c_size_t(len(arguments)), results, ctypes.c_size_t(capacity), ctypes.byref(count))
    tensors = [Tensor(Pointer(result)) if result else None for result in results[:count.value]]
    return tensors[0] if capacity == 1 and tensors else tensors


class no_grad:
    def __enter__(self):
        self.before = ctypes.c_int32()
        call("semitone_set_grad_enabled", ctypes.c_int32(0), ctypes.byref(self.before))

    def __exit__(self, *exception):
        call("semitone_set_grad_enabled", self.before, None)


def policy(preset="semitone", dtype=FLOAT16):
    return Handle("policy", preset, "cpu", ctypes.c_int32(dtype))


def region(of):
    return Handle("region", of.pointer, end="exit", create="enter")


def scaler(preset="semitone", **options):
    return Handle("scaler", preset, *options_list(**options))
