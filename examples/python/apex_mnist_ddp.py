#!/usr/bin/env python3
"""What ../apex_mnist_ddp.cpp does, in PyTorch. Apex has no opt levels any more: torch.autocast is its O1.

    torchrun --nproc-per-node 2 apex_mnist_ddp.py [O0|O1] [DATA_DIR]

PyTorch's SyncBatchNorm needs GPUs. On a CPU, each process normalizes with its own part of the batch.
"""
import gzip
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

level = sys.argv[1] if len(sys.argv) > 1 else "O1"
folder = sys.argv[2] if len(sys.argv) > 2 else "data/mnist"


def read(name, skip):
    with gzip.open(f"{folder}/{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
dtype = torch.float16 if cuda else torch.bfloat16
dist.init_process_group("nccl" if cuda else "gloo")
rank, size = dist.get_rank(), dist.get_world_size()
data = TensorDataset(read("train-images-idx3-ubyte", 16).view(-1, 1, 28, 28),
                     read("train-labels-idx1-ubyte", 8).long())
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).to(device)
if cuda:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device.type, enabled=level == "O1" and dtype == torch.float16)
ddp = DistributedDataParallel(model, device_ids=[device] if cuda else None)

sampler = DistributedSampler(data)
sampler.set_epoch(0)
losses = []
for images, labels in DataLoader(data, 100 // size, sampler=sampler):
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype=dtype, enabled=level == "O1"):
        loss = functional.cross_entropy(ddp(images.to(device).float() / 255), labels.to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / size)
    if len(losses) == 100:
        break
if rank == 0:
    print(f"{level} on {size} processes: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
dist.destroy_process_group()
sys.exit(losses[-1] >= losses[0] / 2)
