#!/usr/bin/env python3
"""What ../torch_amp.cpp does, in PyTorch.

    torch_amp.py [DATA_DIR]
"""
import gzip
import sys

import torch
from torch import nn
from torch.nn import functional

folder = sys.argv[1] if len(sys.argv) > 1 else "data/mnist"


def read(name, skip):
    with gzip.open(f"{folder}/{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


images = read("train-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
labels = read("train-labels-idx1-ubyte", 8).long()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Linear(7 * 7 * 32, 10)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
scaler = torch.amp.GradScaler(device, init_scale=65536.0)

losses = []
for step in range(100):
    rows = slice(step * 100, (step + 1) * 100)
    optimizer.zero_grad()
    with torch.autocast(device, dtype=torch.float16):
        loss = functional.cross_entropy(model(images[rows].to(device).float() / 255), labels[rows].to(device))
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, scale {scaler.get_scale():g}")
sys.exit(losses[-1] >= losses[0] / 2)
