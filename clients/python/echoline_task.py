"""Tasks for echoline in Python. One file without dependencies, for Python 3.8 and newer.

A task with one response per problem:

    import echoline_task as task

    PROBLEMS = [{"prompt": f"{a}+{b}=", "reference": str(a + b)} for a in range(10) for b in range(10)]

    @task.score
    def score(problem, response):
        return 1.0 if response.strip() == problem["reference"] else 0.0

    task.run(problems=PROBLEMS[20:], evaluation=PROBLEMS[:20])

A task with several turns is a class. Each of its objects is an episode: one attempt at a problem. step(response)
returns the result of a response.

    class Guess:
        def __init__(self, problem, seed, settings): ...
        def step(self, response):
            return {"reward": 0.0, "done": False, "observation": "higher"}

    task.run(episode=Guess, problems=..., evaluation=...)

Functions written for other trainers work without changes, also async ones. `verl(compute_score)`,
`trl(reward_function)`, `openrlhf(reward_func)` and `rubric(functions, weights)` turn them into a score, and
`openrlhf(AgentInstance)` into an episode.

A prompt or an observation is a text or a list of messages, `{"role": "user", "content": "..."}`. A role is system,
user, assistant or tool. An observation contains only the new messages.

A problem may have `demonstration`, an answer to imitate in the warm start. The result of a step that is not done may
have `cut`: an additional score for the case that another response has no room.

A score is a number, or a mapping with `reward` and optionally `components` (named numbers) and `correct`, which an
evaluation counts (default: whether the reward is at least 1). An exception is an error of the task: the rollout is
given back and counted, and earns nothing. Standard output belongs to the protocol: print() writes to standard error,
which is the task's log.
"""
import inspect
import json
import os
import sys
import traceback

PROTOCOL = 1
settings = {}  # task.options.settings of the run file; set when run() begins
seed = 0  # seed of the run; set when run() begins

_score = None


def score(function):
    """Makes `function(problem, response)` the task's score. A function with `function.batched = True` gets a list of
    problems and a list of responses, and returns a list of scores."""
    global _score
    _score = function
    return function


def run(problems=None, evaluation=None, *, episode=None, score=None, name="", deterministic=True):
    """Answers requests until the input ends. `problems` and `evaluation` are sequences (anything with len() and []) of
    mappings with `prompt` and optionally `id`, `reference`, `metadata`; or functions without arguments that return one.
    `deterministic`: a response gets the same score on every machine and at every time."""
    requests, answers = _open_channels()
    task = _Task(problems, evaluation, episode, score or _score, name, deterministic)
    for line in requests:
        request = json.loads(line)
        try:
            result = task.answer(request)
        except Exception as error:
            traceback.print_exc()
            answer = {"id": request.get("id"), "error": _error_text(error)}
        else:
            if "id" not in request:
                continue
            answer = {"id": request["id"], "result": result}
        answers.write(_encode_line(answer))
        answers.flush()


def verl(compute_score):
    """A score from verl's `compute_score(data_source, solution_str, ground_truth, extra_info=None)`, which returns a
    number or a mapping with `score`. `data_source` and `extra_info` come from the problem's `metadata`, the ground
    truth from `reference`."""

    def scored(problem, response):
        metadata = problem.get("metadata") or {}
        value = _wait_for_result(compute_score(
            data_source=metadata.get("data_source", ""), solution_str=response,
            ground_truth=problem.get("reference", ""), extra_info=metadata.get("extra_info")))
        if not isinstance(value, dict):
            return _to_float(value)
        components = {name: float(v) for name, v in value.items()
                      if name not in ("score", "acc") and isinstance(v, (int, float))}
        result = {"reward": _to_float(value["score"]), "components": components}
        if "acc" in value:
            result["correct"] = bool(value["acc"])
        return result

    return scored


