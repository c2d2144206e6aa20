"""How a lowered function is executed: the hand schedules and TVM's own design space."""
