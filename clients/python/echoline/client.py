"""Calls the trainer API of a run, by HTTP over a unix socket or loopback."""
from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import time
import uuid
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Union

from . import safetensors
from .batch import Batch

ADDRESS_FILE = "trainer-api.json"
LONGEST_WAIT_S = 60.0  # the longest wait within one call
_RETRY_DELAYS_S = (0.05, 0.2, 0.5, 1.0)  # the last delay is used for all further retries


class Error(Exception):
    """An error that the learner returned, or the lack of an answer."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Stale(Error):
    """The lease of the batch has ended, or the version is already published."""


@dataclass(frozen=True)
class Status:
    """The state of the run, as the learner reports it."""

    steps: int  # learner steps done
    steps_total: int
    batch: str  # "none", "waiting" (for a trainer) or "taken"
    version_wanted: Optional[int]  # the learner waits for this version
    version_published: int
    evaluation_wanted: Optional[int]  # the run asks for this version's answers to the held-out problems
    raw: Mapping[str, Any]  # the whole answer, with the model's configuration and the sampling


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float):
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Client:
    """One trainer of a run, for use by one thread. `run` is the run's folder.

    If the connection breaks or the learner is too busy, the client retries the call on a new connection for up to
    `patience` seconds. Every call that changes something has an id, and the learner executes it only once."""

    def __init__(self, run: Union[str, os.PathLike], timeout: float = 600.0, patience: float = 60.0):
        """`timeout`: seconds to wait for bytes of one answer. `patience`: seconds for which a call is retried, here
        too."""
        self._run, self._timeout, self._patience = run, timeout, patience
        self._connection: Optional[http.client.HTTPConnection] = None
        self._headers: Dict[str, str] = {}
        self.status()

    def status(self) -> Status:
        raw = self._json("GET", "/v1/status")
        return Status(raw["steps"], raw["steps_total"], raw["batch"], raw["version_wanted"], raw["version_published"],
                      raw.get("evaluation_wanted"), raw)

    def metrics(self, after: int = 0, last: Optional[int] = None) -> List[Dict[str, Any]]:
        """All rows of the run's metrics.jsonl except the first `after`, fetched page by page. With `last`, only that
        number of last rows, at most 10,000 rows and 1 MiB."""
        if last is not None:
            return self._json("GET", f"/v1/metrics?last={last}")
        rows: List[Dict[str, Any]] = []
        while True:
            response, body = self._call("GET", f"/v1/metrics?after={after + len(rows)}")
            rows += json.loads(body)
            if response.headers.get("X-Echoline-More") != "1":
                return rows

    def take(self, wait: float = LONGEST_WAIT_S, lease: float = 600.0, takeover: bool = False) -> Optional[Batch]:
        """The next batch, or None if the learner has none within `wait` seconds. It is leased to this trainer for
        `lease` seconds. `takeover` takes the batch of a trainer that has crashed."""
        deadline = time.monotonic() + wait
        while True:
            left = max(0.0, min(LONGEST_WAIT_S, deadline - time.monotonic()))
            query = f"wait_s={left:.3f}&lease_s={lease:.3f}&takeover={int(takeover)}"
            response, body = self._call("POST", f"/v1/batch?{query}")
            if response.status == 200:
                return Batch(response.headers["X-Echoline-Lease"], int(response.headers["X-Echoline-Step"]), body)
            if time.monotonic() >= deadline:
                return None

    def renew(self, batch: Batch, lease: float = 600.0) -> None:
        """Extends the lease of the batch to `lease` seconds from now. Raises Stale if it has ended."""
        self._json("POST", f"/v1/batch/{batch.lease}/renew?lease_s={lease:.3f}")

    def score(self, batch: Batch, logprobs: Any, entropies: Any = None) -> None:
        """Sends the log-probabilities of the batch's response tokens under the trainer's model, before consume(). They
        are in the batch's order and at the run's temperature; NaN means not computed. `entropies` are optional. With
        them the learner detects workers that invent responses. Both are sequences of numbers, numpy arrays or torch
        tensors."""
        tensors = {"logprobs": safetensors.of_floats(logprobs)}
        if entropies is not None:
            tensors["entropies"] = safetensors.of_floats(entropies)
        self._json("POST", f"/v1/batch/{batch.lease}/scores", safetensors.pack(tensors), "application/octet-stream")

    def consume(self, batch: Batch, figures: Optional[Mapping[str, float]] = None) -> Status:
        """Ends the learner step: the trainer has trained on the batch, which is not handed out again. `figures` are
        the trainer's own metrics, which are added to the step's row in metrics.jsonl."""
        body = json.dumps({"figures": {name: float(value) for name, value in (figures or {}).items()}}, allow_nan=False)
        self._json("POST", f"/v1/batch/{batch.lease}/consume", body.encode())
        return self.status()

    def give_back(self, batch: Batch) -> None:
        """Returns the batch untrained, so that it is handed out again. Raises Stale if the lease has ended."""
        self._json("POST", f"/v1/batch/{batch.lease}/return")

    def publish(self, version: int, policy: Union[str, os.PathLike, Mapping[str, Any]]) -> None:
        """Publishes `policy` as version `version`: the weights after that many learner steps. `policy` is a folder or
        file of safetensors, or a mapping from Hugging Face names to torch tensors or `Tensor`s."""
        if isinstance(policy, (str, os.PathLike)):
            body = json.dumps({"path": os.path.abspath(policy)}).encode()
            self._json("POST", f"/v1/policy/{version}", body, "application/json")
            return
        tensors = {name: value if isinstance(value, safetensors.Tensor) else safetensors.of_torch(value)
                   for name, value in policy.items()}
        self._json("POST", f"/v1/policy/{version}", safetensors.pack(tensors), "application/octet-stream")

    def held_out(self) -> Dict[str, Any]:
        """Begins an evaluation by this trainer: returns the held-out problems, as `problems` with `id`, `prompt` and
        `prompt_tokens`, and `response_tokens_max`, `eos` and `stop`. From then on, the learner waits for evaluated() at
        the end of the run."""
        return self._json("GET", "/v1/evaluation")

    def evaluated(self, version: int, responses: Optional[Mapping[str, Any]] = None, **figures: float) -> float:
        """Sends the responses of the policy `version` to the held-out problems, by problem id, as tokens or texts. The
        learner grades them up to their end token. Alternatively, `figures` are the trainer's own results: accuracy,
        problems, reward_mean. Returns the accuracy."""
        body = json.dumps({"responses": dict(responses)} if responses is not None else figures, allow_nan=False)
        return self._json("POST", f"/v1/evaluation/{version}", body.encode())["accuracy"]

    def _json(self, method: str, path: str, body: Optional[bytes] = None, kind: str = "application/json") -> Any:
        return json.loads(self._call(method, path, body, kind)[1])

    def _connect(self) -> http.client.HTTPConnection:
        """A new connection. The address is read again, because a restarted learner has another one."""
        with open(os.path.join(self._run, ADDRESS_FILE), encoding="utf-8") as file:
            address = json.load(file)
        self._headers = {"Authorization": "Bearer " + address["token"]} if "token" in address else {}
        if "socket" in address:
            return _UnixConnection(address["socket"], self._timeout)
        return http.client.HTTPConnection(address["url"].split("//")[1], timeout=self._timeout)

    def _once(self, method: str, path: str, body: Optional[bytes], headers: Mapping[str, str]):
        """Returns the response and its body. Raises OSError, ValueError or http.client.HTTPException if they did not
        arrive completely."""
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.request(method, path, body=body, headers={**self._headers, **headers})
        except OSError:
            if self._connection.sock is None:
                raise
            # The learner may have refused the request before reading all of it; then its answer can be read.
        response = self._connection.getresponse()
        data = response.read()
        # A response that breaks off within its headers looks like one without a body.
        if response.status != 204 and (response.headers["Content-Length"] is None or not data):
            raise http.client.IncompleteRead(data)
        return response, data

    def _call(self, method: str, path: str, body: Optional[bytes] = None, kind: str = "application/json"):
        headers = {"Content-Type": kind} if body is not None else {"Content-Length": "0"}
        if method != "GET":
            headers["Idempotency-Key"] = uuid.uuid4().hex
        deadline = time.monotonic() + self._patience
        for attempt in itertools.count():
            try:
                response, data = self._once(method, path, body, headers)
                error_fields = None
                if response.status >= 400:
                    returned = json.loads(data)["error"]
                    error_fields = {"code": str(returned["code"]), "message": str(returned["message"])}
                if response.status not in (408, 503):
                    break
                failure: Exception = Error(**error_fields)
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                failure = error
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            if time.monotonic() >= deadline:
                raise Error("unavailable", "no learner with `learner.trainer: external` answers in "
                            f"{self._run}: {failure}") from failure
            time.sleep(_RETRY_DELAYS_S[min(attempt, len(_RETRY_DELAYS_S) - 1)])
        if error_fields is not None:
            raise (Stale if error_fields["code"] == "stale" else Error)(**error_fields)
        return response, data
