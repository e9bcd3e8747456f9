#!/usr/bin/env python3
"""The client package's view of PEFT's adapters."""
import json
import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients" / "python"))
sys.dont_write_bytecode = True
from echoline import adapters  # noqa: E402

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


class Config:
    """As PEFT's LoraConfig: its dictionary has sets and members of enumerations."""

    def to_dict(self):
        return {"r": 4, "lora_alpha": 8, "target_modules": {"v_proj", "q_proj"}, "task_type": None}


class Model:
    """The part of a PeftModel that the client uses."""
    peft_config = {"default": Config(), "other": Config()}

    def named_parameters(self):
        yield f"{MODULE}.base_layer.weight", "base"
        for name in self.peft_config:
            yield f"{MODULE}.lora_A.{name}.weight", f"A {name}"
            yield f"{MODULE}.lora_B.{name}.weight", f"B {name}"


class AdaptersTest(unittest.TestCase):
    def test_a_model_becomes_the_tensors_of_one_adapter(self):
        for name in ("default", "other"):
            tensors, keep_types, metadata = adapters.of_model(Model(), name)
            self.assertEqual(tensors, {f"{MODULE}.lora_A.weight": f"A {name}", f"{MODULE}.lora_B.weight": f"B {name}"})
            self.assertFalse(keep_types)
            self.assertEqual(json.loads(metadata["adapter_config"])["target_modules"], ["q_proj", "v_proj"])

    def test_a_mapping_may_have_names_of_modules_or_of_files(self):
        for name in (f"{MODULE}.lora_A.weight", f"{MODULE}.lora_A.default.weight"):
            tensors, _, metadata = adapters.of_model({name: 1}, "default")
            self.assertEqual((tensors, metadata), ({f"{MODULE}.lora_A.weight": 1}, {}))

    def test_says_what_it_cannot_publish(self):
        with self.assertRaisesRegex(TypeError, "expected a model of PEFT, a folder or a mapping"):
            adapters.of_model(object(), "default")
        with self.assertRaisesRegex(ValueError, "no adapter 'third', only default, other"):
            adapters.of_model(Model(), "third")


unittest.main()
