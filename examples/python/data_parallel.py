#!/usr/bin/env python3
"""What ../data_parallel.cpp does, in PyTorch, on all GPUs. On a CPU, torch's DataParallel has one replica.
PyTorch's autocast is the counterpart of O1, not of O2.

    data_parallel.py [DATA_DIR]

The region in forward is needed because the replicas run in threads of their own.
"""
import gzip
import sys

import torch
from torch import nn
from torch.nn import functional

folder = sys.argv[1] if len(sys.argv) > 1 else "data/mnist"
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16


def read(name, skip):
    with gzip.open(f"{folder}/{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


class Net(nn.Sequential):
    def forward(self, batch):
        with torch.autocast(device, dtype=dtype):
            return super().forward(batch).float()


images = read("train-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
labels = read("train-labels-idx1-ubyte", 8).long()
torch.manual_seed(0)
model = Net(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).to(device)
replicas = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)

losses = []
for step in range(50):
    rows = slice(step * 100, (step + 1) * 100)
    optimizer.zero_grad()
    loss = functional.cross_entropy(replicas(images[rows].to(device).float() / 255), labels[rows].to(device))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"{max(1, len(replicas.device_ids))} replicas, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
sys.exit(losses[-1] >= losses[0] / 2)
