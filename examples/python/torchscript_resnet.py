#!/usr/bin/env python3
"""The program ../torchscript_resnet.cpp in PyTorch. ../torchscript_finetune.cpp can read its files as well.

    torchscript_resnet.py DIR [DATA_DIR]

ResNet has the structure and the names of torchvision's, which need not be installed.
"""
import gzip
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

folder = Path(sys.argv[1])
data = sys.argv[2] if len(sys.argv) > 2 else "data/mnist"
torch.manual_seed(0)


class BasicBlock(nn.Module):
    def __init__(self, width_in, width_out, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width_out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width_out)
        self.conv2 = nn.Conv2d(width_out, width_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width_out)
        self.downsample = None
        if stride != 1 or width_in != width_out:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width_out, 1, stride, bias=False),
                                            nn.BatchNorm2d(width_out))

    def forward(self, x):
        y = torch.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.downsample is not None:
            x = self.downsample(x)
        return torch.relu(y + x)


class ResNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, padding=3, bias=False), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.fc = nn.Linear(512, classes)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def load(part):
    def read(name, skip):
        with gzip.open(f"{data}/{part}-{name}-ubyte.gz") as file:
            return torch.frombuffer(bytearray(file.read()[skip:]), dtype=torch.uint8)
    return read("images-idx3", 16).view(-1, 28, 28), read("labels-idx1", 8).long()


def inputs(images):
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]).view(2, 3, 1, 1)
    return (functional.pad(images.unsqueeze(1) / 255, (2, 2, 2, 2)) - mean) / deviation


def train(model, images, labels):
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.9)
    for first in range(0, len(images) - 49, 50):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(inputs(images[first:first + 50]))
        loss = functional.cross_entropy(output.float(), labels[first:first + 50])
        loss.backward()
        optimizer.step()
        if first % 500 == 0:
            print(f"loss {loss.item():.4f}")


def write_images(images, labels, count, split):
    for digit in range(5, 10):
        of_class = folder / "images" / split / str(digit)
        of_class.mkdir(parents=True, exist_ok=True)
        for i, image in enumerate(images[labels == digit][:count]):
            (of_class / f"{i}.pgm").write_bytes(b"P5 28 28 255\n" + bytes(image.flatten().tolist()))


images, labels = load("train")
write_images(images, labels, 300, "train")
write_images(*load("t10k"), 100, "test")

known = (labels < 5).nonzero().squeeze(1)[:3000]
model = torch.jit.script(ResNet(5))
train(model, images[known], labels[known])
model.save(str(folder / "resnet18.pt"))
