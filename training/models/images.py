# ruff: noqa: ARG002  (save_hyperparameters keeps the arguments)
"""Image classifiers of torchvision, trained from scratch or fine-tuned with a new head."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any, Literal

import torch
import torchvision
from torch import nn

from ltui.training.models.classifier import Classifier, decay_groups, one_cycle


class ImageClassifier(Classifier):
    """Classifier for batches of (images (n, 3, height, width), labels (n,))."""

    def __init__(  # noqa: PLR0913  (a configuration file names each parameter)
        self,
        architecture: str = "resnet18",
        classes: int | None = None,
        stem: Literal["usual", "3x3"] = "usual",
        pretrained: Literal["no", "if there", "yes"] = "no",
        freeze: bool = False,
        optimizer: Literal["sgd", "adamw"] = "sgd",
        learning_rate: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0005,
        label_smoothing: float = 0.0,
        channels_last: bool = True,
        mirror_test: bool = False,
        compile: bool = False,  # noqa: A002  (as torch names it)
    ) -> None:
        """``architecture``: a model name of torchvision. ``classes``: number of classes, by default
        that of the data module's ``classes``. ``stem``: ``3x3`` keeps the resolution of small
        images (ResNets only). ``pretrained``: ``if there`` uses weights in torch's cache, ``yes``
        downloads them. The head is new if the number of classes differs. ``freeze``: train only the
        head. ``learning_rate``: maximum of the one-cycle schedule. ``mirror_test``: average the
        scores of an image and its mirror image in tests. ``compile``: use ``torch.compile``.
        """
        super().__init__()
        self.save_hyperparameters()
        names = torchvision.models.list_models(module=torchvision.models)
        if architecture not in names:
            similar = difflib.get_close_matches(architecture, names, n=1)
            hint = f" Did you mean {similar[0]}?" if similar else ""
            raise ValueError(f"torchvision has no classifier named {architecture!r}.{hint}")
        if stem == "3x3" and not architecture.startswith(("resnet", "resnext", "wide_resnet")):
            raise ValueError(f"stem=3x3 is for ResNets, not for {architecture}")
        self.label_smoothing = label_smoothing
        self.classes = classes
        self.network: nn.Module | None = None

    def configure_model(self) -> None:
        """Build the network. Lightning calls this in every stage after the setup of the data."""
        if self.network is not None:
            return
        options, classes = self.hparams, self.classes or _classes_of(self.trainer)
        network = torchvision.models.get_model(options["architecture"], num_classes=classes)
        if options["pretrained"] != "no":
            load_pretrained(network, options["architecture"], options["pretrained"] == "yes")
        if options["stem"] == "3x3":
            network.conv1 = nn.Conv2d(3, network.conv1.out_channels, 3, padding=1, bias=False)
            network.maxpool = nn.Identity()
        if options["freeze"]:
            freeze_all_but_head(network)
        if options["channels_last"]:
            network.to(memory_format=torch.channels_last)
        if options["compile"]:
            network.compile()
        self.network = network
        self.add_metrics(classes, top5=classes > 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        assert self.network is not None
        if self.hparams["channels_last"]:
            images = images.contiguous(memory_format=torch.channels_last)
        scores: torch.Tensor = self.network(images)
        return scores

    def test_step(self, batch: Any) -> None:
        images, labels = batch
        scores = self(images)
        if self.hparams["mirror_test"]:
            scores = (scores + self(images.flip(-1))) / 2
        self.measure(self.test_metrics, scores, labels)

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule. Norms and biases have no weight decay."""
        options = self.hparams
        groups, rate = decay_groups(self, options["weight_decay"]), options["learning_rate"]
        if options["optimizer"] == "adamw":
            return one_cycle(torch.optim.AdamW(groups, lr=rate), rate, self.trainer)
        momentum = options["momentum"]
        sgd = torch.optim.SGD(groups, lr=rate, momentum=momentum, nesterov=momentum > 0)
        return one_cycle(sgd, rate, self.trainer)


def _classes_of(trainer: Any) -> int:
    classes = getattr(trainer.datamodule, "classes", None)
    if classes is None:
        raise ValueError(
            "the number of classes is unknown: set model.init_args.classes, or add an attribute "
            "`classes` to the data module"
        )
    return classes if isinstance(classes, int) else len(classes)


def load_pretrained(network: nn.Module, architecture: str, download: bool) -> None:
    """Load torchvision's best weights into all parameters of equal shape (not into a new head).

    Without ``download``, only weights in torch's cache are loaded.
    """
    weights = torchvision.models.get_model_weights(architecture).DEFAULT
    cached = Path(torch.hub.get_dir()) / "checkpoints" / weights.url.rpartition("/")[2]
    if not cached.exists() and not download:
        return
    state = weights.get_state_dict(progress=False, check_hash=True)
    current = network.state_dict()
    matching = {k: v for k, v in state.items() if k in current and current[k].shape == v.shape}
    network.load_state_dict(matching, strict=False)


def freeze_all_but_head(network: nn.Module) -> None:
    """Freeze all parameters except those of the head, which is the last linear layer."""
    head = [module for module in network.modules() if isinstance(module, nn.Linear)][-1]
    network.requires_grad_(False)
    head.requires_grad_(True)
