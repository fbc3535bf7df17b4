"""The parts of the models in PyTorch, operation for operation those of `blocks`; images have their channels first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

HEADS = 4

Weights = Mapping[str, Any]


def add_shift(weights: Weights, x: Any) -> Any:
    """Returns x plus the first part's only parameter, broadcast over the batch."""
    (shift,) = weights.values()
    return x + shift


def mlp(weights: Weights, x: Any) -> Any:
    """A layer of the chain; x is (rows, width)."""
    return x + torch.tanh(x @ weights["up"]) @ weights["down"]


def transformer(weights: Weights, x: Any) -> Any:
    """A block of the GPT; x is (batch, tokens, width)."""
    batch, tokens, width = x.shape
    qkv = F.layer_norm(x, (width,), weights["scale_1"], weights["shift_1"]) @ weights["qkv"]
    query, key, value = qkv.reshape(batch, tokens, 3 * HEADS, width // HEADS).transpose(1, 2).chunk(3, dim=1)
    scores = query @ key.transpose(-1, -2) * (width // HEADS) ** -0.5
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, torch.finfo(x.dtype).min)
    context = (scores.softmax(-1) @ value).transpose(1, 2).reshape(x.shape)
    x = x + context @ weights["out"]
    up = F.layer_norm(x, (width,), weights["scale_2"], weights["shift_2"]) @ weights["up"]
    return x + F.gelu(up, approximate="tanh") @ weights["down"]


def stem(weights: Weights, x: Any) -> Any:
    """The first part of the ResNet; x is (batch, 3, height, width)."""
    return F.conv2d(x + weights["shift"], weights["stem"], padding=1)


def residual(weights: Weights, x: Any) -> Any:
    """A block of the ResNet; x is (batch, channels, height, width). With a shortcut it halves the image."""
    stride = 2 if "shortcut" in weights else 1
    y = batch_norm(F.conv2d(x, weights["conv_1"], padding=1, stride=stride), weights["scale_1"], weights["shift_1"])
    y = batch_norm(F.conv2d(torch.relu(y), weights["conv_2"], padding=1), weights["scale_2"], weights["shift_2"])
    if stride == 2:
        x = F.conv2d(x, weights["shortcut"], stride=2)
    return torch.relu(x + y)


def batch_norm(x: Any, scale: Any, shift: Any) -> Any:
    """Normalises each channel over batch and image."""
    return F.batch_norm(x, None, None, scale, shift, training=True)


def start(weights: Weights, xs: Any) -> tuple[Any, Any]:
    """The first state of the LSTM, (hidden, cell), both (batch, width); xs is (steps, batch, width)."""
    return weights["hidden"].expand(xs.shape[1:]), weights["cell"].expand(xs.shape[1:])


def lstm_cell(weights: Weights, state: tuple[Any, Any], x: Any) -> tuple[Any, Any]:
    """A step of the LSTM; returns the next (hidden, cell)."""
    hidden, cell = state
    into, forget, out, new = (torch.cat([x, hidden], -1) @ weights["gates"]).chunk(4, dim=-1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


FIRST: Mapping[str, Callable[..., Any]] = {"chain": add_shift, "GPT": add_shift, "ResNet": stem, "LSTM": start}
BLOCK: Mapping[str, Callable[..., Any]] = {
    "chain": mlp,
    "GPT": transformer,
    "ResNet": residual,
    "LSTM": lstm_cell,
}
