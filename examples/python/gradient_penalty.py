#!/usr/bin/env python3
"""What ../gradient_penalty.cpp does, in PyTorch.

    gradient_penalty.py [DATA_DIR]
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


def train(weight_of_penalty):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    losses, norms = [], []
    for step in range(120):
        rows = slice(step * 100, (step + 1) * 100)
        batch = (images[rows].float() / 255).requires_grad_()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = functional.cross_entropy(model(batch), labels[rows])
        scaled, = torch.autograd.grad(scaler.scale(loss), batch, create_graph=True)
        gradient = scaled * (1 / scaler.get_scale())
        with torch.autocast("cpu", dtype=torch.float16):
            norm = (gradient * 100).flatten(1).norm(dim=1).mean()
            total = loss + weight_of_penalty * norm
        scaler.scale(total).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        norms.append(norm.item())
    loss, norm = sum(losses[-20:]) / 20, sum(norms[-20:]) / 20
    print(f"weight {weight_of_penalty}: loss {loss:.4f}, norm {norm:.4f}")
    return loss, norm


images = read("train-images-idx3-ubyte", 16).view(-1, 28, 28)
labels = read("train-labels-idx1-ubyte", 8).long()
_, plain_norm = train(0)
loss, norm = train(1)
sys.exit(loss >= 0.6 or norm >= 0.85 * plain_norm)
