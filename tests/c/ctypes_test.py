"""The C interface from Python's ctypes, and the same training as in C++, bit for bit.

    SEMITONE_C_LIBRARY=… ctypes_test.py EXPECTED_TRAINING
"""
import ctypes
import os
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock

import semitone_c as c
from semitone_c import FLOAT16, FLOAT32, INT64, Handle, SemitoneError, Tensor, no_grad, op

PROGRAM = None  # from the command line
STEPS, ROWS, INPUTS, HIDDEN, CLASSES = 40, 32, 12, 16, 4


class Data:
    """Inputs, targets and initial weights, as bytes."""

    def __init__(self):
        draw = random.Random(5)

        def floats(count, bound):
            return struct.pack(f"{count}f", *[draw.uniform(-bound, bound) for _ in range(count)])

        self.shapes = [(HIDDEN, INPUTS), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,)]
        self.weights = [floats(rows * (columns[0] if columns else 1), 0.4) for rows, *columns in self.shapes]
        self.inputs = [floats(ROWS * INPUTS, 1) for _ in range(STEPS)]
        # The class is where the input's first numbers are largest, so that there is something to learn.
        self.targets = []
        for data in self.inputs:
            values = struct.unpack(f"{ROWS * INPUTS}f", data)
            rows = [values[INPUTS * row:INPUTS * row + CLASSES] for row in range(ROWS)]
            self.targets.append(struct.pack(f"{ROWS}q", *[row.index(max(row)) for row in rows]))

    def file(self, use_masters):
        return b"".join([struct.pack("6q", STEPS, ROWS, INPUTS, HIDDEN, CLASSES, use_masters), *self.weights, *self.inputs,
                         *self.targets])


def sgd(parameters, lr):
    with no_grad():
        for parameter in parameters:
            op("aten::add_.Tensor", parameter, parameter.grad, -lr)


def linear(x, weight, bias):
    return op("aten::addmm", bias, x, op("aten::t", weight))


def cross_entropy(output, target):
    return op("aten::cross_entropy_loss", output, target)


def train(data, use_masters):
    """Returns the losses and scales of each step, the final weights and the number of skipped steps, as bytes."""
    weights = [Tensor.of(content, FLOAT32, *shape) for content, shape in zip(data.weights, data.shapes)]
    if use_masters:
        weights = [op("aten::to.dtype", weight, FLOAT16) for weight in weights]
    for weight in weights:
        weight.require_grad()
    trained, masters = weights, None
    if use_masters:
        masters = Handle("masters", *c.tensor_list(weights))
        pointers = (ctypes.c_void_p * len(weights))()
        masters.list(pointers, ctypes.c_size_t(len(weights)))
        trained = [Tensor(ctypes.c_void_p(pointer)) for pointer in pointers]
    policy = c.policy("none" if use_masters else "semitone")
    scaler = c.scaler(init_scale=2.0**24, growth_interval=5, growth_factor=4)
    record = []
    for step in range(STEPS):
        x = Tensor.of(data.inputs[step], FLOAT32, ROWS, INPUTS)
        target = Tensor.of(data.targets[step], INT64, ROWS)
        for weight in trained:
            weight.grad = None
        with c.region(policy):
            if use_masters:
                x = op("aten::to.dtype", x, FLOAT16)
            output = linear(op("aten::relu", linear(x, *weights[:2])), *weights[2:])
            if use_masters:
                output = op("aten::to.dtype", output, FLOAT32)
            loss = cross_entropy(output, target)
        scaled = ctypes.c_void_p()
        scaler.scale(loss, ctypes.byref(scaled))
        Tensor(scaled).backward()
        if masters:
            masters.take_gradients()
        found_inf = scaler.get("unscale", ctypes.c_int32, *c.tensor_list(trained))
        if not found_inf:
            sgd(trained, 0.5)
            if masters:
                masters.write_model()
        scaler.update()
        record += [loss.bytes(), struct.pack("d", scaler.get("get_scale", ctypes.c_double))]
    record += [weight.bytes() for weight in weights]
    skipped = scaler.get("skipped_steps", ctypes.c_int64)
    record.append(struct.pack("d", skipped))
    if masters:
        masters.close()
    policy.close()
    scaler.close()
    return record, skipped


