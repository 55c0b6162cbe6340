"""The traces of a run: its folder, its metrics and its lines on the console."""
