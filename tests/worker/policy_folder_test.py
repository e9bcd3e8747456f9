#!/usr/bin/env python3
"""The client package's view of a worker's policy folder, which vLLM's plug-in reads."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "clients" / "python"))
sys.dont_write_bytecode = True
from echoline.policy_folder import PolicyFolder, layer_of, whole_layers  # noqa: E402
from echoline.safetensors import Tensor, pack  # noqa: E402


def packed(**values):
    return pack({name: Tensor("U8", (len(bytes_),), memoryview(bytes_)) for name, bytes_ in values.items()})


class PolicyFolderTest(unittest.TestCase):
    def setUp(self):
        self.temporary = tempfile.TemporaryDirectory()
        self.addCleanup(self.temporary.cleanup)
        self.path = pathlib.Path(self.temporary.name)

    def write(self, name, **values):
        new = self.path / "new"
        new.write_bytes(packed(**values))
        new.rename(self.path / name)

    def bytes_of(self, folder, name):
        return bytes(folder._tensors[name].data)

    def test_shows_what_is_written_in_place(self):
        self.write("model.safetensors", a=b"abcd", b=b"ef")
        folder = PolicyFolder(str(self.path))
        layout = folder.refresh()
        self.assertEqual(layout, {"a": ("U8", (4,)), "b": ("U8", (2,))})
        data = (self.path / "model.safetensors").read_bytes()
        with (self.path / "model.safetensors").open("r+b") as file:
            file.seek(data.index(b"abcd"))
            file.write(b"xbcd")
        self.assertEqual(folder.refresh(), layout)
        self.assertEqual(self.bytes_of(folder, "a"), b"xbcd")

    def test_maps_files_that_were_replaced(self):
        self.write("model.safetensors", a=b"abcd")
        folder = PolicyFolder(str(self.path))
        self.write("model.safetensors", a=b"efgh")
        folder.refresh()
        self.assertEqual(self.bytes_of(folder, "a"), b"efgh")
        self.write("model.safetensors", a=b"efghi")
        self.assertEqual(folder.refresh(), {"a": ("U8", (5,))})

    def test_refuses_a_folder_that_is_no_policy(self):
        with self.assertRaisesRegex(ValueError, "expected safetensors files, found none"):
            PolicyFolder(str(self.path))
        self.write("model-00001-of-00002.safetensors", a=b"abcd")
        self.write("model-00002-of-00002.safetensors", a=b"abcd")
        with self.assertRaisesRegex(ValueError, "a is in two files"):
            PolicyFolder(str(self.path))

    def test_hands_over_whole_layers(self):
        names = ["lm_head.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight",
                 "model.layers.1.self_attn.q_proj.weight", "model.layers.10.mlp.up_proj.weight", "model.norm.weight"]
        self.assertEqual([layer_of(name) for name in names], ["lm_head", "model.embed_tokens", "model.layers.1",
                                                              "model.layers.1", "model.layers.10", "model.norm"])
        self.assertEqual(whole_layers({"lm_head.weight", "model.layers.1.mlp.up_proj.weight"}, names),
                         {"lm_head": names[:1], "model.layers.1": names[2:4]})
        self.assertEqual(whole_layers(set(), names), {})


unittest.main()