class SameBitsTest(unittest.TestCase):
    def compare(self, use_masters):
        data = Data()
        record, skipped = train(data, use_masters)
        with tempfile.TemporaryDirectory() as folder:
            given, made = pathlib.Path(folder, "input"), pathlib.Path(folder, "output")
            given.write_bytes(data.file(use_masters))
            subprocess.run([PROGRAM, given, made], check=True)
            self.assertEqual(b"".join(record).hex(), made.read_bytes().hex())
        # It was a training with overflows: the scale fell and grew, and the loss fell.
        losses = [struct.unpack("f", loss)[0] for loss in record[0:2 * STEPS:2]]
        scales = [struct.unpack("d", scale)[0] for scale in record[1:2 * STEPS:2]]
        self.assertGreater(skipped, 1)
        self.assertTrue(any(after > before for before, after in zip(scales, scales[1:])))
        self.assertTrue(any(after < before for before, after in zip(scales, scales[1:])))
        self.assertLess(sum(losses[-4:]), 0.95 * sum(losses[:4]))

    def test_fp16_with_dynamic_scaling(self):
        self.compare(0)

    def test_fp16_with_master_weights(self):
        self.compare(1)


class TensorsTest(unittest.TestCase):
    def test_elements_come_back(self):
        tensor = Tensor.floats([1, 2, 3, 4, 5, 6], 2, 3)
        self.assertEqual((tensor.sizes, tensor.dtype, tensor.values()), ([2, 3], FLOAT32, [1, 2, 3, 4, 5, 6]))
        self.assertEqual(op("aten::t", tensor).values(), [1, 4, 2, 5, 3, 6])
        self.assertEqual(Tensor.of(None, FLOAT16, 2).values(), [0, 0])
        self.assertEqual(Tensor.of(None, FLOAT32).sizes, [])

    def test_gradients(self):
        tensor = Tensor.floats([1, 2]).require_grad()
        self.assertIsNone(tensor.grad)
        op("aten::sum", op("aten::mul.Tensor", tensor, tensor)).backward()
        self.assertEqual(tensor.grad.values(), [2, 4])
        tensor.grad = Tensor.floats([7, 8])
        self.assertEqual(tensor.grad.values(), [7, 8])
        with self.assertRaisesRegex(SemitoneError, "expected a gradient of the tensor's sizes"):
            tensor.grad = Tensor.floats([7])
        with self.assertRaisesRegex(SemitoneError, "expected a gradient that is another tensor, got the tensor itself"):
            tensor.grad = tensor
        tensor.grad = None
        self.assertIsNone(tensor.grad)

    def test_operators_take_lists_and_defaults(self):
        one, two = Tensor.floats([1, 2]), Tensor.floats([3, 4])
        self.assertEqual(op("aten::cat", [one, two]).values(), [1, 2, 3, 4])
        self.assertEqual(op("aten::add.Tensor", one, two, 10).values(), [31, 42])
        self.assertEqual(op("aten::reshape", one, [2, 1]).sizes, [2, 1])
        self.assertEqual(len(op("aten::split.Tensor", op("aten::cat", [one, two]), 1, capacity=4)), 4)
        self.assertEqual(op("aten::add_.Tensor", one, two, capacity=0), [])
        self.assertEqual(one.values(), [4, 6])

    def test_numbers_of_libtorch_are_in_range(self):
        one = Tensor.floats([1, 2])
        for number in (-1, 99, 2**40, 256 + FLOAT32):
            with self.subTest(number), self.assertRaisesRegex(SemitoneError, f"of LibTorch's for 'dtype', got {number}"):
                op("aten::to.dtype", one, number)
        with self.assertRaisesRegex(SemitoneError, "of LibTorch's for 'memory_format', got 77"):
            op("aten::contiguous", one, 77)
        self.assertEqual(op("aten::to.dtype", one, FLOAT16).dtype, FLOAT16)

    def test_messages_are_utf8(self):
        for name in (b"aten::\xff\xc3", "aten::é".encode()[:-1], b"aten::\xe2\x82"):
            with self.assertRaisesRegex(SemitoneError, "aten::[?]+'"):
                c.call("semitone_call", ctypes.c_char_p(name), None, ctypes.c_size_t(0), None, ctypes.c_size_t(0), None)
        with self.assertRaisesRegex(SemitoneError, "'aten::é€𝄞'"):
            op("aten::é€𝄞")
        with self.assertRaises(SemitoneError) as raised:  # cut off, between two characters
            op("aten::" + "é" * 5000)
        self.assertLess(len(str(raised.exception).encode()), 4096)

    def test_operators_report_errors(self):
        one = Tensor.floats([1, 2])
        for expected, call in [
            ("expected an operator of LibTorch like 'aten::add.Tensor', got 'aten::no_such'", lambda: op("aten::no_such")),
            ("expected an operator of LibTorch", lambda: op("add.Tensor", one, one)),
            ("missing value for argument 'other'", lambda: op("aten::add.Tensor", one)),
            ("Expected at most 3 argument", lambda: op("aten::add.Tensor", one, one, 1, 1)),
            ("but instead found type", lambda: op("aten::add.Tensor", one, "text")),
            ("size of tensor", lambda: op("aten::add.Tensor", one, Tensor.floats([1, 2, 3]))),
            ("'aten::size' with a result of type Int|whose results are tensors", lambda: op("aten::size.int", one, 0)),
            ("expected space for the 2 results of 'aten::max.dim', got a capacity of 1", lambda: op("aten::max.dim", one, 0)),
            ("expected space for the 2 results of 'aten::split.Tensor'", lambda: op("aten::split.Tensor", one, 1)),
        ]:
            with self.subTest(expected), self.assertRaisesRegex(SemitoneError, expected):
                call()


