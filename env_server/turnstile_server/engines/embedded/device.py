"""Where the embedded engine computes, and in which type: checked before any weights are loaded.

What must hold: a device that is not there, or that lacks the type, is a DeviceError that says what to change; and
float32 means float32: no matrix product is rounded to TF32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""The types that the engine computes in, by the name that the settings and ``/server_info`` have."""


class DeviceError(Exception):
    """The device or the dtype cannot be used on this machine; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """``device``: of weights, cache, logits and sampling. ``dtype``: of weights, cache and the model's arithmetic;
    logits are turned into float32 before anything is sampled or scored."""

    device: torch.device
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        """``float32`` or ``bfloat16``."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def device_name(self) -> str:
        """``cpu``, or ``cuda:0 (NVIDIA H100 80GB HBM3)``."""
        if self.device.type != "cuda":
            return str(self.device)
        return f"{self.device} ({torch.cuda.get_device_name(self.device)})"

    def empty_cache(self) -> None:
        """Gives memory that no tensor uses back to the driver. No-op on a CPU."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


CPU_FLOAT32: Final = ComputeDevice(torch.device("cpu"), torch.float32)


def compute_device(device: str, dtype: str) -> ComputeDevice:
    """The device and the dtype that the settings name: ``cpu``, ``cuda`` or ``cuda:N``; a name of ``DTYPES``.

    Raises DeviceError.
    """
    if dtype not in DTYPES:
        raise DeviceError(f"engine.dtype is {dtype!r}; take {' or '.join(DTYPES)}")
    if device == "cpu":
        return ComputeDevice(torch.device("cpu"), DTYPES[dtype])
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"engine.device is {device!r}; take cpu, cuda or cuda:N") from error
    if wanted.type != "cuda":
        raise DeviceError(f"engine.device is {device!r}; take cpu, cuda or cuda:N")
    return _cuda(wanted, dtype)


def _cuda(wanted: torch.device, dtype: str) -> ComputeDevice:
    if not torch.cuda.is_available():
        why = (
            f"this torch ({torch.__version__}) is built without CUDA; install one that has it"
            if torch.version.cuda is None
            else f"torch {torch.__version__} finds no GPU and driver that it can use (does nvidia-smi list one?)"
        )
        raise DeviceError(f"engine.device is {wanted}, but {why}, or set engine.device = cpu")
    count = torch.cuda.device_count()
    index = wanted.index or 0
    if index >= count:
        there = ", ".join(f"cuda:{number}" for number in range(count))
        raise DeviceError(f"engine.device is {wanted}, but this machine has {there}")
    found = ComputeDevice(torch.device("cuda", index), DTYPES[dtype])
    if dtype == "bfloat16" and torch.cuda.get_device_capability(index) < (8, 0):
        raise DeviceError(
            f"engine.dtype is bfloat16, which {found.device_name} cannot compute (it needs compute capability "
            "8.0); set engine.dtype = float32"
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        torch.ones(1, dtype=found.dtype, device=found.device).add_(1).item()
    except RuntimeError as error:  # no memory, no kernels for this card, a card in another process's hands
        raise DeviceError(f"engine.device is {wanted}, which cannot compute: {error}") from error
    return found
