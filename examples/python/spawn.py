#!/usr/bin/env python3
"""What ../spawn.cpp does, in PyTorch: its autocast is the counterpart of O1, not of O2.

    spawn.py [DATA_DIR]
"""
import gzip
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def read(path, skip):
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


def train(rank, size, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    dist.init_process_group("gloo", rank=rank, world_size=size)
    images = read(f"{folder}/train-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    labels = read(f"{folder}/train-labels-idx1-ubyte.gz", 8).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                          nn.Flatten(), nn.Linear(7 * 7 * 32, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    ddp = DistributedDataParallel(model)
    batch = 100 // size
    losses = []
    for step in range(50):
        rows = slice((step * size + rank) * batch, (step * size + rank + 1) * batch)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(ddp(images[rows].float() / 255), labels[rows])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean, dist.ReduceOp.SUM)
        losses.append(mean.item())
    if rank == 0:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} on {size} processes")
    dist.destroy_process_group()
    if losses[-1] > losses[0] / 2:
        raise SystemExit("expected half the first loss")


if __name__ == "__main__":
    mp.spawn(train, args=(2, sys.argv[1] if len(sys.argv) > 1 else "data/mnist"), nprocs=2)
