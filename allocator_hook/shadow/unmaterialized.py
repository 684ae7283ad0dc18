"""Tensors that a model has on PyTorch's meta device (`--init-model-with-meta-device`), where they need no memory.

All tensors of the simulated GPU are on PyTorch's meta device. Those that the training machine has there too are not recorded.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.utils import _device


class Unmaterialized:
    """The storages of these tensors."""

    def __init__(self) -> None:
        self.creating = False
        """Whether storages that are created now belong to them."""
        self._storages: dict[int, Any] = {}

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a storage until it is freed."""
        key = storage._cdata
        self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def __contains__(self, key: int) -> bool:
        return key in self._storages


unmaterialized: Final = Unmaterialized()


def under_meta_device() -> bool:
    """Whether tensors without a device are created on the meta device: `with torch.device("meta")`."""
    device: torch.device | None = _device.CURRENT_DEVICE
    return device is not None and device.type == "meta"