class PoliciesTest(unittest.TestCase):
    def product(self, policy, weight=None):
        weight = weight or Tensor.floats([1, 2, 3, 4], 2, 2)
        with c.region(policy):
            return op("aten::mm", Tensor.floats([1, 2, 3, 4], 2, 2), weight).dtype

    def test_a_region_lowers_matrix_products(self):
        with c.policy() as policy:
            self.assertEqual(self.product(policy), FLOAT16)
            self.assertEqual(policy.get("find", ctypes.c_int32, "mm"), 0)
            self.assertEqual(policy.get("find", ctypes.c_int32, "add.Tensor"), -1)
            policy.set("add", ctypes.c_int32(1))
            self.assertEqual(policy.get("find", ctypes.c_int32, "add.Tensor"), 1)
            self.assertEqual(policy.get("find", ctypes.c_int32, "add"), -1)  # no overload has this name

    def test_the_cache_of_casts_can_be_emptied(self):
        """A write through data is noticed by 32 of the 4096 elements only."""
        weight = Tensor.of(bytes(4 * 64 * 64), FLOAT32, 64, 64).require_grad()
        with no_grad():
            row = op("aten::select.int", op("aten::data", weight), 0, 0)
        missed = 0
        with c.policy() as policy, c.region(policy):
            def product():
                return op("aten::mm", Tensor.floats([1] + [0] * 63, 1, 64), weight).values()
            for place in range(64):
                before = product()
                with no_grad():
                    op("aten::fill_.Scalar", op("aten::select.int", row, 0, place), 1.0)
                missed += product() == before
                c.call("semitone_clear_cast_cache")
                self.assertEqual(product(), [1.0] * (place + 1) + [0.0] * (63 - place))
        self.assertGreater(missed, 0)

    def test_a_policy_can_be_edited_while_a_region_uses_it(self):
        with c.policy() as policy:
            policy.set("mm", ctypes.c_int32(1))
            self.assertEqual(policy.get("find", ctypes.c_int32, "mm"), 1)
            self.assertEqual(self.product(policy), FLOAT32)

    def test_bound_parameters_stay_in_fp32(self):
        first, second = [Tensor.floats([1, 2, 3, 4], 2, 2).require_grad() for _ in range(2)]
        with c.policy() as policy:
            policy.keep_fp32_params("head.*")
            with self.assertRaisesRegex(SemitoneError, "not bound"):
                c.region(policy)
            policy.bind(c.names_list(["head.0.weight", "body.weight"]), *c.tensor_list([first, second]))
            self.assertEqual(self.product(policy, first), FLOAT32)
            self.assertEqual(self.product(policy, second), FLOAT16)

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder, c.policy() as policy:
            path = f"{folder}/policy.json"
            policy.set("mm", ctypes.c_int32(1))
            policy.save(path)
            with Handle("policy", path, "cpu", ctypes.c_int32(FLOAT16), create="load") as loaded:
                self.assertEqual(self.product(loaded), FLOAT32)
            text = ctypes.c_void_p()
            policy.to_json(ctypes.byref(text))
            self.assertEqual(ctypes.string_at(text).strip(), pathlib.Path(path).read_bytes().strip())
            c.library.semitone_free(text)
            with self.assertRaises(SemitoneError) as raised:
                Handle("policy", f"{folder}/none.json", "cpu", ctypes.c_int32(FLOAT16), create="load")
            self.assertEqual(raised.exception.status, c.FILE_ERROR)
            with self.assertRaisesRegex(SemitoneError, "which is a directory") as raised:
                Handle("policy", folder, "cpu", ctypes.c_int32(FLOAT16), create="load")
            self.assertEqual(raised.exception.status, c.FILE_ERROR)

    def test_kernels_and_emulation(self):
        with c.policy() as policy:
            policy.set_emulation("always")
            policy.set_fast_kernels(ctypes.c_int32(0))
            with self.assertRaisesRegex(SemitoneError, "expected 'automatic', 'always' or 'never', got 'sometimes'"):
                policy.set_emulation("sometimes")

    def test_wrong_arguments(self):
        with c.policy() as policy:
            for expected, call in [
                ("'mmm'", lambda: policy.set("mmm", ctypes.c_int32(0))),
                ("expected an action, SEMITONE_ACTION_LOWER …, got the number 6", lambda: policy.set("mm", ctypes.c_int32(6))),
                ("'pytorch'", lambda: c.policy("pytorch")),
                ("expected SEMITONE_FLOAT16, SEMITONE_BFLOAT16", lambda: c.policy(dtype=FLOAT32)),
                ("a device like 'cpu' or 'cuda:1', got 'gpu'", lambda: Handle("policy", "torch", "gpu", ctypes.c_int32(-1))),
                ("expected a name of a preset, got a null pointer", lambda: Handle("policy", None, "cpu", ctypes.c_int32(-1))),
                ("'a' twice", lambda: policy.bind(c.names_list(["a", "a"]), *c.tensor_list([Tensor.floats([1]), Tensor.floats([1])]))),
                ("like 'encoder.0.weight', got 'a..b'", lambda: policy.bind(c.names_list(["a..b"]), *c.tensor_list([Tensor.floats([1])]))),
            ]:
                with self.subTest(expected), self.assertRaisesRegex(SemitoneError, expected) as raised:
                    call()
                self.assertEqual(raised.exception.status, c.ERROR)


