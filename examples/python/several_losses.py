#!/usr/bin/env python3
"""What ../several_losses.cpp does, in PyTorch.

    several_losses.py [DATA_DIR]
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
convolutions = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                             nn.Flatten(), nn.Linear(7 * 7 * 32, 10))
layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer_c = torch.optim.SGD(convolutions.parameters(), 0.05, momentum=0.9)
optimizer_l = torch.optim.AdamW(layers.parameters(), 2e-3)
scaler = torch.amp.GradScaler("cpu")

for step in range(100):
    rows = slice(step * 100, (step + 1) * 100)
    batch = images[rows].float() / 255
    optimizer_c.zero_grad()
    optimizer_l.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        a, b = convolutions(batch), layers(batch)
        together = functional.cross_entropy((a + b) / 2, labels[rows])
        difference = 10 * functional.mse_loss(a.softmax(1), b.softmax(1))
        agreement = (a.argmax(1) == b.argmax(1)).float().mean()
    scaler.scale(together).backward(retain_graph=True)
    scaler.scale(difference).backward()
    scaler.unscale_(optimizer_c)
    nn.utils.clip_grad_norm_(convolutions.parameters(), 1.0)
    scaler.step(optimizer_c)
    scaler.step(optimizer_l)
    scaler.update()
    if step == 0:
        first = together.item()
    if step in (0, 99):
        print(f"step {step}: loss {together.item():.4f}, agreement {agreement.item():.2f}")
sys.exit(together.item() >= first / 4 or agreement.item() <= 0.85)
