#!/usr/bin/env python3
"""What ../dcgan.cpp does, in PyTorch: torch.amp with a GradScaler for each of the three losses.

    dcgan.py [STEPS] [PICTURE.pgm] [DATA_DIR]

Two losses that have a scale each cannot add up in one gradient. The discriminator's first gradients are therefore
unscaled, and then added to the second ones.
"""
import gzip
import sys

import torch
from torch import nn
from torch.nn import functional

steps = int(sys.argv[1]) if len(sys.argv) > 1 else 300
picture = sys.argv[2] if len(sys.argv) > 2 else "dcgan.pgm"
folder = sys.argv[3] if len(sys.argv) > 3 else "data/mnist"
BATCH, NOISE = 64, 64


def up(channels, out, kernel, stride, padding):
    return nn.ConvTranspose2d(channels, out, kernel, stride, padding, bias=False)


def down(channels, out, kernel, stride, padding):
    return nn.Conv2d(channels, out, kernel, stride, padding, bias=False)


def initialize_convolutions(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 4:
                parameter.normal_(0, 0.02)


def loss_of(logits, label):
    return functional.binary_cross_entropy_with_logits(logits.float(), torch.full(logits.shape, float(label)))


def write_picture(file, images):
    rows = images.view(8, 8, 28, 28).transpose(1, 2).reshape(8 * 28, 8 * 28)
    with open(file, "wb") as stream:
        stream.write(b"P5\n224 224\n255\n" + bytes(((rows + 1) * 127.5).round().byte().flatten().tolist()))


with gzip.open(f"{folder}/train-images-idx3-ubyte.gz") as file:
    data = torch.frombuffer(bytearray(file.read()[16:]), dtype=torch.uint8).view(-1, 1, 28, 28)
torch.manual_seed(0)
generator = nn.Sequential(up(NOISE, 64, 4, 1, 0), nn.BatchNorm2d(64), nn.ReLU(),
                          up(64, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
                          up(32, 16, 4, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
                          up(16, 1, 4, 2, 1), nn.Tanh())
discriminator = nn.Sequential(down(1, 16, 4, 2, 1), nn.LeakyReLU(0.2),
                              down(16, 32, 4, 2, 1), nn.BatchNorm2d(32), nn.LeakyReLU(0.2),
                              down(32, 64, 4, 2, 1), nn.BatchNorm2d(64), nn.LeakyReLU(0.2),
                              down(64, 1, 3, 1, 0))
for model in generator, discriminator:
    initialize_convolutions(model)
optimizer_g = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.5, 0.999))
optimizer_d = torch.optim.Adam(discriminator.parameters(), 2e-3, betas=(0.5, 0.999))
scaler_real, scaler_fake, scaler_g = (torch.amp.GradScaler("cpu") for _ in range(3))


def region():
    return torch.autocast("cpu", dtype=torch.float16)


def real_images(step):
    first = step * BATCH % (len(data) - BATCH)
    return data[first:first + BATCH].float() / 127.5 - 1


fixed_noise = torch.randn(BATCH, NOISE, 1, 1)


def sample():
    with torch.no_grad(), region():
        return generator(fixed_noise).float()


untrained = sample()
for step in range(steps):
    optimizer_d.zero_grad()
    with region():
        loss_real = loss_of(discriminator(real_images(step)), 1)
    scaler_real.scale(loss_real).backward()
    scaler_real.unscale_(optimizer_d)
    gradients = [parameter.grad for parameter in discriminator.parameters()]
    optimizer_d.zero_grad()
    with region():
        fake = generator(torch.randn(BATCH, NOISE, 1, 1))
        loss_fake = loss_of(discriminator(fake.detach()), 0)
    scaler_fake.scale(loss_fake).backward()
    scaler_fake.unscale_(optimizer_d)
    for parameter, gradient in zip(discriminator.parameters(), gradients):
        parameter.grad += gradient
    # A scaler skips only for its own gradients: step with the second unless the first overflowed.
    if all(gradient.isfinite().all() for gradient in gradients):
        scaler_fake.step(optimizer_d)
    scaler_real.update()
    scaler_fake.update()

    optimizer_g.zero_grad()
    with region():
        deceived = loss_of(discriminator(fake), 1)
    scaler_g.scale(deceived).backward()
    scaler_g.step(optimizer_g)
    scaler_g.update()
    if step % 20 == 0:
        print(f"step {step}: losses {(loss_real + loss_fake).item():.4f} of the discriminator, "
              f"{deceived.item():.4f} of the generator", flush=True)

samples = sample()
write_picture(picture, samples)
digits = real_images(0)
print(f"mean {samples.mean():.4f} ({digits.mean():.4f}), deviation {samples.std():.4f} ({digits.std():.4f}); "
      f"scales {scaler_real.get_scale():g}, {scaler_fake.get_scale():g}, {scaler_g.get_scale():g}")


def distance(images):  # of their brightness, and of how much it varies, from the real ones
    return (abs(images.mean() - digits.mean()) + abs(images.std() - digits.std())).item()


sys.exit(not distance(samples) < 0.75 * distance(untrained))
