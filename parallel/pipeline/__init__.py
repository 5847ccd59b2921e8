"""Pipeline parallel: which layers stand where, who sends what, in what order, and the runtime that does it."""
