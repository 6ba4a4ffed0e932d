"""JSON for golden files, with one core, GPU or rank per line, so that diffs are readable."""

from __future__ import annotations

import json


def compact(value: object, indent: str = "") -> str:
    """Write JSON with one line for each innermost object."""
    if isinstance(value, dict) and any(isinstance(item, list | dict) for item in value.values()) and len(indent) < 4:
        items = [f"{indent} {json.dumps(key)}: {compact(item, indent + ' ')}" for key, item in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + indent + "}" + ("\n" if not indent else "")
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"{indent} {compact(item, indent + ' ')}" for item in value) + f"\n{indent}]"
    return json.dumps(value)
