"""Groups and DistributedDataParallel through the C interface, in the processes of a launcher.

    SEMITONE_C_LIBRARY=… semitone launch --nproc-per-node 2 ranks_test.py
"""
import ctypes
import os
import unittest

import semitone_c as c
from semitone_c import FLOAT16, Handle, SemitoneError, Tensor, no_grad, op

GROUP = None  # of all ranks; each calls the same collectives in the same order
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def listed(tensors):
    return c.tensor_list(tensors)


class GroupTest(unittest.TestCase):
    def test_the_environment_says_the_rank(self):
        rank, size, local = ctypes.c_int32(), ctypes.c_int32(), ctypes.c_int32()
        c.call("semitone_rank_environment", ctypes.byref(rank), ctypes.byref(size), ctypes.byref(local))
        self.assertEqual((rank.value, size.value, local.value), (RANK, SIZE, RANK))
        self.assertEqual((GROUP.get("rank", ctypes.c_int32), GROUP.get("size", ctypes.c_int32)), (RANK, SIZE))

    def test_lists_are_reduced_in_place(self):
        tensors = [Tensor.floats([RANK, 2]), op("aten::to.dtype", Tensor.floats([4 * RANK]), FLOAT16), Tensor.floats([1, 2, 3, RANK], 2, 2)]
        GROUP.all_reduce(*listed(tensors), ctypes.c_int32(1))
        self.assertEqual([tensor.values() for tensor in tensors], [[0.5, 2], [2], [1, 2, 3, 0.5]])
        GROUP.all_reduce(*listed(tensors[:1]), ctypes.c_int32(0))
        self.assertEqual(tensors[0].values(), [1, 4])
        GROUP.all_reduce(*listed([]), ctypes.c_int32(0))

    def test_lists_are_sent(self):
        tensors = [Tensor.floats([RANK, 7 + RANK]), Tensor.floats([RANK])]
        GROUP.broadcast(*listed(tensors), ctypes.c_int32(1))
        self.assertEqual([tensor.values() for tensor in tensors], [[1, 8], [1]])

    def test_the_region_of_the_caller_does_not_lower_what_is_sent(self):
        tensor = Tensor.floats([1e6])
        with c.policy() as policy:
            policy.set("cat", ctypes.c_int32(0))
            with c.region(policy):
                GROUP.all_reduce(*listed([tensor]), ctypes.c_int32(1))
        self.assertEqual(tensor.values(), [1e6])

    def test_ranks_that_disagree_are_an_error(self):
        pair = [Tensor.floats([1, 2]), Tensor.floats([3])]
        for tensors in ([Tensor.floats([0] * (1 + RANK))], pair if RANK == 0 else pair[::-1], pair[:RANK]):
            with self.assertRaises(SemitoneError) as raised:
                GROUP.all_reduce(*listed(tensors), ctypes.c_int32(0))
            self.assertEqual(raised.exception.status, c.COMM_ERROR)
            GROUP.barrier()
        self.assertEqual([tensor.values() for tensor in pair], [[1, 2], [3]])

    def test_ranks_agree_on_an_overflow(self):
        with c.scaler(init_scale=8) as scaler:
            scaler.set_group(GROUP)
            scaled = ctypes.c_void_p()
            scaler.scale(Tensor.floats([1]), ctypes.byref(scaled))
            Tensor(scaled)
            weight = Tensor.floats([1]).require_grad()
            weight.grad = Tensor.floats([float("inf") if RANK == 1 else 1])
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *listed([weight])), 1)
            scaler.update()
            scaler.set_group(None)
            weight.grad = Tensor.floats([1])
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *listed([weight])), 0)


