#!/usr/bin/env python3
"""What ../apex_mnist.cpp does, in PyTorch. Apex has no opt levels any more: torch.autocast is its O1.

    apex_mnist.py [O0|O1] [DATA_DIR]
"""
import gzip
import sys

import torch
from torch import nn
from torch.nn import functional

level = sys.argv[1] if len(sys.argv) > 1 else "O1"
folder = sys.argv[2] if len(sys.argv) > 2 else "data/mnist"


def read(name, skip):
    with gzip.open(f"{folder}/{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


images = read("train-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
labels = read("train-labels-idx1-ubyte", 8).long()
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scaler = torch.amp.GradScaler(device, enabled=level == "O1" and dtype == torch.float16)

losses = []
for step in range(100):
    rows = slice(step * 100, (step + 1) * 100)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=dtype, enabled=level == "O1"):
        loss = functional.cross_entropy(model(images[rows].to(device).float() / 255), labels[rows].to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"{level}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
sys.exit(losses[-1] >= losses[0] / 2)
