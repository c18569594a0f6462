"""JSON Schemas rewritten so that a compiler of grammars, which ignores much of what one may say, holds to all of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from inferc.runtime.grammar.schema.automata import TooLargeError
from inferc.runtime.grammar.schema.cases import Atom, Key
from inferc.runtime.grammar.schema.documents import Document, refuse
from inferc.runtime.grammar.schema.keywords import parts_of
from inferc.runtime.grammar.schema.reader import Reader
from inferc.runtime.grammar.schema.regex import ALL, Term
from inferc.runtime.grammar.schema.scalars import MARK, Form
from inferc.runtime.grammar.schema.shapes import Leaf, ListShape, Node, ObjectShape, Shape, node_of
from inferc.runtime.grammar.schema.spelling import spelled

MOST_DEFINITIONS = 5_000
MOST_COUNTED = 20_000  # of an object with a least or greatest number of properties, their number squared


def exact_schema(schema: Any, spell: Callable[[Term], str] = spelled) -> dict[str, Any]:
    """Return a schema that a library converts exactly, and that admits nothing that `schema` does not.

    It admits less in these ways. An object whose properties are named, or matched by patterns, has no others unless
    additionalProperties or unevaluatedProperties is said. Properties come in the schema's order, then those of
    patterns. Numbers between bounds have no exponent and up to six decimals. Texts that are counted beyond eight, or
    that have a format, have no escaped character; others are spelled one way each.

    spell: writes a pattern for the library, and raises TooLargeError; that for xgrammar writes JSON's spelling.

    Raises RequestError in one line, which begins with the place, for what cannot be held to, for a schema that is
    wrong or too large, and for one that admits nothing.
    """
    return Rewriter(schema, spell).schema()


class Rewriter:
    """The rewriting of one schema: the shapes of all that its values can have within them, and these as schemas."""

    def __init__(self, schema: Any, spell: Callable[[Term], str] = spelled) -> None:
        self.reader, self.spell = Reader(Document(schema), parts_of), spell
        self.nodes: dict[Key, Node] = {}
        self.names: dict[Key, str] = {}
        self.marks = 0

    def schema(self) -> Form:
        """Return the schema as xgrammar converts it."""
        root = self.root()
        return self.whole(self.form(root))

    def root(self) -> Key:
        """Make the nodes, and return the key of the whole schema, which admits something."""
        root: Key = (Atom(0),)
        self.collect(root)
        self.prune()
        if not self.nodes[root].shapes:
            node = self.nodes[root]
            seen = {root}
            while (inner := next((key for key in self.lacking(node) if key not in seen), None)) is not None:
                seen.add(inner)
                if false := next((atom for atom in inner if self.reader.is_false(atom)), None):
                    found = self.reader.document.schemas[false.schema].place
                    refuse(node.place, f"admits nothing: it requires what {found} rules out; allow some value")
                node = self.nodes[inner]
            refuse(node.place, f"admits nothing: {node.reason or 'it never ends'}; allow some value")
        return root

    def whole(self, top: Form) -> Form:
        """Return a form with the definitions that it refers to."""
        definitions: dict[str, Form] = {}
        while len(definitions) < len(self.names):
            for key in list(self.names)[len(definitions) :]:
                definitions[self.names[key]] = self.node_form(self.nodes[key])
        return {**top, "$defs": definitions} if definitions else top

    def of_shapes(self, node: Node, shapes: list[Shape]) -> Form:
        """Return the schema of some of a node's shapes, by itself."""
        self.names = {}
        return self.whole(self.node_form(Node(node.place, shapes)))

    def collect(self, root: Key) -> None:
        """Make the nodes of all keys that the root's values can have parts of."""
        todo = [root]
        while todo:
            key = todo.pop()
            if key in self.nodes:
                continue
            self.nodes[key] = node = node_of(self.reader, key, self.spell)
            if len(self.nodes) > MOST_DEFINITIONS:
                refuse(node.place, f"more than {MOST_DEFINITIONS} parts after rewriting; use fewer alternatives")
            for shape in node.shapes:
                todo += reversed(list(_parts(shape)))

    def prune(self) -> None:
        """Leave out what admits nothing: a shape whose needed parts do, parts that may be missing, and endless ones."""
        full: set[Key] = set()
        users: dict[Key, list[Key]] = {}
        for key, node in self.nodes.items():
            for shape in node.shapes:
                for part in _parts(shape):
                    users.setdefault(part, []).append(key)
        todo = list(self.nodes)
        while todo:
            key = todo.pop()
            if key not in full and any(_is_full(shape, full) for shape in self.nodes[key].shapes):
                full.add(key)
                todo += users.get(key, ())
        self.empty = {key: node.shapes for key, node in self.nodes.items() if key not in full}
        for node in self.nodes.values():
            node.shapes = [_pruned(shape, full) for shape in node.shapes if _is_full(shape, full)]

    def lacking(self, node: Node) -> Iterator[Key]:
        """Yield the keys for lack of which a node admits nothing, the nearest first."""
        shapes = next((self.empty[key] for key, each in self.nodes.items() if each is node and key in self.empty), [])
        for shape in shapes:
            for key in _needed(shape):
                if key in self.empty:
                    yield key

    # ------------------------------------------------------------------------------------------------- forms

    def form(self, key: Key) -> Form:
        """Return the schema of a key: itself if it is plain, else a reference to a definition."""
        shapes = self.nodes[key].shapes
        if len(shapes) == 1 and isinstance(shapes[0], Leaf):
            return shapes[0].form
        if key not in self.names:
            self.names[key] = f"n{len(self.names)}"
        return {"$ref": f"#/$defs/{self.names[key]}"}

    def node_form(self, node: Node) -> Form:
        forms: dict[str, Form] = {}
        for shape in node.shapes:
            form = self.shape_form(shape)
            forms.setdefault(json.dumps(form), form)
        for form in forms.values():
            if form.get("type") == "object" and MARK not in form:
                self.marks += 1
                form[MARK] = self.marks
        return {"anyOf": list(forms.values())} if len(forms) > 1 else next(iter(forms.values()))

    def shape_form(self, shape: Shape) -> Form:
        if isinstance(shape, Leaf):
            return shape.form
        return self.list_form(shape) if isinstance(shape, ListShape) else self.object_form(shape)

    def list_form(self, shape: ListShape) -> Form:
        form: Form = {"type": "array"}
        if shape.prefix:
            form["prefixItems"] = [self.form(key) for key in shape.prefix]
        is_longer = shape.rest is not None and (shape.most is None or shape.most > len(shape.prefix))
        form["items"] = self.form(shape.rest) if is_longer and shape.rest is not None else False
        if shape.least:
            form["minItems"] = shape.least
        if is_longer and shape.most is not None:
            form["maxItems"] = shape.most
        return form

    def object_form(self, shape: ObjectShape) -> Form:
        form: Form = {"type": "object", "properties": {name: self.form(key) for name, key in shape.names.items()}}
        form["required"] = [name for name in shape.names if name in shape.required]
        form["additionalProperties"] = False
        others = shape.others
        if shape.least > max(1, len(shape.required)) and others:
            if shape.least > len(shape.names):
                words = f"{shape.least} properties that differ are not built where names are free"
                refuse(
                    shape.least_place,
                    f"{words}; name them with properties, or leave minProperties out",
                )
            others = []
        if len(others) == 1 and others[0][0] == ALL and not shape.names:
            form["additionalProperties"] = self.form(others[0][1])
        elif others:
            form["patternProperties"] = {self.name_pattern(shape, term): self.form(key) for term, key in others}
        if shape.least > len(shape.required):
            form["minProperties"] = shape.least
        if shape.most is not None and (others or shape.most < len(shape.names)):
            form["maxProperties"] = shape.most
        if ("minProperties" in form or "maxProperties" in form) and len(shape.names) ** 2 > MOST_COUNTED:
            refuse(
                shape.place, f"{len(shape.names)} properties cannot be counted; leave out minProperties, maxProperties"
            )
        return form

    def name_pattern(self, shape: ObjectShape, term: Term) -> str:
        try:
            return self.spell(term)
        except TooLargeError:
            hint = "make the patterns simpler, or set additionalProperties to false"
            refuse(shape.place, f"the names of other properties are too long written out; {hint}")


