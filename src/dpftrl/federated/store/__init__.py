"""Everything of a run that is on the disk: one owner, crash-safe."""
