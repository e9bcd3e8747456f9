"""Client for external trainers of an echoline run: takes batches and publishes policies (docs/trainers.md)."""
from .batch import Batch
from .client import Client, Error, Stale, Status
from .safetensors import Tensor, pack, unpack

__all__ = ["Batch", "Client", "Error", "Stale", "Status", "Tensor", "pack", "unpack"]
