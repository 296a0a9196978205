#!/usr/bin/env python3
"""Writes data/collectives.json: what the collectives of torch.distributed give on three ranks over Gloo.

collectives.py JSON

Element i of a tensor with number n is (7 i + 3 n) mod 5 + 1, negative for odd i unless the dtype is unsigned. Bool
takes it mod 2, and complex numbers have their real part + 1 as imaginary part. Such values, and their sums and products
over three ranks, are exact in every dtype. A case may multiply them by a "factor", after which sums overflow, or may be
"infinite": then element 0 is inf on rank 1 and -inf on rank 2, and element 1 is inf on rank 0.

Rank r contributes the tensor with number r. In a scatter, rank r gets the tensor with number 3 + r. Results are
flattened, those of ranks that differ one after the other, and complex numbers are pairs. The result of a dtype that
torch refuses is null.
"""

import datetime
import math
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import ranks

RANKS = 3
OPS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX,
       "product": dist.ReduceOp.PRODUCT}
FLOATS = ["float64", "float32", "float16", "bfloat16"]
INTEGERS = ["int64", "int32", "int8", "uint8"]
NOT_ADDED = ["bool", "int16", "complex64"]
SHAPE = [3, 2]
OTHER_SHAPES = [[0], [0, 3], []]


def reductions() -> list[dict]:
    cases = [{"op": op, "dtype": dtype, "shape": SHAPE}
             for op in OPS for dtype in FLOATS + (INTEGERS if op != "mean" else [])]
    cases += [{"op": op, "dtype": dtype, "shape": shape}
              for op in ["sum", "product"] for dtype in ["float32", "int64"] for shape in OTHER_SHAPES]
    cases += [{"op": "sum", "dtype": dtype, "shape": SHAPE, "factor": factor}
              for dtype, factor in [("int8", 25), ("uint8", 25), ("float16", 13000)]]
    cases += [{"op": "mean", "dtype": "float16", "shape": SHAPE, "factor": 13000}]
    cases += [{"op": op, "dtype": dtype, "shape": SHAPE, "infinite": True}
              for op in ["sum", "mean", "min", "max"] for dtype in FLOATS]
    return [case | {"root": index % RANKS} for index, case in enumerate(cases)]


def messages() -> list[dict]:
    cases = [{"dtype": dtype, "shape": SHAPE} for dtype in FLOATS + INTEGERS + NOT_ADDED]
    cases += [{"dtype": dtype, "shape": shape} for dtype in ["float32", "bool"] for shape in OTHER_SHAPES]
    return [case | {"root": index % RANKS} for index, case in enumerate(cases)]


def tensor_of(case: dict, number: int) -> torch.Tensor:
    dtype = getattr(torch, case["dtype"])
    i = torch.arange(math.prod(case["shape"]))
    values = ((7 * i + 3 * number) % 5 + 1) * case.get("factor", 1)
    if dtype == torch.bool:
        values = values % 2
    elif dtype != torch.uint8:
        values = torch.where(i % 2 == 1, -values, values)
    if dtype.is_complex:
        values = torch.complex(values.float(), values.float() + 1)
    tensor = values.to(dtype)
    if case.get("infinite") and number == 0:
        tensor[1] = math.inf
    elif case.get("infinite"):
        tensor[0] = math.inf if number == 1 else -math.inf
    return tensor.view(case["shape"])


def numbers(tensors: list[torch.Tensor]) -> list:
    def written(value: float) -> float | str:
        if isinstance(value, float):
            return value if math.isfinite(value) else str(value)
        return int(value)

    flat = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    return [written(value) for tensor in flat for value in tensor.contiguous().view(-1).tolist()]


def of_all_ranks(values: list) -> list[list]:
    everyone: list = [None] * RANKS
    dist.all_gather_object(everyone, values)
    return everyone


def joined(tensor: torch.Tensor) -> list:
    return sum(of_all_ranks(numbers([tensor])), [])


# What is the same on all ranks.
def common(tensors: list[torch.Tensor]) -> list:
    everyone = of_all_ranks(numbers(tensors))
    assert all(each == everyone[0] for each in everyone), everyone
    return everyone[0]


