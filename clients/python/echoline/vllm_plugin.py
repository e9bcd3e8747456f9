"""Entry point of vLLM's plug-ins (`vllm.general_plugins`): makes the weight-transfer backend "echoline" known.

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
