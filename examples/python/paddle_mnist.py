#!/usr/bin/env python3
"""What ../paddle_mnist.cpp does, in Paddle, on a GPU (on a CPU, Paddle's auto_cast has no effect).

    paddle_mnist.py [DATA_DIR]

A static program passes the same numbers to paddle.static.amp.decorate(optimizer, init_loss_scaling=2**8, ...).
"""
import sys

import paddle
from paddle import nn
from paddle.nn import functional

folder = sys.argv[1] if len(sys.argv) > 1 else "data/mnist"
paddle.seed(0)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2D(1, 16, 5, padding=2, data_format="NHWC"), nn.BatchNorm2D(16, data_format="NHWC"),
            nn.ReLU(), nn.MaxPool2D(2, data_format="NHWC"),
            nn.Conv2D(16, 64, 5, padding=2, data_format="NHWC"), nn.BatchNorm2D(64, data_format="NHWC"),
            nn.ReLU(), nn.MaxPool2D(2, data_format="NHWC"))
        self.hidden = nn.Linear(7 * 7 * 64, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        return self.head(functional.relu(self.hidden(self.features(images).flatten(1))))


def read(part, batch, shuffle):
    data = paddle.vision.datasets.MNIST(image_path=f"{folder}/{part}-images-idx3-ubyte.gz",
                                        label_path=f"{folder}/{part}-labels-idx1-ubyte.gz",
                                        transform=lambda image: image.astype("float32").reshape(28, 28, 1) / 255,
                                        backend="cv2")
    return paddle.io.DataLoader(data, batch_size=batch, shuffle=shuffle)


model = Net()
optimizer = paddle.optimizer.Momentum(0.01, 0.9, parameters=model.parameters())
scaler = paddle.amp.GradScaler(init_loss_scaling=2**8, incr_every_n_steps=500, decr_every_n_nan_or_inf=4,
                               incr_ratio=2.0, decr_ratio=0.5)

for step, (images, labels) in enumerate(read("train", 50, False)):
    if step == 200:
        break
    with paddle.amp.auto_cast(level="O1", dtype="float16"):
        loss = functional.cross_entropy(model(images), labels)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.clear_grad()
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

model.eval()
images, labels = next(iter(read("t10k", 1000, False)))
with paddle.no_grad(), paddle.amp.auto_cast(level="O1", dtype="float16"):
    predicted = model(images).argmax(1)
accuracy = (predicted == labels.flatten()).astype("float32").mean().item()
print("accuracy", accuracy)
sys.exit(accuracy <= 0.88)
