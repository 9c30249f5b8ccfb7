"""Pure choices: which record, config or library serves a problem."""
