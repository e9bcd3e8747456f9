"""Client for external trainers of an echoline run: takes batches and publishes policies (docs/trainers.md)."""
from .async_client import AsyncClient
from .batch import Batch
from .client import Client, Error, Stale, Status
from .safetensors import Tensor, pack, unpack
from .shards import Shard

__all__ = ["AsyncClient", "Batch", "Client", "Error", "Shard", "Stale", "Status", "Tensor", "pack", "unpack"]
