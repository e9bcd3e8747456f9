# Runs a response's program in its own sandbox and calls its functions for the tests (examiner.py). The program controls
# this process from its first line on, so the examiner uses only the return values of its functions, as data.
import io
import operator
import random

from values import *

lines = Lines(os.dup(0), os.dup(1))
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
objects = []


def refer(value):
    objects.append(value)
    return len(objects) - 1


namespace = {"__name__": "solution"}


def resolve(kind, inner):
    return namespace[inner] if kind == "name" else objects[inner]


OPERATIONS = {
    "call": lambda function, *args, **named: function(*args, **named),
    "get": getattr,
    "set": setattr,
    "iter": iter,
    "next": next,
    "len": len,
    "bool": bool,
    "str": str,
    "repr": repr,
    "item": operator.getitem,
    "set_item": operator.setitem,
    "contains": operator.contains,
}


def perform(request):
    args = [decode(each, resolve) for each in request["args"]]
    named = {name: decode(value, resolve) for name, value in request["named"].items()}
    before = [json.dumps(each) for each in request["args"]]
    try:
        answer = {"value": encode(OPERATIONS[request["do"]](*args, **named), refer)}
    except Exception as error:
        answer = {"raised": [each.__name__ for each in type(error).__mro__], "text": str(error)[:1000]}
    # Lists, dictionaries and sets among the arguments that the program has changed.
    changed = {}
    for i, each in enumerate(args):
        if isinstance(each, (list, dict, set, bytearray)) and "object" not in before[i]:
            after = encode(each, refer)
            if json.dumps(after) != before[i]:
                changed[str(i)] = after
    if changed:
        answer["changed"] = changed
    return json.dumps(answer)


def serve():
    lines.put("hello")
    source = json.loads(lines.get())
    try:
        code = compile(source, "response", "exec", dont_inherit=True)
    except BaseException:
        return lines.put("syntax error")
    lines.put("compiled")
    lines.get()
    random.seed(0)
    try:
        exec(code, namespace)
    except BaseException:
        return lines.put("not loaded")
    lines.put("loaded")
    while True:
        request = json.loads(lines.get())
        try:
            answer = perform(request)
        except BaseException as error:
            answer = json.dumps({"raised": [type(error).__name__], "text": ""})
        lines.put(answer)


serve()
