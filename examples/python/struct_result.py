#!/usr/bin/env python3
"""What ../struct_result.cpp does, in PyTorch: its autocast is the counterpart of O1, not of O2.

    struct_result.py [DATA_DIR]
"""
import gzip
import sys
from dataclasses import dataclass
from typing import Optional

import torch
from torch import nn
from torch.nn import functional

folder = sys.argv[1] if len(sys.argv) > 1 else "data/mnist"


def read(name, skip):
    with gzip.open(f"{folder}/{name}.gz") as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


@dataclass
class Output:
    logits: torch.Tensor
    code: torch.Tensor
    drawing: Optional[torch.Tensor] = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(),
                                     nn.Conv2d(8, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(),
                                     nn.Flatten(), nn.Linear(16 * 4 * 4, 32))
        self.head = nn.Linear(32, 10)
        self.decoder = nn.Linear(32, 28 * 28)

    def forward(self, images):
        code = self.encoder(images)
        output = Output(self.head(torch.relu(code)), code)
        if self.training:
            output.drawing = self.decoder(code).sigmoid().view_as(images)
        return output


images = read("train-images-idx3-ubyte", 16).view(-1, 1, 28, 28)
labels = read("train-labels-idx1-ubyte", 8).long()
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), 2e-3)
for step in range(200):
    rows = slice(step * 100, (step + 1) * 100)
    batch = images[rows].float() / 255
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(batch)
    classes = functional.cross_entropy(output.logits.float(), labels[rows])
    drawing = functional.mse_loss(output.drawing.float(), batch)
    optimizer.zero_grad()
    (classes + drawing).backward()
    optimizer.step()
    if step % 50 == 0:
        print(f"step {step}: loss {classes.item():.4f} of the classes, {drawing.item():.4f} of the drawing")

model.eval()
images = read("t10k-images-idx3-ubyte", 16).view(-1, 1, 28, 28)[:1000]
labels = read("t10k-labels-idx1-ubyte", 8).long()[:1000]
with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
    predicted = model(images.float() / 255).logits.argmax(1)
accuracy = (predicted == labels).float().mean().item()
print("accuracy", accuracy)
sys.exit(accuracy <= 0.9)