def reduced(case: dict, rank: int) -> dict:
    op, root = OPS[case["op"]], case["root"]
    to_root = tensor_of(case, rank)
    dist.reduce(to_root, root, op)
    everywhere = tensor_of(case, rank)
    dist.all_reduce(everywhere, op)
    results = {"reduce": of_all_ranks(numbers([to_root]))[root], "all_reduce": common([everywhere])}
    if case["shape"] == SHAPE:
        part = torch.zeros([1, 2], dtype=everywhere.dtype)
        dist.reduce_scatter_tensor(part, tensor_of(case, rank), op)
        results["reduce_scatter"] = joined(part)
    return case | results


def if_accepted(call: Callable[[dist.ProcessGroup], list | None]) -> list | None:
    # A group that has refused a dtype is unusable afterwards.
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    try:
        return call(group)
    except RuntimeError as error:
        if "Invalid scalar type" not in str(error):
            raise
        return None


def moved(case: dict, rank: int) -> dict:
    own, root = tensor_of(case, rank), case["root"]

    def broadcast(group: dist.ProcessGroup) -> list:
        tensor = own.clone()
        dist.broadcast(tensor, root, group)
        return common([tensor])

    def all_gather(group: dist.ProcessGroup) -> list:
        outputs = [torch.zeros_like(own) for _ in range(RANKS)]
        dist.all_gather(outputs, own, group)
        return common(outputs)

    def gather(group: dist.ProcessGroup) -> list:
        outputs = [torch.zeros_like(own) for _ in range(RANKS)]
        dist.gather(own, outputs if rank == root else None, root, group)
        return of_all_ranks(numbers(outputs))[root]

    def scatter(group: dist.ProcessGroup) -> list:
        tensor = torch.zeros_like(own)
        parts = [tensor_of(case, RANKS + each) for each in range(RANKS)]
        dist.scatter(tensor, parts if rank == root else None, root, group)
        return joined(tensor)

    def all_to_all(group: dist.ProcessGroup) -> list | None:
        if case["shape"] != SHAPE:
            return None
        tensor = torch.zeros_like(own)
        dist.all_to_all_single(tensor, own, group=group)
        return joined(tensor)

    # Around the ring, twice with one tag.
    def send_recv(group: dist.ProcessGroup) -> list:
        tensors = [torch.zeros_like(own), torch.zeros_like(own)]
        second = tensor_of(case, RANKS + rank)

        def send() -> None:
            dist.send(own, (rank + 1) % RANKS, group, tag=5)
            dist.send(second, (rank + 1) % RANKS, group, tag=5)

        if rank == 0:
            send()
        for tensor in tensors:
            dist.recv(tensor, (rank + RANKS - 1) % RANKS, group, tag=5)
        if rank != 0:
            send()
        return joined(torch.stack(tensors))

    results = {call.__name__: if_accepted(call)
               for call in [broadcast, all_gather, gather, scatter, all_to_all, send_recv]}
    return case | results


# What torch gives for tensors that are not contiguous: element i of the storage is i + 10 rank.
def strided(layout: str, rank: int) -> dict:
    def tensor() -> torch.Tensor:
        storage = torch.arange(12.0) + 10 * rank
        return storage.view(3, 4).t() if layout == "transposed" else storage.view(3, 4)[:, :2]

    total, of_root = tensor(), tensor()
    dist.all_reduce(total)
    dist.broadcast(of_root, 1)
    return {"layout": layout, "all_reduce": joined(total), "broadcast": joined(of_root)}


def sections_of(rank: int) -> dict[str, list]:
    return {
        "reductions": [reduced(case, rank) for case in reductions()],
        "messages": [moved(case, rank) for case in messages()],
        "strided": [strided(layout, rank) for layout in ["transposed", "sliced"]],
    }


if __name__ == "__main__":
    ranks.write_results(sys.argv[1], "collectives/1", {"ranks": RANKS}, RANKS, sections_of)