def trl(function):
    """A score from TRL's `function(prompts, completions, completion_ids=..., **columns)`, which returns a list of
    numbers. The columns are the values of the problem's `metadata`, and `answer` is its `reference` if `metadata` has
    none. Completions are texts; with `function.conversational = True` they are messages of an assistant."""
    accepts_all = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
    parameter_names = set(inspect.signature(function).parameters)

    def scored(problems, responses):
        if getattr(function, "conversational", False):
            prompts = [_messages(p["prompt"]) for p in problems]
            completions = [[{"role": "assistant", "content": r}] for r in responses]
        else:
            prompts, completions = [_prompt_text(p["prompt"]) for p in problems], list(responses)
        rows = [{"answer": p.get("reference", ""), **(p.get("metadata") or {})} for p in problems]
        names = {name for row in rows for name in row}
        arguments = {name: [row.get(name) for row in rows]
                     for name in names if accepts_all or name in parameter_names}
        if "completion_ids" in parameter_names:
            arguments["completion_ids"] = [[] for _ in responses]
        if "trainer_state" in parameter_names:
            arguments["trainer_state"] = None
        # A function returns None for a completion that it does not grade.
        return [0.0 if value is None else _to_float(value)
                for value in _wait_for_result(function(prompts=prompts, completions=completions, **arguments))]

    scored.batched = True
    return scored


def rubric(functions, weights=None):
    """A score from the functions of verifiers' Rubric(funcs, weights): their weighted sum. A function may have the
    arguments prompt and completion (messages), answer, state, info, task, response (text) and problem. Weights are 1 by
    default; they can also be given as [(function, weight), ...]. Every function is a component with its name. `state`
    is a mapping that all functions share for one response."""
    pairs = [f if isinstance(f, tuple) else (f, 1.0 if weights is None else weights[i])
             for i, f in enumerate(functions)]
    weighted = []  # function, weight, names of its arguments (None: it accepts all)
    for function, weight in pairs:
        parameters = inspect.signature(function).parameters
        accepts_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        weighted.append((function, float(weight), None if accepts_all else set(parameters)))

    def scored(problem, response):
        metadata = problem.get("metadata") or {}
        state = {
            "prompt": _messages(problem["prompt"]),
            "completion": [{"role": "assistant", "content": response}],
            "answer": problem.get("reference", ""), "info": metadata, "task": metadata.get("task", "default"),
        }
        arguments = {**state, "state": state, "response": response, "problem": problem}
        total, components = 0.0, {}
        for function, weight, names in weighted:
            accepted = arguments if names is None else {name: v for name, v in arguments.items() if name in names}
            value = _to_float(_wait_for_result(function(**accepted)))
            components[function.__name__] = value
            total += weight * value
        return {"reward": total, "components": components}

    return scored


def openrlhf(reward_func_or_agent):
    """A score or an episode from OpenRLHF.

    A score comes from `reward_func(queries, prompts, labels)`, which returns `rewards` and optionally `scores` and
    `extra_logs`, each with one number per query. An episode comes from an agent class with `reset(states, **kwargs)`
    and `step(states, **kwargs)`. step() gets observation_text, action_text and label, and returns rewards, scores,
    environment_feedback and done. Numbers may be tensors."""
    if not inspect.isclass(reward_func_or_agent):
        return _openrlhf_function(reward_func_or_agent)
    agent = reward_func_or_agent

    class Episode:
        def __init__(self, problem, seed, settings):
            self.label = problem.get("reference", "")
            self.agent = agent()
            prompt = _prompt_text(problem["prompt"])
            start = _wait_for_result(self.agent.reset({"observation": prompt, "label": self.label}))
            self.observation = start.get("observation", prompt) if isinstance(start, dict) else prompt

        def step(self, response):
            result = _wait_for_result(self.agent.step({"observation_text": self.observation, "action_text": response,
                                                       "label": self.label}))
            feedback = result.get("environment_feedback", "")
            self.observation += response + feedback
            return {"reward": _to_float(result["rewards"]), "done": bool(result.get("done", True)),
                    "observation": feedback, "correct": _to_float(result.get("scores", result["rewards"])) >= 1}

    return Episode


def _openrlhf_function(function):
    def scored(problems, responses):
        prompts = [_prompt_text(p["prompt"]) for p in problems]
        answer = _wait_for_result(function([p + r for p, r in zip(prompts, responses)], prompts,
                                           [p.get("reference", "") for p in problems]))
        if not isinstance(answer, dict):
            answer = {"rewards": answer}
        results = [{"reward": _to_float(reward)} for reward in answer["rewards"]]
        for result, score in zip(results, answer.get("scores", ())):
            result["correct"] = _to_float(score) >= 1
        for name, values in answer.get("extra_logs", {}).items():
            if hasattr(values, "__len__") and len(values) == len(results):
                for result, value in zip(results, values):
                    result.setdefault("components", {})[name] = _to_float(value)
        return results

    scored.batched = True
    return scored


def _messages(prompt):
    return prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]


