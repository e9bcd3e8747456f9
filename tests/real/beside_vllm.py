"""The functions of the test `vllm`, for tests that use its environment: `from beside_vllm import vllm`.

It works below the folder of that test, beside the folder that is the first argument.
"""
import importlib.machinery
import importlib.util
import pathlib
import sys

sys.argv[1] = str(pathlib.Path(sys.argv[1]).resolve().parent / "vllm")
sys.dont_write_bytecode = True
_loader = importlib.machinery.SourceFileLoader("vllm_test", str(pathlib.Path(__file__).parent / "vllm"))
vllm = importlib.util.module_from_spec(importlib.util.spec_from_loader("vllm_test", _loader))
_loader.exec_module(vllm)
