"""No circle of modules: each can be read, tested and moved without another that needs it."""

from __future__ import annotations

import grimp


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Strongly connected modules, two or more (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []
    for root in graph.modules:
        if root in index:
            continue
        work = [(root, iter(graph.find_modules_directly_imported_by(root)))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            module, imports = work[-1]
            for imported in imports:
                if imported not in index:
                    index[imported] = low[imported] = len(index)
                    stack.append(imported)
                    work.append((imported, iter(graph.find_modules_directly_imported_by(imported))))
                    break
                if imported in stack:
                    low[module] = min(low[module], index[imported])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[module])
                if low[module] == index[module]:
                    circle = stack[stack.index(module) :]
                    del stack[stack.index(module) :]
                    if len(circle) > 1:
                        found.append(sorted(circle))
    return found


def test_the_search_finds_a_circle() -> None:
    graph = grimp.ImportGraph()
    for name in "abcd":
        graph.add_module(name)
    for importer, imported in ("ab", "bc", "ca", "cd"):
        graph.add_import(importer=importer, imported=imported)
    assert circles(graph) == [["a", "b", "c"]]


def test_no_circle_of_modules() -> None:
    assert not circles(grimp.build_graph("diptych", cache_dir=None))
