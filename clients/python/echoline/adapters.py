"""Adapters (LoRA) of PEFT, as files that the learner reads."""
from __future__ import annotations

import json
from typing import Any, Dict, Mapping, Tuple

_PARTS = (".lora_A.", ".lora_B.", ".lora_magnitude_vector.", ".lora_embedding_A", ".lora_embedding_B",
          ".modules_to_save.")


def of_model(model: Any, name: str) -> Tuple[Dict[str, Any], bool, Mapping[str, str]]:
    """The arguments of a safetensors.File: the tensors of the adapter `name` under the names of PEFT's files, to be
    rounded to BF16, and its configuration as metadata. `model`: a model of PEFT, or a mapping from names to tensors."""
    metadata: Dict[str, str] = {}
    if isinstance(model, Mapping):
        state: Mapping[str, Any] = model
    else:
        configs = getattr(model, "peft_config", None)
        if configs is None:
            raise TypeError(f"expected a model of PEFT, a folder or a mapping of tensors, found {type(model).__name__}")
        if name not in configs:
            raise ValueError(f"the model has no adapter '{name}', only {', '.join(configs)}")
        metadata["adapter_config"] = json.dumps(configs[name].to_dict(), default=_plain)
        state = {key: value for key, value in model.named_parameters()
                 if any(part in key for part in _PARTS) and f".{name}" in key}
    return {key.replace(f".{name}.", "."): value for key, value in state.items()}, False, metadata


def _plain(value: Any) -> Any:
    """PEFT's configurations contain sets, and members of enumerations."""
    return sorted(value) if isinstance(value, (set, frozenset)) else str(getattr(value, "value", value))
