"""Entry point for vLLM's plug-ins (`vllm.general_plugins`). Registers the weight-transfer backend "echoline".

    vllm serve ... --weight-transfer-config '{"backend": "echoline"}'
"""
BACKEND = "echoline"


def register() -> None:
    """Called by vLLM in each of its processes, perhaps several times. Ignores a vLLM without weight transfer."""
    try:
        from vllm.distributed.weight_transfer import WeightTransferEngineFactory
    except ImportError:
        return
    try:
        WeightTransferEngineFactory.register_engine(BACKEND, "echoline.vllm_receiver", "Receiver")
    except ValueError:
        pass  # it is registered already