class DdpTest(unittest.TestCase):
    def model(self, names=("weight", "bias"), **options):
        weights = [Tensor.floats([1 + RANK, 2], 1, 2).require_grad(), Tensor.floats([RANK]).require_grad()]
        buffers = [Tensor.floats([RANK])]
        ddp = Handle("ddp", GROUP, names and c.names_list(names), *listed(weights), *listed(buffers), *c.options_list(**options))
        return ddp, weights, buffers

    def loss(self, ddp, weights, unused=False):
        ddp.begin_forward()
        x = Tensor.floats([1 + RANK, 3], 1, 2)
        output = op("aten::mm", x, op("aten::t", weights[0])) if unused else op("aten::addmm", weights[1], x, op("aten::t", weights[0]))
        ddp.end_forward((ctypes.c_void_p * 1)(output.pointer), ctypes.c_size_t(1))
        return op("aten::sum", output)

    def test_weights_become_rank_0s_and_gradients_the_mean(self):
        for options in ({}, {"delay_allreduce": 1}, {"compress": FLOAT16, "gradient_predivide_factor": 1}, {"bucket_cap_mb": 1, "static_graph": 1}):
            ddp, weights, buffers = self.model(**options)
            self.assertEqual([tensor.values() for tensor in (*weights, *buffers)], [[1, 2], [0], [0]])
            for _ in range(2):
                for weight in weights:
                    weight.grad = None
                self.loss(ddp, weights).backward()
                self.assertEqual([weight.grad.values() for weight in weights], [[1.5, 3], [1]])
            ddp.close()

    def test_unused_parameters(self):
        ddp, weights, _ = self.model(None, find_unused_parameters=1)
        self.loss(ddp, weights, unused=True).backward()
        self.assertEqual(weights[0].grad.values(), [1.5, 3])
        self.assertIsNone(weights[1].grad)
        ddp.close()

    def test_an_empty_list_cannot_be_searched(self):
        none = (None, ctypes.c_size_t(0))
        for options, is_error in (({"find_unused_parameters": 1}, True), ({"delay_allreduce": 1}, False), ({}, False)):
            ddp, weights, _ = self.model(**options)
            ddp.begin_forward()
            output = op("aten::addmm", weights[1], Tensor.floats([1 + RANK, 3], 1, 2), op("aten::t", weights[0]))
            if is_error:
                with self.assertRaisesRegex(SemitoneError, "find_unused_parameters searches, got an empty list — pass what"):
                    ddp.end_forward(*none)
            ddp.end_forward(*(listed([output]) if is_error else none))
            op("aten::sum", output).backward()
            self.assertEqual([weight.grad.values() for weight in weights], [[1.5, 3], [1]])
            with no_grad():  # as in an evaluation
                ddp.begin_forward()
                ddp.end_forward(*none)
            ddp.close()

    def test_results_that_the_model_holds_are_refused(self):
        """Their at::Tensor would be replaced: the model would compute with another weight from then on."""
        for options, is_error in (({"find_unused_parameters": 1}, True), ({"static_graph": 1}, True), ({}, False)):
            ddp, weights, _ = self.model(**options)
            for results in (weights[:1], [op("aten::alias", weights[0])]):
                ddp.begin_forward()
                output = op("aten::addmm", weights[1], Tensor.floats([1, 3], 1, 2), op("aten::t", weights[0]))
                if is_error and results == weights[:1]:
                    with self.assertRaisesRegex(SemitoneError, "that the forward has computed, got a parameter or an input — pass an alias"):
                        ddp.end_forward(*listed([output, *results]))
                    continue
                ddp.end_forward(*listed([output, *results]))
                op("aten::add.Tensor", op("aten::sum", output), op("aten::sum", results[0]), 1).backward()
                self.assertEqual(weights[0].grad.values(), [2, 4])
                for weight in weights:
                    weight.grad = None
            ddp.close()

    def test_the_order_of_calls_is_checked(self):
        ddp, weights, _ = self.model()
        output = Tensor.floats([1])
        for _ in range(2):
            with self.assertRaisesRegex(SemitoneError, r"expected semitone_ddp_begin_forward\(\) to be called before, got no call"):
                ddp.end_forward(*listed([output]))
            self.loss(ddp, weights).backward()
        ddp.close()

    def test_tied_weights_count_once(self):
        for options in ({}, {"delay_allreduce": 1}, {"gradient_as_bucket_view": 1}):
            weights = [Tensor.floats([1 + RANK, 2], 1, 2).require_grad(), Tensor.floats([RANK]).require_grad()]
            buffers = [Tensor.floats([RANK])] * 2 + weights[:1]
            ddp = Handle("ddp", GROUP, c.names_list(["weight", "bias", "tied"]), *listed([*weights, weights[1]]), *listed(buffers),
                         *c.options_list(**options))
            for _ in range(2):
                for weight in weights:
                    weight.grad = None
                self.loss(ddp, weights).backward()
                self.assertEqual([weight.grad.values() for weight in weights], [[1.5, 3], [1]])
            if not options:  # the bias has no gradient: the next forward says so, once
                for weight in weights:
                    weight.grad = None
                self.loss(ddp, weights, unused=True).backward()
                with self.assertRaisesRegex(SemitoneError, f"got none for 'bias' on rank {RANK}"):
                    ddp.begin_forward()
            ddp.close()

    def test_gradients_accumulate_without_communication(self):
        ddp, weights, _ = self.model()
        ddp.begin_no_sync()
        self.loss(ddp, weights).backward()
        ddp.end_no_sync()
        self.assertEqual(weights[0].grad.values(), [1 + RANK, 3])
        self.loss(ddp, weights).backward()
        self.assertEqual(weights[0].grad.values(), [3, 6])
        with self.assertRaisesRegex(SemitoneError, r"expected semitone_ddp_begin_no_sync\(\) to be called before"):
            ddp.end_no_sync()
        ddp.close()

    def test_masters_do_not_take_gradients_of_no_sync_alone(self):
        weight = op("aten::to.dtype", Tensor.floats([1]), FLOAT16).require_grad()
        factor = op("aten::to.dtype", Tensor.floats([1 + RANK]), FLOAT16)
        ddp = Handle("ddp", GROUP, c.names_list(["weight"]), *listed([weight]), *listed([]), *c.options_list())
        masters = Handle("masters", *listed([weight]))
        pointer = (ctypes.c_void_p * 1)()
        masters.list(pointer, ctypes.c_size_t(1))
        master = Tensor(ctypes.c_void_p(pointer[0]))

        def backward():
            ddp.begin_forward()
            output = op("aten::mul.Tensor", weight, factor)
            ddp.end_forward(*listed([output]))
            op("aten::sum", output).backward()

        ddp.begin_no_sync()
        backward()
        ddp.end_no_sync()
        with self.assertRaisesRegex(SemitoneError, "got this rank's own, of a backward pass in no_sync"):
            masters.take_gradients()
        backward()
        masters.take_gradients()
        self.assertEqual(master.grad.values(), [3])
        masters.clear_gradients()
        ddp.begin_no_sync()
        backward()
        ddp.end_no_sync()
        GROUP.all_reduce(*listed([weight.grad]), ctypes.c_int32(1))
        masters.take_gradients()
        self.assertEqual(master.grad.values(), [1.5])
        for handle in (masters, ddp):
            handle.close()

    def test_other_models_are_an_error(self):
        with self.assertRaisesRegex(SemitoneError, "parameter 'offset'"):
            self.model(("weight", "bias" if RANK == 0 else "offset"))
        with self.assertRaisesRegex(SemitoneError, "'bucket_cap' — did you mean 'bucket_cap_mb'"):
            self.model(bucket_cap=1)

    def test_a_training_keeps_the_ranks_equal(self):
        ddp, weights, _ = self.model()
        policy, scaler = c.policy(), c.scaler(init_scale=8)
        for _ in range(3):
            for weight in weights:
                weight.grad = None
            with c.region(policy):
                loss = self.loss(ddp, weights)
            scaled = ctypes.c_void_p()
            scaler.scale(loss, ctypes.byref(scaled))
            Tensor(scaled).backward()
            self.assertEqual(scaler.get("unscale", ctypes.c_int32, *listed(weights)), 0)
            with no_grad():
                for weight in weights:
                    op("aten::add_.Tensor", weight, weight.grad, -0.1)
            scaler.update()
        for weight in weights:
            copy = op("aten::clone", op("aten::detach", weight))
            GROUP.broadcast(*listed([copy]), ctypes.c_int32(0))
            self.assertEqual(copy.values(), weight.values())
        self.assertNotEqual(weights[1].values(), [0])
        for handle in (ddp, policy, scaler):
            handle.close()


if __name__ == "__main__":
    GROUP = Handle("group", "env://", "gloo", ctypes.c_double(60))
    program = unittest.main(exit=False)
    GROUP.close()
    raise SystemExit(not program.result.wasSuccessful())
