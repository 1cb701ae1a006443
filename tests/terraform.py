"""A small Terraform: evaluates a module of one file and lists its resources in order of creation.

As much of the language as our modules are written in; what it does not know fails. The order is the
worst that their ``depends_on`` allow: bindings before queues, queues before exchanges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import hcl2
from lark import Token, Tree

#: Names to values, and among them what names refer to by a dot.
Scope = Mapping[str, Any]


@dataclass(frozen=True)
class Resource:
    """An instance of a resource; *values* has those of a nested block under its name."""

    type: str
    address: str
    values: dict[str, Any]


def resources(text: str, **variables: str) -> list[Resource]:
    """All that a module creates, in an order that Terraform might choose."""
    blocks = list(map(_Block, _parts(_parts(hcl2.parses_to_tree(f"{text}\n"))[0])))
    scope = _root(blocks, variables)
    waiting = {f"{b.labels[0]}.{b.labels[1]}": b for b in blocks if b.kind == "resource"}
    created: list[Resource] = []
    done: set[str] = set()
    while waiting:
        free = [name for name, block in waiting.items() if block.needs() <= done]
        name = min(free)  # alphabetically: bindings, exchanges, queues
        created += _instances(waiting.pop(name), scope)
        done.add(name)
    return created


def defaults(text: str) -> dict[str, str]:
    """The variables of a module with their defaults."""
    blocks = map(_Block, _parts(_parts(hcl2.parses_to_tree(f"{text}\n"))[0]))
    return {b.labels[0]: b.value("default", {}) for b in blocks if b.kind == "variable"}


class _Block:
    """A block of the file."""

    def __init__(self, tree: Tree[Token]) -> None:
        assert tree.data == "block", f"expected a block, got {tree.data}"
        kind, *labels, body = _parts(tree)
        self.kind = _word(kind)
        self.labels = [
            _word(each) if each.data == "identifier" else _value(each, {}) for each in labels
        ]
        self.attributes: dict[str, Tree[Token]] = {}
        self.blocks: dict[str, _Block] = {}
        for each in _parts(body):
            if each.data == "attribute":
                name, expression = _parts(each)
                self.attributes[_word(name)] = expression
            else:
                block = _Block(each)
                self.blocks[block.kind] = block

    def value(self, name: str, scope: Scope) -> Any:
        return _value(self.attributes[name], scope)

    def values(self, scope: Scope) -> dict[str, Any]:
        found = {name: _value(tree, scope) for name, tree in self.attributes.items()}
        return found | {name: block.values(scope) for name, block in self.blocks.items()}

    def needs(self) -> set[str]:
        """The resources that are to be there before."""
        named = self.attributes.pop("depends_on", None)
        if named is not None:
            self._needs = {".".join(_path(each)) for each in _parts(_inner(named))}
        return getattr(self, "_needs", set())


class _Locals(dict[str, Any]):
    """Local values, each evaluated when it is first asked for."""

    def __init__(self, trees: dict[str, Tree[Token]]) -> None:
        super().__init__()
        self._trees = trees
        self.scope: Scope = {}

    def __missing__(self, name: str) -> Any:
        value = self[name] = _value(self._trees[name], self.scope)
        return value


def _root(blocks: list[_Block], variables: dict[str, str]) -> Scope:
    known = {b.labels[0]: b.value("default", {}) for b in blocks if b.kind == "variable"}
    trees = [b.attributes for b in blocks if b.kind == "locals"]
    found = _Locals(dict(chain.from_iterable(map(dict.items, trees))))
    found.scope = {"var": known | variables, "local": found}
    return found.scope


def _instances(block: _Block, scope: Scope) -> Iterator[Resource]:
    kind, name = block.labels
    each_of = block.attributes.pop("for_each")
    found = _value(each_of, scope)
    pairs = found.items() if isinstance(found, dict) else ((key, key) for key in sorted(found))
    for key, value in pairs:
        assert isinstance(key, str), f"{kind}.{name}: expected a text as key, got {key!r}"
        values = block.values({**scope, "each": {"key": key, "value": value}})
        yield Resource(kind, f'{kind}.{name}["{key}"]', values)


# ---- expressions -------------------------------------------------------------------------------


def _parts(tree: Tree[Token]) -> list[Tree[Token]]:
    """The branches that mean something: no blank lines and comments."""
    found = (child for child in tree.children if isinstance(child, Tree))
    return [child for child in found if child.data != "new_line_or_comment"]


def _word(tree: Tree[Token]) -> str:
    (token,) = tree.children
    return str(token)


def _inner(tree: Tree[Token]) -> Tree[Token]:
    while tree.data == "expr_term":
        (tree,) = _parts(tree)
    return tree


def _path(tree: Tree[Token]) -> list[str]:
    tree = _inner(tree)
    if tree.data == "identifier":
        return [_word(tree)]
    base, attribute = _parts(tree)
    return [*_path(base), _word(_parts(attribute)[0])]


def _value(tree: Tree[Token], scope: Scope) -> Any:
    evaluate = partial(_value, scope=scope)
    parts = _parts(tree)
    match str(tree.data):
        case "expr_term":
            (inner,) = parts
            return evaluate(inner)
        case "int_lit":
            return int(_word(tree))
        case "string":
            return "".join(_text(part, scope) for part in parts)
        case "identifier":
            return scope[_word(tree)]
        case "literal_value":
            return json.loads(_word(tree))
        case "get_attr_expr_term":
            base, attribute = parts
            return evaluate(base)[_word(_parts(attribute)[0])]
        case "tuple":
            return [evaluate(part) for part in parts]
        case "object":
            return dict(_element(part, scope) for part in parts)
        case "conditional":
            condition, then, otherwise = parts
            return evaluate(then if evaluate(condition) else otherwise)
        case "binary_op":
            left, term = parts
            operator, right = _parts(term)
            return _OPERATORS[_word(operator)](evaluate(left), evaluate(right))
        case "function_call":
            return _call(parts, scope)
        case "for_tuple_expr":
            intro, element, *condition = parts
            return [_value(element, inner) for inner in _passes(intro, condition, scope)]
        case "for_object_expr":
            intro, key, element, *condition = parts
            pairs = [
                (_value(key, inner), _value(element, inner))
                for inner in _passes(intro, condition, scope)
            ]
            assert len(dict(pairs)) == len(pairs), "two elements of one key"
            return dict(pairs)
    raise AssertionError(f"this small Terraform does not know {tree.data}: {tree.pretty()}")


def _text(part: Tree[Token], scope: Scope) -> str:
    (child,) = part.children
    if isinstance(child, Tree):
        value = _value(_parts(child)[0], scope)
        assert isinstance(value, str | int), f"expected a text or number, got {value!r}"
        return str(value)
    text = str(child).replace("$${", "${").replace("%%{", "%{")
    unescaped = re.sub(r"\\U([0-9a-f]{8})", lambda found: chr(int(found[1], 16)), text)
    return str(json.loads(f'"{unescaped}"'))


def _element(tree: Tree[Token], scope: Scope) -> tuple[str, Any]:
    key, value = _parts(tree)
    name = _inner(_parts(key)[0])
    word = _word(name) if name.data == "identifier" else _value(name, scope)
    return word, _value(value, scope)


def _call(parts: list[Tree[Token]], scope: Scope) -> Any:
    name, *given = parts
    arguments = given[0] if given else Tree("arguments", [])
    values = [_value(each, scope) for each in _parts(arguments)]
    assert "..." not in arguments.children
    return _FUNCTIONS[_word(name)](*values)


def _passes(
    intro: Tree[Token], condition: list[Tree[Token]], scope: Scope
) -> Iterator[dict[str, Any]]:
    *names, collection = _parts(intro)
    (name,) = map(_word, names)
    found = _value(collection, scope)
    for value in found.values() if isinstance(found, dict) else found:
        inner = {**scope, name: value}
        if not condition or _value(_parts(condition[0])[0], inner):
            yield inner


def _format(pattern: str, *values: Any) -> str:
    left = list(values)

    def shown(found: re.Match[str]) -> str:
        value = left.pop(0)
        assert isinstance(value, str if found[2] == "s" else int)
        return format(value, found[1] + found[2])

    text = re.sub(r"%(0?\d*)([sbx])", shown, pattern)
    assert not left, "more values than verbs"
    return text


def _flatten(found: list[Any]) -> list[Any]:
    nested = [_flatten(each) if isinstance(each, list) else [each] for each in found]
    return list(chain.from_iterable(nested))


def _merge(*found: dict[str, Any]) -> dict[str, Any]:
    merged = dict(chain.from_iterable(map(dict.items, found)))
    assert len(merged) == sum(map(len, found)), "merged what has the same key"
    return merged


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda left, right: left + right,
    "-": lambda left, right: left - right,
    "*": lambda left, right: left * right,
    "<=": lambda left, right: left <= right,
}

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "concat": lambda *lists: list(chain.from_iterable(lists)),
    "flatten": _flatten,
    "format": _format,
    "join": lambda separator, words: separator.join(words),
    "jsonencode": json.dumps,
    "length": len,
    "merge": _merge,
    "pow": pow,
    "range": range,
    "slice": lambda found, start, end: found[start:end],
    "split": lambda separator, text: text.split(separator) if separator else list(text),
    "toset": set,
}
