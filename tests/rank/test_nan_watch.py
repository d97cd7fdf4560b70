"""The instruments of steps executed again: what they find, and that they change nothing."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ltui.training.rank import nan_watch
from ltui.training.rank.nan_watch import NanWatch

NAN = float("nan")
torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch sets a variable for its first optimizer


class Fault(nn.Module):
    """Multiplies what passes through, forwards or backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.gradient_factor = 1.0, 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * self.factor
        if self.gradient_factor != 1.0 and y.requires_grad:
            y.register_hook(lambda gradient: gradient * self.gradient_factor)
        return y


class Sink(torch.autograd.Function):
    """Gives no gradient to what the loss does not use, as DDP with ``find_unused_parameters``."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), Fault())
        self.head, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        used: torch.Tensor = Sink.apply(self.head(self.body(x)), self.unused(x))[0]
        return used


Sent = list[dict[str, Any]]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The events of this rank."""
    events: Sent = []
    channel = SimpleNamespace(event=lambda kind, text, **data: events.append(data))
    monkeypatch.setattr(nan_watch, "current_channel", lambda: channel)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    for table in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        monkeypatch.setattr(torch.nn.modules.module, table, OrderedDict())
    gc.collect()
    roots = nan_watch._roots
    others = list(roots())  # of other tests, which something still holds
    monkeypatch.setattr(
        nan_watch, "_roots", lambda: [r for r in roots() if not any(r is other for other in others)]
    )
    return events


def train(change: Callable[[Net, torch.Tensor, int], Any], *, watched: bool) -> list[float]:
    """Take three steps, the second and third of them watched, and return their losses."""
    torch.manual_seed(0)
    net, watch, losses = Net(), NanWatch(2, {}), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in (1, 2, 3):
        batch = torch.randn(8, 4)
        loss_factor = change(net, batch, step)
        with torch.no_grad():
            net(batch * NAN)  # a validation is not of interest
        loss = net(batch).pow(2).mean() * (loss_factor or 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if watched and step == 1:
            watch.begin()
        elif watched:
            watch.step_ended(step)
    return losses


def spoil_batch(_net: Net, batch: torch.Tensor, step: int) -> None:
    batch[3, 0] = NAN if step == 3 else 0.0


def spoil_output(net: Net, _batch: torch.Tensor, step: int) -> None:
    net.body[1].factor = NAN if step == 2 else 1.0  # type: ignore[assignment]


def spoil_loss(_net: Net, _batch: torch.Tensor, step: int) -> float:
    return NAN if step == 2 else 1.0


def spoil_gradient(net: Net, _batch: torch.Tensor, step: int) -> None:
    net.body[1].gradient_factor = NAN if step == 2 else 1.0  # type: ignore[assignment]


def overflow(net: Net, _batch: torch.Tensor, step: int) -> None:
    net.body[1].factor = 1e38 if step == 2 else 1.0  # type: ignore[assignment]


def spoil_weight(net: Net, _batch: torch.Tensor, step: int) -> None:
    if step == 1:
        net.head.weight.data[0, 0] = NAN


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (spoil_batch, (3, "Net", "input 0", "forward", 1)),
        (spoil_output, (2, "body.1", "output 0", "forward", 32)),
        (spoil_loss, (2, None, "loss", "forward", 1)),
        (spoil_gradient, (2, "body.1", "gradient of output 0", "backward", 32)),
        (spoil_weight, (2, "body.0", "weight", "before the step", 16)),
    ],
)
def test_the_first_nan_is_named(
    sent: Sent, change: Callable[[Net, torch.Tensor, int], Any], found: tuple[Any, ...]
) -> None:
    train(change, watched=True)
    (event,) = sent
    assert tuple(event[n] for n in ("at_step", "module", "tensor", "where", "count")) == found


def test_only_the_thread_of_the_training_sends(sent: Sent) -> None:
    """Gradients on a device are computed by another thread."""
    watch = NanWatch(1, {})
    watch._found = {"at_step": 1, "module": None, "tensor": "loss"}
    other = threading.Thread(target=watch._send)
    other.start()
    other.join()
    assert sent == []
    watch._send()
    watch._send()
    assert sent == [watch._found]


def test_an_infinite_value_that_came_before_is_named_too(sent: Sent) -> None:
    train(overflow, watched=True)
    assert sent[0]["infinite_before"] is not None


def test_without_a_nan_nothing_is_sent_and_the_losses_are_the_same(sent: Sent) -> None:
    def change(_net: Net, _batch: torch.Tensor, _step: int) -> None:
        """Change nothing."""

    assert train(change, watched=True) == train(change, watched=False)
    assert sent == []
