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
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

from . import adapters, safetensors, shards
from .batch import Batch

ADDRESS_FILE = "trainer-api.json"
LONGEST_WAIT_S = 60.0  # the longest wait within one call
_Body = Union[None, bytes, safetensors.File]
_RETRY_DELAYS_S = (0.05, 0.2, 0.5, 1.0)  # the last delay is used for all further retries


class Error(Exception):
    """The learner returned an error, or no answer."""

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
    raw: Mapping[str, Any]  # the learner's whole answer, with the model's configuration and the sampling


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

    def __init__(self, run: Union[str, "os.PathLike[str]"], timeout: float = 600.0, patience: float = 60.0):
        """`timeout`: seconds for the longest pause between bytes of an answer. `patience`: seconds for which a call is
        retried. Both apply to the constructor, too, which calls status()."""
        self._run, self._timeout, self._patience = run, timeout, patience
        self._connection: Optional[http.client.HTTPConnection] = None
        self._headers: Dict[str, str] = {}
        self.status()

    def close(self) -> None:
        """Ends the connection. A later call makes a new one."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def status(self) -> Status:
        """Asks the learner for the state of the run."""
        raw = self._call_json("GET", "/v1/status")
        return Status(raw["steps"], raw["steps_total"], raw["batch"], raw["version_wanted"], raw["version_published"],
                      raw.get("evaluation_wanted"), raw)

    def metrics(self, after: int = 0, last: Optional[int] = None) -> List[Dict[str, Any]]:
        """All rows of the run's metrics.jsonl except the first `after`, fetched page by page. With `last`, only that
        number of last rows, at most 10,000 rows and 1 MiB."""
        if last is not None:
            last_rows: List[Dict[str, Any]] = self._call_json("GET", f"/v1/metrics?last={last}")
            return last_rows
        rows: List[Dict[str, Any]] = []
        while True:
            response, body = self._call("GET", f"/v1/metrics?after={after + len(rows)}")
            rows += json.loads(body)
            if response.headers.get("X-Echoline-More") != "1":
                return rows

    def take(self, wait: float = LONGEST_WAIT_S, lease: float = 600.0, takeover: bool = False) -> Optional[Batch]:
        """Returns the next batch, or None if the learner has none within `wait` seconds. The batch is leased to this
        trainer for `lease` seconds; no other trainer gets it in this time. `takeover` takes the batch of a trainer that
        has crashed."""
        deadline = time.monotonic() + wait
        while True:
            wait_s = max(0.0, min(LONGEST_WAIT_S, deadline - time.monotonic()))
            query = f"wait_s={wait_s:.3f}&lease_s={lease:.3f}&takeover={int(takeover)}"
            response, body = self._call("POST", f"/v1/batch?{query}")
            if response.status == 200:
                return Batch(response.headers["X-Echoline-Lease"], int(response.headers["X-Echoline-Step"]), body)
            if time.monotonic() >= deadline:
                return None

    def renew(self, batch: Batch, lease: float = 600.0) -> None:
        """Extends the lease of the batch to `lease` seconds from now. Raises Stale if it has ended."""
        self._call_json("POST", f"/v1/batch/{batch.lease}/renew?lease_s={lease:.3f}")

    def score(self, batch: Batch, logprobs: Any, entropies: Any = None) -> None:
        """Sends the log-probabilities of the batch's response tokens under the trainer's model. Call it before
        consume(). `logprobs` are in the batch's order and at the run's temperature; NaN means not computed. `entropies`
        are optional; with them the learner detects workers that invent responses. Both arguments are sequences of
        numbers, numpy arrays or torch tensors."""
        tensors = {"logprobs": safetensors.of_floats(logprobs)}
        if entropies is not None:
            tensors["entropies"] = safetensors.of_floats(entropies)
        self._call_json("POST", f"/v1/batch/{batch.lease}/scores", safetensors.pack(tensors),
                        "application/octet-stream")

    def consume(self, batch: Batch, figures: Optional[Mapping[str, float]] = None) -> Status:
        """Ends the learner step: the trainer has trained on the batch, which is not handed out again. `figures` are
        the trainer's own metrics, which are added to the step's row in metrics.jsonl."""
        body = json.dumps({"figures": {name: float(value) for name, value in (figures or {}).items()}}, allow_nan=False)
        self._call_json("POST", f"/v1/batch/{batch.lease}/consume", body.encode())
        return self.status()

    def give_back(self, batch: Batch) -> None:
        """Returns the batch untrained, so that it is handed out again. Raises Stale if the lease has ended."""
        self._call_json("POST", f"/v1/batch/{batch.lease}/return")

    def publish(self, version: int, policy: Union[str, "os.PathLike[str]", Mapping[str, Any]],
                keep_types: bool = False) -> None:
        """Publishes `policy` as version `version`: the weights after that many learner steps. `policy` is a folder or
        file of safetensors, or a mapping from Hugging Face names to torch tensors or `Tensor`s.

        Torch tensors are rounded to BF16. `keep_types` sends tensors of every type as they are, for a model that
        echoline only carries (distributes, but cannot compute). Tensors on the CPU are then sent from their own memory;
        do not change them until this returns."""
        path = f"/v1/policy/{version}"
        if isinstance(policy, (str, os.PathLike)):
            self._call_json("POST", path, json.dumps({"path": os.path.abspath(policy)}).encode())
        else:
            self._call_json("POST", path, safetensors.File(policy, keep_types), "application/octet-stream")

    def publish_adapter(self, version: int, adapter: Any, name: str = "default") -> None:
        """Publishes an adapter (LoRA) as version `version`, for a run with `learner.adapter`. The base is not sent; the
        learner has it. `adapter` is a model of PEFT, PEFT's folder of an adapter, or a mapping from PEFT's names to
        torch tensors or `Tensor`s. `name`: PEFT's name of the adapter within the model, which the names of tensors may
        contain. Raises Error for another rank, other targets, missing tensors, or features that are not implemented,
        such as DoRA and modules_to_save."""
        if isinstance(adapter, (str, os.PathLike)):
            self.publish(version, adapter)
            return
        file = safetensors.File(*adapters.of_model(adapter, name))
        self._call_json("POST", f"/v1/policy/{version}", file, "application/octet-stream")

    def publish_shards(self, version: int, state: Mapping[str, Any], rank: int, ranks: int, attempt: str) -> None:
        """Uploads this rank's part of policy version `version`. Every rank calls it, so that no rank needs the whole
        policy. The learner publishes the version when it has all parts. `state`: Hugging Face names to torch tensors
        and DTensors, or to `Shard`s. `attempt`: any text, the same on all ranks. A restarted trainer chooses another
        one, and its parts replace those of the earlier attempt."""
        is_sharded = all(isinstance(value, shards.Shard) for value in state.values())
        parts = state if is_sharded else shards.shards_of_rank(state, rank)
        self._call_json("POST", f"/v1/policy/{version}/shards", shards.file_of_part(parts, rank, ranks, attempt),
                        "application/octet-stream")

    def held_out(self) -> Dict[str, Any]:
        """Begins an evaluation by this trainer: returns the problems that the run does not train on. The result is a
        dict with `problems` (each with `id`, `prompt` and `prompt_tokens`), `response_tokens_max`, `eos` and `stop`.
        From then on, the learner waits for evaluated() at the end of the run."""
        problems: Dict[str, Any] = self._call_json("GET", "/v1/evaluation")
        return problems

    def evaluated(self, version: int, responses: Optional[Mapping[str, Any]] = None, **figures: float) -> float:
        """Ends an evaluation. Sends the responses of policy version `version` to the held-out problems, by problem id,
        as tokens or texts. The learner grades each response up to its end token. Alternatively, `figures` are the
        trainer's own results: accuracy, problems, reward_mean. Returns the accuracy."""
        body = json.dumps({"responses": dict(responses)} if responses is not None else figures, allow_nan=False)
        return float(self._call_json("POST", f"/v1/evaluation/{version}", body.encode())["accuracy"])

    def _call_json(self, method: str, path: str, body: _Body = None, content_type: str = "application/json") -> Any:
        return json.loads(self._call(method, path, body, content_type)[1])

    def _connect(self) -> http.client.HTTPConnection:
        """Returns a new connection. Reads the address again, because a restarted learner has another one."""
        with open(os.path.join(self._run, ADDRESS_FILE), encoding="utf-8") as file:
            address = json.load(file)
        self._headers = {"Authorization": "Bearer " + address["token"]} if "token" in address else {}
        if "socket" in address:
            return _UnixConnection(address["socket"], self._timeout)
        return http.client.HTTPConnection(address["url"].split("//")[1], timeout=self._timeout)

    def _call_once(self, method: str, path: str, body: _Body,
                   headers: Mapping[str, str]) -> Tuple[http.client.HTTPResponse, bytes]:
        """Returns the response and its body. Raises OSError, ValueError or http.client.HTTPException if they did not
        arrive completely."""
        if self._connection is None:
            self._connection = self._connect()
        try:
            self._connection.request(method, path, body=body, headers={**self._headers, **headers})
        except OSError:
            if self._connection.sock is None:  # no connection was made, so there is no answer to read
                raise
            # The learner may have refused the request before reading all of it. Then its answer can be read.
        response = self._connection.getresponse()
        data = response.read()
        # A response that breaks off within its headers looks like one without a body.
        if response.status != 204 and (response.headers["Content-Length"] is None or not data):
            raise http.client.IncompleteRead(data)
        return response, data

    def _call(self, method: str, path: str, body: _Body = None,
              content_type: str = "application/json") -> Tuple[http.client.HTTPResponse, bytes]:
        """Returns the response and its body. Repeats the call while the answer is incomplete or says that the learner
        is busy (408, 503). Raises Error for every other error, at once."""
        size = 0 if body is None else body.nbytes if isinstance(body, safetensors.File) else len(body)
        headers = {"Content-Length": str(size)}
        if body is not None:
            headers["Content-Type"] = content_type
        if method != "GET":
            headers["Idempotency-Key"] = uuid.uuid4().hex  # the same for every attempt, so the learner acts only once
        deadline = time.monotonic() + self._patience
        for attempt in itertools.count():
            try:
                response, data = self._call_once(method, path, body, headers)
                if response.status < 400:
                    return response, data
                error_json = json.loads(data)["error"]
                code, message = str(error_json["code"]), str(error_json["message"])
                if response.status not in (408, 503):
                    break
                failure: Exception = Error(code, message)
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                failure = error
            self.close()
            if time.monotonic() >= deadline:
                raise Error("unavailable", "no learner with `learner.trainer: external` answers in "
                            f"{self._run}: {failure}") from failure
            time.sleep(_RETRY_DELAYS_S[min(attempt, len(_RETRY_DELAYS_S) - 1)])
        raise (Stale if code == "stale" else Error)(code, message)
