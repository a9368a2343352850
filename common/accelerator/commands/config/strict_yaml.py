"""YAML as the launcher reads it: plain values only, and no key twice.

It imports PyYAML, so it is itself imported where a file is read, not before.
"""

import yaml


class UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML's safe loader, which lets the last of two equal keys win in silence; here the second one is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """The mapping that `node` describes. Raises ConstructorError at the second of two equal keys."""
        first_lines: dict[tuple[str, str], int] = {}
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue  # no key of the launcher's; the reader of the mapping refuses it by name
            key = (key_node.tag, key_node.value)
            if key in first_lines:
                problem = f"the key {key_node.value!r} stands there twice, the first time in line {first_lines[key]}"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            first_lines[key] = key_node.start_mark.line + 1
        return super().construct_mapping(node, deep)
