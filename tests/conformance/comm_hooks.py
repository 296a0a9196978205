#!/usr/bin/env python3
"""Writes data/comm_hooks.json: what torch.distributed computes on two ranks over Gloo.

comm_hooks.py JSON

The gradients of parameter p in step s on rank r are (i * 37 + 101 s + 53 r + 17 p) mod 41 - 20, divided by 16, for
i = 0, 1, ...: exact in fp32. The parameters start at zero. The loss is the sum of parameter * gradient, for local SGD
plus half the sum of squares of the parameters.

The 8-bit hooks reduce the gradient of a single fp32 parameter of 1100 elements, three channels of torch's. It is
((37 i + 53 r) mod 257 - 128) / 64 times 1, 1/1024 and 32 in the channels, or ("two values") 3 for i mod 3 = 0 and 0
elsewhere on both ranks, or ("infinite") the former with inf in element 5 on rank 1, of which only the number of finite
means is recorded.
"""

import sys
import types

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

import ranks

RANKS = 2
SHAPES = [[8, 6], [6, 3, 2], [5], [8, 6], [2, 2]]
WIDE, NARROW = torch.float64, torch.float32
POWER_SGD = [
    ({"matrix_approximation_rank": 1, "min_compression_rate": 2.0}, WIDE),
    ({"matrix_approximation_rank": 1, "min_compression_rate": 2.0}, NARROW),
    ({"matrix_approximation_rank": 2, "min_compression_rate": 0.5, "orthogonalization_epsilon": 1e-8,
      "random_seed": 7}, WIDE),
    ({"matrix_approximation_rank": 3, "min_compression_rate": 0.5}, WIDE),  # QR
    ({"matrix_approximation_rank": 1, "min_compression_rate": 2.0, "warm_start": False}, WIDE),
    ({"matrix_approximation_rank": 1, "min_compression_rate": 2.0, "use_error_feedback": False}, WIDE),
]
LOCAL_SGD = [{"post_local_gradient_allreduce": False}, {"post_local_gradient_allreduce": True}]
QUANTIZED = ["different channels", "two values", "infinite"]
ELEMENTS = 1100
SPLITS = [[[2, 2], [2, 2]], [[1, 3], [2, 0]], [[0, 0], [4, 1]]]  # of each rank, by receiver


class Products(torch.nn.Module):
    def __init__(self, dtype: torch.dtype, shapes: list[list[int]] = SHAPES) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes)

    def forward(self, gradients: list[torch.Tensor], decay: float) -> torch.Tensor:
        loss = torch.zeros((), dtype=self.all[0].dtype)
        for parameter, gradient in zip(self.all, gradients):
            loss = loss + (parameter * gradient).sum() + decay * 0.5 * (parameter * parameter).sum()
        return loss


def gradients(step: int, rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    result = []
    for index, shape in enumerate(SHAPES):
        i = torch.arange(torch.Size(shape).numel())
        result.append((((i * 37 + 101 * step + 53 * rank + 17 * index) % 41 - 20).to(dtype) / 16).view(shape))
    return result


def numbers(tensors: list[torch.Tensor]) -> list[float]:
    return [value for tensor in tensors for value in tensor.detach().double().view(-1).tolist()]


def power_sgd(options: dict, dtype: torch.dtype, rank: int) -> list[list[float]]:
    model = Products(dtype)
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(power.PowerSGDState(None, start_powerSGD_iter=2, **options), power.powerSGD_hook)
    steps = []
    for step in range(6):
        model.zero_grad()
        ddp(gradients(step, rank, dtype), 0.0).backward()
        if step >= 2:
            steps.append(numbers([parameter.grad for parameter in model.all]))
    return steps


def local_sgd(options: dict, rank: int) -> list[list[list[float]]]:
    model = Products(torch.float64)
    ddp = DistributedDataParallel(model)
    own, _ = dist.new_subgroups(1)
    state = local.PostLocalSGDState(None, own, start_localSGD_iter=2, **options)
    ddp.register_comm_hook(state, local.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for step in range(7):
        optimizer.zero_grad()
        ddp(gradients(step, rank, torch.float64), 1.0).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        everyone: list = [None] * RANKS
        dist.all_gather_object(everyone, numbers(list(model.all)[1:3]))
        steps.append(everyone)
    return steps


def quantized_gradient(case: str, rank: int) -> torch.Tensor:
    i = torch.arange(ELEMENTS)
    if case == "two values":
        return torch.where(i % 3 == 0, 3.0, 0.0)
    gradient = ((37 * i + 53 * rank) % 257 - 128) / 64
    gradient *= torch.tensor([1, 1 / 1024, 32]).repeat_interleave(512)[:ELEMENTS]
    if case == "infinite" and rank == 1:
        gradient[5] = torch.inf
    return gradient


# The 8-bit hooks take the values of NCCL's futures: a list with one tensor of all outputs.
class StackedGather:
    def __init__(self, outputs: list[torch.Tensor], tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool):
        self.outputs = outputs
        self.future = dist.all_gather(outputs, tensor, group, async_op).get_future()

    def get_future(self) -> torch.futures.Future:
        return self.future.then(lambda _: [torch.stack(self.outputs)])


def quantized(case: str, rank: int) -> dict:
    quantization.dist = types.SimpleNamespace(all_gather=StackedGather)
    means = {}
    for name in ["pertensor", "perchannel"]:
        model = Products(torch.float32, [[ELEMENTS]])
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(dist.group.WORLD, getattr(quantization, f"quantization_{name}_hook"))
        ddp([quantized_gradient(case, rank)], 0.0).backward()
        mean = model.all[0].grad
        if case == "infinite":
            means[name + "_finite"] = int(mean.isfinite().sum())
        else:
            means[name] = [float(f"{value:.9g}") for value in numbers([mean])]  # 9 digits are fp32
    return {"case": case} | means


def all_to_all(splits: list[list[int]], rank: int) -> list[list[float]]:
    sent = torch.arange(3 * sum(splits[rank]), dtype=torch.float32).view(-1, 3) + 100 * rank
    due = [splits[peer][rank] for peer in range(RANKS)]
    received = torch.zeros([sum(due), 3])
    dist.all_to_all_single(received, sent, due, splits[rank])
    everyone: list = [None] * RANKS
    dist.all_gather_object(everyone, numbers([received]))
    return everyone


def sections_of(rank: int) -> dict[str, list]:
    return {
        "power_sgd": [{"options": options, "dtype": str(dtype).removeprefix("torch."),
                       "gradients": power_sgd(options, dtype, rank)}
                      for options, dtype in POWER_SGD],
        "local_sgd": [{"options": options, "parameters": local_sgd(options, rank)} for options in LOCAL_SGD],
        "quantized": [quantized(case, rank) for case in QUANTIZED],
        "all_to_all": [{"splits": splits, "received": all_to_all(splits, rank)} for splits in SPLITS],
    }


if __name__ == "__main__":
    ranks.write_results(sys.argv[1], "comm_hooks/1", {"shapes": SHAPES}, RANKS, sections_of)
