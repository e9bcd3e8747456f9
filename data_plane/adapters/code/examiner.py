# Runs a problem's tests, calls the program (candidate.py) for them and compares the results. It never shares a process
# or sandbox with the program and receives only data from it. So the program cannot pass a test by printing, or by
# changing its own interpreter.
import ast
import builtins
import json
import os
import random

from values import Lines, NotTransferable, decode, encode

lines = Lines(0, os.dup(1))
os.dup2(2, 1)  # keeps the tests' own output out of the protocol


class ProgramEnded(BaseException):
    """The program ended, or took too long."""


class ProgramError(Exception):
    """The program raised an error that Python itself does not have."""


class ProgramObject:
    """A reference to an object in the program's process. Its contents can be read. Comparing it for equality is
    refused, because the program would decide the result."""

    def __init__(self, reference):
        object.__setattr__(self, "_reference", reference)

    def __call__(self, *args, **named):
        return ask("call", self, *args, **named)

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return ask("get", self, name)

    def __setattr__(self, name, value):
        ask("set", self, name, value)

    def __iter__(self):
        return ProgramObject(ask_raw("iter", self)["value"])

    def __next__(self):
        return ask("next", self)

    def __len__(self):
        return ask("len", self)

    def __bool__(self):
        return bool(ask("bool", self))

    def __str__(self):
        return str(ask("str", self))

    def __repr__(self):
        return str(ask("repr", self))

    def __getitem__(self, key):
        return ask("item", self, key)

    def __setitem__(self, key, value):
        ask("set_item", self, key, value)

    def __contains__(self, value):
        return bool(ask("contains", self, value))


def refuse_object(value):
    """For encode(): an object of the tests cannot be sent by reference."""
    raise NotTransferable("tests hand over data and what the program gave them, not " + type(value).__name__)


def encode_argument(value):
    if isinstance(value, ProgramObject):
        return object.__getattribute__(value, "_reference")
    if type(value) is list:
        return [encode_argument(each) for each in value]
    if type(value) is tuple:
        return {"tuple": [encode_argument(each) for each in value]}
    if type(value) is dict:
        return {"dict": [[encode_argument(k), encode_argument(v)] for k, v in value.items()]}
    return encode(value, refuse_object)


def resolve(kind, key):
    """Returns the reference to the program's object with this number."""
    if kind == "object" and type(key) is int:
        return ProgramObject({kind: key})
    raise ValueError("not a value: " + kind)


def exception(names, text):
    """Returns an exception like the program's. `names`: its class and base classes, the most derived first."""
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            return kind(text)
    return ProgramError(text)


def ask_raw(do, *args, **named):
    """Has the program execute an operation. Returns its answer undecoded, or raises the program's exception."""
    request = {"do": do, "args": [encode_argument(each) for each in args],
               "named": {name: encode_argument(value) for name, value in named.items()}}
    lines.put("C" + json.dumps(request))
    line = lines.get()
    if line[:1] != "R":
        raise ProgramEnded()
    answer = json.loads(line[1:])
    for place, value in answer.get("changed", {}).items():
        copy_content(args[int(place)], decode(value, resolve))
    if "raised" in answer:
        raise exception(answer["raised"], answer["text"])
    return answer


def ask(do, *args, **named):
    """Like ask_raw(), but returns the operation's result."""
    return decode(ask_raw(do, *args, **named)["value"], resolve)


def copy_content(target, source):
    """Gives an argument of a test the content that the program has left in its copy."""
    if type(target) is list and type(source) is list or type(target) is bytearray and type(source) is bytearray:
        target[:] = source
    elif type(target) in (dict, set) and type(source) is type(target):
        target.clear()
        target.update(source)


def names_bound(tree):
    """Names that top-level statements define, and names that they import."""
    defined, imported = set(), set()
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            defined.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            imported.update((each.asname or each.name).split(".")[0] for each in statement.names)
        else:
            names = (node for node in ast.walk(statement) if isinstance(node, ast.Name))
            defined.update(node.id for node in names if isinstance(node.ctx, ast.Store))
    return defined, imported


def names_read(tree):
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def run_imports(tree, namespace):
    for statement in tree.body:
        if isinstance(statement, (ast.Import, ast.ImportFrom)):
            try:
                exec(compile(ast.Module([statement], []), "imports", "exec"), namespace)
            except Exception:
                pass  # the library is not installed here; a test that needs it fails


def is_check(statement):
    """Whether a statement tests something. A definition does not, because calls of it are separate statements; nor does
    `assert True`."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return False
    return any(isinstance(node, ast.Assert) and not isinstance(node.test, ast.Constant)
               for node in ast.walk(statement))


def is_constant_assertion(statement):
    return isinstance(statement, ast.Assert) and isinstance(statement.test, ast.Constant)


def tests_of_function(task):
    """HumanEval: the assertions of check(candidate), each with the statements before it."""
    tree = ast.parse(task["test"])
    check = next(each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name == "check")
    preparation, bodies = [], []
    for statement in check.body:
        if is_check(statement):
            bodies.append(preparation + [statement])
        elif not is_constant_assertion(statement):
            preparation = preparation + [statement]
    check_body = check.body
    for body in bodies or [check_body]:  # without any assertion, the whole function is one test
        check.body = body
        yield compile(tree, "test", "exec")


def run_function(task, code):
    namespace = {"__name__": "test"}
    exec(task["prompt"], namespace)  # its helper functions, which the tests may use
    exec(code, namespace)
    namespace[task["entry_point"]] = function = ProgramObject({"name": task["entry_point"]})
    namespace["check"](function)


def tests_of_list(task):
    """MBPP: each entry of the list is a test."""
    for test in task["tests"]:
        yield compile(test, "test", "exec")


def run_listed(task, code):
    setup = ast.parse("\n".join(task["imports"]) + "\n" + task["setup"])
    reference = ast.parse(task["code"])
    defined, imported = names_bound(reference)
    defined_by_setup, imported_by_setup = names_bound(setup)
    read = names_read(setup) | {name for test in task["tests"] for name in names_read(ast.parse(test))}
    namespace = {"__name__": "test"}
    run_imports(reference, namespace)
    for name in read:
        # The program supplies the names that the reference solution defines, or that nothing else defines.
        is_defined_elsewhere = (name in imported or hasattr(builtins, name) or name in defined_by_setup
                                or name in imported_by_setup)
        if name in defined or not is_defined_elsewhere:
            namespace[name] = ProgramObject({"name": name})
    exec(compile(setup, "setup", "exec"), namespace)
    exec(code, namespace)


def examine(task):
    """Runs the tests of a problem, from number `first` on, and reports each verdict (grader.cpp has the messages)."""
    tests_of, run = (tests_of_function, run_function) if "entry_point" in task else (tests_of_list, run_listed)
    try:
        tests = list(tests_of(task))
    except Exception as error:
        return lines.put("X" + json.dumps("%s: %s" % (type(error).__name__, error)))
    lines.put("N%d" % len(tests))
    for number in range(task["first"], len(tests)):
        lines.put("B%d" % number)
        lines.get()  # waits until the grader has a program ready
        random.seed(0)  # so that a test that uses random numbers gives the same verdict each time
        try:
            run(task, tests[number])
            passed = True
        except (Exception, ProgramEnded, SystemExit, KeyboardInterrupt):
            passed = False
        lines.put("V%d" % passed)
    lines.put("E")


lines.put("hello")
while True:
    task = json.loads(lines.get())
    child = os.fork()  # a child process, so that tests cannot change this interpreter for later ones
    if child == 0:
        examine(task)
        os._exit(0)
    os.waitpid(child, 0)
    lines.put("done")
