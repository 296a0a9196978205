#!/usr/bin/env python3
"""What ../torchscript_finetune.cpp does, in PyTorch.

    torchscript_finetune.py [DATA_DIR]
"""
import gzip
import io
import sys

import torch
from torch import nn
from torch.nn import functional

folder = sys.argv[1] if len(sys.argv) > 1 else "data/mnist"
torch.manual_seed(0)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.bn2 = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 7 * 7, 10, bias=False)

    def forward(self, x):
        x = functional.max_pool2d(functional.relu(self.bn1(self.conv1(x))), 2)
        x = functional.relu(x + self.bn2(self.conv2(x)))
        return self.head(functional.max_pool2d(x, 2).flatten(1))


def read(path, skip):
    with gzip.open(path) as file:
        return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)


def load(part, count):
    images = read(f"{folder}/{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28)
    return images[:count].float() / 255, read(f"{folder}/{part}-labels-idx1-ubyte.gz", 8)[:count].long()


def train(model, images, labels):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.02, momentum=0.9)
    for first in 2 * list(range(0, len(images) - 49, 50)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(images[first:first + 50]), labels[first:first + 50])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def freeze_batch_norm(model):
    for layer in model.modules():
        if hasattr(layer, "running_mean"):
            layer.eval()
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)


@torch.no_grad()
def accuracy(model, images, labels):
    return (model(images).argmax(1) == labels).float().mean().item()


images, labels = load("train", 5000)
test = load("t10k", 1000)
pretrained = torch.jit.script(Network())
train(pretrained, images[labels < 5], labels[labels < 5])
archive = io.BytesIO()
torch.jit.save(pretrained, archive)

archive.seek(0)
model = torch.jit.load(archive)
freeze_batch_norm(model)
before = accuracy(model, *test)
train(model, images, labels)
print(f"accuracy {before:.3f} -> {accuracy(model, *test):.3f}")