class RegionsTest(unittest.TestCase):
    def active(self):
        active = ctypes.c_int32()
        c.call("semitone_region_is_active", "cpu", ctypes.byref(active))
        return active.value

    def test_regions_nest(self):
        with c.policy() as policy, c.region(policy):
            self.assertEqual(self.active(), 1)
            with Handle("region", "cpu", create="enter_disabled", end="exit"):
                self.assertEqual(self.active(), 0)
            self.assertEqual(self.active(), 1)
        self.assertEqual(self.active(), 0)

    def test_the_order_is_checked(self):
        with c.policy() as policy:
            outer, inner = c.region(policy), c.region(policy)
            with self.assertRaisesRegex(SemitoneError, "expected the region of this thread that was entered last"):
                outer.close()
            inner.close()
            outer.close()
        self.assertEqual(self.active(), 0)

    def test_the_thread_is_checked(self):
        errors = []

        def elsewhere(region):
            self.assertEqual(self.active(), 0)
            try:
                region.close()
            except SemitoneError as error:
                errors.append(str(error))

        with c.policy() as policy, c.region(policy) as region:
            thread = threading.Thread(target=elsewhere, args=[region])
            thread.start()
            thread.join()
            self.assertEqual(self.active(), 1)
        self.assertEqual(len(errors), 1)
        self.assertIn("expected the thread that entered the region, got another thread", errors[0])

    def test_a_region_ends_once(self):
        with c.policy() as policy:
            region = c.region(policy)
            pointer = ctypes.c_void_p(region.pointer.value)
            region.close()
            with self.assertRaisesRegex(SemitoneError, "a handle that was destroyed"):
                c.call("semitone_region_exit", pointer)

    def test_the_policy_may_end_first(self):
        policy = c.policy()
        with c.region(policy):
            policy.close()
            self.assertEqual(op("aten::mm", Tensor.floats([1], 1, 1), Tensor.floats([1], 1, 1)).dtype, FLOAT16)


