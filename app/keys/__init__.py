"""Key bindings: their tables, the choice for the footer and the help, the command palette."""