def _prompt_text(prompt):
    return prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)


def _to_float(number):
    """Accepts numbers, and tensors with one element."""
    return float(number.item() if hasattr(number, "item") else number)


_loop = None


def _wait_for_result(result):
    """Returns the result of a function. If the function is async, waits for it."""
    global _loop
    if not inspect.isawaitable(result):
        return result
    if _loop is None:
        import asyncio

        _loop = asyncio.new_event_loop()
        asyncio.set_event_loop(_loop)
    return _loop.run_until_complete(result)


class _Task:
    """Answers the requests of echoline (data_plane/adapters/process/FORMAT.md)."""

    def __init__(self, problems, evaluation, episode, score, name, deterministic):
        if (episode is None) == (score is None):
            raise TypeError("expected either a score or an episode")
        self.problems, self.evaluation = problems, evaluation
        self.episode, self.score = episode, score
        self.name, self.deterministic = name, deterministic
        self.episodes = {}  # episodes in progress, by the number that echoline gave them

    def answer(self, request):
        method = request["method"]
        if method == "hello":
            return self.hello(request)
        if method == "ping":
            return {}
        if method == "close":
            for number in request["episodes"]:
                self.episodes.pop(number, None)
            return {}
        if method == "cancel":  # each request is answered before the next is read, so nothing is left to cancel
            return {}
        items = request["items"]
        if method in ("problems", "evaluation"):
            rows = self.rows(method)
            return {"items": [{"problems": [rows[row] for row in item["rows"]]} for item in items]}
        if method == "score":
            return {"items": self.scores(items)}
        if method == "step":
            return {"items": [self.result_or_error(self.step, item) for item in items]}
        raise ValueError(f"unknown method {method!r}")

    def hello(self, request):
        global settings, seed
        if request["protocol"] != PROTOCOL:
            raise ValueError(f"expected protocol {PROTOCOL}, found {request['protocol']}")
        settings, seed = request["settings"], request["seed"]
        return {"protocol": PROTOCOL, "name": self.name, "turns": self.episode is not None,
                "deterministic": self.deterministic, "problems": len(self.rows("problems")),
                "evaluation": len(self.rows("evaluation"))}

    def rows(self, problem_set):
        """Returns the rows of "problems" or "evaluation". A function that makes them is called only once."""
        rows = getattr(self, problem_set)
        if callable(rows):
            rows = rows()
            setattr(self, problem_set, rows)
        return rows if rows is not None else ()

    def scores(self, items):
        if not getattr(self.score, "batched", False):
            return [self.result_or_error(lambda i: _score_fields(self.score(i["problem"], i["response"])), item)
                    for item in items]
        values = self.score([i["problem"] for i in items], [i["response"] for i in items])
        if len(values) != len(items):
            raise ValueError(f"expected {len(items)} scores, one for each response, found {len(values)}")
        return [self.result_or_error(_score_fields, value) for value in values]

    def step(self, item):
        number = item["episode"]
        if "problem" in item:
            self.episodes[number] = self.episode(item["problem"], item["seed"], settings)
        if number not in self.episodes:
            raise KeyError(f"no episode {number}")
        result = _score_fields(self.episodes[number].step(item["response"]))
        if result.setdefault("done", True):
            del self.episodes[number]
        return result

    @staticmethod
    def result_or_error(function, item):
        """Returns the function's result for an item, or an error for this item alone."""
        try:
            return function(item)
        except Exception as error:
            traceback.print_exc()
            return {"error": _error_text(error)}


_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


def _encode_line(answer):
    """Returns the answer as a line of JSON. An item that JSON cannot represent is replaced by an error."""
    try:
        text = _json.encode(answer)
    except (TypeError, ValueError, RecursionError):
        items = answer.get("result", {}).get("items")
        if items is None:
            raise
        # Encodes each item alone, only to find the items that fail.
        answer["result"]["items"] = [
            item if "error" in item else _Task.result_or_error(lambda i: _json.encode(i) and i, item) for item in items]
        text = _json.encode(answer)
    return text.encode() + b"\n"


def _score_fields(value):
    return dict(value) if isinstance(value, dict) else {"reward": float(value)}


def _error_text(error):
    return f"{type(error).__name__}: {error}"


def _open_channels():
    """Returns the files of requests and answers. From then on, what is written to standard output goes to standard
    error, so that print() does not disturb the protocol."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return os.fdopen(os.dup(0), "rb", 1 << 20), answers