class LibraryTest(unittest.TestCase):
    def test_it_stays_loaded(self):
        """LibTorch has kernels of the library, and calls them until the process ends."""
        program = """
import ctypes, _ctypes, sys, threading
library = ctypes.CDLL(sys.argv[1])
policy, region = ctypes.c_void_p(), ctypes.c_void_p()
library.semitone_policy_create(b"semitone", b"cpu", 5, ctypes.byref(policy))
def use():
    library.semitone_region_enter(policy, ctypes.byref(region))
    library.semitone_region_exit(region)
thread = threading.Thread(target=use)
thread.start()
thread.join()
_ctypes.dlclose(library._handle)
assert "libsemitone_c" in open("/proc/self/maps").read()
"""
        subprocess.run([sys.executable, "-c", program, os.environ["SEMITONE_C_LIBRARY"]], check=True)


class ScalersTest(unittest.TestCase):
    def with_gradient(self, *gradient):
        tensor = Tensor.floats([0.0] * len(gradient)).require_grad()
        tensor.grad = Tensor.floats(gradient)
        return tensor

    def scaled(self, scaler):
        pointer = ctypes.c_void_p()
        scaler.scale(Tensor.floats([1]), ctypes.byref(pointer))
        return Tensor(pointer)

    def test_a_list_is_unscaled_in_place(self):
        with c.scaler(init_scale=8) as scaler:
            self.assertEqual(self.scaled(scaler).values(), [8])
            tensors = [self.with_gradient(8, 16), Tensor.floats([1]).require_grad(), self.with_gradient(4)]
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *c.tensor_list(tensors)), 0)
            self.assertEqual(tensors[0].grad.values(), [1, 2])
            self.assertIsNone(tensors[1].grad)
            self.assertEqual(tensors[2].grad.values(), [0.5])

    def test_an_expanded_gradient_is_refused_before_others_change(self):
        with c.scaler(init_scale=8) as scaler:
            self.scaled(scaler)
            good, expanded = self.with_gradient(8), self.with_gradient(1, 1)
            expanded.grad = op("aten::expand", Tensor.floats([8]), [2])
            for _ in range(2):
                with self.assertRaisesRegex(SemitoneError, "got an expanded gradient"):
                    scaler.get("unscale", ctypes.c_int32, *c.tensor_list([good, expanded]))
                self.assertEqual(good.grad.values(), [8])

    def test_a_damaged_state_is_an_error(self):
        with c.scaler(init_scale=32) as scaler:
            self.scaled(scaler)
            state = scaler.saved()
            draw = random.Random(7)
            places = [draw.randrange(len(state)) for _ in range(200)] + list(range(len(state) - 30, len(state)))
            damages = [state[:place] + bytes([state[place] ^ 1 << draw.randrange(8)]) + state[place + 1:] for place in places]
            for damaged in damages + [state[:-1], state + b" ", state[:10], b""]:
                with self.assertRaises(SemitoneError) as error:
                    scaler.load(damaged, ctypes.c_size_t(len(damaged)))
                self.assertEqual(error.exception.status, c.FILE_ERROR, str(error.exception))
            self.assertEqual(scaler.get("get_scale", ctypes.c_double), 32)
            scaler.load(state, ctypes.c_size_t(len(state)))

    def test_the_region_of_the_caller_does_not_lower_the_scaled_loss(self):
        with c.policy() as policy, c.scaler(init_scale=2.0**24) as scaler:
            policy.set("mul", ctypes.c_int32(0))
            with c.region(policy):
                self.assertEqual(self.scaled(scaler).values(), [2.0**24])

    def test_an_overflow_backs_the_scale_off(self):
        with c.scaler(init_scale=8) as scaler:
            self.scaled(scaler)
            good, bad = self.with_gradient(8), self.with_gradient(1, float("inf"))
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *c.tensor_list([good])), 0)
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *c.tensor_list([bad])), 1)
            scaler.update()
            self.assertEqual(scaler.get("get_scale", ctypes.c_double), 4)
            self.assertEqual(scaler.get("skipped_steps", ctypes.c_int64), 1)

    def test_the_order_of_calls_is_checked(self):
        with c.scaler() as scaler:
            tensors = c.tensor_list([self.with_gradient(8)])
            with self.assertRaisesRegex(SemitoneError, r"expected scale\(\) to be called before"):
                scaler.get("unscale", ctypes.c_int32, *tensors)
            with self.assertRaises(SemitoneError):
                scaler.update()
            self.scaled(scaler)
            with self.assertRaisesRegex(SemitoneError, r"call semitone_scaler_unscale\(\) before the optimizer's step"):
                scaler.update()
            scaler.get("unscale", ctypes.c_int32, *tensors)
            with self.assertRaisesRegex(SemitoneError, "expected each parameter once between two updates"):
                scaler.get("unscale", ctypes.c_int32, *tensors)
            scaler.update()
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *tensors), 0)

    def test_many_skips_are_a_divergence_that_names_the_parameter(self):
        with c.scaler(max_consecutive_skips=2) as scaler:
            tensors = [self.with_gradient(1), self.with_gradient(float("nan"))]
            scaler.name_parameters(c.names_list(["good", "layer.bad"]), *c.tensor_list(tensors))
            self.scaled(scaler)
            scaler.get("unscale", ctypes.c_int32, *c.tensor_list(tensors))
            scaler.update()
            scaler.get("unscale", ctypes.c_int32, *c.tensor_list(tensors))
            with self.assertRaisesRegex(SemitoneError, "layer.bad") as raised:
                scaler.update()
            self.assertEqual(raised.exception.status, c.DIVERGED_ERROR)
            scaler.get("unscale", ctypes.c_int32, *c.tensor_list(tensors))  # usable

    def test_the_state_is_saved(self):
        with c.scaler(init_scale=8, growth_interval=3) as first, c.scaler() as second:
            self.scaled(first)
            first.get("unscale", ctypes.c_int32, *c.tensor_list([self.with_gradient(float("inf"))]))
            with self.assertRaises(SemitoneError):
                first.saved()
            first.update()
            state = first.saved()
            second.load(state, ctypes.c_size_t(len(state)))
            self.assertEqual(second.get("get_scale", ctypes.c_double), 4)
            self.assertEqual(second.get("skipped_steps", ctypes.c_int64), 1)
            for wrong in (state[:100], b"", b"no archive"):
                with self.assertRaises(SemitoneError) as raised:
                    second.load(wrong, ctypes.c_size_t(len(wrong)))
                self.assertEqual(raised.exception.status, c.FILE_ERROR)
            self.assertEqual(second.get("get_scale", ctypes.c_double), 4)

    def test_options(self):
        for preset in ("semitone", "torch", "apex", "paddle", "deepspeed"):
            c.scaler(preset).close()
        with c.scaler(init_scale=8, overflow_count=2, scale_dtype=7, dynamic=0) as scaler:
            self.scaled(scaler)
            scaler.get("unscale", ctypes.c_int32, *c.tensor_list([self.with_gradient(float("inf"))]))
            scaler.update()
            self.assertEqual(scaler.get("get_scale", ctypes.c_double), 8)
            scaler.set_options(*c.options_list(dynamic=1))
            scaler.get("unscale", ctypes.c_int32, *c.tensor_list([self.with_gradient(float("inf"))]))
            scaler.update()
            self.assertEqual(scaler.get("get_scale", ctypes.c_double), 4)
            scaler.set_scale(ctypes.c_double(3))
            self.assertEqual(scaler.get("get_scale", ctypes.c_double), 3)
            with self.assertRaises(SemitoneError):
                scaler.set_scale(ctypes.c_double(0))
        for expected, options in [
            ("'init_scal' — did you mean 'init_scale'", {"init_scal": 8}),
            ("an integer for the option 'growth_interval', got 0.5", {"growth_interval": 0.5}),
            ("0 or 1 for the option 'dynamic', got 2", {"dynamic": 2}),
            ("for the option 'overflow_count', got 3", {"overflow_count": 3}),
            ("for the option 'scale_dtype', got 1", {"scale_dtype": 1}),
            ("init_scale", {"init_scale": -1}),
        ]:
            with self.subTest(expected), self.assertRaisesRegex(SemitoneError, expected):
                c.scaler(**options)
        with self.assertRaisesRegex(SemitoneError, "'paddle' or 'deepspeed', got 'pytorch'"):
            c.scaler("pytorch")


