"""The tree of errors in the module's docstring is the tree that Python has."""

import builtins
import re

from sidestream import errors

LINE = re.compile(r"^ {4}( *)(\w+Error)(?: \(([\w, ]+)\))?(?:\s|$)", re.MULTILINE)


def drawn_bases():
    """Give each drawn class's bases: the class it is indented under, then those in brackets."""
    above = {}
    bases = {}
    for indent, name, others in LINE.findall(errors.__doc__):
        depth = len(indent)
        above = {level: owner for level, owner in above.items() if level < depth}
        parent = [above[max(above)]] if above else []
        bases[name] = [*parent, *filter(None, re.split(r",\s*", others))]
        above[depth] = name
    return bases


def actual_bases():
    classes = [
        value
        for value in vars(errors).values()
        if isinstance(value, type)
        and issubclass(value, errors.SidestreamError)
        and value.__module__ == errors.__name__
    ]
    return {
        cls.__name__: [base.__name__ for base in cls.__bases__ if base is not Exception]
        for cls in classes
    }


def test_every_error_is_drawn_under_its_base():
    assert drawn_bases() == actual_bases()


def test_builtin_bases_are_builtins_or_of_concurrent_futures():
    known = {*vars(errors), *vars(builtins), "BrokenExecutor"}
    assert {base for bases in drawn_bases().values() for base in bases} <= known
