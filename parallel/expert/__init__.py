"""Expert parallel: who computes which rows (`planner`), and how they get there (`dispatch`)."""