class MastersTest(unittest.TestCase):
    def setUp(self):
        self.low = op("aten::to.dtype", Tensor.floats([1, 2]), FLOAT16).require_grad()
        self.full = Tensor.floats([3]).require_grad()
        self.masters = Handle("masters", *c.tensor_list([self.low, self.full]))
        self.addCleanup(self.masters.close)
        pointers = (ctypes.c_void_p * 2)()
        self.masters.list(pointers, ctypes.c_size_t(2))
        self.trained = [Tensor(ctypes.c_void_p(pointer)) for pointer in pointers]

    def test_the_list_has_masters_and_fp32_parameters(self):
        self.assertEqual([tensor.dtype for tensor in self.trained], [FLOAT32, FLOAT32])
        self.assertEqual(self.trained[0].values(), [1, 2])
        with no_grad():
            op("aten::add_.Scalar", self.trained[1], 1)
        self.assertEqual(self.full.values(), [4])

    def test_small_updates_accumulate(self):
        with no_grad():
            for _ in range(4):
                op("aten::add_.Scalar", self.trained[0], 2.0**-12)
                self.masters.write_model()
        self.assertEqual(self.low.values(), [1 + 2.0**-10, 2])
        self.assertEqual(self.trained[0].values(), [1 + 2.0**-10, 2 + 2.0**-10])

    def test_a_damaged_state_is_an_error(self):
        state = self.masters.saved()
        # The tensor's strides, (1,), after its sizes, (2,): with a longer one it would end outside of its memory.
        place = state.index(b"K\x01", state.index(b"K\x02")) + 1
        damaged = state[:place] + b"\xff" + state[place + 1:]
        with self.assertRaisesRegex(SemitoneError, "do not match their checksum"):
            self.masters.load(damaged, ctypes.c_size_t(len(damaged)))
        self.assertEqual(self.trained[0].values(), [1, 2])

    def test_an_expanded_gradient_is_refused_before_others_change(self):
        two = Tensor.floats([1, 2]).require_grad()
        with Handle("masters", *c.tensor_list([self.low, two])) as masters:
            self.low.grad = op("aten::to.dtype", Tensor.floats([5, 6]), FLOAT16)
            two.grad = op("aten::expand", Tensor.floats([8]), [2])
            with self.assertRaisesRegex(SemitoneError, "got an expanded gradient"):
                masters.take_gradients()
            self.assertEqual(self.low.grad.values(), [5, 6])

    def test_gradients_move(self):
        self.low.grad = op("aten::to.dtype", Tensor.floats([5, 6]), FLOAT16)
        self.full.grad = Tensor.floats([7])
        self.masters.take_gradients()
        self.assertIsNone(self.low.grad)
        self.assertEqual([tensor.grad.values() for tensor in self.trained], [[5, 6], [7]])
        self.masters.clear_gradients()
        self.assertEqual([tensor.grad for tensor in self.trained], [None, None])

    def test_changed_parameters_are_taken(self):
        with no_grad():
            op("aten::fill_.Scalar", self.low, 9)
        self.masters.sync()
        self.assertEqual(self.trained[0].values(), [9, 9])

    def test_the_region_of_the_caller_does_not_lower_masters(self):
        with no_grad():
            op("aten::add_.Scalar", self.trained[0], 2.0**-12)
            self.masters.write_model()
            op("aten::fill_.Scalar", op("aten::narrow", self.low, 0, 1, 1), 9)
        with c.policy() as policy:
            policy.set("where", ctypes.c_int32(0))
            with c.region(policy):
                self.masters.sync()
        self.assertEqual(self.trained[0].values(), [1 + 2.0**-12, 9])

    def test_parameters_that_are_unfrozen_too_late_are_refused(self):
        frozen = op("aten::to.dtype", Tensor.floats([1, 2]), FLOAT16)
        with Handle("masters", *c.tensor_list([self.full, frozen])) as masters:
            state = masters.saved()
            frozen.require_grad()
            frozen.grad = op("aten::to.dtype", Tensor.floats([5, 6]), FLOAT16)
            for call in (masters.sync, lambda: masters.load(state, ctypes.c_size_t(len(state)))):
                with self.assertRaisesRegex(SemitoneError, "none for the parameter in place 1 of 2.* — destroy the masters"):
                    call()
            # The caller's optimizer has the parameter itself, and finds the gradient there.
            masters.take_gradients()
            self.assertEqual(frozen.grad.values(), [5, 6])
        with Handle("masters", *c.tensor_list([self.full, frozen])) as masters:
            masters.sync()

    def test_gradients_do_not_come_back_when_masters_end(self):
        self.low.grad = op("aten::to.dtype", Tensor.floats([5, 6]), FLOAT16)
        self.masters.take_gradients()
        self.masters.close()
        self.assertIsNone(self.low.grad)

    def test_the_state_is_saved(self):
        with no_grad():
            op("aten::add_.Scalar", self.trained[0], 2.0**-12)
        self.masters.write_model()
        state = self.masters.saved()
        with no_grad():
            op("aten::fill_.Scalar", self.trained[0], 0)
        self.masters.write_model()
        self.masters.load(state, ctypes.c_size_t(len(state)))
        self.assertEqual(self.trained[0].values(), [1 + 2.0**-12, 2 + 2.0**-12])
        with self.assertRaises(SemitoneError) as raised:
            self.masters.load(b"none", ctypes.c_size_t(4))
        self.assertEqual(raised.exception.status, c.FILE_ERROR)

    def test_space_is_checked(self):
        with self.assertRaisesRegex(SemitoneError, "expected space for 2 tensors, got 1"):
            self.masters.list((ctypes.c_void_p * 1)(), ctypes.c_size_t(1))


