"""From YAML to a module, its data and a trainer."""
