"""The calls of a run's trainer API, over HTTP on a unix socket or on loopback."""
from __future__ import annotations

import http.client
import json
import os
import socket
import time
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Union

from . import safetensors
from .batch import Batch

ADDRESS_FILE = "trainer-api.json"
LONGEST_WAIT_S = 60.0  # of one call


class Error(Exception):
    """What the learner said, or that it does not answer."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Stale(Error):
    """The batch is not this trainer's any more, or the version is published."""


@dataclass(frozen=True)
class Status:
    steps: int  # learner steps done
    steps_total: int
    batch: str  # none, waiting, taken
    version_wanted: Optional[int]  # that the learner waits for
    version_published: int
    evaluation_wanted: Optional[int]  # the version whose answers to held-out problems the run would like to have
    raw: Mapping[str, Any]  # everything, the model's configuration and the sampling included


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One trainer of a run; of one thread. `run` is the run's folder."""

    def __init__(self, run: Union[str, os.PathLike], timeout: float = 600.0, patience: float = 0.0):
        """`patience`: seconds to wait for the learner to be there."""
        deadline = time.monotonic() + patience
        while True:
            try:
                with open(os.path.join(run, ADDRESS_FILE), encoding="utf-8") as file:
                    address = json.load(file)
                self._headers = {"Authorization": "Bearer " + address["token"]} if "token" in address else {}
                self._connection = (_UnixConnection(address["socket"], timeout) if "socket" in address else
                                    http.client.HTTPConnection(address["url"].split("//")[1], timeout=timeout))
                self.status()
                return
            except (OSError, Error, ValueError) as error:
                if time.monotonic() >= deadline:
                    raise Error("unavailable", f"no learner with `learner.trainer: external` runs in {run}: {error}") from error
                time.sleep(0.2)

    def status(self) -> Status:
        raw = self._json("GET", "/v1/status")
        return Status(raw["steps"], raw["steps_total"], raw["batch"], raw["version_wanted"], raw["version_published"],
                      raw.get("evaluation_wanted"), raw)

    def metrics(self, after: int = 0) -> List[Dict[str, Any]]:
        """The rows of the run's metrics.jsonl, without the first `after`."""
        return self._json("GET", f"/v1/metrics?after={after}")

    def take(self, wait: float = LONGEST_WAIT_S, lease: float = 600.0, takeover: bool = False) -> Optional[Batch]:
        """The next batch, or None when there is none within `wait` seconds. It is this trainer's for `lease` seconds; `takeover`
        takes it from one that has crashed."""
        deadline = time.monotonic() + wait
        while True:
            left = max(0.0, min(LONGEST_WAIT_S, deadline - time.monotonic()))
            response, body = self._call("POST", f"/v1/batch?wait_s={left:.3f}&lease_s={lease:.3f}&takeover={int(takeover)}")
            if response.status == 200:
                return Batch(response.headers["X-Echoline-Lease"], int(response.headers["X-Echoline-Step"]), body)
            if time.monotonic() >= deadline:
                return None

    def renew(self, batch: Batch, lease: float = 600.0) -> None:
        self._json("POST", f"/v1/batch/{batch.lease}/renew?lease_s={lease:.3f}")

    def score(self, batch: Batch, logprobs: Any, entropies: Any = None) -> None:
        """What the trainer's model says of each response token of the batch, in its order, before it is consumed: log-probabilities at
        the run's temperature, NaN where none was computed, and if at hand the entropies there. The learner then sees which workers make
        their responses up. Sequences of numbers, numpy or torch."""
        tensors = {"logprobs": safetensors.of_floats(logprobs)}
        if entropies is not None:
            tensors["entropies"] = safetensors.of_floats(entropies)
        self._json("POST", f"/v1/batch/{batch.lease}/scores", safetensors.pack(tensors), "application/octet-stream")

    def consume(self, batch: Batch, figures: Optional[Mapping[str, float]] = None) -> Status:
        """It was trained on: nobody gets it again. The figures become part of the step's row in metrics.jsonl."""
        body = json.dumps({"figures": {name: float(value) for name, value in (figures or {}).items()}}, allow_nan=False)
        self._json("POST", f"/v1/batch/{batch.lease}/consume", body.encode())
        return self.status()

    def give_back(self, batch: Batch) -> None:
        self._json("POST", f"/v1/batch/{batch.lease}/return")

    def publish(self, version: int, policy: Union[str, os.PathLike, Mapping[str, Any]]) -> None:
        """The policy after `version` learner steps: a folder or file of safetensors, or tensors by their Hugging Face names, torch's
        or `Tensor`s."""
        if isinstance(policy, (str, os.PathLike)):
            body = json.dumps({"path": os.path.abspath(policy)}).encode()
            self._json("POST", f"/v1/policy/{version}", body, "application/json")
            return
        tensors = {name: value if isinstance(value, safetensors.Tensor) else safetensors.of_torch(value)
                   for name, value in policy.items()}
        self._json("POST", f"/v1/policy/{version}", safetensors.pack(tensors), "application/octet-stream")

    def held_out(self) -> Dict[str, Any]:
        """The held-out problems: `problems` with `id`, `prompt`, `prompt_tokens`; `response_tokens_max`, `eos`, `stop`. Who asks for them is
        waited for at the end of the run."""
        return self._json("GET", "/v1/evaluation")

    def evaluated(self, version: int, responses: Optional[Mapping[str, Any]] = None, **figures: float) -> float:
        """The responses of the policy of `version` to the held-out problems by id, tokens or texts, which the learner grades (what
        stands behind the end of one does not count); or figures of one's own: accuracy, problems, reward_mean. Returns the accuracy."""
        body = json.dumps({"responses": dict(responses)} if responses is not None else figures, allow_nan=False)
        return self._json("POST", f"/v1/evaluation/{version}", body.encode())["accuracy"]

    def _json(self, method: str, path: str, body: Optional[bytes] = None, kind: str = "application/json") -> Any:
        return json.loads(self._call(method, path, body, kind)[1])

    def _call(self, method: str, path: str, body: Optional[bytes] = None, kind: str = "application/json"):
        headers = dict(self._headers, **({"Content-Type": kind} if body is not None else {"Content-Length": "0"}))
        try:
            self._connection.request(method, path, body=body, headers=headers)
            response = self._connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()  # the next call begins anew
            raise Error("unavailable", f"the learner does not answer: {error}") from error
        if response.status >= 400:
            try:
                error = json.loads(data)["error"]
            except (ValueError, KeyError, TypeError):
                error = {"code": "http", "message": f"{method} {path}: HTTP {response.status}"}
            raise (Stale if error["code"] == "stale" else Error)(error["code"], error["message"])
        return response, data
