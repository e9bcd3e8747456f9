# The messages between candidate.py, which runs a response's program, and examiner.py, which runs the tests: one JSON
# value per line. Plain data is sent by value, any other object as a number that refers to it. Decoding creates new
# objects of built-in types only, so no code is transferred.
import json
import os
import sys

TYPES = {kind.__name__: kind
         for kind in (bool, bytes, complex, dict, float, frozenset, int, list, object, range, set, str, tuple)}
EXACT_MAX = 1 << 53  # integers up to here are JSON numbers; larger ones are hexadecimal, which has no limit of digits


class NotTransferable(TypeError):
    """The value can be sent neither as data nor by reference."""


def is_instance_of(value, name):
    """Whether value is an object of the class with this name, such as "decimal.Decimal". Does not import its module: an
    object can exist only if the module is loaded."""
    module, _, attribute = name.partition(".")
    kind = getattr(sys.modules.get(module), attribute, None)
    return isinstance(kind, type) and isinstance(value, kind)


def encode(value, refer):
    """Returns the value as JSON can represent it. refer(object) returns the number that refers to an object."""
    if value is None or value is True or value is False:
        return value
    # Here and below: methods of the built-in classes, because the value's own class may replace them.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int.__add__(value, 0)
        return value if -EXACT_MAX <= value <= EXACT_MAX else {"int": hex(value)}
    if isinstance(value, float):
        return float.__add__(value, 0.0)
    if isinstance(value, list):
        return [encode(each, refer) for each in value]
    if isinstance(value, dict):
        # A list of pairs, because a key of a JSON object must be a text.
        return {"dict": [[encode(k, refer), encode(v, refer)] for k, v in value.items()]}
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(each, refer) for each in value]}
    for kind in (bytes, bytearray):
        if isinstance(value, kind):
            return {kind.__name__: value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if type(value) is range:
        return {"range": [encode(each, refer) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, type) and TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    if is_instance_of(value, "decimal.Decimal"):
        return {"decimal": str(value)}
    if is_instance_of(value, "fractions.Fraction"):
        return {"fraction": [hex(value.numerator), hex(value.denominator)]}
    if is_instance_of(value, "datetime.datetime"):
        return {"datetime": value.isoformat()}
    if is_instance_of(value, "datetime.date"):
        return {"date": value.isoformat()}
    if is_instance_of(value, "datetime.timedelta"):
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    return {"object": refer(value)}


def decode(value, resolve):
    """Reverses encode(). resolve(kind, key) returns the object that a reference stands for."""
    if isinstance(value, list):
        return [decode(each, resolve) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, content), = value.items()
    if kind == "int":
        return int(content, 16)
    if kind == "dict":
        return {decode(k, resolve): decode(v, resolve) for k, v in content}
    if kind in ("tuple", "set", "frozenset"):
        return TYPES[kind](decode(each, resolve) for each in content)
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "bytearray":
        return bytearray.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "range":
        return range(*(decode(each, resolve) for each in content))
    if kind == "type":
        return TYPES[content]
    if kind == "decimal":
        import decimal
        return decimal.Decimal(content)
    if kind == "fraction":
        import fractions
        return fractions.Fraction(int(content[0], 16), int(content[1], 16))
    if kind in ("datetime", "date", "timedelta"):
        import datetime
        date_class = getattr(datetime, kind)
        return date_class(*content) if kind == "timedelta" else date_class.fromisoformat(content)
    return resolve(kind, content)


class Lines:
    """Reads lines from one descriptor and writes lines to another."""

    def __init__(self, read_fd, write_fd):
        self.read_fd, self.write_fd, self.unread = read_fd, write_fd, b""

    def get(self):
        parts = [self.unread]
        while b"\n" not in parts[-1]:
            parts.append(os.read(self.read_fd, 1 << 16))
            if not parts[-1]:
                os._exit(0)  # the other process has ended
        line, self.unread = b"".join(parts).split(b"\n", 1)
        return line.decode("utf-8", "surrogatepass")

    def put(self, text):
        data = memoryview(text.encode("ascii") + b"\n")
        while data:
            data = data[os.write(self.write_fd, data):]
