#!/usr/bin/env python3
"""What ../torchscript_finetune.cpp does, in PyTorch.

    torchscript_finetune.py MODEL.pt IMAGES FINETUNED.pt [SIZE]

IMAGES is a folder of torchscript_resnet.py. torchvision.datasets.ImageFolder reads others too.
"""
import re
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

size = int(sys.argv[4]) if len(sys.argv) > 4 else 224
device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.float16 if device == "cuda" else torch.bfloat16


def load(split):
    images, labels = [], []
    for label, of_class in enumerate(sorted((Path(sys.argv[2]) / split).iterdir())):
        for path in sorted(of_class.glob("*.pgm")):
            content = bytearray(path.read_bytes())
            header = re.match(rb"P5\s+(\d+)\s+(\d+)\s+255\s", content)
            pixels = torch.frombuffer(content, dtype=torch.uint8, offset=header.end())
            images.append(pixels.view(int(header[2]), int(header[1])).expand(1, 3, -1, -1))
            labels.append(label)
    scaled = functional.interpolate(torch.cat(images).float(), (size, size), mode="bilinear", antialias=True)
    return scaled.round().clamp(0, 255).byte(), torch.tensor(labels)


def replace_classifier(model, classes):
    classifier = nn.Linear(model.fc.weight.size(1), classes, device=model.fc.weight.device)
    model.fc.weight, model.fc.bias = classifier.weight, classifier.bias


def freeze_batch_norm(model):
    for layer in model.modules():
        if hasattr(layer, "running_mean"):
            layer.eval()
            for parameter in layer.parameters(recurse=False):
                parameter.requires_grad_(False)


def normalise(images):
    mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], device=device).view(2, 3, 1, 1)
    return (images.to(device) / 255 - mean) / deviation


def forward(model, images):
    with torch.autocast(device, dtype=dtype):
        return model(normalise(images)).float()


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    correct = 0
    for rows in torch.arange(len(images)).split(100):
        correct += (forward(model, images[rows]).argmax(1).cpu() == labels[rows]).sum().item()
    return correct / len(images)


images, labels = load("train")
test = load("test")
torch.manual_seed(0)
model = torch.jit.load(sys.argv[1], device)
replace_classifier(model, int(labels.max()) + 1)
freeze_batch_norm(model)
statistics = [buffer.clone() for buffer in model.buffers()]
optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.01, momentum=0.9)
scaler = torch.amp.GradScaler(device, enabled=dtype == torch.float16)
before = accuracy(model, *test)

epochs, batch = 3, 50
batches = -(-len(images) // batch)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
for epoch in range(epochs):
    model.train()
    freeze_batch_norm(model)
    mean_loss = 0
    for rows in torch.randperm(len(images)).split(batch):
        optimizer.zero_grad()
        loss = functional.cross_entropy(forward(model, images[rows]), labels[rows].to(device))
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # the step was not skipped
            scheduler.step()
        mean_loss += loss.item() / batches
    print(f"epoch {epoch}: loss {mean_loss:.4f}")

after = accuracy(model, *test)
unchanged = all(torch.equal(a, b) for a, b in zip(model.buffers(), statistics))
torch.jit.save(model, sys.argv[3])
print(f"accuracy {before:.3f} -> {after:.3f}, statistics of BatchNorm {'unchanged' if unchanged else 'changed'}")
sys.exit(after < 0.9 or not unchanged)
