#!/usr/bin/env python3
"""What ../gradient_accumulation.cpp does, in PyTorch.

    gradient_accumulation.py [DATA_DIR]
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
torch.manual_seed(0)
model = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                      nn.Flatten(), nn.Linear(7 * 7 * 32, 10))
optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")

STEPS, PARTS, ROWS = 80, 4, 25
for step in range(STEPS):
    mean = 0
    for part in range(PARTS):
        first = (step * PARTS + part) * ROWS
        with torch.autocast("cpu", dtype=torch.float16):
            output = model(images[first:first + ROWS].float() / 255)
            loss = functional.cross_entropy(output, labels[first:first + ROWS]) / PARTS
        scaler.scale(loss).backward()
        mean += loss.item()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    if step == 0:
        first_mean = mean
    if step in (0, STEPS - 1):
        print(f"step {step}: loss {mean:.4f}")
sys.exit(mean >= first_mean / 4)
