"""The instrument ``nan`` of ``ltui rerun``: finds the first NaN of a rank.

It only reads what the program computes, so its numbers stay the same.
"""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ltui.training.rank.channel import current_channel
from ltui.training.rank.step_rerun import Instrument


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of floating point numbers in nested values."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() or value.is_complex():
            # To reduce a distributed tensor is a collective: only this rank's part is read.
            yield value.to_local() if hasattr(value, "to_local") else value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


class NanWatch(Instrument):
    """Finds the first NaN of this rank: module, tensor, and where in the step it is.

    Forward passes without gradients, such as those of a validation, are not observed, and neither
    is the inside of a compiled module. Once a NaN is found, all that follows is NaN too.
    """

    def __init__(self, first: int, options: Mapping[str, Any]) -> None:
        super().__init__(first, options)
        self._hooked: set[int] = set()
        """Ids of the parameters whose gradients are observed."""
        self._names: dict[int, str] = {}
        self._thread, self._pid = threading.get_ident(), os.getpid()
        self._found: dict[str, Any] | None = None
        self._infinite: str | None = None
        """Where the first infinite value was, which often precedes a NaN."""
        self._is_sent = False

    def begin(self) -> None:
        """Check the parameters, and hook every module, gradient and backward pass."""
        self._check_parameters("before the step")
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def watched(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in _tensors(tensors if isinstance(tensors, (list, tuple)) else [tensors]):
                self._check(tensor, None, "loss", "forward")
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self._send()

        torch.autograd.backward = watched
        register_module_forward_pre_hook(self.before_forward)
        register_module_forward_hook(self._after_forward)

    def step_ended(self, step: int) -> None:
        """Check the parameters after the step of the optimizer."""
        self._check_parameters("after the step")
        self._send()
        super().step_ended(step)

    def before_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        """Check the inputs, and hook the gradients of the module's own parameters."""
        if not torch.is_grad_enabled() or os.getpid() != self._pid:
            return
        for number, tensor in enumerate(_tensors(inputs)):
            self._check(tensor, module, f"input {number}", "forward")
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._hook_gradient(parameter, module, f"gradient of {name}")

    def _after_forward(self, module: torch.nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled() or os.getpid() != self._pid:
            return
        for number, tensor in enumerate(_tensors(outputs)):
            self._check(tensor, module, f"output {number}", "forward")
            if tensor.requires_grad:
                self._hook_gradient(tensor, module, f"gradient of output {number}")
        self._send()

    def _hook_gradient(self, tensor: torch.Tensor, module: torch.nn.Module, name: str) -> None:
        def check(gradient: torch.Tensor | None) -> None:
            if gradient is not None:  # the loss does not use it
                self._check(gradient, module, name, "backward")

        tensor.register_hook(check)  # type: ignore[no-untyped-call]

    def _check_parameters(self, when: str) -> None:
        for root in _roots():
            for module in root.modules():
                own = *module.named_parameters(recurse=False), *module.named_buffers(recurse=False)
                for name, tensor in own:
                    for each in _tensors(tensor):
                        self._check(each, module, name, when)

    def _check(
        self, tensor: torch.Tensor, module: torch.nn.Module | None, name: str, where: str
    ) -> None:
        if self._found is not None or not tensor.numel() or tensor.is_meta:
            return
        with torch.no_grad():
            if bool(tensor.isfinite().all()):
                return
            count = int(tensor.isnan().sum())
        named = "" if module is None else self._name(module)
        if not count:
            self._infinite = self._infinite or (f"{name} of {named}" if named else name)
            return
        self._found = {
            "at_step": self.step,
            "module": named or None,
            "module_class": None if module is None else type(module).__name__,
            "tensor": name,
            "where": where,
            "count": count,
            "of": tensor.numel(),
            "infinite_before": self._infinite,
        }

    def _name(self, module: torch.nn.Module) -> str:
        """Return the name of a module within the model; its class if it is in none."""
        if id(module) not in self._names:
            for root in _roots():
                for name, each in root.named_modules():
                    # DDP and a compiled module hold the model below such a name.
                    short = name.removeprefix("module.").removeprefix("_orig_mod.")
                    self._names.setdefault(id(each), short or type(each).__name__)
        return self._names.get(id(module), type(module).__name__)

    def _send(self) -> None:
        """Send what was found. A gradient may be computed by another thread, which must not."""
        channel, found = current_channel(), self._found
        if found is None or self._is_sent or channel is None:
            return
        if threading.get_ident() == self._thread:
            self._is_sent = True
            owner = found["module"] or "the program"
            text = f"Step {found['at_step']}: {found['tensor']} of {owner} is NaN."
            print(f"ltui: {text}", flush=True)
            channel.event("rerun_nan", text, **found)


def _roots() -> Iterable[torch.nn.Module]:
    """Return the modules of this process that are in no other module.

    Looks at every object that the garbage collector tracks.
    """
    found = [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]
    modules = [each for each in found if "_modules" in vars(each)]
    inner = {id(child) for each in modules for child in vars(each)["_modules"].values()}
    return [each for each in modules if id(each) not in inner]
