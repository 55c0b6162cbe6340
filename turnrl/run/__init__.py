"""The traces of a run: its folder, its record, its metrics and its lines on the console."""
