#!/usr/bin/env python3
"""What ../lstm_language_model.cpp does, in PyTorch.

    lstm_language_model.py [fp16|bf16] [TEXT_FILE]
"""
import math
import sys

import torch
from torch import nn
from torch.nn import functional

dtype = torch.bfloat16 if len(sys.argv) > 1 and sys.argv[1] == "bf16" else torch.float16
with open(sys.argv[2] if len(sys.argv) > 2 else "data/alice.txt", "rb") as file:
    data = file.read()
vocabulary = sorted(set(data))
tokens = torch.tensor([vocabulary.index(byte) for byte in data])


class LanguageModel(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.encoder = nn.Embedding(classes, 64)
        self.lstm = nn.LSTM(64, 128, num_layers=2, dropout=0.1)
        self.decoder = nn.Linear(128, classes)

    def forward(self, tokens, state):
        output, state = self.lstm(self.encoder(tokens), state)
        return self.decoder(output), state


def first_state(rows):
    return torch.zeros(2, rows, 128), torch.zeros(2, rows, 128)


def batchify(tokens, columns):
    length = len(tokens) // columns
    return tokens[:length * columns].view(columns, length).t()


def loss_of(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


COLUMNS, BPTT = 32, 35
data = batchify(tokens[:len(tokens) * 9 // 10], COLUMNS)
held_out = batchify(tokens[len(tokens) * 9 // 10:], 4)
torch.manual_seed(0)
model = LanguageModel(len(vocabulary))
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16)

for epoch in range(5):
    state = first_state(COLUMNS)
    losses = []
    for i in range(0, len(data) - BPTT, BPTT):
        state = tuple(part.detach() for part in state)
        with torch.autocast("cpu", dtype=dtype):
            logits, state = model(data[i:i + BPTT], state)
            loss = loss_of(logits, data[i + 1:i + 1 + BPTT])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"epoch {epoch}: perplexity {math.exp(sum(losses) / len(losses)):.2f}")

model.eval()
with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
    logits, _ = model(held_out[:-1], first_state(4))
    perplexity = math.exp(loss_of(logits, held_out[1:]).item())
print(f"held-out perplexity {perplexity:.2f}")
sys.exit(perplexity >= 7)