def _parts(shape: Shape) -> Iterator[Key]:
    if isinstance(shape, ListShape):
        yield from shape.prefix
        if shape.rest is not None:
            yield shape.rest
    elif isinstance(shape, ObjectShape):
        yield from shape.names.values()
        for _, key in shape.others:
            yield key


def _needed(shape: Shape) -> Iterator[Key]:
    """Yield the keys of the parts that every value of a shape has."""
    if isinstance(shape, ListShape):
        yield from shape.prefix[: shape.least]
        if shape.least > len(shape.prefix) and shape.rest is not None:
            yield shape.rest
    elif isinstance(shape, ObjectShape):
        for name, key in shape.names.items():
            if name in shape.required:
                yield key


def _is_full(shape: Shape, full: set[Key]) -> bool:
    """Return whether a shape admits something, if these keys do."""
    if not all(key in full for key in _needed(shape)):
        return False
    if isinstance(shape, ObjectShape):
        are_others = any(key in full for _, key in shape.others)
        return are_others or shape.least <= sum(key in full for key in shape.names.values())
    return not isinstance(shape, ListShape) or shape.rest is not None or shape.least <= len(shape.prefix)


def _pruned(shape: Shape, full: set[Key]) -> Shape:
    if isinstance(shape, ListShape):
        size = next((index for index, key in enumerate(shape.prefix) if key not in full), len(shape.prefix))
        rest = shape.rest if size == len(shape.prefix) and shape.rest in full else None
        size = size if shape.most is None else min(size, shape.most)
        return ListShape(
            shape.prefix[:size], rest if shape.most is None or size < shape.most else None, shape.least, shape.most
        )
    if isinstance(shape, ObjectShape):
        names = {name: key for name, key in shape.names.items() if key in full}
        others = [(term, key) for term, key in shape.others if key in full]
        return ObjectShape(names, shape.required, others, shape.least, shape.most, shape.place, shape.least_place)
    return shape
