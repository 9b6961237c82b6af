"""Finds the variables that a chat template uses from outside.

`jinja2.meta.find_undeclared_variables` counts a name that every branch sets before it is read, such
as Llama 3's `system_message`: a value given from outside would have no effect.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import Environment, meta, nodes

_Names = frozenset[str]


def variables(environment: Environment, template: str) -> _Names:
    """Names that a template reads before it sets them; raises `TemplateError`."""
    tree = environment.parse(template)
    found: set[str] = set()
    _visit(tree, frozenset(), found)
    return frozenset(found & meta.find_undeclared_variables(tree))


def _visit(node: nodes.Node, known: _Names, found: set[str]) -> _Names:
    """Add the names that a node uses and that are not `known`; return names known after it."""
    if isinstance(node, nodes.Name):
        if node.ctx == "load" and node.name not in known:
            found.add(node.name)
        return known | {node.name} if node.ctx in ("store", "param") else known
    if isinstance(node, (nodes.Assign, nodes.AssignBlock)):
        values = node.iter_child_nodes(exclude=("target",))
        after = _visit_all(values, known, found)
        return _visit(node.target, after if isinstance(node, nodes.Assign) else known, found)
    if isinstance(node, (nodes.If, nodes.CondExpr)):
        return _visit_branches(node, known, found)
    if isinstance(node, nodes.For):
        _visit(node.iter, known, found)
        inner = _visit(node.target, known, found) | {"loop"}
        _visit_all([node.test] if node.test else [], inner, found)
        _visit_all(node.body, inner, found)
        _visit_all(node.else_, known, found)
        return known
    if isinstance(node, nodes.Macro):
        _visit_all(node.defaults, known, found)
        inner = _visit_all(node.args, known, found) | {node.name, "caller", "varargs", "kwargs"}
        _visit_all(node.body, inner, found)
        return known | {node.name}
    if isinstance(node, nodes.With):
        _visit_all(node.values, known, found)
        _visit_all([*node.targets, *node.body], known, found)
        return known
    after = _visit_all(node.iter_child_nodes(), known, found)
    return known if isinstance(node, _SCOPES) else after


# Names set inside of these are unknown outside.
_SCOPES = (nodes.CallBlock, nodes.FilterBlock, nodes.Scope, nodes.Block)


def _visit_all(found_nodes: Iterable[nodes.Node], known: _Names, found: set[str]) -> _Names:
    for each in found_nodes:
        known = _visit(each, known, found)
    return known


def _visit_branches(node: nodes.If | nodes.CondExpr, known: _Names, found: set[str]) -> _Names:
    """Names set only in some branches are unknown after them."""
    _visit(node.test, known, found)
    if isinstance(node, nodes.CondExpr):
        _visit_all([one for one in (node.expr1, node.expr2) if one is not None], known, found)
        return known
    if node.elif_:
        first, *others = node.elif_
        chained = nodes.If(first.test, first.body, others, node.else_)
        return _visit_all(node.body, known, found) & _visit_branches(chained, known, found)
    return _visit_all(node.body, known, found) & _visit_all(node.else_, known, found)
