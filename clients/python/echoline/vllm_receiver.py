"""Loads policies into a running vLLM, from the tmpfs folder to which an echoline worker writes them.

vLLM creates a `Receiver` in each of its worker processes. The echoline worker makes these HTTP calls while vLLM is
paused:

    /init_weight_transfer_engine {"init_info": {"folder": ..., "interface": 1}}      once
    /start_weight_update                                                             checks, writes nothing
    /update_weights {"update_info": {"version": "4", "base": "3", "tensors": [...]}} loads
    /finish_weight_update {"weight_version": "4"}                                    vLLM stores the version

Written for vLLM 0.32. If another release lacks an import below, the first call returns an error. The echoline worker
then uses vLLM's `reload_weights`, which reads all files of the folder.
"""
from __future__ import annotations

import contextlib
import ctypes
import time
from dataclasses import dataclass
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from vllm.distributed.weight_transfer.base import (WeightTransferEngine, WeightTransferInitInfo,
                                                   WeightTransferUpdateInfo)
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload import layerwise

from .policy_folder import Layout, PolicyFolder, layer_of, whole_layers

INTERFACE = 1  # version of the calls above; the echoline worker sends the one that it uses

logger = init_logger("vllm.echoline")  # vLLM shows the loggers below its own


@dataclass
class InitInfo(WeightTransferInitInfo):
    folder: str  # must be the folder given to vLLM as --model
    interface: int  # must be INTERFACE


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    version: str  # version of the policy in the folder
    base: Optional[str] = None  # version from which the policy differs only in `tensors`; absent: all may differ
    tensors: Optional[List[str]] = None  # names


class Receiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    _folder: Optional[PolicyFolder] = None
    _layout: Layout = {}
    _version: Optional[str] = None  # version of the model's weights; None: unknown

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.interface != INTERFACE:
            raise ValueError(f"expected interface {INTERFACE}, found {init_info.interface}: install the echoline "
                             "package of the worker's version beside vLLM")
        folder, model = PolicyFolder(init_info.folder), PolicyFolder(self.model_config.model)
        if folder.path != model.path:
            raise ValueError(f"expected the folder that this vLLM serves, {model.path}, found {folder.path}")
        if self.model_config.quantization is not None:
            raise ValueError(f"a model that vLLM quantises ({self.model_config.quantization}) is not supported")
        self._folder, self._layout, self._version = folder, folder.refresh(), None

    def start_weight_update(self) -> None:
        if self._folder is None:
            raise RuntimeError("expected /init_weight_transfer_engine before the first update")
        layout = self._folder.refresh()
        if layout != self._layout:
            differing = sorted(name for name in {*layout, *self._layout} if layout.get(name) != self._layout.get(name))
            raise ValueError(f"{self._folder.path}: expected tensors with the names, types and shapes that they had at "
                             f"/init_weight_transfer_engine, found others: {differing[:5]}")

    def update_weights(self, update_info: Dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        changed = self._changed_names(update_info)
        started_at = time.perf_counter()
        self._version = None  # unknown if the load fails
        if self._can_overwrite_tensors():
            names = [name for name in self._layout if name in changed]
            self.model.load_weights(self._tensors(names))
        else:
            with contextlib.ExitStack() as stack:
                if self.device.type == "cpu":
                    stack.enter_context(_keep_freed_memory())
                    stack.enter_context(_halve_threads())
                    stack.enter_context(_pack_experts_again())
                names = self._load_layers(changed)
        self._version = update_info.version
        logger.info("echoline: version %s, %d of %d tensors in %.3f s", update_info.version, len(names),
                    len(self._layout), time.perf_counter() - started_at)

    def finish_weight_update(self) -> None:
        pass  # vLLM itself stores `weight_version`

    def shutdown(self) -> None:
        self._folder = None

    def _changed_names(self, info: UpdateInfo) -> Set[str]:
        """Names of the tensors that may differ from the model's. Raises ValueError if the update does not fit the
        model's version."""
        if self._folder is None:
            raise RuntimeError("expected /init_weight_transfer_engine before the first update")
        if info.tensors is None or info.base is None:
            return set(self._layout)
        if info.base != self._version:
            raise ValueError(f"expected an update of version {self._version}, found one of version {info.base}")
        unknown = [name for name in info.tensors if name not in self._layout]
        if unknown:
            raise ValueError(f"{self._folder.path}: no such tensors: {unknown[:5]}")
        return set(info.tensors)

    def _tensors(self, names: Iterable[str]) -> Iterable[Tuple[str, Any]]:
        assert self._folder is not None  # _changed_names() has checked it
        return self._folder.torch_tensors(names)

    def _can_overwrite_tensors(self) -> bool:
        """Whether vLLM keeps the tensors as it loads them, so that single ones can be overwritten. On a CPU it packs
        them for its kernels. On every device it transforms mixtures of experts and latent attention."""
        return self.device.type == "cuda" and not self.model_config.is_moe and not self.model_config.use_mla

    def _load_layers(self, changed: Iterable[str]) -> List[str]:
        """Loads each layer that has a changed tensor, as at vLLM's start, but into the existing memory. Returns the
        names of the loaded tensors."""
        groups = whole_layers(set(changed), self._layout)
        names = [name for group in groups.values() for name in group]
        modules = dict(self.model.named_modules())
        # A prefix is no module if vLLM renames its tensors. Then it is not known which modules they change.
        loads_all = len(names) == len(self._layout) or any(prefix not in modules for prefix in groups)
        roots = [self.model] if loads_all else [modules[prefix] for prefix in groups]
        if loads_all:
            names = sorted(self._layout, key=layer_of)
        expected = {name for name, _ in self.model.named_parameters()} if loads_all else set()
        tied_heads = _tied_heads(self.model, roots)
        try:
            for root in roots:
                initialize_layerwise_reload(root)
            # The check expects all tensors of multi-token prediction (MTP); a load of some layers lacks most of them.
            with disable_mtp_completeness_check():
                loaded = self.model.load_weights(self._tensors(names))
            if loaded is not None and expected - set(loaded):
                raise RuntimeError(f"the folder has no values for {sorted(expected - set(loaded))[:5]}")
            for root in roots:
                _expect_all_loaded(root, tied_heads)
            for root in roots:
                finalize_layerwise_reload(root, self.model_config)
            for head in tied_heads:
                head.quant_method.process_weights_after_loading(head)  # on a CPU, packs the embedding's new values
        except BaseException:
            for root in roots:
                _restore_memory(root)
            raise
        return names


@contextlib.contextmanager
def _keep_freed_memory() -> Iterator[None]:
    """In this context, glibc takes large blocks from its heap and keeps freed memory. Otherwise each layer's new blocks
    come from the kernel, page by page, which takes more than half of a load's time. With other allocators it has no
    effect."""
    trim_threshold, top_pad, mmap_max, mmap_max_default = -1, -2, -4, 65536  # constants of malloc.h
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(trim_threshold, 1 << 30)
    mallopt(top_pad, 64 << 20)
    mallopt(mmap_max, 0)
    try:
        yield
    finally:
        # Large blocks come from the kernel again. So the other two settings, which concern the heap, can stay.
        mallopt(mmap_max, mmap_max_default)


@contextlib.contextmanager
def _halve_threads() -> Iterator[None]:
    """In this context, torch uses half of its threads. Memory bandwidth limits a load, and the learner or other servers
    may use the cores. Threads that wait for each other after every tensor then cost more than they save."""
    thread_count = torch.get_num_threads()
    torch._C.set_num_threads(max(1, thread_count // 2))  # vLLM disables torch.set_num_threads on a CPU
    try:
        yield
    finally:
        torch._C.set_num_threads(thread_count)


@contextlib.contextmanager
def _pack_experts_again() -> Iterator[None]:
    """In this context, the experts of a mixture get their kernel's layout at every load. vLLM 0.32 gives it to them
    only at the first one. After another load, the kernels of a CPU would read the values in the wrong order."""
    set_up_kernel = UnquantizedFusedMoEMethod._setup_kernel

    def set_up_and_pack(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        set_up_kernel(self, layer, w13, w2)
        if layer.w13_weight is w13:  # not replaced by values in another layout
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    UnquantizedFusedMoEMethod._setup_kernel = set_up_and_pack
    try:
        yield
    finally:
        UnquantizedFusedMoEMethod._setup_kernel = set_up_kernel


def _tied_heads(model: torch.nn.Module, roots: Iterable[torch.nn.Module]) -> List[torch.nn.Module]:
    """The output heads that share their weights with an embedding below one of `roots`."""
    embeddings = {id(layer.weight) for root in roots for layer in root.modules()
                  if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)}
    return [layer for layer in model.modules()
            if isinstance(layer, ParallelLMHead) and id(getattr(layer, "weight", None)) in embeddings]


def _expect_all_loaded(root: torch.nn.Module, tied_heads: List[torch.nn.Module]) -> None:
    """Raises RuntimeError if a layer got no values. It would keep those of an earlier policy."""
    for name, layer in root.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if (layer not in tied_heads and info.can_load() and info.load_numel == 0
                and not layerwise.is_deferred_attention_layer(layer)
                and any(True for _ in layer.parameters(recurse=False))):
            raise RuntimeError(f"{type(layer).__name__} {name} got no values")


def _restore_memory(root: torch.nn.Module) -> None:
    """Gives the layers their memory back after a failed load, so that vLLM can load all tensors again. Some layers have
    new values."""
    for layer in root.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
    layerwise.LOADING_LAYERS.clear()
    if hasattr(root, "_original_do_torchao_reload"):  # initialize_layerwise_reload() has replaced the function
        root._do_torchao_reload = root._original_do_torchao_reload
