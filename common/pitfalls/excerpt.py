"""One version of a pitfall: its code and what that needs of the module.

An import that only the detector uses would look like a part of the mistake.
"""

import ast

from common.pitfalls import source


def excerpt(name: str, version: str, but_for: str | None = None) -> str:
    """The source of `wrong` or `right` with the definitions that it needs.

    Args:
        but_for: the other version, which has been shown before: what both need
            is left out.
    """
    tree = ast.parse(source(name))
    needed = _needed(tree, version)
    if but_for:
        needed -= _needed(tree, but_for)
    lines = source(name).splitlines()
    imports = []
    constants = []
    functions = []
    for statement in tree.body:
        defined = _defined(statement)
        if not needed.intersection(defined):
            continue
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(each.lineno for each in decorators)])
        text = "\n".join(lines[first - 1 : statement.end_lineno])
        if isinstance(statement, ast.Import | ast.ImportFrom):
            names = [each for each in statement.names if _bound(each) in needed]
            if len(names) < len(statement.names):
                statement.names = names
                text = ast.unparse(statement)
            imports.append(text)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            functions.append(text)
        else:
            constants.append(text)
    heads = ["\n".join(imports), "\n".join(constants)]
    head = "\n\n".join(block for block in heads if block)
    return "\n\n\n".join([head, *functions] if head else functions)


def _needed(tree: ast.Module, version: str) -> set[str]:
    """The module's names that a function uses, and the names that these use."""
    definitions = {}
    for statement in tree.body:
        for name in _defined(statement):
            definitions[name] = statement
    needed: set[str] = set()
    to_do = [version]
    while to_do:
        name = to_do.pop()
        if name in needed or name not in definitions:
            continue
        needed.add(name)
        for node in ast.walk(definitions[name]):
            if isinstance(node, ast.Name):
                to_do.append(node.id)
    return needed


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [_bound(alias) for alias in statement.names]
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found


def _bound(alias: ast.alias) -> str:
    return alias.asname or alias.name.partition(".")[0]
