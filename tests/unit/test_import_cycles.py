"""No module of the package imports itself, directly or through others, not even for its types."""

import grimp


def test_no_module_imports_itself_through_others():
    graph = grimp.build_graph("loraplex", exclude_type_checking_imports=False)
    cycles = []
    for module in sorted(graph.modules):
        for imported in graph.find_modules_directly_imported_by(module):
            chain = graph.find_shortest_chain(importer=imported, imported=module)
            if chain is not None:
                cycles.append(chain)
    assert cycles == []
