# Runs a response's program in its own sandbox and calls its functions for the tests (examiner.py). The program controls
# this process from its first line on, so the examiner uses only the return values of its functions, as data.
import io
import json
import operator
import os
import random

from values import Lines, decode, encode

lines = Lines(os.dup(0), os.dup(1))
# The program's own reads and prints must not reach the examiner, so they go to /dev/null.
null = os.open("/dev/null", os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
objects = []  # those that the examiner may refer to, by index


def store_object(value):
    """Returns the index of the object, by which the examiner refers to it."""
    objects.append(value)
    return len(objects) - 1


namespace = {"__name__": "solution"}  # the program's global names


def resolve(kind, key):
    """Returns the program's object with a global name, or with an index of store_object()."""
    return namespace[key] if kind == "name" else objects[key]


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


def contains_reference(encoded_text):
    """Whether an encoded argument refers to an object of the program. A text that contains "object" counts as well."""
    return "object" in encoded_text


def perform(request):
    """Executes one operation for the examiner. Returns the answer as JSON."""
    args = [decode(each, resolve) for each in request["args"]]
    named = {name: decode(value, resolve) for name, value in request["named"].items()}
    encoded_before = [json.dumps(each) for each in request["args"]]
    try:
        answer = {"value": encode(OPERATIONS[request["do"]](*args, **named), store_object)}
    except Exception as error:
        answer = {"raised": [each.__name__ for each in type(error).__mro__], "text": str(error)[:1000]}
    # Sends back the lists, dictionaries and sets among the arguments that the program has changed, so that the tests
    # see the change. Not those with references: an object's number would differ without a change.
    changed = {}
    for i, each in enumerate(args):
        if isinstance(each, (list, dict, set, bytearray)) and not contains_reference(encoded_before[i]):
            after = encode(each, store_object)
            if json.dumps(after) != encoded_before[i]:
                changed[str(i)] = after
    if changed:
        answer["changed"] = changed
    return json.dumps(answer)


def serve():
    """Loads the program that the grader sends, and then answers requests until the grader ends this process."""
    lines.put("hello")
    source = json.loads(lines.get())
    try:
        code = compile(source, "response", "exec", dont_inherit=True)
    except BaseException:
        return lines.put("syntax error")
    lines.put("compiled")
    lines.get()  # waits until the grader asks to run the program
    random.seed(0)  # so that a program that uses random numbers gets the same verdict each time
    try:
        exec(code, namespace)
    except BaseException:  # the program may raise anything, SystemExit too, but must not end this process
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