class SingleProcessTest(unittest.TestCase):
    def test_without_a_launcher_there_is_one_rank(self):
        rank, size = ctypes.c_int32(9), ctypes.c_int32(9)
        c.call("semitone_rank_environment", ctypes.byref(rank), ctypes.byref(size), None)
        self.assertEqual((rank.value, size.value), (0, 1))
        with Handle("group", None, None, ctypes.c_double(0)) as group:
            self.assertEqual((group.get("rank", ctypes.c_int32), group.get("size", ctypes.c_int32)), (0, 1))
            group.barrier()
            none = (None, ctypes.c_size_t(0))
            for expected, call in [
                ("expected a list of tensors, got a null", lambda: Handle("ddp", group, None, None, ctypes.c_size_t(2**62), *none, *none)),
                ("expected a reduction", lambda: group.all_reduce(None, ctypes.c_size_t(0), ctypes.c_int32(9))),
                ("expected a rank below 1, got 1", lambda: group.broadcast(None, ctypes.c_size_t(0), ctypes.c_int32(1))),
            ]:
                with self.subTest(expected), self.assertRaisesRegex(SemitoneError, expected):
                    call()

    def test_the_rank_is_known_without_a_place_to_meet(self):
        for variables in ({"RANK": "2", "WORLD_SIZE": "3"}, {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}):
            with self.subTest(variables), unittest.mock.patch.dict(os.environ, variables):
                rank, size = ctypes.c_int32(), ctypes.c_int32()
                c.call("semitone_rank_environment", ctypes.byref(rank), ctypes.byref(size), None)
                self.assertEqual((rank.value, size.value), (2, 3))
                with self.assertRaisesRegex(SemitoneError, "MASTER_ADDR"):
                    Handle("group", None, None, ctypes.c_double(1))

    def test_wrong_arguments(self):
        for expected, arguments in [
            ("expected a timeout in seconds", (None, None, ctypes.c_double(-1))),
            ("ftp://x", ("ftp://x", None, ctypes.c_double(0))),
            ("smoke", (None, "smoke", ctypes.c_double(0))),
        ]:
            with self.subTest(expected), self.assertRaisesRegex(SemitoneError, expected):
                Handle("group", *arguments)


if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
